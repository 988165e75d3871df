"""Loss changes of many random selections in some rounds of a random run, kept in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcor.core.files import save_arrays
from fedcor.core.rng import stream
from fedcor.core.types import FloatArray, IntArray
from fedcor.runs.cluster.address import CLUSTERS
from fedcor.runs.processes import for_each, map_each
from fedcor.runs.progress import refresh
from fedcor.selectors.base import uniform
from fedcor.simulation.build import build_simulation, use_one_thread
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.loop import Simulation
from fedcor.simulation.state import SimulationState
from studies.analysis.candidates import loss_changes
from studies.plan import Plan


@dataclass(frozen=True)
class Measurement:
    """What is measured in one run.

    Attributes:
        experiment: which run of random selection is followed
        seed: of the run
        rounds: in which to measure
        selections: random selections per measured round
        folder: of the files, one per measured round
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
    """What is measured for the experiment `what`: with the plan's first seed and its selections."""
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
