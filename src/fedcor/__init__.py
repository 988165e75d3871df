"""fedcor: which clients train next in federated learning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcor.selectors import (
        AFL,
        Complement,
        FedCor,
        Full,
        PowerOfChoice,
        Proxy,
        Random,
        build_selector,
    )
    from fedcor.types import Federation, Outcome, Population, Selector, State

__all__ = [
    "AFL",
    "Complement",
    "FedCor",
    "Federation",
    "Full",
    "Outcome",
    "Population",
    "PowerOfChoice",
    "Proxy",
    "Random",
    "Selector",
    "State",
    "build_selector",
]


def __getattr__(name: str) -> Any:
    """Names are brought when they are first used, so that the command line answers (and can be interrupted) at once."""
    if name not in __all__:
        raise AttributeError(f"module 'fedcor' has no attribute {name!r}")
    room = (
        "types"
        if name in ("Federation", "Outcome", "Population", "Selector", "State")
        else "selectors"
    )
    return getattr(importlib.import_module(f"fedcor.{room}"), name)
