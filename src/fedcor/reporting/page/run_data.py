"""What the page shows of one run: who was chosen in each round and why, its clients, their map.

All functions give plain values; `rounded` makes them fit for JSON.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcor.core.errors import FedcorError, RecordError
from fedcor.core.rng import stream
from fedcor.core.types import Array, FloatArray, IntArray
from fedcor.data.datasets import available, load
from fedcor.data.partitioners import PARTITIONS
from fedcor.reporting.explanations import explanations, or_empty
from fedcor.reporting.gp_calibration import health, health_sentence
from fedcor.reporting.reason_texts import PARTS
from fedcor.reporting.series import clean, run_name
from fedcor.runs.checkpoints import CHECKPOINT
from fedcor.runs.record import RunRecord, client_names, first_round, read_checkpoint
from fedcor.selectors.update_memory import table_blocks

BINS = 20
WORST = 0.1  # the part of clients whose losses are the worst
MOST_CANDIDATES = 40
_IN_PARTS = ("others", "own", "redundancy")  # the parts of a gain say these already
_MAPS = {  # array of a checkpoint -> what it is
    "selector/embedding": "learnt embedding",
    "selector/directions": "remembered updates",
}


def run_data(run: RunRecord, series: int, stride: int = 1) -> dict[str, Any]:
    """One run.

    Args:
        run: as `read_run` gives it
        series: the place of its selector in the table
        stride: of every how many rounds the reasons are there; of the last one always
    """
    count, checkpoint = count_clients(run), checkpoint_of(run)
    mapped, labels = client_map(checkpoint), label_mix(run)
    if labels is not None and len(labels) != count:
        labels = None
    sizes = _vector(checkpoint.get("sizes") if labels is None else labels.sum(axis=1), count)
    losses, losses_are = client_losses(run, checkpoint, count)
    spread = distribution(losses)
    times_chosen, times_failed = times(run, count)
    return {
        "series": series,
        "seed": int(run.header["seed"]),
        "path": clean(run_name(run)),
        "planned": int(run.header["config"]["training"]["rounds"]),
        "first_round": first_round(run),
        "attendance": attendance(run),
        "clients": {
            "names": client_names(run.path),
            "sizes": rounded(sizes),
            # Shown on the map; without one, they would only fill the page.
            "labels": labels.tolist() if mapped and labels is not None else None,
            "chosen": times_chosen.tolist(),
            "failed": times_failed.tolist() if times_failed.any() else None,
            "losses": rounded(losses) if losses_are else None,
        },
        "losses": None if spread is None else {"what": losses_are, **rounded(spread)},
        "map": rounded(mapped),
        "why": why_data(run, stride),
        "health": health_data(run),
    }


def rounded(value: Any, digits: int = 4) -> Any:
    """Plain values for JSON: floats with so many significant digits, None where not finite.

    Example:
        >>> rounded([0.123456, 3.0, float("nan")])
        [0.1235, 3, None]
    """
    if isinstance(value, Mapping):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        parts = value.tolist() if isinstance(value, np.ndarray) else value
        return [rounded(part, digits) for part in parts]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    is_whole = value == int(value) and abs(value) < 10**15
    return int(value) if is_whole else float(f"{value:.{digits}g}")


# --- rounds: who was chosen, who failed -----------------------------------------------------------


def attendance(run: RunRecord) -> dict[str, Any]:
    """The chosen clients of every round; and by the number of the round, where there are any:
    those that did not deliver, why, those that were not asked after faults, the kinds of faults,
    and the number of unusable answers."""
    rounds: dict[str, Any] = {
        "clients": count_clients(run),
        "selected": [list(entry.get("selected") or ()) for entry in run.rounds],
        **{key: {} for key in ("failed", "reasons", "alone", "faults", "refused")},
    }
    for number, entry in enumerate(run.rounds):
        of_round = {
            "failed": _failed(entry),
            "reasons": {why: ids for why, ids in (entry.get("missing") or {}).items() if ids},
            "alone": or_empty(entry.get("quarantined"), list),
            "faults": {kind: n for kind, n in or_empty(entry.get("faults"), dict).items() if n},
            "refused": entry.get("refused"),
        }
        for key, value in of_round.items():
            if value:
                rounds[key][str(number)] = value
    return rounds


def count_clients(run: RunRecord) -> int:
    """How many clients the federation has: as its settings say, and at least those that are named
    or were chosen."""
    planned = or_empty((run.header.get("config") or {}).get("partition"), dict).get("clients")
    highest = max((max(entry.get("selected") or [-1]) for entry in run.rounds), default=-1)
    named = len(client_names(run.path))
    return max(planned if isinstance(planned, int) else 0, highest + 1, named)


def times(run: RunRecord, count: int) -> tuple[IntArray, IntArray]:
    """(N,) in how many rounds each client was chosen, and in how many of them it did not deliver;
    a client that was drawn twice in a round counts once."""
    chosen, failed = np.zeros((2, count), dtype=np.int64)
    for entry in run.rounds:
        chosen[list({*(entry.get("selected") or ())})] += 1
        failed[list({*_failed(entry)})] += 1
    return chosen, failed


def _failed(entry: Mapping[str, Any]) -> list[int]:
    delivered = {*(entry.get("participated") or ())}
    return [client for client in entry.get("selected") or () if client not in delivered]


# --- clients: losses, labels, map -----------------------------------------------------------------


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


def client_losses(
    run: RunRecord, checkpoint: Mapping[str, Array], count: int
) -> tuple[FloatArray, str]:
    """(N,) the last loss of each client that the server knows, and what it is.

    A selector that remembers losses has one of everyone who was ever asked or trained. Else there
    are those in the record, asked for or sent along with an update, and those of the newest model,
    in the checkpoint: the largest number of them is shown.
    """
    remembered = _vector(checkpoint.get("selector/losses"), count)
    if remembered is not None:
        return remembered, "the last training loss that each client reported"
    asked, told, newest = np.full((3, count), np.nan)
    for entry in run.rounds:
        details = entry.get("details") or {}
        _take(asked, entry.get("selected"), (entry.get("why") or {}).get("loss"))
        _take(asked, details.get("known"), details.get("losses"))
        _take(told, entry.get("participated"), details.get("told"))
    # Of everyone in a simulation; on Flower, of those that are known.
    _take(newest, range(count), _vector(checkpoint.get("known"), count))
    _take(newest, checkpoint.get("known_clients"), checkpoint.get("known_losses"))
    sources = {
        "the last loss that each client was asked for": asked,
        "the last loss that came with an update of each client": told,
        "the loss of the newest model that each client was asked for": newest,
    }
    words, losses = max(sources.items(), key=lambda source: np.isfinite(source[1]).sum())
    return losses, words if np.isfinite(losses).any() else ""


def _take(losses: FloatArray, clients: Any, values: Any) -> None:
    """Write the `values` of `clients` into `losses`, where there are any."""
    if clients is None or values is None:
        return
    for client, loss in zip(clients, values, strict=False):
        if loss is not None and math.isfinite(loss) and 0 <= int(client) < len(losses):
            losses[int(client)] = loss


def _vector(array: Array | None, count: int) -> FloatArray | None:
    """(N,) numbers of all clients, NaN where they are not finite; None where it is nothing such."""
    if array is None or array.shape != (count,) or array.dtype.kind not in "fiu":
        return None
    return np.where(np.isfinite(array), array.astype(np.float64), np.nan)


def distribution(values: FloatArray) -> dict[str, Any] | None:
    """How losses are spread over clients; None where fewer than two clients have one.

    Args:
        values: (N,) NaN where unknown; higher is worse

    Returns:
        edges: ends of the bins, one more than there are bins
        counts: clients in each bin
        median: of all values
        worst: mean of the worst tenth, at least one client
        known: how many clients have a value
    """
    known = np.sort(values[np.isfinite(values)])
    if len(known) < 2:
        return None
    counts, edges = np.histogram(known, bins=min(BINS, max(5, len(known) // 4)))
    worst = known[-max(1, round(WORST * len(known))) :]
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "median": float(np.median(known)),
        "worst": float(worst.mean()),
        "known": len(known),
    }


def client_map(checkpoint: Mapping[str, Array]) -> dict[str, Any] | None:
    """Clients as points in two dimensions, by what their selector learnt of them; None where it
    learns nothing.

    Nearby clients look similar to the selector. FedCor's embedding is scaled to unit length first,
    so that distance reflects correlation; remembered updates are directions, and are scaled, too.

    Returns:
        what: what is drawn: the learnt embedding, or remembered updates
        clients: (K,) those that have a point: everyone, or those whose update is remembered
        x, y: (K,) centred
        explained: the part of the variance that each axis shows
        round: after how many rounds it was learnt
    """
    for name, what in _MAPS.items():
        rows = _learnt(checkpoint, name)
        if rows is None:
            continue
        lengths = np.linalg.norm(rows, axis=1)
        seen = np.flatnonzero(np.isfinite(lengths) & (lengths > 0))
        if len(seen) < 3:
            continue
        points, explained = principal_components(rows[seen] / lengths[seen, None])
        x, y = points.T.tolist()
        return {
            "what": what,
            "round": int(checkpoint.get("round", 0)),
            "clients": seen.tolist(),
            **{"x": x, "y": y, "explained": explained.tolist()},
        }
    return None


def _learnt(checkpoint: Mapping[str, Array], name: str) -> FloatArray | None:
    """(N, d) a table of the selector, which is in blocks where there are many clients."""
    blocks = [checkpoint[name]] if name in checkpoint else table_blocks(checkpoint, name)
    if any(block.ndim != 2 or block.dtype.kind != "f" for block in blocks):
        return None
    if len({block.shape[1] for block in blocks}) != 1:  # there is none, or it is damaged
        return None
    return np.concatenate(blocks, dtype=np.float64)


def principal_components(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(K, 2) the first two principal components of `rows` (K, d), and (2,) the part of the variance
    that each has. The sign of an axis is that which makes its largest loading positive, so that the
    same numbers give the same picture.
    """
    u, s, vt = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    largest = vt[np.arange(len(s)), np.abs(vt).argmax(axis=1)]
    shares = s**2 / max((s**2).sum(), np.finfo(float).tiny)
    missing = max(2 - len(s), 0)  # of one dimension alone
    points = np.pad(u * s * np.sign(largest), ((0, 0), (0, missing)))
    return points[:, :2], np.pad(shares, (0, missing))[:2]


