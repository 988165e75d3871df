"""A longer step the more the clients' updates differ.

FedExP    w^{t+1} = w^t + eta_t d,    d = sum_k a_k Delta_k
          eta_t   = max(1, sum_k a_k |Delta_k|^2 / (2 (|d|^2 + epsilon)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.checks import check_positive
from fedcor.config import plain_keywords
from fedcor.types import Array, Delivery, Population, State

__all__ = ["FedExP"]


@plain_keywords
@dataclass(frozen=True)
class FedExP:
    """Federated averaging with extrapolation (Jhunjhunwala et al., 2023).

    The paper evaluates the mean of the last two models, because single ones oscillate. Here the
    model itself is evaluated, as for every other optimiser.

    It reads the updates of single clients, though only their lengths: under secure aggregation,
    clients could send the squares of these along.

    Args:
        epsilon: keeps the step finite where updates cancel. It is compared with the squared length
            of the mean update. The authors' code has 0.001, and 0.1 for one of its data sets.
        weighted: as for FedAvg.

    Example:
        >>> from fedcor import FedExP
        >>> FedExP(epsilon=0.1)
        FedExP(epsilon=0.1, weighted=False)
    """

    epsilon: float = 1e-3
    weighted: bool = False

    needs_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return {}

    def factor(self, delivery: Delivery) -> float:
        """eta_t, at least 1."""
        squares = np.einsum("kp,kp->k", delivery.updates, delivery.updates, dtype=np.float64)
        mean = delivery.mean.astype(np.float64)
        return max(1.0, float(delivery.weights @ squares / (2.0 * (mean @ mean + self.epsilon))))

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_t d."""
        model = delivery.model + self.factor(delivery) * delivery.mean.astype(np.float64)
        return model.astype(delivery.model.dtype), state
