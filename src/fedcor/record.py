"""A run is a folder: an append-only record, a checkpoint, a lock. Nothing is ever lost, overwritten silently, or pickled.

    rounds.jsonl            the header, then one JSON line a round; a torn last line is tolerated
    checkpoint/state.npz    named arrays; written whole and renamed, every few rounds
    run.lock                held by the process that writes; the operating system lets go of it when that process dies

Every round is a function of the checkpoint before it, so a resumed run goes back to the last checkpoint, drops the lines after
it, and writes them again, the same.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from filelock import FileLock, Timeout

from fedcor.errors import RecordError, RunExistsError
from fedcor.header import named_alike, rename_selector, upgrade
from fedcor.types import Array

__all__ = [
    "RoundRecord",
    "RunRecord",
    "RunWriter",
    "client_names",
    "count_rounds",
    "differences",
    "has_run",
    "open_run",
    "read_checkpoint",
    "read_run",
    "read_runs",
    "save_arrays",
    "write_client_names",
    "write_whole",
]

RECORD = "rounds.jsonl"
CHECKPOINT = Path("checkpoint") / "state.npz"


@dataclass(frozen=True)
class RoundRecord:
    """One line of the record: what was chosen, what came of it, what it cost."""

    round: int
    selected: list[int]
    participated: list[int]
    test_accuracy: float
    test_loss: float
    learning_rate: float
    probed: int  # losses that clients were asked for
    refused: int  # answers and updates that were unusable numbers
    bytes_down: int
    bytes_up: int
    seconds: float
    why: Mapping[str, list[float | None]] = field(
        default_factory=dict
    )  # the selector's reasons, one a chosen client


@dataclass(frozen=True)
class RunRecord:
    """A record as it was read: finished or still running."""

    path: Path
    header: Mapping[str, Any]
    rounds: list[Mapping[str, Any]]


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: a reader, or a crash, sees the old file or the new one and nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Named arrays as an .npz file, written whole, without pickle."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise RecordError(
                f"the array {name!r} holds Python objects; a file takes plain arrays only"
            )
    content = io.BytesIO()
    np.savez(content, **dict(arrays))  # type: ignore[arg-type]
    write_whole(path, content.getvalue())


def read_run(folder: Path) -> RunRecord:
    """The run in `folder`; whole lines only."""
    path = folder / RECORD
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[
            :-1
        ]  # what follows the last newline is torn or empty
    except FileNotFoundError:
        raise RecordError(f"{folder} holds no run: there is no {RECORD} in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RecordError(
                f"{path}, line {number}: not JSON ({error}); the file was changed by hand or damaged"
            ) from error
        expected = "header" if number == 1 else number - 2
        if not isinstance(entry, dict) or entry.get("kind" if number == 1 else "round") != expected:
            raise RecordError(
                f"{path}, line {number}: expected the {'header' if number == 1 else f'round {expected}'}"
            )
        entries.append(entry)
    if not entries:
        raise RecordError(f"{path} has no header yet: the run has only just begun, or died at once")
    return RunRecord(folder, upgrade(entries[0]), list(entries[1:]))


def count_rounds(folder: Path) -> int:
    """How many rounds the record has so far; 0 when there is none."""
    try:
        return max(0, (folder / RECORD).read_bytes().count(b"\n") - 1)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def write_client_names(folder: Path, names: Sequence[str]) -> None:
    """clients.tsv: number and name of each client, where clients have names."""
    lines = (
        f"{client}\t{json.dumps(name, ensure_ascii=False)[1:-1]}\n"
        for client, name in enumerate(names)
    )
    write_whole(folder / "clients.tsv", "".join(lines).encode())


def client_names(folder: Path) -> list[str]:
    """Each client's name, as an escaped text of one line; empty where there are none."""
    try:
        lines = (folder / "clients.tsv").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [line.partition("\t")[2] for line in lines]


def has_run(folder: Path) -> bool:
    """Whether a run has begun there: its header is whole."""
    try:
        return b"\n" in (folder / RECORD).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_runs(folder: Path) -> list[RunRecord]:
    """Every run in `folder` and below it, in the order of their paths."""
    if not folder.is_dir():
        raise RecordError(f"there is no folder {folder}")
    paths = sorted(folder.rglob(RECORD))
    if not paths:
        raise RecordError(
            f"no run in {folder}: no {RECORD} there or below; fedcor run or fedcor compare makes one"
        )
    return [read_run(path.parent) for path in paths if has_run(path.parent)]


