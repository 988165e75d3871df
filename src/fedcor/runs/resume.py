"""A run's folder: start it, write it, and resume it after a kill.

It holds an append-only record, a checkpoint and a lock. Nothing is ever lost, overwritten silently,
or pickled.

Every round is a function of the checkpoint before it. So a resumed run returns to the last
checkpoint, drops the lines after it, and writes them again with the same content. The checkpoint
before the last is kept: a resumed run returns to it where the last is damaged, and sets the damaged
one aside. The operating system releases the lock when the process that writes dies.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from fedcor.core.errors import RecordError, RunExistsError
from fedcor.core.files import read_plain, remove_leftovers, write_whole
from fedcor.core.text import one_line
from fedcor.core.types import Array
from fedcor.rounds.record_line import with_selector_name
from fedcor.runs.checkpoints import (
    CHECKPOINT,
    PREVIOUS,
    REFUSED,
    Saved,
    load_checkpoint,
    save_checkpoint,
)
from fedcor.runs.record import (
    CLIENT_NAMES,
    RECORD,
    RunRecord,
    check_marks,
    differences,
    has_run,
    json_line,
    read_run,
    rounds_digest,
)

LOCK = "run.lock"
LOG = logging.getLogger("fedcor")
_WRITTEN = (Path(RECORD), Path(CLIENT_NAMES), CHECKPOINT)


@contextmanager
def open_run(
    folder: Path, header: Mapping[str, Any], *, resume: bool, wait: float = 0.0
) -> Iterator[RunWriter]:
    """Open `folder` for the run that `header` describes, and hold its lock meanwhile.

    Args:
        folder: The run's folder; made if it is missing.
        header: What is run; see `fedcor.rounds.record_line.run_header`.
        resume: Whether a run that is there already is resumed; else it is refused.
        wait: For how many seconds to wait for a lock that another process holds.

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
    _refuse_links(folder)
    lock = FileLock(folder / LOCK, timeout=wait)
    try:
        lock.acquire()
    except Timeout:
        raise RecordError(f"{folder} is in use: another process is writing this run") from None
    try:
        remove_leftovers(folder / path for path in _WRITTEN)
        header = {"kind": "header", **header}
        with closing(RunWriter(folder, header, *_existing_run(folder, header, resume))) as writer:
            yield writer
    finally:
        lock.release()
        if made and not (folder / RECORD).exists():  # refused before anything was written
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


class RunWriter:
    """Writes one run's folder. Made by `open_run`; nothing is written before `begin`.

    Attributes:
        folder: The run's folder.
        header: The record's first line; of a run that is there, the one that was written.
        resumed: Whether the run was in the folder before.
        checkpoint: The named arrays from which the run resumes; None for a new run.
        done: How many rounds need not be run again.
        kept: The lines of the rounds that need not be run again.
    """

    def __init__(
        self,
        folder: Path,
        header: Mapping[str, Any],
        before: RunRecord | None,
        usable: tuple[Path, Saved] | None,
    ) -> None:
        self.folder, self.resumed = folder, before is not None
        self.header = header if before is None else before.header
        path, saved = usable or (None, None)
        self.checkpoint = None if saved is None else saved.arrays
        self.done = 0 if saved is None else saved.round
        self.kept = [] if before is None else before.rounds[: self.done]
        self._newest_is_good = path == CHECKPOINT
        self._given = header
        self._file: TextIO | None = None
        self._digest = rounds_digest(self.kept)

    def begin(self) -> None:
        """Write the record as it was at the last checkpoint, and open it for more lines."""
        # The settings may ask for more rounds, and the selector may have another name now.
        # Everything else stays as it was when the run started, library versions included.
        current = {key: self._given[key] for key in ("selector", "config") if key in self._given}
        self.header = {**self.header, **current}
        if not self.resumed:
            (self.folder / REFUSED).unlink(missing_ok=True)  # of a run that was deleted
        elif not self._newest_is_good:
            # Before the record changes: readers would hold the rounds that are run again, which
            # take other `seconds`, against what a damaged checkpoint says of them.
            with suppress(FileNotFoundError):
                os.replace(self.folder / CHECKPOINT, self.folder / REFUSED)
        lines = map(json_line, [self.header, *self.kept])
        write_whole(self.folder / RECORD, "".join(lines).encode())
        self._file = (self.folder / RECORD).open("a", encoding="utf-8")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add the line of a round to the record."""
        assert self._file is not None, "begin() comes first"
        line = json_line(entry)
        self._digest.update(line.encode())
        self._file.write(line)
        self._file.flush()

    def save(self, arrays: Mapping[str, Array]) -> None:
        """Write a checkpoint, after the lines that lead to it are safely on the disk."""
        self.saving(arrays)()

    def saving(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """What writes a checkpoint of the lines that there are now; another thread may call it."""
        assert self._file is not None, "begin() comes first"
        file, header, rounds = self._file, json_line(self.header), self._digest.hexdigest()

        def save() -> None:
            os.fsync(file.fileno())
            _refuse_links(self.folder)
            keep = self._newest_is_good
            save_checkpoint(self.folder, arrays, header, keep=keep, rounds=rounds)
            self._newest_is_good = True

        return save

    def close(self) -> None:
        """Close the record."""
        if self._file is not None:
            self._file.close()


def write_client_names(folder: Path, names: Sequence[str]) -> None:
    """Write the number and name of each client to clients.tsv, a line each."""
    lines = (
        # JSON escapes what it must; line separators of Unicode, say, it leaves as they are.
        f"{client}\t{one_line(json.dumps(name, ensure_ascii=False)[1:-1], None)}\n"
        for client, name in enumerate(names)
    )
    write_whole(folder / CLIENT_NAMES, "".join(lines).encode())


def folder_name(selector: str) -> str:
    """A selector's name as a folder: some systems do not take the colon of `module:Class`.

    >>> folder_name("fedcor(beta=0.5, warmup=3)")
    'fedcor-beta-0.5-warmup-3'
    """
    return re.sub(r"[^\w.+-]+", "-", selector.replace(":", ".")).strip("-")


def pack_run(folder: Path) -> dict[str, bytes]:
    """The files of a finished run, to be sent to another machine; its newest checkpoint last."""
    names = (RECORD, CLIENT_NAMES, PREVIOUS, CHECKPOINT)
    return {str(name): read_plain(folder / name) for name in names if (folder / name).is_file()}


def unpack_run(folder: Path, header: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Put the files of a finished run in the place of those that are in `folder`.

    An old checkpoint is removed first. So after a kill halfway, the run can be started over.
    """
    with open_run(folder, header, resume=True):
        for old in (CHECKPOINT, PREVIOUS, REFUSED):
            (folder / old).unlink(missing_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)


