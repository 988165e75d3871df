"""What the page shows of one run: its clients, who was chosen in each round, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcor.page.compact import compact, compact_list
from fedcor.record import RunRecord, first_round
from fedcor.report.attendance import Attendance, attendance, checkpoint_of
from fedcor.report.client_map import ClientMap, client_map
from fedcor.report.clients import Clients, Distribution, clients_of, distribution
from fedcor.report.explain import MEANINGS
from fedcor.report.label_mix import label_mix

__all__ = ["run_data"]


def run_data(run: RunRecord, series: int, stride: int = 1) -> dict[str, Any]:
    """One run.

    Args:
        run: as `read_run` gives it
        series: the place of its selector in the table
        stride: of every how many rounds the reasons are there; of the last one always
    """
    there, checkpoint = attendance(run), checkpoint_of(run)
    clients = clients_of(run, there, checkpoint, label_mix(run))
    planned = run.header["config"]["training"]["rounds"]
    return {
        "series": series,
        "seed": int(run.header["seed"]),
        "planned": int(planned),
        "first_round": first_round(run),
        "there": _attendance(there),
        "clients": _clients(clients),
        "losses": _distribution(distribution(clients.losses), clients.losses_are),
        "map": _map(client_map(checkpoint)),
        "why": _reasons(run, stride),
        "probed": compact_list([entry.get("probed") for entry in run.rounds]),
    }


def _attendance(there: Attendance) -> dict[str, Any]:
    """Rounds in which everyone delivered, nobody was left alone and nothing failed say no more."""
    return {
        "clients": there.clients,
        "selected": [list(clients) for clients in there.selected],
        "failed": _sparse(there.failed),
        "alone": _sparse(there.alone),
        "faults": {str(t): dict(kinds) for t, kinds in enumerate(there.faults) if kinds},
        "refused": {str(t): count for t, count in enumerate(there.refused) if count},
    }


def _sparse(rounds: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    return {str(t): list(clients) for t, clients in enumerate(rounds) if clients}


def _clients(clients: Clients) -> dict[str, Any]:
    labels = clients.labels
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


def _reasons(run: RunRecord, stride: int) -> dict[str, Any]:
    """The selector's reasons: what each means, and its numbers, round by round."""
    rounds: list[Mapping[str, Any] | None] = []
    names: dict[str, str] = {}
    last = len(run.rounds) - 1
    for t, entry in enumerate(run.rounds):
        why = entry.get("why") or {}
        names |= {str(name): MEANINGS.get(name, "") for name in why}
        shown = t % stride == 0 or t == last
        rounds.append({k: compact_list(v) for k, v in why.items()} if shown else None)
    return {"meanings": names, "rounds": rounds, "stride": stride}
