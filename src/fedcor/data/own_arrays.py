"""A user's own arrays, checked: a wrong label or a NaN would show as a strange learning curve."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedcor.data.cache import read_npz
from fedcor.errors import DataError
from fedcor.types import Array, IntArray

__all__ = ["OwnArrays", "read_own_arrays"]

# (n, *shape), (n,), (m, *shape), (m,)
OwnArrays: TypeAlias = tuple[npt.NDArray[np.float32], Array, npt.NDArray[np.float32], Array]


def read_own_arrays(path: Path, *, regression: bool = False) -> OwnArrays:
    """The arrays `(train_x, train_y, test_x, test_y)` of an `.npz` file, as float32 and int64.

    Args:
        path: The file.
        regression: Whether `y` are numbers, float32, and not labels.
    """
    arrays = read_npz(path)
    train_x, test_x = (_samples(path, key, arrays[key]) for key in ("x_train", "x_test"))
    read = _targets if regression else _labels
    train_y, test_y = (read(path, key, arrays[key]) for key in ("y_train", "y_test"))
    for key, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y):
            raise DataError(
                f"{path}: x_{key} has {len(x)} samples, but y_{key} has {len(y)} labels"
            )
    if train_x.shape[1:] != test_x.shape[1:]:
        raise DataError(
            f"{path}: a sample is {train_x.shape[1:]} in x_train, but {test_x.shape[1:]} in x_test"
        )
    if regression:
        return train_x, train_y, test_x, test_y
    seen = np.unique(train_y)
    classes = len(seen)
    if seen[-1] != classes - 1:
        absent = int(np.flatnonzero(seen != np.arange(classes))[0])
        raise DataError(
            f"{path}: labels must be 0 .. K-1, each in y_train; {absent} is not, but {seen[-1]} is"
        )
    if test_y.max() >= classes:
        raise DataError(
            f"{path}: y_test has the label {test_y.max()}, but y_train only has 0 .. {classes - 1}"
        )
    return train_x, train_y, test_x, test_y


def _samples(path: Path, key: str, array: Array) -> npt.NDArray[np.float32]:
    """(n, *shape) as float32; uint8 is scaled to [0, 1], other numbers stay as they are."""
    if array.dtype.kind not in "buif":
        raise DataError(f"{path}: {key} must hold numbers, but is of type {array.dtype}")
    if array.ndim < 2 or array.size == 0:
        raise DataError(f"{path}: {key} must have the shape (samples, ...), but has {array.shape}")
    with np.errstate(over="ignore"):  # what overflows is infinite, and reported as such
        x = array.astype(np.float32)
    if array.dtype == np.uint8:
        x /= 255
    if not np.isfinite(x).all():
        raise DataError(f"{path}: {key} has values that are not finite float32 numbers")
    return x


def _labels(path: Path, key: str, array: Array) -> IntArray:
    """(n,) as int64."""
    if array.dtype.kind not in "uif":
        raise DataError(f"{path}: {key} must hold whole numbers, but is of type {array.dtype}")
    if array.ndim != 1 or array.size == 0:
        raise DataError(
            f"{path}: {key} must have one label per sample, but has the shape {array.shape}"
        )
    if array.dtype.kind == "f" and not (np.isfinite(array) & (array == np.floor(array))).all():
        raise DataError(f"{path}: {key} has labels that are not whole numbers")
    if array.min() < 0 or int(array.max()) > np.iinfo(np.int32).max:  # also of half precision
        raise DataError(
            f"{path}: {key} has labels from {array.min()} to {array.max()}; they must be 0 .. K-1"
        )
    return array.astype(np.int64)


def _targets(path: Path, key: str, array: Array) -> npt.NDArray[np.float32]:
    """(n,) as float32."""
    if array.dtype.kind not in "uif" or array.ndim != 1 or array.size == 0:
        raise DataError(
            f"{path}: {key} must have one number per sample, but has the shape {array.shape} and "
            f"the type {array.dtype}"
        )
    with np.errstate(over="ignore"):
        y = array.astype(np.float32)
    if not np.isfinite(y).all():
        raise DataError(f"{path}: {key} has values that are not finite float32 numbers")
    return y