def label_mix(run: RunRecord) -> IntArray | None:
    """(N, K) samples of each of the K labels at each of the N clients; None where it is unknown.

    A record does not hold it. But data set, partition and seed fix it, so where the data set is on
    this machine, it is made again. No code that a record names is imported for that: own partitions
    and own data stay unknown.
    """
    config = run.header.get("config") or {}
    data, partition = (or_empty(config.get(key), dict) for key in ("data", "partition"))
    if data.get("noisy_clients"):  # some hold other labels than the data set says
        return None
    seed = int(run.header["seed"])
    return _label_counts(str(data.get("name")), json.dumps(partition, sort_keys=True), seed)


@functools.lru_cache(maxsize=64)
def _label_counts(name: str, partition: str, seed: int) -> IntArray | None:
    """(N, K) label counts; runs of several selectors share them."""
    try:
        labels, classes = _labels(name)
        options = json.loads(partition)
        made = PARTITIONS.built_in[options.pop("kind")](**options)
        parts = made.split(labels, stream(seed, "partition"))
        return np.array([np.bincount(labels[part], minlength=classes) for part in parts])
    except (FedcorError, ImportError, LookupError, TypeError, ValueError):
        return None  # it is not fetched, or the settings are not those of a partition of ours


@functools.lru_cache(maxsize=4)
def _labels(name: str) -> tuple[IntArray, int]:
    """The labels of the training samples, and how many there are; raises if they are not here."""
    if not any(entry.name == name and entry.present for entry in available()):
        raise LookupError(name)
    data = load(name)
    if data.classes is None:
        raise LookupError(name)
    return data.train_y, data.classes


