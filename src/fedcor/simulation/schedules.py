"""Learning rates over the rounds: a number with milestones, a function of the round, an object."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fedcor.core.errors import ConfigError
from fedcor.core.registry import load_object

_LARGEST = 1e6


@runtime_checkable
class Schedule(Protocol):
    """The clients' learning rate in every round.

    Example:
        >>> class Decaying:
        ...     def at(self, round):
        ...         return 0.1 / (1 + round)
        >>> isinstance(Decaying(), Schedule)
        True
    """

    def at(self, round: int) -> float:
        """The learning rate in `round`, counted from 0."""
        ...


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
        """The learning rate in `round`. Raises ConfigError where `factor` makes it too large."""
        passed = sum(round >= milestone for milestone in self.milestones)
        try:
            rate = self.initial * math.pow(self.factor, passed)
        except OverflowError:
            rate = math.inf
        if rate > _LARGEST and passed:
            allowed = (
                f"takes the learning rate above {_LARGEST:g} in round {round}, after {passed} "
                "milestones: choose a smaller factor, or fewer milestones"
            )
            raise ConfigError("factor", self.factor, allowed)
        return rate


@dataclass(frozen=True)
class _Checked:
    """A user's schedule, whose rates are checked."""

    rate: Callable[[int], Any]

    def at(self, round: int) -> float:
        try:
            rate = float(self.rate(round))
        except Exception as error:  # a user's schedule may fail in any way
            why = f"failed in round {round}: {type(error).__name__}: {error}"
            raise ConfigError("learning_rate", self.rate, why) from error
        if not 0.0 < rate <= _LARGEST:
            allowed = f"must give a number above 0 and at most {_LARGEST:g}, but gave {rate:g}"
            raise ConfigError("learning_rate", self.rate, f"{allowed} in round {round}")
        return rate


def as_schedule(given: Any) -> Schedule:
    """A user's schedule.

    Args:
        given: A function `round -> rate`, an object with `at(round)`, or `module:name` of one. A
            class that is named so is made without arguments.

    Raises:
        ConfigError: It is none of these. A rate that cannot work is refused when it is asked for.

    Example:
        >>> as_schedule(lambda round: 0.1 * 0.99**round).at(0)
        0.1
    """
    found = given
    if isinstance(given, str):
        found = load_object(given, "learning_rate")
    if isinstance(found, type):
        found = found()
    if isinstance(found, Schedule):
        return _Checked(found.at)
    if callable(found):
        return _Checked(found)
    allowed = "must be a number, a function of the round, an object with at(round), or module:name"
    raise ConfigError("learning_rate", given, allowed)
