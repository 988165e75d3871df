"""Power-of-choice (Cho, Wang & Joshi, 2020): of d candidates, the C with the largest loss.

1. draw d >= C candidates without replacement, client k with probability p_k;
2. send them the current model, and they answer with l_k(w^t);
3. the C candidates with the largest losses train.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.core.config import check_at_least, plain_keywords
from fedcor.core.errors import ConfigError
from fedcor.core.types import Array, Federation, IntArray, Questions, Reasons, State
from fedcor.selectors.base import StatelessSelector


@plain_keywords
@dataclass(frozen=True)
class PowerOfChoice(StatelessSelector):
    """Power-of-choice (Cho et al., 2020), the paper's `Pow-d`: the largest losses of d candidates.

    In every round the candidates receive the model and answer with their loss, which is billed.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        candidates: d, the number of clients asked in a round, at least C. None means 2C, the FedCor
            paper's choice.

    Example:
        >>> from fedcor import PowerOfChoice
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> chosen, state = PowerOfChoice(clients_per_round=3, candidates=6).select({}, federation)
        >>> [len(asked) for asked in federation.asked]
        [6]
    """

    clients_per_round: int
    candidates: int | None = None

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        if self.candidates is not None:
            check_at_least("candidates", self.candidates, 1)
            if self.candidates < self.clients_per_round:
                allowed = f"must be at least clients_per_round = {self.clients_per_round}"
                raise ConfigError("candidates", self.candidates, allowed)

    def questions(self, round: int, clients: int) -> Questions:
        """The losses of d candidates."""
        return Questions(losses=self._asked(clients))

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) candidates, the largest loss first; the state says who the candidates were."""
        available = federation.available
        if not len(available):
            return available, {"candidates": available.copy()}
        d = self._asked(len(available))
        p = federation.weights[available]
        candidates = federation.rng.choice(available, size=d, replace=False, p=p / p.sum())
        losses = federation.losses(candidates)
        # A candidate that did not answer comes last: it is chosen only when too few answered.
        order = np.argsort(-np.where(np.isnan(losses), -np.inf, losses), kind="stable")
        return candidates[order[: self.clients_per_round]], {"candidates": candidates[order]}

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """The loss of each chosen client, which was asked in `select` and so is free here."""
        return {"loss": federation.losses(chosen)}

    def details(
        self, before: State, state: State, federation: Federation, chosen: IntArray
    ) -> dict[str, Array]:
        """`candidates`: who was drawn and asked, the largest loss first."""
        return {"candidates": state["candidates"]}

    def _asked(self, available: int) -> int:
        """d, or all who are available if they are fewer."""
        return min(self.candidates or 2 * self.clients_per_round, available)
