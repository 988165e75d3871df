"""Which strategies and selectors do not go together: refused at the start, with the reason."""

from __future__ import annotations

from flwr.serverapp.strategy import Bulyan, Strategy

from fedcor.errors import ConfigError
from fedcor.flower.memory import wrapped
from fedcor.flower.privacy import PRIVATE, check_privacy
from fedcor.flower.trees import grows_trees
from fedcor.types import Selector, selector_traits

__all__ = ["check_compatibility"]


def check_compatibility(strategy: Strategy, selector: Selector) -> None:
    """Refuse a strategy and a selector that would run to the end together, and be wrong."""
    traits, trees = selector_traits(selector), grows_trees(strategy)
    if trees and traits.needs_updates:
        allowed = "reads updates of the model, and clients that grow trees send none"
        hint = "choose one that does not, such as random, power_of_choice or fedcor"
        raise ConfigError("selector", selector, allowed, hint)
    for _, one in wrapped(strategy):
        if isinstance(one, PRIVATE):
            if trees:
                allowed = "clips numbers and adds noise to them, and a model of trees is a text"
                raise ConfigError("strategy", type(one).__name__, allowed)
            check_privacy(one, traits)
        if isinstance(one, Bulyan):
            _check_bulyan(one, traits.clients_per_round)


def _check_bulyan(strategy: Bulyan, chosen: int | None) -> None:
    """Refuse a round of too few clients, of which Bulyan makes nothing."""
    needed = 4 * strategy.num_malicious_nodes + 3
    if chosen is not None and chosen < needed:
        allowed = (
            f"needs {needed} clients in a round, and the selector chooses {chosen}: "
            "the model would never change"
        )
        raise ConfigError("num_malicious_nodes", strategy.num_malicious_nodes, allowed)
