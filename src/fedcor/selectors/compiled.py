"""The pass of `posterior.py` over a large population, compiled with Numba.

It does what `Posterior` does with NumPy, in one go: the products with the pick, the new variances
and benefits, the gains and the largest of them. Each number is read from memory once per pick. Its
sums have one order, whatever the machine is doing, but another one than NumPy's: results agree but
for rounding errors.

Only `posterior.py` imports this module, and only for large populations: Numba takes seconds to
import and compile. Nothing compiled is kept on disk.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fedcor.core.types import BoolArray, FloatArray
from fedcor.selectors.matching_objective import Groups, Rows

_BLOCK = 256  # clients whose numbers stay in the innermost cache between the loops
_ROUNDING = 1e-12


# Loops of their own, so that the compiler computes eight numbers at once.
@njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _products(X: FloatArray, u: FloatArray, z: FloatArray) -> None:
    for i in range(z.size):
        total = 0.0
        for k in range(u.size):
            total += X[i, k] * u[k]
        z[i] = total


@njit(error_model="numpy", fastmath={"contract"})
def _condition(
    z: FloatArray,
    h: float,
    slope: float,
    s2: float,
    variance: FloatArray,
    benefit: FloatArray,
    alpha: FloatArray,
    floor: float,
) -> bool:
    """Condition a block; whether a squared gain in it may be above `floor`."""
    share, above = 1.0 / h, 0
    for i in range(z.size):
        benefit[i] -= slope * z[i]
        left = variance[i] - share * (z[i] * z[i])
        variance[i] = left if left > s2 else s2
        worth = alpha[i] * benefit[i]
        above += 1 if worth * worth >= floor * variance[i] else 0
    return above > 0


@njit(error_model="numpy")
def condition_and_find(
    X: FloatArray,
    u: FloatArray,
    h: float,
    slope: float,
    s2: float,
    variance: FloatArray,
    benefit: FloatArray,
    alpha: FloatArray,
    left: BoolArray,
) -> tuple[int, float]:
    """Condition all clients on a pick, and find the largest gain that is left.

    A block is searched only if one of its gains is as large as the best so far: their squares tell
    it without a root or a quotient.

    Args:
        X: (n, d) embeddings.
        u: (d,) A x of the pick.
        h: x'A x + s2 of the pick.
        slope: (u'v + s2 q) / h of the pick.
        s2: Noise variance.
        variance: (n,) replaced by what is left of it.
        benefit: (n,) replaced by what is left of it.
        alpha: (n,) annealing factors.
        left: (n,) who can still be picked.

    Returns:
        The first row with the largest gain, and that gain; row -1 if no gain is a number.
    """
    products = np.empty(_BLOCK)
    best, largest, floor = -1, -np.inf, 0.0
    for start in range(0, len(X), _BLOCK):
        end = min(start + _BLOCK, len(X))
        z, rows = products[: end - start], slice(start, end)
        _products(X[rows], u, z)
        if not _condition(z, h, slope, s2, variance[rows], benefit[rows], alpha[rows], floor):
            continue
        for i in range(start, end):
            if left[i]:
                gain = alpha[i] * benefit[i] / math.sqrt(variance[i])
                if gain > largest:
                    best, largest = i, gain
                    floor = gain * gain * (1.0 - _ROUNDING) if gain > 0 else 0.0
    return best, largest


# The pass of `matching_blocks.py` over very many rows, compiled with Numba.
#
# It finds what `_improve` there finds, but for rounding errors. Whether a row can beat the best one
# so far is decided without a root or a quotient, for many rows at once; the gap itself is computed
# only where it can.
#
# Only `matching_blocks.py` imports this module, and only for very many rows: Numba takes seconds to
# import and compile. Nothing compiled is kept on disk.


_NUMBERS = 16_384  # so many products at a time stay in the cache
_LARGEST = 128  # rows at a time


@njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _row_products(U: FloatArray, v: FloatArray, z: FloatArray) -> None:
    for i in range(z.size):
        total = 0.0
        for k in range(v.size):
            total += U[i, k] * v[k]
        z[i] = total


@njit(error_model="numpy", fastmath={"contract"})
def _may_align(
    z: FloatArray,
    a: FloatArray,
    squares: FloatArray,
    aims: FloatArray,
    squared: float,
    aim: float,
    shortest: float,
    floor: float,
) -> bool:
    """Whether (S't)^2 reaches `floor` times |S|^2 for a row with S't > 0."""
    above = 0
    for i in range(z.size):
        length = squared + 2.0 * (a[i] * z[i]) + squares[i]
        length = length if length > shortest else shortest
        towards = aim + aims[i]
        towards = towards if towards > 0.0 else 0.0
        above += 1 if towards * towards >= floor * length else 0
    return above > 0


@njit(error_model="numpy", fastmath={"contract"})
def _may_be_close(
    z: FloatArray,
    a: FloatArray,
    squares: FloatArray,
    aims: FloatArray,
    squared: float,
    aim: float,
    weight: float,
    best: float,
) -> bool:
    """Whether |S|^2 - 2 S't A is at most `best` times A^2 for a row, but for rounding errors."""
    below = 0
    for i in range(z.size):
        length = squared + 2.0 * (a[i] * z[i]) + squares[i]
        total = weight + a[i]
        twice = 2.0 * (aim + aims[i]) * total
        bound = best * total * total
        rounding = _ROUNDING * (length + abs(twice) + abs(bound))
        below += 1 if length - twice - bound <= rounding else 0
    return below > 0


@njit(error_model="numpy")
def improve(block: Rows, groups: Groups, direction: bool, shortest: float, start: int) -> None:
    """Search a block of rows for better ones; arguments as in `matching_blocks`."""
    m = len(groups.V)
    size = min(_LARGEST, max(16, _NUMBERS // m))
    one = np.empty((1, size))
    for first in range(0, len(block.U), size):
        rows = slice(first, min(first + size, len(block.U)))
        a, squares, aims = block.weights[rows], block.squares[rows], block.aims[rows]
        if m == 1:
            products = one[:, : rows.stop - first]
            _row_products(block.U[rows], groups.V[0], products[0])
        else:
            products = np.dot(groups.V, block.U[rows].T)  # (m, rows)
        for j in range(m):
            z, best, squared, aim = products[j], groups.gaps[j], groups.squares[j], groups.aims[j]
            if direction and best < 0.0:
                floor = best * best * (1.0 - _ROUNDING)
                may = _may_align(z, a, squares, aims, squared, aim, shortest, floor)
            elif direction or best == np.inf:
                may = True
            else:
                may = _may_be_close(z, a, squares, aims, squared, aim, groups.weights[j], best)
            if not may:
                continue
            for i in range(z.size):
                row = first + i
                if not block.outside[row] or block.kinds[row] != groups.kinds[j]:
                    continue
                length, towards = squared + 2.0 * (a[i] * z[i]) + squares[i], aim + aims[i]
                if direction:
                    gap = -towards / math.sqrt(max(length, shortest))
                else:
                    weight = groups.weights[j] + a[i]
                    gap = length / (weight * weight) - 2.0 * towards / weight
                if gap < groups.gaps[j]:
                    groups.rows[j], groups.gaps[j] = start + row, gap
