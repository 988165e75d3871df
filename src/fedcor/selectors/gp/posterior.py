"""The posterior of a greedy selection, kept up to date: a pick costs one pass over the embedding.

Notation (as in `greedy.py`)
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

A pick and the next best client take one pass, in blocks of clients that stay in a core's own cache:
a large population costs its matrix products, and not the memory between them. From
`COMPILED_FROM` clients on, the pass is compiled (`compiled.py`) where Numba is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.selectors.numba_passes import compiled_pass

BLOCK = 4096


def blocks(count: int) -> Iterator[slice]:
    """0 .. count - 1 in blocks."""
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))


def of_candidates(candidates: IntArray, *arrays: FloatArray) -> tuple[FloatArray, ...]:
    """The candidates' rows of arrays over all clients; if everyone is one, nothing is copied."""
    if np.array_equal(candidates, np.arange(len(arrays[0]))):
        return arrays
    return tuple(array[candidates] for array in arrays)


class Clients(NamedTuple):
    """All candidates during a selection, as the compiled pass takes them."""

    X: FloatArray  # (n, d) embeddings
    variance: FloatArray  # (n,) h; changed in place
    benefit: FloatArray  # (n,) b; changed in place
    alpha: FloatArray  # (n,) annealing factors
    left: BoolArray  # (n,) whether a client can still be picked


class Pick(NamedTuple):
    """A picked client, as everyone is conditioned on it."""

    u: FloatArray  # (d,) A x
    h: float  # x'A x + s2
    slope: float  # (u'v + s2 q) / h
    s2: float  # noise variance


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
        self._pass = compiled_pass("condition_and_find", len(X))
        if self._pass is not None:
            self.X = np.ascontiguousarray(X)
        for rows in blocks(len(X)):
            Xb = X[rows]
            self.variance[rows] = np.einsum("nd,nd->n", Xb, Xb) + s2
            self.benefit[rows] = Xb @ v + s2 * p[rows]

    def gains(self, alpha: FloatArray, rows: slice = slice(None)) -> FloatArray:
        """Gains of all clients or of some, picked or not; alpha: (n,) annealing factors."""
        return alpha[rows] * self.benefit[rows] / np.sqrt(self.variance[rows])

    def gain(self, row: int, alpha: float) -> float:
        """The gain of one client."""
        return float(alpha * self.benefit[row] / np.sqrt(self.variance[row]))

    def best(
        self, alpha: FloatArray, left: BoolArray, pick: Pick | None = None
    ) -> tuple[int, float]:
        """The first row with the largest gain of those that are `left`, and that gain.

        With `pick`, everyone is conditioned on it before, in the same pass.
        """
        best, gain = -1, -np.inf
        for rows in blocks(len(self.p)):
            if pick is not None:
                self._condition(rows, pick)
            g = self.gains(alpha, rows)
            g[~left[rows]] = -np.inf
            row = int(np.argmax(g))
            if g[row] > gain or best < 0:
                best, gain = rows.start + row, float(g[row])
        return best, gain

    def pick(self, x: FloatArray, q: float) -> None:
        """Condition on a client with embedding x, (d,), and weight q, together with its noise."""
        pick = self._pick(x, q)
        for rows in blocks(len(self.X)):
            self._condition(rows, pick)

    def pick_and_find(
        self, x: FloatArray, q: float, alpha: FloatArray, left: BoolArray
    ) -> tuple[int, float]:
        """`pick`, then `best`, in one pass."""
        pick = self._pick(x, q)
        if self._pass is None:
            return self.best(alpha, left, pick)
        clients = Clients(self.X, self.variance, self.benefit, alpha, left)
        best, gain = self._pass(clients, pick)
        return (best, gain) if best >= 0 else self.best(alpha, left)

    def _pick(self, x: FloatArray, q: float) -> Pick:
        """Condition A and v on a client."""
        u = self.A @ x
        h = max(float(x @ u), 0.0) + self.s2
        slope = (float(u @ self.v) + self.s2 * q) / h
        self.A -= np.outer(u, u) / h
        self.v -= q * x
        return Pick(u, h, slope, self.s2)

    def _condition(self, rows: slice, pick: Pick) -> None:
        z = self.X[rows] @ pick.u
        self.benefit[rows] -= pick.slope * z
        variance = self.variance[rows]
        variance -= z * z / pick.h
        np.maximum(variance, self.s2, out=variance)
