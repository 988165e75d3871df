"""The federated optimiser of an experiment: a name, a table, an object, or the selector's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from fedcor.core.config import (
    check_between,
    check_fraction,
    check_memory,
    check_positive,
    convert,
    plain_keywords,
)
from fedcor.core.describe import describe
from fedcor.core.errors import ConfigError
from fedcor.core.types import Optimiser, Selector, SelectorTraits, selector_traits
from fedcor.data.partitioners import Partitioner
from fedcor.optimisers import OPTIMISERS, ShortForm, as_optimiser, build_optimiser
from fedcor.rounds.defence.settings import Defence, as_defence
from fedcor.rounds.loss_screening import LossNoise
from fedcor.rounds.rules.declaration import as_rules, as_tags, describe_tags
from fedcor.rounds.rules.resolved import FixedRules, fix_rules
from fedcor.selectors import (
    DEFAULT_SELECTOR,
    SELECTORS,
    build_selector,
    selector_class,
    selector_name,
)
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.coerce import (
    BYTES_PER_CLIENT,
    LARGEST,
    OwnData,
    as_byzantine,
    as_data,
    as_faults,
    as_model,
    as_selectors,
    check_faults,
    check_finite,
    check_model,
    check_numbers,
    check_selector_memory,
    chosen_by,
    describe_model,
    describe_partition,
    errors_under,
    is_table,
    plain,
)
from fedcor.simulation.faults import Faults
from fedcor.simulation.schedules import LearningRate, Schedule, as_schedule
from fedcor.simulation.tasks import MetricSetting, describe_metrics, find_loss, find_metrics

# Records have said of these, since the first, only what was set; so they go on.
_AS_SET = ("fedavg", "fedprox")


def as_optimiser_setting(given: Any) -> Any:
    """A table, which need not have a `name`; the object; or None."""
    if isinstance(given, str):
        return {"name": given}
    if given is not None and not isinstance(given, Mapping):
        try:
            as_optimiser(given)
        except ConfigError as error:
            about = error.renamed if error.key == "name" else error.under
            raise about("optimiser") from None
    return given


def make_optimiser(setting: Any, default: Callable[[], str]) -> Optimiser:
    """The optimiser of a setting.

    Args:
        setting: What `as_optimiser_setting` returned.
        default: Gives the name of the optimiser where the setting has none.

    Raises:
        ConfigError: There is no such optimiser, or an option is wrong.
    """
    if setting is not None and not isinstance(setting, Mapping):
        return as_optimiser(setting)
    name, options = _named(setting, default)
    with errors_under("optimiser"):
        return build_optimiser(name, options)


def describe_optimiser(setting: Any, default: Callable[[], str]) -> dict[str, Any]:
    """As the table `[optimiser]` of a file, as far as a file can say it.

    It has all options, so that a record tells what ran when a default is another one day. The
    exceptions are as old as the records: of `FedAvg` and `FedProx`, and of the short form by name,
    it has what was set.
    """
    optimiser = make_optimiser(setting, default)
    if setting is None or isinstance(setting, Mapping):
        name, options = _named(setting, default)
        if name in _AS_SET or isinstance(optimiser, ShortForm):
            return {"name": name, **options}
    if isinstance(optimiser, ShortForm):
        return _as_table(optimiser.short_form)
    name, table = OPTIMISERS.name_of(optimiser), {**_as_table(optimiser)}
    if name not in _AS_SET:
        return {**table, "name": name}
    usual = describe(OPTIMISERS.built_in[name]())
    return {"name": name, **{k: v for k, v in table.items() if k != "name" and v != usual[k]}}


def _named(setting: Any, default: Callable[[], str]) -> tuple[str, dict[str, Any]]:
    """The name and the options of a table."""
    options = dict(setting or {})
    return options.pop("name") if "name" in options else default(), options


def _as_table(given: Any) -> dict[str, Any]:
    described = describe(given)
    return {"name" if key == "class" else key: value for key, value in described.items()}


# An experiment: one frozen dataclass, checked as a whole when it is made, before anything runs.


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
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("rounds", "clients_per_round", "batch_size", "local_steps"), int),
    **dict.fromkeys(("factor", "weight_decay", "holdout", "noisy_clients"), float),
    **dict.fromkeys(("loss_noise", "loss_clip"), float),
    **dict.fromkeys(("name", "device"), str),
    "milestones": tuple[int, ...],
    "target_accuracy": float | None,
}
_TAKEN: dict[str, Callable[[Any], Any]] = {
    **{"model": as_model, "optimiser": as_optimiser_setting, "selectors": as_selectors},
    **{"faults": as_faults, "byzantine": as_byzantine, "defence": as_defence},
    **{"rules": as_rules, "tags": as_tags},
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
        loss_noise: Standard deviation of noise on reported losses; see `fedcor.rounds.loss_screening`.
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
        for key, hint in _TYPES.items():
            self._set(key, convert(key, plain(getattr(self, key)), hint))
        data, partition = as_data(self.data, self.test_data, self.partition)
        self._set("data", data)
        self._set("test_data", None)
        self._set("partition", partition)
        for key, taken in _TAKEN.items():
            self._set(key, taken(getattr(self, key)))
        self._take_selector()
        check_numbers(self)
        LossNoise(self.loss_noise, self.loss_clip)
        self._check_learning_rate()
        self._check_own_keys()
        self.build_optimiser()
        self._check_selectors()
        if self.clients is not None and self.clients_per_round:
            self.check_faults(self.clients, self.fix_rules(self.clients))
        check_finite({"optimiser": self.optimiser if is_table(self.optimiser) else {}})
        check_model(self.model)
        if self.loss is not None:
            find_loss(self.loss)
        find_metrics(self.metrics)
        self._check_sizes()

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    @property
    def clients(self) -> int | None:
        """N, the number of clients; None where only the data tells."""
        clients: int | None = getattr(self.partition, "clients", None)
        return clients

    @property
    def partitioner(self) -> Partitioner:
        """What divides the training samples among the clients."""
        partition: Partitioner = self.partition
        return partition

    @property
    def selector_label(self) -> str:
        """What the selector that runs is called in tables and folders."""
        return str(self.selector)

    def build_selector(self) -> Selector:
        """The selector that runs, with its hyper-parameters."""
        return self._build_selector(self.selector_label)

    def build_optimiser(self) -> Optimiser:
        """The federated optimiser, with its options."""
        return make_optimiser(self.optimiser, self._selectors_optimiser)

    def _selectors_optimiser(self) -> str:
        """The name of the optimiser that the selector goes with."""
        label = self.selector_label
        if self.clients_per_round or not is_table(self.selectors.get(label, {})):
            return selector_traits(self._build_selector(label)).optimiser
        # Only a selector object, which may follow, knows how many clients there are per round.
        declared = getattr(selector_class(label), "optimiser", None)
        return declared if isinstance(declared, str) else SelectorTraits().optimiser

    def fix_rules(self, clients: int) -> FixedRules | None:
        """The rules for so many clients; None where there are none. Refuses what cannot be met."""
        if not self.rules and not self.tags:
            return None
        return fix_rules(self.rules, self.tags, clients, self.build_selector(), self.rounds)

    def check_faults(self, clients: int, rules: FixedRules | None) -> None:
        """Refuse faults that do not go with so many clients, the rules, or the selector."""
        check_faults(self.faults, self.build_selector(), rules, clients, self.rounds)

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
            self,
            clients_per_round=self.clients_per_round or chosen_by(selector) or 0,
            selector=label,
            selectors={**self.selectors, label: selector},
        )

    def describe(self) -> dict[str, Any]:
        """Every setting as plain values, in the tables of a file, as a record keeps them.

        Of the selectors, it has the one that runs. What is newer than the first records is there
        only where it is used, so that older runs can be resumed and compared.
        """
        data = self.data.describe() if isinstance(self.data, OwnData) else {"name": self.data}
        data |= {"holdout": self.holdout}
        data |= {"noisy_clients": self.noisy_clients} if self.noisy_clients else {}
        training = {key: describe(getattr(self, key)) for key in TABLES["training"]}
        if self.loss is None:
            del training["loss"]
        settings = {
            "name": self.name,
            "data": data,
            "partition": describe_partition(self.partition),
            "model": describe_model(self.model),
            "training": training,
            "optimiser": describe_optimiser(self.optimiser, self._selectors_optimiser),
            "faults": self.faults.describe(),
            "selector": self.selector,
            "selectors": {self.selector: self._describe_selector()},
            "target_accuracy": self.target_accuracy,
        }
        privacy = {key: getattr(self, key) for key in TABLES["privacy"]}
        newer = {
            "privacy": privacy if self.loss_noise else {},
            "byzantine": dataclasses.asdict(self.byzantine) if self.byzantine else {},
            "defence": self.defence.describe(),
            "rules": self.rules.describe() if self.rules else {},
            "tags": describe_tags(self.tags) if self.tags else {},
            "metrics": describe_metrics(self.metrics) if self.metrics else {},
        }
        return settings | {key: described for key, described in newer.items() if described}

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
            self._set("clients_per_round", chosen_by(self.selector) or 0)
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

    def _check_learning_rate(self) -> None:
        given = plain(self.learning_rate)
        if isinstance(given, int | float) and not isinstance(given, bool):
            self._set("learning_rate", convert("learning_rate", given, float))
            check_positive("learning_rate", self.learning_rate)
            check_between("learning_rate", self.learning_rate, 0.0, LARGEST)
            if self.factor > 1.0:  # the rate is highest at the end
                self.build_schedule().at(self.rounds - 1)
            return
        if self.milestones:
            allowed = "go with a learning rate that is a number; yours is a schedule of its own"
            raise ConfigError("milestones", self.milestones, allowed)
        schedule = as_schedule(given)
        for round in {0, self.rounds - 1}:
            schedule.at(round)

    def _check_own_keys(self) -> None:
        if self.clients is not None and self.clients_per_round > self.clients:
            allowed = f"must be at most partition.clients = {self.clients}"
            raise ConfigError("clients_per_round", self.clients_per_round, allowed)
        plain = self.name.isprintable() and not any(mark in self.name for mark in "/\\:")
        if not self.name.strip(". ") or not plain:
            raise ConfigError("name", self.name, "must be a plain name: it names a folder")
        if self.target_accuracy is not None:
            check_fraction("target_accuracy", self.target_accuracy, closed=True)
            check_positive("target_accuracy", self.target_accuracy)

    def _check_selectors(self) -> None:
        """All tables of selectors: a misspelt key is refused even if another selector runs."""
        check_finite({"selectors": {k: v for k, v in self.selectors.items() if is_table(v)}})
        for name, options in self.selectors.items():
            if isinstance(options, Mapping) and "clients_per_round" in options:
                key, given = f"selectors.{name}.clients_per_round", options["clients_per_round"]
                raise ConfigError(key, given, "is set for all by clients_per_round")
        if not self.clients_per_round:
            return
        for name in {**self.selectors, self.selector_label: None}:
            chosen = chosen_by(self._build_selector(name))
            if chosen is not None and chosen != self.clients_per_round:
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

    def _check_sizes(self) -> None:
        """Refuse what does not fit into memory, as far as it can be known without the data."""
        if self.clients is None:
            return
        check_memory("partition.clients", self.clients, BYTES_PER_CLIENT * self.clients)
        if self.clients_per_round:
            check_selector_memory(self.selector_label, self.build_selector(), self.clients)
