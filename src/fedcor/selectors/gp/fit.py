"""Fitting the embedding: the discounted log likelihood (the paper's Phi_t), its gradient, and Adam.

Notation
    X     client embeddings, row k is x_k                                       (N, d)
    s2    noise variance s^2
    K     X X' + s2 I, the covariance of a sample y ~ N(0, K)                   (N, N)
    Y     samples of loss changes, NaN where a client did not answer            (m, N)
    w     weight of each sample, theta^age                                      (m,)
    A     s2 I + X'X                                                            (d, d)
    b     A^-1 X'y                                                              (d,)
    r     (y - X b) / s2 = K^-1 y                                               (N,)

By Woodbury, with everything N x N cancelled:
    log p(y | X) = -1/2 [ (y'y - (X'y)'b) / s2  +  log|A| + (N - d) log s2  +  N log 2 pi ]
    d/dX log p   = r b' - X A^-1,          since K^-1 X = X A^-1 and X'K^-1 y = b
In a sample, clients that did not answer are marginalised out exactly: their rows of X take no part,
and get no gradient from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedcor.core.types import BoolArray, FloatArray
from fedcor.selectors.gp.posterior import blocks


@dataclass(frozen=True)
class Samples:
    """Measured loss changes of all clients, with weights.

    Attributes:
        Y: (m, N) samples, NaN where a client did not answer.
        w: (m,) weight of each sample in the likelihood.
    """

    Y: FloatArray
    w: FloatArray

    def by_answered(self) -> Iterator[Group]:
        """The samples in groups that the same clients answered."""
        answered = np.isfinite(self.Y)
        groups: dict[bytes, list[int]] = {}
        for row, who in enumerate(answered):
            groups.setdefault(who.tobytes(), []).append(row)
        for _, rows in sorted(groups.items()):
            who = answered[rows[0]]
            # Nothing is copied if everyone answered every time.
            Y = self.Y if len(rows) == len(self.Y) else self.Y[rows]
            if who.all():
                yield Group(who, Y, self.w[rows])
            elif who.any():
                yield Group(who, Y[:, who], self.w[rows])


@dataclass(frozen=True)
class Group:
    """Samples that the same clients answered.

    Attributes:
        who: (N,) who answered.
        Y: (m, n) their part of the samples.
        w: (m,) weight of each sample.
    """

    who: BoolArray
    Y: FloatArray
    w: FloatArray

    def pieces(self) -> Iterator[tuple[slice, slice | BoolArray, FloatArray]]:
        """Block by block of all clients: the block, who of it answered, and their part of Y."""
        start = 0
        for rows in blocks(len(self.who)):
            who = self.who[rows]
            count = int(np.count_nonzero(who))
            part = self.Y[:, start : start + count]
            start += count
            yield rows, slice(None) if count == len(who) else who, part


def log_likelihood_gradient(X: FloatArray, samples: Samples, s2: float) -> FloatArray:
    """(N, d) gradient of Phi at X, in O(N d^2 + m N d); parameters as in `fit`."""
    gradient = np.empty_like(X)
    for rows, block in _gradient(X, list(samples.by_answered()), s2):
        gradient[rows] = block
    return gradient


def _gradient(X: FloatArray, groups: list[Group], s2: float) -> Iterator[tuple[slice, FloatArray]]:
    """The gradient at X, block by block of clients.

    A block's rows of X may change once its gradient is there.
    """
    terms = [_terms(X, group, s2) for group in groups]
    for rows, *parts in zip(blocks(len(X)), *(group.pieces() for group in groups), strict=True):
        gradient = np.zeros_like(X[rows])
        for (_, who, part), (A_inv, B, wB, total) in zip(parts, terms, strict=True):
            Xb = X[rows][who]
            R = (part - B @ Xb.T) / s2  # (m, n) rows r'
            gradient[who] += R.T @ wB - total * (Xb @ A_inv)
        yield rows, gradient


def _terms(
    X: FloatArray, group: Group, s2: float
) -> tuple[FloatArray, FloatArray, FloatArray, float]:
    """What the gradient of every client needs: A^-1, the rows b' (m, d), w b', and the sum of w."""
    d, w = X.shape[1], group.w
    XX, YX = np.zeros((d, d)), np.zeros((len(w), d))
    for rows, who, part in group.pieces():
        Xb = X[rows][who]
        XX += Xb.T @ Xb
        YX += part @ Xb
    A_inv = np.asarray(np.linalg.inv(s2 * np.eye(d) + XX), dtype=np.float64)
    B = YX @ A_inv
    return A_inv, B, w[:, None] * B, w.sum()


def fit(
    X: FloatArray,
    samples: Samples,
    s2: float,
    steps: int,
    learning_rate: float,
) -> FloatArray:
    """Maximise Phi by `steps` of Adam, starting from X with fresh moments.

    Args:
        X: (N, d) embedding of the last fit. It is not changed.
        samples: Measured loss changes.
        s2: Noise variance.
        steps: Number of Adam steps.
        learning_rate: Learning rate of Adam.

    Returns:
        (N, d) the new embedding.
    """
    groups = list(samples.by_answered())
    first, second = np.zeros_like(X), np.zeros_like(X)
    b1, b2, epsilon = 0.9, 0.999, 1e-8  # Adam's own
    X = X.copy()
    for step in range(1, steps + 1):
        # The gradient is never there as a whole: a block's rows take their step at once.
        for rows, g in _gradient(X, groups, s2):
            m1, m2 = first[rows], second[rows]
            m1 *= b1
            m1 += (1 - b1) * g
            m2 *= b2
            m2 += (1 - b2) * g * g
            denominator = np.sqrt(m2 / (1 - b2**step)) + epsilon
            X[rows] += learning_rate * (m1 / (1 - b1**step)) / denominator
    return X
