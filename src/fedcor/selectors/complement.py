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

The matching of steps 3 and 4 is in `matching.py`, the random projection in `sketch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcor.checks import check_at_least, check_fraction, check_one_of, check_positive
from fedcor.config import plain_keywords
from fedcor.guard import LARGEST_LOSS
from fedcor.selectors.base import extend_clients, fraction_of, uniform
from fedcor.selectors.matching import match
from fedcor.selectors.sketch import count_sketch
from fedcor.types import (
    BoolArray,
    Federation,
    FloatArray,
    IntArray,
    Outcome,
    Population,
    Reasons,
    State,
)

__all__ = ["Complement"]

# A client that failed again and again is left out for 2^10 rounds, and no longer.
_LONGEST_BACKOFF = 10


@plain_keywords
@dataclass(frozen=True)
class Complement:
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

    clients_per_round: int
    sketch: Literal["head", "full"] | int = "head"
    start: Literal["random", "oldest"] = "random"
    normalised: bool = False
    ageing: float = 1.0
    swaps: int = 20
    sweep: float = 1.0
    explore: float = 0.0

    # An engine that hides the updates of single clients refuses this selector.
    needs_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        if isinstance(self.sketch, str):
            check_one_of("sketch", self.sketch, ("head", "full"))
        else:
            check_at_least("sketch", self.sketch, 1)
        check_one_of("start", self.start, ("random", "oldest"))
        check_fraction("ageing", self.ageing, closed=True)
        check_at_least("swaps", self.swaps, 0)
        check_positive("sweep", self.sweep)
        check_fraction("sweep", self.sweep, closed=True)
        check_fraction("explore", self.explore, closed=True)

    def init(self, population: Population) -> State:
        """The state in which no direction is known."""
        count = population.count
        return {
            "round": np.array(0),
            "directions": np.empty((count, 0)),  # (N, s) u_k; no columns before the first update
            "shares": np.ones(count),  # (N,) a_k
            "seen": np.full(count, -1),  # (N,) round of the last usable update, -1 for never
            "asked": np.full(count, -1),  # (N,) round in which it was last chosen
            "failed": np.zeros(count, dtype=np.int64),  # (N,) times chosen since it last delivered
        }

    def join(self, state: State, population: Population) -> State:
        """The state with new clients, which the next sweep brings in."""
        count, known = population.count, state["directions"]
        return {
            **state,
            "directions": np.concatenate([known, np.zeros((count - len(known), known.shape[1]))]),
            "shares": extend_clients(state["shares"], count, 1.0),
            "seen": extend_clients(state["seen"], count, -1),
            "asked": extend_clients(state["asked"], count, -1),
            "failed": extend_clients(state["failed"], count, 0),
        }

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients: those that never trained, then a matching group; and the new state."""
        available, rng, t = federation.available, federation.rng, int(state["round"])
        count = min(self.clients_per_round, len(available))
        ready = available[~self.resting(state)[available]]
        seen = state["seen"][ready] >= 0
        new, known = ready[~seen], ready[seen]
        chosen = uniform(rng, new, max(1, fraction_of(self.sweep, count)))
        if len(chosen) < count and len(known):
            group = self._group(state, federation, known, count - len(chosen))
            chosen = np.concatenate([chosen, group])
        for others in (new, available):  # where too few are known, or ready
            if len(chosen) < count:
                more = uniform(rng, np.setdiff1d(others, chosen), count - len(chosen))
                chosen = np.concatenate([chosen, more])
        asked, failed = state["asked"].copy(), state["failed"].copy()
        asked[chosen] = t
        failed[chosen] += 1  # until it delivers
        return chosen, {**state, "round": np.array(t + 1), "asked": asked, "failed": failed}

    @staticmethod
    def resting(state: State) -> BoolArray:
        """(N,) clients that failed to deliver and are left out for now: 2^failures rounds."""
        backoff = 2 ** np.minimum(state["failed"], _LONGEST_BACKOFF)
        resting: BoolArray = (state["failed"] > 0) & (state["round"] - state["asked"] < backoff)
        return resting

    def _group(
        self, state: State, federation: Federation, known: IntArray, wanted: int
    ) -> IntArray:
        """Up to `wanted` of the `known` clients; new clients in the same round are not matched."""
        wanted = min(wanted, len(known))
        oldest = known[np.argsort(state["asked"][known], kind="stable")]
        if self.explore > 0:
            explored = max(1, fraction_of(self.explore, self.clients_per_round))
            first = oldest[: min(wanted, explored)]
        else:
            first = oldest[:1] if self.start == "oldest" else uniform(federation.rng, known, 1)
        rows = match(
            state["directions"][known],
            self.target(state, federation.weights),
            np.flatnonzero(np.isin(known, first)),
            wanted,
            self.swaps,
            state["shares"][known],
        )
        return known[rows]

    def target(self, state: State, weights: FloatArray) -> FloatArray:
        """(s,) t, the mean direction of all clients whose direction is known.

        Args:
            state: The state before or after `select`.
            weights: (N,) p_k.
        """
        age = np.maximum(state["round"] - 1 - state["seen"], 0)
        weights = np.where(state["seen"] >= 0, weights * self.ageing**age, 0.0)
        total = float(weights.sum())
        target: FloatArray = weights @ state["directions"] / (total if total > 0 else 1.0)
        return target

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """How close the group comes to the target, and how old its directions are.

        `distance` is that of the mean of the first, of the first two, ... clients from the target,
        relative to the target's length; `age` is in rounds. Clients without a known direction are
        not in the mean, as they are not in the matching, and have NaN.
        """
        known = state["seen"][chosen] >= 0
        if not known.any():
            return {}
        target = self.target(state, federation.weights)
        members = chosen[known]
        weights = state["shares"][members, None]
        sums = np.cumsum(weights * state["directions"][members], axis=0)
        means = sums / np.cumsum(weights, axis=0)
        length = float(np.linalg.norm(target)) or 1.0
        distance, age = np.full(len(chosen), np.nan), np.full(len(chosen), np.nan)
        distance[known] = np.linalg.norm(means - target, axis=1) / length
        age[known] = state["round"] - 1 - state["seen"][members]
        return {"distance": distance, "age": age}

    def observe(self, state: State, outcome: Outcome) -> State:
        """The state with the directions of those who delivered; unusable updates are ignored."""
        if not len(outcome.participated):
            return state
        directions, weights = self._directions(outcome), outcome.aggregation_weights
        usable = (np.abs(directions) <= LARGEST_LOSS).all(axis=1)
        usable &= np.isfinite(weights) & (weights > 0)
        if not usable.any():
            return state
        state = {key: value.copy() for key, value in state.items()}
        if state["directions"].shape[1] != directions.shape[1]:
            # The first update, or the model has changed its size: nothing else is known.
            state["directions"] = np.zeros((len(state["seen"]), directions.shape[1]))
            state["seen"][:] = -1
        clients = outcome.participated[usable]
        state["directions"][clients] = directions[usable]
        state["shares"][clients] = weights[usable]
        state["seen"][clients] = int(state["round"]) - 1
        state["failed"][clients] = 0
        return state

    def _directions(self, outcome: Outcome) -> FloatArray:
        """(m, s) u_k of those who delivered."""
        updates = outcome.updates[:, outcome.head] if self.sketch == "head" else outcome.updates
        directions = updates.astype(np.float64) / outcome.step_sizes[:, None]
        if not isinstance(self.sketch, str):
            directions = count_sketch(directions, self.sketch)
        if self.normalised:
            lengths = np.linalg.norm(directions, axis=1, keepdims=True)
            directions = directions / np.where(lengths > 0, lengths, 1.0)
        return directions
