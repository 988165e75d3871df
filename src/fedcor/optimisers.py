"""Federated optimisers: how clients' results become the next model, whoever selected the clients.

FedAvg    w^{t+1} = sum_k a_k w_k,  a_k equal (the paper's rule) or proportional to n_k (`weighted`)
FedProx   the same, after local training on  l_k(w) + mu/2 |w - w^t|^2   (Li et al., 2018)

Settings name an optimiser before anything is trained, so torch is imported by `aggregate` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fedcor.checks import check_between, check_one_of
from fedcor.config import build_dataclass
from fedcor.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FedAvg", "FedProx", "Optimiser", "build_optimiser", "optimiser_names"]


class Optimiser(Protocol):
    """What an engine needs to know of a federated optimiser."""

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
            weights: (m,) a_k, which sum to 1.

        Returns:
            (P,) w^{t+1}.
        """
        ...


@dataclass(frozen=True)
class FedAvg:
    """Federated averaging (McMahan et al., 2017).

    Args:
        weighted: a_k proportional to the client's number of samples n_k; else all equal, as in
            the paper.
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


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Federated averaging with a proximal term in local training (Li et al., 2018).

    Args:
        weighted: as for FedAvg.
        mu: strength of the proximal term mu/2 |w - w^t|^2.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        check_between("mu", self.mu, 0.0, 1e6)

    @property
    def proximal(self) -> float:
        """mu."""
        return self.mu


_BUILT_IN: dict[str, type[FedAvg]] = {"fedavg": FedAvg, "fedprox": FedProx}


def optimiser_names() -> list[str]:
    """The names that settings can use."""
    return list(_BUILT_IN)


def build_optimiser(name: str, options: Mapping[str, Any] | None = None) -> Optimiser:
    """The optimiser called `name`. Raises ConfigError for an unknown name or wrong options."""
    check_one_of("name", name, _BUILT_IN)
    return build_dataclass(_BUILT_IN[name], options or {})
