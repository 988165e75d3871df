"""The gap between the mean of a group and a target, which matching makes small.

Notation as in `matching.py`: S = sum_K a_i u_i and A = sum_K a_i over the group K, t the target.

    distance    |S|^2 / A^2 - 2 S't / A     the squared distance of S / A from t, but for |t|^2
    direction   -S't / |S|                  minus the cosine of S and t, times |t|
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

__all__ = ["ROUNDING", "Criterion", "gap", "gap_scale", "shortest_sum"]

Criterion: TypeAlias = Literal["distance", "direction"]

# A swap that lowers the gap by less than this fraction of its scale is a rounding error, and swaps
# end. A sum of rows whose squared length is below this fraction of the longest row's is zero but
# for rounding errors, and has no direction.
ROUNDING = 1e-12


def shortest_sum(longest: float) -> float:
    """The least |S|^2 that has a direction, where the longest row has |a u|^2 = `longest`."""
    return max(ROUNDING * longest, float(np.finfo(np.float64).tiny))


def gap(criterion: Criterion, squared: Any, aim: Any, weight: Any, shortest: float) -> Any:
    """The gap, from |S|^2, S't, A and `shortest_sum`."""
    if criterion == "distance":
        return squared / weight**2 - 2 * aim / weight
    return -aim / np.sqrt(np.maximum(squared, shortest))


def gap_scale(criterion: Criterion, squared: float, weight: float, target_squared: float) -> float:
    """The size of the numbers that a gap is the difference of."""
    if criterion == "distance":
        return float(target_squared + squared / weight**2)
    return float(np.sqrt(target_squared))
