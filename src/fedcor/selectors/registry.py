"""Selectors by name: our own, those that installed packages offer, and any class named `module:Class`.

A package offers one by an entry point in its pyproject.toml:

    [project.entry-points."fedcor.selectors"]
    mine = "my_package.my_module:MySelector"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from fedcor.config import build_dataclass
from fedcor.errors import ConfigError, suggest
from fedcor.plugins import load_object
from fedcor.selectors.afl import AFL
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor, Proxy
from fedcor.selectors.power_of_choice import PowerOfChoice
from fedcor.selectors.simple import Full, Random
from fedcor.types import Selector

__all__ = ["build_selector", "selector_class", "selector_name", "selector_names"]

_BUILT_IN: dict[str, type[Any]] = {
    "random": Random,
    "afl": AFL,
    "power_of_choice": PowerOfChoice,
    "fedcor": FedCor,
    "complement": Complement,
    "proxy": Proxy,
    "full": Full,
}


def selector_names() -> list[str]:
    """Every name that can be used without `module:Class`."""
    return [*_BUILT_IN, *sorted(point.name for point in entry_points(group="fedcor.selectors"))]


def selector_name(selector: Selector) -> str:
    """What records call `selector`: its registered name, else module:Class."""
    cls = type(selector)
    for name, known in _BUILT_IN.items():
        if cls is known:
            return name
    for point in entry_points(group="fedcor.selectors"):
        if point.value == f"{cls.__module__}:{cls.__qualname__}":
            return point.name
    return f"{cls.__module__}:{cls.__qualname__}"


def selector_class(name: str) -> type[Any]:
    """The selector's dataclass. Raises ConfigError, with a suggestion, when there is none."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    points = entry_points(group="fedcor.selectors", name=name)
    if points:
        found = load_object(next(iter(points)).value, "selector")
    elif ":" in name:
        found = load_object(name, "selector")
    else:
        names = selector_names()
        raise ConfigError(
            "selector",
            name,
            f"must be one of {', '.join(names)}, or module:Class",
            suggest(name, names),
        )
    if not (
        isinstance(found, type) and dataclasses.is_dataclass(found) and issubclass(found, Selector)
    ):
        raise ConfigError(
            "selector", name, "must be a dataclass with the verbs init, select and observe"
        )
    return found


def build_selector(
    name: str, clients_per_round: int, options: Mapping[str, Any] | None = None
) -> Selector:
    """A selector with its hyper-parameters; unknown or impossible ones raise ConfigError."""
    cls = selector_class(name)
    if "clients_per_round" in {field.name for field in dataclasses.fields(cls)}:
        options = {**(options or {}), "clients_per_round": clients_per_round}
    selector: Selector = build_dataclass(cls, options or {})
    return selector
