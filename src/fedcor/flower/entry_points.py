"""How a user makes a selecting strategy: FedCor around one, or any selector around any strategy."""

from __future__ import annotations

import dataclasses
from typing import Any

from flwr.serverapp.strategy import FedAvg, Strategy

from fedcor.errors import ConfigError
from fedcor.flower.settings import SelectionSettings, check_keywords, setting_names
from fedcor.flower.strategy import SelectingStrategy
from fedcor.selectors import FedCor, build_selector
from fedcor.types import Selector

__all__ = ["FedCorStrategy", "select_with"]


class FedCorStrategy(SelectingStrategy):
    """A Flower strategy whose clients are chosen by FedCor.

    Args:
        clients_per_round: C, clients that train in each round.
        strategy: Aggregates their updates; `FedAvg()` unless another is given.
        **settings: Fields of `SelectionSettings` (checkpoint, seed, ...) and of `fedcor.FedCor`
            (warmup, interval, beta, ...).

    Example:
        strategy = FedCorStrategy(5, warmup=10, checkpoint="runs/mine")
        strategy.start(grid, initial_arrays, num_rounds=100)
    """

    selector: FedCor

    def __init__(
        self, clients_per_round: int, strategy: Strategy | None = None, **settings: Any
    ) -> None:
        options = {one.name for one in dataclasses.fields(FedCor)} - {"clients_per_round"}
        check_keywords(settings, [*setting_names(), *sorted(options)])
        own = {key: settings[key] for key in setting_names() if key in settings}
        of_selector = {key: value for key, value in settings.items() if key not in own}
        super().__init__(
            FedAvg() if strategy is None else strategy,
            build_selector("fedcor", clients_per_round, of_selector),
            SelectionSettings(**own),
        )


def select_with(
    strategy: Strategy,
    selector: Selector | str,
    *,
    clients_per_round: int | None = None,
    **settings: Any,
) -> SelectingStrategy:
    """`strategy` as it is, with its clients chosen by `selector`.

    Args:
        strategy: Any strategy of `flwr.serverapp.strategy`, or your own.
        selector: A selector, or the name of one with `clients_per_round`.
        clients_per_round: C, clients that train in each round; only with a selector's name.
        **settings: Fields of `SelectionSettings`: checkpoint, seed, wait_for, probe_timeout,
            attempts, loss_key, name, identity, secure_aggregation, on_round.

    Returns:
        A strategy to `start` as any other.

    Example:
        strategy = select_with(FedAdam(eta=0.05), PowerOfChoice(5), checkpoint="runs/mine")
        strategy.start(grid, initial_arrays, num_rounds=100)
    """
    check_keywords(settings, setting_names())
    if isinstance(selector, str):
        if clients_per_round is None:
            raise ConfigError("clients_per_round", None, "must be given with a selector's name")
        selector = build_selector(selector, clients_per_round)
    elif clients_per_round is not None:
        allowed = "is set by the selector that you gave"
        raise ConfigError("clients_per_round", clients_per_round, allowed)
    return SelectingStrategy(strategy, selector, SelectionSettings(**settings))
