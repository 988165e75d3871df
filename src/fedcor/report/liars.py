"""How often the simulated liars of a run were chosen, from its record alone."""

from __future__ import annotations

from dataclasses import dataclass

from fedcor.config import build_dataclass
from fedcor.errors import ConfigError
from fedcor.liars import Liars
from fedcor.record import RunRecord

__all__ = ["LiarsShare", "liars_share"]


@dataclass(frozen=True)
class LiarsShare:
    """The liars of a run.

    Attributes:
        kind: How they lie.
        liars: How many there are.
        clients: N.
        times_fair: Their share of all choices, relative to their share of the clients.
    """

    kind: str
    liars: int
    clients: int
    times_fair: float


def liars_share(run: RunRecord) -> LiarsShare | None:
    """How often the liars of a run were chosen; None where there are none, or no round yet.

    The header says how many lie, and the seed says who.
    """
    config = run.header.get("config") or {}
    chosen = [client for entry in run.rounds for client in entry.get("selected") or ()]
    try:
        liars = build_dataclass(Liars, config.get("liars") or {})
        clients = int(config["partition"]["clients"]) if liars else 0
        who = liars.who(int(run.header["seed"]), clients)
        told = int(who[chosen].sum()) if liars and chosen else 0
    except (ConfigError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None  # a damaged header; the rest of a report does not depend on it
    if not liars or not chosen:
        return None
    fair = who.sum() / clients
    return LiarsShare(liars.kind, int(who.sum()), clients, told / len(chosen) / float(fair))