class RunWriter:
    """Writes one run's folder. Made by `open_run`, which holds the lock; nothing is written before `begin`."""

    def __init__(
        self,
        folder: Path,
        header: Mapping[str, Any],
        before: RunRecord | None,
        checkpoint: Mapping[str, Array] | None,
    ) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self._header, self._before = header, before
        self._file: TextIO | None = None

    @property
    def done(self) -> int:
        """Rounds that need not be run again."""
        return int(self.checkpoint["round"]) if self.checkpoint else 0

    def begin(self) -> None:
        """Lay the record as it was at the last checkpoint, and open it for more."""
        kept: list[Mapping[str, Any]] = []
        if self._before is None:
            (self.folder / CHECKPOINT).unlink(missing_ok=True)  # of a record that is gone
        else:
            kept = self._before.rounds[: self.done]
            # The settings may ask for more rounds, and the selector's name may have become another
            # one; all else stays as the run began, the library versions too.
            new = {key: self._header[key] for key in ("selector", "config") if key in self._header}
            self._header = {**self._before.header, **new}
        write_whole(self.folder / RECORD, "".join(map(_line, [self._header, *kept])).encode())
        self._file = (self.folder / RECORD).open("a", encoding="utf-8")

    def append(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None, "begin() comes first"
        self._file.write(_line(entry))
        self._file.flush()

    def save(self, arrays: Mapping[str, Array]) -> None:
        """Checkpoint: first the record is on the disk, then the state that follows from it."""
        assert self._file is not None, "begin() comes first"
        os.fsync(self._file.fileno())
        save_arrays(self.folder / CHECKPOINT, arrays)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(entry: Mapping[str, Any]) -> str:
    clean = {
        key: None if isinstance(v, float) and not np.isfinite(v) else v for key, v in entry.items()
    }
    return json.dumps(clean, separators=(",", ":"), allow_nan=False, default=repr) + "\n"


@contextmanager
def open_run(folder: Path, header: Mapping[str, Any], *, resume: bool) -> Iterator[RunWriter]:
    """Begin the run that `header` describes in `folder`, or go on with it where `resume`."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"the folder {folder} cannot be made: {error}") from error
    lock = FileLock(folder / "run.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RecordError(f"{folder} is in use: another process is writing this run") from None
    writer = None
    try:
        header = {"kind": "header", **header}
        before, checkpoint = _look(folder, header, resume)
        writer = RunWriter(folder, header, before, checkpoint)
        yield writer
    finally:
        if writer is not None:
            writer.close()
        lock.release()
        if made and not (folder / RECORD).exists():  # refused before anything was written
            with suppress(OSError):
                (folder / "run.lock").unlink(missing_ok=True)
                folder.rmdir()


def _look(
    folder: Path, header: Mapping[str, Any], resume: bool
) -> tuple[RunRecord | None, dict[str, Array] | None]:
    """The run that is there and its checkpoint; refuses one that is not ours to go on with."""
    if not has_run(folder):
        return None, None
    run, checkpoint = read_run(folder), read_checkpoint(folder)
    if not resume and not run.rounds and checkpoint is None:
        return None, None  # it died in its first round: there is nothing to lose
    _check_same(folder, run.header, json.loads(_line(header)))
    if not resume:
        raise RunExistsError(folder)
    done = int(checkpoint["round"]) if checkpoint else 0
    if len(run.rounds) < done:
        raise RecordError(
            f"{run.path / RECORD} has {len(run.rounds)} rounds, but the checkpoint beside it was made after {done}"
        )
    return run, checkpoint


def _check_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """A run may be made longer, and go on with other library versions; nothing else of it may change."""
    if named_alike(str(old.get("selector")), str(new.get("selector"))):
        old = rename_selector(old, new["selector"])
    for key in ("experiment", "selector", "seed", "engine"):
        if old.get(key) != new.get(key):
            told = f"its {key} is {old.get(key)!r}, not {new.get(key)!r}"
            raise RecordError(f"{folder} holds another run: {told}; choose another folder")
    differing = differences(old.get("config", {}), new.get("config", {}))
    differing.pop("training.rounds", None)
    if differing:
        pairs = (
            (key, *("not set" if v is None else repr(v) for v in both))
            for key, both in differing.items()
        )
        told = "; ".join(f"{key} is {was} there, {now} here" for key, was, now in pairs)
        raise RecordError(
            f"{folder} holds a run with other settings ({told}); choose another folder"
        )


def differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two trees of settings differ: dotted key -> (old, new)."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*old, *new}):
            found |= differences(old.get(key), new.get(key), f"{path}.{key}".removeprefix("."))
        return found
    return {} if old == new else {path: (old, new)}


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
            f"the checkpoint {path} is damaged; delete it to begin this run again"
        ) from error
