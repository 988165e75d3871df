"""Who is here: wait for nodes, ask unknown ones who they are, say which clients may be chosen."""

from __future__ import annotations

import time

from fedcor.flower.exchange import Exchange
from fedcor.flower.introduce import introduce
from fedcor.flower.numbering import flower_round
from fedcor.flower.settings import RoundSettings
from fedcor.flower.state import FederationState
from fedcor.flower.wire import LOG
from fedcor.types import IntArray

__all__ = ["reachable_clients"]

_FIRST_PAUSE, _PAUSE = 0.2, 1.0  # seconds between looks, before the first round and later


def reachable_clients(
    settings: RoundSettings, state: FederationState, exchange: Exchange, *, retry: bool = False
) -> IntArray:
    """Sorted clients that may be asked or chosen in this round.

    The first round waits for the wanted number of nodes, and a resumed run for as many as it knows
    (at most `probe_timeout` seconds). Later rounds wait for anyone.
    """
    roster = state.roster
    wanted = 1 if state.assembled else max(settings.wait_for, len(roster))
    end = time.monotonic() + (settings.probe_timeout if len(roster) else float("inf"))
    seen = -1
    while True:
        nodes = list(exchange.grid.get_node_ids())
        if len(nodes) >= wanted or (nodes and time.monotonic() > end):
            _enrol(settings, state, exchange, nodes)
            available = roster.reachable(nodes, exchange.round)
            if len(available):
                state.assembled = True
                return available
            number = flower_round(exchange.round)
            LOG.error("round %d: none of the %d nodes says who it is", number, len(nodes))
            roster.forget_unidentified()
        elif seen != len(nodes):
            seen = len(nodes)
            LOG.info("waiting for nodes: %d connected, %d needed", seen, wanted)
        time.sleep(_PAUSE if retry or state.assembled else _FIRST_PAUSE)


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
    claims = introduce(exchange, unknown, settings.probe_timeout, by_key=by_key)
    roster.enrol(claims)
    for node in set(unknown) - claims.keys():
        LOG.warning("round %d: node %d does not say who it is", number, node)
        roster.unidentified(node, exchange.round)
