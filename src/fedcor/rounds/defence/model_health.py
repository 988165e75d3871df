"""Whether the global model has gone bad, judged by the clients' updates and losses.

An engine then goes back to the last good model. A model is *good* once, in one round, more clients
delivered a usable update than an unusable one, and (if losses were ever usable) more reported a
usable loss than an unusable one. It is *bad* if nothing usable comes back: every update is refused,
or every reported loss is unusable although losses of earlier models were not.

One client may err or lie. So two clients must find the model bad, in one round or in several, if
two can be reached; and one usable update among many refused ones does not make a model good.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fedcor.core.types import Array

_ENOUGH = 2  # clients that must find a model bad


class Condition(Enum):
    """The condition of a model after a round that started from it."""

    GOOD = "good"  # a later round can go back to it
    UNKNOWN = "unknown"  # too few replies to tell
    BAD = "bad"  # it must be replaced


@dataclass(frozen=True)
class Signs:
    """The replies to a model in a round, as clients' ids.

    Attributes:
        delivered: Clients that sent a usable update.
        refused: Clients whose update was refused.
        usable_losses: Clients that reported a usable loss.
        unusable_losses: Clients that reported an unusable loss.
        reachable: How many clients could be asked.
    """

    delivered: Collection[int]
    refused: Collection[int]
    usable_losses: Collection[int]
    unusable_losses: Collection[int]
    reachable: int


@dataclass(frozen=True)
class Health:
    """The memory of a model's condition from round to round.

    Attributes:
        heard: Whether a usable loss was ever reported. If not, unusable ones mean nothing.
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
        """The inverse of `to_arrays`."""
        return cls(bool(arrays["heard"]), frozenset(map(int, arrays["doubters"].tolist())))


def examine(health: Health, signs: Signs) -> tuple[Condition, Health]:
    """The condition of the model that a round started from, and the memory after the round.

    Where the model is good or bad, the memory starts over: it is about the next model.
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


def _outnumber(usable: Collection[int], unusable: Collection[int]) -> bool:
    """Whether the clients with a usable reply are the majority; also True without any reply."""
    return not unusable or len(set(usable)) > len(set(unusable))
