"""What the selectors share: checks of hyper-parameters, the uniform draw, and the verbs of those that remember nothing."""

from __future__ import annotations

import numpy as np

from fedcor.errors import ConfigError
from fedcor.types import Array, IntArray, Outcome, Population, State

__all__ = [
    "Memoryless",
    "check_at_least",
    "check_fraction",
    "check_positive",
    "lengthened",
    "uniform",
]


_NUMBERS = (int, float, np.integer, np.floating)


class Memoryless:
    """The verbs of a selector that keeps nothing from one round to the next."""

    def init(self, population: Population) -> State:  # noqa: ARG002
        return {}

    def observe(self, state: State, outcome: Outcome) -> State:  # noqa: ARG002
        return state

    def join(self, state: State, population: Population) -> State:  # noqa: ARG002
        return state


def uniform(rng: np.random.Generator, available: IntArray, count: int) -> IntArray:
    """`count` of the available clients (all, if there are fewer), uniformly without replacement."""
    return rng.choice(available, size=min(count, len(available)), replace=False)


def lengthened(array: Array, count: int, value: Array | float) -> Array:
    """`array` with `count` entries along its last axis, the new ones being `value`."""
    new = np.full((*array.shape[:-1], count - array.shape[-1]), value, dtype=array.dtype)
    return np.concatenate([array, new], axis=-1)


def check_at_least(key: str, given: object, least: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        raise ConfigError(key, given, f"must be a whole number of at least {least}")


def check_fraction(key: str, given: object, *, closed: bool = False) -> None:
    """Within (0, 1), or [0, 1] where `closed`."""
    if not isinstance(given, _NUMBERS) or not (
        0.0 <= given <= 1.0 if closed else 0.0 < given < 1.0
    ):
        raise ConfigError(
            key, given, "must lie in [0, 1]" if closed else "must lie strictly between 0 and 1"
        )


def check_positive(key: str, given: object, *, zero: bool = False) -> None:
    if not isinstance(given, _NUMBERS) or not (0.0 <= given <= 1e100) or (given == 0 and not zero):
        raise ConfigError(
            key,
            given,
            "must be a finite number of at least 0" if zero else "must be a finite number above 0",
        )
