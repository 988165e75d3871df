"""Passes over large populations, compiled with Numba.

`condition_and_find` does what `gp.posterior.Posterior` does with NumPy, in one go: the products
with the pick, the new variances and benefits, the gains and the largest of them. Each number is
read from memory once per pick.

`improve` finds what `matching_blocks` finds with NumPy. Whether a row can beat the best one so far
is decided without a root or a quotient, for many rows at once; the gap itself is computed only
where it can.

Sums have one order, whatever the machine is doing, but another one than NumPy's: results agree but
for rounding errors. The two modules import this one only for large populations: Numba takes seconds
to import and compile. Nothing compiled is kept on disk.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from fedcor.core.types import FloatArray

_BLOCK = 256  # clients whose numbers stay in the innermost cache between the loops
_ROUNDING = 1e-12
_NUMBERS = 16_384  # so many products at a time stay in the cache
_LARGEST = 128  # rows at a time


# Loops of their own, so that the compiler computes eight numbers at once.
@njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _products(X: FloatArray, u: FloatArray, z: FloatArray) -> None:
    for i in range(z.size):
        total = 0.0
        for k in range(u.size):
            total += X[i, k] * u[k]
        z[i] = total


@njit(error_model="numpy", fastmath={"contract"})
def _condition(z: FloatArray, pick: Any, clients: Any, rows: slice, floor: float) -> bool:
    """Condition a block; whether a squared gain in it may be above `floor`."""
    variance, benefit, alpha = clients.variance[rows], clients.benefit[rows], clients.alpha[rows]
    share, slope, s2, above = 1.0 / pick.h, pick.slope, pick.s2, 0
    for i in range(z.size):
        benefit[i] -= slope * z[i]
        left = variance[i] - share * (z[i] * z[i])
        variance[i] = left if left > s2 else s2
        worth = alpha[i] * benefit[i]
        above += 1 if worth * worth >= floor * variance[i] else 0
    return above > 0


@njit(error_model="numpy")
def condition_and_find(clients: Any, pick: Any) -> tuple[int, float]:
    """Condition all clients on a pick, and find the largest gain that is left.

    A block is searched only if one of its gains is as large as the best so far: their squares tell
    it without a root or a quotient.

    Args:
        clients: A `posterior.Clients`, whose variance and benefit are replaced by what is left.
        pick: A `posterior.Pick`.

    Returns:
        The first row with the largest gain, and that gain; row -1 if no gain is a number.
    """
    products = np.empty(_BLOCK)
    best, largest, floor = -1, -np.inf, 0.0
    for start in range(0, len(clients.X), _BLOCK):
        end = min(start + _BLOCK, len(clients.X))
        z, rows = products[: end - start], slice(start, end)
        _products(clients.X[rows], pick.u, z)
        if not _condition(z, pick, clients, rows, floor):
            continue
        for i in range(start, end):
            if clients.left[i]:
                gain = clients.alpha[i] * clients.benefit[i] / math.sqrt(clients.variance[i])
                if gain > largest:
                    best, largest = i, gain
                    floor = gain * gain * (1.0 - _ROUNDING) if gain > 0 else 0.0
    return best, largest


@njit(error_model="numpy", fastmath={"contract"})
def _may_align(
    z: FloatArray, block: Any, rows: slice, group: tuple[float, float], limits: tuple[float, float]
) -> bool:
    """Whether (S't)^2 reaches `floor` times |S|^2 for a row with S't > 0."""
    a, squares, aims = block.weights[rows], block.squares[rows], block.aims[rows]
    squared, aim = group
    shortest, floor = limits
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
    z: FloatArray, block: Any, rows: slice, group: tuple[float, float, float], best: float
) -> bool:
    """Whether |S|^2 - 2 S't A is at most `best` times A^2 for a row, but for rounding errors."""
    a, squares, aims = block.weights[rows], block.squares[rows], block.aims[rows]
    squared, aim, weight = group
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
def improve(block: Any, groups: Any, direction: bool, shortest: float, start: int) -> None:
    """Search a block of rows (`matching_blocks.Rows`) for better ones for `groups` (its `Groups`).

    Arguments as in `matching_blocks._improve`.
    """
    m = len(groups.V)
    size = min(_LARGEST, max(16, _NUMBERS // m))
    one = np.empty((1, size))
    for first in range(0, len(block.U), size):
        rows = slice(first, min(first + size, len(block.U)))
        a, squares, aims = block.weights[rows], block.squares[rows], block.aims[rows]
        if m == 1:
            products = one[:, : rows.stop - first]
            _products(block.U[rows], groups.V[0], products[0])
        else:
            products = np.dot(groups.V, block.U[rows].T)  # (m, rows)
        for j in range(m):
            z, best, squared, aim = products[j], groups.gaps[j], groups.squares[j], groups.aims[j]
            if direction and best < 0.0:
                floor = best * best * (1.0 - _ROUNDING)
                may = _may_align(z, block, rows, (squared, aim), (shortest, floor))
            elif direction or best == np.inf:
                may = True
            else:
                may = _may_be_close(z, block, rows, (squared, aim, groups.weights[j]), best)
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
