"""A count sketch: long vectors made short, with the same inner products on average."""

from __future__ import annotations

import numpy as np

from fedcor.rng import stream
from fedcor.types import Array, FloatArray

__all__ = ["count_sketch"]


def count_sketch(vectors: Array, size: int) -> FloatArray:
    """(m, size) sketches of (m, P) vectors: every number is added to a random place.

    It is added with a random sign, so that inner products stay the same on average.
    Places and signs depend on P and `size` alone, so sketches of different rounds and runs can be
    compared. No P x size matrix is ever formed.
    """
    length = vectors.shape[1]
    rng = stream(0, "sketch", length, size)
    places = rng.integers(size, size=length)
    signs = rng.choice(np.array([-1.0, 1.0]), size=length)
    return np.array(
        [np.bincount(places, weights=signs * row, minlength=size) for row in vectors]
    ).reshape(-1, size)
