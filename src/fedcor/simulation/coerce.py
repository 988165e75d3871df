"""What a user gives for an experiment, as what the experiment holds: names, tables, or objects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedcor.core.config import (
    build_dataclass,
    check_at_least,
    check_between,
    check_fraction,
    check_memory,
    check_positive,
)
from fedcor.core.describe import Described, describe, describe_array
from fedcor.core.errors import ConfigError
from fedcor.core.types import Selector, optimiser_traits, selector_traits
from fedcor.data.client_data import (
    ClientData,
    PerClient,
    as_client_data,
    describe_clients,
    is_client_data,
)
from fedcor.data.datasets import Dataset
from fedcor.data.own_data import as_dataset, parts_of
from fedcor.data.partition import Partition
from fedcor.data.partitioners import OwnParts, Partitioner, as_partition
from fedcor.rounds.rules.declaration import check_can_ask, with_clients
from fedcor.rounds.rules.resolved import FixedRules
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.faults import Faults
from fedcor.simulation.tasks import MODEL_OPTIONS, check_model_options, load_model_factory

T = TypeVar("T")


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


def as_byzantine(given: Any) -> Byzantine:
    """Byzantine, of a table too."""
    return _of_table("byzantine", Byzantine, given)


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


# Checks of single settings of an experiment; `settings.py` has those of several at once.


DEEPEST = 20  # levels of tables and lists within one another
BYTES_PER_CLIENT = 400  # at the least: its rows, its size, and what is known of it
LARGEST = 1e6  # of a learning rate, of its factor and of the weight decay
_DEVICES = ("auto", "cpu", "cuda", "mps")


def check_numbers(experiment: Any) -> None:
    """Refuse numbers of an experiment that are out of range, and unknown devices."""
    for key in ("rounds", "batch_size", "local_steps"):
        check_at_least(key, getattr(experiment, key), 1)
    check_at_least("clients_per_round", experiment.clients_per_round, 0)
    check_positive("factor", experiment.factor)
    for key in ("factor", "weight_decay"):
        check_between(key, getattr(experiment, key), 0.0, LARGEST)
    if experiment.device.partition(":")[0] not in _DEVICES:
        raise ConfigError("device", experiment.device, f"must be one of {', '.join(_DEVICES)}")
    check_fraction("holdout", experiment.holdout, closed=True)
    if experiment.holdout == 1.0:
        raise ConfigError("holdout", experiment.holdout, "must be below 1, to leave training data")
    check_fraction("noisy_clients", experiment.noisy_clients, closed=True)


def check_faults(
    faults: Faults, selector: Selector, rules: FixedRules | None, clients: int, rounds: int
) -> None:
    """Refuse faults that do not go with so many clients, with the rules, or with the selector.

    Args:
        faults: As the user gave them.
        selector: Chooses; with over-selection it must be one that can be asked for more clients.
        rules: Who may be chosen; None for everyone.
        clients: N.
        rounds: Of a run.
    """
    with errors_under("faults"):
        faults.check_for(clients, None if rules is None else rules.eligible)
        if faults.over_selection == 1.0:
            return
        given, own = faults.over_selection, selector_traits(selector).clients_per_round
        check_can_ask("over_selection", given, selector)
        numbers = {None} if rules is None else {rules.rules.clients_at(t) for t in range(rounds)}
        for needed in sorted(number or int(own or 0) for number in numbers):
            chosen = faults.choose(needed, clients)
            try:
                with_clients(selector, chosen)
            except ConfigError as error:
                allowed = f"{chosen} clients do not go with the selector: {error}"
                raise ConfigError("over_selection", given, allowed) from None


def check_model(model: Any) -> None:
    """Refuse the table of a model that there is not, or of options that it does not have."""
    if not isinstance(model, Mapping):
        return
    check_finite({"model": model})
    options = dict(model)
    name = options.pop("name", None)
    if not isinstance(name, str):
        allowed = f"must be given: {', '.join(MODEL_OPTIONS)}, or module:factory"
        raise ConfigError("model.name", name, allowed)
    with errors_under("model"):
        check_model_options(name, options)


def check_selector_memory(
    name: str, selector: Any, clients: int, parameters: int | None = None
) -> None:
    """Refuse a selector whose state does not fit into memory.

    Args:
        name: What the selector is called in the settings.
        selector: One that may have `memory_bytes(clients, parameters)`: setting -> bytes.
        clients: N.
        parameters: P, of the model; None where it is not known yet.
    """
    needs = getattr(selector, "memory_bytes", None)
    for key, needed in needs(clients, parameters).items() if callable(needs) else ():
        check_memory(f"selectors.{name}.{key}", getattr(selector, key), needed)


def check_optimiser_memory(optimiser: Any, clients: int, parameters: int) -> None:
    """Refuse an optimiser that remembers a vector of each client, if they do not fit into memory.

    Args:
        optimiser: One whose trait `remembers` may be true.
        clients: How many take part in a run, at the most.
        parameters: P, of the model.
    """
    if optimiser_traits(optimiser).remembers:
        number = np.dtype(getattr(optimiser, "dtype", "float32")).itemsize
        given = f"{type(optimiser).__name__} of {clients} clients with {parameters} parameters each"
        check_memory("optimiser.name", given, float(number) * clients * parameters)


@contextmanager
def errors_under(table: str) -> Iterator[None]:
    """A ConfigError raised within names its key inside `table`."""
    try:
        yield
    except ConfigError as error:
        raise error.under(table) from None


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


def chosen_by(selector: Selector) -> int | None:
    """How many clients a selector chooses; None if it does not say."""
    chosen: int | None = plain(selector_traits(selector).clients_per_round)
    return chosen


def is_table(value: Any) -> bool:
    """Whether it is a table of settings."""
    return isinstance(value, Mapping)


def plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value
