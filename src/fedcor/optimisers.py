"""Federated optimisers: how clients' results become the next model, whoever selected the clients.

FedAvg    w^{t+1} = sum_k a_k w_k,  a_k equal (the paper's rule) or proportional to n_k (`weighted`)
FedProx   the same, after local training on  l_k(w) + mu/2 |w - w^t|^2   (Li et al., 2018)

A user's own is any object with the method `aggregate` (see `Optimiser`). It keeps nothing between
rounds: an engine also calls it for models that are only tried.

Settings name an optimiser before anything is trained, so torch is imported by `aggregate` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from fedcor.checks import check_between
from fedcor.config import plain_keywords
from fedcor.plugins import Registry
from fedcor.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "OPTIMISERS",
    "FedAvg",
    "FedProx",
    "Optimiser",
    "as_optimiser",
    "build_optimiser",
    "optimiser_names",
]


class Optimiser(Protocol):
    """What an engine needs to know of a federated optimiser.

    A user's own needs only `aggregate`; then clients have equal weights, and no proximal term.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class HalfStep:  # goes half of the way to the clients' mean
        ...     def aggregate(self, model, results, weights):
        ...         return model + 0.5 * (results.mean(dim=0) - model)
    """

    @property
    def weighted(self) -> bool:
        """Whether a client's weight in the mean is proportional to its data."""
        ...

    @property
    def proximal(self) -> float:
        """mu of the proximal term in local training; 0 for none."""
        ...

    def aggregate(self, model: Tensor, results: Tensor, weights: FloatArray) -> Tensor:
        """The next model.

        Args:
            model: (P,) w^t.
            results: (m, P) the clients' models after local training.
            weights: (m,) a_k, a NumPy array that sums to 1.

        Returns:
            (P,) w^{t+1}.
        """
        ...


@plain_keywords
@dataclass(frozen=True)
class FedAvg:
    """Federated averaging (McMahan et al., 2017).

    Args:
        weighted: a_k proportional to the client's number of samples n_k; else all equal, as in
            the paper.

    Example:
        >>> from fedcor import FedAvg
        >>> FedAvg(weighted=True)
        FedAvg(weighted=True)
    """

    weighted: bool = False

    @property
    def proximal(self) -> float:
        """0: local training has no proximal term."""
        return 0.0

    def aggregate(self, model: Tensor, results: Tensor, weights: FloatArray) -> Tensor:
        """(P,) w^t + sum_k a_k (w_k - w^t)."""
        import torch

        # The mean of changes, not of models: it loses less in float32, and a client that did not
        # move leaves w^t exactly as it is.
        a = torch.as_tensor(weights, dtype=results.dtype, device=results.device)  # (m,)
        return model + a @ (results - model)


@plain_keywords
@dataclass(frozen=True)
class FedProx(FedAvg):
    """Federated averaging with a proximal term in local training (Li et al., 2018).

    Args:
        weighted: as for FedAvg.
        mu: strength of the proximal term mu/2 |w - w^t|^2.

    Example:
        >>> from fedcor import FedProx
        >>> FedProx(mu=0.1).proximal
        0.1
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        check_between("mu", self.mu, 0.0, 1e6)

    @property
    def proximal(self) -> float:
        """mu."""
        return self.mu


OPTIMISERS = Registry(
    "name", "fedcor.optimisers", {"fedavg": FedAvg, "fedprox": FedProx}, ("aggregate",)
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
    """An object with `aggregate` as an optimiser: what it does not say is as in `FedAvg()`.

    Raises:
        ConfigError: It has no method `aggregate`.
    """
    OPTIMISERS.check(given)
    if hasattr(given, "weighted") and hasattr(given, "proximal"):
        return cast(Optimiser, given)
    weighted, proximal = getattr(given, "weighted", False), getattr(given, "proximal", 0.0)
    return _Completed(bool(weighted), float(proximal), given.aggregate)


@dataclass(frozen=True)
class _Completed:
    """A user's optimiser that does not say how it weights clients, or that it has no mu."""

    weighted: bool
    proximal: float
    aggregate: Callable[[Tensor, Tensor, FloatArray], Tensor]
