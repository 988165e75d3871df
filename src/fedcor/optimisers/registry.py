"""Federated optimisers by name: built-in ones, those of installed packages, any as module:Class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fedcor.checks import check_at_least, check_between
from fedcor.errors import ConfigError
from fedcor.optimisers.adaptive import FedAdagrad, FedAdam, FedYogi
from fedcor.optimisers.averaging import FedAvg, FedProx
from fedcor.optimisers.extrapolation import FedExP
from fedcor.optimisers.feddyn import FedDyn
from fedcor.optimisers.last_updates import MIFA, FedStale, FedVARP
from fedcor.optimisers.momentum import FedAvgM
from fedcor.optimisers.normalised import FedNova
from fedcor.optimisers.recall import FedRecall
from fedcor.optimisers.robust import GeometricMedian, MultiKrum, TrimmedMean
from fedcor.optimisers.scaffold import Scaffold
from fedcor.optimisers.short import ShortForm
from fedcor.plugins import Registry
from fedcor.types import Optimiser, optimiser_traits

__all__ = ["OPTIMISERS", "as_optimiser", "build_optimiser", "optimiser_names"]

OPTIMISERS = Registry(
    "name",
    "fedcor.optimisers",
    {
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "fedavgm": FedAvgM,
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedyogi": FedYogi,
        "fednova": FedNova,
        "scaffold": Scaffold,
        "feddyn": FedDyn,
        "mifa": MIFA,
        "fedvarp": FedVARP,
        "fedstale": FedStale,
        "fedexp": FedExP,
        "fedrecall": FedRecall,
        "trimmed_mean": TrimmedMean,
        "geometric_median": GeometricMedian,
        "multi_krum": MultiKrum,
    },
    ("init", "step"),
    ("aggregate",),
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
    """A user's object as an optimiser: with `init` and `step`, or with `aggregate` alone.

    An object with `aggregate` is of the short form (see `ShortForm`), whatever else it has: so is a
    subclass of `FedAvg` that has its own.

    Raises:
        ConfigError: It has neither, or an attribute that an engine reads has no possible value.
    """
    OPTIMISERS.check(given)
    short = callable(getattr(given, "aggregate", None))
    optimiser = ShortForm(given) if short else cast(Optimiser, given)
    traits = optimiser_traits(optimiser)
    for key in ("weighted", "needs_updates", "remembers"):
        if not isinstance(getattr(traits, key), bool):
            raise ConfigError(key, getattr(traits, key), "must be true or false")
    check_between("proximal", traits.proximal, 0.0, 1e6)
    for key in ("extra_down", "extra_up"):
        check_at_least(key, getattr(traits, key), 0)
    return optimiser
