"""The base of selectors that remember the last update of every client.

Notation
    u_k     the last update direction of client k: its model change divided by
            (learning rate x local steps), or a part or a sketch of it                  (s,)
    a_k     the weight of client k in the aggregated mean                               (N,)
    t       the mean direction of everyone: sum_i p_i u_i over all who were seen        (s,)

Clients that never trained come first, in random order: every client trains, and nothing is asked.
Clients that joined after the first round and never trained get a quarter of a round, or one seat in
some rounds where a quarter is less than one: newcomers do not push out everyone else. A client that
was chosen and did not deliver is left out for some rounds: twice as long each time, but never
forever. A subclass decides which of the known clients fill the rest of a round.

The directions are a *table* in the state, with one row per client:

    name        (N, s) the table, where there are at most `ROWS` clients
    name/<i>    (ROWS, s) its i-th block of rows, where there are more

To replace some rows, a new state gets new arrays for the blocks that they are in, and shares all
other blocks with the given state, which stays as it was: with many clients, a round copies little.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcor.core.config import check_at_least, check_one_of
from fedcor.core.rng import stream
from fedcor.core.types import (
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
from fedcor.rounds.loss_screening import LARGEST_LOSS
from fedcor.rounds.rules.seats import seated, seats_of
from fedcor.selectors.base import (
    asks_nothing,
    extend_state,
    fraction_of,
    ready,
    spread,
    uniform,
    without,
)
from fedcor.selectors.matching import match, replacements
from fedcor.selectors.matching_blocks import Criterion

# Rows of a block. Larger blocks are read faster in a choice (they get huge pages of memory), but
# then most rounds of many clients would copy the whole table.
ROWS = 4096
_JOINED_SHARE = 0.25  # of a round, for new clients that joined after the first one


def count_sketch(vectors: Array, size: int) -> FloatArray:
    """(m, size) sketches of (m, P) vectors: every number is added to a random place.

    It is added with a random sign, so that inner products stay the same on average.
    Places and signs depend on P and `size` alone, so sketches of different rounds and runs can be
    compared. No P x size matrix is ever formed.
    """
    length = vectors.shape[1]
    rng = stream(0, "sketch", length, size)
    places = rng.integers(size, size=length)
    signs = rng.choice(np.array([-1.0, 1.0]), size=length)
    return np.array(
        [np.bincount(places, weights=signs * row, minlength=size) for row in vectors]
    ).reshape(-1, size)


def table_blocks(state: State, name: str) -> list[Array]:
    """The blocks of a table; nothing is copied."""
    if name in state:
        return [state[name]]
    blocks: list[Array] = []
    while (block := state.get(f"{name}/{len(blocks)}")) is not None:
        blocks.append(block)
    return blocks


def table_rows(state: State, name: str, clients: IntArray) -> FloatArray:
    """(m, s) the rows of some clients, or of the same client again."""
    blocks, block_of = table_blocks(state, name), clients // ROWS
    order = np.argsort(block_of, kind="stable")
    ends = np.searchsorted(block_of[order], np.arange(len(blocks)), side="right")
    rows = np.empty((len(clients), blocks[0].shape[1]))
    for i, part in enumerate(np.split(order, ends[:-1])):
        rows[part] = blocks[i][clients[part] - i * ROWS]
    return rows


def put_table(state: State, name: str, table: list[Array]) -> dict[str, Array]:
    """The state with a table of these blocks, each but the last of `ROWS` rows."""
    rest = {k: v for k, v in state.items() if k != name and not k.startswith(f"{name}/")}
    if len(table) == 1:
        return {**rest, name: table[0]}
    return {**rest, **{f"{name}/{i}": block for i, block in enumerate(table)}}


def replace_rows(state: State, name: str, clients: IntArray, rows: FloatArray) -> dict[str, Array]:
    """The state in which `rows`, (m, s), are those of `clients`, (m,), each of them once."""
    table, block_of = table_blocks(state, name), clients // ROWS
    for i in np.unique(block_of).tolist():
        here = block_of == i
        table[i] = table[i].copy()
        table[i][clients[here] - i * ROWS] = rows[here]
    return put_table(state, name, table)


def extend_table(state: State, name: str, count: int) -> dict[str, Array]:
    """The state with a table for `count` clients: rows of zeros for those that are new."""
    table = table_blocks(state, name)
    width, missing = table[0].shape[1], count - sum(map(len, table))
    if missing:
        new = min(missing, ROWS - len(table[-1]))
        table[-1] = np.concatenate([table[-1], np.zeros((new, width))])
        later = range(len(table) * ROWS, count, ROWS)
        table += [np.zeros((min(ROWS, count - start), width)) for start in later]
    return put_table(state, name, table)


@dataclass(frozen=True)
class RememberingSelector(ABC):
    """Base of selectors that remember the last update of every client.

    A subclass adds `choose_known`, `measure`, and what they make small, the `criterion`.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        sketch: What is remembered of an update: "head", the part of the output layer; "full", all
            of it; or a number s, a random projection (count sketch) to s numbers.
        swaps: Largest number of exchanges after the greedy choice, at least 0.
    """

    clients_per_round: int
    sketch: Literal["head", "full"] | int = "head"
    swaps: int = 20

    criterion: ClassVar[Criterion]
    # The names of the reasons that `measure` gives: with a client, and before it.
    measures: ClassVar[tuple[str, str]]
    # An engine that hides the updates of single clients refuses this selector.
    needs_updates: ClassVar[bool] = True
    questions = asks_nothing

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        if isinstance(self.sketch, str):
            check_one_of("sketch", self.sketch, ("head", "full"))
        else:
            check_at_least("sketch", self.sketch, 1)
        check_at_least("swaps", self.swaps, 0)

    def memory_bytes(self, clients: int, parameters: int | None) -> dict[str, float]:
        """What the rows of all clients cost: setting -> bytes. The head's size is not known here.

        Each client has a row of float64, whether it was seen or not. It is a part of the selector's
        state: the `memory_bytes` of a record is what the optimiser remembers, without it.
        """
        if self.sketch == "head" or (self.sketch == "full" and parameters is None):
            return {}
        size = parameters if self.sketch == "full" else self.sketch
        return {"sketch": 8.0 * clients * int(size or 0)}

    @abstractmethod
    def choose_known(
        self, state: State, federation: Federation, known: IntArray, wanted: int
    ) -> IntArray:
        """`wanted` of the `known` clients, who are at least as many."""

    @abstractmethod
    def measure(self, sums: FloatArray, weights: FloatArray, target: FloatArray) -> FloatArray:
        """(C,) how well groups match the target, (s,) t, by the criterion.

        Args:
            sums: (C, s) S of the first member, of the first two, ...
            weights: (C, 1) A of the same groups.
            target: (s,) t.
        """

    def match_known(
        self, state: State, federation: Federation, known: IntArray, first: IntArray, wanted: int
    ) -> IntArray:
        """`wanted` of the `known` clients, `first` and those that match the mean of everyone.

        Where some clients have a seat already, the group is matched together with them.
        """
        taken = seated_known(state, federation)
        pool = _Pool.of(state, np.union1d(known, taken) if len(taken) else known)
        group = match(
            pool.directions,
            self.target(state, federation.weights),
            pool.find(np.unique(np.concatenate([taken, first]))),
            wanted + len(taken),
            swaps=self.swaps,
            weights=pool.shares,
            criterion=self.criterion,
            allowed=pool.allowed,
        )
        return without(pool.clients[group], taken)

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """How well the group matches everyone's mean, and how old its directions are.

        `measures` name the measure of the first, of the first two, ... clients, and that before
        each client; `age` is in rounds. `runner_up` is the client that would replace it best in the
        whole group, and `margin` how much worse the group would then be. Clients without a known
        direction are not in the mean, as they are not in the matching, and have NaN.
        """
        known = state["seen"][chosen] >= 0
        if not known.any():
            return {}
        members = chosen[known]
        weights = state["shares"][members, None]
        sums = np.cumsum(weights * table_rows(state, "directions", members), axis=0)
        target = self.target(state, federation.weights)
        measured = self.measure(sums, np.cumsum(weights, axis=0), target)
        rivals, others = self._rivals(state, federation, members, target)
        closer = self.criterion == "distance"  # the smaller, the better
        name, before = self.measures
        columns = {
            name: measured,
            before: np.concatenate([[np.nan], measured[:-1]]),
            "age": state["round"] - 1 - state["seen"][members],
            "runner_up": rivals,
            "margin": others - measured[-1] if closer else measured[-1] - others,
        }
        return spread(columns, known)

    def _rivals(
        self, state: State, federation: Federation, members: IntArray, target: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """For each member of the group, who would replace it best, and the group's measure then.

        NaN for no one. Where rules have bounds, only a client that counts alike can replace
        another.
        """
        before = {**state, "round": state["round"] - 1}  # for all who were not chosen
        others = ready(before, federation.available)
        others = others[(state["seen"][others] >= 0) & (state["asked"][others] != before["round"])]
        pool = _Pool.of(state, np.concatenate([members, others]))
        seats = seats_of(federation)
        rows, values = replacements(
            pool.directions,
            target,
            pool.find(members),
            kinds=None if seats is None else seats.groups.cell_of[pool.clients],
            weights=pool.shares,
            criterion=self.criterion,
            allowed=pool.allowed,
        )
        return np.where(rows < 0, np.nan, pool.clients[rows]), values

    def new_per_round(self, count: int) -> int:
        """How many of `count` clients may be new ones, while there are any."""
        return count

    def ageing_weights(self, state: State) -> FloatArray | float:
        """(N,) How much each remembered direction still counts in the mean of everyone."""
        return 1.0

    def init(self, population: Population) -> State:
        """The state in which no direction is known."""
        count = population.count
        return {
            "round": np.array(0),
            # (N, s) u_k, in blocks where clients are many; no columns before the first update
            **extend_table({"directions": np.empty((0, 0))}, "directions", count),
            "shares": np.ones(count),  # (N,) a_k
            "seen": np.full(count, -1),  # (N,) round of the last usable update, -1 for never
            "asked": np.full(count, -1),  # (N,) round in which it was last chosen
            "failed": np.zeros(count, dtype=np.int64),  # (N,) times chosen since it last delivered
            "founders": np.array(count),  # clients that were there before the first round
        }

    def join(self, state: State, population: Population) -> State:
        """The state with new clients, which the next sweep brings in."""
        count = population.count
        return {
            **extend_table(state, "directions", count),
            **extend_state(state, self.init(population), ("shares", "seen", "asked", "failed")),
            "founders": state["founders"] if state["round"] else np.array(count),
        }

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients: those that never trained, then known ones; and the new state."""
        available, rng, t = federation.available, federation.rng, int(state["round"])
        count = min(self.clients_per_round, len(available))
        clients = ready(state, available)
        seen = state["seen"][clients] >= 0
        new, known = clients[~seen], clients[seen]
        most = self.new_per_round(count)
        joined = new[new >= int(state["founders"])]
        chosen = uniform(rng, new[: len(new) - len(joined)], most)  # the others joined last
        if len(joined) and len(chosen) < most:
            share = fraction_of(_JOINED_SHARE, count) or int(rng.random() < _JOINED_SHARE * count)
            more = uniform(rng, joined, min(share, most - len(chosen)))
            chosen = np.concatenate([chosen, more])
        if len(chosen) < count and len(known):
            wanted = min(count - len(chosen), len(known))
            group = self.choose_known(state, federation, known, wanted)
            chosen = np.concatenate([chosen, group])
        for others in (new, available):  # where too few are known, or ready
            if len(chosen) < count:
                more = uniform(rng, without(others, chosen), count - len(chosen))
                chosen = np.concatenate([chosen, more])
        asked, failed = state["asked"].copy(), state["failed"].copy()
        asked[chosen] = t
        failed[chosen] += 1  # until it delivers
        return chosen, {**state, "round": np.array(t + 1), "asked": asked, "failed": failed}

    def phase(self, state: State) -> str:
        """How many clients have not trained yet, while there are any: they come first."""
        new, count = int((state["seen"] < 0).sum()), len(state["seen"])
        return f"{new} of {count} clients have not trained yet" if new else ""

    def target(self, state: State, weights: FloatArray) -> FloatArray:
        """(s,) t, the mean direction of all clients whose direction is known.

        Args:
            state: The state before or after `select`.
            weights: (N,) p_k.
        """
        weights = np.where(state["seen"] >= 0, weights * self.ageing_weights(state), 0.0)
        total = float(weights.sum())
        blocks, start = table_blocks(state, "directions"), 0
        target: FloatArray = np.zeros(blocks[0].shape[1])
        for block in blocks:
            target += weights[start : start + len(block)] @ block
            start += len(block)
        return target / (total if total > 0 else 1.0)

    def observe(self, state: State, outcome: Outcome) -> State:
        """The state with the directions of those who delivered; unusable updates are ignored."""
        if not len(outcome.participated):
            return state
        directions, weights = self.read_directions(outcome), outcome.aggregation_weights
        usable = (np.abs(directions) <= LARGEST_LOSS).all(axis=1)
        usable &= np.isfinite(weights) & (weights > 0)
        if not usable.any():
            return state
        shares, seen, failed = (state[key].copy() for key in ("shares", "seen", "failed"))
        if table_blocks(state, "directions")[0].shape[1] != directions.shape[1]:
            # The first update, or the model has changed its size: nothing else is known.
            state = put_table(state, "directions", [np.empty((0, directions.shape[1]))])
            state = extend_table(state, "directions", len(seen))
            seen[:] = -1
        clients = outcome.participated[usable]
        shares[clients] = weights[usable]
        seen[clients] = int(state["round"]) - 1
        failed[clients] = 0
        state = replace_rows(state, "directions", clients, directions[usable])
        return {**state, "shares": shares, "seen": seen, "failed": failed}

    def read_directions(self, outcome: Outcome) -> FloatArray:
        """(m, s) u_k of those who delivered."""
        updates = outcome.updates[:, outcome.head] if self.sketch == "head" else outcome.updates
        directions = updates.astype(np.float64) / outcome.step_sizes[:, None]
        if not isinstance(self.sketch, str):
            directions = count_sketch(directions, self.sketch)
        return directions


