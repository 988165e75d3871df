"""Who was chosen in each round of a run, who delivered, and who did not."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcor.core.errors import FedcorError, RecordError
from fedcor.core.rng import stream
from fedcor.core.types import Array, FloatArray, IntArray
from fedcor.data.datasets import available, load
from fedcor.data.partition import Partition
from fedcor.runs.checkpoints import CHECKPOINT
from fedcor.runs.record import RunRecord, client_names, read_checkpoint
from fedcor.selectors.update_memory import table_blocks


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


# What a run tells of each client: its name, size and labels, how often it trained, its loss.


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


# A map of a run's clients: what its selector learnt of them, in two dimensions.
#
# Clients that are close are alike to the selector. FedCor's embedding is scaled to unit length first,
# so that distance reflects correlation; remembered updates are directions, and are scaled as well.


_SOURCES = {  # array of a checkpoint -> what it is
    "selector/embedding": "learnt embedding",
    "selector/directions": "remembered updates",
}


@dataclass(frozen=True, eq=False)
class ClientMap:
    """Clients as points.

    Attributes:
        what: what is drawn: the learnt embedding, or remembered updates
        clients: (K,) those that have a point: everyone, or those whose update is remembered
        points: (K, 2) centred
        explained: the part of the variance that each axis shows
        round: after how many rounds it was learnt
    """

    what: str
    clients: tuple[int, ...]
    points: FloatArray
    explained: tuple[float, float]
    round: int


def client_map(checkpoint: Mapping[str, Array]) -> ClientMap | None:
    """The map of the clients in a checkpoint; None where the selector learns none.

    Args:
        checkpoint: named arrays, as `read_checkpoint` gives them; may be empty
    """
    for name, what in _SOURCES.items():
        wide = _table(checkpoint, name)
        if wide is None:
            continue
        lengths = np.linalg.norm(wide, axis=1)
        seen = np.flatnonzero(np.isfinite(lengths) & (lengths > 0))
        if len(seen) < 3:
            continue
        points, explained = principal_components(wide[seen] / lengths[seen, None])
        done = int(checkpoint["round"]) if "round" in checkpoint else 0
        return ClientMap(what, tuple(seen.tolist()), points, explained, done)
    return None


def _table(checkpoint: Mapping[str, Array], name: str) -> FloatArray | None:
    """(N, d) a table of the selector, which is in blocks where there are many clients."""
    blocks = [checkpoint[name]] if name in checkpoint else table_blocks(checkpoint, name)
    if any(block.ndim != 2 or block.dtype.kind != "f" for block in blocks):
        return None
    if len({block.shape[1] for block in blocks}) != 1:  # there is none, or it is damaged
        return None
    return np.concatenate(blocks, dtype=np.float64)


def principal_components(rows: FloatArray) -> tuple[FloatArray, tuple[float, float]]:
    """(K, 2) the first two principal components of `rows` (K, d), and the part of the variance that
    each has. The sign of an axis is that which makes its largest loading positive, so that the same
    numbers give the same picture.
    """
    centred = rows - rows.mean(axis=0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    total = float((s**2).sum())
    points = np.zeros((len(rows), 2))
    explained = [0.0, 0.0]
    for axis in range(min(2, len(s))):
        sign = 1.0 if vt[axis, np.abs(vt[axis]).argmax()] >= 0 else -1.0
        points[:, axis] = sign * u[:, axis] * s[axis]
        explained[axis] = float(s[axis] ** 2) / total if total > 0 else 0.0
    return points, (explained[0], explained[1])


# How many samples of each label every client holds, made again from a run's settings.
#
# A record does not hold it. But data set, partition and seed fix it, so where the data set is on this
# machine, it can be made again. No code that a record names is imported for that: own partitions and
# own data stay unknown.


def label_mix(run: RunRecord) -> IntArray | None:
    """(N, K) samples of each of the K labels at each of the N clients; None where it is unknown.

    Args:
        run: of the simulator, on a data set of ours that is on this machine
    """
    config = run.header.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    partition = config.get("partition") if isinstance(config, Mapping) else None
    seed = run.header.get("seed")
    if not (isinstance(data, Mapping) and isinstance(partition, Mapping) and type(seed) is int):
        return None
    if data.get("noisy_clients"):  # some hold other labels than the data set says
        return None
    return _counted(str(data.get("name")), json.dumps(partition, sort_keys=True), seed)


@functools.lru_cache(maxsize=64)
def _counted(name: str, partition: str, seed: int) -> IntArray | None:
    """(N, K) label counts; runs of several selectors share them."""
    settings: dict[str, Any] = json.loads(partition)
    try:
        loaded = _labels(name)
        if loaded is None:
            return None
        labels, classes = loaded
        parts = Partition(**settings).split(labels, stream(seed, "partition"))
        return np.array([np.bincount(labels[part], minlength=classes) for part in parts])
    except (FedcorError, ImportError, TypeError, ValueError):
        return None  # it is not fetched, or the settings are not those of a partition of ours


@functools.lru_cache(maxsize=4)
def _labels(name: str) -> tuple[IntArray, int] | None:
    """The labels of the training samples, and how many there are; None if they are not here."""
    if not any(entry.name == name and entry.present for entry in available()):
        return None
    data = load(name)
    return (data.train_y, data.classes) if data.classes else None
