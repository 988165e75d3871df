"""Active federated learning (Goetz et al., 2019): train those whose last reported loss was large.

    valuation  v_k = sqrt(n_k) l_k, refreshed only when client k trains
    1. drop the alpha1 * N clients with the smallest valuations;
    2. draw (1 - alpha3) * C of the rest with probability softmax(alpha2 * v), without replacement;
    3. draw the remaining alpha3 * C uniformly from all who are left.

A client that never trained is valued with the mean loss that the first participants reported. They measured it on the
initial model, which knows nothing of any client, so it stands for everyone's loss there and costs no question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.checks import check_at_least, check_fraction, check_positive
from fedcor.selectors.base import lengthened, uniform
from fedcor.types import Federation, FloatArray, IntArray, Outcome, Population, Reasons, State

__all__ = ["AFL"]


@dataclass(frozen=True)
class AFL:
    clients_per_round: int
    alpha1: float = 0.75  # share of clients dropped
    alpha2: float = 0.01  # softmax temperature
    alpha3: float = 0.1  # share of the round chosen uniformly

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        check_fraction("alpha1", self.alpha1, closed=True)
        check_positive("alpha2", self.alpha2, zero=True)
        check_fraction("alpha3", self.alpha3, closed=True)

    def init(self, population: Population) -> State:
        return {
            "root_sizes": np.sqrt(population.sizes),  # (N,) sqrt(n_k)
            "losses": np.full(population.count, np.nan),  # (N,) last reported, NaN before
            "initial_loss": np.array(np.nan),
        }

    def join(self, state: State, population: Population) -> State:
        losses = lengthened(state["losses"], population.count, np.nan)
        return {**state, "root_sizes": np.sqrt(population.sizes), "losses": losses}

    def valuations(self, state: State) -> FloatArray:
        """(N,) v_k; all equal losses before anyone reported."""
        unseen = float(np.nan_to_num(state["initial_loss"], nan=1.0))
        valuations: FloatArray = state["root_sizes"] * np.where(
            np.isnan(state["losses"]), unseen, state["losses"]
        )
        return valuations

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        rng = federation.rng
        available = rng.permutation(
            federation.available
        )  # shuffled, and sorted stably: ties fall at random
        count = min(self.clients_per_round, len(available))
        v = self.valuations(state)[available]
        kept = np.argsort(v, kind="stable")[_whole(self.alpha1 * len(available)) :]  # 1.
        # The largest of logits + Gumbel noise are a draw by softmax without replacement that cannot underflow.
        keys = self.alpha2 * v[kept] + rng.gumbel(size=len(kept))
        chosen = available[kept[np.argsort(-keys)[: _whole((1 - self.alpha3) * count)]]]  # 2.
        rest = np.setdiff1d(available, chosen)
        return np.concatenate([chosen, uniform(rng, rest, count - len(chosen))]), state  # 3.

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:  # noqa: ARG002
        return {"valuation": self.valuations(state)[chosen]}

    def observe(self, state: State, outcome: Outcome) -> State:
        reported = np.isfinite(outcome.losses)
        if not reported.any():
            return state
        losses = state["losses"].copy()
        losses[outcome.participated[reported]] = outcome.losses[reported]
        first = np.isnan(state["initial_loss"])
        initial = np.array(outcome.losses[reported].mean()) if first else state["initial_loss"]
        return {**state, "losses": losses, "initial_loss": initial}


def _whole(share: float) -> int:
    """Rounded down, but not by the last bit of a float: (1 - 0.8) * 10 is 2."""
    return int(share + 1e-9)
