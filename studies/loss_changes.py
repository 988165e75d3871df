"""The loss changes of many random selections at once: the paper measures a thousand per round.

A selection's candidate model is the mean of its clients' trained models, so every client trains
only once. For a model of dense layers, the first layer of a candidate, applied to the data, is the
mean of its clients' first layers applied to the data.

Notation
    W_k, b_k  first layer of client k's trained model   (h, in), (h,)
    H_k       X W_k' + b_k, for rows X of the data      (rows, h)
    S         selections                                (m, C)
    H(S)      mean of H_k over k in S                   (rows, h)

So the large product with the data is computed once per client and not once per selection; a
selection costs C additions and its small later layers. Any other model is evaluated candidate by
candidate.

A `Measurement` follows a run of random selection, and keeps the loss changes of some of its rounds
in files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcor.core.files import save_arrays
from fedcor.core.rng import stream
from fedcor.core.types import FloatArray, IntArray
from fedcor.runs.cluster.address import CLUSTERS
from fedcor.runs.processes import for_each, map_each
from fedcor.runs.progress import refresh
from fedcor.selectors.base import uniform
from fedcor.simulation.build import build_simulation, use_one_thread
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.stacked import dense_stack
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.loop import Simulation
from fedcor.simulation.state import SimulationState
from studies.plan import Plan

# Rows of data at a time: few enough that H_k of all clients stays in the processor's cache.
_ROWS = 64


def loss_changes(
    engine: Engine,
    model: Tensor,
    round: int,
    learning_rate: float,
    selections: IntArray,
    on_progress: Callable[[int], None] | None = None,
) -> FloatArray:
    """The change of every client's loss for each of many selections.

    Args:
        engine: Holds the clients' data and trains them.
        model: `(P,)` the flat model from which the selections train, w^t.
        round: The round whose random streams the training uses.
        learning_rate: Of the local training in this round.
        selections: `(m, C)` ids of the clients of each selection.
        on_progress: Called with the number of selections done, where they are evaluated one by one.

    Returns:
        `(m, N)` loss of each client under each selection's candidate, less its loss under `model`.
    """
    clients = np.arange(engine.population.count)
    results = engine.train(model, clients.tolist(), round, learning_rate)  # (N, P)
    before = engine.losses(model, clients)
    layers = dense_stack(engine.module)
    if engine.trains_stacked and layers is not None and len(layers) > 1:
        return _candidate_losses(engine, results, selections) - before
    after = []
    for selection in selections:
        after.append(engine.losses(results[selection].mean(dim=0), clients))
        if on_progress is not None:
            on_progress(len(after))
    return np.array(after) - before


@torch.inference_mode()
def _candidate_losses(engine: Engine, results: Tensor, selections: IntArray) -> FloatArray:
    """(m, N) every client's loss under each candidate, for a model of dense layers."""
    S = torch.from_numpy(selections).to(results.device)  # (m, C)
    first, bias, *rest = engine.vector.split(results)  # (N, h, in), (N, h)
    W = first.reshape(-1, first.shape[-1])  # (N h, in)
    # The later layers are small: their mean is taken per candidate.
    later = [F.embedding_bag(S, part.reshape(len(part), -1), mode="mean") for part in rest]
    shapes = [part.shape[1:] for part in rest]
    layers = [
        (w.view(len(S), *shape), b.unsqueeze(-1))  # (m, out, in), (m, out, 1)
        for w, b, shape in zip(later[0::2], later[1::2], shapes[0::2], strict=True)
    ]
    sums = torch.zeros(len(S), engine.population.count, dtype=torch.float64, device=results.device)
    counts = np.zeros(engine.population.count)
    for client, x, y in engine.measured_rows(_ROWS):
        assert isinstance(x, Tensor), "dense layers take a tensor"
        H = torch.addmm(bias.reshape(-1, 1), W, x.flatten(1).T).view(len(first), -1)  # (N, h rows)
        # (m, h, rows)
        a = F.embedding_bag(S, H, mode="mean").view(len(S), first.shape[1], len(x)).relu_()
        for i, (w, b) in enumerate(layers):
            a = torch.baddbmm(b, w, a)  # (m, out, rows)
            if i < len(layers) - 1:
                a.relu_()
        right = a.gather(1, y.expand(len(S), 1, len(y))).squeeze(1)
        sums[:, client] += (torch.logsumexp(a, dim=1) - right).sum(dim=1, dtype=torch.float64)
        counts[client] += len(x)
    means: FloatArray = sums.cpu().numpy() / counts
    return means


