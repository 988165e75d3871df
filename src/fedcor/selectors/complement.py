"""Complement: the group whose mean update stands for everyone's, built from the updates that clients send anyway.

    u_k     the last update direction of client k: its model change over (learning rate x local steps), sketched    (s,)
    a_k     what client k counts in the mean of those who train: the same for all, or its data                       (N,)
    t       what the population wants: sum_i p_i u_i over all whose direction is known                               (s,)

1. sweep     while there are clients that never trained, they come first, in random order (or take a share of each round);
2. start     one client, at random or the one that was chosen longest ago;
3. greedy    add the client that brings the group's mean direction closest to t:  min_k |sum_K a u / sum_K a - t|^2, K with k;
4. swap      exchange a member, but not the one of 2, for another client while that brings the mean closer still.

It asks the federation nothing: it costs the bytes of random selection. It reads single updates, which secure aggregation hides.
A client that was chosen and did not deliver rests, twice as long each time, and is never given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedcor.checks import check_at_least, check_fraction
from fedcor.errors import ConfigError
from fedcor.guard import LARGEST_LOSS
from fedcor.rng import stream
from fedcor.selectors.base import lengthened, uniform
from fedcor.types import (
    Array,
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

_LONGEST_REST = 10  # a client rests for at most 2^10 rounds
_NOTHING = 1e-12  # a swap that gains less than this share is rounding


@dataclass(frozen=True)
class Complement:
    """Mean matching on remembered updates."""

    clients_per_round: int
    sketch: Literal["head", "full"] | int = (
        "head"  # the output layer's part, all, or a random projection to so many
    )
    start: Literal["random", "oldest"] = "random"
    normalised: bool = False  # directions of length one
    ageing: float = 1.0  # a direction that is m rounds old counts ageing^m in the target
    swaps: int = 20  # exchanges after the greedy choice, at most
    sweep: float = 1.0  # share of a round given to those who never trained, while there are any
    explore: float = 0.0  # share of a round given to those who were chosen longest ago

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
        if not 0.0 < self.sweep <= 1.0:
            raise ConfigError(
                "sweep", self.sweep, "must lie in (0, 1]: who never trains is never known"
            )
        check_fraction("explore", self.explore, closed=True)

    def init(self, population: Population) -> State:
        count = population.count
        return {
            "round": np.array(0),
            "directions": np.empty(
                (count, 0)
            ),  # (N, s) u_k; no columns before the first update came
            "shares": np.ones(count),  # (N,) a_k
            "seen": np.full(count, -1),  # (N,) when each was last received, -1 for never
            "asked": np.full(count, -1),  # (N,) when each was last chosen
            "failed": np.zeros(count, dtype=np.int64),  # (N,) times chosen since it last delivered
        }

    def join(self, state: State, population: Population) -> State:
        count, known = population.count, state["directions"]
        return {
            **state,
            "directions": np.concatenate([known, np.zeros((count - len(known), known.shape[1]))]),
            "shares": lengthened(state["shares"], count, 1.0),
            "seen": lengthened(state["seen"], count, -1),
            "asked": lengthened(state["asked"], count, -1),
            "failed": lengthened(state["failed"], count, 0),
        }

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        available, rng, t = federation.available, federation.rng, int(state["round"])
        count = min(self.clients_per_round, len(available))
        ready = available[~self.resting(state)[available]]
        seen = state["seen"][ready] >= 0
        new, known = ready[~seen], ready[seen]
        chosen = uniform(rng, new, max(1, int(self.sweep * count + 1e-9)))
        if len(chosen) < count and len(known):
            chosen = np.concatenate(
                [chosen, self._group(state, federation, known, count - len(chosen))]
            )
        for others in (new, available):  # too few are known, or ready
            if len(chosen) < count:
                chosen = np.concatenate(
                    [chosen, uniform(rng, np.setdiff1d(others, chosen), count - len(chosen))]
                )
        asked, failed = state["asked"].copy(), state["failed"].copy()
        asked[chosen] = t
        failed[chosen] += 1  # until it delivers
        return chosen, {**state, "round": np.array(t + 1), "asked": asked, "failed": failed}

    @staticmethod
    def resting(state: State) -> BoolArray:
        """(N,) who was chosen, did not deliver, and is left in peace for a while."""
        rest = 2 ** np.minimum(state["failed"], _LONGEST_REST)
        resting: BoolArray = (state["failed"] > 0) & (state["round"] - state["asked"] < rest)
        return resting

    def _group(
        self, state: State, federation: Federation, known: IntArray, wanted: int
    ) -> IntArray:
        """Up to `wanted` of the `known`; who joins them without a known direction is left out of the matching."""
        wanted = min(wanted, len(known))
        oldest = known[np.argsort(state["asked"][known], kind="stable")]
        if self.explore > 0:
            first = oldest[: min(wanted, max(1, int(self.explore * self.clients_per_round + 1e-9)))]
        else:
            first = oldest[:1] if self.start == "oldest" else uniform(federation.rng, known, 1)
        target = self.target(state, federation.weights)
        places = np.flatnonzero(np.isin(known, first))
        return known[
            match(
                state["directions"][known],
                target,
                places,
                wanted,
                self.swaps,
                state["shares"][known],
            )
        ]

    def target(self, state: State, weights: FloatArray) -> FloatArray:
        """(s,) the population's direction, from all that is remembered."""
        age = np.maximum(state["round"] - 1 - state["seen"], 0)
        shares = np.where(state["seen"] >= 0, weights * self.ageing**age, 0.0)
        total = float(shares.sum())
        target: FloatArray = shares @ state["directions"] / (total if total > 0 else 1.0)
        return target

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """How far the mean of the first, of the first two, ... is from the population's, as a share of its length; and ages.

        Those without a known direction are left out of the mean, as they are in the choice, and have no reasons.
        """
        known = state["seen"][chosen] >= 0
        if not known.any():
            return {}
        target = self.target(state, federation.weights)
        members = chosen[known]
        shares = state["shares"][members, None]
        means = np.cumsum(shares * state["directions"][members], axis=0) / np.cumsum(shares, axis=0)
        distance, age = np.full(len(chosen), np.nan), np.full(len(chosen), np.nan)
        distance[known] = np.linalg.norm(means - target, axis=1) / (
            float(np.linalg.norm(target)) or 1.0
        )
        age[known] = state["round"] - 1 - state["seen"][members]
        return {"distance": distance, "age": age}

    def observe(self, state: State, outcome: Outcome) -> State:
        if not len(outcome.participated):
            return state
        sketched, shares = self._sketched(outcome), outcome.aggregation_weights
        usable = (np.abs(sketched) <= LARGEST_LOSS).all(axis=1) & np.isfinite(shares) & (shares > 0)
        if not usable.any():
            return state
        state = {key: value.copy() for key, value in state.items()}
        if (
            state["directions"].shape[1] != sketched.shape[1]
        ):  # the first update, or a model of another size
            state["directions"] = np.zeros((len(state["seen"]), sketched.shape[1]))
            state["seen"][:] = -1
        clients = outcome.participated[usable]
        state["directions"][clients] = sketched[usable]
        state["shares"][clients] = shares[usable]
        state["seen"][clients] = int(state["round"]) - 1
        state["failed"][clients] = 0
        return state

    def _sketched(self, outcome: Outcome) -> FloatArray:  # (m, s)
        updates = outcome.updates[:, outcome.head] if self.sketch == "head" else outcome.updates
        updates = updates.astype(np.float64) / outcome.step_sizes[:, None]
        if not isinstance(self.sketch, str):
            updates = project(updates, self.sketch)
        if self.normalised:
            lengths = np.linalg.norm(updates, axis=1, keepdims=True)
            updates = updates / np.where(lengths > 0, lengths, 1.0)
        return updates


