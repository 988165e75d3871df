"""Callbacks, called after every round: their protocol, and what trackers share.

A tracker is a callback that logs a run elsewhere. `RoundTracker` gives it the numbers of every
round. The helpers here keep what a tracker needs to continue (`remember`), attach files, and turn a
round into named numbers (`scalars`, `Tally`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedcor.core.errors import MissingExtraError, RecordError
from fedcor.core.files import write_whole
from fedcor.core.types import IntArray
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import CLIENT_NAMES, RECORD, RunRecord, json_line

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
    """An object that is notified during a run. Every method is optional.

    A function of a round's record is a callback, too.

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


# An object with some of the methods, a class of such objects, a function of a round's record, or a
# tracker's name.
GivenCallback = Callback | Tracker | type[Any] | Callable[[RoundRecord], object] | str | Any


REPORT = "report.html"


def check_installed(package: str, extra: str) -> None:
    """Raise MissingExtraError if `package` is not there; it is not imported."""
    from importlib.util import find_spec

    found = find_spec(package)
    # A folder that is called so, as `wandb` makes one, passes for a package without an origin.
    if found is None or found.origin is None:
        raise MissingExtraError(package, extra)


def no_link(path: Path) -> Path:
    """`path`; nothing is written through a symbolic link in a run's folder."""
    if path.is_symlink():
        raise RecordError(f"{path} is a symbolic link: replace it by what it points to")
    return path


def remember(folder: Path, name: str, values: Mapping[str, str]) -> None:
    """Write what a tracker needs to go on, to `NAME.json`."""
    write_whole(no_link(folder / f"{name}.json"), (json.dumps(dict(values)) + "\n").encode())


def recall(folder: Path, name: str) -> dict[str, str]:
    """What was written by `remember`; empty if there is nothing that can be read."""
    try:
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def copy_attachments(folder: Path, to: Path) -> list[Path]:
    """Copy what is attached at the end: the record, the clients' names, the page; if they exist.

    The copy of the record has another name: below the folder of a comparison, it would be read as
    one more run.
    """
    names = {RECORD: "record.jsonl", CLIENT_NAMES: CLIENT_NAMES, REPORT: REPORT}
    found = {name: to / copied for name, copied in names.items() if (folder / name).is_file()}
    for name, path in found.items():
        shutil.copyfile(folder / name, path)
    return list(found.values())


HISTOGRAM_EVERY = 10  # rounds: a histogram has a number per client
_NAMES = {"test_accuracy": "accuracy", "test_loss": "loss"}
_PLAIN = (
    "test_accuracy", "test_loss", "learning_rate", "probed", "refused", "bytes_down", "bytes_up",
    "seconds", "memory_bytes",
)  # fmt: skip


def as_entry(record: RoundRecord) -> Mapping[str, Any]:
    """The round as its line of the record has it."""
    entry: Mapping[str, Any] = json.loads(json_line(dataclasses.asdict(record)))
    return entry


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers by name; those that are missing or not finite are left out.

    A selector's reasons are given as `why/NAME`, their mean over the chosen clients. Metrics with
    the name of another number are `metric/NAME`. Lists of numbers are left out.

    >>> line = {"selected": [3, 1], "participated": [3], "bytes_up": 8, "why": {"gain": [1, 2]}}
    >>> scalars(line)
    {'selected': 2.0, 'participants': 1.0, 'bytes_up': 8.0, 'why/gain': 1.5}
    """
    found: dict[str, Any] = {
        "selected": len(entry.get("selected") or ()),
        "participants": len(entry.get("participated") or ()),
    }
    found |= {_NAMES.get(key, key): entry.get(key) for key in _PLAIN}
    if entry.get("quarantined"):
        found["quarantined"] = len(entry["quarantined"])
    if entry.get("unmet"):
        found["unmet"] = sum(entry["unmet"].values())
    for name, values in (entry.get("why") or {}).items():
        if name == "runner_up":  # the numbers of clients have no mean
            continue
        known = [value for value in values if _is_number(value)]
        found[f"why/{name}"] = sum(known) / len(known) if known else None
    for name, value in (entry.get("metrics") or {}).items():
        taken = name in found or name in ("bytes", "clients_seen", "round")
        found[f"metric/{name}" if taken else name] = value
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclasses.dataclass
class Tally:
    """What adds up over the rounds: bytes, and how often each client was chosen."""

    bytes: int = 0
    selected: Counter[int] = dataclasses.field(default_factory=Counter)
    participated: Counter[int] = dataclasses.field(default_factory=Counter)

    def add(self, entry: Mapping[str, Any]) -> dict[str, float]:
        """The round's numbers, with `bytes` and `clients_seen`, which are of all rounds so far."""
        self.bytes += (entry.get("bytes_down") or 0) + (entry.get("bytes_up") or 0)
        self.selected.update(entry.get("selected") or ())
        self.participated.update(entry.get("participated") or ())
        both = {"bytes": float(self.bytes), "clients_seen": float(len(self.selected))}
        return {**scalars(entry), **both}

    def counts(self, clients: int = 0) -> IntArray:
        """How often each client was chosen, for as many clients as are known of."""
        known = max(clients, max(self.selected, default=0) + 1)
        return np.array([self.selected[client] for client in range(known)])

    def table(self, clients: int = 0) -> str:
        """As CSV: each client, how often it was chosen, and how often it delivered."""
        rows = (
            f"{client},{times},{self.participated[client]}\n"
            for client, times in enumerate(self.counts(clients))
        )
        return "".join(["client,selected,participated\n", *rows])


class RoundTracker(Tracker, ABC):
    """The root of trackers that log the numbers of every round, with those of before this start.

    Attributes:
        tally: What adds up over the rounds so far.
        clients: How many clients the settings say there are; see `known_clients`.
        now: When the round that is logged was over, in seconds since 1970.
    """

    tally: Tally
    clients: int
    now: float

    def on_start(self, run: StartedRun) -> None:
        """Open the log, and log the rounds so far."""
        assert run.folder is not None
        self.tally, self.clients = Tally(), known_clients(run.header)
        self.open(run, run.folder)
        # The time of earlier rounds is that which they took, up to now.
        seconds = [float(entry.get("seconds") or 0.0) for entry in run.rounds]
        self.now = time.time() - sum(seconds)
        for entry, taken in zip(run.rounds, seconds, strict=True):
            self.now += taken
            self.log(entry["round"], self.tally.add(entry))
        self.flush()

    def on_round(self, record: RoundRecord) -> None:
        """Log the round."""
        self.now = time.time()
        self.log(record.round, self.tally.add(as_entry(record)))
        self.flush()

    @abstractmethod
    def open(self, run: StartedRun, folder: Path) -> None:
        """Open the log of the run in `folder`."""

    @abstractmethod
    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers of round `step`."""

    @abstractmethod
    def flush(self) -> None:
        """Called after one or several rounds were logged."""


def known_clients(header: Mapping[str, Any]) -> int:
    """How many clients the settings say there are; 0 where they do not, as on Flower."""
    partition = (header.get("config") or {}).get("partition") or {}
    clients = partition.get("clients") if isinstance(partition, Mapping) else None
    return clients if isinstance(clients, int) else 0


def flat_settings(tree: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """A header's settings as texts under dotted names.

    >>> flat_settings({"seed": 1, "config": {"training": {"rounds": 5}}})
    {'seed': '1', 'config.training.rounds': '5'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{path}.{key}".removeprefix(".")
        if isinstance(value, Mapping):
            flat |= flat_settings(value, name)
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=repr)
    return flat