def _refuse_links(folder: Path) -> None:
    """Nothing is written through a symbolic link; the run's folder itself may be one."""
    for path in (Path(LOCK), CHECKPOINT.parent, PREVIOUS, REFUSED, *_WRITTEN):
        if (folder / path).is_symlink():
            raise RecordError(
                f"{folder / path} is a symbolic link, and a run is written to its own folder "
                "alone: replace the link by what it points to, or choose another folder"
            )


def _existing_run(
    folder: Path, header: Mapping[str, Any], resume: bool
) -> tuple[RunRecord | None, tuple[Path, Saved] | None]:
    """The run in `folder` and its checkpoint; refuses one that `header` may not resume."""
    saved = any((folder / path).exists() for path in (CHECKPOINT, PREVIOUS))
    if not has_run(folder):
        if saved:
            raise RecordError(
                f"{folder} has a checkpoint, but {RECORD} is missing or empty. Put back a copy of "
                f"it if there is one; else delete {folder / CHECKPOINT.parent}, the whole folder, "
                "to start this run over"
            )
        return None, None
    run = read_run(folder, check=False)  # below, against the checkpoint that is used
    if not resume and not run.rounds and not saved:
        return None, None  # it died in its first round: there is nothing to lose
    other = _other_run(run.header, json.loads(json_line(header)))
    if other is not None:
        raise RecordError(f"{folder} holds {other}; choose another folder")
    if not resume:
        raise RunExistsError(folder)
    usable = _usable_checkpoint(folder, run) if saved else None
    if usable is not None:
        check_marks(folder, run, usable[1])
    return run, usable


def _usable_checkpoint(folder: Path, run: RunRecord) -> tuple[Path, Saved]:
    """The newest checkpoint that is whole and of this run; says so if it is not the newest."""
    wrong: dict[Path, str] = {}
    for path in (CHECKPOINT, PREVIOUS):
        try:
            saved = load_checkpoint(folder / path)
        except RecordError as error:
            wrong[path] = f"is damaged ({error})"
            continue
        other = None if saved is None else _other_run(saved.header, run.header)
        if saved is None:
            wrong[path] = "is missing"
        elif other is not None:
            wrong[path] = f"is of {other}"
        elif saved.round > len(run.rounds):  # a copy that was made while the run was written
            wrong[path] = f"is of round {saved.round}, but {RECORD} ends with {len(run.rounds)}"
        else:
            if wrong:
                LOG.warning(
                    "the checkpoint %s %s; resuming from %s, after %d rounds",
                    *(folder / CHECKPOINT, wrong[CHECKPOINT], folder / path, saved.round),
                )
            return path, saved
    described = "; ".join(f"{path.name} {what}" for path, what in wrong.items())
    raise RecordError(
        f"no checkpoint in {folder / CHECKPOINT.parent} can be used: {described}. Put back a copy "
        "of it if there is one; else delete it, the whole folder, to start this run over"
    )


def _other_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """What the header `old` is of, if not of the run of `new`; else None.

    A run may get more rounds and other library versions. Nothing else of it may change.
    """
    old = with_selector_name(old, str(new.get("selector")))
    for key in ("format", "experiment", "selector", "seed", "engine"):
        if old.get(key) != new.get(key):
            return f"another run: its {key} is {old.get(key)!r}, not {new.get(key)!r}"
    changed = differences(old.get("config", {}), new.get("config", {}))
    changed.pop("training.rounds", None)
    if not changed:
        return None
    described = "; ".join(
        f"{key} is {_setting(there)} there, {_setting(here)} here"
        for key, (there, here) in changed.items()
    )
    return f"a run with other settings ({described})"


def _setting(value: Any) -> str:
    return "not set" if value is None else repr(value)