def match(
    directions: FloatArray,
    target: FloatArray,
    first: IntArray,
    count: int,
    swaps: int = 0,
    shares: FloatArray | None = None,
) -> IntArray:
    """Rows of `directions` (n, s), `first` before others, whose mean comes close to `target`: greedily, then by exchanges.

    Exchanges leave `first` where they are: they are there to be seen again. The mean is weighted by `shares` (n,), or plain.
    A pick or an exchange costs one product of the rows with who comes in.
    """
    count = min(count, len(directions))
    a = np.ones(len(directions)) if shares is None else shares
    U = (
        directions if shares is None else a[:, None] * directions
    )  # (n, s) a_i u_i, the summands of a group's S
    lengths, aims = np.einsum("ns,ns->n", U, U), U @ target  # (n,) |a_i u_i|^2, (a_i u_i)'t
    chosen = list(first[:count])
    products = np.empty((len(U), count))  # (n, C) of each row with each member
    products[:, : len(chosen)] = U @ U[chosen].T
    left = np.ones(len(U), dtype=bool)
    left[chosen] = False

    def group() -> tuple[FloatArray, float, float, float]:
        """Each row's product with S; then |S|^2, S't and the group's weight."""
        with_sum: FloatArray = products[:, : len(chosen)].sum(axis=1)
        return with_sum, with_sum[chosen].sum(), aims[chosen].sum(), a[chosen].sum()

    while len(chosen) < count:
        with_sum, squared, aim, weight = group()
        gap = _gap(squared + 2 * with_sum + lengths, aim + aims, weight + a)
        k = int(np.argmin(np.where(left, gap, np.inf)))
        products[:, len(chosen)] = U @ U[k]
        chosen.append(k)
        left[k] = False
    kept = min(len(first), count)
    for _ in range(swaps if left.any() and kept < count else 0):
        with_sum, squared, aim, weight = group()
        out = chosen[kept:]
        # |S|^2 without each of them (C,), then with each row in its place (n, C)
        rest = squared - 2 * with_sum[out] + lengths[out]
        added = rest + 2 * (with_sum[:, None] - products[:, kept:]) + lengths[:, None]
        gap = _gap(added, aim - aims[out] + aims[:, None], weight - a[out] + a[:, None])
        gap[~left] = np.inf
        k, place = divmod(int(np.argmin(gap)), len(out))
        if not gap[k, place] < _gap(squared, aim, weight) - _NOTHING * float(
            target @ target + squared / weight**2
        ):
            break
        left[out[place]], left[k] = True, False
        chosen[kept + place] = k
        products[:, kept + place] = U @ U[k]
    return np.array(chosen, dtype=np.int64)


def _gap(squared: Any, aim: Any, weight: Any) -> Any:
    """|S/W - t|^2 - |t|^2 from |S|^2, S't and W."""
    return squared / weight**2 - 2 * aim / weight


def project(updates: Array, size: int) -> FloatArray:
    """(m, size): each number goes with a random sign into a random place, the same ones in every round and every run.

    Inner products stay the same on average (a count sketch), and nothing of the size of P x s is ever held.
    """
    rng = stream(0, "sketch", updates.shape[1], size)
    places = rng.integers(size, size=updates.shape[1])
    signs = rng.choice(np.array([-1.0, 1.0]), size=updates.shape[1])
    return np.array(
        [np.bincount(places, weights=signs * row, minlength=size) for row in updates]
    ).reshape(-1, size)
