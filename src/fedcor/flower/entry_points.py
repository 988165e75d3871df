"""How a user makes a selecting strategy: FedCor around one, or any selector around any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from flwr.serverapp.strategy import FedAvg, Strategy

from fedcor import selectors
from fedcor.core.config import suggests
from fedcor.core.errors import ConfigError
from fedcor.core.types import Selector, selector_traits
from fedcor.flower.optimiser_strategy import OptimiserStrategy
from fedcor.flower.settings import SelectionSettings
from fedcor.flower.strategy import SelectingStrategy
from fedcor.rounds.defence.settings import Defence, as_defence
from fedcor.rounds.record_line import RoundRecord
from fedcor.rounds.rules.declaration import Bounds, ClientsPerRound, Eligible, Rules
from fedcor.runs.tracking.callback import GivenCallback
from fedcor.selectors import build_selector
from fedcor.selectors.fedcor import FedCor

_Settings = SelectionSettings  # whose defaults are those of the keywords


class FedCorStrategy(SelectingStrategy):
    """A Flower strategy whose clients are chosen by FedCor.

    Args:
        clients_per_round: C, clients that train in each round; or round, from 1 -> C from then on;
            or a function of the round.
        strategy: Aggregates their updates; `FedAvg()` unless another is given.
        warmup, interval, samples_per_refit, warmup_history, history, discount, dimension, noise,
            warmup_steps, refit_steps, gp_learning_rate, beta: As in `fedcor.FedCor`.
        checkpoint, checkpoint_every, seed, wait_for, probe_timeout, attempts, loss_key,
            accuracy_key, name, identity, secure_aggregation, on_round, preflight, eligible,
            at_least, at_most, defence, callbacks: As in `SelectionSettings`.

    Example:
        strategy = FedCorStrategy(5, warmup=10, checkpoint="runs/mine")
        strategy.start(grid, initial_arrays, num_rounds=100)
    """

    selector: FedCor

    @suggests
    def __init__(
        self,
        clients_per_round: int | ClientsPerRound,
        strategy: Strategy | None = None,
        *,
        warmup: int = FedCor.warmup,
        interval: int = FedCor.interval,
        samples_per_refit: int = FedCor.samples_per_refit,
        warmup_history: int = FedCor.warmup_history,
        history: int = FedCor.history,
        discount: float = FedCor.discount,
        dimension: int = FedCor.dimension,
        noise: float = FedCor.noise,
        warmup_steps: int = FedCor.warmup_steps,
        refit_steps: int = FedCor.refit_steps,
        gp_learning_rate: float = FedCor.gp_learning_rate,
        beta: float = FedCor.beta,
        checkpoint: str | Path | None = _Settings.checkpoint,
        checkpoint_every: int = _Settings.checkpoint_every,
        seed: int = _Settings.seed,
        wait_for: int | None = _Settings.wait_for,
        probe_timeout: float = _Settings.probe_timeout,
        attempts: int = _Settings.attempts,
        loss_key: str | None = _Settings.loss_key,
        accuracy_key: str | None = _Settings.accuracy_key,
        name: str = _Settings.name,
        identity: Literal["name", "key"] = _Settings.identity,
        secure_aggregation: bool = _Settings.secure_aggregation,
        on_round: Callable[[RoundRecord], None] | None = None,
        preflight: bool = _Settings.preflight,
        eligible: Eligible | None = _Settings.eligible,
        at_least: Mapping[str, Bounds] | None = _Settings.at_least,
        at_most: Mapping[str, Bounds] | None = _Settings.at_most,
        defence: Defence | Mapping[str, Any] = _Settings.defence,
        callbacks: Iterable[GivenCallback] = (),
    ) -> None:
        options = {
            "warmup": warmup,
            "interval": interval,
            "samples_per_refit": samples_per_refit,
            "warmup_history": warmup_history,
            "history": history,
            "discount": discount,
            "dimension": dimension,
            "noise": noise,
            "warmup_steps": warmup_steps,
            "refit_steps": refit_steps,
            "gp_learning_rate": gp_learning_rate,
            "beta": beta,
        }
        first, schedule = _first_number(clients_per_round)
        settings = SelectionSettings(
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            seed=seed,
            wait_for=wait_for,
            probe_timeout=probe_timeout,
            attempts=attempts,
            loss_key=loss_key,
            accuracy_key=accuracy_key,
            name=name,
            identity=identity,
            secure_aggregation=secure_aggregation,
            on_round=on_round,
            preflight=preflight,
            eligible=eligible,
            at_least=at_least,
            at_most=at_most,
            defence=as_defence(defence),
            clients_per_round=schedule,
            callbacks=callbacks,
        )
        super().__init__(
            FedAvg() if strategy is None else strategy,
            build_selector("fedcor", first, options),
            settings,
        )


@suggests
def select_with(
    strategy: Strategy,
    selector: Selector | str | None = None,
    *,
    clients_per_round: int | ClientsPerRound | None = None,
    checkpoint: str | Path | None = _Settings.checkpoint,
    checkpoint_every: int = _Settings.checkpoint_every,
    seed: int = _Settings.seed,
    wait_for: int | None = _Settings.wait_for,
    probe_timeout: float = _Settings.probe_timeout,
    attempts: int = _Settings.attempts,
    loss_key: str | None = _Settings.loss_key,
    accuracy_key: str | None = _Settings.accuracy_key,
    name: str = _Settings.name,
    identity: Literal["name", "key"] = _Settings.identity,
    secure_aggregation: bool = _Settings.secure_aggregation,
    on_round: Callable[[RoundRecord], None] | None = None,
    preflight: bool = _Settings.preflight,
    eligible: Eligible | None = _Settings.eligible,
    at_least: Mapping[str, Bounds] | None = _Settings.at_least,
    at_most: Mapping[str, Bounds] | None = _Settings.at_most,
    defence: Defence | Mapping[str, Any] = _Settings.defence,
    callbacks: Iterable[GivenCallback] = (),
) -> SelectingStrategy:
    """`strategy` as it is, with its clients chosen by `selector`.

    Without a selector, the package's default one chooses. It goes with an optimiser of its own,
    which then aggregates in place of Flower's plain `FedAvg`. Any other strategy, and one that is
    given with a selector, keeps its own aggregation. The log of `start` says who selects and who
    aggregates.

    Args:
        strategy: Any strategy of `flwr.serverapp.strategy`, `OptimiserStrategy`, or your own.
        selector: A selector, or the name of one with `clients_per_round`. None: the default one,
            `fedcor.selectors.DEFAULT_SELECTOR`.
        clients_per_round: C, clients that train in each round; or round, from 1 -> C from then on;
            or a function of the round. Must be given unless `selector` is an object, which says
            it itself.
        checkpoint, checkpoint_every, seed, wait_for, probe_timeout, attempts, loss_key,
            accuracy_key, name, identity, secure_aggregation, on_round, preflight, eligible,
            at_least, at_most, defence, callbacks: As in `SelectionSettings`.

    Returns:
        A strategy to `start` as any other.

    Example:
        strategy = select_with(FedAvg(), clients_per_round=5)
        strategy = select_with(FedAdam(eta=0.05), PowerOfChoice(5), checkpoint="runs/mine")
        strategy.start(grid, initial_arrays, num_rounds=100)
    """
    first, schedule = (
        (None, None) if clients_per_round is None else _first_number(clients_per_round)
    )
    settings = SelectionSettings(
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        seed=seed,
        wait_for=wait_for,
        probe_timeout=probe_timeout,
        attempts=attempts,
        loss_key=loss_key,
        accuracy_key=accuracy_key,
        name=name,
        identity=identity,
        secure_aggregation=secure_aggregation,
        on_round=on_round,
        preflight=preflight,
        eligible=eligible,
        at_least=at_least,
        at_most=at_most,
        defence=as_defence(defence),
        clients_per_round=schedule,
        callbacks=callbacks,
    )
    if selector is None or isinstance(selector, str):
        if first is None:
            where = "where no selector is" if selector is None else "with a selector's name"
            raise ConfigError("clients_per_round", None, f"must be given {where}")
        chosen = build_selector(selector or selectors.DEFAULT_SELECTOR, first)
    elif clients_per_round is not None and schedule is None:
        allowed = "is set by the selector that you gave"
        raise ConfigError("clients_per_round", clients_per_round, allowed)
    else:
        chosen = selector
    if selector is None and type(strategy) is FedAvg:
        strategy = _with_optimiser(strategy, selector_traits(chosen).optimiser)
    return SelectingStrategy(strategy, chosen, settings)


def _first_number(given: int | ClientsPerRound) -> tuple[int, ClientsPerRound | None]:
    """Clients in the first round, and how they change if they do."""
    if not isinstance(given, Mapping) and not callable(given):
        return given, None
    first = Rules(clients_per_round=given).clients_at(1)
    if first is None:
        allowed = "must say how many clients there are in round 1, the first one"
        raise ConfigError("clients_per_round", given, allowed)
    return first, given


def _with_optimiser(strategy: FedAvg, optimiser: str) -> OptimiserStrategy:
    """`strategy` with all its settings, but aggregating with `optimiser`."""
    made = OptimiserStrategy(optimiser)
    vars(made).update(vars(strategy))
    return made
