"""Simulated faults, drawn from streams of (seed, round): every selector meets the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.checks import check_fraction
from fedcor.config import plain_keywords
from fedcor.errors import ConfigError
from fedcor.rng import stream
from fedcor.types import BoolArray, IntArray

__all__ = ["Faults"]


@plain_keywords
@dataclass(frozen=True)
class Faults:
    """What goes wrong in a simulated federation; by default, nothing.

    Args:
        availability: probability that a client can be reached in a round.
        dropout: probability that a client fails in a round although it looks reachable: it is
            sent models, but neither returns an update nor answers a question.
        stragglers: probability that a client has time for only a part of its local steps; the
            part is drawn uniformly.

    Example:
        >>> from fedcor import Faults
        >>> Faults(availability=0.9, dropout=0.1).available(seed=1, round=0, clients=5)
        array([0, 1, 2, 3, 4])
    """

    availability: float = 1.0
    dropout: float = 0.0
    stragglers: float = 0.0

    def __post_init__(self) -> None:
        for key in ("availability", "dropout", "stragglers"):
            check_fraction(key, getattr(self, key), closed=True)
        if self.availability == 0.0:
            raise ConfigError("availability", 0.0, "must be above 0, or nobody could ever train")

    def available(
        self, seed: int, round: int, clients: int, eligible: BoolArray | None = None
    ) -> IntArray:
        """Sorted ids of the clients that can be reached; if there is none, one drawn at random.

        Only of those who are `eligible`, (N,), where that is given.
        """
        reached = stream(seed, "availability", round).random(clients) < self.availability
        may = np.ones(clients, dtype=bool) if eligible is None else eligible
        if (reached & may).any():
            return np.flatnonzero(reached & may)
        ids = np.flatnonzero(may)
        return ids[stream(seed, "last resort", round).integers(len(ids), size=1)]

    def dropped(self, seed: int, round: int, clients: int) -> BoolArray:
        """(N,) which clients fail in this round."""
        return stream(seed, "drop-out", round).random(clients) < self.dropout

    def steps(self, seed: int, round: int, clients: int, local_steps: int) -> IntArray:
        """(N,) local steps that each client has time for, at least one."""
        rng = stream(seed, "stragglers", round)
        slow = rng.random(clients) < self.stragglers
        return np.where(slow, rng.integers(1, local_steps + 1, size=clients), local_steps)
