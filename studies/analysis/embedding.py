"""The map of clients: do embeddings show which clients hold the same label? (Paper, Sec. 5.5.)"""

from __future__ import annotations

import numpy as np

from fedcor.core.errors import MissingExtraError
from fedcor.core.rng import stream_seed
from fedcor.core.types import FloatArray, IntArray


def normalised(X: FloatArray) -> FloatArray:
    """The rows of X `(N, d)` scaled to unit length, so that distance reflects correlation."""
    unit: FloatArray = X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)
    return unit


def purity(X: FloatArray, labels: IntArray, neighbours: int) -> float:
    """How often the nearest neighbours of a client hold its label, from 0 to 1.

    Args:
        X: `(N, d)` client embeddings.
        labels: `(N,)` the label that each client holds.
        neighbours: How many nearest neighbours (by correlation) of each client count.
    """
    similarity = normalised(X) @ normalised(X).T
    np.fill_diagonal(similarity, -np.inf)
    nearest = np.argsort(-similarity, axis=1)[:, :neighbours]  # (N, k)
    return float(np.mean(labels[nearest] == labels[:, None]))


def chance_purity(labels: IntArray) -> float:
    """The expected purity of neighbours drawn at random."""
    same = labels[:, None] == labels
    return float((same.sum() - len(labels)) / (len(labels) * (len(labels) - 1)))


def project(X: FloatArray, seed: int) -> FloatArray:
    """(N, 2) t-SNE of the normalised embeddings X `(N, d)`; the same for the same seed."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "sim") from error

    tsne = TSNE(
        perplexity=min(10.0, (len(X) - 1) / 3),
        init="pca",
        random_state=stream_seed(seed, "t-SNE") % 2**32,
        n_jobs=1,
    )
    points: FloatArray = tsne.fit_transform(normalised(X)).astype(np.float64)
    return points
