"""The record of a run: its format, and how it is read, finished or still running.

A run is a folder:

    rounds.jsonl            the header, then one JSON line per round; a torn last line is tolerated
    checkpoint/state.npz    named arrays, replaced as a whole every few rounds
    clients.tsv             the number and name of each client, where clients have names
    run.lock                held by the process that writes

`run_folder.py` writes it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.errors import RecordError
from fedcor.header import upgrade
from fedcor.types import Array

__all__ = [
    "CHECKPOINT",
    "CLIENT_NAMES",
    "RECORD",
    "RoundRecord",
    "RunRecord",
    "client_names",
    "count_rounds",
    "differences",
    "has_run",
    "json_line",
    "read_checkpoint",
    "read_run",
    "read_runs",
]

RECORD = "rounds.jsonl"
CHECKPOINT = Path("checkpoint") / "state.npz"
CLIENT_NAMES = "clients.tsv"
_NEWER = ("metrics", "memory_bytes")


@dataclass(frozen=True)
class RoundRecord:
    """One line of the record: what was chosen, what came of it, what it cost.

    Attributes:
        round: Number of the round, from 0.
        selected: The chosen clients, in the order of choice.
        participated: Those whose update was aggregated, sorted.
        test_accuracy: Accuracy of the new model on the test data, in [0, 1]; NaN in regression.
        test_loss: Mean loss of the new model on the test data.
        learning_rate: The clients' learning rate in this round.
        probed: How many losses clients were asked for.
        refused: How many answers and updates were unusable numbers.
        bytes_down: Bytes sent to clients.
        bytes_up: Bytes received from clients.
        seconds: Duration of the round.
        why: The selector's reasons: a name -> one number per chosen client.
        metrics: Further metrics of the new model on the test data. A line has them only if there
            are any.
        memory_bytes: Bytes of what the federated optimiser remembers after the round. A line has
            it only if there are any.
    """

    round: int
    selected: list[int]
    participated: list[int]
    test_accuracy: float
    test_loss: float
    learning_rate: float
    probed: int
    refused: int
    bytes_down: int
    bytes_up: int
    seconds: float
    why: Mapping[str, list[float | None]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0


@dataclass(frozen=True)
class RunRecord:
    """A record as it was read.

    Attributes:
        path: The run's folder; None for a run that lives in memory.
        header: What was run, with which settings and versions; see `fedcor.header.run_header`.
        rounds: One entry per round, with the fields of `RoundRecord`; numbers that JSON does not
            have (NaN, infinity) are None.
    """

    path: Path | None
    header: Mapping[str, Any]
    rounds: list[Mapping[str, Any]]


def has_run(folder: Path) -> bool:
    """Whether a run has started there: its header is complete."""
    try:
        return b"\n" in (folder / RECORD).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False


def count_rounds(folder: Path) -> int:
    """How many rounds the record has so far; 0 when there is none."""
    try:
        return max(0, (folder / RECORD).read_bytes().count(b"\n") - 1)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def read_run(folder: Path) -> RunRecord:
    """The run in `folder`, complete lines only. Raises RecordError for a missing or damaged one."""
    path = folder / RECORD
    try:
        # What follows the last newline is torn or empty.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise RecordError(f"{folder} holds no run: there is no {RECORD} in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise RecordError(f"{path} has no header yet: the run has just started, or died at once")
    header, *rounds = (_parse(path, number, line) for number, line in enumerate(lines, start=1))
    return RunRecord(folder, upgrade(header), rounds)


def _parse(path: Path, number: int, line: str) -> Mapping[str, Any]:
    """Line `number` of a record, from 1: the header, or round `number - 2`."""
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(
            f"{path}, line {number}: not JSON ({error}); the file was edited or damaged"
        ) from error
    key, expected = ("kind", "header") if number == 1 else ("round", number - 2)
    if not isinstance(entry, dict) or entry.get(key) != expected:
        what = "header" if number == 1 else f"round {expected}"
        raise RecordError(f"{path}, line {number}: expected the {what}")
    return entry


def read_runs(folder: Path) -> list[RunRecord]:
    """Every run in `folder` and below it, in the order of their paths."""
    if not folder.is_dir():
        raise RecordError(f"there is no folder {folder}")
    paths = sorted(folder.rglob(RECORD))
    if not paths:
        raise RecordError(
            f"no run in {folder}: no {RECORD} there or below; `fedcor run` and `fedcor compare` "
            "make runs"
        )
    return [read_run(path.parent) for path in paths if has_run(path.parent)]


def read_checkpoint(folder: Path) -> dict[str, Array] | None:
    """The named arrays of a run's last checkpoint; None when it has none yet."""
    path = folder / CHECKPOINT
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
            int(arrays["round"])
            return arrays
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
    ) as error:
        raise RecordError(
            f"the checkpoint {path} is damaged; delete it to start this run over"
        ) from error


def client_names(folder: Path | None) -> list[str]:
    """Each client's name, as an escaped text of one line; empty where clients have no names."""
    if folder is None:
        return []
    try:
        lines = (folder / CLIENT_NAMES).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [line.partition("\t")[2] for line in lines]


def json_line(entry: Mapping[str, Any]) -> str:
    """`entry` as a line of the record; numbers that JSON does not have become null."""
    # What is newer than the first records is written only where there is any.
    clean = {key: _in_json(value) for key, value in entry.items() if value or key not in _NEWER}
    if "metrics" in clean:
        clean["metrics"] = {name: _in_json(v) for name, v in entry["metrics"].items()}
    return json.dumps(clean, separators=(",", ":"), allow_nan=False, default=repr) + "\n"


def _in_json(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two trees of settings differ: dotted key -> (old, new).

    >>> differences({"training": {"rounds": 5}}, {"training": {"rounds": 9}})
    {'training.rounds': (5, 9)}
    """
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*old, *new}):
            found |= differences(old.get(key), new.get(key), f"{path}.{key}".removeprefix("."))
        return found
    return {} if old == new else {path: (old, new)}
