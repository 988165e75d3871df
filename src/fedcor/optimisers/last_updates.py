"""The last update of every client, kept at the server, stands in for clients that were not chosen.

y_k      what k sent last; zero before. After the step it is Delta_k for who delivered.
y        mean of y_k over all N clients

FedVARP     w^{t+1} = w^t + eta_s [sum_k a_k (Delta_k - y_k) + y]
FedStale    w^{t+1} = w^t + eta_s [sum_k a_k (Delta_k - beta y_k) + beta y]
MIFA        w^{t+1} = w^t + eta_t y,  after who delivered replaced y_k by Delta_k / eta_t

eta_t is the learning rate of the local steps in round t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from fedcor.core.config import check_fraction, check_one_of, check_positive, plain_keywords
from fedcor.core.types import Array, Delivery, Population, State
from fedcor.optimisers.memory import (
    RememberingOptimiser,
    StoredAs,
    all_seen,
    mean_of_all,
    recall,
    remember,
    weighted_mean,
)

_STARTED = "started"  # in MIFA's state: everyone had been seen when another client joined


@dataclass(frozen=True)
class _LastUpdates(RememberingOptimiser):
    """What the three share: the memory."""

    weighted: bool = False
    dtype: StoredAs = "float32"

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, get_args(StoredAs))

    def _blend(
        self, state: State, delivery: Delivery, beta: float, rate: float
    ) -> tuple[Array, State]:
        """(P,) w^t + rate [sum_k a_k (Delta_k - beta y_k) + beta y], and the new memory."""
        last, _ = recall(state, delivery.clients)
        stale = mean_of_all(state) - weighted_mean(delivery.weights, last)
        model = delivery.model + rate * (delivery.mean + beta * stale)
        state = remember(state, delivery.clients, delivery.updates, self.dtype)
        return model.astype(delivery.model.dtype), state


@plain_keywords
@dataclass(frozen=True)
class FedVARP(_LastUpdates):
    """Variance reduction by the clients' last updates (Jhunjhunwala et al., 2022).

    If clients are drawn uniformly, the expected step is that of everyone taking part. The more
    equal old and new updates are, the less does it depend on who was drawn. As in the paper, the
    updates are stored as they came, whatever the learning rate was then, and a client that was
    never seen counts as zero.

    Args:
        weighted: as for FedAvg; y is then the mean in proportion to the clients' data. The paper
            has equal weights.
        dtype: float32, or float16 to keep the memory in half of the space: to 3 digits, and to
            fewer where numbers of an update are below 6e-5.
        learning_rate: eta_s, of the server.

    Example:
        >>> from fedcor import FedVARP
        >>> FedVARP(dtype="float16")
        FedVARP(weighted=False, dtype='float16', learning_rate=1.0)
    """

    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("learning_rate", self.learning_rate)

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_s [sum_k a_k (Delta_k - y_k) + y]."""
        return self._blend(state, delivery, 1.0, self.learning_rate)


@plain_keywords
@dataclass(frozen=True)
class FedStale(_LastUpdates):
    """Between FedAvg and FedVARP (Rodio and Neglia, 2024).

    The paper finds that a large beta suits data that differ much between clients, and a small one
    suits clients of which some take part much less often than others. It also divides fresh updates
    by the probability of taking part, which is not done here: it is not known to the server.

    Args:
        weighted: as for FedAvg; y is then the mean in proportion to the clients' data.
        dtype: float32, or float16 to keep the memory in half of the space: to 3 digits, and to
            fewer where numbers of an update are below 6e-5.
        beta: weight of the old updates, from 0 (FedAvg) to 1 (FedVARP).
        learning_rate: eta_s, of the server.

    Example:
        >>> from fedcor import FedStale
        >>> FedStale(beta=0.2).beta
        0.2
    """

    beta: float = 0.5
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("beta", self.beta, closed=True)
        check_positive("learning_rate", self.learning_rate)

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_s [sum_k a_k (Delta_k - beta y_k) + beta y]."""
        return self._blend(state, delivery, self.beta, self.learning_rate)


@plain_keywords
@dataclass(frozen=True)
class MIFA(_LastUpdates):
    """The mean of everybody's last update, new or old (Gu et al., 2021).

    As in the paper, updates are stored per unit of the learning rate that made them, and applied
    with that of the round. The paper's analysis lets everyone take part in the first round; a
    server can also wait until everyone was there once. Clients that join after that are not waited
    for: they count as zero until they are seen.

    Args:
        weighted: whether clients count in proportion to their data. The paper has equal weights.
        dtype: float32, or float16 to keep the memory in half of the space: to 3 digits, and to
            fewer where numbers of an update per learning rate are below 6e-5.
        wait: whether the model stays as it is until every client was seen for the first time.
            Otherwise clients that were never seen count as zero, and the first steps are short.

    Example:
        >>> from fedcor import MIFA
        >>> MIFA(wait=True).wait
        True
    """

    wait: bool = False

    def join(self, state: State, population: Population) -> State:
        """As the others'. If everyone was seen before, nobody waits for those who joined."""
        joined = super().join(state, population)
        if self.wait and all_seen(state) and not all_seen(joined):
            joined = {**joined, _STARTED: np.array(True)}
        return joined

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta_t y, with the new y."""
        rate = delivery.learning_rate
        state = remember(state, delivery.clients, delivery.updates / rate, self.dtype)
        if self.wait and _STARTED not in state and not all_seen(state):
            return delivery.model.copy(), state
        model = delivery.model + rate * mean_of_all(state)
        return model.astype(delivery.model.dtype), state