@dataclass(frozen=True)
class Measurement:
    """What is measured in one run.

    Attributes:
        experiment: The experiment; its run of random selection is followed.
        seed: Seed of the run.
        rounds: Rounds in which to measure.
        selections: Random selections per measured round.
        folder: Folder of the files, one per measured round.
    """

    experiment: Experiment
    seed: int
    rounds: Sequence[int]
    selections: int
    folder: Path

    def file(self, round: int) -> Path:
        """Where the loss changes of a round are kept."""
        return self.folder / f"round-{round}.npz"

    def read(self, round: int) -> FloatArray:
        """(selections, N) the loss changes of a round."""
        with np.load(self.file(round), allow_pickle=False) as archive:
            changes: FloatArray = archive["changes"]
        return changes

    def save(self, round: int, changes: FloatArray) -> None:
        """Keep the loss changes of a round."""
        save_arrays(self.file(round), {"changes": changes})

    @property
    def complete(self) -> bool:
        """Whether every round has been measured."""
        return all(self.file(round).exists() for round in self.rounds)


def plan_measurement(
    plan: Plan, what: str, experiment: Experiment, rounds: Sequence[int]
) -> Measurement:
    """The measurement of the study `what`, on the plan's first seed."""
    seed = plan.seeds[0]
    folder = plan.out / "measured" / f"{what}-{plan.selections}"
    return Measurement(
        experiment, seed, rounds, plan.selections, folder / f"{experiment.name}-seed-{seed}"
    )


def measure(plan: Plan, measurements: Sequence[Measurement]) -> None:
    """Take the measurements that are not complete yet, each in a process of its own."""
    files = [m.file(round) for m in measurements for round in m.rounds]
    missing = [m for m in measurements if not m.complete]
    with (
        plan.progress("rounds measured", len(files)) as update,
        refresh(lambda: update(sum(file.exists() for file in files), "")),
    ):
        if plan.backend in CLUSTERS:
            away = map_each(_measure_away, missing, plan.processes, plan.backend, plan.address)
            for measurement, found in away:
                for round, changes in found.items():
                    measurement.save(round, changes)
        else:
            for _ in for_each(_measure_run, missing, plan.processes):
                pass


def _measure_run(measurement: Measurement) -> None:
    """Measure in the rounds that are missing."""
    missing = [round for round in measurement.rounds if not measurement.file(round).exists()]
    for round, changes in _measure(measurement, missing):
        measurement.save(round, changes)


def _measure_away(measurement: Measurement) -> dict[int, FloatArray]:
    """Measure in every round, on a machine that has no files of it."""
    return dict(_measure(measurement, measurement.rounds))


def _measure(measurement: Measurement, rounds: Sequence[int]) -> Iterator[tuple[int, FloatArray]]:
    """Follow a run of random selection, and measure in some rounds."""
    use_one_thread()
    experiment, seed = measurement.experiment, measurement.seed
    simulation = build_simulation(dataclasses.replace(experiment, selector="random"), seed)
    state = simulation.start
    for round in rounds:
        state = advance(simulation, round, state)
        selections = _random_selections(measurement, round, simulation.engine.population.count)
        rate = simulation.learning_rate.at(round)
        yield round, loss_changes(simulation.engine, state.model, round, rate, selections)


def advance(
    simulation: Simulation, round: int, state: SimulationState | None = None
) -> SimulationState:
    """The simulation's state at the start of `round`, from `state` or from the beginning on."""
    state = state or simulation.start
    for _, reached in simulation.run(round, state):
        state = reached
    return state


def _random_selections(measurement: Measurement, round: int, clients: int) -> IntArray:
    """(selections, C) uniform selections."""
    rng = stream(measurement.seed, "measured selections", round)
    count = measurement.experiment.clients_per_round
    everyone = np.arange(clients)
    return np.array([uniform(rng, everyone, count) for _ in range(measurement.selections)])
