"""Trackers by name, and callbacks ready to hear of one run."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedcor.errors import ConfigError
from fedcor.plugins import Registry
from fedcor.record import RoundRecord
from fedcor.tracking.callback import METHODS, GivenCallback, Tracker, as_callbacks
from fedcor.tracking.csv_files import CSV
from fedcor.tracking.mlflow_store import MLflow
from fedcor.tracking.tensorboard_events import TensorBoard
from fedcor.tracking.wandb_run import WandB

__all__ = ["TRACKERS", "build_callback", "check_callbacks", "tracker_names"]

TRACKERS = Registry(
    "callbacks",
    "fedcor.trackers",
    {"csv": CSV, "mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB},
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
