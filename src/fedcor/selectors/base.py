"""What the selectors share: a base class for those without a state, and small helpers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fedcor.core.types import (
    Array,
    BoolArray,
    FloatArray,
    IntArray,
    Outcome,
    Population,
    Questions,
    State,
)

# A client that failed again and again is left out for 2^10 rounds, and no longer.
_LONGEST_BACKOFF = 10


class StatelessSelector:
    """Base of a selector that remembers nothing between rounds: add `select`."""

    def init(self, population: Population) -> State:
        """An empty state."""
        return {}

    def observe(self, state: State, outcome: Outcome) -> State:
        """The same state: nothing is remembered."""
        return state

    def join(self, state: State, population: Population) -> State:
        """The same state: it does not depend on who is in the federation."""
        return state


def asks_nothing(selector: object, round: int, clients: int) -> Questions:  # noqa: ARG001
    """The method `questions` of a selector that asks nothing."""
    return Questions()


def uniform(rng: np.random.Generator, available: IntArray, count: int) -> IntArray:
    """`count` of the available clients (all, if there are fewer), uniformly without replacement."""
    return rng.choice(available, size=min(count, len(available)), replace=False)


def fraction_of(fraction: float, count: int) -> int:
    """`fraction` of `count` clients, rounded down, but not for a rounding error of the product.

    >>> int((1 - 0.8) * 10), fraction_of(1 - 0.8, 10)
    (1, 2)
    """
    return int(fraction * count + 1e-9)


def longest_ago(asked: IntArray, count: int, ties: FloatArray | None = None) -> IntArray:
    """Positions of the `count` smallest numbers (all, if there are fewer), the smallest first.

    Only those near them are put in order: with many clients, that of all would be slow.

    Args:
        asked: (n,) when each was last chosen.
        count: How many positions.
        ties: (n,) Which of equal ones comes first, the smaller; the position decides without.

    >>> longest_ago(np.array([4, 2, 7, 2]), 3)
    array([1, 3, 0])
    """
    near = np.arange(len(asked))
    if 0 < count < len(asked):
        last = np.sort(asked)[count - 1]  # quicker than a partition where many are equal
        near, equal = np.flatnonzero(asked < last), np.flatnonzero(asked == last)
        missing = count - len(near)
        if ties is not None and missing < len(equal):
            equal = equal[ties[equal] <= np.partition(ties[equal], missing - 1)[missing - 1]]
        near = np.concatenate([near, equal])
    keys = (asked[near],) if ties is None else (ties[near], asked[near])
    return near[np.lexsort(keys)[:count]]


def resting(failed: IntArray, asked: IntArray, round: int) -> BoolArray:
    """(N,) clients that failed to deliver and are left out for now: 2^failures rounds.

    Args:
        failed: (N,) How often each was chosen in vain since it last delivered.
        asked: (N,) The round in which it was last chosen.
        round: The round to come.

    >>> resting(np.array([0, 1, 1, 2]), np.array([6, 6, 5, 4]), 7)
    array([False,  True, False,  True])
    """
    backoff = 2 ** np.minimum(failed, _LONGEST_BACKOFF)
    rests: BoolArray = (failed > 0) & (round - asked < backoff)
    return rests


def ready(state: State, available: IntArray) -> IntArray:
    """Those of `available` who do not rest, by `failed`, `asked` and `round` of the state."""
    rests = resting(state["failed"], state["asked"], int(state["round"]))
    return available[~rests[available]]


def without(clients: IntArray, others: IntArray) -> IntArray:
    """Those of `clients` who are not among `others`, in their order."""
    return clients[~np.isin(clients, others)]


def spread(columns: Mapping[str, Array], known: BoolArray) -> dict[str, FloatArray]:
    """Columns for the clients that are `known`, with NaN for the others."""
    wide = {name: np.full(len(known), np.nan) for name in columns}
    for name, values in columns.items():
        wide[name][known] = values
    return wide


def extend_clients(array: Array, count: int, value: Array | float) -> Array:
    """`array` with `count` entries along its last axis: `value` for each client that is new."""
    new = np.full((*array.shape[:-1], count - array.shape[-1]), value, dtype=array.dtype)
    return np.concatenate([array, new], axis=-1)


def extend_state(state: State, blank: State, names: Iterable[str]) -> dict[str, Array]:
    """Arrays of a state with entries for new clients, which are as in the state `blank`."""
    return {name: np.concatenate([state[name], blank[name][len(state[name]) :]]) for name in names}
