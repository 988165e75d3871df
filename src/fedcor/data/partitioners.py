"""Partitions as objects: the three built-in ones, a user's own, given parts, and Flower Datasets'.

Each has `split(labels, rng)`, which gives one array of sample indices per client, and `clients`
where that is known before the data is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedcor.core.config import build_dataclass, plain_keywords
from fedcor.core.describe import Described, describe_array
from fedcor.core.errors import ConfigError, DataError, errors_under
from fedcor.core.registry import Registry
from fedcor.core.types import Array, IntArray
from fedcor.data.partition import Kind, Partition


class Partitioner(Protocol):
    """What divides the training samples among clients; a user's own is any such object.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class InTurn:
        ...     clients: int
        ...     def split(self, labels, rng):
        ...         return [np.arange(k, len(labels), self.clients) for k in range(self.clients)]
    """

    def split(self, labels: Array, rng: np.random.Generator) -> Sequence[IntArray]:
        """One array of sample indices per client.

        Args:
            labels: `(n,)` the label of each sample.
            rng: The only source of randomness.
        """
        ...


class _BuiltIn(Described):
    """A kind of `Partition` with the parameters of that kind alone."""

    _kind: Kind

    def __post_init__(self) -> None:
        self._partition()

    def _partition(self) -> Partition:
        return Partition(self._kind, **dataclasses.asdict(self))  # type: ignore[call-overload]

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:
        """One ascending array of sample indices per client; see `Partition.split`."""
        return self._partition().split(labels, rng)

    def describe(self) -> dict[str, Any]:
        """As the table `[partition]` of a file."""
        return self._partition().describe()


@plain_keywords
@dataclass(frozen=True)
class IID(_BuiltIn):
    """Samples are shuffled and dealt.

    Args:
        clients: Number of clients, N.
        size_skew: Standard deviation of the logarithm of a client's size; 0: equal sizes.

    Example:
        >>> from fedcor import IID
        >>> parts = IID(clients=3).split(np.zeros(10), np.random.default_rng(1))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    _kind = "iid"
    clients: int
    size_skew: float = 0.0


@plain_keywords
@dataclass(frozen=True)
class Shards(_BuiltIn):
    """Samples are sorted by label and cut into shards; each client gets a few of them.

    Args:
        clients: Number of clients, N.
        shards_per_client: Shards that each client gets: about as many labels does it hold.
        size_skew: Standard deviation of the logarithm of a shard's size; 0: equal sizes.

    Example:
        >>> from fedcor import Shards
        >>> labels = np.repeat([0, 1, 2, 3], 5)
        >>> parts = Shards(4, shards_per_client=1).split(labels, np.random.default_rng(1))
        >>> [sorted(set(labels[part].tolist())) for part in parts]
        [[0], [1], [2], [3]]
    """

    _kind = "shards"
    clients: int
    shards_per_client: int = 2
    size_skew: float = 0.0


@plain_keywords
@dataclass(frozen=True)
class Dirichlet(_BuiltIn):
    """Sizes and label distributions differ, as in the paper's unbalanced setting.

    Args:
        clients: Number of clients, N; at least one per label.
        alpha: Concentration: the smaller, the fewer labels a client holds. From 1e-6 to 1e6.
        minimum_size: The least samples that a client is planned to have.

    Example:
        >>> from fedcor import Dirichlet
        >>> labels = np.arange(1000) % 10
        >>> parts = Dirichlet(20, alpha=0.2, minimum_size=5).split(labels, np.random.default_rng(1))
        >>> len(parts), sum(len(part) for part in parts)
        (20, 1000)
    """

    _kind = "dirichlet"
    clients: int
    alpha: float = 0.2
    minimum_size: int = 10


PARTITIONS = Registry(
    "kind",
    "fedcor.partitions",
    {"iid": IID, "shards": Shards, "dirichlet": Dirichlet},
    ("split",),
)


