"""What a server remembers of every client: one vector of P numbers each.

y_k        the vector of client k; zero until one is stored
scale_k    how much k counts: 1, or n_k where clients count in proportion to their data; 0 for a
           client without samples, which is not in the federation
total      sum_k scale_k y_k, in float64
mean       total / sum_k scale_k, over all N clients in the federation, also those never seen

Each vector is an array of its own in the state, called `update/<id>`. To store m vectors, a shallow
copy of the state gets m new entries: the N x P numbers are never copied, and the given state stays
as it was. Everything here is a pure function.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import numpy as np

from fedcor.core.types import Array, BoolArray, FloatArray, IntArray, Population, State

# The type of a stored vector's numbers.
StoredAs: TypeAlias = Literal["float32", "float16"]


class StatelessOptimiser:
    """Base of optimisers that remember nothing."""

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return {}


class RememberingOptimiser:
    """Base of optimisers that keep one vector per client. `name` is what it is in the state."""

    weighted: bool

    name: ClassVar[str] = "update"
    needs_updates: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def init(self, population: Population, model: Array) -> State:
        """Nobody was seen: all vectors and their mean are zero."""
        return empty_memory(population, model, weighted=self.weighted)

    def join(self, state: State, population: Population) -> State:
        """The mean over more clients; who joined counts as zero until seen."""
        return resize(state, population, weighted=self.weighted, name=self.name)


def empty_memory(population: Population, model: Array, *, weighted: bool = False) -> State:
    """A memory of `population` in which nobody was seen.

    Args:
        population: Who is in the federation.
        model: (P,) The model, for its length.
        weighted: Whether clients count in proportion to their data.
    """
    return {"scales": _scales(population, weighted), "total": np.zeros(len(model))}


def recall(state: State, clients: IntArray, name: str = "update") -> tuple[Array, BoolArray]:
    """(m, P) y_k of each client, float32, zero where there is none; and (m,) who has one."""
    vectors = np.zeros((len(clients), len(state["total"])), dtype=np.float32)
    seen = np.zeros(len(clients), dtype=np.bool_)
    for row, client in enumerate(clients):
        stored = state.get(f"{name}/{client}")
        if stored is not None:
            vectors[row], seen[row] = stored, True
    return vectors, seen


def remember(
    state: State,
    clients: IntArray,
    vectors: Array,
    dtype: StoredAs = "float32",
    name: str = "update",
) -> State:
    """The state in which y_k of each client is its row of `vectors`.

    Args:
        state: The memory so far. It is not changed.
        clients: (m,) ids, each once.
        vectors: (m, P) What to store.
        dtype: How to store it. float16 takes half of the space; numbers beyond its range become
            its largest, those below 6e-5 have fewer than 3 digits, and those below 3e-8 become 0.
        name: What the vectors are called in the state.
    """
    new = dict(state)
    total = state["total"].copy()
    for client, vector in zip(clients, vectors, strict=True):
        stored = _stored(vector, dtype)
        # The total follows what is stored, not what was sent, so that it is their sum exactly.
        change = stored.astype(np.float64)
        before = state.get(f"{name}/{client}")
        if before is not None:
            change -= before
        total += state["scales"][client] * change
        new[f"{name}/{client}"] = stored
    new["total"] = total
    return new


def forget(state: State, clients: IntArray, name: str = "update") -> State:
    """The state in which nothing is stored of `clients`, who all have a vector."""
    new, total = dict(state), state["total"].copy()
    for client in clients:
        total -= state["scales"][client] * new.pop(f"{name}/{client}").astype(np.float64)
    new["total"] = total
    return new


def mean_of_all(state: State) -> FloatArray:
    """(P,) The mean of y_k over all clients; who was never seen counts as zero."""
    mean: FloatArray = state["total"] / state["scales"].sum()
    return mean


def all_seen(state: State, name: str = "update") -> bool:
    """Whether every client in the federation has a vector."""
    return all(f"{name}/{client}" in state for client in np.flatnonzero(state["scales"]))


def count_members(state: State) -> int:
    """N, how many clients are in the federation: those who can be chosen."""
    return int(np.count_nonzero(state["scales"]))


def resize(
    state: State, population: Population, *, weighted: bool = False, name: str = "update"
) -> State:
    """The same memory for a population with more clients or other sizes.

    What is stored of a client that now has no samples stays, for the case that it is let in again.

    The total is corrected only for clients that have a vector and count for another amount than
    before. In most rounds these are few or none.
    """
    scales, total = _scales(population, weighted), state["total"].copy()
    changes = scales.copy()
    changes[: len(state["scales"])] -= state["scales"]
    for client in np.flatnonzero(changes):
        vector = state.get(f"{name}/{client}")
        if vector is not None:
            total += changes[client] * vector.astype(np.float64)
    return {**state, "scales": scales, "total": total}


def weighted_mean(weights: FloatArray, vectors: Array) -> FloatArray:
    """(P,) sum_k a_k v_k in float64."""
    mean: FloatArray = weights @ vectors.astype(np.float64)
    return mean


def _scales(population: Population, weighted: bool) -> FloatArray:
    counts = population.sizes if weighted else population.sizes > 0
    return counts.astype(np.float64)


def _stored(vector: Array, dtype: StoredAs) -> Array:
    """A copy, so that the state holds no view of all m vectors; finite whatever the type."""
    largest = float(np.finfo(dtype).max)
    return np.clip(vector, -largest, largest).astype(dtype)
