"""Groups of clients with a least and a most number, in the form that counting needs.

Notation
    G       groups, one for each value of a tag that has a bound
    T       tags with bounds
    K       cells: clients with the same values of all these tags, which count alike
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.types import Array, BoolArray, IntArray
from fedcor.rounds.rules.declaration import Rules

UNLIMITED = np.iinfo(np.int64).max // 4
_MOST_CELLS = {1: UNLIMITED, 2: 10_000}  # by number of tags: what a round can be worked out with
_MOST_CELLS_OF_MORE = 500


@dataclass(frozen=True, eq=False)
class Groups:
    """Which clients belong together, and how many of them a round may have.

    Attributes:
        labels: (G,) `tag=value` of each group.
        lower: (G + 1,) Least number of each; the last entry is that of "no group", 0.
        upper: (G + 1,) Most of each; `UNLIMITED` where there is no maximum.
        cell_of: (N,) The cell of each client.
        groups_of: (K, T) The group of each cell, by tag; G for none.
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
    """The groups that the rules make; None where no group has a bound.

    Args:
        rules: With their bounds.
        columns: Tag -> (N,) the value of each client, as a text; None where it has none.
        eligible: (N,) Who may be chosen. The values that only others have make no group, unless a
            bound names them.
    """
    labels: list[str] = []
    lower: list[int] = []
    upper: list[int] = []
    rows: list[list[int]] = []
    for tag in rules.quota_tags:
        column = columns.get(tag) or [None] * len(eligible)
        found = {value for value, may in zip(column, eligible.tolist(), strict=True) if may}
        number_of: dict[str | None, int] = {}
        for value in sorted({v for v in found if v is not None} | rules.bounded_values(tag)):
            low, high = rules.bounds(tag, value)
            if low or high is not None:
                number_of[value] = len(labels)
                labels.append(f"{tag}={value}")
                lower.append(low)
                upper.append(UNLIMITED if high is None else high)
        if number_of:
            rows.append([number_of.get(value, -1) for value in column])
    if not labels:
        return None
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(eligible)).T
    table = np.where(table < 0, len(labels), table)
    groups_of, cell_of = np.unique(table, axis=0, return_inverse=True)
    most = _MOST_CELLS.get(len(rows), _MOST_CELLS_OF_MORE)
    if len(groups_of) > most:
        allowed = f"{len(rows)} tags have bounds, whose values make {len(groups_of)} combinations"
        key = "at_most" if rules.at_most else "at_least"
        hint = f"at most {most} are possible with so many tags; with one tag, any number is"
        raise ConfigError(key, getattr(rules, key), allowed, hint)
    return Groups(
        tuple(labels),
        np.array([*lower, 0], dtype=np.int64),
        np.array([*upper, UNLIMITED], dtype=np.int64),
        cell_of.reshape(-1),
        groups_of,
    )


# The programme behind bounds on several tags at once.
#
# Notation (see `groups.py`)
#     x       (n,) further seats for the clients of each cell that has candidates
#     s       (G,) by how many clients each minimum is missed
#
#     counts_g + sum_k x_k  <= upper_g            over the cells k of group g
#     counts_g + sum_k x_k + s_g >= lower_g
#     0 <= x_k <= free_k,  sum x <= seats,  s >= 0
#
# With two tags the corners of this polytope are whole numbers (two nested families of sets: the
# matrix is totally unimodular), so a linear programme is exact. With three or more, x is declared to
# be whole.
#
# Only optimal values are used, and which x can be positive at the optimum. Both are unique, so the
# result does not depend on the solver.


def best_totals(groups: Groups, free: IntArray, counts: IntArray, seats: int) -> tuple[int, int]:
    """The smallest shortfall, and the most further clients that go with it."""
    programme = _Programme(groups, free, counts)
    n, g = programme.n, programme.g
    # A client less is better than a minimum missed by one more.
    goal = np.concatenate([-np.ones(n), np.full(g, seats + 1.0)])
    found = programme.solve(goal, most=seats, whole=groups.tags > 2)
    return round(float(found[n:].sum())), round(float(found[:n].sum()))


