"""A cap on how often one client is chosen: nobody has more than a multiple of its fair share.

Notation
    N       clients that may be chosen: all, or those whom rules make eligible         scalar
    C       clients chosen in a round                                                  scalar
    W       rounds of the window, the current one included                             scalar
    c_k     rounds of the window before this one in which client k was chosen          scalar
    L       the most rounds of a window in which one client may be chosen              scalar

A client's fair share of W rounds is W C / N of them. The window is the shortest one in which the
fair share is at least TURNS rounds, so that a multiple of it is a whole number to within a quarter.
Who has c_k >= L is not offered to the selector in this round. Where fewer than C clients would be
left, L is raised for this round until there are C: a cap never shrinks a round.

What is remembered is the choices of the last rounds, as pairs of a client and a round. A client
that joins later has none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

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
    """What is remembered before the first round."""
    nobody = np.empty(0, dtype=np.int64)
    return {"clients": nobody, "rounds": nobody}


def read_turns(arrays: Mapping[str, Array]) -> State:
    """What a checkpoint holds of past choices; nothing in one of an earlier version.

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


def window_of(clients: int, chosen: int) -> int:
    """W, for N clients of which C are chosen in a round.

    >>> window_of(50, 10), window_of(100, 5), window_of(3, 3)
    (20, 80, 4)
    """
    return max(1, -(-TURNS * clients // max(1, chosen)))


def offered(
    past: State, round: int, available: IntArray, clients: int, chosen: int, most_share: float
) -> IntArray:
    """Sorted ids of the clients that a selector is offered, some of `available`.

    Args:
        past: The choices of earlier rounds.
        round: t, the number of this round.
        available: Sorted ids of the clients that can be reached.
        clients: N.
        chosen: C.
        most_share: The most rounds that a client may have, in multiples of its fair share.
    """
    window = window_of(clients, chosen)
    times = _times(past, round - window + 1, available)  # c_k
    fair = min(window * chosen / max(1, clients), float(window))
    limit = max(1, math.floor(most_share * fair + 1e-9))
    wanted = min(chosen, len(available))
    if wanted:
        limit = max(limit, int(np.partition(times, wanted - 1)[wanted - 1]) + 1)
    return available[times < limit]


def count_turns(past: State, round: int, selected: IntArray, clients: int, chosen: int) -> State:
    """The past with the choice of a round. What no later round can ask for is forgotten.

    Args:
        past: The choices of earlier rounds.
        round: t, the number of the round.
        selected: The clients that were chosen; one that is in it twice counts once.
        clients: N.
        chosen: C.
    """
    new = np.unique(selected).astype(np.int64)
    rounds = np.concatenate([past["rounds"], np.full(len(new), round, dtype=np.int64)])
    kept = rounds > round + 1 - window_of(clients, chosen)
    return {"clients": np.concatenate([past["clients"], new])[kept], "rounds": rounds[kept]}


def _times(past: State, first: int, clients: IntArray) -> IntArray:
    """(len(clients),) how often each of `clients` was chosen from round `first` on."""
    recent = past["clients"][past["rounds"] >= first]
    return np.bincount(recent, minlength=int(clients.max(initial=-1)) + 1)[clients]


# A federation as a wary server shows it to its selector: the same on every engine.
#
# Reports of losses are clipped to what is usual among the answers to the same question, and a client
# that had more than its share of the last rounds is not offered. Both are off unless a `Defence` says
# otherwise; then a selector sees the federation itself.


def shield(
    defence: Defence,
    turns: State,
    selector: Selector,
    federation: Federation,
    clients: int | None = None,
) -> Federation:
    """What the selector is shown of the federation in a round.

    Args:
        defence: What is done.
        turns: Who was chosen in the last rounds (`fedcor.rounds.defence.guarded_federation`).
        selector: As it is in this round. One that does not say how many clients it chooses cannot
            be capped.
        federation: Answers the questions.
        clients: How many clients may be chosen, reachable or not, and share the rounds among them;
            None for all.
    """
    chosen = selector_traits(selector).clients_per_round
    capped = defence.most_share > 0.0 and chosen is not None
    if not capped and not defence.clip_reports:
        return federation
    available = federation.available
    if capped:
        assert chosen is not None
        sharing = len(federation.weights) if clients is None else clients
        available = offered(
            turns, federation.round, available, sharing, int(chosen), defence.most_share
        )
    return _Shielded(federation, available, defence.clip_reports)


def shield_outcome(defence: Defence, outcome: Outcome) -> Outcome:
    """What the selector is shown of a round's outcome: its losses are reports, too."""
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
    """Who was chosen in the last rounds, after one more; the same value where nobody is capped.

    Args:
        defence: What is done.
        turns: Who was chosen before.
        selector: As it was in this round.
        outcome: Of this round.
        clients: How many clients may be chosen.
    """
    chosen = selector_traits(selector).clients_per_round
    if defence.most_share == 0.0 or chosen is None:
        return turns
    return count_turns(turns, outcome.round, outcome.selected, clients, int(chosen))


class _Shielded:
    """A federation of which some clients are offered, with clipped reports."""

    def __init__(self, whole: Federation, available: IntArray, limit: float) -> None:
        self._whole, self._limit = whole, limit
        self.round, self.weights, self.rng = whole.round, whole.weights, whole.rng
        self.available = available.copy()
        self.available.flags.writeable = False
        # What is known without a question goes into the record, as it came.
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
