"""The data that clients train on: embedded digits, two public image sets, or arrays of your own.

`load` never uses the network; `fetch` brings what is not here. Pictures are scaled as in the paper's implementation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcor.data.cache import cache_file, read_cache, read_npz
from fedcor.data.fetch import fetch_local, local_source
from fedcor.errors import ConfigError, DataError, MissingExtraError, suggest
from fedcor.rng import stream
from fedcor.types import Array, IntArray

__all__ = ["Dataset", "Listing", "available", "load"]

SPLIT_SEED = 0  # of the digits' fixed division into training and test data
TEST_SHARE = 0.2


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test data, ready for a model."""

    name: str
    train_x: npt.NDArray[np.float32]  # (n, *shape)
    train_y: IntArray  # (n,) 0 .. classes - 1
    test_x: npt.NDArray[np.float32]  # (m, *shape)
    test_y: IntArray  # (m,)
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.train_x.shape[1:]


@dataclass(frozen=True)
class Listing:
    """One line of `fedcor data list`."""

    name: str
    what: str
    shape: tuple[int, ...]  # of one sample
    classes: int
    train: int
    test: int
    here: bool
    where: str  # it is, or would be kept
    how: str  # to get it, or that nothing need be done


def load(name: str) -> Dataset:
    """The data set called `name`, or the arrays x_train, y_train, x_test, y_test of a file whose name ends in .npz."""
    if name in LOADERS:
        return LOADERS[name]()
    if name.endswith(".npz"):
        return _own(name)
    allowed = f"must be one of {', '.join(LOADERS)}, or a path to an .npz"
    raise ConfigError("data.name", name, allowed, suggest(name.lower(), LOADERS))


def available() -> list[Listing]:
    """What data there is, and what is here already."""
    here = importlib.util.find_spec("sklearn") is not None
    how = "nothing to do" if here else "pip install 'fedcor[sim]'"
    digits = Listing(
        "digits", "handwritten digits, 8x8 grey", (64,), 10, 1438, 359, here, "in scikit-learn", how
    )
    return [
        digits,
        _fetched("fmnist", "Fashion-MNIST: clothing, 28x28 grey", (784,), 60000),
        _fetched("cifar10", "CIFAR-10: animals and vehicles, 32x32 colour", (3, 32, 32), 50000),
    ]


def _fetched(name: str, what: str, shape: tuple[int, ...], train: int) -> Listing:
    kept = cache_file(name)
    where = kept if kept.exists() else local_source(name)
    how = f"fedcor data fetch {name}" if where is None else "nothing to do"
    return Listing(name, what, shape, 10, train, 10000, where is not None, str(where or kept), how)


def _digits() -> Dataset:
    """scikit-learn's bundled digits, standardised, with every label divided 80 : 20."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "sim") from None
    bundle = load_digits()
    y = bundle.target.astype(np.int64)  # (1797,)
    x = ((bundle.data / 16 - 0.3053) / 0.3760).astype(
        np.float32
    )  # (1797, 64) their mean and standard deviation
    rng = stream(SPLIT_SEED, "digits split")
    held_out = np.zeros(len(y), bool)
    for label in range(10):
        of_label = rng.permutation(np.flatnonzero(y == label))
        held_out[of_label[: round(TEST_SHARE * len(of_label))]] = True
    return Dataset("digits", x[~held_out], y[~held_out], x[held_out], y[held_out], 10)


def _fmnist() -> Dataset:
    raw = _raw("fmnist")
    train_x, test_x = (
        _scaled(raw[key].reshape(-1, 784), 0.1307, 0.3081) for key in ("x_train", "x_test")
    )
    return Dataset(
        "fmnist",
        train_x,
        raw["y_train"].astype(np.int64),
        test_x,
        raw["y_test"].astype(np.int64),
        10,
    )


def _cifar10() -> Dataset:
    raw = _raw("cifar10")
    train_x, test_x = (
        _scaled(raw[key].transpose(0, 3, 1, 2), 0.5, 0.5) for key in ("x_train", "x_test")
    )
    return Dataset(
        "cifar10",
        train_x,
        raw["y_train"].astype(np.int64),
        test_x,
        raw["y_test"].astype(np.int64),
        10,
    )


LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": _digits,
    "fmnist": _fmnist,
    "cifar10": _cifar10,
}


def _raw(name: str) -> dict[str, npt.NDArray[np.uint8]]:
    if not cache_file(name).exists():
        try:
            found = fetch_local(name)
        except DataError as error:
            raise DataError(
                f"{error}; to get it from elsewhere, run `fedcor data fetch {name}`"
            ) from error
        if found is None:
            raise DataError(
                f"{name} is not here ({cache_file(name)}): run `fedcor data fetch {name}`"
            )
    return read_cache(name)


def _scaled(
    pixels: npt.NDArray[np.uint8], mean: float, deviation: float
) -> npt.NDArray[np.float32]:
    """(pixels / 255 - mean) / deviation, computed inside one float32 copy, for CIFAR-10 is large."""
    x = np.ascontiguousarray(pixels).astype(
        np.float32
    )  # axes are moved as bytes: ten times faster than as floats
    x /= 255
    x -= mean
    x /= deviation
    return x


def _own(name: str) -> Dataset:
    """Somebody's own arrays, believed only after a look: a wrong label or a NaN would surface as a strange curve."""
    path = Path(name).expanduser()
    arrays = read_npz(path)
    train_x, test_x = (_samples(path, key, arrays[key]) for key in ("x_train", "x_test"))
    train_y, test_y = (_labels(path, key, arrays[key]) for key in ("y_train", "y_test"))
    for key, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y):
            raise DataError(
                f"{path}: x_{key} has {len(x)} samples, but y_{key} has {len(y)} labels"
            )
    if train_x.shape[1:] != test_x.shape[1:]:
        raise DataError(
            f"{path}: a sample is {train_x.shape[1:]} in x_train, but {test_x.shape[1:]} in x_test"
        )
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
    return Dataset(name, train_x, train_y, test_x, test_y, classes)


def _samples(path: Path, key: str, array: Array) -> npt.NDArray[np.float32]:
    """(n, *shape) float32; bytes become [0, 1], other numbers stay as they are."""
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
    """(n,) int64."""
    if array.dtype.kind not in "uif":
        raise DataError(f"{path}: {key} must hold whole numbers, but is of type {array.dtype}")
    if array.ndim != 1 or array.size == 0:
        raise DataError(
            f"{path}: {key} must have one label per sample, but has the shape {array.shape}"
        )
    if array.dtype.kind == "f" and not (np.isfinite(array) & (array == np.floor(array))).all():
        raise DataError(f"{path}: {key} has labels that are not whole numbers")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"{path}: {key} has labels from {array.min()} to {array.max()}; they must be 0 .. K-1"
        )
    return array.astype(np.int64)
