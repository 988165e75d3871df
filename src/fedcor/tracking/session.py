"""The callbacks of one run: told in order, each kept from failing if it only looks on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedcor.foreign import one_line
from fedcor.record import RoundRecord, RunRecord, json_line, read_run
from fedcor.tracking.callback import GivenCallback, StartedRun, Tracker
from fedcor.tracking.registry import build_callback

__all__ = ["Session", "following"]

LOG = logging.getLogger("fedcor")


class Session:
    """Tells callbacks of one run. Made by `following`."""

    def __init__(self, callbacks: Iterable[GivenCallback]) -> None:
        self._callbacks = [build_callback(one) for one in callbacks]
        self._failed: set[int] = set()
        self._run: StartedRun | None = None
        self._lines: list[Mapping[str, Any]] = []  # of a run in memory

    def start(self, run: StartedRun) -> None:
        """The run starts, or continues."""
        self._run, self._lines = run, list(run.rounds)
        self._tell("on_start", run)

    def round(self, record: RoundRecord) -> None:
        """A round is over, and in the record."""
        if self._callbacks and self._run is not None and self._run.folder is None:
            self._lines.append(json.loads(json_line(vars(record))))
        self._tell("on_round", record)

    def end(self) -> None:
        """All rounds are over."""
        assert self._run is not None, "start() comes first"
        if not self._callbacks:
            return
        folder = self._run.folder
        finished = (
            RunRecord(None, self._run.header, self._lines) if folder is None else read_run(folder)
        )
        self._tell("on_end", finished)

    def close(self, *, quietly: bool = False) -> None:
        """Close every callback; an error of one does not keep the others open.

        Args:
            quietly: Whether the run ends with an error already, which must not be hidden.
        """
        first: Exception | None = None
        for index in range(len(self._callbacks)):
            try:
                self._call(index, "close", ())
            except Exception as error:
                first = first or error
        if first is not None and not quietly:
            raise first

    def _tell(self, method: str, what: object) -> None:
        for index in range(len(self._callbacks)):
            if index not in self._failed:
                self._call(index, method, (what,))

    def _call(self, index: int, method: str, arguments: tuple[object, ...]) -> None:
        callback = self._callbacks[index]
        function = getattr(callback, method, None)
        if not callable(function):
            return
        try:
            function(*arguments)
        except Exception as error:
            if not isinstance(callback, Tracker):
                raise
            if index not in self._failed:
                self._warn(callback, error)
            self._failed.add(index)

    def _warn(self, callback: Tracker, error: Exception) -> None:
        where = "" if self._run is None else f" of {self._run.folder}"
        LOG.warning(
            "a tracker%s failed and is left out from here on; the run itself goes on "
            "(resume it with the tracker to write what is missing): %s: %s",
            *(where, type(error).__name__, one_line(str(error), 500)),
        )
        LOG.debug("%s failed", type(callback).__name__, exc_info=error)


@contextmanager
def following(callbacks: Iterable[GivenCallback]) -> Iterator[Session]:
    """The callbacks, made for one run, and closed however it ends.

    Args:
        callbacks: As a user gave them; see `build_callback`.
    """
    session = Session(callbacks)
    try:
        yield session
    except BaseException:
        session.close(quietly=True)
        raise
    session.close()
