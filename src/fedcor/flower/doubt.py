"""Nothing usable comes of a model: is it the model's fault, the clients', or that of the past?

Two broken clients that are chosen together find every model unusable, and a selector that prefers
clients which never delivered chooses them together again and again. So, within one round:

1. *Others* are asked, who were not asked yet. The model is cleared where two of them deliver (one,
   if one is chosen), and more of them than are refused.
2. Where they do not clear it, or nobody is left to ask, the last good model is put back. Those who
   doubted train from it first.
3. Where they refuse the good model as well, the doubt was theirs: the model comes back, and so does
   what the strategy remembers. Nobody has a model put away twice in a round.
4. Where that happens to everyone who is asked, because their updates are far longer than usual, the
   past is wrong: these lengths replace it. It takes two, and more than half of those asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord

from fedcor.flower.quarantine import Task
from fedcor.flower.state import CurrentModel
from fedcor.flower.training import RoundStart
from fedcor.health import Condition, Signs
from fedcor.outliers import PARTS, NormLimits, judge, no_norms, remember
from fedcor.types import FloatArray, IntArray, State

__all__ = ["Doubt", "PutAway"]

_ENOUGH = 2  # clients, to clear a model, or to say that the past is wrong


@dataclass(frozen=True)
class PutAway:
    """A model that was replaced by the last good one, and all that belongs to it."""

    start: RoundStart
    arrays: ArrayRecord
    model: CurrentModel
    failed: frozenset[int]  # who had tried it in vain
    forgiven: tuple[tuple[int, Task], ...]  # faults that were taken to be the model's
    too_long: Mapping[int, FloatArray]  # lengths that it may have caused


@dataclass
class Doubt:
    """What the attempts at one round say of its model, of the clients and of the past.

    Attributes:
        doubters: Who found the model unusable that the round starts from now.
        witnesses: Who found the one unusable that was put away: they train first from the good one.
        refuted: Who found the good model unusable as well.
        too_long: Client -> lengths of its update, of those that were refused for them.
        put_away: The model in whose place the last good one is.
        asked_others: Whether the last attempt was of others, since those before them doubted.
    """

    doubters: set[int] = field(default_factory=set)
    witnesses: frozenset[int] = frozenset()
    refuted: set[int] = field(default_factory=set)
    too_long: dict[int, FloatArray] = field(default_factory=dict)
    put_away: PutAway | None = None
    asked_others: bool = False
    _needed: int = 0  # others that have to deliver; 0 where this attempt is not theirs
    _replaced: bool = False  # whether the past was replaced in this round

    def weigh(self, condition: Condition, signs: Signs) -> Condition:
        """The condition of the model, after an attempt of others also what they make of it."""
        needed, self._needed = self._needed, 0
        self.asked_others = needed > 0
        well, ill = len(set(signs.delivered)), len(set(signs.refused))
        if condition is Condition.BAD or not needed:
            return condition
        return condition if well >= needed and well > ill else Condition.BAD

    def ask_others(self, chosen: Collection[int]) -> None:
        """The next attempt is of clients that were not asked yet, since all `chosen` doubt."""
        self._needed = min(_ENOUGH, len(set(chosen)))

    def put_back(self, away: PutAway) -> None:
        """The last good model takes the place of the model."""
        self.put_away, self.witnesses = away, frozenset(self.doubters)
        self.doubters, self.too_long = set(), {}

    def take_back(self) -> PutAway:
        """The model that was put away comes back: the doubt was the clients' fault."""
        away = self.put_away
        assert away is not None, "put_back() comes first"
        self.refuted |= {*self.witnesses, *self.doubters}
        self.put_away, self.witnesses = None, frozenset()
        self.doubters, self.too_long = set(), {**away.too_long, **self.too_long}
        return away

    def witnesses_first(self, clients: IntArray) -> IntArray:
        """Those of `clients` who say whether the good model is better; all, if none of them can."""
        first = clients[np.isin(clients, sorted(self.witnesses))]
        return first if len(first) else clients

    def outvoted(self, past: State, round: int) -> State:
        """The past with the lengths that were refused: they count from now on."""
        return remember(past, self._lengths(), round, list(self.too_long))

    def replaced(self, asked: int, round: int) -> State | None:
        """A past of the refused lengths alone; None where too few of those `asked` speak for it.

        It is done once in a round, when there is nobody else to ask.
        """
        many = len(self.too_long)
        if self._replaced or many < _ENOUGH or 2 * many <= asked:
            return None
        self._replaced = True
        return self.outvoted(no_norms(PARTS), round)

    def usual_now(self, limits: NormLimits, past: State) -> list[int]:
        """Whose update was refused for its length, and would not be with this past."""
        refused = judge(limits, past, self._lengths()).refused
        return [client for client, wrong in zip(self.too_long, refused, strict=True) if not wrong]

    def _lengths(self) -> FloatArray:
        return np.array(list(self.too_long.values())).reshape(-1, PARTS)
