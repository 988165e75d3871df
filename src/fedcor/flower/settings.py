"""What a user sets (`SelectionSettings`), and what all rounds of one start work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Strategy

from fedcor.checks import check_at_least, check_one_of, check_positive
from fedcor.errors import ConfigError
from fedcor.flower.layout import PLAIN
from fedcor.flower.memory import wrapped
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.record import RoundRecord
from fedcor.types import Selector, optimiser_traits, selector_traits

__all__ = [
    "RoundSettings",
    "SelectionSettings",
    "check_optimiser",
    "check_selector",
    "check_strategy",
]

# fmt: off
_LOSSES = (
    "loss", "eval_loss", "eval-loss", "val_loss", "val-loss",
    "test_loss", "train_loss", "train-loss",
)
# fmt: on


@dataclass(frozen=True)
class SelectionSettings:
    """How clients are selected in a Flower run: the keywords of `select_with` and `FedCorStrategy`.

    Args:
        checkpoint: Folder for the record and the checkpoint, written after every round. A start
            with the same folder resumes the run. None: nothing is written.
        seed: Seed of the selector's draws.
        wait_for: Nodes that must be connected before the first round. None: the selector's
            `clients_per_round`, or the strategy's `min_available_nodes` if that is more.
        probe_timeout: Seconds within which a node answers a question. (The deadline of training is
            `timeout` of `start`.)
        attempts: How often a round in which nobody delivers is tried, before the run ends with an
            error.
        loss_key: Metric that holds a client's loss. None: the first that is there of `loss`,
            `eval_loss`, `val_loss`, `test_loss` and `train_loss`.
        name: Name of the experiment in the record.
        identity: `"name"`: clients are known by what they say of themselves. `"key"`: by their
            nodes' names or public keys, which the SuperLink vouches for.
        secure_aggregation: Whether single updates are hidden from the server. A selector or an
            optimiser that reads them is refused.
        on_round: Called with the record of every finished round.
    """

    checkpoint: str | Path | None = None
    seed: int = 0
    wait_for: int | None = None
    probe_timeout: float = 60.0
    attempts: int = 5
    loss_key: str | None = None
    name: str = "flower"
    identity: Literal["name", "key"] = "name"
    secure_aggregation: bool = False
    on_round: Callable[[RoundRecord], None] | None = None

    def __post_init__(self) -> None:
        check_positive("probe_timeout", self.probe_timeout)
        check_at_least("attempts", self.attempts, 1)
        check_at_least("seed", self.seed, 0)
        if self.wait_for is not None:
            check_at_least("wait_for", self.wait_for, 1)
        check_one_of("identity", self.identity, ("name", "key"))

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder as a path."""
        return None if self.checkpoint is None else Path(self.checkpoint).expanduser()


def check_strategy(strategy: Strategy) -> None:
    """Refuse what cannot be wrapped: no strategy, one with its own loop, one that trains nobody."""
    if not isinstance(strategy, Strategy):
        raise ConfigError("strategy", strategy, "must be a flwr.serverapp.strategy.Strategy")
    for _, one in wrapped(strategy):
        if type(one).start is not Strategy.start:
            allowed = "has its own loop (start), which would not be run"
            raise ConfigError("strategy", type(one).__name__, allowed)
    if getattr(strategy, "fraction_train", 1.0) == 0.0:
        allowed = "switches training off, so there is nobody to select"
        raise ConfigError("fraction_train", 0.0, allowed)


def check_selector(selector: Selector, settings: SelectionSettings) -> None:
    """Refuse what is no selector, and one that reads what `settings` hide from it."""
    if not isinstance(selector, Selector):
        raise ConfigError("selector", selector, "must have the verbs init, select and observe")
    if settings.secure_aggregation and selector_traits(selector).needs_updates:
        allowed = "reads single updates, which secure aggregation hides"
        hint = "choose one that does not, such as random, power_of_choice or fedcor"
        raise ConfigError("selector", selector, allowed, hint)


def check_optimiser(strategy: Strategy, settings: SelectionSettings) -> None:
    """Refuse a strategy whose optimiser reads what `settings` hide from it."""
    aggregating = optimiser_strategy_in(strategy)
    if aggregating is None or not settings.secure_aggregation:
        return
    optimiser = aggregating.optimiser
    if optimiser_traits(optimiser).needs_updates:
        allowed = "reads single updates, which secure aggregation hides"
        hint = "choose one that reads the mean alone, such as fedavg, or a strategy of Flower's"
        raise ConfigError("optimiser", optimiser, allowed, hint)


@dataclass(frozen=True)
class RoundSettings:
    """What all rounds of one start work with."""

    strategy: Strategy
    selector: Selector
    selection: SelectionSettings
    train_timeout: float = 3600.0  # seconds
    evaluate_config: ConfigRecord = field(default_factory=ConfigRecord)
    server_evaluates: bool = False  # a round then ends with the server's evaluation

    @property
    def probe_timeout(self) -> float:
        """Seconds within which a node answers a question."""
        return self.selection.probe_timeout

    @property
    def wait_for(self) -> int:
        """Nodes that must be connected before the first round."""
        least = int(getattr(self.strategy, "min_available_nodes", 1))
        chosen = selector_traits(self.selector).clients_per_round
        return self.selection.wait_for or max(least, 1 if chosen is None else int(chosen))

    @property
    def loss_keys(self) -> tuple[str, ...]:
        """The metrics that may hold a client's loss; the first that is there counts."""
        key = self.selection.loss_key
        return _LOSSES if key is None else (key,)

    @property
    def arrays_key(self) -> str:
        """Where the strategy puts the model in a message."""
        return str(getattr(self.strategy, "arrayrecord_key", "arrays"))

    @property
    def config_key(self) -> str:
        """Where the strategy puts the configuration in a message."""
        return str(getattr(self.strategy, "configrecord_key", "config"))

    @property
    def plain(self) -> tuple[str, ...]:
        """Patterns of the names of arrays that are no weights: no update has them."""
        aggregating = optimiser_strategy_in(self.strategy)
        return PLAIN if aggregating is None else aggregating.plain

    @property
    def weight_key(self) -> str:
        """The metric by which the strategy weights replies."""
        return str(getattr(self.strategy, "weighted_by_key", "num-examples"))
