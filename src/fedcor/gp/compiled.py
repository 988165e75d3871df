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

_BLOCK = 2048  # clients whose numbers stay in the innermost cache between the loops


@njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _products(X: FloatArray, u: FloatArray, z: FloatArray) -> None:
    for i in range(z.size):
        total = 0.0
        for k in range(u.size):
            total += X[i, k] * u[k]
        z[i] = total


# Two loops and not one: so the compiler computes eight clients at once.
@njit(error_model="numpy", fastmath={"contract"})
def _condition(
    z: FloatArray, h: float, slope: float, s2: float, variance: FloatArray, benefit: FloatArray
) -> None:
    share = 1.0 / h  # a product is faster than a quotient
    for i in range(z.size):
        benefit[i] -= slope * z[i]
        left = variance[i] - share * (z[i] * z[i])
        variance[i] = left if left > s2 else s2


@njit(error_model="numpy")
def _gains(
    alpha: FloatArray, variance: FloatArray, benefit: FloatArray, left: BoolArray, out: FloatArray
) -> None:
    for i in range(out.size):
        out[i] = alpha[i] * benefit[i] / math.sqrt(variance[i])
    for i in range(out.size):
        out[i] = out[i] if left[i] else -np.inf


@njit(error_model="numpy", fastmath={"reassoc", "nnan", "nsz"})
def _largest(values: FloatArray) -> float:
    largest = -np.inf
    for i in range(values.size):
        largest = max(largest, values[i])
    return largest


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
    z_block, gain_block = np.empty(_BLOCK), np.empty(_BLOCK)
    best, gain = -1, -np.inf
    for start in range(0, len(X), _BLOCK):
        end = min(start + _BLOCK, len(X))
        z, gains = z_block[: end - start], gain_block[: end - start]
        _products(X[start:end], u, z)
        _condition(z, h, slope, s2, variance[start:end], benefit[start:end])
        _gains(alpha[start:end], variance[start:end], benefit[start:end], left[start:end], gains)
        largest = _largest(gains)
        if largest > gain:
            gain = largest
            for i in range(gains.size):
                if gains[i] == largest:
                    best = start + i
                    break
    return best, gain
