"""Complement: the group whose mean update stands for everyone's, built from the updates that clients send anyway.

    u_k     the last update direction of client k: its model change over (learning rate x local steps), sketched    (s,)
    t       what the population wants: sum_i p_i u_i over all whose direction is known                               (s,)

1. sweep     while there are clients that never trained, they come first, in random order (or take a share of each round);
2. start     one client, at random or the one that was seen longest ago;
3. greedy    add the client that brings the group's mean direction closest to t:  min_k |mean(u_K, u_k) - t|^2;
4. swap      (if asked) exchange a member for another client while that brings the mean closer still.

It asks the federation nothing: it costs the bytes of random selection. It reads single updates, which secure aggregation hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcor.errors import ConfigError
from fedcor.rng import stream
from fedcor.selectors.base import check_at_least, check_fraction, lengthened, uniform
from fedcor.types import Array, Federation, FloatArray, IntArray, Outcome, Population, Reasons, State

__all__ = ["Complement"]

_TRIES = 3  # a client that never delivered is chosen for the sweep so often, and later only as anyone is


@dataclass(frozen=True)
class Complement:
    """Mean matching on remembered updates."""

    clients_per_round: int
    sketch: Literal["head", "full"] | int = "head"  # the output layer's part, all, or a random projection to so many
    start: Literal["random", "oldest"] = "random"
    normalised: bool = False  # directions of length one
    ageing: float = 1.0  # a direction that is m rounds old counts ageing^m in the target
    swaps: int = 0  # exchanges after the greedy choice, at most
    sweep: float = 1.0  # share of a round given to those who never trained, while there are any
    explore: float = 0.0  # share of a round given to those who were seen longest ago

    needs_updates: ClassVar[bool] = True  # an engine that hides single updates refuses it

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        if self.sketch not in ("head", "full"):
            if isinstance(self.sketch, str):
                raise ConfigError("sketch", self.sketch, "must be head, full or a whole number")
            check_at_least("sketch", self.sketch, 1)
        if self.start not in ("random", "oldest"):
            raise ConfigError("start", self.start, "must be random or oldest")
        check_fraction("ageing", self.ageing, closed=True)
        check_at_least("swaps", self.swaps, 0)
        check_fraction("sweep", self.sweep, closed=True)
        if not self.sweep:
            raise ConfigError("sweep", self.sweep, "must be above 0: who never trains is never known")
        check_fraction("explore", self.explore, closed=True)

    def init(self, population: Population) -> State:
        return {
            "round": np.array(0),
            "directions": np.empty((population.count, 0)),  # (N, s) u_k; no columns before the first update came
            "seen": np.full(population.count, -1),  # (N,) when each was last received, -1 for never
            "tried": np.zeros(population.count, dtype=np.int64),  # (N,) times chosen without ever having delivered
        }

    def join(self, state: State, population: Population) -> State:
        count, known = population.count, state["directions"]
        return {
            **state,
            "directions": np.concatenate([known, np.zeros((count - len(known), known.shape[1]))]),
            "seen": lengthened(state["seen"], count, -1),
            "tried": lengthened(state["tried"], count, 0),
        }

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        available, rng = federation.available, federation.rng
        count = min(self.clients_per_round, len(available))
        seen, tried = state["seen"], state["tried"].copy()
        new = available[(seen[available] < 0) & (tried[available] < _TRIES)]
        chosen = uniform(rng, new, max(1, int(self.sweep * count + 1e-9)))
        known = available[seen[available] >= 0]
        if len(chosen) < count and len(known):
            chosen = np.concatenate([chosen, self._group(state, federation, known, count, len(chosen))])
        if len(chosen) < count:  # there are too few who ever delivered: try the others again
            chosen = np.concatenate([chosen, uniform(rng, np.setdiff1d(available, chosen), count - len(chosen))])
        tried[chosen[seen[chosen] < 0]] += 1
        return chosen, {**state, "round": np.array(int(state["round"]) + 1), "tried": tried}

    def _group(self, state: State, federation: Federation, known: IntArray, count: int, taken: int) -> IntArray:
        """Up to `count - taken` of the `known`; those who are taken have no direction yet, so the others match without them."""
        wanted = min(count - taken, len(known))
        oldest = known[np.argsort(state["seen"][known], kind="stable")]
        first = oldest[: min(wanted, int(self.explore * count + 1e-9))]
        if not len(first):
            first = oldest[:1] if self.start == "oldest" else uniform(federation.rng, known, 1)
        target = self.target(state, federation.weights)
        places = match(state["directions"][known], target, np.flatnonzero(np.isin(known, first)), wanted, self.swaps)
        return known[places]

    def target(self, state: State, weights: FloatArray) -> FloatArray:
        """(s,) the population's direction, from all that is remembered."""
        age = np.maximum(state["round"] - 1 - state["seen"], 0)
        shares = np.where(state["seen"] >= 0, weights * self.ageing**age, 0.0)
        total = float(shares.sum())
        target: FloatArray = shares @ state["directions"] / (total if total > 0 else 1.0)
        return target

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """How far the group's mean is from the population's after each pick, as a share of the latter's length; and ages."""
        seen = state["seen"][chosen]
        if (seen < 0).any() or not len(chosen):
            return {}
        target = self.target(state, federation.weights)
        means = np.cumsum(state["directions"][chosen], axis=0) / np.arange(1, len(chosen) + 1)[:, None]
        length = float(np.linalg.norm(target)) or 1.0
        return {"distance": np.linalg.norm(means - target, axis=1) / length, "age": state["round"] - 1 - seen}

    def observe(self, state: State, outcome: Outcome) -> State:
        if not len(outcome.participated):
            return state
        sketched = self._sketched(outcome)
        usable = np.isfinite(sketched).all(axis=1)
        directions, seen, tried = state["directions"], state["seen"].copy(), state["tried"].copy()
        if directions.shape[1] != sketched.shape[1]:
            directions = np.zeros((len(directions), sketched.shape[1]))
        directions = directions.copy()
        clients = outcome.participated[usable]
        directions[clients] = sketched[usable]
        seen[clients], tried[clients] = int(state["round"]) - 1, 0
        return {**state, "directions": directions, "seen": seen, "tried": tried}

    def _sketched(self, outcome: Outcome) -> FloatArray:  # (m, s)
        updates = outcome.updates[:, outcome.head] if self.sketch == "head" else outcome.updates
        updates = updates.astype(np.float64) / outcome.pace[:, None]
        if not isinstance(self.sketch, str):
            updates = project(updates, self.sketch)
        if self.normalised:
            lengths = np.linalg.norm(updates, axis=1, keepdims=True)
            updates = updates / np.where(lengths > 0, lengths, 1.0)
        return updates


