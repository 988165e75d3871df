"""Who is here: wait for nodes, ask unknown ones who they are, say which clients may be chosen."""

from __future__ import annotations

import time

from fedcor.flower.exchange import Exchange
from fedcor.flower.fault_log import some_of
from fedcor.flower.introduce import introduce
from fedcor.flower.numbering import flower_round
from fedcor.flower.rules import eligible_clients, wanted_tags
from fedcor.flower.settings import RoundSettings
from fedcor.flower.state import FederationState
from fedcor.flower.wire import LOG
from fedcor.types import IntArray, selector_traits

__all__ = ["reachable_clients"]

_FIRST_PAUSE, _PAUSE = 0.2, 1.0  # seconds between looks, before the first round and later
_MOST_NODES = 5  # that a line of the log lists
_SAY_AGAIN = 10.0  # seconds after which it is said once more that we wait


def reachable_clients(
    settings: RoundSettings, state: FederationState, exchange: Exchange, *, retry: bool = False
) -> IntArray:
    """Sorted clients that may be asked or chosen in this round.

    The first round waits for the wanted number of nodes, and a resumed run for as many as it knows
    (at most `probe_timeout` seconds). Later rounds wait for anyone.
    """
    roster = state.roster
    wanted = 1 if state.assembled else max(settings.wait_for, len(roster))
    waiting = _Waiting(settings, wanted)
    patience = settings.probe_timeout if len(roster) else float("inf")
    while True:
        nodes = list(exchange.grid.get_node_ids())
        if len(nodes) >= wanted or (nodes and waiting.seconds > patience):
            _enrol(settings, state, exchange, nodes)
            eligible = eligible_clients(settings.selection.rules, roster)
            available = roster.reachable(nodes, exchange.round, eligible)
            if len(available):
                state.assembled = True
                return available
            there = len(roster.reachable(nodes, 0))
            if there:
                waiting.nobody_eligible(there, flower_round(exchange.round))
            else:
                waiting.nobody_answers(len(nodes), flower_round(exchange.round))
            roster.forget_unidentified()
        else:
            waiting.too_few(len(nodes))
        time.sleep(_PAUSE if retry or state.assembled else _FIRST_PAUSE)


class _Waiting:
    """Says that nodes are waited for: at once, when their number changes, and every ten seconds."""

    def __init__(self, settings: RoundSettings, wanted: int) -> None:
        self._settings, self._wanted = settings, wanted
        self._start = time.monotonic()
        self._connected = -1  # that was said last
        self._said = 0.0  # when, in seconds
        self._advised = False

    @property
    def seconds(self) -> float:
        """For which we have waited."""
        return time.monotonic() - self._start

    def too_few(self, connected: int) -> None:
        """Fewer nodes are connected than are needed."""
        if not self._due(connected):
            return
        advice = ""
        if self.seconds >= _SAY_AGAIN and connected and not self._advised:
            self._advised, advice = True, self._advice(connected)
        message = "waiting for nodes: %d connected, %d needed (%d s)%s"
        LOG.info(message, connected, self._wanted, self.seconds, advice)

    def nobody_answers(self, connected: int, number: int) -> None:
        """Enough nodes are connected, but nobody says who it is."""
        if self._due(connected):
            message = "round %d: none of the %d nodes says who it is (%d s)"
            LOG.error(message, number, connected, self.seconds)

    def nobody_eligible(self, there: int, number: int) -> None:
        """Clients are here, but the rules let none of them be chosen."""
        if self._due(there):
            message = "round %d: none of the %d clients that can be reached is eligible: waiting"
            LOG.error(message, number, there)

    def _due(self, connected: int) -> bool:
        """Whether it is time to say something."""
        due = connected != self._connected or self.seconds - self._said >= _SAY_AGAIN
        if due:
            self._connected, self._said = connected, self.seconds
        return due

    def _advice(self, connected: int) -> str:
        """How to begin with those who are here."""
        chosen = selector_traits(self._settings.selector).clients_per_round
        if self._settings.selection.wait_for is None and chosen == self._wanted:
            return f": each round has {chosen} clients. wait_for={connected} begins with fewer"
        return f". wait_for={connected} begins with those who are here"


def _enrol(
    settings: RoundSettings, state: FederationState, exchange: Exchange, nodes: list[int]
) -> None:
    """Ask the unknown ones of `nodes` who they are, and take them in."""
    roster, number = state.roster, flower_round(exchange.round)
    unknown = roster.unknown(nodes, exchange.round)
    if not unknown:
        return
    if roster.names and state.assembled:
        LOG.info("round %d: %d new nodes", number, len(unknown))
    by_key = settings.selection.identity == "key"
    tags = wanted_tags(settings.selection.rules)
    answers = introduce(exchange, unknown, settings.probe_timeout, by_key=by_key, tags=tags)
    answers.log_doubts(state.said, by_key=by_key)
    roster.reachable(nodes, exchange.round)  # who has left is nobody's rival
    roster.enrol(answers.claims)
    silent = sorted(set(unknown) - answers.claims.keys())
    for node in silent:
        roster.unidentified(node, exchange.round)
    if silent:
        nodes_text = some_of([str(node) for node in silent], _MOST_NODES)
        message = "round %d: %d of %d new nodes do not say who they are: %s"
        LOG.warning(message, number, len(silent), len(unknown), nodes_text)
