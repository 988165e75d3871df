"""The clients' learning rate over the rounds: a number, milestones, or a user's own schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from fedcor.checks import check_positive
from fedcor.errors import FedcorError

__all__ = ["LearningRate", "Rate", "Schedule", "as_schedule"]


@runtime_checkable
class Schedule(Protocol):
    """A learning rate that may change from round to round."""

    def at(self, round: int) -> float:
        """The learning rate in `round`, which is counted from 0."""
        ...


# What a user may give: a number, a function of the round, or an object with the method `at`.
Rate: TypeAlias = float | Callable[[int], float] | Schedule


@dataclass(frozen=True)
class LearningRate:
    """The clients' learning rate: `initial`, multiplied by `factor` at each milestone.

    Args:
        initial: The rate in round 0.
        milestones: The rounds at which it changes.
        factor: What it is multiplied by.

    Example:
        >>> LearningRate(0.1, milestones=(100,), factor=0.5).at(100)
        0.05
    """

    initial: float
    milestones: tuple[int, ...] = ()
    factor: float = 0.5

    def at(self, round: int) -> float:
        """The learning rate in `round`."""
        passed = sum(round >= milestone for milestone in self.milestones)
        return self.initial * math.pow(self.factor, passed)


@dataclass(frozen=True)
class _Checked:
    """A user's schedule, whose every answer is checked."""

    given: Any

    def at(self, round: int) -> float:
        at = self.given.at if isinstance(self.given, Schedule) else self.given
        try:
            rate = at(round)
        except Exception as error:  # a user's schedule may fail in any way
            cause = f"{type(error).__name__}: {error}"
            raise FedcorError(f"the learning rate of round {round} failed: {cause}") from error
        rate = rate.item() if hasattr(rate, "item") else rate  # a number of NumPy or torch
        check_positive(f"learning_rate({round})", rate)
        return float(rate)


def as_schedule(rate: Rate) -> Schedule:
    """`rate` as a schedule. A user's own is checked in every round: finite, and above 0.

    Raises:
        ConfigError: It is not a learning rate; `at` raises it for a rate that cannot work.

    Example:
        >>> as_schedule(lambda round: 0.1 / (1 + round)).at(1)
        0.05
    """
    if isinstance(rate, LearningRate | _Checked):
        return rate
    if isinstance(rate, Schedule) or callable(rate):
        return _Checked(rate)
    check_positive("learning_rate", rate)
    return LearningRate(float(rate))
