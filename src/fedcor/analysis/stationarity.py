"""How much does the covariance of the loss changes move? The paper's cosine similarity (its Appendix D.3, with the root)."""

from __future__ import annotations

import numpy as np

from fedcor.types import FloatArray

__all__ = ["cosine_similarity", "expected_similarity"]


def cosine_similarity(A: FloatArray, B: FloatArray) -> float:
    """tr(A'B) / sqrt(tr(A'A) tr(B'B)); the paper's formula omits the root."""
    return float(np.sum(A * B) / np.sqrt(np.sum(A * A) * np.sum(B * B)))


def expected_similarity(changes: FloatArray) -> float:
    """What sampling noise alone leaves: the similarity of the covariances of two halves of one round's samples.

    Each half has half the samples, so this errs to the low side: a similarity above it shows no change at all.
    """
    half = len(changes) // 2
    return cosine_similarity(
        np.cov(changes[:half], rowvar=False), np.cov(changes[half:], rowvar=False)
    )
