"""How much data a client has, as far as it is believed.

What a client says (`num-examples`) is its weight in the mean, so one that exaggerates would be the
mean. What is believed has two bounds:

    most times the population   1000 times the lower median of what all clients say
    most times its own past     twice the largest number that it was believed before

Where the largest client has up to 1000 times the data of the smallest, the first bound touches
nobody. A client whose data grows is believed twice as much each time it trains. A smaller number is
believed at once, and does not lower what is believed later.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedcor.types import FloatArray

__all__ = ["SIZE", "cap_sizes", "largest_believed"]

SIZE = "num-examples"  # the metric that Flower's strategies weight replies by

_MOST_MEDIANS = 1000.0
_MOST_GROWTH = 2.0


def cap_sizes(said: FloatArray) -> FloatArray:
    """(N,) what clients say, NaN where nothing is known, within the bound of the population."""
    known = np.sort(said[np.isfinite(said)])
    if not len(known):
        return said
    capped: FloatArray = np.minimum(said, _MOST_MEDIANS * known[(len(known) - 1) // 2])
    return capped


def largest_believed(said: Mapping[int, float], before: FloatArray) -> dict[int, float]:
    """Client -> what is believed of what it says now.

    Args:
        said: Client -> what it says; above 0.
        before: (N,) The largest number that each was believed before, NaN for none.
    """
    now = before.copy()
    for client, given in said.items():
        now[client] = np.fmin(given, _MOST_GROWTH * before[client])
    # A client that says less than before stands in the population with its larger number.
    capped = cap_sizes(np.fmax(now, before))
    return {client: float(min(now[client], capped[client])) for client in said}