@dataclass(frozen=True, eq=False)
class OwnParts(Described):
    """Parts that were given: by an array of client ids, or as one data set per client.

    Args:
        parts: The sample indices of each client.
        samples: How many samples there must be; None for any number.
    """

    parts: Sequence[IntArray]
    samples: int | None = None

    def __repr__(self) -> str:
        return f"OwnParts({self.clients} clients, {sum(map(len, self.parts))} samples)"

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.parts)

    def split(self, labels: Array, rng: np.random.Generator) -> Sequence[IntArray]:  # noqa: ARG002
        """The parts. Raises DataError if they are of other data."""
        if self.samples is not None and len(labels) != self.samples:
            raise DataError(
                f"partition has {self.samples} client ids, but there are {len(labels)} samples: "
                "give one id per training sample"
            )
        return self.parts

    def describe(self) -> dict[str, Any]:
        """The number of clients, and a digest of who holds what."""
        owner = np.concatenate(
            [np.stack([np.full(len(p), k), p]) for k, p in enumerate(self.parts)], axis=1
        )
        return {"clients": self.clients, "samples of clients": describe_array(owner)}


@dataclass(frozen=True, eq=False)
class _FlowerDatasets(Described):
    """A partitioner of flwr-datasets. It draws from its own seed, whatever the seed of the run."""

    partitioner: Any

    @property
    def clients(self) -> int | None:
        """Number of clients; None where only the data tells (a natural id)."""
        number = getattr(self.partitioner, "_num_partitions", None)
        return number if isinstance(number, int) else None

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:  # noqa: ARG002
        """The samples of each of its partitions."""
        from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]

        column = getattr(self.partitioner, "_partition_by", None)
        table = {"fedcor_index": np.arange(len(labels)), "label": labels}
        if isinstance(column, str):
            table[column] = labels
        partitioner = copy.deepcopy(self.partitioner)  # it takes its data only once
        partitioner.dataset = Dataset.from_dict(table)
        return [
            np.sort(np.asarray(partitioner.load_partition(k)["fedcor_index"], dtype=np.int64))
            for k in range(partitioner.num_partitions)
        ]

    def describe(self) -> dict[str, Any]:
        """Its class and those of its parameters that are plain values."""
        cls, given = type(self.partitioner), vars(self.partitioner)
        plain = (bool, int, float, str, type(None))
        parameters = {k.lstrip("_"): v for k, v in given.items() if isinstance(v, plain)}
        return {
            "class": f"{cls.__module__}:{cls.__qualname__}",
            "clients": self.clients,
            **parameters,
        }


def as_partition(given: Any) -> Partitioner:
    """What a user gives as a partition, as an object with `split`.

    Args:
        given: A table as in a file (`kind` and its parameters), an object with `split`, or a
            partitioner of flwr-datasets.

    Raises:
        ConfigError: It is none of these, or a parameter is wrong.

    Example:
        >>> as_partition({"kind": "iid", "clients": 3}).clients
        3
    """
    if isinstance(given, str):
        given = {"kind": given}
    if isinstance(given, Mapping):
        return _from_table(given)
    # Asked of the class: many cannot tell their number before they have their data.
    if hasattr(type(given), "load_partition") and hasattr(type(given), "num_partitions"):
        return _FlowerDatasets(given)
    if isinstance(given, type) or not PARTITIONS.accepts(given):
        raise ConfigError(
            "partition",
            given,
            "must be fedcor.IID, Shards or Dirichlet with its parameters, an array with the client "
            "id of each training sample, or an object with the method split",
        )
    partition: Partitioner = given
    return partition


def _from_table(table: Mapping[str, Any]) -> Partitioner:
    kind = table.get("kind")
    with errors_under("partition"):
        if kind is None or kind in list(PARTITIONS.built_in):  # of any type
            return build_dataclass(Partition, table)
        options = {key: value for key, value in table.items() if key != "kind"}
        partition: Partitioner = PARTITIONS.build(kind, options)
        return partition


def check_parts(parts: Sequence[Any], samples: int) -> list[IntArray]:
    """The parts that a partition gave, as sorted arrays; refuses what cannot be trained on."""
    checked = []
    for client, part in enumerate(parts):
        rows = np.asarray(part)
        if rows.ndim != 1 or not len(rows) or rows.dtype.kind not in "ui":
            raise DataError(
                f"the partition gave client {client} no samples, or no list of sample indices"
            )
        if rows.min() < 0 or rows.max() >= samples:
            raise DataError(
                f"the partition gave client {client} sample {rows.max()} of {samples}: "
                f"indices go from 0 to {samples - 1}"
            )
        checked.append(rows.astype(np.int64))
    if not checked:
        raise DataError("the partition has no clients")
    return checked
