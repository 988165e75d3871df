"""Adaptive steps at the server: a learning rate for each parameter (Reddi et al., 2021).

d^t           sum_k a_k Delta_k
m^t           beta1 m^{t-1} + (1 - beta1) d^t,    m^{-1} = 0
v^t           from v^{-1} = tau^2, with d^2 by parameter:
  FedAdagrad  v^{t-1} + d^2
  FedAdam     beta2 v^{t-1} + (1 - beta2) d^2
  FedYogi     v^{t-1} - (1 - beta2) d^2 sign(v^{t-1} - d^2)
w^{t+1}       w^t + eta_s m^t / (sqrt(v^t) + tau)

This is Algorithm 2 of the paper: there is no correction of bias, and the paper asks for v^{-1} of
at least tau^2. Other packages start at 0, or correct the bias of FedAdam.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedcor.core.config import check_between, check_positive, plain_keywords
from fedcor.core.types import Array, Delivery, FloatArray, Population, State


@dataclass(frozen=True)
class _Adaptive(ABC):
    """What the three share; each says how v grows."""

    learning_rate: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3
    weighted: bool = False

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_positive("tau", self.tau)
        check_between("beta1", self.beta1, 0.0, 0.9999)

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """`first` and `second`: (P,) m and v."""
        return {"first": np.zeros(len(model)), "second": np.full(len(model), self.tau**2)}

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_s m^t / (sqrt(v^t) + tau)."""
        mean = delivery.mean.astype(np.float64)
        first = self.beta1 * state["first"] + (1.0 - self.beta1) * mean
        second = self._grown(state["second"], mean**2)
        model = delivery.model + self.learning_rate * first / (np.sqrt(second) + self.tau)
        return model.astype(delivery.model.dtype), {"first": first, "second": second}

    @abstractmethod
    def _grown(self, second: FloatArray, squared: FloatArray) -> FloatArray:
        """(P,) v^t, from v^{t-1} and d^2."""


@plain_keywords
@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """Adagrad at the server (Reddi et al., 2021).

    Args:
        learning_rate: eta_s, of the server. The paper tunes it for each task.
        beta1: momentum; 0, as in the paper's experiments.
        tau: how adaptive it is: the smaller, the more. 0.001, as in the paper.
        weighted: as for FedAvg.

    Example:
        >>> from fedcor import FedAdagrad
        >>> FedAdagrad().learning_rate
        0.1
    """

    learning_rate: float = 0.1
    beta1: float = 0.0

    def _grown(self, second: FloatArray, squared: FloatArray) -> FloatArray:
        return second + squared


@plain_keywords
@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """Adam at the server (Reddi et al., 2021).

    Where updates stay far below `tau`, a step is learning_rate / (2 tau) times the mean update as
    long as v is near tau^2, and learning_rate / tau times in the long run, when v has decayed: by
    default, five times at first and ten times in the end. Where they are far above, it is about the
    learning rate in each parameter, however large the updates.

    Args:
        learning_rate: eta_s, of the server. The paper tunes it for each task.
        beta1: momentum, below 1.
        tau: how adaptive it is: the smaller, the more. 0.001, as in the paper.
        weighted: as for FedAvg.
        beta2: how long squares of updates are remembered; below 1.

    Example:
        >>> from fedcor import FedAdam
        >>> FedAdam(learning_rate=0.1).beta2
        0.99
    """

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("beta2", self.beta2, 0.0, 0.9999)

    def _grown(self, second: FloatArray, squared: FloatArray) -> FloatArray:
        return self.beta2 * second + (1.0 - self.beta2) * squared


@plain_keywords
@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi at the server (Reddi et al., 2021): as FedAdam, but v shrinks more slowly.

    Where updates stay far below `tau`, v stays near tau^2, and a step at learning_rate / (2 tau)
    times the mean update: five times, by default.

    Args:
        learning_rate: eta_s, of the server. The paper tunes it for each task.
        beta1: momentum, below 1.
        tau: how adaptive it is: the smaller, the more. 0.001, as in the paper.
        weighted: as for FedAvg.
        beta2: how long squares of updates are remembered; below 1.

    Example:
        >>> from fedcor import FedYogi
        >>> FedYogi(learning_rate=0.1).tau
        0.001
    """

    def _grown(self, second: FloatArray, squared: FloatArray) -> FloatArray:
        return second - (1.0 - self.beta2) * squared * np.sign(second - squared)
