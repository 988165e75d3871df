"""Clients whose data is loaded when it is needed, for populations too large for memory.

Any object with `sizes` and `load(client)` will do. A round loads the data of the clients that
train, and of those that are asked for a loss. Two are built in: `SyntheticPopulation` generates its
clients, and `FolderPopulation` reads them from files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from fedcor.core.config import check_at_least, check_between, expand_home, plain_keywords
from fedcor.core.describe import Described, describe, describe_array, reference
from fedcor.core.errors import ConfigError, DataError, blame
from fedcor.core.rng import stream
from fedcor.core.types import Array, FloatArray, IntArray
from fedcor.data.cache import open_npz
from fedcor.data.datasets import Dataset
from fedcor.data.own_samples import (
    Samples,
    are_pixels,
    as_numbers,
    as_samples,
    check_same_form,
    count_of,
    to_array,
)

# Characters of a description in a record. Of a longer one, as of a list of files, it has a digest.
_LONGEST = 10_000
_MOST_DIFFERENT = 1e3  # of alpha and beta
_TESTED = 20  # samples of each client that is tested on
_TEST_FILE = "test"


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
        and _attribute(given, "sizes") is not None
    )


def as_client_data(given: ClientData, test_data: Any = None) -> tuple[Dataset, ClientData]:
    """The data set that a model is made for and tested on, without training samples; and clients.

    Args:
        given: As the user gave it.
        test_data: `(x_test, y_test)`; None for that of `given`.

    Raises:
        DataError: The sizes, the names, the classes or the test data cannot be used.
    """
    sizes = np.asarray(to_array("sizes", _attribute(given, "sizes")))
    if sizes.ndim != 1 or not len(sizes) or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        raise DataError(
            "sizes must be one whole number per client, at least 1: how many samples it has"
        )
    test = _attribute(given, "test_data") if test_data is None else test_data
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
        name="own clients",
        train_x=empty,
        train_y=y[:0],
        test_x=x,
        test_y=y,
        classes=classes,
        client_names=names,
        scaled=are_pixels(test[0]),
    )
    return dataset, given


def _attribute(given: ClientData, name: str) -> Any:
    with blame(f"{name} of the clients could not be read"):
        return getattr(given, name, None)


def _classes(given: ClientData, labels: Array) -> int:
    """K; one more than the largest label where the clients do not say it."""
    classes = _attribute(given, "classes")
    if classes is None:
        return int(labels.max()) + 1
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1:
        raise DataError(f"classes must be a whole number, at least 1, but is {classes!r}")
    return int(classes)


def _names(given: ClientData, count: int) -> tuple[str, ...]:
    """What the clients are called; () where they do not say it."""
    found = _attribute(given, "names")
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
        check_same_form(x, data.test_x)
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
    return as_numbers(key, array) if array.dtype.kind == "f" else array.astype(np.int64)


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
    # A user's own method may fail; attributes may go round in a circle.
    with blame(
        "the clients cannot be described in a record; their method describe() must return what "
        "tells them from others, as numbers and texts"
    ):
        made = describe(own() if callable(own) else given)
        text = json.dumps(made, sort_keys=True, default=repr)
    if len(text) > _LONGEST:
        kind = f"{type(given).__module__}:{type(given).__qualname__}"
        made = {"class": kind, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return {"clients": made, "sizes": describe_array(given.sizes)}


@plain_keywords
@dataclass(frozen=True)
class SyntheticPopulation:
    """Generated clients: the data of a client is drawn when it is needed, the same each time.

    In the manner of LEAF's synthetic(alpha, beta) (Caldas et al., 2018; Li et al., 2020). Client k
    has

        W_k, b_k    W_0 + alpha V_k: a linear model, common to all but for a part of its own
        v_k         mean of its samples: each feature ~ N(B_k, 1), B_k ~ N(0, beta^2)
        x           ~ N(v_k, S), S diagonal with S_jj = j^-1.2
        y           argmax(W_k x + b_k)

    In LEAF, W_k is drawn for each client by itself, so that clients have nothing in common. Here a
    federation can learn their common part.

    Args:
        clients: N.
        alpha: How much the clients' true models differ; 0: not at all.
        beta: How much the means of their samples differ.
        features: Numbers per sample.
        classes: Labels.
        samples: Samples of the median client.
        size_spread: Standard deviation of the logarithm of a client's size.
        tested: Samples of the test data, drawn from clients of the population, 20 from each.
        seed: Fixes the population, whatever the seed of a run.

    Example:
        >>> from fedcor import SyntheticPopulation
        >>> population = SyntheticPopulation(100_000)
        >>> x, y = population.load(99_999)
        >>> x.shape == (population.sizes[99_999], 60)
        True
    """

    clients: int
    alpha: float = 0.5
    beta: float = 0.5
    features: int = 60
    classes: int = 10
    samples: int = 50
    size_spread: float = 0.5
    tested: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("clients", "features", "samples", "tested"):
            check_at_least(key, getattr(self, key), 1)
        check_at_least("classes", self.classes, 2)
        check_at_least("seed", self.seed, 0)
        for key in ("alpha", "beta"):
            check_between(key, getattr(self, key), 0.0, _MOST_DIFFERENT)
        check_between("size_spread", self.size_spread, 0.0, 3.0)

    @cached_property
    def sizes(self) -> IntArray:
        """(N,) samples of each client, log-normal."""
        z = stream(self.seed, "population sizes").standard_normal(self.clients)
        wanted = self.samples * np.exp(self.size_spread * z)
        sizes: IntArray = np.maximum(1, np.rint(wanted)).astype(np.int64)
        return sizes

    @cached_property
    def test_data(self) -> tuple[Array, IntArray]:
        """Samples and labels of as many clients as needed, drawn at random."""
        count = -(-self.tested // _TESTED)
        rng = stream(self.seed, "population test")
        clients = rng.choice(self.clients, size=count, replace=count > self.clients).tolist()
        drawn = [self._draw(k, _TESTED, "population test", i) for i, k in enumerate(clients)]
        x, y = (np.concatenate(parts)[: self.tested] for parts in zip(*drawn, strict=True))
        return x, y

    def load(self, client: int) -> tuple[Array, IntArray]:
        """The samples of a client, (n_k, features), and their labels."""
        return self._draw(client, int(self.sizes[client]), "population samples", client)

    @cached_property
    def _common(self) -> FloatArray:
        """(classes, features + 1) W_0, and b_0 as its last column."""
        shape = (self.classes, self.features + 1)
        return stream(self.seed, "population model").standard_normal(shape)

    def _draw(self, client: int, count: int, purpose: str, key: int) -> tuple[Array, IntArray]:
        """`count` samples of a client, from the stream (seed, purpose, key)."""
        rng = stream(self.seed, "population client", client)
        W = self._common + self.alpha * rng.standard_normal(self._common.shape)
        mean = self.beta * rng.standard_normal() + rng.standard_normal(self.features)
        deviations = np.arange(1, self.features + 1) ** -0.6
        z = stream(self.seed, purpose, key).standard_normal((count, self.features))
        x = mean + deviations * z
        return x.astype(np.float32), np.argmax(x @ W[:, :-1].T + W[:, -1], axis=1)


@plain_keywords
@dataclass(frozen=True)
class FolderPopulation(Described):
    """Clients in a folder: one file `<id>.npz` each, with the arrays `x` and `y`, and `test.npz`.

    A client is called as its file. The arrays `y` are read once, for the sizes, and the checksums
    of the files; a whole file is read when its client is needed.

    Args:
        folder: Where the files are.

    Raises:
        DataError: There are none, or one is damaged.
    """

    folder: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", str(self.folder))  # a Path is welcome
        _ = self._found

    @cached_property
    def _found(self) -> tuple[dict[str, int], str]:
        """The samples of each client by its name, and the checksum of all files."""
        folder = expand_home("folder", self.folder)
        paths = sorted(path for path in folder.glob("*.npz") if path.stem != _TEST_FILE)
        if not paths:
            raise DataError(f"{folder}: there is no file <id>.npz of a client")
        found, digest = {}, hashlib.sha256()
        for path in paths:
            with open_npz(path, ("x", "y")) as archive:
                found[path.stem] = len(archive["y"])
                entries = archive.zip.infolist()  # their checksums are those of the archive
            content = [(entry.filename, entry.file_size, entry.CRC) for entry in entries]
            digest.update(repr((path.stem, content)).encode())
        return found, digest.hexdigest()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The clients' ids, sorted."""
        return tuple(self._found[0])

    @cached_property
    def sizes(self) -> IntArray:
        """(N,) samples of each client."""
        return np.array(list(self._found[0].values()), dtype=np.int64)

    @property
    def test_data(self) -> tuple[Array, Array]:
        """The arrays of `test.npz`."""
        return self._read(_TEST_FILE)

    def load(self, client: int) -> tuple[Array, Array]:
        """The arrays of a client's file."""
        return self._read(self.names[client])

    def describe(self) -> dict[str, Any]:
        """The folder, and a checksum of the clients' files: their names, sizes and contents."""
        made_by = reference(FolderPopulation)
        return {"class": made_by, "folder": self.folder, "checksum": self._found[1]}

    def _read(self, name: str) -> tuple[Array, Array]:
        path = expand_home("folder", self.folder) / f"{name}.npz"
        with open_npz(path, ("x", "y")) as archive:
            return archive["x"], archive["y"]
