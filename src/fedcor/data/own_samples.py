"""Convert a user's samples and targets to the types that models take, without needless copies.

Samples:

    given as                                    a model gets
    floats                                      float32
    uint8 (pixels), in a single array           float32, scaled to 0-1
    other integers                              float32
    integers of torch, or in a dictionary       int64: they may be token ids

Targets: the type decides, as for scikit-learn's classifiers. Floats are the targets of a
regression, even if they are all whole. Strings, booleans and integers are labels; those that are
not 0 .. K-1 are numbered in sorted order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedcor.core.errors import DataError
from fedcor.core.types import Array

Samples: TypeAlias = Array | Mapping[str, Array]  # (n, ...) each
# More different integers than this, and than half of the samples, are hardly labels.
_MANY = 20


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
        return as_numbers(key, array)
    if array.dtype.kind != "b":
        array = array.astype(np.int64, copy=False)
    return np.ascontiguousarray(array)


def as_numbers(key: str, array: Array) -> Array:
    """The array as float32. Raises DataError for values that are missing or too large."""
    with np.errstate(over="ignore"):  # what overflows is infinite, and reported as such
        array = array.astype(np.float32, copy=False)
    # The sum of a large array shows that all is well without a copy.
    if not np.isfinite(array.sum(dtype=np.float64)) and not np.isfinite(array).all():
        raise DataError(f"{key} has values that are missing (NaN) or not finite float32 numbers")
    return np.ascontiguousarray(array)


def _advice(array: Array) -> str:
    if array.dtype.kind in "US" or (array.size and isinstance(array.flat[0], str)):
        return ": turn strings into token ids, and columns of words into numbers"
    return ": do its rows differ in length? Pad them" if array.dtype.kind == "O" else ""


def arrays_of(samples: Samples) -> Mapping[str, Array]:
    """The arrays of samples by name; a single array has the name ""."""
    return samples if isinstance(samples, Mapping) else {"": samples}


def count_of(samples: Samples) -> int:
    """The number of samples."""
    return len(next(iter(arrays_of(samples).values())))


def form_of(samples: Samples) -> str:
    """Type and shape of one sample: `float32 (28, 28)`, or `ids: int64 (9,), mask: int64 (9,)`."""
    arrays = sorted(arrays_of(samples).items())
    forms = [(name, f"{array.dtype} {array.shape[1:]}") for name, array in arrays]
    return ", ".join(f"{name}: {form}" if name else form for name, form in forms)


def check_same_form(train: Samples, test: Samples) -> None:
    """Raises DataError unless a training sample has the form of a test sample."""
    if form_of(train) != form_of(test):
        raise DataError(
            f"a sample is {form_of(train)} in x_train, but {form_of(test)} in x_test: give both "
            "the same arrays in one type, and pad all to one length"
        )


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
    given = _column("y_train", train), _column("y_test", test)
    if given[0].dtype.kind == "f":
        if given[1].dtype.kind not in "buif":
            raise DataError(f"y_train holds numbers, but y_test is of type {given[1].dtype}")
        numbers = as_numbers("y_train", given[0]), as_numbers("y_test", given[1])
        shapes = [array.shape[1:] for array in numbers]
        if shapes[0] != shapes[1]:
            raise DataError(f"a target is {shapes[0]} in y_train, but {shapes[1]} in y_test")
        return Targets(numbers[0], numbers[1], None, ())
    for key, y in zip(("y_train", "y_test"), given, strict=True):
        if y.ndim != 1:
            raise DataError(f"{key} must have one label per sample, but has the shape {y.shape}")
    return _labels(*given)


def _column(key: str, given: Any) -> Array:
    """Targets as an array of one plain type; a single column becomes (n,)."""
    array = plain_values(key, given)
    if array.ndim > 1 and array.shape[1:] == (1,):
        array = array[:, 0]
    if array.ndim < 1 or array.size == 0:
        raise DataError(f"{key} must have one entry per sample, but has the shape {array.shape}")
    if array.dtype.kind not in "buifUS":
        raise DataError(f"{key} must hold labels or numbers, but is of type {array.dtype}")
    return array


def plain_values(key: str, given: Any) -> Array:
    """`given` as an array, in which Python objects become numbers or strings."""
    array = to_array(key, given)
    if array.dtype.kind != "O":
        return array
    values = array.reshape(-1).tolist()
    if any(value is None or value != value for value in values):
        raise DataError(f"{key}: some values are missing (None or NaN)")
    if len({isinstance(value, str) for value in values}) > 1:
        raise DataError(f"{key} must be all strings or all integers")
    return np.array(values).reshape(array.shape)


def _labels(train: Array, test: Array) -> Targets:
    words = [array.dtype.kind in "US" for array in (train, test)]
    if test.dtype.kind == "f" or words[0] != words[1]:
        raise DataError(f"y_train has labels of type {train.dtype}, but y_test {test.dtype}")
    seen, numbered = np.unique(train, return_inverse=True)
    if train.dtype.kind in "iu" and len(seen) > max(_MANY, len(train) // 2):
        raise DataError(
            f"y_train has {len(seen)} different integers in {len(train)} samples; if they are "
            "not labels but the targets of a regression, give them as floats: y.astype(float)"
        )
    place = np.minimum(np.searchsorted(seen, test), len(seen) - 1)
    unknown = test[seen[place] != test]
    if len(unknown):
        raise DataError(
            f"y_test contains label {unknown[0].item()!r}, which never occurs in y_train: every "
            "label must be in the training data"
        )
    if train.dtype.kind in "iu" and np.array_equal(seen, np.arange(len(seen))):
        one, other = (np.ascontiguousarray(y, dtype=np.int64) for y in (train, test))
        return Targets(one, other, len(seen), ())
    names = tuple(str(label) for label in seen.tolist())
    return Targets(numbered.reshape(-1), place, len(seen), names)