# --- why: the reasons of each round, and the Gaussian process behind them -------------------------


def count_reasons(run: RunRecord) -> int:
    """About how many numbers `why_data` gives of a run if every round is there."""
    more = 4  # beside the reasons: the runner-up, by how much, the actual change, and over how long
    return sum(
        len(entry.get("selected") or ()) * (more + len(entry["why"]))
        for entry in run.rounds
        if entry.get("why")
    )


def why_data(run: RunRecord, stride: int = 1) -> dict[str, Any]:
    """The explanation of each round.

    Args:
        run: as `read_run` gives it
        stride: of every how many rounds it is there; of the last one always

    Returns:
        `reasons`, what each means; `notes`, sentences that rounds refer to by number; `rounds`,
        None where a round is left out.
    """
    notes: dict[str, int] = {}
    reasons: dict[str, str] = {}
    rounds: list[dict[str, Any] | None] = []
    last = len(run.rounds) - 1
    for number, explained in enumerate(explanations(run)):
        if number % stride and number < last:
            rounds.append(None)
            continue
        reasons |= {clean(name): meaning for name, meaning in explained["reasons"].items()}
        shown = _round(explained)
        if explained["note"]:
            shown["note"] = notes.setdefault(clean(explained["note"]), len(notes))
        rounds.append(shown)
    return {"reasons": reasons, "notes": list(notes), "rounds": rounds, "stride": stride}


