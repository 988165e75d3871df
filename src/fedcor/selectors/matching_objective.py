"""The gap between the mean of a group and a target, which matching makes small.

Notation as in `matching.py`: S = sum_K a_i u_i and A = sum_K a_i over the group K, t the target.

    distance    |S|^2 / A^2 - 2 S't / A     the squared distance of S / A from t, but for |t|^2
    direction   -S't / |S|                  minus the cosine of S and t, times |t|
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray

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
        a, squares, aims = self.weights[rows], self.squares[rows], self.aims[rows]
        return Rows(self.U[rows], a, squares, aims, self.outside[rows], self.kinds[rows])


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
