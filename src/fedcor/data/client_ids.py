"""From a client id per sample to clients that are numbered 0 .. N-1."""

from __future__ import annotations

import numpy as np

from fedcor.data.assignment import indices_per_client
from fedcor.data.own_samples import to_array
from fedcor.errors import DataError
from fedcor.types import IntArray

__all__ = ["clients_of", "parts_of"]


def parts_of(ids: object, samples: int | None = None) -> list[IntArray]:
    """Who holds which training samples, where each sample has the id of its client.

    Args:
        ids: One id per training sample: whole numbers or texts, in an array, a list, a tensor or a
            column of a data frame. Clients are numbered in the order of their sorted ids.
        samples: How many there must be.

    Returns:
        One ascending array of sample indices per client.

    Raises:
        DataError: An id is missing, or is neither a text nor a whole number.

    Example:
        >>> [part.tolist() for part in parts_of(["lyon", "bern", "lyon"])]
        [[1], [0, 2]]
    """
    return clients_of(ids, samples)[0]


def clients_of(ids: object, samples: int | None = None) -> tuple[list[IntArray], tuple[str, ...]]:
    """The parts, as `parts_of`; and the clients' names, or () where the ids are just 0 .. N-1."""
    given = to_array("the client ids", ids)
    if given.ndim != 1 or not len(given):
        shape = given.shape
        raise DataError(f"there must be one client id per sample, but they have the shape {shape}")
    if samples is not None and len(given) != samples:
        raise DataError(f"there are {len(given)} client ids for {samples} training samples")
    values = given.tolist()
    if any(value is None or value != value for value in values):
        raise DataError("some client ids are missing (None or NaN)")
    if given.dtype.kind == "f" and (given == np.floor(given)).all():
        given = given.astype(np.int64)
    elif given.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        given = given.astype(str)
    if given.dtype.kind not in "iuUSb":
        raise DataError(
            "client ids must be texts or whole numbers, all of one kind, but are of type "
            f"{given.dtype}"
        )
    names, owner = np.unique(given, return_inverse=True)
    parts = indices_per_client(owner.reshape(-1), len(names))
    numbered = names.dtype.kind in "iu" and np.array_equal(names, np.arange(len(names)))
    return parts, () if numbered else tuple(map(str, names.tolist()))
