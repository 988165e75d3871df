"""Clients in blocks: so many rows of an embedding, and what is computed of them, fit into a core's
own cache. Then a large population costs its matrix products, and not the memory between them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedcor.types import FloatArray, IntArray

__all__ = ["BLOCK", "blocks", "of_candidates"]

BLOCK = 4096


def blocks(count: int) -> Iterator[slice]:
    """0 .. count - 1 in blocks."""
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))


def of_candidates(candidates: IntArray, *arrays: FloatArray) -> tuple[FloatArray, ...]:
    """The candidates' rows of arrays over all clients; if everyone is one, nothing is copied."""
    if np.array_equal(candidates, np.arange(len(arrays[0]))):
        return arrays
    return tuple(array[candidates] for array in arrays)
