"""What the page shows of one run: its clients, who was chosen in each round, and why."""

from __future__ import annotations

from typing import Any

from fedcor.page.compact import compact, compact_list
from fedcor.page.why_data import health_data, why_data
from fedcor.record import RunRecord, first_round
from fedcor.report.attendance import Attendance, attendance, checkpoint_of
from fedcor.report.client_map import ClientMap, client_map
from fedcor.report.clients import Clients, Distribution, clients_of, distribution
from fedcor.report.label_mix import label_mix
from fedcor.report.names import clean, run_name

__all__ = ["run_data"]


def run_data(run: RunRecord, series: int, stride: int = 1) -> dict[str, Any]:
    """One run.

    Args:
        run: as `read_run` gives it
        series: the place of its selector in the table
        stride: of every how many rounds the reasons are there; of the last one always
    """
    there, checkpoint = attendance(run), checkpoint_of(run)
    places = client_map(checkpoint)
    clients = clients_of(run, there, checkpoint, label_mix(run))
    planned = run.header["config"]["training"]["rounds"]
    return {
        "series": series,
        "seed": int(run.header["seed"]),
        "path": clean(run_name(run)),
        "planned": int(planned),
        "first_round": first_round(run),
        "there": _attendance(there),
        "clients": _clients(clients, mapped=places is not None),
        "losses": _distribution(distribution(clients.losses), clients.losses_are),
        "map": _map(places),
        "why": why_data(run, stride),
        "health": health_data(run),
    }


def _attendance(there: Attendance) -> dict[str, Any]:
    """Rounds in which everyone delivered, nobody was left alone and nothing failed say no more."""
    return {
        "clients": there.clients,
        "selected": [list(clients) for clients in there.selected],
        "failed": _sparse(there.failed),
        "reasons": {str(t): dict(whys) for t, whys in enumerate(there.reasons) if whys},
        "alone": _sparse(there.alone),
        "faults": {str(t): dict(kinds) for t, kinds in enumerate(there.faults) if kinds},
        "refused": {str(t): count for t, count in enumerate(there.refused) if count},
    }


def _sparse(rounds: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    return {str(t): list(clients) for t, clients in enumerate(rounds) if clients}


def _clients(clients: Clients, mapped: bool) -> dict[str, Any]:
    """Labels are shown on the map; without one, they would only fill the page."""
    labels = clients.labels if mapped else None
    return {
        "names": list(clients.names),
        "sizes": None if clients.sizes is None else clients.sizes.tolist(),
        "labels": None if labels is None else labels.tolist(),
        "chosen": clients.chosen.tolist(),
        "failed": clients.failed.tolist() if clients.failed.any() else None,
        "losses": compact_list(clients.losses) if clients.losses_are else None,
    }


def _distribution(found: Distribution | None, what: str) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "what": what,
        "edges": compact_list(found.edges),
        "counts": list(found.counts),
        "median": compact(found.median),
        "worst": compact(found.worst),
        "known": found.known,
    }


def _map(found: ClientMap | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "what": found.what,
        "round": found.round,
        "clients": list(found.clients),
        "x": compact_list(found.points[:, 0]),
        "y": compact_list(found.points[:, 1]),
        "explained": compact_list(found.explained, 3),
    }
