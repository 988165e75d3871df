"""Federated averaging, and what differs from it in local training alone.

FedAvg    w^{t+1} = w^t + sum_k a_k Delta_k,  a_k equal (the paper's rule) or proportional to n_k
FedProx   the same, after local training on  l_k(w) + mu/2 |w - w^t|^2
"""

from __future__ import annotations

from dataclasses import dataclass

from fedcor.checks import check_between
from fedcor.config import plain_keywords
from fedcor.types import Array, Delivery, Population, State

__all__ = ["FedAvg", "FedProx"]


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

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return {}

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + sum_k a_k Delta_k."""
        return delivery.model + delivery.mean, state


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
