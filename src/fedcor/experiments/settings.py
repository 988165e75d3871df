"""The settings of an experiment as frozen dataclasses, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedcor.checks import check_at_least, check_between, check_fraction, check_positive
from fedcor.data import Partition
from fedcor.errors import ConfigError
from fedcor.faults import Faults
from fedcor.model_options import MODEL_OPTIONS, check_model_options
from fedcor.optimisers import Optimiser, build_optimiser
from fedcor.selectors import build_selector
from fedcor.types import Selector, selector_traits

__all__ = ["DataSettings", "Experiment", "TrainingSettings"]

_LARGEST = 1e6  # of a learning rate, of its factor and of the weight decay
_DEVICES = ("auto", "cpu", "cuda", "mps")
# Settings that are newer than the first records, as (table, key). A record names them only where
# they are switched on, so that older runs can be resumed and compared.
_NEWER = (("data", "noisy_clients"), ("partition", "size_skew"))


@dataclass(frozen=True)
class DataSettings:
    """The table `[data]`.

    Args:
        name: a data set of `fedcor data list`, or the path of an .npz file.
        holdout: share of each client's data, in [0, 1), that is kept out of training; the
            client's loss is measured on it.
        noisy_clients: share of the clients, in [0, 1], whose labels are drawn at random.
    """

    name: str
    holdout: float = 0.0
    noisy_clients: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("holdout", self.holdout, closed=True)
        if self.holdout == 1.0:
            raise ConfigError("holdout", self.holdout, "must be below 1, to leave training data")
        check_fraction("noisy_clients", self.noisy_clients, closed=True)


@dataclass(frozen=True)
class TrainingSettings:
    """The table `[training]`.

    Args:
        rounds: rounds of the run.
        clients_per_round: C, the number of clients that are chosen in each round.
        batch_size: B, samples per mini-batch.
        local_steps: E, mini-batches per client and round.
        learning_rate: of local SGD.
        milestones: rounds at which the learning rate is multiplied by `factor`.
        factor: see `milestones`.
        weight_decay: of local SGD.
        device: "cpu", "cuda" or "mps"; "auto" takes an accelerator if there is one.
    """

    rounds: int
    clients_per_round: int
    batch_size: int
    local_steps: int
    learning_rate: float
    milestones: tuple[int, ...] = ()
    factor: float = 0.5
    weight_decay: float = 0.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for key in ("rounds", "clients_per_round", "batch_size", "local_steps"):
            check_at_least(key, getattr(self, key), 1)
        for key in ("learning_rate", "factor"):
            check_positive(key, getattr(self, key))
        for key in ("learning_rate", "factor", "weight_decay"):
            check_between(key, getattr(self, key), 0.0, _LARGEST)
        if self.device.partition(":")[0] not in _DEVICES:
            raise ConfigError("device", self.device, f"must be one of {', '.join(_DEVICES)}")


@dataclass(frozen=True)
class Experiment:
    """Everything about an experiment except the seed.

    Args:
        name: names the experiment in folders and tables.
        data: which data.
        partition: how the data is spread over the clients.
        model: `name`, and the options of that model.
        training: rounds and local training.
        optimiser: `name`, and the options of that federated optimiser.
        faults: which faults are simulated.
        selector: name of the selector that runs, or module:Class.
        selectors: hyper-parameters of selectors, one table per name; those that are not given
            have the selector's defaults.
        target_accuracy: for "rounds to target", in (0, 1].

    Example:
        >>> from fedcor.experiments import load_experiment
        >>> load_experiment("digits", ["training.rounds=20"], selector="afl").training.rounds
        20
    """

    name: str
    data: DataSettings
    partition: Partition
    model: Mapping[str, Any]
    training: TrainingSettings
    optimiser: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    faults: Faults = field(default_factory=Faults)
    selector: str = "fedcor"
    selectors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    target_accuracy: float | None = None

    def build_selector(self) -> Selector:
        """The selector that runs, with its hyper-parameters."""
        options = self.selectors.get(self.selector)
        try:
            return build_selector(self.selector, self.training.clients_per_round, options)
        except ConfigError as error:
            if error.key == "selector":
                raise
            raise error.under(f"selectors.{self.selector}") from None

    def build_optimiser(self) -> Optimiser:
        """The federated optimiser, with its options."""
        options = dict(self.optimiser)
        name = options.pop("name", "fedavg")
        with _errors_under("optimiser"):
            return build_optimiser(name, options)

    def with_selector(self, name: str) -> Experiment:
        """The same experiment with another selector; checked."""
        return dataclasses.replace(self, selector=name).check()

    def check(self) -> Experiment:
        """This experiment. Raises ConfigError for what cannot work, before anything is loaded."""
        self._check_own_keys()
        self.build_optimiser()
        self._check_selectors()
        self._check_model()
        _check_finite(self.describe())
        return self

    def describe(self) -> dict[str, Any]:
        """Every setting as plain values, as a record keeps them.

        Of the selectors, it has the one that runs, with all its hyper-parameters.
        """
        settings = dataclasses.asdict(self)
        for table, key in _NEWER:
            if not settings[table][key]:
                del settings[table][key]
        settings["selectors"] = {self.selector: dataclasses.asdict(self.build_selector())}  # type: ignore[call-overload]
        return settings

    def _check_own_keys(self) -> None:
        chosen, clients = self.training.clients_per_round, self.partition.clients
        if chosen > clients:
            allowed = f"must be at most partition.clients = {clients}"
            raise ConfigError("training.clients_per_round", chosen, allowed)
        if not self.name.strip(". ") or any(mark in self.name for mark in "/\\:"):
            raise ConfigError("name", self.name, "must be a plain name: it names a folder")
        if self.target_accuracy is not None:
            check_fraction("target_accuracy", self.target_accuracy, closed=True)
            check_positive("target_accuracy", self.target_accuracy)

    def _check_selectors(self) -> None:
        """All tables of selectors: a misspelt key is refused even if another selector runs."""
        for name, options in self.selectors.items():
            if not isinstance(options, Mapping):
                raise ConfigError(f"selectors.{name}", options, "must be a table of settings")
            if "clients_per_round" in options:
                key, given = f"selectors.{name}.clients_per_round", options["clients_per_round"]
                raise ConfigError(key, given, "is set for all by training.clients_per_round")
            if name != self.selector:
                dataclasses.replace(self, selector=name).build_selector()
        candidates = selector_traits(self.build_selector()).candidates
        if candidates is not None and candidates > self.partition.clients:
            allowed = f"must be at most {self.partition.clients} clients"
            raise ConfigError(f"selectors.{self.selector}.candidates", candidates, allowed)

    def _check_model(self) -> None:
        options = dict(self.model)
        name = options.pop("name", None)
        if not isinstance(name, str):
            allowed = f"must be given: {', '.join(MODEL_OPTIONS)}, or module:factory"
            raise ConfigError("model.name", name, allowed)
        with _errors_under("model"):
            check_model_options(name, options)


@contextmanager
def _errors_under(table: str) -> Iterator[None]:
    """A ConfigError raised within names its key inside `table`."""
    try:
        yield
    except ConfigError as error:
        raise error.under(table) from None


def _check_finite(settings: Any, path: str = "") -> None:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            _check_finite(value, f"{path}.{key}".removeprefix("."))
    elif isinstance(settings, list | tuple):
        for value in settings:
            _check_finite(value, path)
    elif isinstance(settings, float) and not math.isfinite(settings):
        raise ConfigError(path, settings, "must be a finite number")
