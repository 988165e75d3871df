"""Seats: which clients may take the next place in a round, so that the quotas can still be met.

Notation
    C       seats of a round
    G       groups, one for each value of a tag that has a bound
    T       tags with bounds
    K       cells: clients with the same values of all these tags, which are interchangeable

The *best outcomes* are the choices that exceed no maximum, among them those that miss the minima by
the fewest clients, and among them those with the most clients. A client may take a seat if at least
one best outcome contains it and all clients seated before it. So no choice ends in a dead end, and
a choice that is a best outcome by itself is never changed.

With bounds on one tag, counting is enough. With several tags, a client counts for several groups,
and an integer programme over the cells decides (`_solve`). Only its optimal values are used, and
which cells can have a seat at the optimum. Both are unique, so the result does not depend on the
solver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.types import BoolArray, Federation, IntArray
from fedcor.rounds.rules.declaration import Rules

# Names so many of some clients, beside those who have taken a seat.
Pick: TypeAlias = Callable[[IntArray, int, IntArray], IntArray]
UNLIMITED = np.iinfo(np.int64).max // 4
_MOST_CELLS = 500  # where several tags have bounds: the integer programme has to stay small


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of clients, and the least and the most clients that a round may have of each.

    Attributes:
        labels: (G,) `tag=value` of each group.
        lower: (G + 1,) Least number of each; the last entry is that of "no group", 0.
        upper: (G + 1,) Most of each; `UNLIMITED` where there is no maximum.
        cell_of: (N,) The cell of each client.
        groups_of: (K, T) The group of each cell, by tag; -1 for none.
    """

    labels: tuple[str, ...]
    lower: IntArray
    upper: IntArray
    cell_of: IntArray
    groups_of: IntArray

    @property
    def cells(self) -> int:
        """K, the number of cells."""
        return len(self.groups_of)

    @property
    def tags(self) -> int:
        """T, the number of tags with bounds."""
        return int(self.groups_of.shape[1])

    @cached_property
    def constraints(self) -> Any:
        """(2G + 2, 2K + G) The rows of the programme in `_solve`: minima, maxima, and the sums."""
        from scipy.sparse import csr_array

        K, G = self.cells, len(self.labels)
        member = np.zeros((G + 1, K))
        for column in self.groups_of.T:
            member[column, np.arange(K)] = 1.0
        rows = np.zeros((2 * G + 2, 2 * K + G))
        rows[: 2 * G, : 2 * K] = np.tile(member[:G], (2, 2))
        rows[:G, 2 * K :] = np.eye(G)
        rows[-2, : 2 * K] = rows[-1, 2 * K :] = 1.0
        return csr_array(rows)

    def count(self, per_cell: IntArray) -> IntArray:
        """(G + 1,) clients in each group, of the number in each cell."""
        counts = np.zeros(len(self.lower), dtype=np.int64)
        for column in self.groups_of.T:
            np.add.at(counts, column, per_cell)
        counts[-1] = 0
        return counts

    def in_cells(self, clients: IntArray) -> IntArray:
        """(K,) how many of `clients` are in each cell."""
        return np.bincount(self.cell_of[clients], minlength=self.cells)

    def missing(self, clients: IntArray) -> dict[str, int]:
        """Label -> how many clients a group has too few, if `clients` are chosen."""
        short = np.maximum(self.lower - self.count(self.in_cells(clients)), 0)
        return {label: int(n) for label, n in zip(self.labels, short, strict=False) if n}


