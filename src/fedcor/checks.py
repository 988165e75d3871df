"""Checks of single parameters, for every room that takes settings: each names the parameter, what was
given, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedcor.errors import ConfigError, suggest

__all__ = ["check_at_least", "check_between", "check_fraction", "check_one_of", "check_positive"]

_NUMBERS = (int, float, np.integer, np.floating)


def check_at_least(key: str, given: object, least: int) -> None:
    """`given` must be a whole number of at least `least`."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        raise ConfigError(key, given, f"must be a whole number of at least {least}")


def check_fraction(key: str, given: object, *, closed: bool = False) -> None:
    """`given` must lie in (0, 1), or in [0, 1] where `closed`."""
    low_and_high = isinstance(given, _NUMBERS) and (
        0.0 <= given <= 1.0 if closed else 0.0 < given < 1.0
    )
    if not low_and_high:
        allowed = "must lie in [0, 1]" if closed else "must lie strictly between 0 and 1"
        raise ConfigError(key, given, allowed)


def check_positive(key: str, given: object, *, zero: bool = False) -> None:
    """`given` must be a finite number above 0, or at least 0 where `zero` is allowed."""
    finite = isinstance(given, _NUMBERS) and 0.0 <= given <= 1e100
    if not finite or (given == 0 and not zero):
        least = "of at least 0" if zero else "above 0"
        raise ConfigError(key, given, f"must be a finite number {least}")


def check_between(key: str, given: object, low: float, high: float) -> None:
    """`given` must be a number from `low` to `high`, both allowed."""
    number = isinstance(given, _NUMBERS) and not isinstance(given, bool)
    if not number or not low <= given <= high:  # type: ignore[operator]
        raise ConfigError(key, given, f"must be a number from {low:g} to {high:g}")


def check_one_of(key: str, given: object, options: Iterable[str]) -> None:
    """`given` must be one of `options`; a near miss gets a suggestion."""
    options = list(options)
    if given not in options:
        allowed = f"must be one of {', '.join(options)}"
        raise ConfigError(key, given, allowed, suggest(str(given), options))
