"""The utility of a client in Oort (Lai et al., OSDI 2021): what its data are worth, and its time.

Notation
    U_k     n_k times the root mean square loss of client k's samples, from its last training (m,)
    R       number of the round, from 1                                                     scalar
    L_k     round in which client k last took part                                            (m,)
    d_k     seconds that client k takes; NaN where nobody knows                               (m,)
    T       preferred duration of a round; infinite for no preference                       scalar
    W       rounds that the pacer looks at                                                  scalar

    util_k = (clipped and scaled U_k + sqrt(0.1 ln R / L_k)) (T / d_k)^alpha   if d_k > T
             (clipped and scaled U_k + sqrt(0.1 ln R / L_k))                   else
"""

from __future__ import annotations

import numpy as np

from fedcor.types import FloatArray, IntArray

__all__ = ["draw", "falls", "preferred_duration", "scaled", "slowdown", "uncertainty"]

# The smallest utility is not worth nothing: as in the released code.
_BELOW = 0.001


def scaled(utilities: FloatArray, clip: float) -> FloatArray:
    """(m,) U_k, clipped at the quantile `clip`, between 0 and 1.

    Args:
        utilities: (m,) U_k.
        clip: The quantile above which a utility counts as that quantile.

    Example:
        >>> scaled(np.array([1.0, 2.0, 3.0, 100.0]), clip=2 / 3).round(2)
        array([0. , 0.5, 1. , 1. ])
    """
    if not len(utilities):
        return utilities
    clipped = np.minimum(utilities, np.quantile(utilities, clip))
    low, high = float(clipped.min()), float(clipped.max())
    low -= _BELOW * abs(low)
    between: FloatArray = (clipped - low) / (high - low) if high > low else np.zeros_like(clipped)
    return between


def uncertainty(weight: float, round: int, last: IntArray) -> FloatArray:
    """(m,) sqrt(weight ln R / L_k): the longer ago its utility was measured, the larger.

    >>> uncertainty(0.1, 100, np.array([1, 100])).round(3)
    array([0.679, 0.068])
    """
    terms: FloatArray = np.sqrt(weight * np.log(round) / last)
    return terms


def preferred_duration(durations: FloatArray, percentile: float) -> float:
    """T, a percentile of the durations that are known; infinite where none is, and at 100."""
    known = durations[np.isfinite(durations)]
    if not len(known) or percentile >= 100.0:
        return np.inf
    return float(np.quantile(known, percentile / 100.0))


def slowdown(durations: FloatArray, preferred: float, penalty: float) -> FloatArray:
    """(m,) (T / d_k)^penalty for clients slower than T; 1 for the others, and where d_k is unknown.

    >>> slowdown(np.array([5.0, 10.0, 20.0, np.nan]), preferred=10.0, penalty=2.0)
    array([1.  , 1.  , 0.25, 1.  ])
    """
    slow = durations > preferred  # False for NaN
    factors = np.ones(len(durations))
    factors[slow] = (preferred / durations[slow]) ** penalty
    return factors


def falls(gained: FloatArray, rounds: int) -> bool:
    """Whether the pacer lets slower clients in: W rounds gained less than the W before them.

    Args:
        gained: (2W,) The summed U_k of those who took part in each of the last 2W rounds.
        rounds: How many rounds there were. The pacer looks every W rounds, once there are 2W.
    """
    window = len(gained) // 2
    if rounds < 2 * window or rounds % window:
        return False
    return bool(gained[:window].sum() > gained[window:].sum())


def draw(rng: np.random.Generator, clients: IntArray, weights: FloatArray, count: int) -> IntArray:
    """(count,) of the clients, one after another, in proportion to their weights; none twice.

    The largest of log weight + Gumbel noise are such a draw, in O(m).
    """
    smallest = np.finfo(np.float64).tiny  # who weighs nothing comes last
    keys = np.log(np.maximum(weights, smallest)) + rng.gumbel(size=len(clients))
    if count < len(clients):
        top = np.argpartition(-keys, count)[:count]
        clients, keys = clients[top], keys[top]
    return clients[np.argsort(-keys, kind="stable")]
