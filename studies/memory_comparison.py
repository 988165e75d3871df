"""Pairs of selector and optimiser compared: the values of each run, and differences by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.reporting.curves import read_curve
from fedcor.reporting.metrics import Estimate, mean_estimate
from fedcor.runs.record import RunRecord
from studies.memory_scenarios import OURS, PAIRS, RANDOM
from studies.scaffold import Scenario
from studies.summaries import METRIC, times_chosen

# Both are compared with random selection's.
ACCURACIES = ("mean_accuracy", "last_tenth")
RIVALS = tuple(pair.label for pair in PAIRS if pair not in (RANDOM, OURS))


@dataclass(frozen=True)
class RunValues:
    """What is kept of one run.

    Attributes:
        mean_accuracy: Over all rounds.
        last_tenth: Mean accuracy over the last tenth of the rounds.
        spread: Standard deviation of the accuracy of the last 50 rounds; None for one round.
        bytes_down: Bytes sent to clients.
        bytes_up: Bytes that came back.
        most_chosen: How often the most chosen client was chosen.
        least_chosen: How often the least chosen client was chosen.
        longest_wait: Longest wait of a client, in rounds; see `longest_wait`.
        memory_bytes: Most bytes that the optimiser remembered.
    """

    mean_accuracy: float
    last_tenth: float
    spread: float | None
    bytes_down: float
    bytes_up: float
    most_chosen: int
    least_chosen: int
    longest_wait: int
    memory_bytes: int

    @property
    def all_bytes(self) -> float:
        """Bytes down and up."""
        return self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class Comparison:
    """The pairs in one scenario.

    Attributes:
        name: Of the scenario.
        title: Of the scenario, in tables and figures.
        rounds: Of each run.
        clients: N.
        clients_per_round: C.
        reliable: Whether every client is always available, and delivers.
        runs: Pair's label -> seed -> values. Everyone training may have fewer seeds than others.
    """

    name: str
    title: str
    rounds: int
    clients: int
    clients_per_round: int
    reliable: bool
    runs: Mapping[str, Mapping[int, RunValues]]

    @property
    def turn(self) -> float:
        """N / C: the rounds in which every client can be chosen once."""
        return self.clients / self.clients_per_round

    @property
    def seeds(self) -> list[int]:
        """Of the runs, sorted."""
        return sorted(self.runs[RANDOM.label])

    @property
    def rivals(self) -> list[str]:
        """Labels of the pairs that ours is to be ahead of."""
        return [label for label in RIVALS if label in self.runs]

    @property
    def best_rival(self) -> str:
        """The rival with the largest gain."""
        return max(self.rivals, key=self.gain)

    def common_seeds(self, label: str, other: str) -> list[int]:
        """The seeds that both pairs were run on, sorted."""
        return sorted(set(self.runs[label]) & set(self.runs[other]))

    def estimate(self, label: str, key: str, seeds: Sequence[int] | None = None) -> Estimate:
        """The mean over `seeds`, or over all that it was run on."""
        runs = self.runs[label]
        return mean_estimate(getattr(runs[seed], key) for seed in seeds or sorted(runs))

    def difference(self, label: str, other: str, key: str = "mean_accuracy") -> Estimate:
        """One pair minus another, seed by seed."""
        ours, theirs = (
            [getattr(self.runs[of][seed], key) for seed in self.common_seeds(label, other)]
            for of in (label, other)
        )
        pairs = zip(ours, theirs, strict=True)
        return mean_estimate(None if a is None or b is None else a - b for a, b in pairs)

    def gain(self, label: str) -> float:
        """How much its mean accuracy is above random's, on average over seeds."""
        ours, random = self.runs[label], self.runs[RANDOM.label]
        seeds = self.common_seeds(label, RANDOM.label)
        return fmean(ours[seed].mean_accuracy - random[seed].mean_accuracy for seed in seeds)

    def bytes_ratio(self, label: str, key: str = "all_bytes") -> float:
        """Its bytes divided by random's."""
        seeds = self.common_seeds(label, RANDOM.label)
        ours, random = (
            sum(getattr(self.runs[of][seed], key) for seed in seeds) for of in (label, RANDOM.label)
        )
        return float(ours / random)

    def turns_waited(self, label: str) -> float:
        """The longest wait in any of its runs, in units of N / C rounds."""
        return max(run.longest_wait for run in self.runs[label].values()) / self.turn

    def numbers(self) -> dict[str, Any]:
        """Numbers to save, with each seed's values for later comparisons."""
        return {
            "title": self.title,
            "rounds": self.rounds,
            "clients": self.clients,
            "clients_per_round": self.clients_per_round,
            "waits_are_bounded": self.reliable,
            "pairs": {label: self._pair_numbers(label) for label in self.runs},
        }

    def _pair_numbers(self, label: str) -> dict[str, Any]:
        paired = {key: asdict(self.difference(label, RANDOM.label, key)) for key in ACCURACIES}
        return {
            "seeds": {
                seed: {**asdict(run), "turns_waited": run.longest_wait / self.turn}
                for seed, run in sorted(self.runs[label].items())
            },
            "estimates": {
                key: asdict(self.estimate(label, key)) for key in RunValues.__dataclass_fields__
            },
            "paired_to_random": {} if label == RANDOM.label else paired,
            "bytes_to_random": {
                key: self.bytes_ratio(label, key) for key in ("bytes_down", "bytes_up", "all_bytes")
            },
        }


