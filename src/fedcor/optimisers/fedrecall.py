"""FedRecall: everyone's step, from what the chosen clients sent and what all others sent last.

u_k       update of client k per unit of local training: Delta_k / (eta E_k), for who delivered
y_k       what k sent last, in the same unit; y itself for who was never seen
y         sum_i p_i y_i / sum_i p_i over all who were seen: everyone's mean, as it is remembered
c         sum_i p_i over all who were seen: how much of the federation is remembered
news      sum_k a_k (u_k - y_k): how far the chosen clients' updates differ from their last ones

step      d = y + g news,   with the gain g = 1 - c (1 - max(gain, m / N)) if m of N delivered
rate      r <- r exp(k c cos(y + news, d_before)), within its limits
model     w^{t+1} = w^t + eta E (1 + c (r - 1)) d,   E the mean number of local steps

With nothing remembered, this is FedAvg's step, or FedNova's where clients took unequal numbers of
local steps. With everyone remembered, a gain of 1 is FedVARP's with y by data, and one of m/N is
MIFA's if all have as much data: the smaller the gain, the less a step depends on who was chosen. It
is at least m/N, so that nothing is recalled where everyone delivers and a_k = p_k. If the chosen
count alike (`weighted=False`) and have unequal data, y and the news are means with other weights:
something of y is then recalled whoever delivers. A client that was not seen for very long may have
left, and is forgotten.

The rate is the server's. While fresh news points where the last step went, steps were too short,
and it grows; where it points back, they were too long, or the news is noise, and it falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import numpy as np

from fedcor.core.config import (
    check_between,
    check_fraction,
    check_one_of,
    check_positive,
    plain_keywords,
)
from fedcor.core.errors import ConfigError
from fedcor.core.types import Array, Delivery, FloatArray, IntArray, Population, State
from fedcor.optimisers.memory import (
    StoredAs,
    count_members,
    empty_memory,
    forget,
    recall,
    remember,
    resize,
    weighted_mean,
)

_LARGEST = float(np.finfo(np.float32).max)


@plain_keywords
@dataclass(frozen=True)
class FedRecall:
    """The step of everyone, remembered from their last updates and renewed by the chosen clients.

    It needs a memory of one update per client at the server, and sends nothing more than FedAvg.
    The selector `Aligned` is made for it. What was measured is in docs/results/memory.md.

    Args:
        weighted: Whether the chosen clients' news counts in proportion to their data. Everyone's
            remembered mean always does: it stands for the loss of all data.
        gain: Weight of the chosen clients' news once everyone was seen, in (0, 1]. 1 is FedVARP's
            step, with its mean of everyone by data.
        rate: r at the start, the server's learning rate once everyone was seen. Before, it is
            between 1 and r.
        smallest_rate: r is never smaller.
        largest_rate: r is never larger.
        adaptation: k, how fast r follows the agreement of the news with the last step; 0 keeps it
            as it is at the start.
        longest_absence: After this many times N / m rounds in which it did not deliver, a client is
            forgotten; m is how many deliver per round on average.
        dtype: float32, or float16 to keep the memory in half of the space: to 3 digits, and to
            fewer where updates per local step and learning rate are below 6e-5.

    Example:
        >>> from fedcor import FedRecall
        >>> FedRecall(rate=1.0, adaptation=0.0).gain
        0.3
    """

    weighted: bool = False
    gain: float = 0.3
    rate: float = 2.0
    smallest_rate: float = 0.5
    largest_rate: float = 4.0
    adaptation: float = 0.2
    longest_absence: float = 10.0
    dtype: StoredAs = "float32"

    needs_updates: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("gain", self.gain)
        check_fraction("gain", self.gain, closed=True)
        for name in ("rate", "smallest_rate", "largest_rate", "longest_absence"):
            check_positive(name, getattr(self, name))
        if not self.smallest_rate <= self.largest_rate:
            allowed = f"must be at most largest_rate = {self.largest_rate:g}"
            raise ConfigError("smallest_rate", self.smallest_rate, allowed)
        if not self.smallest_rate <= self.rate <= self.largest_rate:
            low, high = self.smallest_rate, self.largest_rate
            allowed = f"must be from smallest_rate = {low:g} to largest_rate = {high:g}"
            raise ConfigError("rate", self.rate, allowed)
        check_between("adaptation", self.adaptation, 0.0, 10.0)
        check_one_of("dtype", self.dtype, get_args(StoredAs))

    def init(self, population: Population, model: Array) -> State:
        """Nobody was seen, and no step was made."""
        return {
            **empty_memory(population, model, weighted=True),
            "seen": np.full(population.count, -1),  # (N,) the step it last took part in, or -1
            "steps": np.array(0),  # so far
            "delivered": np.array(0),  # updates so far
            "rate": np.array(self.rate),
            "last_step": np.zeros(len(model), dtype=np.float32),  # (P,) d of the round before
        }

    def join(self, state: State, population: Population) -> State:
        """The memory with clients who joined, of whom nothing is known yet."""
        new = np.full(population.count - len(state["seen"]), -1)
        return {
            **resize(state, population, weighted=True),
            "seen": np.concatenate([state["seen"], new]),
        }

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + eta E (1 + c (r - 1)) d."""
        paces = delivery.learning_rate * delivery.steps.astype(np.float64)  # (m,) eta E_k
        fresh = delivery.updates / paces[:, None]  # (m, P) u_k
        covered = float(state["scales"] @ (state["seen"] >= 0) / state["scales"].sum())
        everyone, news = self._news(state, delivery, fresh, covered)
        gain = max(self.gain, len(delivery.clients) / count_members(state))
        step = everyone + (1.0 - covered * (1.0 - gain)) * news
        rate = self._adapted(state, everyone + news, covered)
        length = float(delivery.weights @ paces) * (1.0 + covered * (rate - 1.0))
        model = delivery.model + length * step
        after = {
            **self._remembered(state, delivery.clients, fresh),
            "rate": np.array(rate),
            "last_step": np.clip(step, -_LARGEST, _LARGEST).astype(np.float32),
        }
        return model.astype(delivery.model.dtype), after

    def _remembered(self, state: State, clients: IntArray, fresh: FloatArray) -> State:
        """The memory with what came, and without those who were away for too long."""
        steps, delivered = int(state["steps"]) + 1, int(state["delivered"]) + len(clients)
        seen = state["seen"].copy()
        seen[clients] = steps - 1
        state = remember(state, clients, fresh, self.dtype)
        longest = self.longest_absence * count_members(state) * steps / delivered
        gone = np.flatnonzero((seen >= 0) & (steps - 1 - seen > longest))
        if len(gone):
            state = forget(state, gone)
            seen[gone] = -1
        return {
            **state,
            "seen": seen,
            "steps": np.array(steps),
            "delivered": np.array(delivered),
        }

    @staticmethod
    def _news(
        state: State, delivery: Delivery, fresh: FloatArray, covered: float
    ) -> tuple[FloatArray, FloatArray]:
        """(P,) y, and (P,) how far the chosen clients' updates differ from their last ones."""
        mean = weighted_mean(delivery.weights, fresh)
        if covered == 0.0:  # nothing is remembered: all that is known is new
            return np.zeros_like(mean), mean
        last, seen = recall(state, delivery.clients)
        everyone: FloatArray = state["total"] / (state["scales"] @ (state["seen"] >= 0))
        remembered = weighted_mean(delivery.weights * seen, last)
        remembered += float(delivery.weights @ ~seen) * everyone
        return everyone, mean - remembered

    def _adapted(self, state: State, expected: FloatArray, covered: float) -> float:
        """The server's rate, after the agreement of what is expected now with the last step."""
        last = state["last_step"].astype(np.float64)
        lengths = float(np.linalg.norm(expected) * np.linalg.norm(last))
        rate = float(state["rate"])
        if lengths == 0.0:
            return rate
        cosine = float(expected @ last) / lengths
        rate *= float(np.exp(self.adaptation * covered * cosine))
        return min(max(rate, self.smallest_rate), self.largest_rate)
