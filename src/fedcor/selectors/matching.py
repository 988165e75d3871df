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
that comes in: O(n s).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedcor.types import BoolArray, FloatArray, IntArray

__all__ = ["Criterion", "match", "replacements"]

Criterion: TypeAlias = Literal["distance", "direction"]

# A swap that lowers the gap by less than this fraction of its scale is a rounding error, and swaps
# end. A sum of rows whose squared length is below this fraction of the longest row's is zero but
# for rounding errors, and has no direction.
_ROUNDING = 1e-12


def match(
    directions: FloatArray,
    target: FloatArray,
    first: IntArray,
    count: int,
    swaps: int = 0,
    weights: FloatArray | None = None,
    criterion: Criterion = "distance",
) -> IntArray:
    """Rows of `directions` whose mean is like `target`: chosen greedily, then swapped.

    Args:
        directions: (n, s) u_i, the candidates.
        target: (s,) t.
        first: Rows that are in the group whatever their directions are. No swap removes them.
        count: C, the size of the group; all rows where there are fewer.
        swaps: At most so many times, one member is exchanged for another row, the best exchange
            first, while the gap becomes smaller.
        weights: (n,) a_i > 0, the weight of each row in the mean; None for equal weights.
        criterion: "distance" brings the mean close to the target; "direction" lets it point where
            the target points, however long it is.

    Returns:
        (C,) row numbers: `first`, then the others in the order in which they were chosen.
    """
    count = min(count, len(directions))
    group = _Group(directions, target, first[:count], count, weights, criterion)
    while len(group.members) < count:
        group.add_best()
    if group.outside.any() and group.fixed < count:
        for _ in range(swaps):
            if not group.swap_best():
                break
    return np.array(group.members, dtype=np.int64)


def replacements(
    directions: FloatArray,
    target: FloatArray,
    members: IntArray,
    allowed: BoolArray,
    weights: FloatArray | None = None,
    criterion: Criterion = "distance",
) -> tuple[IntArray, FloatArray]:
    """For each member of a group, the row that would replace it best.

    Args:
        directions: (n, s) u_i, the candidates.
        target: (s,) t.
        members: (C,) rows of the group.
        allowed: (n, C) Which row may replace which member; of rows outside the group.
        weights: (n,) a_i > 0; None for equal weights.
        criterion: As in `match`.

    Returns:
        (C,) rows, -1 where none is allowed; and (C,) the distance or the cosine of the group with
        that row in the member's place, NaN where there is none. A distance is that of the mean from
        t, divided by |t|.
    """
    group = _Group(directions, target, members, len(members), weights, criterion)
    group.fixed = 0
    gap = np.where(allowed & group.outside[:, None], group.exchanges(), np.inf)  # (n, C)
    rows = np.argmin(gap, axis=0) if len(gap) else np.zeros(len(members), dtype=np.int64)
    best = gap[rows, np.arange(len(members))] if len(gap) else np.full(len(members), np.inf)
    length = float(np.sqrt(group.target_squared)) or 1.0
    if criterion == "distance":
        value = np.sqrt(np.maximum(best + group.target_squared, 0.0)) / length
    else:
        value = -best / length
    found = np.isfinite(best)
    return np.where(found, rows, -1), np.where(found, value, np.nan)


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
        weights: FloatArray | None,
        criterion: Criterion,
    ) -> None:
        n = len(directions)
        self.criterion = criterion
        self.weights = np.ones(n) if weights is None else weights  # (n,) a_i
        self.rows = (
            directions if weights is None else weights[:, None] * directions
        )  # (n, s) a_i u_i
        self.squares = np.einsum("ns,ns->n", self.rows, self.rows)  # (n,) |a_i u_i|^2
        longest = float(self.squares.max(initial=0.0))
        self.shortest = max(_ROUNDING * longest, np.finfo(np.float64).tiny)  # of |S|^2
        self.aims = self.rows @ target  # (n,) (a_i u_i)'t
        self.target_squared = target @ target  # |t|^2
        self.fixed = len(first)  # the first members, which are never swapped
        self.members = list(first)
        self.products = np.empty((n, count))  # (n, C) of each row with each member
        self.products[:, : self.fixed] = self.rows @ self.rows[self.members].T
        self.outside = np.ones(n, dtype=bool)  # (n,) rows that are not in the group
        self.outside[self.members] = False

    def add_best(self) -> None:
        """Add the row that makes the gap smallest."""
        now = self._sums()
        squared = now.squared + 2 * now.with_rows + self.squares
        gap = self._gap(squared, now.aim + self.aims, now.weight + self.weights)  # (n,)
        self._put(int(np.argmin(np.where(self.outside, gap, np.inf))), len(self.members))

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
        gap: FloatArray = self._gap(squared, aim, weight)
        return gap

    def swap_best(self) -> bool:
        """Make the exchange that makes the gap smallest; False if none helps."""
        now = self._sums()
        out = self.members[self.fixed :]
        gap = self.exchanges()
        gap[~self.outside] = np.inf
        row, leaving = divmod(int(np.argmin(gap)), len(out))
        rounding = _ROUNDING * self._scale(now)
        if not gap[row, leaving] < self._gap(now.squared, now.aim, now.weight) - rounding:
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
        """What is made small, from |S|^2, S't and A."""
        if self.criterion == "distance":
            return squared / weight**2 - 2 * aim / weight
        return -aim / np.sqrt(np.maximum(squared, self.shortest))

    def _scale(self, now: _Sums) -> float:
        """The size of the numbers that a gap is the difference of."""
        if self.criterion == "distance":
            return float(self.target_squared + now.squared / now.weight**2)
        return float(np.sqrt(self.target_squared))