def average_difference(
    comparisons: Sequence[Comparison], label: str, other: str, key: str = "mean_accuracy"
) -> Estimate:
    """One pair minus another: on each seed the mean over scenarios; then the mean over seeds."""
    by_scenario = [
        [
            getattr(c.runs[label][seed], key) - getattr(c.runs[other][seed], key)
            for seed in c.common_seeds(label, other)
        ]
        for c in comparisons
    ]
    return mean_estimate(map(fmean, zip(*by_scenario, strict=True)))


def compare(scenario: Scenario, runs: Mapping[str, Sequence[RunRecord]]) -> Comparison:
    """The pairs in a scenario.

    Args:
        scenario: What was run.
        runs: Pair's label -> one run per seed.
    """
    values = {
        label: {int(run.header["seed"]): measure(run) for run in of_pair}
        for label, of_pair in runs.items()
    }
    first = runs[RANDOM.label][0]
    config = first.header["config"]
    faults = config["faults"]
    return Comparison(
        name=scenario.name,
        title=scenario.title,
        rounds=len(first.rounds),
        clients=int(config["partition"]["clients"]),
        clients_per_round=int(config["training"]["clients_per_round"]),
        reliable=faults["availability"] == 1 and not faults["dropout"],
        runs=values,
    )


def measure(run: RunRecord) -> RunValues:
    """The values of a run; refused if a round has no accuracy."""
    curve = read_curve(run)
    if np.isnan(curve.accuracy).any():
        raise RecordError(f"{run.path}: rounds have no accuracy; delete this run, and run it again")
    values = {
        key: METRIC[key].measure(curve) or 0.0
        for key in ("mean_accuracy", "bytes_down", "bytes_up")
    }
    counts = times_chosen([run])
    clients = int(run.header["config"]["partition"]["clients"])
    return RunValues(
        **values,
        last_tenth=float(curve.accuracy[-max(1, len(run.rounds) // 10) :].mean()),
        spread=METRIC["spread"].measure(curve),
        most_chosen=int(counts[0]),
        least_chosen=int(counts[-1]),
        longest_wait=longest_wait([entry["selected"] for entry in run.rounds], clients),
        memory_bytes=max(entry.get("memory_bytes", 0) for entry in run.rounds),
    )


def longest_wait(chosen: Sequence[Sequence[int]], clients: int) -> int:
    """The most rounds from one choice of a client to its next.

    Before its first choice a client waits as if all had been chosen just before the run. After its
    last choice it waits as if all were chosen just after the run: it cannot come sooner.

    Args:
        chosen: The chosen clients of each round.
        clients: How many there are.
    """
    last = np.full(clients, -1)
    longest = 0
    for now, group in enumerate(chosen):
        members = np.asarray(group, dtype=np.int64)
        longest = max(longest, int((now - last[members]).max(initial=0)))
        last[members] = now
    return max(longest, int((len(chosen) - last).max(initial=0)))
