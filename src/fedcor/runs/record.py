"""The record of a run: its format, and how it is read, finished or still running.

A run is a folder:

    rounds.jsonl            the header, then one JSON line per round; a torn last line is tolerated
    checkpoint/state.npz    named arrays, replaced as a whole every few rounds
    checkpoint/previous.npz the one before it, for when it is damaged
    checkpoint/refused.npz  the last one that was damaged; nothing reads it
    clients.tsv             the number and name of each client, where clients have names
    run.lock                held by the process that writes

`fedcor.runs.resume` writes it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.core.files import read_plain
from fedcor.core.text import one_line
from fedcor.core.types import Array
from fedcor.rounds.record_line import FORMAT, with_selector_name
from fedcor.runs.checkpoints import CHECKPOINT, Saved, load_checkpoint, load_marks

RECORD = "rounds.jsonl"
CLIENT_NAMES = "clients.tsv"
# Fields of a round that are written only if they hold anything.
_OPTIONAL = (
    *("metrics", "memory_bytes", "quarantined", "server_round", "metric_records", "unmet"),
    *("clipped", "refused_updates", "capped", "rolled_back"),
    *("missing", "unreachable", "duration", "clock", "details"),
)


@dataclass(frozen=True)
class RunRecord:
    """A record as it was read.

    Attributes:
        path: The run's folder; None for a run that lives in memory.
        header: What was run, with which settings and versions; see
            `fedcor.rounds.record_line.run_header`.
        rounds: One entry per round, with the fields of `RoundRecord`; numbers that JSON does not
            have (NaN, infinity) are None.
    """

    path: Path | None
    header: Mapping[str, Any]
    rounds: list[Mapping[str, Any]]


def has_run(folder: Path) -> bool:
    """Whether a run has started there: its header is complete."""
    return _count_lines(folder) > 0


def first_round(run: RunRecord) -> int:
    """The number of the first round where a person reads it: 1 on Flower, as Flower counts, else 0.

    Records of Flower runs that do not say Flower's numbers are counted from 0.
    """
    return int(any(entry.get("server_round") for entry in run.rounds))


def count_rounds(folder: Path) -> int:
    """How many rounds the record has so far; 0 when there is none."""
    return max(0, _count_lines(folder) - 1)


def _count_lines(folder: Path) -> int:
    try:
        return read_plain(folder / RECORD).count(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return 0


def read_run(folder: Path, *, check: bool = True) -> RunRecord:
    """The run in `folder`, complete lines only. Raises RecordError for a missing or damaged one.

    Args:
        folder: The run's folder.
        check: Whether what was written before the newest checkpoint is held against it.
    """
    path = folder / RECORD
    try:
        # What follows the last newline is torn or empty.
        lines = read_plain(path).decode("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise RecordError(f"{folder} holds no run: there is no {RECORD} in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise RecordError(f"{path} has no header yet: the run has just started, or died at once")
    header, *rounds = (_parse(path, number, line) for number, line in enumerate(lines, start=1))
    run = RunRecord(folder, header, rounds)
    marks = load_marks(folder / CHECKPOINT) if check else None
    if marks is not None:
        check_marks(folder, run, marks)
    return run


def rounds_digest(rounds: Iterable[Mapping[str, Any]]) -> hashlib._Hash:
    """A checksum of a record's rounds; `update` it with the lines that follow."""
    return hashlib.sha256("".join(map(json_line, rounds)).encode())


def check_marks(folder: Path, run: RunRecord, marks: Saved) -> None:
    """Refuse a record that is not the one that a checkpoint belongs to."""
    if marks.round > len(run.rounds):  # it may be written at this moment
        return
    before = with_selector_name(marks.header, str(run.header.get("selector")))
    changed = differences(dict(before), dict(run.header))
    changed.pop("config.training.rounds", None)  # which a resumed run may change
    if changed:
        _refuse(folder, f"in the header, {', '.join(changed)} is")
    if rounds_digest(run.rounds[: marks.round]).hexdigest() != marks.rounds:
        _refuse(folder, f"something in the first {marks.round} rounds is")


