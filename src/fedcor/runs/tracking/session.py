"""The callbacks of one run: trackers by name, checks, and the calls in order.

An error in a user's callback ends the run. An error in a tracker is logged, and the run goes on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedcor.core.errors import ConfigError
from fedcor.core.registry import Registry
from fedcor.core.text import one_line
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import RunRecord, read_run
from fedcor.runs.tracking.callback import METHODS, GivenCallback, StartedRun, Tracker, as_entry

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
        return TRACKERS.build(given, {})
    if _has_methods(given):
        if isinstance(given, type):
            return given()
        return copy.copy(given) if isinstance(given, Tracker) else given
    if isinstance(given, type) or not callable(given):
        raise ConfigError("callbacks", given, _ALLOWED)
    return SimpleNamespace(on_round=given)


_ALLOWED = (
    "must be a function of a round's record, an object or a class with some of the methods "
    f"{', '.join(METHODS)}, or a tracker's name"
)


def _has_methods(given: object) -> bool:
    return any(callable(getattr(given, method, None)) for method in METHODS)


def _is_tracker(given: GivenCallback) -> bool:
    """Whether an error in it must not end the run: it is a tracker, or was given by its name."""
    if isinstance(given, type):
        return issubclass(given, Tracker)
    return isinstance(given, str | Tracker)


def check_callbacks(
    callbacks: Iterable[GivenCallback], folder: Path | str | None, parameter: str = "out"
) -> tuple[GivenCallback, ...]:
    """The callbacks, after a trial that each can be made; before anything runs.

    Args:
        callbacks: As a user gave them.
        folder: Of the run; None for a run that lives in memory, which no tracker can follow.
        parameter: What the folder is called where it can be given.
    """
    given: Any = callbacks
    if isinstance(given, str | Mapping) or callable(given) or not isinstance(given, Iterable):
        example = f'["{given}"]' if isinstance(given, str) else "[f]"
        raise ConfigError("callbacks", given, f"must be a list, such as {example}")
    checked: tuple[GivenCallback, ...] = tuple(given)
    for one in checked:
        of_user = isinstance(one, type) and _has_methods(one) and not _is_tracker(one)
        if not of_user:  # of a class of the user's, nothing is made in vain
            build_callback(one)
        if folder is None and _is_tracker(one):
            allowed = f"is written to the folder of its run: give {parameter}"
            raise ConfigError("callbacks", one, allowed)
    return checked


LOG = logging.getLogger("fedcor")


class Session:
    """Calls the callbacks of one run. Made by `following`."""

    def __init__(self, callbacks: Iterable[GivenCallback]) -> None:
        given = list(callbacks)
        self._callbacks = [build_callback(one) for one in given]
        self._trackers = {index for index, one in enumerate(given) if _is_tracker(one)}
        self._failed: set[int] = set()
        self._reads_record = any(hasattr(one, "on_end") for one in self._callbacks)
        self._run: StartedRun | None = None
        self._lines: list[Mapping[str, Any]] = []  # of a run in memory

    def start(self, run: StartedRun) -> None:
        """The run starts, or continues."""
        self._run, self._lines = run, list(run.rounds)
        self._tell("on_start", run)

    def round(self, record: RoundRecord) -> None:
        """A round is over, and in the record."""
        if self._reads_record and self._run is not None and self._run.folder is None:
            self._lines.append(as_entry(record))
        self._tell("on_round", record)

    def end(self) -> None:
        """All rounds are over."""
        assert self._run is not None, "start() comes first"
        if self._reads_record:
            header, folder = self._run.header, self._run.folder
            in_memory = RunRecord(None, header, self._lines)
            self._tell("on_end", in_memory if folder is None else read_run(folder))

    def close(self, *, quietly: bool = False) -> None:
        """Close every callback; an error of one does not keep the others open.

        Args:
            quietly: Whether the run ends with an error already, which must not be hidden.
        """
        errors: list[Exception] = []
        for index in range(len(self._callbacks)):
            try:
                self._call(index, "close")
            except Exception as error:
                errors.append(error)
        if errors and not quietly:
            raise errors[0]

    def _tell(self, method: str, what: object) -> None:
        for index in range(len(self._callbacks)):
            if index not in self._failed:
                self._call(index, method, what)

    def _call(self, index: int, method: str, *arguments: object) -> None:
        function = getattr(self._callbacks[index], method, None)
        if not callable(function):
            return
        try:
            function(*arguments)
        except Exception as error:
            if index not in self._trackers:
                raise
            if index not in self._failed:
                where = "" if self._run is None else f" of {self._run.folder}"
                LOG.warning(
                    "a tracker%s failed and is left out from here on; the run itself goes on "
                    "(resume it with the tracker to write what is missing): %s: %s",
                    *(where, type(error).__name__, one_line(str(error), 500)),
                )
                LOG.debug("%s failed", function, exc_info=error)
            self._failed.add(index)


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
