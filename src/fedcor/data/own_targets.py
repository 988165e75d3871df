"""A user's labels or targets: the type decides, as it does for scikit-learn's classifiers.

Floats are the targets of a regression, even if they are all whole. Anything else is a label: texts,
truth values, whole numbers. Labels that are not 0 .. K-1 are numbered in their sorted order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcor.data.own_samples import all_finite, to_array
from fedcor.errors import DataError
from fedcor.types import Array

__all__ = ["Targets", "as_targets"]

# More different whole numbers than this, and than half of the samples, are hardly labels.
_MANY = 20


@dataclass(frozen=True, eq=False)
class Targets:
    """Labels or targets of training and test data.

    Attributes:
        train: (n,) labels 0 .. K-1, or (n,) or (n, d) float32 targets.
        test: The same for the test data.
        classes: K; None for regression.
        names: What the labels were, where they were not 0 .. K-1.
    """

    train: Array
    test: Array
    classes: int | None
    names: tuple[str, ...]


def as_targets(train: Any, test: Any) -> Targets:
    """A user's `y` of training and test data. Raises DataError for what cannot be either."""
    given = _plain("y_train", train), _plain("y_test", test)
    if given[0].dtype.kind == "f":
        numbers = [_numbers(key, y) for key, y in zip(("y_train", "y_test"), given, strict=True)]
        if numbers[0].shape[1:] != numbers[1].shape[1:]:
            one, other = numbers[0].shape[1:], numbers[1].shape[1:]
            raise DataError(f"a target is {one} in y_train, but {other} in y_test")
        return Targets(numbers[0], numbers[1], None, ())
    for key, y in zip(("y_train", "y_test"), given, strict=True):
        if y.ndim != 1:
            raise DataError(f"{key} must have one label per sample, but has the shape {y.shape}")
    return _labels(*given)


def _plain(key: str, given: Any) -> Array:
    """As an array of one plain type; a single column becomes (n,)."""
    array = to_array(key, given)
    if array.ndim > 1 and array.shape[1:] == (1,):
        array = array[:, 0]
    if array.ndim < 1 or array.size == 0:
        raise DataError(f"{key} must have one entry per sample, but has the shape {array.shape}")
    if array.dtype.kind == "O":
        values = array.reshape(-1).tolist()
        if any(value is None or value != value for value in values):
            raise DataError(f"{key} has missing values (None or NaN)")
        array = (
            array.astype(str)
            if all(isinstance(value, str) for value in values)
            else np.array(values).reshape(array.shape)
        )
    if array.dtype.kind not in "buifUS":
        raise DataError(f"{key} must hold labels or numbers, but is of type {array.dtype}")
    return array


def _numbers(key: str, array: Array) -> Array:
    if array.dtype.kind not in "buif":
        raise DataError(f"y_train holds numbers, but {key} is of type {array.dtype}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    if not all_finite(array):
        raise DataError(f"{key} has values that are missing (NaN) or not finite float32 numbers")
    return np.ascontiguousarray(array)


def _labels(train: Array, test: Array) -> Targets:
    words = [array.dtype.kind in "US" for array in (train, test)]
    if test.dtype.kind == "f" or words[0] != words[1]:
        raise DataError(f"y_train has labels of type {train.dtype}, but y_test {test.dtype}")
    seen, numbered = np.unique(train, return_inverse=True)
    if train.dtype.kind in "iu" and len(seen) > max(_MANY, len(train) // 2):
        raise DataError(
            f"y_train has {len(seen)} different whole numbers in {len(train)} samples; if they are "
            "not labels but the targets of a regression, give them as floats: y.astype(float)"
        )
    place = np.minimum(np.searchsorted(seen, test), len(seen) - 1)
    unknown = test[seen[place] != test]
    if len(unknown):
        raise DataError(
            f"y_test has the label {unknown[0].item()!r}, which y_train has not: every label must "
            "be in the training data"
        )
    if train.dtype.kind in "iu" and np.array_equal(seen, np.arange(len(seen))):
        one, other = (np.ascontiguousarray(y, dtype=np.int64) for y in (train, test))
        return Targets(one, other, len(seen), ())
    names = tuple(str(label) for label in seen.tolist())
    return Targets(numbered.reshape(-1), place, len(seen), names)