def cells_in_best(
    groups: Groups, free: IntArray, counts: IntArray, short: int, more: int, wanted: BoolArray
) -> BoolArray:
    """(K,) which of the wanted cells have a further seat in some best outcome.

    Args:
        groups: The bounds.
        free: (K,) Candidates in each cell.
        counts: (G + 1,) Seats that each group has.
        short: The shortfall of a best outcome.
        more: Its further clients.
        wanted: (K,) Cells to look at.
    """
    inside = np.zeros(groups.cells, dtype=bool)
    left = wanted & (free > 0)
    if not more or not left.any():
        return inside
    programme = _Programme(groups, free, counts)
    cells = programme.cells
    left[cells] &= programme.support(left[cells], short, more)
    if groups.tags <= 2:
        return left
    # A fraction of a client is not enough: look for whole ones, many cells at a time.
    while left.any():
        x = programme.with_cells(np.flatnonzero(left[cells]), short, more)
        new = cells[x > 0.5]
        if not left[new].any():
            break
        inside[new] = True
        left &= ~inside
    return inside & wanted


class _Programme:
    """The constraints, for the cells that have candidates."""

    def __init__(self, groups: Groups, free: IntArray, counts: IntArray) -> None:
        from scipy.sparse import csr_array

        self.cells = np.flatnonzero(free)
        self.n, self.g = len(self.cells), len(groups.labels)
        self.free = free[self.cells].astype(float)
        group = groups.groups_of[self.cells].ravel()
        cell = np.repeat(np.arange(self.n), groups.tags)
        real = group < self.g
        shape = (self.g, self.n)
        self.member = csr_array((np.ones(int(real.sum())), (group[real], cell[real])), shape=shape)
        self.lower = (groups.lower - counts)[:-1].astype(float)
        upper = np.where(groups.upper < UNLIMITED, groups.upper - counts, np.inf)[:-1]
        self.limited = np.flatnonzero(np.isfinite(upper))
        self.upper = upper[self.limited]

    def solve(self, goal: Array, most: int, *, whole: bool) -> Array:
        """x and s, with goal' (x, s) as small as possible."""
        matrix = _stack(
            [self.member, _eye(self.g)],
            [self.member[self.limited], None],
            [np.ones((1, self.n)), None],
        )
        low = [*self.lower, *np.full(len(self.upper) + 1, -np.inf)]
        high = [*np.full(self.g, np.inf), *self.upper, most]
        limits = [*self.free, *np.full(self.g, np.inf)]
        return _milp(goal, matrix, low, high, limits, np.full(len(goal), float(whole)))

    def support(self, wanted: BoolArray, short: int, more: int) -> BoolArray:
        """(n,) which of the wanted x can be positive in a best outcome, fractions allowed.

        All at once: best outcomes form a polytope, whose mean point has every x positive that can
        be. Scaled by t, each such x is at least 1, so that the sum of y <= min(x, 1) counts them.
        """
        n, g, asked = self.n, self.g, np.flatnonzero(wanted)
        m = len(asked)
        matrix = _stack(  # of (x, s, t, y)
            [self.member, _eye(g), -self.lower[:, None], None],
            [-self.member[self.limited], None, self.upper[:, None], None],
            [np.ones((1, n)), None, np.array([[-float(more)]]), None],
            [None, np.ones((1, g)), np.array([[-float(short)]]), None],
            [-_eye(n), None, self.free[:, None], None],
            [_eye(n)[asked], None, None, -_eye(m)],
        )
        low = np.zeros(matrix.shape[0])
        high = np.full(len(low), np.inf)
        exact = g + len(self.upper)
        high[exact : exact + 2] = 0.0
        goal = np.concatenate([np.zeros(n + g + 1), -np.ones(m)])
        limits = np.concatenate([np.full(n + g + 1, np.inf), np.ones(m)])
        found = _milp(goal, matrix, low, high, limits, np.zeros(len(goal)))
        inside = np.zeros(n, dtype=bool)
        inside[asked] = found[n + g + 1 :] > 0.5
        return inside

    def with_cells(self, asked: IntArray, short: int, more: int) -> Array:
        """The whole x of a best outcome that has as many of the asked cells as possible."""
        n, g, m = self.n, self.g, len(asked)
        matrix = _stack(  # of (x, s, an indicator of each asked x)
            [self.member, _eye(g), None],
            [self.member[self.limited], None, None],
            [np.ones((1, n)), None, None],
            [None, np.ones((1, g)), None],
            [_eye(n)[asked], None, -_eye(m)],
        )
        free = np.full(len(self.upper), -np.inf)
        low = [*self.lower, *free, more, short, *np.zeros(m)]
        high = [*np.full(g, np.inf), *self.upper, more, short, *np.full(m, np.inf)]
        goal = np.concatenate([np.zeros(n + g), -np.ones(m)])
        limits = [*self.free, *np.full(g, np.inf), *np.ones(m)]
        return _milp(goal, matrix, low, high, limits, np.ones(len(goal)))[:n]


