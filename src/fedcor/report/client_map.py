"""A map of a run's clients: what its selector learnt of them, in two dimensions.

Clients that are close are alike to the selector. FedCor's embedding is scaled to unit length first,
so that distance reflects correlation; remembered updates are directions, and are scaled as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedcor.selectors.table import table_blocks
from fedcor.types import Array, FloatArray

__all__ = ["ClientMap", "client_map", "principal_components"]

_SOURCES = {  # array of a checkpoint -> what it is
    "selector/embedding": "learnt embedding",
    "selector/directions": "remembered updates",
}


@dataclass(frozen=True, eq=False)
class ClientMap:
    """Clients as points.

    Attributes:
        what: what is drawn: the learnt embedding, or remembered updates
        clients: (K,) those that have a point: everyone, or those whose update is remembered
        points: (K, 2) centred
        explained: the part of the variance that each axis shows
        round: after how many rounds it was learnt
    """

    what: str
    clients: tuple[int, ...]
    points: FloatArray
    explained: tuple[float, float]
    round: int


def client_map(checkpoint: Mapping[str, Array]) -> ClientMap | None:
    """The map of the clients in a checkpoint; None where the selector learns none.

    Args:
        checkpoint: named arrays, as `read_checkpoint` gives them; may be empty
    """
    for name, what in _SOURCES.items():
        wide = _table(checkpoint, name)
        if wide is None:
            continue
        lengths = np.linalg.norm(wide, axis=1)
        seen = np.flatnonzero(np.isfinite(lengths) & (lengths > 0))
        if len(seen) < 3:
            continue
        points, explained = principal_components(wide[seen] / lengths[seen, None])
        done = int(checkpoint["round"]) if "round" in checkpoint else 0
        return ClientMap(what, tuple(seen.tolist()), points, explained, done)
    return None


def _table(checkpoint: Mapping[str, Array], name: str) -> FloatArray | None:
    """(N, d) a table of the selector, which is in blocks where there are many clients."""
    blocks = [checkpoint[name]] if name in checkpoint else table_blocks(checkpoint, name)
    if any(block.ndim != 2 or block.dtype.kind != "f" for block in blocks):
        return None
    if len({block.shape[1] for block in blocks}) != 1:  # there is none, or it is damaged
        return None
    return np.concatenate(blocks, dtype=np.float64)


def principal_components(rows: FloatArray) -> tuple[FloatArray, tuple[float, float]]:
    """(K, 2) the first two principal components of `rows` (K, d), and the part of the variance that
    each has. The sign of an axis is that which makes its largest loading positive, so that the same
    numbers give the same picture.
    """
    centred = rows - rows.mean(axis=0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    total = float((s**2).sum())
    points = np.zeros((len(rows), 2))
    explained = [0.0, 0.0]
    for axis in range(min(2, len(s))):
        sign = 1.0 if vt[axis, np.abs(vt[axis]).argmax()] >= 0 else -1.0
        points[:, axis] = sign * u[:, axis] * s[axis]
        explained[axis] = float(s[axis] ** 2) / total if total > 0 else 0.0
    return points, (explained[0], explained[1])
