"""The pass of `matching_blocks.py` over very many rows, compiled with Numba.

It finds what `_improve` there finds, but for rounding errors. Whether a row can beat the best one
so far is decided without a root or a quotient, for many rows at once; the gap itself is computed
only where it can.

Only `matching_blocks.py` imports this module, and only for very many rows: Numba takes seconds to
import and compile. Nothing compiled is kept on disk.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fedcor.selectors.gaps import Groups, Rows
from fedcor.types import FloatArray

__all__ = ["improve"]

_NUMBERS = 16_384  # so many products at a time stay in the cache
_LARGEST = 128  # rows at a time
_ROUNDING = 1e-12


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
