"""What hears of a run while it goes on: the protocol of callbacks, and which ones are accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedcor.errors import ConfigError
from fedcor.record import RoundRecord, RunRecord

__all__ = ["METHODS", "Callback", "GivenCallback", "StartedRun", "Tracker", "as_callbacks"]

METHODS = ("on_start", "on_round", "on_end", "close")


@dataclass(frozen=True)
class StartedRun:
    """A run that starts, or continues.

    Attributes:
        header: What is run, with which settings and versions: the first line of its record.
        folder: The run's folder; None for a run that lives in memory.
        root: The folder of all runs that belong together, as those of a comparison. Of a single
            run, its own folder.
        resumed: Whether the run was in the folder before.
        rounds: The lines of the rounds that are not run again, as `RunRecord.rounds` has them.
    """

    header: Mapping[str, Any]
    folder: Path | None = None
    root: Path | None = None
    resumed: bool = False
    rounds: list[Mapping[str, Any]] | tuple[()] = ()

    @property
    def name(self) -> str:
        """`selector/seed-1`."""
        return f"{self.header.get('selector')}/seed-{self.header.get('seed')}"


class Callback(Protocol):
    """Hears of a run. Every method may be left out; a function of a round's record will do, too.

    A callback must change nothing of what it is given.
    """

    def on_start(self, run: StartedRun) -> None:
        """Called once before the first round of this start."""
        ...

    def on_round(self, record: RoundRecord) -> None:
        """Called after each round, when the round is in the record."""
        ...

    def on_end(self, run: RunRecord) -> None:
        """Called after the last round, with the whole record. Not if the run ends early."""
        ...

    def close(self) -> None:
        """Called last, however the run ended."""
        ...


class Tracker:
    """The root of callbacks that only look on: if one fails, it is logged, and the run goes on.

    Each run has a copy of its own. A tracker needs the run's folder: a run that lives in memory is
    refused. A tracker of yours may derive from it, and has then both properties.
    """

    def on_start(self, run: StartedRun) -> None:
        """Nothing, unless it is overridden."""

    def on_round(self, record: RoundRecord) -> None:
        """Nothing, unless it is overridden."""

    def on_end(self, run: RunRecord) -> None:
        """Nothing, unless it is overridden."""

    def close(self) -> None:
        """Nothing, unless it is overridden."""


# An object with some of the methods, a class of such objects, a function of a round's record, or a
# tracker's name.
GivenCallback = Callback | Tracker | type[Any] | Callable[[RoundRecord], object] | str | Any


def as_callbacks(given: Iterable[GivenCallback]) -> tuple[GivenCallback, ...]:
    """What a user gave as `callbacks`, as a tuple; its entries are not looked at."""
    single = isinstance(given, str | Mapping) or callable(given) or not _is_iterable(given)
    if single:
        example = f'["{given}"]' if isinstance(given, str) else "[f]"
        raise ConfigError("callbacks", given, f"must be a list, such as {example}")
    return tuple(given)


def _is_iterable(given: object) -> bool:
    return isinstance(given, Iterable)
