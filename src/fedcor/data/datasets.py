"""Data sets that clients train on: bundled digits, two public image sets, or an `.npz` file.

`load` never uses the network; `fedcor.data.downloads.fetch` does. Pixels are scaled as in the
paper's implementation.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcor.core.config import expand_home
from fedcor.core.errors import ConfigError, DataError, MissingExtraError, suggest
from fedcor.core.rng import stream
from fedcor.core.types import Array
from fedcor.data.cache import cache_file, read_cache, read_npz
from fedcor.data.own_samples import Samples, as_samples, as_targets, check_same_form, count_of

SPLIT_SEED = 0  # of the digits' fixed division into training and test data
TEST_FRACTION = 0.2


@dataclass(frozen=True, eq=False, kw_only=True)
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


def load(name: str) -> Dataset:
    """Loads a data set from this machine; never uses the network.

    Args:
        name: `"digits"`, `"fmnist"`, `"cifar10"`, or the path of an `.npz` file with the arrays
            `x_train` `(n, ...)`, `y_train` `(n,)`, `x_test` `(m, ...)` and `y_test` `(m,)`, which
            are converted as in `fedcor.data.own_data.as_dataset`.

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
        path = expand_home("data.name", name)
        arrays = read_npz(path)
        try:
            train, test = ((arrays[f"x_{half}"], arrays[f"y_{half}"]) for half in ("train", "test"))
            return make_dataset(name, train, test)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
    allowed = f"must be one of {', '.join(LOADERS)}, or a path to an .npz"
    raise ConfigError("data.name", name, allowed, suggest(name.lower(), LOADERS))


def make_dataset(
    name: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    *,
    keep_integers: tuple[bool | None, bool | None] = (None, None),
    label_names: tuple[str, ...] = (),
) -> Dataset:
    """A data set of a user's arrays, checked and converted (`fedcor.data.own_samples`).

    Args:
        name: What the data set is called in records.
        train: Samples and targets of the training data.
        test: Samples and targets of the test data.
        keep_integers: For training and test data, as in `as_samples`.
        label_names: What the labels are called, where the data says so.

    Raises:
        DataError: The arrays do not fit together.
    """
    train_x = as_samples("x_train", train[0], keep_integers[0])
    test_x = as_samples("x_test", test[0], keep_integers[1])
    targets = as_targets(train[1], test[1])
    for key, x, y in (("train", train_x, targets.train), ("test", test_x, targets.test)):
        if count_of(x) != len(y):
            raise DataError(f"x_{key} has {count_of(x)} samples, but y_{key} has {len(y)}")
    check_same_form(train_x, test_x)
    names = label_names if len(label_names) == targets.classes else targets.names
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=targets.train,
        test_x=test_x,
        test_y=targets.test,
        classes=targets.classes,
        label_names=tuple(names),
    )


def available() -> list[Listing]:
    """The known data sets, and whether each is present."""
    listings = []
    for name, description, shape, train, test in (
        ("digits", "handwritten digits, 8x8 grey", (64,), 1438, 359),
        ("fmnist", "Fashion-MNIST: clothing, 28x28 grey", (784,), 60000, 10000),
        ("cifar10", "CIFAR-10: animals and vehicles, 32x32 colour", (3, 32, 32), 50000, 10000),
    ):
        if name == "digits":
            present, location = importlib.util.find_spec("sklearn") is not None, "in scikit-learn"
            remedy = str(MissingExtraError("scikit-learn", "sim"))
        else:
            present, location = cache_file(name).exists(), str(cache_file(name))
            remedy = f"fedcor data fetch {name}"
        listing = Listing(
            name=name,
            description=description,
            shape=shape,
            classes=10,
            train=train,
            test=test,
            present=present,
            location=location,
            next_step="nothing to do" if present else remedy,
        )
        listings.append(listing)
    return listings


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
    return make_dataset("digits", (x[~held_out], y[~held_out]), (x[held_out], y[held_out]))


def _images(
    name: str,
    shaped: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]],
    mean: float,
    deviation: float,
) -> Dataset:
    """A fetched data set of images, in the shape that models take."""
    raw = read_cache(name)
    x, x_test = (_standardised(shaped(raw[key]), mean, deviation) for key in ("x_train", "x_test"))
    return make_dataset(name, (x, raw["y_train"]), (x_test, raw["y_test"]))


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


LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": _digits,
    "fmnist": lambda: _images("fmnist", lambda x: x.reshape(-1, 784), 0.1307, 0.3081),
    "cifar10": lambda: _images("cifar10", lambda x: x.transpose(0, 3, 1, 2), 0.5, 0.5),
}