def make_groups(
    rules: Rules, columns: Mapping[str, Sequence[str | None]], eligible: BoolArray
) -> Groups | None:
    """The groups that have a bound; None where there is none.

    Args:
        rules: The user's rules.
        columns: Tag -> (N,) the value of each client, as a string; None where it has none.
        eligible: (N,) Clients that may be chosen. A value that only other clients have makes no
            group, unless a bound names it.
    """
    found: list[tuple[str, int, int]] = []  # label, least and most of each group
    rows: list[list[int]] = []
    for tag in rules.quota_tags:
        column = columns.get(tag) or [None] * len(eligible)
        values = {
            v for v, may in zip(column, eligible.tolist(), strict=True) if may and v is not None
        }
        number_of: dict[str | None, int] = {}
        for value in sorted(values | rules.bounded_values(tag)):
            low, high = rules.bounds(tag, value)
            if low or high is not None:
                number_of[value] = len(found)
                found.append((f"{tag}={value}", low, UNLIMITED if high is None else high))
        if number_of:
            rows.append([number_of.get(value, -1) for value in column])
    if not found:
        return None
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(eligible)).T
    groups_of, cell_of = np.unique(table, axis=0, return_inverse=True)
    if len(rows) > 1 and len(groups_of) > _MOST_CELLS:
        allowed = f"{len(rows)} tags have bounds, whose values make {len(groups_of)} combinations"
        key = "at_most" if rules.at_most else "at_least"
        hint = f"at most {_MOST_CELLS} are possible with several tags; with one tag, any number is"
        raise ConfigError(key, getattr(rules, key), allowed, hint)
    labels, lower, upper = zip(*found, ("", 0, UNLIMITED), strict=True)
    return Groups(
        labels=labels[:-1],
        lower=np.array(lower, dtype=np.int64),
        upper=np.array(upper, dtype=np.int64),
        cell_of=cell_of.reshape(-1),
        groups_of=groups_of,
    )


