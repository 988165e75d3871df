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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.config import LARGEST_COUNT, check_keys, expand_home
from fedcor.core.describe import Described
from fedcor.core.errors import ConfigError
from fedcor.core.types import BoolArray, FloatArray, IntArray

LARGEST_FILE = 500_000_000  # bytes; its rows take about ten times as many while it is read
_FOREVER = 2**61  # a round that no run reaches
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
    table = _Table(key, path, _STRETCH, needed=_STRETCH[:2])
    clients, first = table.whole("client"), table.whole("first")
    last, every = table.whole("last", _FOREVER), table.whole("every", 0)
    probability = table.numbers("probability", 0.0, 1.0, 1.0)
    length, once = last - first + 1, every == 0
    table.check("last", length > 0, "must be at least the first round")
    table.check("every", once | (last < _FOREVER), "goes with last: where does the stretch end?")
    table.check("every", once | (every >= length), "must be at least the length of the stretch")
    if not probability.any():
        raise table.error("no client could ever be reached")
    return AvailabilityTrace(table.file, table.sha256, clients, first, length, every, probability)


def read_devices(key: str, path: str) -> DeviceTrace:
    """The trace of devices in a file: each client from 0 on, once, in any order.

    Raises:
        ConfigError: About `key`: the file cannot be read, or which of its rows cannot be used.
    """
    table = _Table(key, path, _DEVICE, needed=_DEVICE)
    clients = table.whole("client")
    found, rows = np.unique(clients, return_index=True)
    table.check("client", np.isin(np.arange(len(clients)), rows), "is listed twice")
    missing = np.setdiff1d(np.arange(len(clients)), found)
    if len(missing):
        raise table.error(f"has no row of client {missing[0]}; each client needs one")
    columns = [table.numbers(name, 1e-9, 1e9)[rows] for name in _DEVICE[1:]]
    return DeviceTrace(table.file, table.sha256, *columns)


class _Table:
    """The rows of a trace file: of a CSV file, or of one JSON object per line.

    Args:
        key: The setting that names the file.
        path: The file.
        known: Names of all columns.
        needed: Names of the columns that must be there.

    Raises:
        ConfigError: The file cannot be read, has no rows, or has other columns.
    """

    def __init__(self, key: str, path: str, known: Sequence[str], needed: Sequence[str]) -> None:
        self._key, self._path, self.file = key, path, Path(path).name
        content = self._read()
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.error(f"the file cannot be read: {error}") from None
        parse = self._json_rows if text.lstrip().startswith("{") else self._csv_rows
        self._rows = list(parse(text))  # line, and values by column
        for line, values in self._rows:
            try:
                check_keys(values, list(known))
            except ConfigError as error:
                raise self.error(str(error), line) from None
            missing = [name for name in needed if name not in values]
            if missing:
                columns = f"must have the columns {', '.join(needed)}; there is no {missing[0]}"
                raise self.error(columns, line)
        if not self._rows:
            raise self.error(f"has no rows; its columns are {', '.join(known)}")

    def numbers(self, name: str, low: float, high: float, default: float = np.nan) -> FloatArray:
        """(R,) a column of numbers from `low` to `high`, or the default where there is none."""
        column = np.array([_number(values.get(name), default) for _, values in self._rows])
        inside = (low <= column) & (column <= high)
        self.check(name, inside | (column == default), f"must be a number from {low:g} to {high:g}")
        return column

    def whole(self, name: str, default: float = np.nan) -> IntArray:
        """(R,) a column of whole numbers, or the default where there is none."""
        column = self.numbers(name, 0, LARGEST_COUNT, default)
        self.check(name, column == np.floor(column), "must be a whole number")
        return column.astype(np.int64)

    def check(self, name: str, usable: BoolArray, allowed: str) -> None:
        """Refuse the first row that is not usable, for its value of a column."""
        if not usable.all():
            line, values = self._rows[int(usable.argmin())]
            raise self.error(f"{name} = {values.get(name)!r}: {allowed}", line)

    def error(self, why: str, line: int | None = None) -> ConfigError:
        """An error about the file, or about one of its lines."""
        return ConfigError(self._key, self._path, why if line is None else f"line {line}: {why}")

    def _read(self) -> bytes:
        try:
            file = expand_home(self._key, self._path)
            if file.stat().st_size > LARGEST_FILE:
                raise self.error(f"is larger than {LARGEST_FILE // 10**6} MB")
            return file.read_bytes()
        except OSError as error:
            raise self.error(f"the file cannot be read: {error.strerror}") from None

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
        try:
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
        except csv.Error as error:
            raise self.error(str(error), reader.line_num) from None
        (_, head), *rows = [(line, cells) for line, cells in rows if any(cells)] or [(0, [])]
        if len({*head}) < len(head):
            raise self.error("has two columns of one name")
        for line, cells in rows:
            if len(cells) != len(head):
                raise self.error(f"has {len(cells)} values for {len(head)} columns", line)
            yield line, dict(zip(head, cells, strict=True))


def _number(given: Any, default: float) -> float:
    """A number, or the text of one; the default where there is none, NaN for anything else."""
    if given is None or given == "":
        return default
    try:
        return math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        return math.nan
