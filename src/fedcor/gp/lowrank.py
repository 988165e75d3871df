"""Greedy posterior selection (the paper's Algorithm 1) in d dimensions: nothing N x N is ever formed.

Notation (the paper's letters; its X is our X transposed, so that a client's embedding is a contiguous row)
    X       client embeddings, row k is x_k                                 (N, d)
    s2      noise variance s^2; the prior covariance is Sigma = X X' + s2 I
    p       client weights                                                  (N,)
    alpha   annealing, beta^tau_k                                           (N,)
    A       what is left of the prior: I before the first pick              (d, d)
    v       sum of p_i x_i over the clients not picked                      (d,)

Among the clients not yet picked the posterior covariance stays X A X' + s2 I: conditioning on client k removes
u u' / (x_k'A x_k + s2) with u = A x_k from A, and a picked client, conditioned on together with its noise, has a zero row.
With a zero prior mean, picking k lowers the expected global loss change by

    gain_k = alpha_k (x_k'A v + s2 p_k) / sqrt(x_k'A x_k + s2)

which is the paper's alpha_k sum_i p_i sigma_i r_ik under the posterior so far. A pick costs two products with X: O(N d).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.types import FloatArray, IntArray

__all__ = ["Picks", "select", "select_proxy"]


@dataclass(frozen=True)
class Picks:
    """The chosen clients in the order of choice, and what each pick was worth."""

    clients: IntArray  # (C,)
    gain: FloatArray  # (C,) expected decrease of the global loss, annealed, given the picks before
    alone: FloatArray  # (C,) the same with no pick before it: gain = alone - redundancy
    annealing: FloatArray  # (C,) alpha_k at the pick

    @property
    def redundancy(self) -> FloatArray:
        """(C,) what the earlier picks had already covered (negative where they made this one more valuable)."""
        return self.alone - self.gain


def select(
    X: FloatArray, p: FloatArray, alpha: FloatArray, s2: float, count: int, candidates: IntArray
) -> Picks:
    """The `count` clients among `candidates` that Algorithm 1 picks, for the prior N(0, X X' + s2 I)."""
    count = min(count, len(candidates))
    Xc, pc, ac = (
        X[candidates],
        p[candidates],
        alpha[candidates],
    )  # only candidates can be picked; all are cared for
    v = p @ X
    left = np.ones(len(candidates), dtype=bool)
    A = np.eye(X.shape[1])
    order = np.empty(count, dtype=np.int64)
    gain = np.empty(count)
    alone = _gains(Xc, pc, ac, s2, A, v)[0]
    for j in range(count):
        g, variance = _gains(Xc, pc, ac, s2, A, v)
        k = int(np.argmax(np.where(left, g, -np.inf)))  # line 7
        order[j], gain[j], left[k] = k, g[k], False  # line 8
        u = A @ Xc[k]
        A -= np.outer(u, u) / variance[k]  # line 9
        v -= pc[k] * Xc[k]
    return Picks(candidates[order], gain, alone[order], ac[order])


def _gains(
    X: FloatArray, p: FloatArray, alpha: FloatArray, s2: float, A: FloatArray, v: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Gain and posterior variance of every client, as if none of them were picked. (N,), (N,)"""
    XA = X @ A
    variance = np.maximum(np.einsum("nd,nd->n", XA, X), 0.0) + s2
    return alpha * (XA @ v + s2 * p) / np.sqrt(variance), variance


def select_proxy(
    X: FloatArray, p: FloatArray, s2: float, count: int, candidates: IntArray
) -> IntArray:
    """The paper's proxy algorithm: the `count` candidates with the largest sum_i p_i Sigma_ik, best first."""
    score = X[candidates] @ (p @ X) + s2 * p[candidates]  # (n,)
    return candidates[np.argsort(-score, kind="stable")[:count]]
