"""Corrections of every local step, against the drift of clients towards their own optimum.

SCAFFOLD    control variates
            e_k     = c - c_k                                        added to every local gradient
            w^{t+1} = w^t + eta_s sum_k a_k Delta_k
            c_k    <- c_k - c - Delta_k / (tau_k eta)                if k delivered (option II)
            c       = mean of c_k over all N clients                 all start at zero

FedDyn      a regulariser that changes with the rounds, so that local optima meet in the global one
            local training on  l_k(w) - <h_k, w> + alpha/2 |w - w^t|^2,  that is  e_k = -h_k
            h_k    <- h_k - alpha Delta_k                            if k delivered
            h       = mean of h_k over all N clients                 all start at zero
            w^{t+1} = w^t + sum_k a_k Delta_k - h / alpha,           with the new h

tau_k is the number of local steps and eta their learning rate, so that the new c_k is the mean
gradient that k saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.core.config import check_between, check_positive, plain_keywords
from fedcor.core.types import Array, Delivery, IntArray, State
from fedcor.optimisers.memory import RememberingOptimiser, mean_of_all, recall, remember


@plain_keywords
@dataclass(frozen=True)
class Scaffold(RememberingOptimiser):
    """SCAFFOLD with option II (Karimireddy et al., 2020).

    Each client receives c beside the model, and sends the change of its c_k beside its update. That
    is twice the traffic of FedAvg, and it is billed. A server that knows the learning rate and the
    number of steps can rebuild c_k from the update, as is done here; then nothing more need be
    sent up.

    It reads the updates of single clients, because c_k is kept here. It needs an engine that knows
    the learning rate and the steps.

    Args:
        learning_rate: eta_s, of the server.
        weighted: as for FedAvg; c is then the mean in proportion to the clients' data. The paper
            has equal weights.

    Example:
        >>> from fedcor import Scaffold
        >>> Scaffold().extra_down, Scaffold().extra_up
        (1, 1)
    """

    learning_rate: float = 1.0
    weighted: bool = False

    name: ClassVar[str] = "control"
    extra_down: ClassVar[int] = 1
    extra_up: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)

    def corrections(self, state: State, clients: IntArray) -> Array:
        """(m, P) c - c_k."""
        own, _ = recall(state, clients, self.name)
        difference: Array = mean_of_all(state).astype(np.float32) - own
        return difference

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_s sum_k a_k Delta_k."""
        own, _ = recall(state, delivery.clients, self.name)
        paces = (delivery.steps * delivery.learning_rate).astype(np.float32)
        common = mean_of_all(state).astype(np.float32)
        controls = own - common - delivery.updates / paces[:, None]
        model = delivery.model + self.learning_rate * delivery.mean.astype(np.float64)
        state = remember(state, delivery.clients, controls, name=self.name)
        return model.astype(delivery.model.dtype), state


@plain_keywords
@dataclass(frozen=True)
class FedDyn(RememberingOptimiser):
    """Federated learning with dynamic regularisation (Acar et al., 2021).

    h_k estimates the gradient of client k at the optimum. The paper minimises exactly; with a few
    local steps, h_k needs about 1 / (alpha x learning rate x steps) visits to follow.

    A client can keep its own h_k, so no more is sent than by FedAvg, and that is what is billed.
    Here the server keeps it, and therefore reads the updates of single clients.

    Args:
        alpha: strength of the regulariser. The authors' examples use 0.01.
        weighted: as for FedAvg; h is then the mean in proportion to the clients' data. (The
            authors' code divides alpha by a client's share of the data.)

    Example:
        >>> from fedcor import FedDyn
        >>> FedDyn(alpha=0.01).proximal
        0.01
    """

    alpha: float = 0.1
    weighted: bool = False

    name: ClassVar[str] = "gradient"

    def __post_init__(self) -> None:
        check_between("alpha", self.alpha, 1e-6, 1e6)

    @property
    def proximal(self) -> float:
        """alpha."""
        return self.alpha

    def corrections(self, state: State, clients: IntArray) -> Array:
        """(m, P) -h_k."""
        own, _ = recall(state, clients, self.name)
        return np.negative(own, out=own)

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + sum_k a_k Delta_k - h / alpha."""
        own, _ = recall(state, delivery.clients, self.name)
        state = remember(
            state, delivery.clients, own - self.alpha * delivery.updates, name=self.name
        )
        model = delivery.model + (delivery.mean - mean_of_all(state) / self.alpha)
        return model.astype(delivery.model.dtype), state
