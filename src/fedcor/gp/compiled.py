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

from fedcor.types import BoolArray, FloatArray

__all__ = ["condition_and_find"]

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
