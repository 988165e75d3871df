"""How far clients trained, as their replies say it: local steps, and the learning rate of them.

What one reply says must not change what the others mean. So an impossible number is replaced by
what is usual in the round, and everything is measured by medians.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import MetricRecord

from fedcor.flower.screen import number
from fedcor.flower.wire import LOG
from fedcor.foreign import one_line
from fedcor.types import BoolArray, FloatArray, IntArray

__all__ = ["RATE", "STEPS", "LocalTraining", "read_local_training"]

# How far a client trained: metrics of its reply, if it sends them.
STEPS, RATE = "local-steps", "learning-rate"
_MOST_STEPS = 1e9  # beyond this it is not a number of steps
_MOST_MEDIANS = 10  # a client's steps are at most so many times the round's median


@dataclass(frozen=True)
class LocalTraining:
    """How far the clients of a round trained.

    Attributes:
        steps: (m,) Local steps of each; all 1 if nobody says it.
        learning_rate: Of the local steps: the median of the clients'; 1 if nobody says it.
        doubts: (row of the client, what it said and what is used) where a number is not used as it
            was said.
    """

    steps: IntArray
    learning_rate: float
    doubts: Sequence[tuple[int, str]]

    @property
    def step_sizes(self) -> FloatArray:
        """(m,) Learning rate x local steps of each."""
        return self.learning_rate * self.steps.astype(np.float64)

    def log_doubts(self, names: Sequence[str]) -> bool:
        """Log them in one warning, if there are any; returns whether there are.

        Args:
            names: (m) What the clients are called.
        """
        if self.doubts:
            said = "; ".join(f"{one_line(names[row])}: {what}" for row, what in self.doubts)
            LOG.warning("in the metrics of replies, %s (this is said once per run)", said)
        return bool(self.doubts)


def read_local_training(metrics: Sequence[MetricRecord]) -> LocalTraining:
    """What the metrics of a round's replies say, one record per client.

    A number that is missing or impossible is taken to be the median of the others'; 1 if nobody
    says a possible one. Steps are at most ten times the median.
    """
    steps = np.array([number(one, STEPS) for one in metrics])
    rates = np.array([number(one, RATE) for one in metrics])
    possible = (steps >= 1) & (steps <= _MOST_STEPS)
    usual = _median(steps[possible])
    used = np.rint(np.where(possible, np.minimum(steps, _MOST_MEDIANS * usual), usual))
    possible_rate = (rates > 0) & np.isfinite(rates)
    rate = _median(rates[possible_rate])
    doubts = [
        *_doubts(STEPS, steps, possible & (steps <= _MOST_MEDIANS * usual), used),
        *_doubts(RATE, rates, possible_rate, np.full(len(rates), rate)),
    ]
    return LocalTraining(used.astype(np.int64), rate, doubts)


def _median(values: FloatArray) -> float:
    """1 if there are none."""
    return float(np.median(values)) if len(values) else 1.0


def _doubts(
    key: str, said: FloatArray, believed: BoolArray, used: FloatArray
) -> list[tuple[int, str]]:
    """What is not used as it was said. That nobody says anything is usual."""
    if np.isnan(said).all():
        return []
    rows = np.flatnonzero(~believed).tolist()
    what = {row: "missing" if np.isnan(said[row]) else f"{said[row]:g}" for row in rows}
    return [(row, f"{key} is {what[row]}, {used[row]:g} is used") for row in rows]
