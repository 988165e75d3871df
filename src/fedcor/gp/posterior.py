"""The posterior of a greedy selection, kept up to date: a pick costs one pass over the embedding.

Notation (as in `lowrank.py`)
    X, p    embeddings and weights of n clients                             (n, d), (n,)
    s2      noise variance
    A       what is left of the prior: I before the first pick              (d, d)
    v       sum of p_i x_i over everyone who is not picked                  (d,)
    h       variance of each client, x_k'A x_k + s2                         (n,)
    b       benefit of each client, x_k'A v + s2 p_k                        (n,)

Picking a client with embedding x, weight q and variance h_x = x'A x + s2 gives, with u = A x,

    A <- A - u u' / h_x         v <- v - q x

Since then A x = u s2 / h_x, both vectors follow from the products z = X u alone:

    h <- h - z^2 / h_x          b <- b - z (u'v + s2 q) / h_x
"""

from __future__ import annotations

import numpy as np

from fedcor.gp.blocks import blocks
from fedcor.types import BoolArray, FloatArray

__all__ = ["Posterior"]


class Posterior:
    """What conditioning on one picked client after another leaves of n clients.

    Args:
        X: (n, d) their embeddings.
        p: (n,) their weights.
        s2: Noise variance.
        v: (d,) sum of p_i x_i over everyone, also over clients that are not among the n.
    """

    def __init__(self, X: FloatArray, p: FloatArray, s2: float, v: FloatArray) -> None:
        self.X, self.p, self.s2 = X, p, s2
        self.A, self.v = np.eye(X.shape[1]), v.copy()
        self.variance, self.benefit = np.empty(len(X)), np.empty(len(X))
        for rows in blocks(len(X)):
            Xb = X[rows]
            self.variance[rows] = np.einsum("nd,nd->n", Xb, Xb) + s2
            self.benefit[rows] = Xb @ v + s2 * p[rows]

    def gains(self, alpha: FloatArray) -> FloatArray:
        """(n,) gain of every client, picked or not; alpha: (n,) annealing factors."""
        return alpha * self.benefit / np.sqrt(self.variance)

    def best(self, alpha: FloatArray, left: BoolArray) -> tuple[int, float]:
        """The first row with the largest gain of those that are `left`, and that gain."""
        best, gain = -1, -np.inf
        for rows in blocks(len(self.p)):
            g = alpha[rows] * self.benefit[rows] / np.sqrt(self.variance[rows])
            g[~left[rows]] = -np.inf
            row = int(np.argmax(g))
            if g[row] > gain or best < 0:
                best, gain = rows.start + row, float(g[row])
        return best, gain

    def pick(self, x: FloatArray, q: float) -> None:
        """Condition on a client with embedding x, (d,), and weight q, together with its noise."""
        u = self.A @ x
        h = max(float(x @ u), 0.0) + self.s2
        slope = (float(u @ self.v) + self.s2 * q) / h
        for rows in blocks(len(self.X)):
            z = self.X[rows] @ u
            self.benefit[rows] -= slope * z
            variance = self.variance[rows]
            variance -= z * z / h
            np.maximum(variance, self.s2, out=variance)
        self.A -= np.outer(u, u) / h
        self.v -= q * x
