"""Refuse a strategy, a selector and settings that do not go together, before anything runs."""

from __future__ import annotations

from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedXgbCyclic,
    Strategy,
)

from fedcor.core.errors import ConfigError
from fedcor.core.types import Selector, SelectorTraits, optimiser_traits, selector_traits
from fedcor.flower.federation_state import check_minima
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.settings import SelectionSettings
from fedcor.flower.strategy_memory import grows_trees, strategy_setting, wrapped
from fedcor.rounds.rules.declaration import check_rules_for

# Flower's differential privacy: its noise is sized for a number of clients.
_PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def check_setup(strategy: Strategy, selector: Selector, settings: SelectionSettings) -> None:
    """Refuse what cannot run, and what would run to the end and be wrong.

    Raises:
        ConfigError: Names the setting, and says what to do instead.
    """
    _check_strategy(strategy)
    _check_selector(selector, settings)
    _check_optimiser(strategy, settings)
    _check_pair(strategy, selector)


def _check_strategy(strategy: Strategy) -> None:
    """Refuse no strategy, one with its own loop or choice of clients, one that trains nobody."""
    if not isinstance(strategy, Strategy):
        raise ConfigError("strategy", strategy, "must be a flwr.serverapp.strategy.Strategy")
    for _, one in wrapped(strategy):
        if type(one).start is not Strategy.start:
            allowed = "has its own loop (start), which would not be run"
            raise ConfigError("strategy", type(one).__name__, allowed)
        if isinstance(one, FedXgbCyclic):
            allowed = "chooses by itself who trains: one client after the other"
            hint = "start it alone, without a selector, or select for FedXgbBagging"
            raise ConfigError("strategy", type(one).__name__, allowed, hint)
    if strategy_setting(strategy, "fraction_train", 1.0) == 0.0:
        allowed = "switches training off, so there is nobody to select"
        raise ConfigError("fraction_train", 0.0, allowed)


def _check_selector(selector: Selector, settings: SelectionSettings) -> None:
    """Refuse what is no selector, and one that reads what `settings` hide from it."""
    if not isinstance(selector, Selector):
        raise ConfigError("selector", selector, "must have the methods init, select and observe")
    if settings.secure_aggregation and selector_traits(selector).needs_updates:
        allowed = "reads single updates, which secure aggregation hides"
        hint = "choose one that does not, such as random, power_of_choice or fedcor"
        raise ConfigError("selector", selector, allowed, hint)
    check_rules_for(settings.rules, selector)
    check_minima(settings.rules, selector)


def _check_optimiser(strategy: Strategy, settings: SelectionSettings) -> None:
    """Refuse a strategy whose optimiser reads what `settings` hide from it."""
    aggregating = optimiser_strategy_in(strategy)
    if aggregating is None or not settings.secure_aggregation:
        return
    optimiser = aggregating.optimiser
    if optimiser_traits(optimiser).needs_updates:
        allowed = "reads single updates, which secure aggregation hides"
        hint = "choose one that reads the mean alone, such as fedavg, or a strategy of Flower's"
        raise ConfigError("optimiser", optimiser, allowed, hint)


def _check_pair(strategy: Strategy, selector: Selector) -> None:
    """Refuse a strategy and a selector that would run to the end together, and be wrong."""
    traits, trees = selector_traits(selector), grows_trees(strategy)
    if trees and traits.needs_updates:
        allowed = "reads updates of the model, and clients that grow trees send none"
        hint = "choose one that does not, such as random, power_of_choice or fedcor"
        raise ConfigError("selector", selector, allowed, hint)
    for _, one in wrapped(strategy):
        if isinstance(one, _PRIVATE):
            if trees:
                allowed = "clips numbers and adds noise to them, and a model of trees is a text"
                raise ConfigError("strategy", type(one).__name__, allowed)
            _check_privacy(one, traits)
        if isinstance(one, Bulyan):
            _check_bulyan(one, traits.clients_per_round)


def _check_privacy(strategy: Strategy, traits: SelectorTraits) -> None:
    """Refuse a choice of clients for which the noise of `strategy` would be too small."""
    sized_for = getattr(strategy, "num_sampled_clients", 0)
    chosen = traits.clients_per_round
    if chosen is not None and chosen < sized_for:
        allowed = (
            f"is more than the {chosen} clients that the selector chooses: "
            "the noise is divided by it, and would be too small"
        )
        raise ConfigError("num_sampled_clients", sized_for, allowed, f"set it to {chosen}")
    if traits.replacement:
        allowed = "may count a client twice in the mean, for which the noise is not sized"
        hint = "choose without replacement"
        raise ConfigError("replacement", True, allowed, hint)


def _check_bulyan(strategy: Bulyan, chosen: int | None) -> None:
    """Refuse a round of too few clients, of which Bulyan makes nothing."""
    needed = 4 * strategy.num_malicious_nodes + 3
    if chosen is not None and chosen < needed:
        allowed = (
            f"needs {needed} clients in a round, and the selector chooses {chosen}: "
            "the model would never change"
        )
        raise ConfigError("num_malicious_nodes", strategy.num_malicious_nodes, allowed)
