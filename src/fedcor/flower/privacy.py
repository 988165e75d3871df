"""Flower's differential privacy within a selection: what it has spent, and what it is sized for.

A release of a model cannot be taken back. So what an accountant has counted is not put back after a
trial, as all else that a strategy remembers is, and a checkpoint carries it to the next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from fedcor.errors import ConfigError, RecordError
from fedcor.flower.memory import is_accountant, wrapped
from fedcor.types import SelectorTraits

__all__ = ["PRIVATE", "check_privacy", "read_spent", "restore_spent"]

PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
_SPENT = "privacy spent: "  # begins a key of `read_spent`; an attribute's name has no space


def check_privacy(strategy: Strategy, traits: SelectorTraits) -> None:
    """Refuse a choice of clients for which the noise of `strategy` would be too small."""
    told = getattr(strategy, "num_sampled_clients", 0)
    chosen = traits.clients_per_round
    if chosen is not None and chosen < told:
        allowed = (
            f"is more than the {chosen} clients that the selector chooses: "
            "the noise is divided by it, and would be too small"
        )
        raise ConfigError("num_sampled_clients", told, allowed, f"set it to {chosen}")
    if traits.replacement:
        allowed = "may count a client twice in the mean, for which the noise is not sized"
        hint = "choose without replacement"
        raise ConfigError("replacement", True, allowed, hint)


def read_spent(strategy: Strategy) -> dict[str, Any]:
    """What the accountants in `strategy` have counted, for a checkpoint."""
    return {name: one.state_dict() for name, one in _accountants(strategy).items()}


def restore_spent(strategy: Strategy, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Give the accountants back what `read_spent` put into `memory`; the rest of `memory`.

    One that has counted more by now keeps it: the same object may be started again after a round
    that failed.
    """
    accountants = _accountants(strategy)
    spent = {key: value for key, value in memory.items() if key.startswith(_SPENT)}
    if spent.keys() != accountants.keys():
        raise RecordError(
            "privacy was accounted for before and is not now, or the other way round: "
            "the sum would be wrong; choose another folder"
        )
    for key, one in accountants.items():
        counted, state = one.num_releases, one.state_dict()
        try:
            one.load_state_dict(spent[key])
        except ValueError as error:
            raise RecordError(f"the privacy spent before cannot be counted: {error}") from error
        if one.num_releases < counted:
            one.load_state_dict(state)
    return {key: value for key, value in memory.items() if key not in spent}


def _accountants(strategy: Strategy) -> dict[str, Any]:
    """The accountants of the strategy and of all that it wraps, by key."""
    return {
        f"{_SPENT}{path}{name}": value
        for path, one in wrapped(strategy)
        for name, value in vars(one).items()
        if is_accountant(value)
    }
