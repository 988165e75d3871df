"""Who was chosen in each round of a run, who delivered, and who did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcor.checkpoints import CHECKPOINT
from fedcor.errors import RecordError
from fedcor.record import RunRecord, client_names, read_checkpoint
from fedcor.types import Array

__all__ = ["Attendance", "attendance", "checkpoint_of", "count_clients"]


@dataclass(frozen=True)
class Attendance:
    """Who was there in the T rounds of a run.

    Attributes:
        clients: how many clients the federation has, as far as the record tells
        selected: the chosen clients of each round, in the order of choice
        failed: those of them whose update was not aggregated
        reasons: why -> those of them who failed for this reason, of each round, where that is known
        alone: clients that were there and were not asked, after faults in a row
        faults: kind of fault -> how often, of each round; only runs on Flower tell
        refused: answers and updates of each round that were unusable numbers
    """

    clients: int
    selected: tuple[tuple[int, ...], ...]
    failed: tuple[tuple[int, ...], ...]
    reasons: tuple[Mapping[str, list[int]], ...]
    alone: tuple[tuple[int, ...], ...]
    faults: tuple[Mapping[str, int], ...]
    refused: tuple[int, ...]


def attendance(run: RunRecord) -> Attendance:
    """Who was there in each round, as the record tells."""
    selected, failed, reasons, alone, faults, refused = [], [], [], [], [], []
    for entry in run.rounds:
        chosen = tuple(entry.get("selected") or ())
        delivered = set(entry.get("participated") or ())
        selected.append(chosen)
        failed.append(tuple(client for client in chosen if client not in delivered))
        missing = entry.get("missing")
        given = missing.items() if isinstance(missing, Mapping) else ()
        reasons.append({str(why): found for why, who in given if (found := _clients(who))})
        alone.append(tuple(_clients(entry.get("quarantined"))))
        faults.append(_counts(entry.get("faults")))
        refused.append(entry["refused"] if isinstance(entry.get("refused"), int) else 0)
    return Attendance(
        count_clients(run),
        tuple(selected),
        tuple(failed),
        tuple(reasons),
        tuple(alone),
        tuple(faults),
        tuple(refused),
    )


def count_clients(run: RunRecord) -> int:
    """How many clients the federation has: as its settings say, and at least those that are named
    or were chosen."""
    config = run.header.get("config")
    partition = config.get("partition") if isinstance(config, Mapping) else None
    said = partition.get("clients") if isinstance(partition, Mapping) else None
    highest = max((max(entry.get("selected") or [-1]) for entry in run.rounds), default=-1)
    named = len(client_names(run.path))
    return max(said if isinstance(said, int) else 0, highest + 1, named)


def checkpoint_of(run: RunRecord) -> dict[str, Array]:
    """The arrays of a run's newest checkpoint; empty where there is none that can be read.

    What it says of clients is shown beside the record, which does not depend on it.
    """
    if run.path is None or not (run.path / CHECKPOINT).is_file():
        return {}
    try:
        return read_checkpoint(run.path) or {}
    except RecordError:  # it is being replaced, or damaged
        return {}


def _clients(value: Any) -> list[int]:
    return [one for one in value if type(one) is int] if isinstance(value, list) else []


def _counts(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(kind): n for kind, n in value.items() if type(n) is int and n}
