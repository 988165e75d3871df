"""Power-of-choice (Cho, Wang & Joshi, 2020): of d candidates, the C with the largest loss.

1. draw d >= C candidates without replacement, client k with probability p_k;
2. send them the current model, they answer with l_k(w^t);
3. the C candidates with the largest losses train.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.checks import check_at_least
from fedcor.errors import ConfigError
from fedcor.selectors.base import Memoryless
from fedcor.types import Federation, IntArray, Reasons, State

__all__ = ["PowerOfChoice"]


@dataclass(frozen=True)
class PowerOfChoice(Memoryless):
    clients_per_round: int
    candidates: int | None = None  # d; the paper's 2C when not given

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        if self.candidates is not None:
            check_at_least("candidates", self.candidates, 1)
            if self.candidates < self.clients_per_round:
                raise ConfigError(
                    "candidates",
                    self.candidates,
                    f"must be at least clients_per_round = {self.clients_per_round}",
                )

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        if not len(federation.available):
            return federation.available, state
        d = min(self.candidates or 2 * self.clients_per_round, len(federation.available))
        p = federation.weights[federation.available]
        candidates = federation.rng.choice(
            federation.available, size=d, replace=False, p=p / p.sum()
        )
        losses = federation.losses(candidates)
        # A candidate that did not answer comes last: it is chosen only when too few answered.
        order = np.argsort(-np.where(np.isnan(losses), -np.inf, losses), kind="stable")
        return candidates[order[: self.clients_per_round]], state

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:  # noqa: ARG002
        return {"loss": federation.losses(chosen)}  # known by now, and so free
