"""What every way of partitioning shares: whole samples, and from owners to index arrays."""

from __future__ import annotations

import numpy as np

from fedcor.errors import ConfigError, DataError
from fedcor.types import Array, FloatArray, IntArray

__all__ = ["count_samples", "indices_per_client", "round_to_row_sums"]

# In samples: a solver may miss a whole number by this much, and it still counts as reached.
SLACK = 1e-7


def count_samples(labels: Array, clients: int) -> int:
    """The number of samples, after checking that every client can have one."""
    if labels.ndim != 1:
        raise DataError(f"labels must be one number per sample, but have the shape {labels.shape}")
    n = len(labels)
    if not 1 <= clients <= n:
        raise ConfigError("clients", clients, f"{n} samples can go to between 1 and {n} clients")
    return n


def indices_per_client(owner: IntArray, clients: int) -> list[IntArray]:
    """The owner of every sample `(n,)`, turned into one ascending index array per client."""
    ends = np.bincount(owner, minlength=clients).cumsum()
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])


def round_to_row_sums(amounts: FloatArray, sums: IntArray, rng: np.random.Generator) -> IntArray:
    """Rounds `amounts` to whole samples whose rows have exactly the given sums.

    What rounding down leaves of a row goes to entries that it shortened, drawn in proportion to
    what they lost; so every count is less than one from its amount.

    Args:
        amounts: `(L, N)`, with row sums equal to `sums` up to a solver's tolerance.
        sums: `(L,)`.
        rng: Draws who gets what is left.

    Returns:
        `(L, N)` counts.
    """
    amounts = amounts * (sums / amounts.sum(axis=1))[:, None]
    counts = np.floor(amounts + SLACK).astype(np.int64)
    # (L, N) each below one, so at least `left` of them are not zero
    lost = np.maximum(amounts - counts, 0)
    for row, part, left in zip(counts, lost, sums - counts.sum(axis=1), strict=True):
        if left:
            row[rng.choice(len(part), left, replace=False, p=part / part.sum())] += 1
    return counts
