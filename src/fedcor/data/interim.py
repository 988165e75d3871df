"""Interim: arrays as a data set, until the general form of it is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcor.data.datasets import Dataset
from fedcor.types import Array, IntArray

__all__ = ["as_dataset", "parts_of"]


def as_dataset(
    data: Any,
    test_data: Any = None,
    *,
    partition: Any = None,  # noqa: ARG001
    name: str = "own data",
) -> tuple[Dataset, list[IntArray] | None]:
    """`(x, y, x_test, y_test)`, or two pairs, as a data set."""
    given = [np.asarray(array) for array in [*data, *(test_data or ())]]
    x, y, test_x, test_y = given
    train_x, test_x = (np.asarray(a, dtype=np.float32) for a in (x, test_x))
    train_y, test_y = (np.asarray(a, dtype=np.int64) for a in (y, test_y))
    return Dataset(name, train_x, train_y, test_x, test_y, int(train_y.max()) + 1), None


def parts_of(ids: Sequence[Any] | Array) -> list[IntArray]:
    """One array of sample indices per client id."""
    _, owner = np.unique(np.asarray(ids), return_inverse=True)
    return [np.flatnonzero(owner == k) for k in range(owner.max() + 1)]
