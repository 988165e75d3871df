"""Updates divided by the local steps that made them.

FedNova    w^{t+1} = w^t + tau_eff sum_k a_k Delta_k / s_k,    tau_eff = sum_k a_k s_k

s_k is the number of local steps tau_k or, with local momentum rho, the sum of the factors with
which the gradients enter the update:  s_k = [tau_k - rho (1 - rho^tau_k) / (1 - rho)] / (1 - rho).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.checks import check_between
from fedcor.config import plain_keywords
from fedcor.optimisers.memory import weighted_mean
from fedcor.types import Array, Delivery, FloatArray, IntArray, Population, State

__all__ = ["FedNova"]


@plain_keywords
@dataclass(frozen=True)
class FedNova:
    """Normalised averaging (Wang et al., 2020): who took more steps does not count more.

    Where all clients took equally many steps, this is FedAvg.

    It reads the updates of single clients. Under secure aggregation, clients would have to divide
    their updates by s_k themselves.

    Args:
        weighted: as for FedAvg.
        momentum: rho, of the clients' local steps; below 1. The simulator's clients use none.

    Example:
        >>> import numpy as np
        >>> from fedcor import FedNova
        >>> FedNova(momentum=0.5).effective_steps(np.array([1, 2]))
        array([1. , 2.5])
    """

    weighted: bool = False
    momentum: float = 0.0

    needs_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_between("momentum", self.momentum, 0.0, 0.9999)

    def effective_steps(self, steps: IntArray) -> FloatArray:
        """(m,) s_k, given (m,) tau_k."""
        rho = self.momentum
        effective: FloatArray = (steps - rho * (1.0 - rho**steps) / (1.0 - rho)) / (1.0 - rho)
        return effective

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return {}

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + tau_eff sum_k a_k Delta_k / s_k."""
        if np.all(delivery.steps == delivery.steps[0]):
            return delivery.model + delivery.mean, state
        effective = self.effective_steps(delivery.steps)
        common = float(delivery.weights @ effective)
        mean = weighted_mean(common * delivery.weights / effective, delivery.updates)
        return (delivery.model + mean).astype(delivery.model.dtype), state
