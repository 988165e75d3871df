"""Aligned: choose the group whose updates, added up, point where everyone's mean update points.

The memory u_k, the weights a_k and the mean t of everyone are those of `update_memory.py`.

1. sweep     clients that never trained come first, in random order;
2. oldest    then all clients that have waited too long, and at least the one that was chosen
             longest ago, where a round has more than one seat;
3. greedy    add the client that makes the cosine of sum_K a u and t largest, where K is the group;
4. swap      exchange a member, but not those of step 2, for another client, while that makes the
             cosine larger still.

The length of the sum does not matter. Where a few clients cannot stand for everyone, the group
whose mean is closest to t is one of short updates, which teach little; the best aligned one is not.
A client whose last update was zero points nowhere and would leave the cosine as it is: it gets a
seat for waiting only. A client that did not deliver for ten times N / C rounds may have left, and
no longer counts in t.
How long the step then is, the optimiser says: `FedRecall` is made for this selector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.core.config import check_positive, plain_keywords
from fedcor.core.types import Array, Federation, FloatArray, IntArray, State
from fedcor.selectors.base import longest_ago, ready, uniform, without
from fedcor.selectors.matching_blocks import Criterion
from fedcor.selectors.update_memory import RememberingSelector, moves, seated_known

_LONGEST_ABSENCE = 10.0  # times N / C rounds; FedRecall forgets clients as late


@plain_keywords
@dataclass(frozen=True)
class Aligned(RememberingSelector):
    """The group of clients whose updates together point where the mean update of everyone points.

    It remembers the last update of every client, which clients send anyway: it asks nothing, and
    costs the same bytes as random selection. Where the experiment names no optimiser, `FedRecall`
    aggregates, which uses the same memory for the step. It is not from the FedCor paper: what was
    measured is in docs/results/memory.md.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        sketch: What is remembered of an update: "head", the part of the output layer; "full", all
            of it; or a number s, a random projection (count sketch) to s numbers.
        swaps: Largest number of exchanges after the greedy choice, at least 0.
        longest_wait: After this many times N / C rounds without being chosen, a client is chosen
            before all others that were seen. In a round of random selection, a client waits N / C
            rounds on average.

    Example:
        >>> from fedcor import Aligned
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> selector = Aligned(clients_per_round=3)
        >>> state = selector.init(federation.population)
        >>> for _ in range(4):  # every client trains once
        ...     chosen, state = selector.select(state, federation)
        ...     state = selector.observe(state, federation.train(chosen))
        >>> int((state["seen"] >= 0).sum())
        12
    """

    longest_wait: float = 3.0

    criterion: ClassVar[Criterion] = "direction"
    measures: ClassVar[tuple[str, str]] = ("cosine", "cosine_before")
    optimiser: ClassVar[str] = "fedrecall"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("longest_wait", self.longest_wait)

    def choose_known(
        self, state: State, federation: Federation, known: IntArray, wanted: int
    ) -> IntArray:
        """Those who waited too long, and the clients that align the group best."""
        # Those chosen in the same round have waited equally long: chance decides among them.
        draws = federation.rng.random(len(known))
        seats = self._first_seats(state, federation, known, wanted)
        first = known[longest_ago(state["asked"][known], seats, draws)]
        if not self.target(state, federation.weights).any():
            # Nothing points anywhere: a part of the model that is not trained.
            more = uniform(federation.rng, without(known, first), wanted - len(first))
            return np.concatenate([first, more])
        moving = known[moves(state, known) | np.isin(known, first)]
        known = moving if len(moving) >= wanted else known
        return self.match_known(state, federation, known, first, wanted)

    def ageing_weights(self, state: State) -> FloatArray | float:
        """(N,) 0 for clients that have not delivered for so long that they may have left."""
        limit = _LONGEST_ABSENCE * len(state["seen"]) / self.clients_per_round
        recent = (state["seen"] >= 0) & (int(state["round"]) - state["seen"] <= limit)
        return recent.astype(np.float64) if recent.any() else 1.0

    def measure(self, sums: FloatArray, weights: FloatArray, target: FloatArray) -> FloatArray:
        """(C,) the cosine of the sum of directions and everyone's mean."""
        lengths = np.linalg.norm(sums, axis=1) * np.linalg.norm(target)
        cosine: FloatArray = sums @ target / np.where(lengths > 0, lengths, 1.0)
        return cosine

    def details(
        self, before: State, state: State, federation: Federation, chosen: IntArray
    ) -> dict[str, Array]:
        """How long each chosen client had waited, and who has a seat for that.

        `waited`: (C,) rounds since it was last chosen; NaN for never.
        `overdue`: (C,) 1 where it has its seat for having waited longest, whatever it points to.
        `waited_alike`: (C,) how many of the clients that could be matched had waited as long.
        """
        asked, t = before["asked"][chosen], int(before["round"])
        known = ready(before, federation.available)
        known = known[before["seen"][known] >= 0]
        matched = np.isin(chosen, known)
        first = self._first_seats(before, federation, known, int(matched.sum()))
        overdue = matched & (np.cumsum(matched) <= first)
        alike = np.bincount(before["asked"][known] + 1, minlength=t + 1)[asked + 1]
        waited = np.where(asked < 0, np.nan, t - asked)
        return {"waited": waited, "overdue": overdue, "waited_alike": alike}

    def _first_seats(
        self, state: State, federation: Federation, known: IntArray, wanted: int
    ) -> int:
        """How many of the `wanted` seats go to those who have waited longest."""
        waited = int(state["round"]) - state["asked"][known]
        limit = self.longest_wait * len(state["asked"]) / self.clients_per_round
        overdue = int(np.count_nonzero(waited >= limit))
        # With the only seat for the oldest, directions would never matter: that is round-robin,
        # which misleads FedRecall's rate.
        alone = self.clients_per_round == 1 or len(seated_known(state, federation)) > 0
        least = 0 if alone else 1
        return min(max(overdue, least), wanted)
