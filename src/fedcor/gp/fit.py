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

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedcor.types import BoolArray, FloatArray

__all__ = ["Samples", "fit", "log_likelihood", "log_likelihood_gradient"]


@dataclass(frozen=True)
class Samples:
    """Measured loss changes of all clients, with weights.

    Attributes:
        Y: (m, N) samples, NaN where a client did not answer.
        w: (m,) weight of each sample in the likelihood.
    """

    Y: FloatArray
    w: FloatArray

    def by_answered(self) -> Iterator[tuple[BoolArray, FloatArray, FloatArray]]:
        """The samples in groups that the same clients answered.

        Yields:
            Who answered (N,), those clients' part of Y, and the weights of these samples.
        """
        answered = np.isfinite(self.Y)
        patterns, member = np.unique(answered, axis=0, return_inverse=True)
        for g, who in enumerate(patterns):
            rows = member.reshape(-1) == g
            if who.any():
                yield who, self.Y[rows][:, who], self.w[rows]


def log_likelihood(X: FloatArray, samples: Samples, s2: float) -> float:
    """Phi(X): the weighted log likelihood of the samples."""
    from scipy.linalg import cho_factor, cho_solve  # slow to import, and a fit does not need it

    total = 0.0
    for who, Y, w in samples.by_answered():
        Xo = X[who]
        n, d = Xo.shape
        factor = cho_factor(s2 * np.eye(d) + Xo.T @ Xo, lower=True)
        XY = Xo.T @ Y.T  # (d, m)
        explained = np.sum(XY * cho_solve(factor, XY), axis=0)  # (m,)
        quadratic = (np.sum(Y * Y, axis=1) - explained) / s2  # (m,)
        logdet = 2.0 * np.sum(np.log(np.diag(factor[0]))) + (n - d) * math.log(s2)
        total -= 0.5 * float(w @ (quadratic + logdet + n * math.log(2 * math.pi)))
    return total


def log_likelihood_gradient(X: FloatArray, samples: Samples, s2: float) -> FloatArray:
    """(N, d) gradient of Phi at X, in O(N d^2 + m N d); parameters as in `fit`."""
    return _gradient(X, list(samples.by_answered()), s2)


def _gradient(
    X: FloatArray, groups: list[tuple[BoolArray, FloatArray, FloatArray]], s2: float
) -> FloatArray:
    gradient = np.zeros_like(X)
    noise = s2 * np.eye(X.shape[1])
    for who, Y, w in groups:
        everyone = who.all()
        Xo = X if everyone else X[who]
        A_inv = np.linalg.inv(noise + Xo.T @ Xo)
        B = Y @ Xo @ A_inv  # (m, d) rows b'
        R = (Y - B @ Xo.T) / s2  # (m, n) rows r'
        part = R.T @ (w[:, None] * B) - w.sum() * (Xo @ A_inv)
        if everyone:
            gradient += part
        else:
            gradient[who] += part
    return gradient


def fit(
    X: FloatArray,
    samples: Samples,
    s2: float,
    steps: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> FloatArray:
    """Maximise Phi by `steps` of Adam, starting from X with fresh moments.

    Args:
        X: (N, d) embedding of the last fit. It is not changed.
        samples: Measured loss changes.
        s2: Noise variance.
        steps: Number of Adam steps.
        learning_rate: Learning rate of Adam.
        betas: Decay rates of Adam's first and second moments.
        epsilon: Added to Adam's denominator.

    Returns:
        (N, d) the new embedding.
    """
    groups = list(samples.by_answered())
    first, second = np.zeros_like(X), np.zeros_like(X)
    b1, b2 = betas
    X = X.copy()
    for step in range(1, steps + 1):
        g = _gradient(X, groups, s2)
        first = b1 * first + (1 - b1) * g
        second = b2 * second + (1 - b2) * g * g
        X += learning_rate * (first / (1 - b1**step)) / (np.sqrt(second / (1 - b2**step)) + epsilon)
    return X
