"""What a user gives for an experiment, as what the experiment holds: names, tables, or objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fedcor.config import build_dataclass
from fedcor.data import (
    ClientData,
    Dataset,
    OwnParts,
    Partition,
    Partitioner,
    PerClient,
    as_client_data,
    as_dataset,
    as_partition,
    describe_clients,
    is_client_data,
    parts_of,
)
from fedcor.describe import Described, describe, describe_array
from fedcor.errors import ConfigError
from fedcor.faults import Faults
from fedcor.liars import Liars
from fedcor.model_options import load_model_factory
from fedcor.types import Selector

T = TypeVar("T")

__all__ = [
    "OwnClients",
    "OwnData",
    "as_data",
    "as_faults",
    "as_liars",
    "as_model",
    "as_selectors",
    "describe_model",
    "describe_partition",
]


_NO_IDS: Any = object()  # as a partition: there is one, but the data need not know it


@dataclass(frozen=True, eq=False, repr=False)
class OwnData(Described):
    """A user's own data, as it was when the experiment was made.

    Args:
        dataset: The data.
    """

    dataset: Dataset

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        found = {}
        for key in ("train_x", "train_y", "test_x", "test_y"):
            given = getattr(self.dataset, key)
            if isinstance(given, Mapping):
                found[key] = {name: describe_array(array) for name, array in given.items()}
            else:
                found[key] = describe_array(given)
        return found

    def describe(self) -> dict[str, Any]:
        """The shape, type and digest of every array."""
        return {"name": self.dataset.name, **self._arrays}

    def __repr__(self) -> str:
        n, m = len(self.dataset.train_y), len(self.dataset.test_y)
        return f"OwnData({self.dataset.name!r}, {n} training and {m} test samples)"


@dataclass(frozen=True, eq=False, repr=False)
class OwnClients(OwnData):
    """Clients whose data is loaded when it is needed.

    Args:
        dataset: The test data, and what a sample looks like. It has no training samples.
        clients: Load the data.
    """

    clients: ClientData

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        tested = super()._arrays
        described = describe_clients(self.clients)
        return {**described, "test_x": tested["test_x"], "test_y": tested["test_y"]}

    def __repr__(self) -> str:
        count, tested = len(self.clients.sizes), len(self.dataset.test_y)
        return f"OwnClients({count} clients, {tested} test samples)"


def as_data(data: Any, test_data: Any, partition: Any) -> tuple[str | OwnData, Partitioner]:
    """The data of an experiment, and how it is spread over clients.

    Args:
        data: The name of a data set, the path of an .npz file, what `as_dataset` takes, or clients
            that load their data (`ClientData`).
        test_data: As `as_dataset` takes it.
        partition: What `as_partition` takes; an array of client ids; the name of the column that
            has them in a Hugging Face Dataset; None where the data comes in one part per client.
    """
    if isinstance(data, OwnClients) or is_client_data(data):
        return _clients(data, test_data, partition)
    held, parts = _held(data, test_data, partition)
    if parts is not None:
        return held, OwnParts(parts, len(partition) if _are_ids(partition) else None)
    if partition is None:
        raise ConfigError(
            "partition",
            None,
            "must be given: fedcor.Dirichlet(clients=50), Shards or IID, an array with the client "
            "id of each training sample, or an object with the method split",
        )
    return held, as_partition(partition)


def _clients(data: Any, test_data: Any, partition: Any) -> tuple[OwnClients, PerClient]:
    """Clients that load their data; there is nothing to divide among them."""
    if partition is not None and not isinstance(partition, PerClient):
        allowed = "must be left out: each client has data of its own"
        raise ConfigError("partition", partition, allowed)
    held = data if isinstance(data, OwnClients) else OwnClients(*as_client_data(data, test_data))
    return held, PerClient(len(held.clients.sizes))


def _held(data: Any, test_data: Any, partition: Any) -> tuple[str | OwnData, Any]:
    """The data; and its parts, where the data or an array of client ids tells them."""
    ids = partition if _are_ids(partition) else None
    data = str(data) if isinstance(data, Path) else data
    if isinstance(data, str | OwnData):
        if test_data is not None:
            raise ConfigError("test_data", "given", f"must not be given: {data!r} has its own")
        samples = len(data.dataset.train_y) if isinstance(data, OwnData) else None
        return data, None if ids is None else parts_of(ids, samples)
    if isinstance(partition, str) and ":" not in partition:
        ids = partition  # the name of a column
    elif partition is not None and ids is None:
        ids = _NO_IDS
    dataset, parts = as_dataset(data, test_data, partition=ids)
    return OwnData(dataset), parts


def _are_ids(partition: Any) -> bool:
    return isinstance(partition, list | tuple) or hasattr(partition, "__array__")


def as_model(given: Any) -> Any:
    """A table with `name`, or the object: a factory, a class, or a module."""
    if isinstance(given, str):
        return {"name": given}
    if not isinstance(given, Mapping):
        try:
            load_model_factory(given)
        except ConfigError:
            allowed = "must be a name, a table, a module of torch, or a function that makes one"
            raise ConfigError("model", given, allowed) from None
    return given


def as_faults(given: Any) -> Faults:
    """Faults, of a table too."""
    return _of_table("faults", Faults, given)


def as_liars(given: Any) -> Liars:
    """Liars, of a table too."""
    return _of_table("liars", Liars, given)


def _of_table(key: str, cls: type[T], given: Any) -> T:
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        allowed = f"must be fedcor.{cls.__name__}, or a table of settings"
        raise ConfigError(key, given, allowed)
    try:
        return build_dataclass(cls, given)
    except ConfigError as error:
        raise error.under(key) from None


def as_selectors(given: Any) -> dict[str, Mapping[str, Any] | Selector]:
    """By name: a table of hyper-parameters, or a selector."""
    if not isinstance(given, Mapping):
        raise ConfigError("selectors", given, "must be a table of settings")
    for name, options in given.items():
        if isinstance(options, type) or not isinstance(options, Mapping | Selector):
            allowed = "must be a table of settings, or a selector object"
            raise ConfigError(f"selectors.{name}", options, allowed)
    return dict(given)


def describe_partition(partition: Partitioner) -> dict[str, Any]:
    """As the table `[partition]` of a file, as far as a file can say it."""
    if isinstance(partition, Partition):
        return partition.describe()
    return _as_table(partition, "kind")


def describe_model(model: Any) -> dict[str, Any]:
    """As the table `[model]` of a file, as far as a file can say it."""
    if isinstance(model, Mapping):
        return {**model}
    return _as_table(model, "name")


def _as_table(given: Any, key: str) -> dict[str, Any]:
    described = describe(given)
    if isinstance(described, str):
        return {key: described}
    return {key if k == "class" else k: value for k, value in described.items()}
