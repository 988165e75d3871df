"""Two populations whose data is not held: one that is generated, one that is read from a folder.

The generated one is in the manner of LEAF's synthetic(alpha, beta) (Caldas et al., 2018; Li et al.,
2020). Client k has

    W_k, b_k    W_0 + alpha V_k: a linear model, common to all but for a part of its own
    v_k         mean of its samples: each feature ~ N(B_k, 1), B_k ~ N(0, beta^2)
    x           ~ N(v_k, S), S diagonal with S_jj = j^-1.2
    y           argmax(W_k x + b_k)

In LEAF, W_k is drawn for each client by itself, so that there is nothing that many clients have in
common. Here it is their common part that a federation can learn.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from fedcor.core.config import check_at_least, check_between, expand_home, plain_keywords
from fedcor.core.describe import Described, reference
from fedcor.core.errors import DataError
from fedcor.core.rng import stream
from fedcor.core.types import Array, FloatArray, IntArray

_LARGEST = 1e3  # of alpha and beta
_TESTED = 20  # samples of each client that is tested on
_TEST_FILE = "test"


@plain_keywords
@dataclass(frozen=True)
class SyntheticPopulation:
    """Generated clients: the data of a client is drawn when it is needed, the same each time.

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
            check_between(key, getattr(self, key), 0.0, _LARGEST)
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
        own = stream(self.seed, "population client", client)
        W = self._common + self.alpha * own.standard_normal(self._common.shape)
        mean = self.beta * own.standard_normal() + own.standard_normal(self.features)
        deviations = np.arange(1, self.features + 1) ** -0.6
        z = stream(self.seed, purpose, key).standard_normal((count, self.features))
        x = mean + deviations * z
        return x.astype(np.float32), np.argmax(x @ W[:, :-1].T + W[:, -1], axis=1)


@plain_keywords
@dataclass(frozen=True)
class FolderPopulation(Described):
    """Clients in a folder: one file `<id>.npz` each, with the arrays `x` and `y`, and `test.npz`.

    A client is called as its file. The files' heads are read once, for the sizes and checksums; a
    file is read when its client is needed.

    Args:
        folder: Where the files are.

    Raises:
        DataError: There are none, or one is damaged.
    """

    folder: str
    _found: dict[str, int] = field(init=False, repr=False, compare=False)
    _checksum: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", str(self.folder))  # a Path is welcome
        folder = expand_home("folder", self.folder)
        paths = sorted(path for path in folder.glob("*.npz") if path.stem != _TEST_FILE)
        if not paths:
            raise DataError(f"{folder}: there is no file <id>.npz of a client")
        found, digest = {}, hashlib.sha256()
        for path in paths:
            found[path.stem], content = _head(path)
            digest.update(repr((path.stem, content)).encode())
        object.__setattr__(self, "_found", found)
        object.__setattr__(self, "_checksum", digest.hexdigest())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The clients' ids, sorted."""
        return tuple(self._found)

    @cached_property
    def sizes(self) -> IntArray:
        """(N,) samples of each client."""
        return np.array(list(self._found.values()), dtype=np.int64)

    @property
    def test_data(self) -> tuple[Array, Array]:
        """The arrays of `test.npz`."""
        return _read(self._path(_TEST_FILE))

    def load(self, client: int) -> tuple[Array, Array]:
        """The arrays of a client's file."""
        return _read(self._path(self.names[client]))

    def describe(self) -> dict[str, Any]:
        """The folder, and a checksum of the clients' files: their names, sizes and contents."""
        made_by = reference(FolderPopulation)
        return {"class": made_by, "folder": self.folder, "checksum": self._checksum}

    def _path(self, name: str) -> Path:
        return expand_home("folder", self.folder) / f"{name}.npz"


def _read(path: Path) -> tuple[Array, Array]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["x"], arrays["y"]
    except Exception as error:  # a damaged file gives errors of zlib, zipfile, NumPy and others
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: has no arrays x and y that can be read: {cause}") from None


def _head(path: Path) -> tuple[int, list[tuple[str, int, int]]]:
    """The length of the array `y`, from the head of its file; and of each array in the archive, its
    name, its bytes and the checksum that the archive has of them.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open("y.npy") as file:
            read: Any = npy.read_array_header_1_0
            if npy.read_magic(file)[0] != 1:
                read = npy.read_array_header_2_0
            shape = read(file)[0]
            content = [(one.filename, one.file_size, one.CRC) for one in archive.infolist()]
            return int(shape[0]), content
    except Exception as error:  # as in _read
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: has no array y that can be read: {cause}") from None
