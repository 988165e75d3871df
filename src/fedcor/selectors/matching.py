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

from typing import Any

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.selectors.matching_blocks import BlockGroup, Criterion, Group, Problem, gap

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
    problem = Problem.of(directions, target, weights, criterion, allowed)
    group = _group(problem, first[:count], count)
    while len(group.members) < count and group.outside.any():
        group.put(group.best_addition(), len(group.members))
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
    problem = Problem.of(directions, target, weights, criterion, allowed)
    group = _group(problem, members, len(members))
    group.fixed = 0
    rows, gaps = group.best_exchanges(kinds)
    length = float(np.sqrt(group.target_squared)) or 1.0
    if criterion == "distance":
        values = np.sqrt(np.maximum(gaps + group.target_squared, 0.0)) / length
    else:
        values = -gaps / length
    return rows, np.where(rows < 0, np.nan, values)


def _group(problem: Problem, first: IntArray, count: int) -> Group:
    """The group of the first members: with all products where there are few rows."""
    if len(problem.blocks) > 1 or len(problem.blocks[0]) > FEW:
        return BlockGroup(problem, first)
    return _ProductGroup(problem, first, count)


class _ProductGroup(Group):
    """A group while it is built, with the inner products of its members and all rows."""

    def __init__(self, problem: Problem, first: IntArray, count: int) -> None:
        (directions,) = problem.blocks
        self.rows = problem.weights[:, None] * directions  # (n, s) a_i u_i
        squares = np.einsum("ns,ns->n", self.rows, self.rows)
        super().__init__(problem, first, squares, self.rows @ problem.target)
        # (n, C) of each row with each member
        self.products = np.empty((len(self.rows), min(count, len(self.rows))))
        self.products[:, : self.fixed] = self.rows @ self.rows[self.members].T
        self._add_up()

    def best_addition(self) -> int:
        """The row that makes the gap smallest if it joins the group."""
        squared, aim, weight = self.totals()
        squares = squared + 2 * self.with_rows + self.squares  # (n,)
        gaps = self._gap(squares, aim + self.aims, weight + self.weights)
        return int(np.argmin(np.where(self.outside, gaps, np.inf)))

    def best_exchanges(
        self, kinds: IntArray | None = None, below: float = np.inf
    ) -> tuple[IntArray, FloatArray]:
        """As in `Group`: from the gaps with each row in the place of each member."""
        (squared, aim, weight), with_rows = self.totals(), self.with_rows
        out = self.members[self.fixed :]
        # |S|^2 without each member that may leave (C',), then with each row in its place (n, C').
        without = squared - 2 * with_rows[out] + self.squares[out]
        cross = with_rows[:, None] - self.products[:, self.fixed :]
        gaps = self._gap(
            without + 2 * cross + self.squares[:, None],
            aim - self.aims[out] + self.aims[:, None],
            weight - self.weights[out] + self.weights[:, None],
        )
        gaps[~self.outside] = np.inf
        if kinds is not None:
            gaps[kinds[:, None] != kinds[out]] = np.inf
        rows = np.argmin(gaps, axis=0)
        best: FloatArray = gaps[rows, np.arange(len(out))]
        return np.where(best < below, rows, -1), best

    def totals(self) -> tuple[float, float, float]:
        """|S|^2, S't and A."""
        members = self.members
        squared, aim = self.with_rows[members].sum(), self.aims[members].sum()
        return squared, aim, self.weights[members].sum()

    def put(self, row: int, place: int) -> None:
        """As in `Group`, with the row's products."""
        super().put(row, place)
        self.products[:, place] = self.rows @ self.rows[row]
        self._add_up()

    def _add_up(self) -> None:
        self.with_rows = self.products[:, : len(self.members)].sum(axis=1)  # (n,) S'(a_i u_i)

    def _gap(self, squared: Any, aim: Any, weight: Any) -> Any:
        return gap(self.direction, squared, aim, weight, self.shortest)
