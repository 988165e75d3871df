"""Turn what a user gives for an experiment (names, tables, objects) into what it stores.

Each `as_...` function accepts every form of one setting and refuses the rest with a `ConfigError`.
Each `describe_...` function turns a stored setting back into the table of a file, for a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedcor.core.config import build_dataclass
from fedcor.core.describe import Described, describe
from fedcor.core.errors import ConfigError, errors_under
from fedcor.core.types import Optimiser, Selector
from fedcor.data.client_data import (
    ClientData,
    PerClient,
    as_client_data,
    describe_clients,
    is_client_data,
)
from fedcor.data.datasets import Dataset
from fedcor.data.own_data import are_ids, as_dataset, clients_of
from fedcor.data.partitioners import OwnParts, Partitioner, as_partition
from fedcor.optimisers import OPTIMISERS, as_optimiser, build_optimiser
from fedcor.simulation.tasks import MODEL_OPTIONS, check_model_options, load_model_factory

T = TypeVar("T")

DEEPEST = 20  # levels of tables and lists within one another


@dataclass(frozen=True, eq=False, repr=False)
class OwnData(Described):
    """A user's own data, read when the experiment was made.

    Args:
        dataset: The data.
    """

    dataset: Dataset

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        keys = ("train_x", "train_y", "test_x", "test_y")
        return {key: describe(getattr(self.dataset, key)) for key in keys}

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
        dataset: The test data, which also shows the shape of a sample. No training samples.
        clients: Loads the data of each client.
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
        if partition is not None and not isinstance(partition, PerClient):
            allowed = "must be left out: each client has data of its own"
            raise ConfigError("partition", partition, allowed)
        if not isinstance(data, OwnClients):
            data = OwnClients(*as_client_data(data, test_data))
        return data, PerClient(len(data.clients.sizes))
    data = str(data) if isinstance(data, Path) else data
    if isinstance(partition, str) and ":" in partition:  # a class, not the name of a column
        partition = {"kind": partition}
    ids, parts = are_ids(partition), None
    if not isinstance(data, str | OwnData):
        dataset, parts = as_dataset(data, test_data, partition=partition)
        data = OwnData(dataset)
    elif test_data is not None:
        raise ConfigError("test_data", "given", f"must not be given: {data!r} has its own")
    elif ids:
        samples = len(data.dataset.train_y) if isinstance(data, OwnData) else None
        parts = clients_of(partition, samples)[0]
    if parts is not None:
        return data, OwnParts(parts, len(partition) if ids else None)
    return data, as_partition(partition)


def as_model(given: Any) -> Any:
    """A table with `name`, or the object: a factory, a class, or a module."""
    given = as_table(given)
    if not isinstance(given, Mapping):
        try:
            load_model_factory(given)
        except ConfigError:
            allowed = "must be a name, a table, a module of torch, or a function that makes one"
            raise ConfigError("model", given, allowed) from None
        return given
    options = dict(given)
    name = options.pop("name", None)
    if not isinstance(name, str):
        allowed = f"must be given: {', '.join(MODEL_OPTIONS)}, or module:factory"
        raise ConfigError("model.name", name, allowed)
    with errors_under("model"):
        check_model_options(name, options)
    return given


def as_table(given: Any) -> Any:
    """A name as a table; anything else unchanged."""
    return {"name": given} if isinstance(given, str) else given


def make_optimiser(setting: Any, default: Callable[[], str]) -> Optimiser:
    """The optimiser of a setting.

    Args:
        setting: A table, which need not have a `name`; an object; or None for the default.
        default: Gives the name of the optimiser where the setting has none.

    Raises:
        ConfigError: There is no such optimiser, or an option is wrong.
    """
    if setting is not None and not isinstance(setting, Mapping):
        try:
            return as_optimiser(setting)
        except ConfigError as error:
            about = error.renamed if error.key == "name" else error.under
            raise about("optimiser") from None
    options = dict(setting or {})
    name = options.pop("name") if "name" in options else default()
    with errors_under("optimiser"):
        return build_optimiser(name, options)


def as_settings(key: str, cls: type[T], given: Any) -> T:
    """An object of the dataclass `cls`, which may be given as a table of its settings."""
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        allowed = f"must be fedcor.{cls.__name__}, or a table of settings"
        raise ConfigError(key, given, allowed)
    with errors_under(key):
        return build_dataclass(cls, given)


def as_selectors(given: Any) -> dict[str, Mapping[str, Any] | Selector]:
    """By name: a table of hyper-parameters, or a selector."""
    if not isinstance(given, Mapping):
        raise ConfigError("selectors", given, "must be a table of settings")
    for name, options in given.items():
        if isinstance(options, type) or not isinstance(options, Mapping | Selector):
            allowed = "must be a table of settings, or a selector object"
            raise ConfigError(f"selectors.{name}", options, allowed)
        if isinstance(options, Mapping) and "clients_per_round" in options:
            key, number = f"selectors.{name}.clients_per_round", options["clients_per_round"]
            raise ConfigError(key, number, "is set for all by clients_per_round")
    return dict(given)


def as_python(value: Any) -> Any:
    """A number of NumPy's as one of Python's; anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def check_finite(settings: Any, path: str = "", depth: int = 0) -> None:
    """Refuse NaN and infinity anywhere in tables of settings, and tables that nest too deeply."""
    if depth > DEEPEST:
        raise ConfigError(path, settings, f"is nested more than {DEEPEST} levels deep")
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            check_finite(value, f"{path}.{key}".removeprefix("."), depth + 1)
    elif isinstance(settings, list | tuple):
        for value in settings:
            check_finite(value, path, depth + 1)
    elif isinstance(settings, float) and not math.isfinite(settings):
        raise ConfigError(path, settings, "must be a finite number")


def describe_optimiser(optimiser: Optimiser) -> dict[str, Any]:
    """As the table `[optimiser]` of a file, with all options."""
    given = getattr(optimiser, "short_form", optimiser)  # a user's own object with `aggregate`
    return {**described_table(given, "name"), "name": OPTIMISERS.name_of(given)}


def described_table(given: Any, key: str) -> dict[str, Any]:
    """A table, or an object as a table with its class under `key`, as far as a file can say it."""
    if isinstance(given, Mapping):
        return {**given}
    described = describe(given)
    if isinstance(described, str):
        return {key: described}
    return {key if k == "class" else k: value for k, value in described.items()}
