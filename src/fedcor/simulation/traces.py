"""Trace files: when each client can be reached, and how fast each client is.

A trace is a table with the column `client` (ids from 0). It is a CSV file with a head, or has one
JSON object per line with the same names. A trace of availability has one row per stretch of rounds:

    client          the client's id
    first           the first round in which it can be reached, from 0
    last            the last such round; empty or left out: the run's end
    every           the stretch repeats every so many rounds; empty or left out: it does not
    probability     that it can be reached in a round of the stretch; empty or left out: 1

Where stretches of a client overlap, the highest probability holds. A client without a stretch is
never reached. A trace of devices has one row for each client:

    client, seconds_per_step, down, up      as in `fedcor.Devices`: seconds, and Mbit/s

A trace is read when the settings are made. Its digest is part of the record, so that a run is not
resumed with another trace.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.config import LARGEST_COUNT, check_keys, expand_home
from fedcor.core.describe import Described
from fedcor.core.errors import ConfigError
from fedcor.core.types import BoolArray, FloatArray, IntArray

LARGEST_FILE = 500_000_000  # bytes; its rows take about ten times as many while it is read
_FOREVER = np.iinfo(np.int64).max // 4
_STRETCH = ("client", "first", "last", "every", "probability")
_DEVICE = ("client", "seconds_per_step", "down", "up")


@dataclass(frozen=True)
class _Trace(Described):
    """A file that was read. Two with the same content are equal.

    Args:
        file: Its name, without the folder.
        sha256: Of its content.
    """

    file: str
    sha256: str

    def describe(self) -> dict[str, Any]:
        """Which file it was."""
        return {"file": self.file, "sha256": self.sha256}


@dataclass(frozen=True)
class AvailabilityTrace(_Trace):
    """When each client can be reached.

    Args:
        file, sha256: The file.
        clients: (R,) The client of each stretch.
        first: (R,) Its first round.
        length: (R,) Its number of rounds.
        every: (R,) After how many rounds it repeats; 0 where it does not.
        probability: (R,) That the client can be reached in one of its rounds.
    """

    clients: IntArray = field(compare=False, repr=False)
    first: IntArray = field(compare=False, repr=False)
    length: IntArray = field(compare=False, repr=False)
    every: IntArray = field(compare=False, repr=False)
    probability: FloatArray = field(compare=False, repr=False)

    def at(self, round: int, clients: int) -> FloatArray:
        """(N,) the probability that each client can be reached in a round."""
        since = round - self.first
        within = np.where(self.every > 0, since % np.maximum(self.every, 1), since)
        now = (since >= 0) & (within < self.length)
        probability = np.zeros(clients)
        np.maximum.at(probability, self.clients[now], self.probability[now])
        return probability

    def ever(self, clients: int) -> BoolArray:
        """(N,) which clients can be reached in some round."""
        reachable = np.zeros(clients, dtype=bool)
        reachable[self.clients[self.probability > 0]] = True
        return reachable


@dataclass(frozen=True)
class DeviceTrace(_Trace):
    """How fast each client is.

    Args:
        file, sha256: The file.
        seconds_per_step: (N,) Seconds of one local step.
        down: (N,) Mbit/s from the server.
        up: (N,) Mbit/s to the server.
    """

    seconds_per_step: FloatArray = field(compare=False, repr=False)
    down: FloatArray = field(compare=False, repr=False)
    up: FloatArray = field(compare=False, repr=False)


def read_availability(key: str, path: str) -> AvailabilityTrace:
    """The trace of availability in a file.

    Raises:
        ConfigError: About `key`: the file cannot be read, or which of its rows cannot be used.
    """
    trace, stretches = _TraceFile.read(key, path), []
    for row in trace.rows(_STRETCH, ("client", "first")):
        client, first = row.whole("client", 0), row.whole("first", 0)
        last = row.whole("last", first, _FOREVER)
        every = row.whole("every", 1, 0)
        length = last - first + 1
        if every and last == _FOREVER:
            raise row.error("every", "goes with last: where does the stretch end?")
        if every and length > every:
            raise row.error("every", f"must be at least {length}, the length of the stretch")
        probability = row.number("probability", 0.0, 1.0, 1.0)
        stretches.append((client, first, length, every, probability))
    columns = list(zip(*stretches, strict=True))
    clients, starts, lengths, periods = (np.array(c, dtype=np.int64) for c in columns[:-1])
    probabilities = np.array(columns[-1], dtype=np.float64)
    if not (probabilities > 0).any():
        raise trace.error("no client could ever be reached")
    name, digest = trace.identity
    return AvailabilityTrace(name, digest, clients, starts, lengths, periods, probabilities)


def read_devices(key: str, path: str) -> DeviceTrace:
    """The trace of devices in a file: each client from 0 on, once, in any order.

    Raises:
        ConfigError: About `key`: the file cannot be read, or which of its rows cannot be used.
    """
    trace, found = _TraceFile.read(key, path), {}
    for row in trace.rows(_DEVICE, _DEVICE):
        client = row.whole("client", 0)
        if client in found:
            raise row.error("client", "is listed twice")
        found[client] = [row.number(name, 1e-9, 1e9) for name in _DEVICE[1:]]
    missing = next((client for client in range(len(found)) if client not in found), None)
    if missing is not None:
        raise trace.error(f"has no row of client {missing}; each client needs one")
    table = np.array([found[client] for client in range(len(found))], dtype=np.float64)
    return DeviceTrace(*trace.identity, *table.T.copy())


@dataclass(frozen=True)
class _TraceFile:
    """A trace as it was read: the setting that names it, its path and its content."""

    key: str
    path: str
    content: bytes

    @classmethod
    def read(cls, key: str, path: str) -> _TraceFile:
        try:
            file = expand_home(key, path)
            if file.stat().st_size > LARGEST_FILE:
                raise ConfigError(key, path, f"is larger than {LARGEST_FILE // 10**6} MB")
            return cls(key, path, file.read_bytes())
        except OSError as error:
            why = f"the file cannot be read: {error.strerror}"
            raise ConfigError(key, path, why) from None

    @property
    def identity(self) -> tuple[str, str]:
        """The name of the file, and the digest of its content."""
        return Path(self.path).name, hashlib.sha256(self.content).hexdigest()

    def error(self, why: str, line: int | None = None) -> ConfigError:
        return ConfigError(self.key, self.path, why if line is None else f"line {line}: {why}")

    def rows(self, known: Sequence[str], needed: Sequence[str]) -> Iterator[_Row]:
        """The rows of a CSV file, or of one JSON object per line; its columns are checked."""
        try:
            text = self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.error(f"the file cannot be read: {error}") from None
        parse = self._json_rows if text.lstrip().startswith("{") else self._csv_rows
        empty = True
        for line, values in parse(text):
            try:
                check_keys(values, list(known))
            except ConfigError as error:
                raise self.error(str(error), line) from None
            missing = [name for name in needed if name not in values]
            if missing:
                columns = f"must have the columns {', '.join(needed)}; there is no {missing[0]}"
                raise self.error(columns, line)
            empty = False
            yield _Row(self, line, values)
        if empty:
            raise self.error(f"has no rows; its columns are {', '.join(known)}")

    def _json_rows(self, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self.error(f"not JSON: {error}", number) from None
            if not isinstance(values, dict):
                raise self.error("must be an object, {...}", number)
            yield number, values

    def _csv_rows(self, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
        reader = csv.reader(io.StringIO(text, newline=""))
        head: list[str] | None = None
        try:
            for cells in reader:
                cells = [cell.strip() for cell in cells]
                if not any(cells):
                    continue
                if head is None:
                    head = cells
                    if len({*head}) < len(head):
                        raise self.error("has two columns of one name")
                elif len(cells) != len(head):
                    wrong = f"has {len(cells)} values for {len(head)} columns"
                    raise self.error(wrong, reader.line_num)
                else:
                    yield reader.line_num, dict(zip(head, cells, strict=True))
        except csv.Error as error:
            raise self.error(str(error), reader.line_num) from None


@dataclass(frozen=True)
class _Row:
    """One row of a trace, and its line."""

    trace: _TraceFile
    line: int
    values: Mapping[str, Any]

    def whole(self, name: str, least: int, default: int | None = None) -> int:
        number = self.number(name, least, LARGEST_COUNT, default)
        if number != int(number):
            raise self.error(name, "must be a whole number")
        return int(number)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        given = self.values.get(name)
        if (given is None or given == "") and default is not None:
            return default
        try:
            number = math.nan if isinstance(given, bool) else float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}")
        return number

    def error(self, name: str, allowed: str) -> ConfigError:
        return self.trace.error(f"{name} = {self.values.get(name)!r}: {allowed}", self.line)
