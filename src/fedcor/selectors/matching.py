"""Matching: choose rows that together come close to a target, or point where it points.

Notation
    u_i     direction i, a row                                              (n, s)
    a_i     its weight in the mean                                          (n,)
    t       the target                                                      (s,)
    K       the group of chosen rows, C of them
    S, A    sum_K a_i u_i and sum_K a_i: the mean of the group is S / A

What is made small, the gap, is one of two. The squared distance of the mean from the target, up to
the constant |t|^2:

    gap = |S|^2 / A^2 - 2 S't / A

Or minus the cosine of the angle between them, times |t|, whatever the length of the mean:

    gap = -S't / |S|

If row k joins the group (or leaves it, with the other sign), |S|^2, S't and A change by numbers
that are known before the change:

    |S + a_k u_k|^2 = |S|^2 + 2 S'(a_k u_k) + |a_k u_k|^2

So each step compares all possible groups at once, and costs one product of all rows with the row
that comes in: O(n s). With very many rows, the products with all members are not kept, and the rows
are gone through in blocks (`matching_blocks.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.selectors.matching_blocks import (
    ROUNDING,
    BlockGroup,
    Criterion,
    gap,
    gap_scale,
    shortest_sum,
)

FEW = 4096  # rows whose products with all members are kept


def match(
    directions: FloatArray | list[FloatArray],
    target: FloatArray,
    first: IntArray,
    count: int,
    *,
    swaps: int = 0,
    weights: FloatArray | None = None,
    criterion: Criterion = "distance",
    allowed: BoolArray | None = None,
) -> IntArray:
    """Rows of `directions` whose mean is like `target`: chosen greedily, then swapped.

    Args:
        directions: (n, s) u_i, the candidates; or a list of blocks of so many rows together.
        target: (s,) t.
        first: Rows that are in the group whatever their directions are. No swap removes them.
        count: C, the size of the group; all rows where there are fewer.
        swaps: At most so many times, one member is exchanged for another row, the best exchange
            first, while the gap becomes smaller.
        weights: (n,) a_i > 0, the weight of each row in the mean; None for equal weights.
        criterion: "distance" brings the mean close to the target; "direction" lets it point where
            the target points, however long it is.
        allowed: (n,) Rows that can be chosen beside `first`; None if all can.

    Returns:
        (C,) row numbers: `first`, then the others in the order in which they were chosen.
    """
    group = _group(
        directions, target, first, count, weights=weights, criterion=criterion, allowed=allowed
    )
    while len(group.members) < count and group.outside.any():
        group.add_best()
    if group.outside.any() and group.fixed < len(group.members):
        for _ in range(swaps):
            if not group.swap_best():
                break
    return np.array(group.members, dtype=np.int64)


def replacements(
    directions: FloatArray | list[FloatArray],
    target: FloatArray,
    members: IntArray,
    *,
    kinds: IntArray | None = None,
    weights: FloatArray | None = None,
    criterion: Criterion = "distance",
    allowed: BoolArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """For each member of a group, the row that would replace it best.

    Args:
        directions: (n, s) u_i, the candidates; or a list of blocks of so many rows together.
        target: (s,) t.
        members: (C,) rows of the group.
        kinds: (n,) A member can be replaced by a row of the same kind; None if by every row.
        weights: (n,) a_i > 0; None for equal weights.
        criterion: As in `match`.
        allowed: (n,) Rows that can replace a member; None if all can.

    Returns:
        (C,) rows, -1 where none is allowed; and (C,) the distance or the cosine of the group with
        that row in the member's place, NaN where there is none. A distance is that of the mean from
        t, divided by |t|.
    """
    group = _group(
        directions,
        target,
        members,
        len(members),
        weights=weights,
        criterion=criterion,
        allowed=allowed,
    )
    group.fixed = 0
    rows, best = group.best_exchanges(kinds)
    length = float(np.sqrt(group.target_squared)) or 1.0
    if criterion == "distance":
        value = np.sqrt(np.maximum(best + group.target_squared, 0.0)) / length
    else:
        value = -best / length
    found = np.isfinite(best)
    return np.where(found, rows, -1), np.where(found, value, np.nan)


def _group(
    directions: FloatArray | list[FloatArray],
    target: FloatArray,
    first: IntArray,
    count: int,
    *,
    weights: FloatArray | None,
    criterion: Criterion,
    allowed: BoolArray | None,
) -> _Group | BlockGroup:
    """The group of the first members: with all products where there are few rows."""
    if isinstance(directions, list) or len(directions) > FEW:
        blocks = directions if isinstance(directions, list) else [directions]
        return BlockGroup(
            blocks, target, first[:count], weights=weights, criterion=criterion, allowed=allowed
        )
    count = min(count, len(directions))
    return _Group(
        directions,
        target,
        first[:count],
        count,
        weights=weights,
        criterion=criterion,
        allowed=allowed,
    )


class _Sums(NamedTuple):
    """What the distance of the group, and of every group one step away, follows from."""

    with_rows: FloatArray  # (n,) S'(a_i u_i)
    squared: Any  # |S|^2
    aim: Any  # S't
    weight: Any  # A


class _Group:
    """The group while it is built, with the inner products of its members and all rows."""

    def __init__(
        self,
        directions: FloatArray,
        target: FloatArray,
        first: IntArray,
        count: int,
        *,
        weights: FloatArray | None,
        criterion: Criterion,
        allowed: BoolArray | None,
    ) -> None:
        n = len(directions)
        self.criterion = criterion
        self.weights = np.ones(n) if weights is None else weights  # (n,) a_i
        self.rows = (
            directions if weights is None else weights[:, None] * directions
        )  # (n, s) a_i u_i
        self.squares = np.einsum("ns,ns->n", self.rows, self.rows)  # (n,) |a_i u_i|^2
        self.shortest = shortest_sum(float(self.squares.max(initial=0.0)))
        self.aims = self.rows @ target  # (n,) (a_i u_i)'t
        self.target_squared = target @ target  # |t|^2
        self.fixed = len(first)  # the first members, which are never swapped
        self.members = list(first)
        self.products = np.empty((n, count))  # (n, C) of each row with each member
        self.products[:, : self.fixed] = self.rows @ self.rows[self.members].T
        # (n,) rows that are not in the group, and could be
        self.outside = np.ones(n, dtype=bool) if allowed is None else allowed.copy()
        self.outside[self.members] = False

    def add_best(self) -> None:
        """Add the row that makes the gap smallest."""
        now = self._sums()
        squared = now.squared + 2 * now.with_rows + self.squares
        gaps = self._gap(squared, now.aim + self.aims, now.weight + self.weights)  # (n,)
        self._put(int(np.argmin(np.where(self.outside, gaps, np.inf))), len(self.members))

    def exchanges(self) -> FloatArray:
        """(n, C') the gap with each row in the place of each member that is not fixed."""
        now = self._sums()
        out = self.members[self.fixed :]
        # |S|^2 without each member that may leave (C,), then with each row in its place (n, C).
        without = now.squared - 2 * now.with_rows[out] + self.squares[out]
        cross = now.with_rows[:, None] - self.products[:, self.fixed :]
        squared = without + 2 * cross + self.squares[:, None]
        aim = now.aim - self.aims[out] + self.aims[:, None]
        weight = now.weight - self.weights[out] + self.weights[:, None]
        gaps: FloatArray = self._gap(squared, aim, weight)
        return gaps

    def best_exchanges(self, kinds: IntArray | None) -> tuple[IntArray, FloatArray]:
        """(C',) the row that would replace each member best, of its kind, and the gap then."""
        out = self.members[self.fixed :]
        outside = self.outside[:, None]
        if kinds is not None:
            outside = outside & (kinds[:, None] == kinds[out])
        if not len(outside):
            return np.zeros(len(out), dtype=np.int64), np.full(len(out), np.inf)
        gaps = np.where(outside, self.exchanges(), np.inf)  # (n, C')
        rows = np.argmin(gaps, axis=0)
        return rows, gaps[rows, np.arange(len(out))]

    def swap_best(self) -> bool:
        """Make the exchange that makes the gap smallest; False if none helps."""
        now = self._sums()
        out = self.members[self.fixed :]
        gaps = self.exchanges()
        gaps[~self.outside] = np.inf
        row, leaving = divmod(int(np.argmin(gaps)), len(out))
        scale = gap_scale(self.criterion, now.squared, now.weight, self.target_squared)
        now_gap = self._gap(now.squared, now.aim, now.weight)
        if not gaps[row, leaving] < now_gap - ROUNDING * scale:
            return False
        self.outside[out[leaving]] = True
        self._put(row, self.fixed + leaving)
        return True

    def _sums(self) -> _Sums:
        members = self.members
        with_rows: FloatArray = self.products[:, : len(members)].sum(axis=1)
        return _Sums(
            with_rows,
            with_rows[members].sum(),
            self.aims[members].sum(),
            self.weights[members].sum(),
        )

    def _put(self, row: int, place: int) -> None:
        """Let `row` be the member at `place`, which may be the next free one."""
        self.members[place : place + 1] = [row]
        self.products[:, place] = self.rows @ self.rows[row]
        self.outside[row] = False

    def _gap(self, squared: Any, aim: Any, weight: Any) -> Any:
        return gap(self.criterion, squared, aim, weight, self.shortest)
