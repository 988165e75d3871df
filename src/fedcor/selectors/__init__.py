"""Selectors: policies that decide which clients train next.

Each is a frozen dataclass that follows `fedcor.core.types.Selector`: pure methods, and a state of
named arrays. It asks a federation and knows nothing about any engine. To add one, write a class in
a file of this folder and add a line to `SELECTORS`; for a public name, add a line to
`fedcor/__init__.py`. `fedcor.testing.check_selector` tests it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedcor.core.registry import Registry
from fedcor.core.types import Selector
from fedcor.selectors.afl import AFL
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.baselines import Full, Random, RoundRobin
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor, Proxy
from fedcor.selectors.oort import Oort
from fedcor.selectors.power_of_choice import PowerOfChoice

DEFAULT_SELECTOR = "aligned"  # where the user names none

SELECTORS = Registry(
    key="selector",
    group="fedcor.selectors",
    built_in={
        "random": Random,
        "round_robin": RoundRobin,
        "afl": AFL,
        "power_of_choice": PowerOfChoice,
        "oort": Oort,
        "fedcor": FedCor,
        "complement": Complement,
        "aligned": Aligned,
        "proxy": Proxy,
        "full": Full,
    },
    methods=("init", "select", "observe"),
)


def selector_names() -> list[str]:
    """The names of all built-in and registered selectors."""
    return SELECTORS.names()


def selector_name(selector: Selector) -> str:
    """The name of `selector` in a record: its registered name, else `module:Class`."""
    return SELECTORS.name_of(selector)


def selector_class(name: str) -> type[Any]:
    """The dataclass of a selector.

    Args:
        name: A name of `selector_names()`, or `module:Class`.

    Raises:
        ConfigError: There is no such selector (with a suggestion), or it is not a selector.
    """
    return SELECTORS.find(name)


def build_selector(
    name: str, clients_per_round: int, options: Mapping[str, Any] | None = None
) -> Selector:
    """A selector by name, with its hyper-parameters.

    Args:
        name: A name of `selector_names()`, or `module:Class`.
        clients_per_round: C, passed to every selector that has this parameter.
        options: The selector's other hyper-parameters by name.

    Raises:
        ConfigError: There is no such selector, or it has no such hyper-parameter, or its value is
            not allowed.

    Example:
        >>> from fedcor import build_selector
        >>> build_selector("power_of_choice", 5, {"candidates": 20})
        PowerOfChoice(clients_per_round=5, candidates=20)
    """
    cls = selector_class(name)
    if "clients_per_round" in {field.name for field in fields(cls)}:
        options = {**(options or {}), "clients_per_round": clients_per_round}
    selector: Selector = SELECTORS.build(name, options or {})
    return selector