def _refuse(folder: Path, what: str) -> NoReturn:
    raise RecordError(
        f"{folder / RECORD}: {what} not as it was written before the checkpoint; the file was "
        "edited or damaged. Put back a copy of it; to read it as it is, delete "
        f"{folder / CHECKPOINT.parent}, the whole folder"
    )


def _parse(path: Path, number: int, line: str) -> Mapping[str, Any]:
    """Line `number` of a record, from 1: the header, or round `number - 2`."""
    try:
        entry = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise RecordError(
            f"{path}, line {number}: not JSON ({error}); the file was edited or damaged"
        ) from error
    key, expected = ("kind", "header") if number == 1 else ("round", number - 2)
    if not isinstance(entry, dict) or entry.get(key) != expected:
        what = "header" if number == 1 else f"round {expected}"
        raise RecordError(f"{path}, line {number}: expected the {what}")
    if number > 1:
        _check_types(path, number, entry)
        return entry
    if entry.get("format") != FORMAT:
        raise RecordError(
            f"{path} has the format {entry.get('format')!r}, and this version of fedcor reads "
            f"format {FORMAT} only: run it again, or use the version that wrote it"
        )
    config = entry.get("config") or {}
    tables = {"config": config, "versions": entry.get("versions")}
    if isinstance(config, dict):
        tables |= {key: config.get(key) for key in ("training", "selectors", "optimiser")}
    for key, table in tables.items():
        if table is not None and not isinstance(table, dict):
            raise RecordError(f"{path}, line 1: {key} is unusable; the file was edited or damaged")
    return entry


def _no_number(name: str) -> NoReturn:
    """What Python writes for numbers that JSON does not have; a record has null there."""
    raise ValueError(f"{name} is no number of JSON")


def _check_types(path: Path, number: int, entry: Mapping[str, Any]) -> None:
    """Refuse a round whose values are not what their names say; a missing one may be."""
    for test, keys in _TESTS.items():
        for key in keys:
            if entry.get(key) is not None and not test(entry[key]):
                raise RecordError(
                    f"{path}, line {number}: {key} is unusable; the file was edited or damaged"
                )


def _are_clients(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 1e300)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _table_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A test of a table: names -> values that pass `test`."""
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


_TESTS: Mapping[Callable[[Any], bool], Sequence[str]] = {
    _are_clients: ("selected", "participated", "clipped", "capped"),
    _is_number: (
        *("test_accuracy", "test_loss", "seconds", "bytes_down", "bytes_up"),
        *("duration", "clock", "unreachable"),
    ),
    _table_of(_are_numbers): ("why", "details"),
    _table_of(lambda value: _is_number(value) or _are_numbers(value)): ("metrics",),
    _table_of(_are_clients): ("missing",),
}


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
    """The named arrays of a run's newest checkpoint; None when it has none yet.

    Raises RecordError for a damaged one; `resume.open_run` then takes the one before it.
    """
    path = folder / CHECKPOINT
    try:
        saved = load_checkpoint(path)
    except RecordError as error:
        raise RecordError(f"the checkpoint {path} is damaged: {error}") from error
    return None if saved is None else saved.arrays


def client_names(folder: Path | None) -> list[str]:
    """Each client's name, as an escaped text of one line; empty where clients have no names."""
    if folder is None:
        return []
    try:
        text = read_plain(folder / CLIENT_NAMES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [one_line(line.partition("\t")[2]) for line in text.split("\n")[:-1]]


def json_line(entry: Mapping[str, Any]) -> str:
    """`entry` as a line of the record; numbers that JSON does not have become null."""
    clean = {
        key: _in_json(value)
        for key, value in entry.items()
        # A round that took no time has a duration, too.
        if value or key not in _OPTIONAL or isinstance(value, float)
    }
    return json.dumps(clean, separators=(",", ":"), allow_nan=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else repr(value)


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