def match(directions: FloatArray, target: FloatArray, first: IntArray, count: int, swaps: int = 0) -> IntArray:
    """Rows of `directions` (n, s), `first` among them, whose mean comes close to `target`: greedily, then by exchanges."""
    U, n = directions, len(directions)
    lengths = np.einsum("ns,ns->n", U, U)
    chosen = list(first[:count])
    left = np.ones(n, dtype=bool)
    left[chosen] = False
    total = U[chosen].sum(axis=0)
    while len(chosen) < count:
        # |(total + u)/m - t|^2 without what is the same for all u
        m = len(chosen) + 1
        score = (lengths + 2 * U @ total) / m**2 - 2 * (U @ target) / m
        k = int(np.argmin(np.where(left, score, np.inf)))
        chosen.append(k)
        left[k] = False
        total = total + U[k]
    for _ in range(swaps):
        gap = float(np.sum((total / count - target) ** 2))
        best, exchange = gap * (1 - 1e-12), None
        for place, out in enumerate(chosen):
            rest = total - U[out]
            score = (lengths + 2 * U @ rest) / count**2 - 2 * (U @ target) / count
            k = int(np.argmin(np.where(left, score, np.inf)))
            reached = float(np.sum(((rest + U[k]) / count - target) ** 2)) if left.any() else np.inf
            if reached < best:
                best, exchange = reached, (place, k)
        if exchange is None:
            break
        place, k = exchange
        total = total - U[chosen[place]] + U[k]
        left[chosen[place]], left[k] = True, False
        chosen[place] = k
    return np.array(chosen, dtype=np.int64)


def project(updates: Array, size: int) -> FloatArray:
    """(m, size): each number goes with a random sign into a random place, the same ones in every round and every run.

    Inner products stay the same on average (a count sketch), and nothing of the size of P x s is ever held.
    """
    rng = stream(0, "sketch", updates.shape[1], size)
    places = rng.integers(size, size=updates.shape[1])
    signs = rng.choice(np.array([-1.0, 1.0]), size=updates.shape[1])
    return np.array([np.bincount(places, weights=signs * row, minlength=size) for row in updates]).reshape(-1, size)
