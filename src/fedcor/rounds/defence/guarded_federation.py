"""The federation as a selector sees it under a `Defence`: clipped reports, capped participation.

Both are off by default; the selector then sees the federation itself. The same on every engine.

Clipped reports: losses and loss changes are clipped to what is usual among the answers to the same
question (`fedcor.rounds.loss_screening.clip_reports`).

Capped participation: a client that was chosen too often in the last rounds is not offered.

Notation
    N       clients that may be chosen: all, or those that the rules make eligible     scalar
    C       clients chosen in a round                                                  scalar
    W       rounds of the window, the current one included                             scalar
    c_k     rounds of the window before this one in which client k was chosen          scalar
    L       the most rounds of a window in which one client may be chosen              scalar

A client's fair share of W rounds is W C / N of them. The window is the shortest one in which the
fair share is at least TURNS rounds, so that a multiple of it is a whole number to within a quarter.
A client with c_k >= L is not offered to the selector in this round. Where fewer than C clients
would be left, L is raised for this round until there are C: a cap never shrinks a round.

The memory ("turns") is the choices of the last rounds, as pairs of a client and a round. A client
that joins later has none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedcor.core.types import (
    Array,
    Federation,
    FloatArray,
    IntArray,
    Outcome,
    Selector,
    State,
    selector_traits,
)
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.loss_screening import clip_reports

TURNS = 4  # a client's fair share of a window, in rounds


def no_turns() -> State:
    """The memory before the first round: nobody was chosen."""
    nobody = np.empty(0, dtype=np.int64)
    return {"clients": nobody, "rounds": nobody}


def read_turns(arrays: Mapping[str, Array]) -> State:
    """The memory in a checkpoint, which has no arrays while nobody was counted.

    Raises:
        KeyError, ValueError: The arrays are something else.
    """
    if not arrays:
        return no_turns()
    clients, rounds = arrays["clients"], arrays["rounds"]
    kinds = {clients.dtype.kind, rounds.dtype.kind}
    if kinds != {"i"} or clients.ndim != 1 or clients.shape != rounds.shape or (clients < 0).any():
        raise ValueError("turns are not rounds of clients")
    return dict(arrays)


@dataclass(frozen=True)
class Cap:
    """The cap on participation in a round.

    Attributes:
        clients: N.
        chosen: C.
        most_share: The most rounds that a client may have, in multiples of its fair share.

    Example:
        >>> Cap(50, 10, 1.0).window, Cap(100, 5, 1.0).window, Cap(3, 3, 1.0).window
        (20, 80, 4)
    """

    clients: int
    chosen: int
    most_share: float

    @property
    def window(self) -> int:
        """W."""
        return max(1, -(-TURNS * self.clients // max(1, self.chosen)))

    def offered(self, turns: State, round: int, available: IntArray) -> IntArray:
        """Sorted ids of the clients that a selector is offered, a subset of `available`.

        Args:
            turns: The choices of earlier rounds.
            round: t, the number of this round.
            available: Sorted ids of the clients that can be reached.
        """
        recent = turns["clients"][turns["rounds"] > round - self.window]
        times = np.bincount(recent, minlength=int(available.max(initial=-1)) + 1)[available]  # c_k
        fair = min(self.window * self.chosen / max(1, self.clients), float(self.window))
        limit = max(1, math.floor(self.most_share * fair + 1e-9))
        wanted = min(self.chosen, len(available))
        if wanted:
            limit = max(limit, int(np.partition(times, wanted - 1)[wanted - 1]) + 1)
        return available[times < limit]

    def count(self, turns: State, round: int, selected: IntArray) -> State:
        """The memory with the choice of a round, and without what no later round can ask for.

        Args:
            turns: The choices of earlier rounds.
            round: t, the number of the round.
            selected: The clients that were chosen; one that is in it twice counts once.
        """
        new = np.unique(selected).astype(np.int64)
        rounds = np.concatenate([turns["rounds"], np.full(len(new), round, dtype=np.int64)])
        kept = rounds > round + 1 - self.window
        return {"clients": np.concatenate([turns["clients"], new])[kept], "rounds": rounds[kept]}


def _cap(defence: Defence, selector: Selector, clients: int) -> Cap | None:
    """The cap, if there is one: the selector must say how many clients it chooses."""
    chosen = selector_traits(selector).clients_per_round
    if not defence.most_share or chosen is None:
        return None
    return Cap(clients, int(chosen), defence.most_share)


def guard_federation(
    defence: Defence,
    turns: State,
    selector: Selector,
    federation: Federation,
    clients: int | None = None,
) -> Federation:
    """The federation as the selector sees it in a round.

    Args:
        defence: The settings.
        turns: The choices of the last rounds.
        selector: The selector of this round. Without `clients_per_round` there is no cap.
        federation: Answers the questions.
        clients: How many clients may be chosen, reachable or not, and share the rounds among them;
            None for all.
    """
    available = federation.available
    cap = _cap(defence, selector, len(federation.weights) if clients is None else clients)
    if cap is not None:
        available = cap.offered(turns, federation.round, available)
    elif not defence.clip_reports:
        return federation
    return _GuardedFederation(federation, available, defence.clip_reports)


def guard_outcome(defence: Defence, outcome: Outcome) -> Outcome:
    """A round's outcome as the selector sees it: its losses are reports, too."""
    if not defence.clip_reports:
        return outcome
    return dataclasses.replace(
        outcome,
        read_losses=lambda: clip_reports(outcome.losses, defence.clip_reports),
        read_rms_losses=lambda: clip_reports(outcome.rms_losses, defence.clip_reports),
    )


def after_round(
    defence: Defence, turns: State, selector: Selector, outcome: Outcome, clients: int
) -> State:
    """The memory after a round; the same value where participation is not capped.

    Args:
        defence: The settings.
        turns: The choices of earlier rounds.
        selector: The selector of this round.
        outcome: The outcome of this round.
        clients: How many clients may be chosen.
    """
    cap = _cap(defence, selector, clients)
    return turns if cap is None else cap.count(turns, outcome.round, outcome.selected)


class _GuardedFederation:
    """A federation with fewer clients on offer and clipped reports."""

    def __init__(self, whole: Federation, available: IntArray, limit: float) -> None:
        self._whole, self._limit = whole, limit
        self.round, self.weights, self.rng = whole.round, whole.weights, whole.rng
        self.available = available.copy()
        self.available.flags.writeable = False
        # Losses that are known without a question go into the record unclipped.
        if hasattr(whole, "known_losses"):
            self.known_losses = whole.known_losses

    def losses(self, clients: IntArray) -> FloatArray:
        """As the federation's, clipped."""
        return clip_reports(self._whole.losses(clients), self._limit)

    def loss_changes(self, selection: IntArray, clients: IntArray | None = None) -> FloatArray:
        """As the federation's, of `clients` or of all that can be reached, clipped."""
        whole = self._whole
        # A user's own federation may not have the second argument.
        asked = whole.loss_changes(selection, *(() if clients is None else (clients,)))
        return clip_reports(asked, self._limit)
