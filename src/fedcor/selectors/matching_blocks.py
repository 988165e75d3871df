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

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray

COMPILED_FROM = 100_000  # below, a run would hardly win back the seconds in which Numba compiles
_NUMBERS = 65_536  # gaps that are computed at a time


Criterion: TypeAlias = Literal["distance", "direction"]

# A swap that lowers the gap by less than this fraction of its scale is a rounding error, and swaps
# end. A sum of rows whose squared length is below this fraction of the longest row's is zero but
# for rounding errors, and has no direction.
ROUNDING = 1e-12


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


def shortest_sum(longest: float) -> float:
    """The least |S|^2 that has a direction, where the longest row has |a u|^2 = `longest`."""
    return max(ROUNDING * longest, float(np.finfo(np.float64).tiny))


def gap(criterion: Criterion, squared: Any, aim: Any, weight: Any, shortest: float) -> Any:
    """The gap, from |S|^2, S't, A and `shortest_sum`."""
    if criterion == "distance":
        return squared / weight**2 - 2 * aim / weight
    return -aim / np.sqrt(np.maximum(squared, shortest))


def gap_scale(criterion: Criterion, squared: Any, weight: Any, target_squared: Any) -> float:
    """The size of the numbers that a gap is the difference of."""
    if criterion == "distance":
        return float(target_squared + squared / weight**2)
    return float(np.sqrt(target_squared))


class BlockGroup:
    """A group while it is built, in blocks of rows.

    Args:
        blocks: The rows u_i, (n, s) together; all blocks but the last are equally long.
        target: (s,) t.
        first: Rows that are members from the start.
        weights: (n,) a_i; None for equal weights.
        criterion: What is made small.
        allowed: (n,) Rows that can become members; None if all can.
    """

    def __init__(
        self,
        blocks: list[FloatArray],
        target: FloatArray,
        first: IntArray,
        *,
        weights: FloatArray | None,
        criterion: Criterion,
        allowed: BoolArray | None,
    ) -> None:
        n = sum(map(len, blocks))
        self.blocks, self.criterion = [np.ascontiguousarray(block) for block in blocks], criterion
        self.weights = np.ones(n) if weights is None else weights  # (n,) a_i
        self.squares, self.aims = np.empty(n), np.empty(n)  # (n,) |a_i u_i|^2 and (a_i u_i)'t
        self._improve = _compiled_pass() if n >= COMPILED_FROM else None
        self._starts = np.cumsum([0, *map(len, blocks)])
        for rows, U in self._each_block():
            a = self.weights[rows]
            self.squares[rows] = a * a * np.einsum("ns,ns->n", U, U)
            self.aims[rows] = a * (U @ target)
        self.shortest = shortest_sum(float(self.squares.max(initial=0.0)))
        self.target_squared = float(target @ target)
        self.fixed = len(first)  # the first members, which are never swapped
        self.members: list[int] = first.tolist()
        # (n,) rows that are not in the group, and could be
        self.outside = np.ones(n, dtype=bool) if allowed is None else allowed.copy()
        self.outside[self.members] = False

    def add_best(self) -> None:
        """Add the row that makes the gap smallest."""
        S, aim, weight = self._sums()
        groups = self._groups(S[None], np.array([aim]), np.array([weight]), np.inf)
        self._search(groups, None)
        row = int(groups.rows[0])
        row = row if row >= 0 else int(np.argmax(self.outside))  # if no gap is a number
        self.members.append(row)
        self.outside[row] = False

    def best_exchanges(
        self, kinds: IntArray | None, below: float = np.inf
    ) -> tuple[IntArray, FloatArray]:
        """(C',) the row that would replace each member best, of its kind, and the gap then.

        Row -1 for a member that no row replaces with a gap below `below`.
        """
        S, aim, weight = self._sums()
        out = self.members[self.fixed :]
        V = S - self._rows(out)
        groups = self._groups(V, aim - self.aims[out], weight - self.weights[out], below)
        if kinds is not None:
            groups.kinds[:] = kinds[out]
        self._search(groups, kinds)
        return groups.rows, np.where(groups.rows < 0, np.inf, groups.gaps)

    def swap_best(self) -> bool:
        """Make the exchange that makes the gap smallest; False if none helps."""
        S, aim, weight = self._sums()
        squared = float(S @ S)
        rounding = ROUNDING * gap_scale(self.criterion, squared, weight, self.target_squared)
        now = float(gap(self.criterion, squared, aim, weight, self.shortest))
        rows, gaps = self.best_exchanges(None, now - rounding)
        leaving = int(np.lexsort((rows, gaps))[0])
        if rows[leaving] < 0:
            return False
        place = self.fixed + leaving
        self.outside[self.members[place]] = True
        self.members[place] = int(rows[leaving])
        self.outside[self.members[place]] = False
        return True

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

    def _groups(self, V: FloatArray, aims: FloatArray, weights: FloatArray, below: float) -> Groups:
        """The groups, with no row found for them yet; its gap must be below `below`."""
        squares, kinds = np.einsum("ms,ms->m", V, V), np.zeros(len(V), dtype=np.int64)
        return Groups(
            V=V,
            weights=weights,
            squares=squares,
            aims=aims,
            kinds=kinds,
            rows=kinds - 1,
            gaps=np.full(len(V), below),
        )

    def _search(self, groups: Groups, kinds: IntArray | None) -> None:
        """Find the best row for each group."""
        if kinds is None:
            kinds = np.zeros(len(self.outside), dtype=np.int64)
        for rows, U in self._each_block():
            block = Rows(
                U=U,
                weights=self.weights[rows],
                squares=self.squares[rows],
                aims=self.aims[rows],
                outside=self.outside[rows],
                kinds=kinds[rows],
            )
            if self._improve is not None:
                direction = self.criterion == "direction"
                self._improve(block, groups, direction, self.shortest, rows.start)
            else:
                _improve(block, groups, self.criterion, self.shortest, rows.start)


def _improve(
    block: Rows, groups: Groups, criterion: Criterion, shortest: float, start: int
) -> None:
    """Search a block of rows, the first of which is row `start`, for better ones."""
    size = max(16, _NUMBERS // len(groups.V))
    for first in range(0, len(block.U), size):
        part = block.part(slice(first, first + size))
        a = part.weights[:, None]
        squared = groups.squares + 2 * a * (part.U @ groups.V.T) + part.squares[:, None]  # (n, m)
        aims = groups.aims + part.aims[:, None]
        gaps = gap(criterion, squared, aims, groups.weights + a, shortest)
        can = part.outside[:, None] & (part.kinds[:, None] == groups.kinds)
        gaps = np.where(can, gaps, np.inf)
        rows = np.argmin(gaps, axis=0)
        found = gaps[rows, np.arange(len(groups.V))]
        better = found < groups.gaps
        groups.rows[better] = start + first + rows[better]
        groups.gaps[better] = found[better]


@cache
def _compiled_pass() -> Callable[..., None] | None:
    """`compiled.improve`; None where Numba is not installed."""
    try:
        from fedcor.selectors.compiled import improve
    except ImportError:
        return None
    compiled: Callable[..., None] = improve
    return compiled
