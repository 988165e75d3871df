"""What a user sets (`SelectionSettings`), and what follows from it for a start (`RunSettings`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    QFedAvg,
    Strategy,
)

from fedcor.core.config import (
    LARGEST_SEED,
    check_at_least,
    check_between,
    check_one_of,
    check_positive,
    expand_home,
)
from fedcor.core.errors import ConfigError
from fedcor.core.types import Selector, selector_traits
from fedcor.flower.optimiser_strategy import plain_arrays
from fedcor.flower.protocol import SAYS_KEYS, flower_round
from fedcor.flower.replies import SIZE, Terms
from fedcor.flower.strategy_memory import (
    Memory,
    grows_trees,
    strategy_setting,
    wrapped,
)
from fedcor.rounds.defence.settings import Defence, as_defence
from fedcor.rounds.record_line import RoundRecord
from fedcor.rounds.rules.declaration import (
    Bounds,
    ClientsPerRound,
    Eligible,
    Rules,
    with_clients,
)
from fedcor.runs.tracking.callback import GivenCallback
from fedcor.runs.tracking.session import check_callbacks
from fedcor.selectors import selector_name

# fmt: off
_LOSSES = (
    "loss", "eval_loss", "eval-loss", "val_loss", "val-loss",
    "test_loss", "train_loss", "train-loss",
)
_ACCURACIES = (
    "accuracy", "test_accuracy", "eval_accuracy", "eval_acc", "eval-acc", "val_acc", "acc",
)
# Parts of the names of metrics that are no loss: more of them is better, or they are a count.
_NO_LOSS = {
    "acc", "accuracy", "auc", "auroc", "bleu", "correct", "count", "dice", "examples", "f1", "iou",
    "map", "num", "precision", "r2", "recall", "reward", "samples", "score", "top1", "top5",
}
# fmt: on
_MOST_OVER_SELECTION = 100.0
_RATES = ("lr", "learning-rate", "learning_rate")
_DEFENCE = Defence()
# Attributes of strategies that name a record, not a metric.
_RECORDS = ("arrayrecord_key", "configrecord_key")
_NORM_BIT = "norm_bit"  # adaptive clipping at the clients reads it, and no attribute names it


@dataclass(frozen=True)
class SelectionSettings:
    """How clients are selected in a Flower run: the keywords of `select_with` and `FedCorStrategy`.

    Args:
        checkpoint: Folder for the record and the checkpoint. A start with the same folder resumes
            the run. None: nothing is written.
        checkpoint_every: Rounds from one checkpoint to the next. The last round, and a run that
            ends with an error, write one too. A server that is killed repeats the rounds since.
        seed: Seed of the selector's draws.
        wait_for: Nodes that must be connected before the first round. None: the selector's
            `clients_per_round`, or the strategy's `min_available_nodes` if that is more.
        probe_timeout: Seconds within which a node answers a question. (The deadline of training is
            `timeout` of `start`.)
        attempts: How often a round in which nobody delivers is tried, before the run ends with an
            error.
        loss_key: Metric that holds a client's loss. None: the first that is there of `loss`,
            `eval_loss`, `val_loss`, `test_loss` and `train_loss`.
        accuracy_key: Metric of the evaluation that holds the accuracy, for the record. None: the
            first that is there of `accuracy`, `test_accuracy`, `eval_accuracy`, `eval_acc`,
            `val_acc` and `acc`.
        name: Name of the experiment in the record.
        identity: `"name"`: clients are known by what they say of themselves. `"key"`: by their
            nodes' names or public keys, which the SuperLink vouches for.
        secure_aggregation: Whether single updates are hidden from the server. A selector or an
            optimiser that reads them is refused.
        on_round: Called with the record of every finished round.
        preflight: Whether the start checks before the first round that clients answer what the
            selector will ask, and logs what the run will cost.
        eligible: Who may be asked and chosen: tag -> the value or the values that a client must
            have; or a function of the client's name and tags that gives True or False. Tags are the
            entries of the node's configuration; they are what a node says of itself.
        at_least: Least number of clients in a round: tag -> a number for each of its values, or
            value -> a number. As far as the clients that can be reached allow it.
        at_most: Most clients in a round, likewise; never exceeded.
        clients_per_round: Clients per round that change: round, from 1 -> clients from that round
            on, or a function of the round. None: the selector's own.
        defence: What is done against clients that err or lie: `fedcor.Defence`, or a table of its
            settings.
        over_selection: How many times as many clients are asked to train as a round needs. The
            round goes on when the clients it needs are back; it does not wait for the others.
        record_losses: Whether the record holds the losses of single clients.
        callbacks: Called after every round: objects with some of the methods of
            `fedcor.runs.tracking.callback.Callback`, classes of them, functions of a round's
            record, or names of trackers, such as "mlflow", which need `checkpoint`.
    """

    checkpoint: str | Path | None = None
    checkpoint_every: int = 1
    seed: int = 0
    wait_for: int | None = None
    probe_timeout: float = 60.0
    attempts: int = 5
    loss_key: str | None = None
    accuracy_key: str | None = None
    name: str = "flower"
    identity: Literal["name", "key"] = "name"
    secure_aggregation: bool = False
    on_round: Callable[[RoundRecord], None] | None = None
    preflight: bool = True
    eligible: Eligible | None = None
    at_least: Mapping[str, Bounds] | None = None
    at_most: Mapping[str, Bounds] | None = None
    clients_per_round: ClientsPerRound | None = None
    defence: Defence = _DEFENCE
    over_selection: float = 1.0
    record_losses: bool = True
    callbacks: Iterable[GivenCallback] = ()

    def __post_init__(self) -> None:
        check_positive("probe_timeout", self.probe_timeout)
        check_at_least("checkpoint_every", self.checkpoint_every, 1)
        check_at_least("attempts", self.attempts, 1)
        check_at_least("seed", self.seed, 0, LARGEST_SEED)
        if self.wait_for is not None:
            check_at_least("wait_for", self.wait_for, 1)
        check_between("over_selection", self.over_selection, 1.0, _MOST_OVER_SELECTION)
        _check_loss_key(self.loss_key)
        check_one_of("identity", self.identity, ("name", "key"))
        if self.identity == "key" and not SAYS_KEYS:
            raise ConfigError("identity", "key", "needs flwr 1.38 or later, which says nodes' keys")
        object.__setattr__(self, "defence", as_defence(self.defence))
        self.rules  # noqa: B018  it is checked when it is made
        callbacks = check_callbacks(self.callbacks, self.checkpoint, "checkpoint")
        object.__setattr__(self, "callbacks", callbacks)

    @cached_property
    def rules(self) -> Rules:
        """Who may be chosen."""
        return Rules(self.eligible, self.at_least or {}, self.at_most or {}, self.clients_per_round)

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder as a path."""
        return None if self.checkpoint is None else expand_home("checkpoint", self.checkpoint)


