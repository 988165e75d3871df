"""Federated optimisers by name: built-in ones, those of installed packages, any as module:Class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fedcor.errors import ConfigError
from fedcor.optimisers.averaging import FedAvg, FedProx
from fedcor.plugins import Registry
from fedcor.types import Array, Delivery, FloatArray, Optimiser, Population, State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OPTIMISERS", "as_optimiser", "build_optimiser", "optimiser_names"]

OPTIMISERS = Registry(
    "name", "fedcor.optimisers", {"fedavg": FedAvg, "fedprox": FedProx}, ()
)


def optimiser_names() -> list[str]:
    """The names that settings can use."""
    return OPTIMISERS.names()


def build_optimiser(name: str, options: Mapping[str, Any] | None = None) -> Optimiser:
    """The optimiser called `name`, or `module:Class`.

    Raises:
        ConfigError: The name is unknown, or an option is wrong.
    """
    return as_optimiser(OPTIMISERS.build(name, options or {}))


def as_optimiser(given: Any) -> Optimiser:
    """An object with `init` and `step`, or the short form with `aggregate` alone.

    Raises:
        ConfigError: It has neither.
    """
    if isinstance(given, type) or not isinstance(given, Optimiser):
        if not isinstance(given, type) and callable(getattr(given, "aggregate", None)):
            return _Short(given, *[])  # TODO
        raise ConfigError("name", given, "must be ...")
    return cast(Optimiser, given)