_NOBODY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Seats:
    """The seats of a round, while they are given away.

    A selector may read it as `federation.seats`, where the rules have bounds: it is then asked to
    fill `count` seats, in addition to the clients that already have one.

    Attributes:
        groups: The bounds.
        count: Seats that are left.
        candidates: Sorted ids of the clients that can be reached and have no seat.
        taken: Ids of the clients that have one, in the order of choice.
    """

    groups: Groups
    count: int
    candidates: IntArray
    taken: IntArray = dataclasses.field(default_factory=lambda: _NOBODY)
    _best: tuple[int, int] | None = None

    @property
    def open(self) -> IntArray:
        """Sorted ids of the candidates that may take the next seat."""
        return self.candidates[self._open_cells[self.groups.cell_of[self.candidates]]]

    @property
    def size(self) -> int:
        """Clients of a best outcome, those that already have a seat included."""
        return self._totals[1]

    @property
    def shortfall(self) -> int:
        """By how many clients a best outcome misses the minima."""
        return self._totals[0]

    def admits(self, client: int) -> bool:
        """Whether this client may take the next seat."""
        place = int(np.searchsorted(self.candidates, client))
        if place == len(self.candidates) or self.candidates[place] != client:
            return False
        cell = int(self.groups.cell_of[client])
        if self._one_tag:
            return bool(self._open_cells[cell])
        return bool(self._in_best(np.arange(self.groups.cells) == cell)[cell])

    def give(self, client: int) -> Seats:
        """The seats after `client`, which they admit, has taken one."""
        return dataclasses.replace(
            self,
            count=self.count - 1,
            candidates=self.candidates[self.candidates != client],
            taken=np.append(self.taken, client),
            _best=self._totals,
        )

    def is_best(self, chosen: IntArray) -> bool:
        """Whether `chosen`, all of them candidates, fill the seats in a best outcome."""
        if len(np.unique(chosen)) < len(chosen) or len(chosen) > self.count:
            return False
        counts = self._counts + self.groups.count(self.groups.in_cells(chosen))
        if (counts > self.groups.upper).any():
            return False
        short = int(np.maximum(self.groups.lower - counts, 0).sum())
        if short == 0 and len(chosen) == min(self.count, len(self.candidates)):
            return True
        return (short, len(self.taken) + len(chosen)) == self._totals

    @property
    def _one_tag(self) -> bool:
        return self.groups.tags == 1

    @cached_property
    def _counts(self) -> IntArray:
        """(G + 1,) seats that each group has."""
        return self.groups.count(self.groups.in_cells(self.taken))

    @cached_property
    def _free(self) -> IntArray:
        """(K,) candidates in each cell."""
        return self.groups.in_cells(self.candidates)

    @cached_property
    def _needed(self) -> IntArray:
        """(G + 1,) with one tag: seats that each group still needs, and can take."""
        reach = self._counts + self.groups.count(self._free)
        needed: IntArray = np.maximum(np.minimum(self.groups.lower, reach) - self._counts, 0)
        return needed

    @cached_property
    def _totals(self) -> tuple[int, int]:
        """The shortfall and the number of clients of a best outcome."""
        if self._best is not None:
            return self._best
        groups = self.groups
        if not self._one_tag:
            short, cells = _solve(groups, self._free, self._counts, seats=self.count)
            return short, len(self.taken) + int(cells.sum())
        room = groups.upper[groups.groups_of[:, 0]] - self._counts[groups.groups_of[:, 0]]
        more = min(self.count, int(np.minimum(self._free, room).sum()))
        lacking = int(np.maximum(groups.lower - self._counts, 0).sum())
        return lacking - min(int(self._needed.sum()), self.count), len(self.taken) + more

    @cached_property
    def _open_cells(self) -> BoolArray:
        """(K,) whose candidates may take the next seat."""
        if not self._one_tag:
            return self._in_best(np.ones(self.groups.cells, dtype=bool))
        group = self.groups.groups_of[:, 0]
        below = self._counts[group] < self.groups.upper[group]
        # If every seat that is left is needed for a minimum, only those groups may take one.
        spare = int(self._needed.sum()) < self.count
        cells: BoolArray = (self._free > 0) & below & (spare | (self._needed[group] > 0))
        return cells & (self.count > 0)

    def _in_best(self, wanted: BoolArray) -> BoolArray:
        """(K,) several tags: which of the wanted cells have a further seat in a best outcome."""
        inside, left = np.zeros_like(wanted), wanted & (self._free > 0)
        short, size = self._totals
        best = short, size - len(self.taken)
        while left.any():
            _, cells = _solve(
                self.groups, self._free, self._counts, seats=self.count, best=best, wanted=left
            )
            inside |= (cells > 0) | self._one_exchange_away(cells)
            if not (left & inside).any():
                break
            left &= ~inside
        return inside & wanted

    def _one_exchange_away(self, cells: IntArray) -> BoolArray:
        """(K,) cells that can replace a client of a best outcome, (K,) seats of each cell.

        Most cells are found in this way, without solving another programme.
        """
        groups, of = self.groups, self.groups.groups_of
        found = np.zeros(groups.cells, dtype=bool)
        for leaving in np.flatnonzero(cells):
            others = cells.copy()
            others[leaving] -= 1
            counts = self._counts + groups.count(others)
            fits = (counts[of] < groups.upper[of]).all(axis=1) & (others < self._free)
            fills = (counts[of] < groups.lower[of]).sum(axis=1)  # minima that a seat helps to meet
            found |= fits & (fills >= fills[leaving])
        return found


