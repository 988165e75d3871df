"""XGBoost's models: one array of bytes that grows with every round. They cannot be subtracted.

What the other modules check of a model's arrays, shapes and numbers, does not hold for them. Here
is what does: a reply is a model in XGBoost's JSON format, as Flower's FedXgbBagging reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedXgbBagging,
    Strategy,
)

from fedcor.core import types
from fedcor.core.errors import ConfigError, RecordError
from fedcor.core.types import Selector, SelectorTraits, selector_traits
from fedcor.flower.reply_validation import Terms, Unusable, split_model
from fedcor.flower.strategy_memory import is_accountant, wrapped

# A reply that is so many times larger than the others', and larger by so many bytes, is no tree.
_ABSURD_RATIO, _ABSURD_BYTES = 64, 2**20


def grows_trees(strategy: Strategy) -> bool:
    """Whether the model of `strategy` is a bag of XGBoost's trees."""
    return any(isinstance(one, FedXgbBagging) for _, one in wrapped(strategy))


def usual_bytes(contents: Mapping[int, RecordDict]) -> dict[int, float]:
    """Client -> the median size of the other clients' replies; infinite for one that is alone."""
    sizes = {
        client: sum(
            len(array.data) for one in content.array_records.values() for array in one.values()
        )
        for client, content in contents.items()
    }
    others = {
        client: [size for other, size in sizes.items() if other != client] for client in sizes
    }
    return {client: float(np.median(of)) if of else np.inf for client, of in others.items()}


def clean_trees(
    content: RecordDict, model: Mapping[str, types.Array], terms: Terms, usual: float
) -> RecordDict:
    """A reply's trees with their metrics, or Unusable. Others' replies have `usual` bytes."""
    key, record, others = split_model(content, model, terms)
    for name, array in record.items():
        size = len(array.data)
        if size > _ABSURD_RATIO * usual and size - usual > _ABSURD_BYTES:
            why = f"{name} has {size} bytes, the others' {usual:.0f}"
            raise Unusable("unusable", why, doubts_model=True)
        wrong = trees_fault(array)
        if wrong:
            raise Unusable("malformed", f"{name} {wrong}")
    return RecordDict({key: record, **others})


def trees_fault(array: Array) -> str:
    """What is wrong with bytes that should be trees; empty where nothing is."""
    try:
        values = array.numpy()
    except Exception:  # bytes from outside may fail to be read in any way
        return "cannot be read"
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim != 1:
        return "is not one row of bytes (uint8)"
    if _is_bag_of_trees(values.tobytes()):
        return ""
    return 'is not a model of trees in XGBoost\'s JSON format: send booster.save_raw("json")'


def _is_bag_of_trees(text: bytes) -> bool:
    """Whether FedXgbBagging can add these trees to others, and others to these."""
    try:
        model = json.loads(text)["learner"]["gradient_booster"]["model"]
        settings, trees = model["gbtree_model_param"], model["trees"]
        count, parallel = int(settings["num_trees"]), int(settings["num_parallel_tree"])
        lists = isinstance(trees, list) and isinstance(model["tree_info"], list)
        ends = model["iteration_indptr"]
        return (
            lists
            and len(trees) == len(model["tree_info"]) == count == int(ends[-1])
            and 1 <= parallel <= count
            and all(isinstance(tree, dict) for tree in trees)
        )
    except Exception:  # as above
        return False


# Flower's differential privacy within a selection: what it has spent, and what it is sized for.
#
# A release of a model cannot be taken back. So what an accountant has counted is not put back after a
# trial, as all else that a strategy remembers is, and a checkpoint carries it to the next start.


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


# Which strategies and selectors do not go together: refused at the start, with the reason.


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
