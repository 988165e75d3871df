"""Complement: choose the group whose mean update is closest to the mean update of all clients.

    u_k     the last update direction of client k: its model change divided by
            (learning rate x local steps), sketched                                     (s,)
    a_k     the weight of client k in the aggregated mean                               (N,)
    t       the target: sum_i p_i u_i over all clients whose direction is known         (s,)

1. sweep     clients that never trained come first, in random order (or take a part of each round);
2. start     one known client, at random or the one that was chosen longest ago;
3. greedy    add the client that brings the group's mean direction closest to t:
             min_k |sum_K a u / sum_K a - t|^2, where K is the group with k;
4. swap      exchange a member, but not the one of step 2, for another client, while that brings
             the mean closer still.

The directions come from updates that clients send anyway, so it costs the same bytes as random
selection. It reads the updates of single clients, which secure aggregation hides. A client that was
chosen and did not deliver is left out for some rounds: twice as long each time, but never forever.

The matching of steps 3 and 4 is in `matching.py`, the random projection in `update_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcor.core.config import check_fraction, check_one_of, check_positive, plain_keywords
from fedcor.core.types import Federation, FloatArray, IntArray, Outcome, State
from fedcor.selectors.base import fraction_of, longest_ago, uniform
from fedcor.selectors.matching_blocks import Criterion
from fedcor.selectors.update_memory import RememberingSelector, seated_known


@plain_keywords
@dataclass(frozen=True)
class Complement(RememberingSelector):
    """The group of clients whose mean update is closest to the mean update of all clients.

    It remembers the last update of every client, which clients send anyway: it asks nothing, and
    costs the same bytes as random selection. It is not from the FedCor paper: the comparison and
    the ablations behind the defaults are in docs/results/beyond.md.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        sketch: What is remembered of an update: "head", the part of the output layer; "full", all
            of it; or a number s, a random projection (count sketch) to s numbers. "head" was as
            good as "full" in the ablations, and far smaller.
        swaps: Largest number of exchanges after the greedy choice, at least 0.
        start: The first known client of a group: "random", or "oldest", the one that was chosen
            longest ago.
        normalised: Whether directions are scaled to length one.
        ageing: Weight of a remembered direction in the target, to the power of its age in rounds.
            In [0, 1]; 1, which was best in the ablations, never forgets.
        sweep: Fraction of a round for clients that never trained, while there are any; at least one
            client. In (0, 1]: without it, no direction would ever be known.
        explore: Fraction of a round for the known clients that were chosen longest ago, in the
            place of `start`. In [0, 1].

    Example:
        >>> from fedcor import Complement
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> selector = Complement(clients_per_round=3)
        >>> state = selector.init(federation.population)
        >>> for _ in range(4):  # the sweep: every client trains once
        ...     chosen, state = selector.select(state, federation)
        ...     state = selector.observe(state, federation.train(chosen))
        >>> int((state["seen"] >= 0).sum())
        12
    """

    start: Literal["random", "oldest"] = "random"
    normalised: bool = False
    ageing: float = 1.0
    sweep: float = 1.0
    explore: float = 0.0

    criterion: ClassVar[Criterion] = "distance"
    measures: ClassVar[tuple[str, str]] = ("distance", "before")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("start", self.start, ("random", "oldest"))
        check_fraction("ageing", self.ageing, closed=True)
        check_positive("sweep", self.sweep)
        check_fraction("sweep", self.sweep, closed=True)
        check_fraction("explore", self.explore, closed=True)

    def choose_known(
        self, state: State, federation: Federation, known: IntArray, wanted: int
    ) -> IntArray:
        """A matching group; new clients in the same round are not matched."""
        asked = state["asked"][known]
        if self.explore > 0:
            explored = max(1, fraction_of(self.explore, self.clients_per_round))
            first = known[longest_ago(asked, min(wanted, explored))]
        elif len(seated_known(state, federation)):
            first = known[:0]  # the group has its start
        elif self.start == "oldest":
            first = known[longest_ago(asked, 1)]
        else:
            first = uniform(federation.rng, known, 1)
        return self.match_known(state, federation, known, first, wanted)

    def measure(self, sums: FloatArray, weights: FloatArray, target: FloatArray) -> FloatArray:
        """(C,) the distance of the mean from the target, relative to the target's length."""
        length = float(np.linalg.norm(target)) or 1.0
        distance: FloatArray = np.linalg.norm(sums / weights - target, axis=1) / length
        return distance

    def new_per_round(self, count: int) -> int:
        """The sweep's share of a round; at least one client."""
        return max(1, fraction_of(self.sweep, count))

    def ageing_weights(self, state: State) -> FloatArray:
        """(N,) `ageing` to the power of each direction's age in rounds."""
        age = np.maximum(state["round"] - 1 - state["seen"], 0)
        weights: FloatArray = self.ageing**age
        return weights

    def read_directions(self, outcome: Outcome) -> FloatArray:
        """(m, s) u_k of those who delivered, perhaps scaled to length one."""
        directions = super().read_directions(outcome)
        if self.normalised:
            lengths = np.linalg.norm(directions, axis=1, keepdims=True)
            directions = directions / np.where(lengths > 0, lengths, 1.0)
        return directions
