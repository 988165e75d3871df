"""The gap that matching makes small, and matching among very many rows, in blocks.

Notation as in `matching.py`: S = sum_K a_i u_i and A = sum_K a_i over the group K, t the target.

    distance    |S|^2 / A^2 - 2 S't / A     the squared distance of S / A from t, but for |t|^2
    direction   -S't / |S|                  minus the cosine of S and t, times |t|

In blocks, the memory grows with n and C, not with n times C:
    V       sums of groups that a row may join, one a row: S itself, or S without a member  (m, s)

A group that row i joins has |V_j + a_i u_i|^2 = |V_j|^2 + 2 a_i u_i'V_j + |a_i u_i|^2. So a further
member costs one pass over all rows, as m = 1, and an exchange one product of all rows with V. From
`COMPILED_FROM` rows on, the pass is a compiled one (`compiled.py`) where Numba is installed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.selectors.numba_passes import compiled_pass

_NUMBERS = 65_536  # gaps that are computed at a time

Criterion: TypeAlias = Literal["distance", "direction"]

# A swap that lowers the gap by less than this fraction of its scale is a rounding error, and swaps
# end. A sum of rows whose squared length is below this fraction of the longest row's is zero but
# for rounding errors, and has no direction.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Problem:
    """Rows, and what the mean of those that are chosen should be like.

    Attributes:
        blocks: The rows u_i, (n, s) together; all blocks but the last are equally long.
        target: (s,) t.
        weights: (n,) a_i > 0.
        criterion: What is made small.
        allowed: (n,) Rows that can become members.
    """

    blocks: list[FloatArray]
    target: FloatArray
    weights: FloatArray
    criterion: Criterion
    allowed: BoolArray

    @classmethod
    def of(
        cls,
        directions: FloatArray | list[FloatArray],
        target: FloatArray,
        weights: FloatArray | None,
        criterion: Criterion,
        allowed: BoolArray | None,
    ) -> Problem:
        """Of rows or blocks of rows; None for equal weights, and if all rows are allowed."""
        blocks = directions if isinstance(directions, list) else [directions]
        n = sum(map(len, blocks))
        weights = np.ones(n) if weights is None else weights
        allowed = np.ones(n, dtype=bool) if allowed is None else allowed
        return cls(blocks, target, weights, criterion, allowed)


class Rows(NamedTuple):
    """Rows that may join a group, some of n.

    Attributes:
        U: (n, s) u_i.
        weights: (n,) a_i.
        squares: (n,) |a_i u_i|^2.
        aims: (n,) (a_i u_i)'t.
        outside: (n,) which of them can join.
        kinds: (n,) what kind of row each is.
    """

    U: FloatArray
    weights: FloatArray
    squares: FloatArray
    aims: FloatArray
    outside: BoolArray
    kinds: IntArray

    def part(self, rows: slice) -> Rows:
        """Some of the rows."""
        return Rows._make(column[rows] for column in self)


class Groups(NamedTuple):
    """Groups that a row may join, and the best row for each so far.

    Attributes:
        V: (m, s) sum of a_i u_i over each group.
        weights: (m,) sum of a_i over each group.
        squares: (m,) |V_j|^2.
        aims: (m,) V_j't.
        kinds: (m,) of what kind the row must be.
        rows: (m,) the row with the smallest gap so far, -1 for none. Changed in place.
        gaps: (m,) that gap, or the one that must be beaten. Changed in place.
    """

    V: FloatArray
    weights: FloatArray
    squares: FloatArray
    aims: FloatArray
    kinds: IntArray
    rows: IntArray
    gaps: FloatArray

    @classmethod
    def of(
        cls, V: FloatArray, weights: FloatArray, aims: FloatArray, kinds: IntArray, below: float
    ) -> Groups:
        """The groups, with no row found for them yet; its gap must be below `below`."""
        squares = np.einsum("ms,ms->m", V, V)
        return cls(V, weights, squares, aims, kinds, np.full(len(V), -1), np.full(len(V), below))


class Group(ABC):
    """A group of rows while it is built.

    Args:
        problem: The rows, and what their mean should be like.
        first: Rows that are members from the start.
        squares: (n,) |a_i u_i|^2.
        aims: (n,) (a_i u_i)'t.

    Attributes:
        members: The rows of the group, in the order in which they were chosen.
        fixed: How many of the first members are never swapped.
        outside: (n,) Rows that are not in the group, and could be.
    """

    def __init__(
        self, problem: Problem, first: IntArray, squares: FloatArray, aims: FloatArray
    ) -> None:
        self.direction = problem.criterion == "direction"
        self.weights = problem.weights
        self.squares, self.aims = squares, aims
        self.target_squared = float(problem.target @ problem.target)
        # The least |S|^2 that has a direction.
        longest = float(squares.max(initial=0.0))
        self.shortest = max(_ROUNDING * longest, float(np.finfo(np.float64).tiny))
        self.fixed = len(first)
        self.members: list[int] = first.tolist()
        self.outside = problem.allowed.copy()
        self.outside[self.members] = False

    @abstractmethod
    def best_addition(self) -> int:
        """The row that makes the gap smallest if it joins the group."""

    @abstractmethod
    def best_exchanges(
        self, kinds: IntArray | None = None, below: float = np.inf
    ) -> tuple[IntArray, FloatArray]:
        """(C',) the row that would replace each member best, of its kind, and the gap then.

        Row -1 for a member that no row replaces with a gap below `below`.
        """

    @abstractmethod
    def totals(self) -> tuple[float, float, float]:
        """|S|^2, S't and A."""

    def put(self, row: int, place: int) -> None:
        """Let `row` be the member at `place`, which may be the next free one."""
        self.members[place : place + 1] = [row]
        self.outside[row] = False

    def swap_best(self) -> bool:
        """Make the exchange that makes the gap smallest; False if none helps."""
        squared, aim, weight = self.totals()
        # The size of the numbers that a gap is the difference of.
        scale = float(np.sqrt(self.target_squared))
        if not self.direction:
            scale = self.target_squared + squared / weight**2
        now = float(gap(self.direction, squared, aim, weight, self.shortest))
        rows, gaps = self.best_exchanges(below=now - _ROUNDING * scale)
        leaving = int(np.lexsort((rows, gaps))[0])
        if rows[leaving] < 0:
            return False
        place = self.fixed + leaving
        self.outside[self.members[place]] = True
        self.put(int(rows[leaving]), place)
        return True


def gap(direction: bool, squared: Any, aim: Any, weight: Any, shortest: float) -> Any:
    """The gap by direction or by distance, from |S|^2, S't, A and `Group.shortest`."""
    if direction:
        return -aim / np.sqrt(np.maximum(squared, shortest))
    return squared / weight**2 - 2 * aim / weight


class BlockGroup(Group):
    """A group of very many rows while it is built, in blocks of rows."""

    def __init__(self, problem: Problem, first: IntArray) -> None:
        self.blocks = [np.ascontiguousarray(block) for block in problem.blocks]
        self._starts = np.cumsum([0, *map(len, self.blocks)])
        n = len(problem.weights)
        squares, aims = np.empty(n), np.empty(n)
        for rows, U in self._each_block():
            a = problem.weights[rows]
            squares[rows] = a * a * np.einsum("ns,ns->n", U, U)
            aims[rows] = a * (U @ problem.target)
        super().__init__(problem, first, squares, aims)
        self._improve = compiled_pass("improve", n) or _improve

    def best_addition(self) -> int:
        """The row that makes the gap smallest if it joins the group."""
        S, aim, weight = self._sums()
        one = np.zeros(1, dtype=np.int64)
        groups = Groups.of(S[None], np.array([weight]), np.array([aim]), one, np.inf)
        self._search(groups, np.zeros(len(self.outside), dtype=np.int64))
        row = int(groups.rows[0])
        return row if row >= 0 else int(np.argmax(self.outside))  # if no gap is a number

    def best_exchanges(
        self, kinds: IntArray | None = None, below: float = np.inf
    ) -> tuple[IntArray, FloatArray]:
        """As in `Group`; `below` is the gap that the first row must beat."""
        S, aim, weight = self._sums()
        kinds = np.zeros(len(self.outside), dtype=np.int64) if kinds is None else kinds
        out = self.members[self.fixed :]
        weights, aims = weight - self.weights[out], aim - self.aims[out]
        groups = Groups.of(S - self._rows(out), weights, aims, kinds[out], below)
        self._search(groups, kinds)
        return groups.rows, groups.gaps

    def totals(self) -> tuple[float, float, float]:
        """|S|^2, S't and A."""
        S, aim, weight = self._sums()
        return float(S @ S), aim, weight

    def _each_block(self) -> list[tuple[slice, FloatArray]]:
        rows = (slice(start, end) for start, end in pairwise(self._starts.tolist()))
        return list(zip(rows, self.blocks, strict=True))

    def _rows(self, rows: list[int]) -> FloatArray:
        """(m, s) a_i u_i of some rows."""
        found = np.empty((len(rows), self.blocks[0].shape[1]))
        blocks = np.searchsorted(self._starts, rows, side="right") - 1
        for j, (row, block) in enumerate(zip(rows, blocks.tolist(), strict=True)):
            found[j] = self.weights[row] * self.blocks[block][row - self._starts[block]]
        return found

    def _sums(self) -> tuple[FloatArray, float, float]:
        """S, S't and A."""
        members = self.members
        S = self._rows(members).sum(axis=0)
        return S, float(self.aims[members].sum()), float(self.weights[members].sum())

    def _search(self, groups: Groups, kinds: IntArray) -> None:
        """Find the best row for each group."""
        columns = self.weights, self.squares, self.aims, self.outside, kinds
        for rows, U in self._each_block():
            block = Rows._make([U, *(column[rows] for column in columns)])
            self._improve(block, groups, self.direction, self.shortest, rows.start)


def _improve(block: Rows, groups: Groups, direction: bool, shortest: float, start: int) -> None:
    """Search a block of rows, the first of which is row `start`, for better ones."""
    size = max(16, _NUMBERS // len(groups.V))
    for first in range(0, len(block.U), size):
        part = block.part(slice(first, first + size))
        a = part.weights[:, None]
        squared = groups.squares + 2 * a * (part.U @ groups.V.T) + part.squares[:, None]  # (n, m)
        aims = groups.aims + part.aims[:, None]
        gaps = gap(direction, squared, aims, groups.weights + a, shortest)
        can = part.outside[:, None] & (part.kinds[:, None] == groups.kinds)
        gaps = np.where(can, gaps, np.inf)
        rows = np.argmin(gaps, axis=0)
        found = gaps[rows, np.arange(len(groups.V))]
        better = found < groups.gaps
        groups.rows[better] = start + first + rows[better]
        groups.gaps[better] = found[better]
