"""A user's samples, checked and in the types that models take, without needless copies.

given as                                    a model gets
float numbers                               float32
uint8 (pixels), in a single array           float32, scaled to 0-1
other whole numbers                         float32
whole numbers of torch, or in a dictionary  int64: they may be token ids
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcor.data.datasets import Samples
from fedcor.errors import DataError
from fedcor.types import Array

__all__ = [
    "all_finite",
    "are_pixels",
    "as_samples",
    "check_same_shapes",
    "count_of",
    "is_tensor",
    "to_array",
]


def is_tensor(given: object) -> bool:
    """Whether it is a torch tensor; does not import torch."""
    return hasattr(given, "detach") and hasattr(given, "is_floating_point")


def to_array(key: str, given: Any) -> Array:
    """`given` as an array: of NumPy, a tensor, a list, a data frame or its column.

    Args:
        key: What messages call it.
        given: The array; it is copied only where its type asks for it.
    """
    if is_tensor(given):
        given = given.detach().cpu()
        array: Array = (given.float() if given.is_floating_point() else given).numpy()
        return array
    if hasattr(given, "toarray"):
        raise DataError(f"{key} is a sparse matrix: give {key}.toarray()")
    if hasattr(given, "to_numpy"):
        return _from_frame(key, given)
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise DataError(f"{key} is not an array; do its rows differ in length? ({error})") from None


def _from_frame(key: str, frame: Any) -> Array:
    """A DataFrame or a Series, of pandas or alike."""
    if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):  # a column; or not of pandas
        return np.asarray(frame.to_numpy())
    kinds = {str(name): dtype.kind for name, dtype in zip(frame.columns, frame.dtypes, strict=True)}
    words = [name for name, kind in kinds.items() if kind not in "buif"]
    if words:
        raise DataError(
            f"{key} has columns that are not numbers: {', '.join(words)}; encode them, for example "
            "with pandas.get_dummies, or drop them"
        )
    # In one step: a frame of mixed types would first become an array of objects.
    return np.asarray(frame.to_numpy(dtype=np.float32, na_value=np.nan))


def as_samples(key: str, given: Any, keep_integers: bool | None = None) -> Samples:
    """(n, ...) samples in the types of the table above; a dictionary stays one.

    Args:
        key: What messages call it.
        given: An array as for `to_array`, or a dictionary of arrays.
        keep_integers: Whether whole numbers of a single array stay so; None: those of torch do.
    """
    if isinstance(given, Mapping):
        if not given:
            raise DataError(f"{key} is an empty dictionary")
        arrays = {str(k): _checked(f"{key}[{k!r}]", v, True, False) for k, v in given.items()}
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"{key} has arrays of different lengths: {sizes}")
        return arrays
    keep = is_tensor(given) if keep_integers is None else keep_integers
    return _checked(key, given, keep, True)


def are_pixels(given: Any) -> bool:
    """Whether `as_samples` scales them to 0-1: a single array of uint8."""
    return not isinstance(given, Mapping) and to_array("x", given).dtype == np.uint8


def _checked(key: str, given: Any, keep_integers: bool, pixels: bool) -> Array:
    array = to_array(key, given)
    if array.dtype.kind not in "buif":
        raise DataError(f"{key} must hold numbers, but is of type {array.dtype}{_advice(array)}")
    if array.ndim < 1 or array.size == 0 or (pixels and array.ndim < 2):
        hint = f": for one number per sample, give {key}.reshape(-1, 1)" if array.ndim == 1 else ""
        raise DataError(f"{key} must have the shape (samples, ...), but has {array.shape}{hint}")
    if pixels and array.dtype == np.uint8:
        scaled = array.astype(np.float32)
        scaled /= 255
        return scaled
    if array.dtype.kind == "f" or not keep_integers:
        with np.errstate(over="ignore"):  # what overflows is infinite, and reported as such
            array = array.astype(np.float32, copy=False)
        if not all_finite(array):
            raise DataError(
                f"{key} has values that are missing (NaN) or not finite float32 numbers"
            )
    elif array.dtype.kind != "b":
        array = array.astype(np.int64, copy=False)
    return np.ascontiguousarray(array)


def _advice(array: Array) -> str:
    if array.dtype.kind in "US" or (array.size and isinstance(array.flat[0], str)):
        return ": turn texts into token ids, and columns of words into numbers"
    return ": do its rows differ in length? Pad them" if array.dtype.kind == "O" else ""


def all_finite(array: Array) -> bool:
    """Whether there is no NaN and no infinity. Of large arrays, it makes no copy if so."""
    if np.isfinite(array.sum(dtype=np.float64)):
        return True
    return bool(np.isfinite(array).all())


def count_of(samples: Samples) -> int:
    """The number of samples."""
    return len(next(iter(samples.values())) if isinstance(samples, Mapping) else samples)


def check_same_shapes(train: Samples, test: Samples) -> None:
    """Raises DataError unless training and test samples look alike."""
    if isinstance(train, Mapping) != isinstance(test, Mapping):
        raise DataError("x_train and x_test must both be arrays, or both be dictionaries of arrays")
    if not isinstance(train, Mapping):
        one, other = train.shape[1:], test.shape[1:]  # type: ignore[union-attr]
        if one != other:
            raise DataError(f"a sample is {one} in x_train, but {other} in x_test")
        return
    assert isinstance(test, Mapping)
    if set(train) != set(test):
        odd = sorted(set(train) ^ set(test))
        raise DataError(f"{', '.join(odd)} is in only one of x_train and x_test")
    for name, array in train.items():
        one, other = array.shape[1:], test[name].shape[1:]
        if one != other:
            raise DataError(
                f"{name} of a sample is {one} in x_train, but {other} in x_test: pad all to one "
                "length"
            )
