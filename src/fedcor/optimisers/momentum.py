"""Momentum at the server.

FedAvgM    v^t = beta v^{t-1} + sum_k a_k Delta_k,    w^{t+1} = w^t + eta_s v^t,    v^{-1} = 0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.checks import check_between, check_positive
from fedcor.config import plain_keywords
from fedcor.types import Array, Delivery, Population, State

__all__ = ["FedAvgM"]


@plain_keywords
@dataclass(frozen=True)
class FedAvgM:
    """Federated averaging with momentum at the server (Hsu et al., 2019).

    In the long run, momentum multiplies the step by 1 / (1 - momentum): tenfold at 0.9. A learning
    rate that suits FedAvg is then too large: lower it, here or at the clients.

    Args:
        learning_rate: eta_s, of the server.
        momentum: beta, below 1. With 0 and a learning rate of 1, this is FedAvg.
        weighted: as for FedAvg.

    Example:
        >>> from fedcor import FedAvgM
        >>> FedAvgM(learning_rate=0.1)
        FedAvgM(learning_rate=0.1, momentum=0.9, weighted=False)
    """

    learning_rate: float = 1.0
    momentum: float = 0.9
    weighted: bool = False

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_between("momentum", self.momentum, 0.0, 0.9999)

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """`velocity`: (P,) v."""
        return {"velocity": np.zeros(len(model))}

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_s v^t."""
        velocity = self.momentum * state["velocity"] + delivery.mean
        model = delivery.model + self.learning_rate * velocity
        return model.astype(delivery.model.dtype), {"velocity": velocity}
