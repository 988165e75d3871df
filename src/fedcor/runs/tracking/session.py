"""The callbacks of one run: trackers by name, checks, and the calls in order.

An error in a user's callback ends the run. An error in a tracker is logged, and the run goes on.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcor.core.errors import ConfigError
from fedcor.core.registry import Registry
from fedcor.core.text import one_line
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import RunRecord, json_line, read_run
from fedcor.runs.tracking.callback import METHODS, GivenCallback, StartedRun, Tracker, as_callbacks

TRACKERS = Registry(
    "callbacks",
    "fedcor.trackers",
    {
        "mlflow": "fedcor.runs.tracking.mlflow_store:MLflow",
        "tensorboard": "fedcor.runs.tracking.tensorboard_events:TensorBoard",
        "wandb": "fedcor.runs.tracking.wandb_run:WandB",
    },
    ("on_round",),
)


def tracker_names() -> list[str]:
    """All built-in and registered trackers."""
    return TRACKERS.names()


class _Named(Tracker):
    """A tracker that was given by its name; it is kept from failing whatever its class is."""

    def __init__(self, made: Any) -> None:
        for method in METHODS:
            if callable(getattr(made, method, None)):
                setattr(self, method, getattr(made, method))


class _EachRound:
    """A function, as a callback."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def on_round(self, record: RoundRecord) -> None:
        """Calls it."""
        self._function(record)


def build_callback(given: GivenCallback) -> Any:
    """One callback for one run.

    Args:
        given: A name or a class, of which an object is made; a tracker, which is copied; any other
            object or function, which is used as it is.

    Raises:
        ConfigError: It is none of them, or cannot be made.
        MissingExtraError: The package of a tracker is not installed.
    """
    if isinstance(given, str):
        made = TRACKERS.build(given, {})
        return made if isinstance(made, Tracker) else _Named(made)
    if isinstance(given, type):
        if not _has_methods(given):
            raise ConfigError("callbacks", given, _ALLOWED)
        return given()
    if isinstance(given, Tracker):
        return copy.copy(given)
    if _has_methods(given):
        return given
    if callable(given):
        return _EachRound(given)
    raise ConfigError("callbacks", given, _ALLOWED)


_ALLOWED = (
    "must be a function of a round's record, an object or a class with some of the methods "
    f"{', '.join(METHODS)}, or a tracker's name"
)


def _has_methods(given: object) -> bool:
    return any(callable(getattr(given, method, None)) for method in METHODS)


def check_callbacks(
    callbacks: Iterable[GivenCallback], folder: Path | str | None, parameter: str = "out"
) -> tuple[GivenCallback, ...]:
    """The callbacks, after a trial that each can be made; before anything runs.

    Args:
        callbacks: As a user gave them.
        folder: Of the run; None for a run that lives in memory, which no tracker can follow.
        parameter: What the folder is called where it can be given.
    """
    given = as_callbacks(callbacks)
    for one in given:
        # Of a class of the user's, nothing is made in vain.
        known = isinstance(one, type) and _has_methods(one) and not issubclass(one, Tracker)
        if not known and isinstance(build_callback(one), Tracker) and folder is None:
            allowed = f"is written to the folder of its run: give {parameter}"
            raise ConfigError("callbacks", one, allowed)
    return given


LOG = logging.getLogger("fedcor")


class Session:
    """Calls the callbacks of one run. Made by `following`."""

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
