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
from typing import Literal

import numpy as np

from fedcor.core.config import (
    check_at_least,
    check_fraction,
    check_one_of,
    check_positive,
    plain_keywords,
)
from fedcor.core.types import Federation, FloatArray, IntArray, Outcome, Reasons, State
from fedcor.selectors.base import fraction_of, longest_ago, spread, uniform
from fedcor.selectors.update_memory import RememberingSelector, seated_known, table_rows


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
        start: The first known client of a group: "random", or "oldest", the one that was chosen
            longest ago.
        normalised: Whether directions are scaled to length one.
        ageing: Weight of a remembered direction in the target, to the power of its age in rounds.
            In [0, 1]; 1, which was best in the ablations, never forgets.
        swaps: Largest number of exchanges after the greedy choice, at least 0.
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
    swaps: int = 20
    sweep: float = 1.0
    explore: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("start", self.start, ("random", "oldest"))
        check_fraction("ageing", self.ageing, closed=True)
        check_at_least("swaps", self.swaps, 0)
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
        return self.match_known(
            state, federation, known, first, wanted=wanted, swaps=self.swaps, criterion="distance"
        )

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """How close the group comes to the target, and how old its directions are.

        `distance` is that of the mean of the first, of the first two, ... clients from the target,
        relative to the target's length, and `before` that of the mean before this client; `age` is
        in rounds. `runner_up` is the client that would replace it best in the whole group, and
        `margin` how much further the group would then be. Clients without a known direction are
        not in the mean, as they are not in the matching, and have NaN.
        """
        known = state["seen"][chosen] >= 0
        if not known.any():
            return {}
        target = self.target(state, federation.weights)
        members = chosen[known]
        weights = state["shares"][members, None]
        sums = np.cumsum(weights * table_rows(state, "directions", members), axis=0)
        means = sums / np.cumsum(weights, axis=0)
        length = float(np.linalg.norm(target)) or 1.0
        distance = np.linalg.norm(means - target, axis=1) / length
        rivals, with_rival = self.rivals(state, federation, members, "distance")
        columns = {
            "distance": distance,
            "before": np.concatenate([[np.nan], distance[:-1]]),
            "age": state["round"] - 1 - state["seen"][members],
            "runner_up": np.where(rivals < 0, np.nan, rivals),
            "margin": with_rival - distance[-1],
        }
        return spread(columns, known)

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
