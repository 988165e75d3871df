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

_TYPES = ("Federation", "Outcome", "Population", "Selector", "State")


def __getattr__(name: str) -> Any:
    """Import a name when it is first used.

    So the command line answers at once, and can be interrupted at once.
    """
    if name not in __all__:
        raise AttributeError(f"module 'fedcor' has no attribute {name!r}")
    module = "fedcor.types" if name in _TYPES else "fedcor.selectors"
    return getattr(importlib.import_module(module), name)
