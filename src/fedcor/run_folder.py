"""Writing a run's folder: an append-only record, a checkpoint, a lock. Nothing is ever lost,
overwritten silently, or pickled.

Every round is a function of the checkpoint before it. So a resumed run returns to the last
checkpoint, drops the lines after it, and writes them again with the same content. The operating
system releases the lock when the process that writes dies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from fedcor.errors import RecordError, RunExistsError
from fedcor.files import save_arrays, write_whole
from fedcor.header import restore_name
from fedcor.record import (
    CHECKPOINT,
    CLIENT_NAMES,
    RECORD,
    RunRecord,
    differences,
    has_run,
    json_line,
    read_checkpoint,
    read_run,
)
from fedcor.types import Array

__all__ = ["RunWriter", "open_run", "write_client_names"]

LOCK = "run.lock"


@contextmanager
def open_run(folder: Path, header: Mapping[str, Any], *, resume: bool) -> Iterator[RunWriter]:
    """Open `folder` for the run that `header` describes, and hold its lock meanwhile.

    Args:
        folder: The run's folder; made if it is missing.
        header: What is run; see `fedcor.header.run_header`.
        resume: Whether a run that is there already is resumed; else it is refused.

    Yields:
        A writer. Nothing is written before its `begin`.

    Raises:
        RunExistsError: There is such a run already, and `resume` is false.
        RecordError: The folder cannot be used: locked, damaged, or with another run in it.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"the folder {folder} cannot be made: {error}") from error
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RecordError(f"{folder} is in use: another process is writing this run") from None
    writer = None
    try:
        header = {"kind": "header", **header}
        before, checkpoint = _existing_run(folder, header, resume)
        writer = RunWriter(folder, header, before, checkpoint)
        yield writer
    finally:
        if writer is not None:
            writer.close()
        lock.release()
        if made and not (folder / RECORD).exists():  # refused before anything was written
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


class RunWriter:
    """Writes one run's folder. Made by `open_run`; nothing is written before `begin`.

    Attributes:
        folder: The run's folder.
        checkpoint: The named arrays from which the run resumes; None for a new run.
    """

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
        """How many rounds need not be run again."""
        return int(self.checkpoint["round"]) if self.checkpoint else 0

    def begin(self) -> None:
        """Write the record as it was at the last checkpoint, and open it for more lines."""
        kept: list[Mapping[str, Any]] = []
        if self._before is None:
            # A checkpoint may be left of a record that is gone.
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        else:
            kept = self._before.rounds[: self.done]
            # The settings may ask for more rounds, and the selector may have another name now.
            # Everything else stays as it was when the run started, library versions included.
            current = ("format", "selector", "config")
            new = {key: self._header[key] for key in current if key in self._header}
            self._header = {**self._before.header, **new}
        write_whole(self.folder / RECORD, "".join(map(json_line, [self._header, *kept])).encode())
        self._file = (self.folder / RECORD).open("a", encoding="utf-8")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add the line of a round to the record."""
        assert self._file is not None, "begin() comes first"
        self._file.write(json_line(entry))
        self._file.flush()

    def save(self, arrays: Mapping[str, Array]) -> None:
        """Write a checkpoint, after the lines that lead to it are safely on the disk."""
        assert self._file is not None, "begin() comes first"
        os.fsync(self._file.fileno())
        save_arrays(self.folder / CHECKPOINT, arrays)

    def close(self) -> None:
        """Close the record."""
        if self._file is not None:
            self._file.close()


def write_client_names(folder: Path, names: Sequence[str]) -> None:
    """Write the number and name of each client to clients.tsv."""
    lines = (
        f"{client}\t{json.dumps(name, ensure_ascii=False)[1:-1]}\n"
        for client, name in enumerate(names)
    )
    write_whole(folder / CLIENT_NAMES, "".join(lines).encode())


def _existing_run(
    folder: Path, header: Mapping[str, Any], resume: bool
) -> tuple[RunRecord | None, dict[str, Array] | None]:
    """The run in `folder` and its checkpoint; refuses one that `header` may not resume."""
    if not has_run(folder):
        return None, None
    run, checkpoint = read_run(folder), read_checkpoint(folder)
    if not resume and not run.rounds and checkpoint is None:
        return None, None  # it died in its first round: there is nothing to lose
    _check_same(folder, run.header, json.loads(json_line(header)))
    if not resume:
        raise RunExistsError(folder)
    done = int(checkpoint["round"]) if checkpoint else 0
    if len(run.rounds) < done:
        raise RecordError(
            f"{folder / RECORD} has {len(run.rounds)} rounds, but its checkpoint was made "
            f"after {done}"
        )
    return run, checkpoint


def _check_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """A run may get more rounds and other library versions. Nothing else of it may change."""
    old = restore_name(old, str(new.get("selector")))
    for key in ("experiment", "selector", "seed", "engine"):
        if old.get(key) != new.get(key):
            difference = f"its {key} is {old.get(key)!r}, not {new.get(key)!r}"
            raise RecordError(f"{folder} holds another run: {difference}; choose another folder")
    changed = differences(old.get("config", {}), new.get("config", {}))
    changed.pop("training.rounds", None)
    if changed:
        described = "; ".join(
            f"{key} is {_setting(there)} there, {_setting(here)} here"
            for key, (there, here) in changed.items()
        )
        raise RecordError(
            f"{folder} holds a run with other settings ({described}); choose another folder"
        )


def _setting(value: Any) -> str:
    return "not set" if value is None else repr(value)