def _check_loss_key(key: str | None) -> None:
    """Refuse a metric that grows while training helps: the choice would be upside down."""
    words = set(re.split(r"[^a-z0-9]+", (key or "").lower()))
    if words & _NO_LOSS and not any("loss" in word for word in words):
        allowed = "is no loss by its name: a loss falls while training helps"
        raise ConfigError("loss_key", key, allowed, "name the metric that holds the loss")


class SelectionKeywords(TypedDict, total=False):
    """The fields of `SelectionSettings` as keywords; `clients_per_round` is a parameter itself."""

    checkpoint: str | Path | None
    checkpoint_every: int
    seed: int
    wait_for: int | None
    probe_timeout: float
    attempts: int
    loss_key: str | None
    accuracy_key: str | None
    name: str
    identity: Literal["name", "key"]
    secure_aggregation: bool
    on_round: Callable[[RoundRecord], None] | None
    preflight: bool
    eligible: Eligible | None
    at_least: Mapping[str, Bounds] | None
    at_most: Mapping[str, Bounds] | None
    defence: Defence | Mapping[str, Any]
    over_selection: float
    record_losses: bool
    callbacks: Iterable[GivenCallback]


@dataclass(frozen=True)
class RunSettings:
    """What all rounds of one start work with. What follows from it is found once.

    Attributes:
        strategy: Aggregates.
        selector: Chooses.
        selection: As the user set it.
        num_rounds: Rounds of the whole run.
        train_timeout: Seconds within which a client must have trained.
        evaluate_config: Flower's configuration of evaluations.
        server_evaluates: Whether a round ends with an evaluation of the server's.
        fresh: The strategy as it was before the first round.
        counters: The arrays of the first model that are of whole numbers.
    """

    strategy: Strategy
    selector: Selector
    selection: SelectionSettings
    num_rounds: int = 0
    train_timeout: float = 3600.0
    evaluate_config: ConfigRecord = field(default_factory=ConfigRecord)
    server_evaluates: bool = False
    fresh: Memory | None = None
    counters: frozenset[str] = frozenset()

    def _attribute(self, name: str, default: Any) -> Any:
        return strategy_setting(self.strategy, name, default)

    @property
    def probe_timeout(self) -> float:
        """Seconds within which a node answers a question."""
        return self.selection.probe_timeout

    @cached_property
    def selector_name(self) -> str:
        """What the log and the record call the selector."""
        return selector_name(self.selector)

    @cached_property
    def plain(self) -> tuple[str, ...]:
        """Patterns of the names of arrays that no optimiser works on."""
        return plain_arrays(self.strategy)

    @cached_property
    def grows_trees(self) -> bool:
        """Whether the model is a bag of trees, whose array grows and cannot be subtracted."""
        return grows_trees(self.strategy)

    @cached_property
    def wait_for(self) -> int:
        """Nodes that must be connected before the first round of a start."""
        chosen = self.selection.rules.clients_at(1)
        chosen = chosen or selector_traits(self.selector).clients_per_round or 1
        least = max(int(self._attribute("min_available_nodes", 1)), int(chosen))
        return self.selection.wait_for or least

    @property
    def loss_keys(self) -> tuple[str, ...]:
        """The metrics that may hold a client's loss; the first that is there counts."""
        return _LOSSES if self.selection.loss_key is None else (self.selection.loss_key,)

    @property
    def accuracy_keys(self) -> tuple[str, ...]:
        """The metrics that may hold the accuracy; the first that is there counts."""
        key = self.selection.accuracy_key
        return _ACCURACIES if key is None else (key,)

    @property
    def recorded_metrics(self) -> tuple[str, ...]:
        """The metrics of the strategy's evaluation that the record takes: a loss, an accuracy."""
        return () if self.server_evaluates else (*self.loss_keys, *self.accuracy_keys)

    @cached_property
    def named_metrics(self) -> frozenset[str]:
        """The metrics of train replies that the strategy may read: its attributes name them.

        A single reply that has one gets those refused that lack it, so nothing else is in here.
        """
        return frozenset(
            value
            for _, one in wrapped(self.strategy)
            for name, value in vars(one).items()
            if name.endswith("_key") and name not in _RECORDS and isinstance(value, str)
        )

    @cached_property
    def evaluate_terms(self) -> Terms:
        """What a reply to an evaluate message must be like, beside `recorded_metrics`."""
        weight, arrays = (
            str(self._attribute(name, default))
            for name, default in (("weighted_by_key", SIZE), ("arrayrecord_key", "arrays"))
        )
        several = _is_own(self.strategy.aggregate_evaluate)
        return Terms(weight, self.loss_keys, arrays_key=arrays, several=several)

    @cached_property
    def train_terms(self) -> Terms:
        """What a reply to a train message must be like."""
        required = set()
        for _, one in wrapped(self.strategy):
            if isinstance(one, QFedAvg):
                required.add(one.train_loss_key)
            if isinstance(one, DifferentialPrivacyClientSideAdaptiveClipping):
                required.add(_NORM_BIT)
        several = _is_own(self.strategy.aggregate_train)
        return replace(
            self.evaluate_terms,
            required=frozenset(required),
            several=several,
            counters=self.counters,
        )

    @cached_property
    def weighted(self) -> bool:
        """Whether the strategy is known to weight replies."""
        return self._attribute("weighted_by_key", None) is not None

    @property
    def judges_updates(self) -> bool:
        """Whether single updates can be seen and measured."""
        return not (self.grows_trees or self.selection.secure_aggregation)

    def probe_message(self, round: int, node: int, model: ArrayRecord) -> Message:
        """The question for a loss, as an evaluate message that any ClientApp understands."""
        number, config_key = flower_round(round), str(self._attribute("configrecord_key", "config"))
        config = ConfigRecord({**self.evaluate_config, "server-round": number})
        return Message(
            RecordDict({self.train_terms.arrays_key: model, config_key: config}),
            dst_node_id=node,
            message_type=MessageType.EVALUATE,
            ttl=self.probe_timeout,
            group_id=str(number),
        )

    def selector_at(self, round: int) -> tuple[Selector, int | None]:
        """The selector of our `round`, and how many of its clients must come back; None for all."""
        selector = with_clients(self.selector, self.selection.rules.clients_at(flower_round(round)))
        needed = selector_traits(selector).clients_per_round
        if self.selection.over_selection == 1.0 or needed is None:
            return selector, None
        chosen = math.ceil(self.selection.over_selection * needed * (1 - 1e-12))
        return with_clients(selector, max(needed, chosen)), needed


def known_rate(config: ConfigRecord) -> float:
    """The learning rate in a train configuration, under its usual names; NaN without one."""
    given = [config.get(key) for key in _RATES]
    rates = [float(rate) for rate in given if isinstance(rate, int | float)]
    return rates[0] if rates else float("nan")


def _is_own(verb: Callable[..., Any]) -> bool:
    """Whether a user wrote this method of a strategy: it may read whatever the clients send."""
    return str(getattr(verb, "__module__", "")).partition(".")[0] not in ("flwr", "fedcor")