def _round(explained: Mapping[str, Any]) -> dict[str, Any]:
    """A round, with a list over its picks for each reason; what is empty is left out."""
    rows = explained["chosen"]
    has_parts = bool(rows) and all(row["parts"] for row in rows)
    rivals, actual = ([row[key] or {} for row in rows] for key in ("runner_up", "came"))
    shown = {
        "reasons": {
            clean(name): _numbers(rows, name)
            for name in explained["reasons"]
            if not (has_parts and name in _IN_PARTS)
        },
        "parts": [[row["parts"][part] for row in rows] for part in PARTS] if has_parts else None,
        "candidates": [
            [row["client"], row["loss"]] for row in explained["candidates"][:MOST_CANDIDATES]
        ],
        "unmet": {clean(str(rule)): count for rule, count in explained["unmet"].items()},
        **{key: explained[key] for key in ("before_rules", "probed")},
    }
    if any(rivals):
        shown["rivals"] = [rival.get("client") for rival in rivals]
        shown |= {"by": _numbers(rivals, "by"), "by_what": explained["by_what"]}
    if any(actual):
        shown["actual"] = _numbers(actual, "change")
        shown["spans"] = [row["to_round"] - row["from_round"] if row else None for row in actual]
    kept: dict[str, Any] = rounded({key: value for key, value in shown.items() if value}, 3)
    return kept


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    values = (row.get(name) for row in rows)
    return [float(value) if isinstance(value, int | float) else None for value in values]


def health_data(run: RunRecord) -> dict[str, Any] | None:
    """How well the Gaussian process predicts; None where the selector learns none."""
    numbers = health(run)
    if numbers["note"] and not numbers["refits"]:
        return None
    columns = ("log_score", "each", "independent", "agreement", "similarity")
    counts = ("forecasts", "better", "better_each", "refits", "probed", "probe_rounds")
    return {
        "note": clean(numbers["note"]),
        "sentence": health_sentence(numbers),
        "rounds": numbers["rounds"]["round"],
        **rounded({name: numbers["rounds"][name] for name in columns}),
        "calibration": rounded(numbers["calibration"]),
        **{key: numbers[key] for key in (*counts, "bytes", "probe_bytes")},
    }