def _eye(size: int) -> Any:
    from scipy.sparse import csr_array, identity

    return csr_array(identity(size))


def _stack(*rows: list[Any]) -> Any:
    from scipy.sparse import bmat, csr_array

    return csr_array(bmat(rows, format="csr"))


def _milp(goal: Any, matrix: Any, low: Any, high: Any, limits: Any, whole: Array) -> Array:
    """The solution, all of which is between 0 and `limits`."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    result = milp(
        goal,
        integrality=whole,
        bounds=Bounds(np.zeros(len(goal)), limits),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise FedcorError(f"the rules could not be worked out: {result.message}")
    solution: Array = result.x
    return solution


# Seats: who may take the next place in a round, so that the rules can still be met.
#
# A round has C seats. The *best outcomes* are the choices that exceed no maximum, among them those
# that miss the minima by the fewest clients, and among them those with the most clients. A client may
# take a seat if at least one best outcome has it beside those who are seated already. So no choice
# ends in a dead end, and one that is a best outcome by itself is never changed.
#
# With bounds on one tag, a count answers that. With several tags, where one client counts for several
# groups, it is an integer programme over the cells (`programme.py`).


_NOBODY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Seats:
    """The seats of a round, while they are given away.

    A selector may read it as `federation.seats`, where the rules have bounds: it is then asked to
    fill `count` seats beside the clients that have one.

    Attributes:
        groups: The bounds.
        count: Seats that are left.
        candidates: Sorted ids of the clients that can be reached and have no seat.
        taken: Ids of those who have one, in the order of choice.
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
        """How many clients a best outcome has, with those who have a seat."""
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
        """The seats after `client`, whom they admit, has taken one."""
        return Seats(
            self.groups,
            self.count - 1,
            self.candidates[self.candidates != client],
            np.append(self.taken, client),
            self._totals,
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
            short, more = best_totals(groups, self._free, self._counts, self.count)
            return short, len(self.taken) + more
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
        """(K,) which of the wanted cells have a further seat in a best outcome."""
        short, size = self._totals
        more = size - len(self.taken)
        return cells_in_best(self.groups, self._free, self._counts, short, more, wanted)


def fill(
    seats: Seats, ask: Callable[[Seats, IntArray], IntArray], *, one_by_one: bool = False
) -> IntArray:
    """The clients that fill the seats, in the order of choice.

    `ask(seats, clients)` names clients for `seats.count` seats, the best first, out of `clients`.
    It is first asked for all seats out of all candidates. If its answer is a best outcome, that is
    the choice. Else those of its clients that may take a seat do so, in its order, and it is asked
    for the rest out of those who may take one, until all seats are filled.

    Args:
        seats: None of which is given away.
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
    """The seats after those who were named have taken one, as far as they may."""
    for client in named.tolist():
        if seats.count and seats.admits(client):
            seats = seats.give(client)
        elif one_by_one:
            break
    return seats


def seats_of(federation: object) -> Seats | None:
    """The seats that a selector is asked to fill; None where rules have no bounds."""
    seats = getattr(federation, "seats", None)
    return seats if isinstance(seats, Seats) else None


def seated(federation: object) -> IntArray:
    """The clients that already have a seat in the round, when a selector is asked for the rest."""
    seats = seats_of(federation)
    return _NOBODY if seats is None else seats.taken
