"""What a run tells of each client: its name, size and labels, how often it trained, its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcor.record import RunRecord, client_names
from fedcor.report.attendance import Attendance
from fedcor.types import Array, FloatArray, IntArray

__all__ = ["Clients", "Distribution", "clients_of", "distribution"]

BINS = 20
WORST = 0.1  # the part of clients whose losses are the worst


@dataclass(frozen=True, eq=False)
class Clients:
    """The N clients of a run.

    Attributes:
        names: as the clients give them; empty where they have none
        sizes: (N,) samples; None where unknown
        labels: (N, K) samples of each label; None where unknown
        chosen: (N,) in how many rounds
        failed: (N,) in how many of them no update came
        losses: (N,) the last loss that the server knows of each; NaN where it knows none
        losses_are: what these losses are, in words; empty where there are none
    """

    names: tuple[str, ...]
    sizes: IntArray | None
    labels: IntArray | None
    chosen: IntArray
    failed: IntArray
    losses: FloatArray
    losses_are: str


@dataclass(frozen=True)
class Distribution:
    """How values are spread over clients.

    Attributes:
        edges: ends of the bins, one more than there are bins
        counts: clients in each bin
        median: of all values
        worst: mean of the worst tenth, at least one client
        known: how many clients have a value
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    median: float
    worst: float
    known: int


def clients_of(
    run: RunRecord,
    attendance: Attendance,
    checkpoint: Mapping[str, Array],
    labels: IntArray | None = None,
) -> Clients:
    """What is known of each client.

    Args:
        run: as `read_run` gives it
        attendance: of the run
        checkpoint: its newest, by name; may be empty
        labels: (N, K) as `label_mix` gives them
    """
    count = attendance.clients
    if labels is not None and len(labels) != count:
        labels = None
    losses, losses_are = _losses(run, checkpoint, count)
    sizes = None if labels is None else labels.sum(axis=1)
    if sizes is None and _is_vector(checkpoint.get("sizes"), count):
        sizes = checkpoint["sizes"].astype(np.int64)
    return Clients(
        tuple(client_names(run.path)),
        sizes,
        labels,
        _times(attendance.selected, count),
        _times(attendance.failed, count),
        losses,
        losses_are,
    )


def distribution(values: FloatArray) -> Distribution | None:
    """How losses are spread; None where fewer than two clients have one.

    Args:
        values: (N,) NaN where unknown; higher is worse
    """
    known = np.sort(values[np.isfinite(values)])
    if len(known) < 2:
        return None
    counts, edges = np.histogram(known, bins=min(BINS, max(5, len(known) // 4)))
    worst = known[-max(1, round(WORST * len(known))) :]
    return Distribution(
        tuple(edges.tolist()),
        tuple(counts.tolist()),
        float(np.median(known)),
        float(worst.mean()),
        len(known),
    )


def _times(rounds: tuple[tuple[int, ...], ...], count: int) -> IntArray:
    """(N,) in how many rounds each client is named; a client that was drawn twice, once."""
    named = [client for clients in rounds for client in set(clients)]
    return np.bincount(np.array(named, dtype=np.int64), minlength=count)


def _losses(run: RunRecord, checkpoint: Mapping[str, Array], count: int) -> tuple[FloatArray, str]:
    """(N,) the last loss of each client that the server knows, and what it is.

    A selector that remembers losses has one of everyone who was ever asked or trained. Else there
    are those in the record, asked for or sent along with an update, whichever are more; and those
    of the newest model, in the checkpoint.
    """
    remembered = checkpoint.get("selector/losses")
    if remembered is not None and _is_vector(remembered, count):
        return _finite(remembered), "the last training loss that each client reported"
    asked, told = np.full(count, np.nan), np.full(count, np.nan)
    for entry in run.rounds:
        details = entry.get("details") or {}
        _take(asked, entry.get("selected"), (entry.get("why") or {}).get("loss"))
        _take(asked, details.get("known"), details.get("losses"))
        _take(told, entry.get("participated"), details.get("told"))
    if np.isfinite(told).sum() > np.isfinite(asked).sum():
        return told, "the last loss that came with an update of each client"
    found = asked
    what = "the last loss that each client was asked for"
    samples = checkpoint.get("known")
    if samples is not None and _is_vector(samples, count):
        known = _finite(samples)
        if np.isfinite(known).sum() > np.isfinite(found).sum():
            return known, "the loss of the newest model that each client was asked for"
    clients, given = checkpoint.get("known_clients"), checkpoint.get("known_losses")
    if clients is not None and given is not None and len(clients) > np.isfinite(found).sum():
        found = np.full(count, np.nan)
        usable = clients < count
        found[clients[usable]] = given[usable]
        return _finite(found), "the loss of the newest model that each client was asked for"
    return found, what if np.isfinite(found).any() else ""


def _take(losses: FloatArray, clients: Any, given: Any) -> None:
    """Write the `given` losses of `clients` into `losses`."""
    for client, loss in zip(clients or (), given or (), strict=False):
        if loss is not None and 0 <= int(client) < len(losses):
            losses[int(client)] = loss


def _is_vector(array: Array | None, count: int) -> bool:
    return array is not None and array.shape == (count,) and array.dtype.kind in "fiu"


def _finite(values: Array) -> FloatArray:
    wide = values.astype(np.float64)
    return np.where(np.isfinite(wide), wide, np.nan)
