"""An experiment: one frozen dataclass, checked as a whole when it is made, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, get_type_hints

from fedcor.core.config import (
    check_at_least,
    check_between,
    check_fraction,
    check_positive,
    convert,
    plain_keywords,
)
from fedcor.core.describe import describe
from fedcor.core.errors import ConfigError, errors_under
from fedcor.core.types import Optimiser, Selector, selector_traits
from fedcor.rounds.defence.settings import Defence, as_defence
from fedcor.rounds.loss_screening import LossNoise
from fedcor.rounds.rules.declaration import (
    as_rules,
    as_tags,
    check_can_ask,
    describe_tags,
    with_clients,
)
from fedcor.rounds.rules.resolved import FixedRules, fix_rules
from fedcor.selectors import DEFAULT_SELECTOR, SELECTORS, build_selector, selector_name
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.coerce import (
    OwnClients,
    OwnData,
    as_data,
    as_model,
    as_python,
    as_selectors,
    as_settings,
    as_table,
    check_finite,
    describe_optimiser,
    described_table,
    make_optimiser,
)
from fedcor.simulation.faults import Faults
from fedcor.simulation.schedules import LearningRate, Schedule, as_schedule
from fedcor.simulation.tasks import MetricSetting, describe_metrics, find_loss, find_metrics

_LARGEST = 1e6  # of a learning rate, of its factor and of the weight decay
_DEVICES = ("auto", "cpu", "cuda", "mps")

# The tables of a file, and of a record, that hold several keywords of an experiment each.
TABLES = {
    "data": ("holdout", "noisy_clients"),
    "privacy": ("loss_noise", "loss_clip"),
    "training": (
        "rounds",
        "clients_per_round",
        "batch_size",
        "local_steps",
        "learning_rate",
        "milestones",
        "factor",
        "weight_decay",
        "device",
        "loss",
    ),
}
# Settings of these types are converted, as those of a file are.
_PLAIN_TYPES = (int, float, str, tuple[int, ...], float | None)
_COERCE: dict[str, Callable[[Any], Any]] = {
    "model": as_model,
    "optimiser": as_table,
    "selectors": as_selectors,
    "faults": partial(as_settings, "faults", Faults),
    "byzantine": partial(as_settings, "byzantine", Byzantine),
    "defence": as_defence,
    "rules": as_rules,
    "tags": as_tags,
}


@plain_keywords
@dataclass(frozen=True)
class Experiment:
    """Everything about an experiment except the seed.

    What a file can name can be given as an object, too. An experiment that cannot work is refused
    with a `ConfigError` when it is made.

    Args:
        data: `(x, y, x_test, y_test)`; a list of torch Datasets, one per client; a Hugging Face
            Dataset; the name of a data set of `fedcor data list`; the path of an .npz file; or
            clients that load their data when it is needed (`fedcor.data.client_data.ClientData`).
        partition: How the data is spread over the clients: `Dirichlet(clients=50)`, `Shards(...)`
            or `IID(...)`; an array with the client id of each training sample; the name of the
            column with client ids in a Hugging Face Dataset; a partitioner of flwr-datasets; an
            object of your own with `split(labels, rng)`; or a table as in a file. Left out where
            each client has data of its own.
        model: A module of torch; a function or class that makes one, called without arguments or
            with the shape of a sample and the number of classes; "mlp", "cnn" or "logistic";
            `module:factory`; or a table with `name` and options.
        rounds: Rounds of a run.
        clients_per_round: C, the number of clients that are chosen in each round. It may be left
            out where the selector is an object, which knows it.
        batch_size: B, samples per mini-batch.
        local_steps: E, mini-batches per client and round.
        learning_rate: Of local SGD: a number, a function of the round, an object with
            `at(round)`, or `module:name` of one.
        name: Names the experiment in folders and tables.
        test_data: Test data, where `data` has none.
        loss: A name, `module:function`, or a function `(outputs, targets)` that gives the loss of
            each sample. None: cross entropy for labels, mean squared error for other numbers.
        metrics: Further metrics of the test data: a name -> a function `(targets, outputs)` that
            gives a number, or `module:function`. A pair of it and "lower" or "higher" says which
            direction is better, and so does its attribute `greater_is_better`; without, selectors
            are not ranked by it.
        milestones: Rounds at which the learning rate is multiplied by `factor`.
        factor: See `milestones`.
        weight_decay: Of local SGD.
        device: "cpu", "cuda" or "mps"; "auto" takes an accelerator if there is one.
        holdout: Share of each client's data, in [0, 1), that is kept out of training; the client's
            loss is measured on it.
        noisy_clients: Share of the clients, in [0, 1], whose labels are drawn at random.
        loss_noise: Standard deviation of the noise on reported losses
            (`fedcor.rounds.loss_screening`).
        loss_clip: The largest loss that is reported, where there is noise.
        optimiser: How updates become the next model: `FedAvg(...)`, `FedProx(...)`, or an object of
            your own; a name or `module:Class`; or a table with `name` and options. None, or a table
            without a name: the one that the selector goes with, FedAvg for most.
        faults: Which faults are simulated.
        byzantine: Which clients lie, and how: `Byzantine(...)`, or a table.
        defence: What is done against clients that err or lie: `Defence(...)`, or a table.
        rules: Who may be chosen: `Rules(...)`, or a table.
        tags: What the rules know clients by: tag -> value -> clients, as a list of ids or a text of
            ranges ("0-9, 12"); tag -> a list with the value of each client; or the path of a CSV
            file with the columns `client` and one per tag.
        selector: The selector that runs: an object such as `FedCor(10)`, a name, or `module:Class`.
        selectors: Hyper-parameters of selectors, one table per name; those that are not given have
            the selector's defaults. Or a label of your own -> a selector.
        target_accuracy: For "rounds to target", in (0, 1].

    Example:
        >>> import fedcor
        >>> experiment = fedcor.Experiment(
        ...     "digits", fedcor.Dirichlet(20, minimum_size=3), "logistic", rounds=5,
        ...     clients_per_round=4, batch_size=16, local_steps=5, learning_rate=0.05)
        >>> experiment.partition.alpha, experiment.selector
        (0.2, 'aligned')
    """

    data: Any
    partition: Any = None
    model: Any = "mlp"
    _: KW_ONLY
    rounds: int
    clients_per_round: int = 0
    batch_size: int
    local_steps: int
    learning_rate: float | str | Callable[[int], float] | Schedule
    name: str = "experiment"
    test_data: Any = None
    loss: str | Callable[..., Any] | None = None
    metrics: Mapping[str, MetricSetting] = field(default_factory=dict)
    milestones: tuple[int, ...] = ()
    factor: float = 0.5
    weight_decay: float = 0.0
    device: str = "cpu"
    holdout: float = 0.0
    noisy_clients: float = 0.0
    loss_noise: float = 0.0
    loss_clip: float = 10.0
    optimiser: Any = None
    faults: Faults = field(default_factory=Faults)
    byzantine: Byzantine = field(default_factory=Byzantine)
    defence: Defence = field(default_factory=Defence)
    rules: Any = None
    tags: Any = field(default_factory=dict)
    selector: str | Selector = DEFAULT_SELECTOR
    selectors: Mapping[str, Mapping[str, Any] | Selector] = field(default_factory=dict)
    target_accuracy: float | None = None

    def __post_init__(self) -> None:
        for key, hint in get_type_hints(type(self)).items():
            if hint in _PLAIN_TYPES:
                self._set(key, convert(key, as_python(getattr(self, key)), hint))
        data, partition = as_data(self.data, self.test_data, self.partition)
        self._set("data", data)
        self._set("test_data", None)
        self._set("partition", partition)
        check_finite({key: getattr(self, key) for key in ("model", "optimiser", "selectors")})
        for key, coerce in _COERCE.items():
            self._set(key, coerce(getattr(self, key)))
        self._take_selector()
        self._check_numbers()
        self._check_learning_rate()
        if self.clients_per_round:  # else a selector object, which may follow, knows it
            self.build_optimiser()
            self._check_selectors()
            if self.clients is not None:
                self.check_faults(self.clients, self.fix_rules(self.clients))
        if self.loss is not None:
            find_loss(self.loss)
        find_metrics(self.metrics)

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    @property
    def clients(self) -> int | None:
        """N, the number of clients; None where only the data tells."""
        clients: int | None = getattr(self.partition, "clients", None)
        return clients

    @property
    def selector_label(self) -> str:
        """What the selector that runs is called in tables and folders."""
        return str(self.selector)

    def build_selector(self) -> Selector:
        """The selector that runs, with its hyper-parameters."""
        return self._build_selector(self.selector_label)

    def build_optimiser(self) -> Optimiser:
        """The federated optimiser, with its options."""
        return make_optimiser(
            self.optimiser, lambda: selector_traits(self.build_selector()).optimiser
        )

    def fix_rules(self, clients: int) -> FixedRules | None:
        """The rules for so many clients; None where there are none. Refuses what cannot be met."""
        if not self.rules and not self.tags:
            return None
        return fix_rules(self.rules, self.tags, clients, self.build_selector(), self.rounds)

    def check_faults(self, clients: int, rules: FixedRules | None) -> None:
        """Refuse faults that do not fit the number of clients, the rules, or the selector."""
        with errors_under("faults"):
            self.faults.check_for(clients, None if rules is None else rules.eligible)
            given = self.faults.over_selection
            if given == 1.0:
                return
            selector = self.build_selector()
            check_can_ask("over_selection", given, selector)
            usual = chosen_by(selector)
            by_round = {rules.rules.clients_at(t) for t in range(self.rounds)} if rules else {None}
            for needed in sorted(number or usual for number in by_round):
                chosen = self.faults.choose(needed, clients)
                try:
                    with_clients(selector, chosen)
                except ConfigError as error:
                    allowed = f"{chosen} clients do not go with the selector: {error}"
                    raise ConfigError("over_selection", given, allowed) from None

    def build_schedule(self) -> Schedule:
        """The learning rate in every round."""
        if isinstance(self.learning_rate, float):
            return LearningRate(self.learning_rate, self.milestones, self.factor)
        return as_schedule(self.learning_rate)

    def with_selector(self, selector: str | Selector, label: str | None = None) -> Experiment:
        """The same experiment with another selector.

        Args:
            selector: An object, a name, or `module:Class`.
            label: What an object is called in tables and folders; its class unless it is given.
        """
        if label is None or isinstance(selector, str):
            return dataclasses.replace(self, selector=selector)
        return dataclasses.replace(
            self, selector=label, selectors={**self.selectors, label: selector}
        )

    def describe(self) -> dict[str, Any]:
        """Every setting as plain values, in the tables of a file, as a record keeps them.

        Of the selectors, only the one that runs is described.
        """
        data = self.data.describe() if isinstance(self.data, OwnData) else {"name": self.data}
        tables = {
            table: {key: describe(getattr(self, key)) for key in keys}
            for table, keys in TABLES.items()
        }
        return {
            "name": self.name,
            "data": {**data, **tables["data"]},
            "partition": described_table(self.partition, "kind"),
            "model": described_table(self.model, "name"),
            "training": tables["training"],
            "privacy": tables["privacy"],
            "metrics": describe_metrics(self.metrics),
            "optimiser": describe_optimiser(self.build_optimiser()),
            "faults": self.faults.describe(),
            "byzantine": dataclasses.asdict(self.byzantine),
            "defence": self.defence.describe(),
            "rules": self.rules.describe(),
            "tags": describe_tags(self.tags),
            "selector": self.selector,
            "selectors": {self.selector: self._describe_selector()},
            "target_accuracy": self.target_accuracy,
        }

    def _describe_selector(self) -> dict[str, Any]:
        selector = self.build_selector()
        name, described = selector_name(selector), describe(selector)
        if name == self.selector:
            del described["class"]
            return dict(described)
        return {**described, "class": name}

    def _take_selector(self) -> None:
        """A selector that is an object is kept under its name, as tables of settings are."""
        if isinstance(self.selector, str):
            return
        SELECTORS.check(self.selector)
        label = selector_name(self.selector)
        if not self.clients_per_round:
            self._set("clients_per_round", chosen_by(self.selector))
        self._set("selectors", {**self.selectors, label: self.selector})
        self._set("selector", label)

    def _build_selector(self, name: str) -> Selector:
        options = self.selectors.get(name)
        if options is not None and not isinstance(options, Mapping):
            return options
        if not self.clients_per_round:
            allowed = "must be given, or a selector object that knows it, such as FedCor(10)"
            raise ConfigError("clients_per_round", None, allowed)
        try:
            return build_selector(name, self.clients_per_round, options)
        except ConfigError as error:
            if error.key == "selector":
                raise
            raise error.under(f"selectors.{name}") from None

    def _check_numbers(self) -> None:
        """Refuse numbers out of range, unknown devices, and names that no folder can have."""
        for key in ("rounds", "batch_size", "local_steps"):
            check_at_least(key, getattr(self, key), 1)
        check_at_least("clients_per_round", self.clients_per_round, 0)
        if self.clients is not None and self.clients_per_round > self.clients:
            allowed = f"must be at most partition.clients = {self.clients}"
            raise ConfigError("clients_per_round", self.clients_per_round, allowed)
        check_positive("factor", self.factor)
        for key in ("factor", "weight_decay"):
            check_between(key, getattr(self, key), 0.0, _LARGEST)
        if self.device.partition(":")[0] not in _DEVICES:
            raise ConfigError("device", self.device, f"must be one of {', '.join(_DEVICES)}")
        for key in ("holdout", "noisy_clients"):
            check_fraction(key, getattr(self, key), closed=True)
        if self.holdout == 1.0:
            raise ConfigError("holdout", self.holdout, "must be below 1, to leave training data")
        if self.noisy_clients and isinstance(self.data, OwnClients):
            allowed = "needs data that is held, not loaded"
            raise ConfigError("noisy_clients", self.noisy_clients, allowed)
        LossNoise(self.loss_noise, self.loss_clip)
        if self.target_accuracy is not None:
            check_fraction("target_accuracy", self.target_accuracy, closed=True)
            check_positive("target_accuracy", self.target_accuracy)
        printable = self.name.isprintable() and not any(mark in self.name for mark in "/\\:")
        if not self.name.strip(". ") or not printable:
            raise ConfigError("name", self.name, "must be a plain name: it names a folder")

    def _check_learning_rate(self) -> None:
        given = as_python(self.learning_rate)
        if isinstance(given, int | float) and not isinstance(given, bool):
            self._set("learning_rate", convert("learning_rate", given, float))
            check_positive("learning_rate", self.learning_rate)
            check_between("learning_rate", self.learning_rate, 0.0, _LARGEST)
        elif self.milestones:
            allowed = "go with a learning rate that is a number; yours is a schedule of its own"
            raise ConfigError("milestones", self.milestones, allowed)
        schedule = self.build_schedule()
        for round in {0, self.rounds - 1}:
            schedule.at(round)

    def _check_selectors(self) -> None:
        """All tables of selectors: a misspelt key is refused even if another selector runs."""
        for name in {**self.selectors, self.selector_label: None}:
            chosen = chosen_by(self._build_selector(name))
            if chosen and chosen != self.clients_per_round:
                raise ConfigError(
                    "selector",
                    name,
                    f"chooses {chosen} clients per round, but the experiment has "
                    f"clients_per_round = {self.clients_per_round}: make them equal",
                )
        candidates = selector_traits(self.build_selector()).candidates
        if candidates is not None and self.clients is not None and candidates > self.clients:
            allowed = f"must be at most {self.clients} clients"
            raise ConfigError(f"selectors.{self.selector}.candidates", candidates, allowed)


def chosen_by(selector: Selector) -> int:
    """How many clients a selector chooses; 0 if it does not say."""
    return int(selector_traits(selector).clients_per_round or 0)
