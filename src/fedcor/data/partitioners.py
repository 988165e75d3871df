"""Everything that can be given as a partition: a table, an object, client ids, Flower Datasets.

Each becomes an object that has `split(labels, rng)`, which gives one array of sample indices per
client, and `clients` where that is known before the data is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedcor.core.describe import Described, describe_array
from fedcor.core.errors import ConfigError, DataError, errors_under
from fedcor.core.registry import Registry
from fedcor.core.types import Array, IntArray
from fedcor.data.partition import IID, Dirichlet, Shards


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


PARTITIONS = Registry(
    "kind",
    "fedcor.partitions",
    {"iid": IID, "shards": Shards, "dirichlet": Dirichlet},
    ("split",),
)


_ALLOWED = (
    "must be fedcor.IID, Shards or Dirichlet with its parameters, an array with the client id of "
    "each training sample, or an object with the method split"
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
        raise ConfigError("partition", given, _ALLOWED)
    partition: Partitioner = given
    return partition


def _from_table(table: Mapping[str, Any]) -> Partitioner:
    """The partition of a table. Parameters of another built-in kind are ignored.

    So the kind of a preset can be overridden on its own.
    """
    options = dict(table)
    kind = options.pop("kind", None)
    with errors_under("partition"):
        if isinstance(kind, str) and kind in PARTITIONS.built_in:
            if kind == "dirichlet" and options.get("size_skew"):
                allowed = "must be 0 for a dirichlet partition, which has sizes of its own"
                raise ConfigError("size_skew", options["size_skew"], allowed)
            fields = {
                name: {*cls.__dataclass_fields__} for name, cls in PARTITIONS.built_in.items()
            }
            for key in set().union(*fields.values()) - fields[kind]:
                options.pop(key, None)
        partition: Partitioner = PARTITIONS.build(kind, options)
        return partition


def check_parts(parts: Sequence[Any], samples: int) -> list[IntArray]:
    """The parts that a partition gave, as arrays; refuses what cannot be trained on."""
    checked = []
    for client, part in enumerate(parts):
        rows = np.asarray(part)
        if rows.ndim != 1 or not len(rows) or rows.dtype.kind not in "ui":
            raise DataError(
                f"the partition gave client {client} no samples, or no list of sample indices"
            )
        if rows.min() < 0 or rows.max() >= samples:
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise DataError(
                f"the partition gave client {client} sample {wrong} of {samples}: "
                f"indices go from 0 to {samples - 1}"
            )
        checked.append(rows.astype(np.int64))
    if not checked:
        raise DataError("the partition has no clients")
    counts = np.bincount(np.concatenate(checked))
    if counts.max() > 1:
        raise DataError(f"the partition gave sample {counts.argmax()} {counts.max()} times")
    return checked
