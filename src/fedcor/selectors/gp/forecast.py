"""How well a process predicts the loss changes of the clients that did not train.

Notation
    X       client embeddings, row k is x_k                                     (N, d)
    s2      noise variance s^2; loss changes are y ~ N(0, X X' + s2 I)
    K       the clients that trained, whose changes y_K are known; O all others who answered
    M       s2 I + X_K'X_K                                                      (d, d)
    b       M^-1 X_K'y_K                                                        (d,)
    F       X_O (s C^-T) with M = C C', so that F F' = s2 X_O M^-1 X_O'          (n, d)

Given y_K, the changes of the others are y_O ~ N(X_O b, F F' + s2 I): by Woodbury, no N x N matrix
is formed. Independent clients with the same variances would be y_i ~ N(0, x_i'x_i + s2) each, and
y_K would say nothing of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.selectors.gp.posterior import blocks

BINS = 20  # of equal probability under the standard normal distribution
_EDGES = np.array([NormalDist().inv_cdf(i / BINS) for i in range(1, BINS)])


@dataclass(frozen=True)
class Forecast:
    """What was foretold of n clients, beside what came.

    Attributes:
        residuals: (n,) standardised, (y_i - mean_i) / sd_i: standard normal if the process is
            right, though not independent of each other.
        errors: (n,) y_i - mean_i.
        changes: (n,) y_i.
        log_score: Log density of y_O given y_K, in nats per client; more is better.
        each: The same with each client foretold by itself: the mean of log p(y_i | y_K).
        independent: The same for independent clients.
    """

    residuals: FloatArray
    errors: FloatArray
    changes: FloatArray
    log_score: float
    each: float
    independent: float

    @property
    def means(self) -> FloatArray:
        """(n,) mean_i, the changes that were foretold."""
        return self.changes - self.errors

    @property
    def bins(self) -> IntArray:
        """(BINS,) residuals in each bin; about n / BINS each if the process is right."""
        places = np.searchsorted(_EDGES, self.residuals, side="right")
        return np.bincount(places, minlength=BINS)


def forecast(X: FloatArray, s2: float, y: FloatArray, trained: BoolArray) -> Forecast | None:
    """The forecast for all who did not train and answered.

    None if there is nobody, or if numbers are too far apart to be computed with.

    Args:
        X: (N, d) embedding.
        s2: Noise variance.
        y: (N,) the loss changes that came; NaN where a client did not answer.
        trained: (N,) who trained.
    """
    answered = np.isfinite(y)
    given, asked = answered & trained, answered & ~trained
    if not asked.any():
        return None
    try:
        with np.errstate(all="ignore"):
            found = _forecast(X, s2, y, given, asked)
    except np.linalg.LinAlgError:
        return None
    scores = np.isfinite([found.log_score, found.each, found.independent]).all()
    return found if scores and np.isfinite(found.residuals).all() else None


def _forecast(
    X: FloatArray, s2: float, y: FloatArray, given: BoolArray, asked: BoolArray
) -> Forecast:
    d, Xk, came = X.shape[1], X[given], y[asked]
    C = np.linalg.cholesky(s2 * np.eye(d) + Xk.T @ Xk)
    b = np.linalg.solve(C.T, np.linalg.solve(C, Xk.T @ y[given]))
    errors, variance, prior = (np.empty(len(came)) for _ in range(3))
    FF, Fr, start = np.zeros((d, d)), np.zeros(d), 0
    for rows in blocks(len(X)):  # F is never there as a whole
        Xo = X[rows][asked[rows]]
        F = math.sqrt(s2) * np.linalg.solve(C, Xo.T).T
        part = slice(start, start + len(Xo))
        errors[part] = came[part] - Xo @ b
        variance[part] = np.einsum("nd,nd->n", F, F) + s2
        prior[part] = np.einsum("nd,nd->n", Xo, Xo) + s2
        FF += F.T @ F
        Fr += F.T @ errors[part]
        start += len(Xo)
    return Forecast(
        residuals=errors / np.sqrt(variance),
        errors=errors,
        changes=came,
        log_score=_log_density(FF, Fr, s2, errors) / len(errors),
        each=_mean_log_density(errors, variance),
        independent=_mean_log_density(came, prior),
    )


def _mean_log_density(r: FloatArray, variance: FloatArray) -> float:
    """The mean of log N(r_i; 0, variance_i)."""
    return -0.5 * float(np.mean(r**2 / variance + np.log(2 * math.pi * variance)))


def _log_density(FF: FloatArray, Fr: FloatArray, s2: float, r: FloatArray) -> float:
    """log N(r; 0, F F' + s2 I), from F'F, F'r and r."""
    n, d = len(r), len(FF)
    C = np.linalg.cholesky(s2 * np.eye(d) + FF)
    a = np.linalg.solve(C, Fr)
    logdet = 2.0 * np.log(np.diag(C)).sum() + (n - d) * math.log(s2)
    return float(-0.5 * ((r @ r - a @ a) / s2 + logdet + n * math.log(2 * math.pi)))


def covariance_similarity(X: FloatArray, Y: FloatArray, s2: float) -> float:
    """tr(A'B) / sqrt(tr(A'A) tr(B'B)) of A = X X' + s2 I and B = Y Y' + s2 I, in O(N d^2)."""

    def product(X: FloatArray, Y: FloatArray) -> float:  # tr(A'B)
        cross, noise = X.T @ Y, s2 * (_squares(X) + _squares(Y)) + len(X) * s2**2
        return float(np.sum(cross * cross) + noise)

    with np.errstate(all="ignore"):  # NaN for numbers that are too large
        return product(X, Y) / math.sqrt(product(X, X) * product(Y, Y))


def _squares(X: FloatArray) -> float:
    """The sum of all squares."""
    return float(sum(np.sum(X[rows] * X[rows]) for rows in blocks(len(X))))
