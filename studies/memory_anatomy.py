"""How far is a round's step from the step of all clients? Measured, where all can be asked.

On one run of `aligned` with FedRecall, every few rounds, all clients train from the same model.
Then each way to choose a group, with each way to make a step of its updates, is compared with the
true mean:

    error     |d - D|^2 / |D|^2
    cosine    of d and D
    length    |d| / |D|

where D = sum_i p_i u_i over all clients, and d is the estimate. Measuring does not change the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fedcor.core.rng import stream
from fedcor.core.types import FloatArray, IntArray
from fedcor.optimisers.memory import recall
from fedcor.selectors.matching import match
from fedcor.selectors.matching_blocks import Criterion
from fedcor.simulation.build import build_simulation, one_thread
from fedcor.simulation.loop import Simulation
from fedcor.simulation.state import SimulationState
from studies.memory_scenarios import DIGITS, FMNIST, OURS, TABLES
from studies.plan import Plan
from studies.runs import build_experiment
from studies.scaffold import Result, Runs, Scenario, Study
from studies.tables import markdown

_TIMES = 9  # measured rounds per run
_DRAWS = 10  # random groups per measured round
_STEPS = ("mean of the group", "FedVARP's", "gain .3", "memory alone")


def _evaluate(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Tables for three scenarios: one of the digits, one generated, one of the paper's."""
    fast = [DIGITS[2], TABLES[0]]
    scenarios = fast if plan.dataset == "digits" else [*fast, FMNIST[0]]
    experiments = [build_experiment(plan, scenario, OURS) for scenario in scenarios]
    numbers, tables = {}, []
    with plan.progress("rounds", sum(e.rounds for e in experiments)) as update, one_thread():
        done = 0
        for scenario, experiment in zip(scenarios, experiments, strict=True):
            measured: dict[str, dict[str, list[FloatArray]]] = {}
            simulation = build_simulation(experiment, plan.seeds[0])
            every = max(experiment.rounds // (_TIMES + 1), 1)
            for _, state in simulation.run(experiment.rounds):
                done += 1
                update(done, scenario.title)
                if state.round % every == 0 and (state.optimiser["seen"] >= 0).all():
                    for group, step, values in estimates(simulation, state):
                        measured.setdefault(group, {}).setdefault(step, []).append(values)
            means = {
                group: {step: np.mean(values, axis=0) for step, values in by_step.items()}
                for group, by_step in measured.items()
            }
            numbers[scenario.name] = {
                group: {step: value.round(4).tolist() for step, value in by_step.items()}
                for group, by_step in means.items()
            }
            tables.append(_table(plan, scenario, means))
    yield Result({"values": ["error", "cosine", "length"], **numbers}, tables)


STUDY = Study(_evaluate)


def _table(plan: Plan, scenario: Scenario, means: Mapping[str, Mapping[str, FloatArray]]) -> str:
    rows = [
        [
            group,
            *("{:.2f}, {:.2f}, {:.2f}".format(*by[step]) if step in by else "" for step in _STEPS),
        ]
        for group, by in means.items()
    ]
    title = f"{scenario.title}, seed {plan.seeds[0]}: error, cosine, length"
    return markdown(title, ["group", *_STEPS], rows)


def estimates(
    simulation: Simulation, state: SimulationState
) -> Iterator[tuple[str, str, FloatArray]]:
    """Every group and step: error, cosine and length against everyone's true mean."""
    engine, weights = simulation.engine, simulation.engine.population.weights
    everyone = np.arange(len(weights))
    rate, steps = simulation.learning_rate.at(state.round), engine.local_training.local_steps
    results = engine.train(
        state.model, everyone.tolist(), state.round, rate, steps=[steps] * len(everyone)
    )
    fresh = (results - state.model).cpu().numpy().astype(np.float64) / (rate * steps)  # (N, P) u_k
    last = recall(state.optimiser, everyone)[0].astype(np.float64)  # (N, P) y_k
    true, remembered = weights @ fresh, weights @ last

    def values(estimate: FloatArray) -> FloatArray:
        length, full = np.linalg.norm(estimate), np.linalg.norm(true)
        error = float(np.sum((estimate - true) ** 2)) / full**2
        return np.array([error, estimate @ true / (length * full), length / full])

    for name, group in _groups(simulation, state, last):
        news = fresh[group].mean(axis=0) - last[group].mean(axis=0)
        yield name, _STEPS[0], values(fresh[group].mean(axis=0))
        yield name, _STEPS[1], values(remembered + news)
        yield name, _STEPS[2], values(remembered + 0.3 * news)
    yield "nobody", _STEPS[3], values(remembered)


def _groups(
    simulation: Simulation, state: SimulationState, last: FloatArray
) -> Iterator[tuple[str, IntArray]]:
    """Groups of C clients: at random, in turn, by distance, by direction."""
    weights = simulation.engine.population.weights
    count = simulation.selector.clients_per_round  # type: ignore[attr-defined]
    rng = stream(simulation.seed, "anatomy", state.round)
    for _ in range(_DRAWS):
        yield "random", rng.choice(len(weights), count, replace=False)
    oldest = np.argsort(state.selector["asked"], kind="stable")
    yield "in turn", oldest[:count]
    heads = last[:, simulation.engine.vector.head]
    criteria: tuple[Criterion, ...] = ("distance", "direction")
    for by in criteria:
        yield f"by {by}", match(heads, weights @ heads, oldest[:1], count, swaps=20, criterion=by)
