"""A regulariser that changes with the rounds, so that local optima meet in the global one.

FedDyn    local training on  l_k(w) - <h_k, w> + alpha/2 |w - w^t|^2,  that is  e_k = -h_k
          h_k    <- h_k - alpha Delta_k                    for who delivered
          h       = mean of h_k over all N clients         all start at zero
          w^{t+1} = w^t + sum_k a_k Delta_k - h / alpha,   with the new h
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.checks import check_between
from fedcor.config import plain_keywords
from fedcor.optimisers.memory import empty_memory, mean_of_all, recall, remember, resize
from fedcor.types import Array, Delivery, IntArray, Population, State

__all__ = ["FedDyn"]

_NAME = "gradient"


@plain_keywords
@dataclass(frozen=True)
class FedDyn:
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

    needs_updates: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_between("alpha", self.alpha, 1e-6, 1e6)

    @property
    def proximal(self) -> float:
        """alpha."""
        return self.alpha

    def init(self, population: Population, model: Array) -> State:
        """Nobody was seen: h and all h_k are zero."""
        return empty_memory(population, model, weighted=self.weighted)

    def join(self, state: State, population: Population) -> State:
        """h as the mean over more clients."""
        return resize(state, population, weighted=self.weighted, name=_NAME)

    def corrections(self, state: State, clients: IntArray) -> Array:
        """(m, P) -h_k."""
        own, _ = recall(state, clients, _NAME)
        return np.negative(own, out=own)

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + sum_k a_k Delta_k - h / alpha."""
        own, _ = recall(state, delivery.clients, _NAME)
        state = remember(state, delivery.clients, own - self.alpha * delivery.updates, name=_NAME)
        model = delivery.model + (delivery.mean - mean_of_all(state) / self.alpha)
        return model.astype(delivery.model.dtype), state
