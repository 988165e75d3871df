"""How much does the covariance of the loss changes move between rounds? (Paper, Appendix D.3.)"""

from __future__ import annotations

import numpy as np

from fedcor.core.types import FloatArray


def cosine_similarity(A: FloatArray, B: FloatArray) -> float:
    """tr(A'B) / sqrt(tr(A'A) tr(B'B)) of two matrices; the paper's formula omits the root."""
    return float(np.sum(A * B) / np.sqrt(np.sum(A * A) * np.sum(B * B)))


def expected_similarity(changes: FloatArray) -> float:
    """The similarity that sampling noise alone leaves: of the covariances of two halves of a round.

    Each half has half the samples, so the estimate is too low rather than too high: a similarity
    above it shows no change at all.

    Args:
        changes: `(m, N)` loss changes of the selections of one round.
    """
    half = len(changes) // 2
    return cosine_similarity(
        np.cov(changes[:half], rowvar=False), np.cov(changes[half:], rowvar=False)
    )
