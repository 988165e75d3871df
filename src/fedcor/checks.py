"""Checks of single parameters, for every module that takes settings.

Each raises ConfigError with the name of the parameter, what was given, and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fedcor.errors import ConfigError, suggest

__all__ = ["check_at_least", "check_between", "check_fraction", "check_one_of", "check_positive"]

LARGEST = 1e100


def check_at_least(key: str, given: object, least: int) -> None:
    """`given` must be a whole number of at least `least`."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        raise ConfigError(key, given, f"must be a whole number of at least {least}")


def check_fraction(key: str, given: object, *, closed: bool = False) -> None:
    """`given` must lie in (0, 1), or in [0, 1] where `closed`."""
    number = _number(given)
    inside = 0.0 <= number <= 1.0 if closed else 0.0 < number < 1.0
    if not inside:
        allowed = "must lie in [0, 1]" if closed else "must lie strictly between 0 and 1"
        raise ConfigError(key, given, allowed)


def check_positive(key: str, given: object, *, zero: bool = False) -> None:
    """`given` must be a finite number above 0, or at least 0 where `zero` is allowed."""
    number = _number(given)
    if not 0.0 <= number <= LARGEST or (number == 0.0 and not zero):
        least = "of at least 0" if zero else "above 0"
        raise ConfigError(key, given, f"must be a finite number {least}")


def check_between(key: str, given: object, low: float, high: float) -> None:
    """`given` must be a number from `low` to `high`, both allowed."""
    if not low <= _number(given) <= high:
        raise ConfigError(key, given, f"must be a number from {low:g} to {high:g}")


def check_one_of(key: str, given: object, options: Iterable[str]) -> None:
    """`given` must be one of `options`; a near miss gets a suggestion."""
    options = list(options)
    if given not in options:
        allowed = f"must be one of {', '.join(options)}"
        raise ConfigError(key, given, allowed, suggest(str(given), options))


def _number(given: object) -> float:
    """`given` as a number; NaN, which lies in no range, where it is none or is too large."""
    if isinstance(given, bool) or not isinstance(given, int | float | np.integer | np.floating):
        return math.nan
    try:
        return float(given)
    except OverflowError:
        return math.nan
