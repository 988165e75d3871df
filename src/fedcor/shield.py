"""A federation as a wary server shows it to its selector: the same on every engine.

Reports of losses are clipped to what is usual among the answers to the same question, and a client
that had more than its share of the last rounds is not offered. Both are off unless a `Defence` says
otherwise; then a selector sees the federation itself.
"""

from __future__ import annotations

import dataclasses

from fedcor.defence import Defence
from fedcor.guard import clip_reports
from fedcor.turns import count_turns, offered
from fedcor.types import (
    Federation,
    FloatArray,
    IntArray,
    Outcome,
    Selector,
    State,
    selector_traits,
)

__all__ = ["after_round", "shield", "shield_outcome"]


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
        turns: Who was chosen in the last rounds (`fedcor.turns`).
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
