"""Clients whose labels are drawn at random, so that their data teaches nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcor.errors import ConfigError
from fedcor.types import IntArray

__all__ = ["noisy_clients", "randomise_labels"]


def randomise_labels(
    labels: IntArray,
    classes: int | None,
    parts: Sequence[IntArray],
    fraction: float,
    rng: np.random.Generator,
) -> IntArray:
    """The labels, with those of a fraction of the clients replaced by uniform draws.

    Args:
        labels: `(n,)` the label of each sample; left as it is.
        classes: Labels are drawn from 0 .. `classes - 1`.
        parts: The sample indices of each client.
        fraction: The fraction of the clients that have random labels, from 0 to 1.
        rng: The only source of randomness.

    Returns:
        `(n,)` a copy of `labels` with the changes.

    Raises:
        ConfigError: There are no labels (`classes` is None), or no client has random ones.
    """
    if classes is None:
        raise ConfigError("noisy_clients", fraction, "draws labels, but the targets are floats")
    labels = labels.copy()
    for client in noisy_clients(len(parts), fraction, rng):
        labels[parts[client]] = rng.integers(classes, size=len(parts[client]))
    return labels


def noisy_clients(clients: int, fraction: float, rng: np.random.Generator) -> IntArray:
    """The clients with random labels, ascending: what `randomise_labels` draws first from `rng`."""
    count = round(fraction * clients)
    if fraction > 0 and not count:
        raise ConfigError("noisy_clients", fraction, f"is less than one of {clients} clients")
    return np.sort(rng.choice(clients, size=count, replace=False))
