"""Federated optimisers: how clients' updates become the next model, whoever selected the clients.

Each is a frozen dataclass that follows `fedcor.core.types.Optimiser`: pure methods, and a state of
named arrays. It uses NumPy alone and knows nothing about any engine. To add one, write a class in a
file of this folder and add a line to `OPTIMISERS`; for a public name, add a line to
`fedcor/__init__.py`. `fedcor.testing.check_optimiser` tests it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fedcor.core.config import check_at_least, check_between
from fedcor.core.errors import ConfigError
from fedcor.core.registry import Registry
from fedcor.core.types import Array, Delivery, Optimiser, State, optimiser_traits
from fedcor.optimisers.adaptive import FedAdagrad, FedAdam, FedYogi
from fedcor.optimisers.averaging import FedAvg, FedAvgM, FedExP, FedNova, FedProx
from fedcor.optimisers.corrections import FedDyn, Scaffold
from fedcor.optimisers.fedrecall import FedRecall
from fedcor.optimisers.last_updates import MIFA, FedStale, FedVARP
from fedcor.optimisers.memory import StatelessOptimiser
from fedcor.optimisers.robust import GeometricMedian, MultiKrum, TrimmedMean

OPTIMISERS = Registry(
    key="name",
    group="fedcor.optimisers",
    built_in={
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
    methods=("init", "step"),
    short_form=("aggregate",),
)


def optimiser_names() -> list[str]:
    """The names of all built-in and registered optimisers."""
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
    check_traits(optimiser)
    return optimiser


def check_traits(optimiser: Optimiser) -> None:
    """Refuse an optimiser with an attribute that has no possible value for an engine."""
    traits = optimiser_traits(optimiser)
    for key in ("weighted", "needs_updates", "remembers"):
        if not isinstance(getattr(traits, key), bool):
            raise ConfigError(key, getattr(traits, key), "must be true or false")
    check_between("proximal", traits.proximal, 0.0, 1e6)
    for key in ("extra_down", "extra_up"):
        check_at_least(key, getattr(traits, key), 0)


@dataclass(frozen=True)
class ShortForm(StatelessOptimiser):
    """An object with `aggregate(model, results, weights)` as an `Optimiser`.

    `model` is (P,) w^t and `results` are (m, P) the clients' models after local training, both
    float32 tensors; `weights` is a NumPy array (m,) that sums to 1. It returns (P,) the next model.

    Args:
        short_form: The object. Its attributes `weighted` and `proximal` are kept; what it does not
            have is as in `FedAvg()`.

    Example:
        >>> class HalfStep:  # goes half of the way to the clients' mean
        ...     def aggregate(self, model, results, weights):
        ...         return model + 0.5 * (results.mean(dim=0) - model)
        >>> ShortForm(HalfStep()).weighted
        False
    """

    short_form: Any

    needs_updates = True  # it is given every client's model

    @property
    def weighted(self) -> bool:
        """Whether a client's weight in the mean is proportional to its data."""
        return bool(getattr(self.short_form, "weighted", False))

    @property
    def proximal(self) -> float:
        """mu of the proximal term in local training; 0 for none."""
        return float(getattr(self.short_form, "proximal", 0.0))

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """What `aggregate` returns, as a NumPy array."""
        import torch  # settings name an optimiser before anything is trained: not needed there

        # Copies: tensors cannot be read-only.
        model = torch.from_numpy(delivery.model.copy())
        results = model + torch.from_numpy(delivery.updates.copy())
        answer = self.short_form.aggregate(model, results, delivery.weights)
        tensor = isinstance(answer, torch.Tensor)
        return answer.detach().cpu().numpy() if tensor else answer, state
