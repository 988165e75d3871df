"""A user's own arrays, checked: a wrong label or a NaN would show as a strange learning curve."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedcor.core.config import expand_home
from fedcor.core.errors import ConfigError, DataError, MissingExtraError, suggest
from fedcor.core.rng import stream
from fedcor.core.types import Array, IntArray
from fedcor.data.cache import RawArrays, cache_file, read_cache, read_npz

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


# The data that clients train on: bundled digits, two public image sets, or a user's own arrays.
#
# `load` never uses the network; `fedcor.data.downloads.fetch` does. Pixels are scaled as in the paper's
# implementation.


Samples: TypeAlias = Array | Mapping[str, Array]  # (n, ...) each

SPLIT_SEED = 0  # of the digits' fixed division into training and test data
TEST_FRACTION = 0.2


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test data, ready for a model. `as_dataset` makes one of what you have.

    Attributes:
        name: The name or path that it was loaded by.
        train_x: Training samples, `(n, *shape)`; or a dictionary of such arrays, and a batch of
            them is then a dictionary too.
        train_y: Their labels, `(n,)`, whole numbers from 0 to `classes - 1`; or, in regression,
            their targets, float32 `(n,)` or `(n, d)`.
        test_x: Test samples, like `train_x`.
        test_y: Their labels or targets.
        classes: Number of different labels; None in regression.
        label_names: What the labels 0, 1, ... are called, where they were given as something else.
        client_names: What the clients 0, 1, ... are called, where the data says so.
        scaled: Whether the test samples were given as uint8, and scaled to 0-1. It is known where
            the training data is loaded later, which must then be given as uint8 too.
    """

    name: str
    train_x: Samples
    train_y: Array
    test_x: Samples
    test_y: Array
    classes: int | None
    label_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    scaled: bool = False

    @property
    def shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """The shape of one sample: of each of its arrays, where samples are dictionaries."""
        if isinstance(self.train_x, Mapping):
            return {name: array.shape[1:] for name, array in self.train_x.items()}
        return self.train_x.shape[1:]

    @property
    def outputs(self) -> int:
        """How many numbers a model gives per sample: one per class, or one per target."""
        return math.prod(self.train_y.shape[1:]) if self.classes is None else self.classes


@dataclass(frozen=True)
class Listing:
    """One line of `fedcor data list`.

    Attributes:
        name: What `load` calls the data set.
        description: What it shows.
        shape: The shape of one sample, as `load` returns it.
        classes: Number of different labels.
        train: Number of training samples.
        test: Number of test samples.
        present: Whether `load` works now.
        location: Where it is, or would be stored.
        next_step: The command that makes it present, or "nothing to do".
    """

    name: str
    description: str
    shape: tuple[int, ...]
    classes: int
    train: int
    test: int
    present: bool
    location: str
    next_step: str


def load(name: str, *, regression: bool = False) -> Dataset:
    """Loads a data set from this machine; never uses the network.

    Args:
        name: `"digits"`, `"fmnist"`, `"cifar10"`, or the path of an `.npz` file with the arrays
            `x_train` `(n, ...)`, `y_train` `(n,)`, `x_test` `(m, ...)` and `y_test` `(m,)`. There,
            uint8 samples are scaled to 0-1, and the labels must be 0 .. K-1, each in `y_train`.
        regression: Only for an `.npz` file: `y_train` and `y_test` are numbers, not labels.

    Raises:
        ConfigError: No data set has this name.
        DataError: It has not been fetched, or its file is damaged or does not fit together.

    Example:
        >>> from fedcor.data.datasets import load
        >>> data = load("digits")
        >>> data.train_x.shape, data.classes
        ((1438, 64), 10)
    """
    if name in LOADERS:
        return LOADERS[name]()
    if name.endswith(".npz"):
        arrays = read_own_arrays(expand_home("data.name", name), regression=regression)
        return Dataset(name, *arrays, classes=None if regression else int(arrays[1].max()) + 1)
    allowed = f"must be one of {', '.join(LOADERS)}, or a path to an .npz"
    raise ConfigError("data.name", name, allowed, suggest(name.lower(), LOADERS))


def available() -> list[Listing]:
    """The known data sets, and whether each is present."""
    present = importlib.util.find_spec("sklearn") is not None
    digits = Listing(
        name="digits",
        description="handwritten digits, 8x8 grey",
        shape=(64,),
        classes=10,
        train=1438,
        test=359,
        present=present,
        location="in scikit-learn",
        next_step="nothing to do" if present else str(MissingExtraError("scikit-learn", "sim")),
    )
    return [
        digits,
        _fetched("fmnist", "Fashion-MNIST: clothing, 28x28 grey", (784,), 60000),
        _fetched("cifar10", "CIFAR-10: animals and vehicles, 32x32 colour", (3, 32, 32), 50000),
    ]


def _fetched(name: str, description: str, shape: tuple[int, ...], train: int) -> Listing:
    """The line of a data set that `fedcor data fetch` puts into the cache."""
    path = cache_file(name)
    present = path.exists()
    return Listing(
        name=name,
        description=description,
        shape=shape,
        classes=10,
        train=train,
        test=10000,
        present=present,
        location=str(path),
        next_step="nothing to do" if present else f"fedcor data fetch {name}",
    )


def _digits() -> Dataset:
    """scikit-learn's bundled digits, standardised; of each label, a fifth is test data."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "sim") from None
    bundle = load_digits()
    y = bundle.target.astype(np.int64)  # (1797,)
    # (1797, 64), by the mean and standard deviation of all pixels
    x = ((bundle.data / 16 - 0.3053) / 0.3760).astype(np.float32)
    rng = stream(SPLIT_SEED, "digits split")
    held_out = np.zeros(len(y), bool)
    for label in range(10):
        of_label = rng.permutation(np.flatnonzero(y == label))
        held_out[of_label[: round(TEST_FRACTION * len(of_label))]] = True
    return Dataset("digits", x[~held_out], y[~held_out], x[held_out], y[held_out], 10)


def _fmnist() -> Dataset:
    raw = read_cache("fmnist")
    pixels = [raw[key].reshape(-1, 784) for key in ("x_train", "x_test")]
    return _images("fmnist", raw, pixels, 0.1307, 0.3081)


def _cifar10() -> Dataset:
    raw = read_cache("cifar10")
    pixels = [raw[key].transpose(0, 3, 1, 2) for key in ("x_train", "x_test")]
    return _images("cifar10", raw, pixels, 0.5, 0.5)


LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": _digits,
    "fmnist": _fmnist,
    "cifar10": _cifar10,
}


def _images(
    name: str,
    raw: RawArrays,
    pixels: list[npt.NDArray[np.uint8]],
    mean: float,
    deviation: float,
) -> Dataset:
    train_x, test_x = (_standardised(x, mean, deviation) for x in pixels)
    train_y, test_y = (raw[key].astype(np.int64) for key in ("y_train", "y_test"))
    return Dataset(name, train_x, train_y, test_x, test_y, 10)


def _standardised(
    pixels: npt.NDArray[np.uint8], mean: float, deviation: float
) -> npt.NDArray[np.float32]:
    """(pixels / 255 - mean) / deviation, computed in one float32 copy: CIFAR-10 is large."""
    # Axes are moved as bytes, which is ten times faster than as floats.
    x = np.ascontiguousarray(pixels).astype(np.float32)
    x /= 255
    x -= mean
    x /= deviation
    return x
