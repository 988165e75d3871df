"""Seats: who may take the next place in a round, so that the rules can still be met.

A round has C seats. The *best outcomes* are the choices that exceed no maximum, among them those
that miss the minima by the fewest clients, and among them those with the most clients. A client may
take a seat if at least one best outcome has it beside those who are seated already. So no choice
ends in a dead end, and one that is a best outcome by itself is never changed.

With bounds on one tag, a count answers that. With several tags, where one client counts for several
groups, it is an integer programme over the cells (`programme.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedcor.rules.groups import Groups
from fedcor.rules.programme import best_totals, cells_in_best
from fedcor.types import BoolArray, IntArray

__all__ = ["Seats", "fill", "seated", "seats_of"]

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
