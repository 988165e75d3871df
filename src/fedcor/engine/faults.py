"""What goes wrong in a federation, drawn from streams of (seed, round), so that every selector meets the same faults.

availability  a client can be reached in a round with this probability
dropout       a client that looks reachable dies in a round with this probability: it is sent models, but neither
              delivers a training nor answers a question
stragglers    a client has time only for a part of its local steps, with this probability; the part is drawn uniformly
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.errors import ConfigError
from fedcor.rng import stream
from fedcor.types import BoolArray, IntArray

__all__ = ["Faults"]


@dataclass(frozen=True)
class Faults:
    availability: float = 1.0
    dropout: float = 0.0
    stragglers: float = 0.0

    def __post_init__(self) -> None:
        for key in ("availability", "dropout", "stragglers"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise ConfigError(key, getattr(self, key), "must lie in [0, 1]")
        if self.availability == 0.0:
            raise ConfigError("availability", 0.0, "must be above 0: nobody could ever train")

    def available(self, seed: int, round: int, clients: int) -> IntArray:
        """Sorted ids that can be reached; never nobody: a round waits until someone is there."""
        reached = np.flatnonzero(
            stream(seed, "availability", round).random(clients) < self.availability
        )
        return (
            reached
            if len(reached)
            else stream(seed, "last resort", round).integers(clients, size=1)
        )

    def dropped(self, seed: int, round: int, clients: int) -> BoolArray:
        """(N,) who dies in this round."""
        return stream(seed, "drop-out", round).random(clients) < self.dropout

    def steps(self, seed: int, round: int, clients: int, local_steps: int) -> IntArray:
        """(N,) local steps that each client has time for, at least one."""
        rng = stream(seed, "stragglers", round)
        slow = rng.random(clients) < self.stragglers
        return np.where(slow, rng.integers(1, local_steps + 1, size=clients), local_steps)