def _solve(
    groups: Groups,
    free: IntArray,
    counts: IntArray,
    *,
    seats: int,
    best: tuple[int, int] | None = None,
    wanted: BoolArray | None = None,
) -> tuple[int, IntArray]:
    """Solve the integer programme for bounds on several tags.

        x   (K,) 1 if a cell gets a further seat, else 0
        y   (K,) its seats beyond that one
        s   (G,) by how many clients each minimum is missed

        counts_g + sum of x_k + y_k over the cells k of g         <= upper_g
        counts_g + sum of x_k + y_k over the cells k of g + s_g   >= lower_g
        sum of x_k + y_k over all cells                           <= seats

    Args:
        groups: The bounds.
        free: (K,) Candidates in each cell.
        counts: (G + 1,) Seats that each group already has.
        seats: Seats that are left.
        best: The shortfall and the further clients of a best outcome. None to find them.
        wanted: (K,) With `best`: find a best outcome with as many of these cells as possible.

    Returns:
        The shortfall, and (K,) the further seats of each cell.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    K, G = groups.cells, len(groups.labels)
    lower = (groups.lower - counts)[:-1]
    upper = np.where(groups.upper < UNLIMITED, groups.upper - counts, np.inf)[:-1]
    if best is None or wanted is None:
        # One client fewer is better than a minimum missed by one more.
        goal = np.concatenate([-np.ones(2 * K), np.full(G, seats + 1.0)])
        totals = (0, seats), (0, np.inf)
    else:
        goal = np.concatenate([-wanted.astype(float), np.zeros(K + G)])
        totals = (best[1], best[1]), (best[0], best[0])
    low = np.concatenate([lower, np.full(G, -np.inf), [bounds[0] for bounds in totals]])
    high = np.concatenate([np.full(G, np.inf), upper, [bounds[1] for bounds in totals]])
    most = np.concatenate([np.minimum(free, 1), np.maximum(free - 1, 0), np.full(G, np.inf)])
    result = milp(
        goal,
        integrality=np.ones(len(goal)),
        bounds=Bounds(np.zeros(len(goal)), most),
        constraints=LinearConstraint(groups.constraints, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise FedcorError(f"no choice of clients can be found for the rules: {result.message}")
    x, y, s = np.split(np.rint(result.x).astype(np.int64), [K, 2 * K])
    return int(s.sum()), x + y


def fill(
    seats: Seats, ask: Callable[[Seats, IntArray], IntArray], *, one_by_one: bool = False
) -> IntArray:
    """The clients that fill the seats, in the order of choice.

    `ask(seats, clients)` names clients for `seats.count` seats, the best first, out of `clients`.
    It is first asked for all seats out of all candidates. If its answer is a best outcome, that is
    the choice. Otherwise the clients that may take a seat do so, in its order, and it is asked for
    the rest out of the clients that may take one, until all seats are filled.

    Args:
        seats: The seats of a round, all of them free.
        ask: See above.
        one_by_one: Whether each of its choices depends on those before: what follows a client that
            may not take a seat is then dropped.
    """
    named = ask(seats, seats.candidates)
    if seats.is_best(named):
        return named
    seats = _seat(seats, named, one_by_one)
    while len(may := seats.open):
        after = _seat(seats, ask(seats, may), one_by_one)
        if len(after.taken) == len(seats.taken):
            break  # a user's selector that names nobody
        seats = after
    return seats.taken


def _seat(seats: Seats, named: IntArray, one_by_one: bool) -> Seats:
    """The seats after the named clients have taken one, as far as they may."""
    for client in named.tolist():
        if seats.count and seats.admits(client):
            seats = seats.give(client)
        elif one_by_one:
            break
    return seats


def fill_round(
    federation: Federation, count: int, pick: Pick, *, one_by_one: bool = False
) -> IntArray:
    """The clients that fill a round: `count` of those available, or the seats that rules leave.

    `pick(clients, count, taken)` names `count` of the `clients`, the best first, beside those who
    have taken a seat. `one_by_one` as in `fill`.
    """
    seats = seats_of(federation)
    if seats is None:
        return pick(federation.available, count, _NOBODY)
    return fill(seats, lambda left, may: pick(may, left.count, left.taken), one_by_one=one_by_one)


def seats_of(federation: object) -> Seats | None:
    """The seats that a selector is asked to fill; None where rules have no bounds."""
    seats = getattr(federation, "seats", None)
    return seats if isinstance(seats, Seats) else None


def seated(federation: object) -> IntArray:
    """The clients that already have a seat in the round, when a selector is asked for the rest."""
    seats = seats_of(federation)
    return _NOBODY if seats is None else seats.taken
