"""Clients whose data is loaded when it is needed, for populations too large for memory.

Any object with `sizes` and `load(client)` will do. A round loads the data of the clients that
train, and of those that are asked for a loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from fedcor.core.describe import Described, describe, describe_array
from fedcor.core.errors import ConfigError, DataError
from fedcor.core.types import Array, IntArray
from fedcor.data.datasets import Dataset
from fedcor.data.own_samples import (
    Samples,
    are_pixels,
    as_samples,
    check_same_shapes,
    count_of,
    to_array,
)

# Characters of a description in a record. Of a longer one, as of a list of files, it has a digest.
_LONGEST = 10_000
_ABSENT: Any = object()


class ClientData(Protocol):
    """Clients whose data is generated or read when it is needed; any object with these members.

    Three more attributes are optional:

    `test_data`
        `(x_test, y_test)`. Without it, the experiment needs `test_data`.
    `classes`
        K, the number of labels, which are 0 .. K-1; else one more than the largest in the test
        data. Targets that are floats are those of a regression.
    `names`
        N texts, the clients' own ids, which records show.

    `load` must return the same each time: a run that is resumed loads it again. A record says which
    clients there were, and a run is resumed only with the same. A dataclass is described by its
    parameters, and any other object by its attributes. One whose attributes change, as those of a
    cache do, needs a method `describe()`; what it returns is recorded instead.

    Example:
        >>> class Noise:
        ...     sizes = np.full(1000, 20)
        ...     test_data = np.zeros((5, 3)), np.arange(5) % 2
        ...     def load(self, client):
        ...         rng = np.random.default_rng(client)
        ...         return rng.standard_normal((20, 3)), rng.integers(0, 2, size=20)
        >>> data, clients = as_client_data(Noise())
        >>> data.shape, data.classes, len(clients.sizes)
        ((3,), 2, 1000)
    """

    @property
    def sizes(self) -> IntArray:
        """(N,) The number of samples of each client, at least 1."""
        ...

    def load(self, client: int) -> tuple[Any, Any]:
        """The samples of a client, (n_k, ...), and their labels or targets, (n_k,)."""
        ...


def is_client_data(given: Any) -> bool:
    """Whether it is an object with `sizes` and `load(client)`."""
    return (
        not isinstance(given, type)
        and callable(getattr(given, "load", None))
        and _attribute(given, "sizes", _ABSENT) is not _ABSENT
    )


def as_client_data(
    given: ClientData, test_data: Any = None, name: str = "own clients"
) -> tuple[Dataset, ClientData]:
    """The data set that a model is made for and tested on, without training samples; and clients.

    Args:
        given: As the user gave it.
        test_data: `(x_test, y_test)`; None for that of `given`.
        name: What the data is called in records.

    Raises:
        DataError: The sizes, the names, the classes or the test data cannot be used.
    """
    sizes = np.asarray(to_array("sizes", _attribute(given, "sizes", None)))
    if sizes.ndim != 1 or not len(sizes) or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        raise DataError(
            "sizes must be one whole number per client, at least 1: how many samples it has"
        )
    test = _attribute(given, "test_data", None) if test_data is None else test_data
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise DataError(
            "there is no test data: give test_data=(x_test, y_test), or the attribute test_data"
        )
    x, y = as_samples("x_test", test[0]), _targets("y_test", test[1])
    if count_of(x) != len(y):
        raise DataError(f"x_test has {count_of(x)} samples, but y_test has {len(y)}")
    classes = None
    if y.dtype.kind == "i":
        classes = _classes(given, y)
        _check_labels("y_test", y, classes)
    names = _names(given, len(sizes))
    empty = {k: a[:0] for k, a in x.items()} if isinstance(x, dict) else cast(Array, x)[:0]
    dataset = Dataset(
        name=name,
        train_x=empty,
        train_y=y[:0],
        test_x=x,
        test_y=y,
        classes=classes,
        client_names=names,
        scaled=are_pixels(test[0]),
    )
    return dataset, given


def _attribute(given: ClientData, name: str, default: Any) -> Any:
    try:
        return getattr(given, name, default)
    except DataError:
        raise
    except Exception as error:  # a user's own property may fail in any way
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{name} of the clients could not be read: {cause}") from error


def _classes(given: ClientData, labels: Array) -> int:
    """K; one more than the largest label where the clients do not say it."""
    classes = _attribute(given, "classes", None)
    if classes is None:
        return int(labels.max()) + 1
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1:
        raise DataError(f"classes must be a whole number, at least 1, but is {classes!r}")
    return int(classes)


def _names(given: ClientData, count: int) -> tuple[str, ...]:
    """What the clients are called; () where they do not say it."""
    found = _attribute(given, "names", None)
    if found is None:
        return ()
    names = tuple(map(str, found)) if isinstance(found, Iterable) else None
    if names is None or (names and not len(names) == len(set(names)) == count):
        raise DataError(f"names must be {count} different texts, one per client")
    return names


def check_loaded(
    data: Dataset, client: int, size: int, loaded: tuple[Any, Any]
) -> tuple[Samples, Array]:
    """What `load` gave, of the types of the test data. Raises DataError if it does not fit."""
    try:
        if not isinstance(loaded, tuple | list) or len(loaded) != 2:
            raise DataError(f"load returned a {type(loaded).__name__}, not (x, y)")
        x, y = as_samples("x", loaded[0]), _targets("y", loaded[1])
        check_same_shapes(x, data.test_x)
        _check_types(x, data.test_x)
        if are_pixels(loaded[0]) != data.scaled:
            raise DataError(
                "only one of x and x_test is of type uint8, which is scaled to 0-1: give both in "
                "one type"
            )
        if count_of(x) != size or len(y) != size:
            raise DataError(
                f"load gave {count_of(x)} samples and {len(y)} labels, but sizes says {size}"
            )
        if (y.dtype.kind == "f") != (data.classes is None) or y.shape[1:] != data.test_y.shape[1:]:
            raise DataError(f"y is {y.dtype} {y.shape[1:]}, but y_test is of another kind")
        if data.classes is not None:
            _check_labels("y", y, data.classes)
    except DataError as error:
        raise DataError(f"client {client}: {error}") from None
    return x, y


def _targets(key: str, given: Any) -> Array:
    """Labels as int64, numbers as float32."""
    array = to_array(key, given)
    if array.ndim < 1 or array.dtype.kind not in "buif":
        raise DataError(f"{key} must hold labels 0 .. K-1, or numbers; it is of type {array.dtype}")
    if array.dtype.kind != "f":
        return array.astype(np.int64)
    if not np.isfinite(array).all():
        raise DataError(f"{key} has values that are missing (NaN) or not finite")
    return array.astype(np.float32)


def _check_types(x: Samples, test: Samples) -> None:
    one, other = (dict(s) if isinstance(s, Mapping) else {"x": s} for s in (x, test))
    for name, array in one.items():
        if array.dtype != other[name].dtype:
            raise DataError(
                f"{name} is of type {array.dtype}, but {other[name].dtype} in x_test: give both in "
                "one type"
            )


def _check_labels(key: str, labels: Array, classes: int) -> None:
    if labels.ndim != 1 or (len(labels) and not 0 <= labels.min() <= labels.max() < classes):
        raise DataError(f"{key} must have one label per sample, from 0 to {classes - 1}")


@dataclass(frozen=True)
class PerClient(Described):
    """The partition of clients that bring their own data: there is nothing to divide.

    Args:
        clients: N.
    """

    clients: int

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:  # noqa: ARG002
        """Refused: there are no samples to divide."""
        raise ConfigError("partition", "per client", "cannot be used with data that is not loaded")

    def describe(self) -> dict[str, Any]:
        """The number of clients."""
        return {"kind": "per client", "clients": self.clients}


def describe_clients(given: ClientData) -> dict[str, Any]:
    """What a record says of them: what tells them from others, and the digest of the sizes."""
    own = getattr(given, "describe", None)
    try:
        made = describe(own() if callable(own) else given)
        text = json.dumps(made, sort_keys=True, default=repr)
    except Exception as error:  # a user's own method may fail; attributes may go round in a circle
        cause = f"{type(error).__name__}: {error}"
        raise DataError(
            f"the clients cannot be described in a record: {cause}; their method describe() must "
            "return what tells them from others, as numbers and texts"
        ) from error
    if len(text) > _LONGEST:
        kind = f"{type(given).__module__}:{type(given).__qualname__}"
        made = {"class": kind, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return {"clients": made, "sizes": describe_array(given.sizes)}
