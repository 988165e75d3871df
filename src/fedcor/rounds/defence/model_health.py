"""Did the model go bad? What clients make of it says so; then the last good one is put back.

A model is good once more clients have delivered a usable update of it in a round than an unusable
one, and more a usable loss than an unusable one if losses were ever usable. It is bad where nothing
usable comes of it: every update is refused, or every loss that clients report of it is unusable
although losses of earlier models were not. One client may err or lie: it takes two to say that a
model is bad, if two can be reached, in one round or in several; and one usable update among many
refused ones does not make a model good.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fedcor.core.types import Array

_ENOUGH = 2  # clients that say that a model is bad


class Condition(Enum):
    """What is known of a model after a round that started from it."""

    GOOD = "good"  # it can be gone back to
    UNKNOWN = "unknown"  # too little came to tell
    BAD = "bad"  # it must not stay the model


@dataclass(frozen=True)
class Signs:
    """What came of a model in a round, as clients' ids.

    Attributes:
        delivered: Who sent a usable update.
        refused: Whose update was refused.
        usable_losses: Who reported a usable loss of it.
        unusable_losses: Who reported a loss that cannot be used.
        reachable: How many clients could be asked.
    """

    delivered: Collection[int]
    refused: Collection[int]
    usable_losses: Collection[int]
    unusable_losses: Collection[int]
    reachable: int


@dataclass(frozen=True)
class Health:
    """What is remembered of a model's condition from round to round.

    Attributes:
        heard: Whether a usable loss was ever reported. Where none ever was, they say nothing.
        doubters: Clients that have found the current model unusable.
    """

    heard: bool = False
    doubters: frozenset[int] = frozenset()

    def to_arrays(self) -> dict[str, Array]:
        """As named arrays, for a checkpoint."""
        doubters = np.array(sorted(self.doubters), dtype=np.int64)
        return {"heard": np.array(self.heard), "doubters": doubters}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Health:
        """Of what `to_arrays` returned; a checkpoint of an earlier version has nothing."""
        doubters = arrays.get("doubters", np.empty(0)).tolist()
        return cls(bool(arrays.get("heard", False)), frozenset(map(int, doubters)))


def examine(health: Health, signs: Signs) -> tuple[Condition, Health]:
    """The condition of the model that a round started from, and what is remembered of it.

    What is remembered is for the next model where this one is good or bad.
    """
    heard = health.heard or bool(signs.usable_losses)
    no_loss = health.heard and bool(signs.unusable_losses) and not signs.usable_losses
    if signs.delivered and not no_loss:
        losses_fit = not heard or _outnumber(signs.usable_losses, signs.unusable_losses)
        if losses_fit and _outnumber(signs.delivered, signs.refused):
            return Condition.GOOD, Health(heard)
        return Condition.UNKNOWN, Health(heard, health.doubters)
    doubters = set(health.doubters)
    doubters |= set() if signs.delivered else set(signs.refused)
    doubters |= set(signs.unusable_losses) if no_loss else set()
    if len(doubters) >= max(1, min(_ENOUGH, signs.reachable)):
        return Condition.BAD, Health(heard)
    return Condition.UNKNOWN, Health(heard, frozenset(doubters))


def _outnumber(well: Collection[int], ill: Collection[int]) -> bool:
    """Whether those of whom usable things came are the majority; also where nobody was asked."""
    return not ill or len(set(well)) > len(set(ill))
