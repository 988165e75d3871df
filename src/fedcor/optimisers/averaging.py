"""Federated averaging, and what differs from it in one respect: local training or the step.

FedAvg    w^{t+1} = w^t + sum_k a_k Delta_k,  a_k equal (the paper's rule) or proportional to n_k
FedProx   the same, after local training on  l_k(w) + mu/2 |w - w^t|^2
FedAvgM   momentum at the server:
          v^t = beta v^{t-1} + sum_k a_k Delta_k,    w^{t+1} = w^t + eta_s v^t,    v^{-1} = 0
FedNova   updates divided by the local steps that made them:
          w^{t+1} = w^t + tau_eff sum_k a_k Delta_k / s_k,    tau_eff = sum_k a_k s_k
FedExP    a longer step the more the clients' updates differ:
          w^{t+1} = w^t + eta_t d,    d = sum_k a_k Delta_k
          eta_t   = max(1, sum_k a_k |Delta_k|^2 / (2 (|d|^2 + epsilon)))

s_k is the number of local steps tau_k or, with local momentum rho, the sum of the factors with
which the gradients enter the update:  s_k = [tau_k - rho (1 - rho^tau_k) / (1 - rho)] / (1 - rho).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.core.config import check_between, check_positive, plain_keywords
from fedcor.core.types import Array, Delivery, FloatArray, IntArray, Population, State
from fedcor.optimisers.memory import StatelessOptimiser, weighted_mean


@plain_keywords
@dataclass(frozen=True)
class FedAvg(StatelessOptimiser):
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


@plain_keywords
@dataclass(frozen=True)
class FedNova(StatelessOptimiser):
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

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + tau_eff sum_k a_k Delta_k / s_k."""
        if np.all(delivery.steps == delivery.steps[0]):
            return delivery.model + delivery.mean, state
        effective = self.effective_steps(delivery.steps)
        common = float(delivery.weights @ effective)
        mean = weighted_mean(common * delivery.weights / effective, delivery.updates)
        return (delivery.model + mean).astype(delivery.model.dtype), state


@plain_keywords
@dataclass(frozen=True)
class FedExP(StatelessOptimiser):
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

    def factor(self, delivery: Delivery) -> float:
        """eta_t, at least 1."""
        squares = np.einsum("kp,kp->k", delivery.updates, delivery.updates, dtype=np.float64)
        mean = delivery.mean.astype(np.float64)
        return max(1.0, float(delivery.weights @ squares / (2.0 * (mean @ mean + self.epsilon))))

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_t d."""
        model = delivery.model + self.factor(delivery) * delivery.mean.astype(np.float64)
        return model.astype(delivery.model.dtype), state
