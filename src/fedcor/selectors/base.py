"""What the selectors share: the uniform draw, and the verbs of those that remember nothing."""

from __future__ import annotations

import numpy as np

from fedcor.types import Array, IntArray, Outcome, Population, State

__all__ = ["Memoryless", "lengthened", "uniform"]


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