@dataclass(frozen=True)
class _Pool:
    """What is remembered of some clients, as `matching` takes it.

    Attributes:
        clients: The client of each row.
        directions: Their rows; of many clients, in blocks.
        shares: The weight of each row.
        allowed: Which rows are of these clients; None if all are.
    """

    clients: IntArray
    directions: FloatArray | list[FloatArray]
    shares: FloatArray
    allowed: BoolArray | None = None

    @classmethod
    def of(cls, state: State, clients: IntArray) -> _Pool:
        """Of `clients`: where they are most of a large population, nothing is copied."""
        count = len(state["seen"])
        if count <= ROWS or 2 * len(clients) < count:
            rows = table_rows(state, "directions", clients)
            return cls(clients, rows, state["shares"][clients])
        allowed = np.zeros(count, dtype=bool)
        allowed[clients] = True
        blocks = table_blocks(state, "directions")
        return cls(np.arange(count), blocks, state["shares"], allowed)

    def find(self, clients: IntArray) -> IntArray:
        """The rows of some of these clients."""
        order = np.argsort(self.clients, kind="stable")
        return order[np.searchsorted(self.clients, clients, sorter=order)]


def seated_known(state: State, federation: Federation) -> IntArray:
    """The clients that have a seat in this round already, and whose direction is known."""
    taken = seated(federation)
    return taken[state["seen"][taken] >= 0]


def moves(state: State, clients: IntArray) -> BoolArray:
    """(m,) whether the known direction of each client is other than zero."""
    blocks = table_blocks(state, "directions")
    return np.concatenate([block.any(axis=1) for block in blocks])[clients]
