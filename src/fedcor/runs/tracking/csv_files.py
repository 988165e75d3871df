"""Plain CSV: `rounds.csv`, a row per round, and `selection.csv`, a row per client."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedcor.core.files import write_whole
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import RunRecord
from fedcor.runs.tracking.callback import (
    StartedRun,
    Tally,
    Tracker,
    as_entry,
    known_clients,
    no_link,
)

ROUNDS, SELECTION = "rounds.csv", "selection.csv"


@dataclass
class CSV(Tracker):
    """Writes each round's numbers to `rounds.csv` in the run's folder.

    A start writes the file anew, up to the rounds that are not run again, so it has each round
    once. A number that comes later than the first round gets a column of its own.
    """

    _folder: Path = field(init=False, repr=False)
    _tally: Tally = field(init=False, repr=False)
    _rows: list[dict[str, float]] = field(init=False, repr=False)
    _columns: list[str] = field(init=False, repr=False)

    def on_start(self, run: StartedRun) -> None:
        """Write the rounds so far."""
        assert run.folder is not None
        self._folder, self._tally = run.folder, Tally()
        self._rows, self._columns = [self._row(entry) for entry in run.rounds], ["round"]
        self._widen(self._rows)
        self._write_all()
        if not run.resumed:
            no_link(self._folder / SELECTION).unlink(missing_ok=True)

    def on_round(self, record: RoundRecord) -> None:
        """Append a row."""
        row = self._row(as_entry(record))
        self._rows.append(row)
        if self._widen([row]):
            self._write_all()
            return
        with no_link(self._folder / ROUNDS).open("a", encoding="utf-8", newline="") as file:
            file.write(self._text([row]))

    def on_end(self, run: RunRecord) -> None:
        """Write how often each client was chosen."""
        table = self._tally.table(known_clients(run.header))
        write_whole(no_link(self._folder / SELECTION), table.encode())

    def _row(self, entry: Mapping[str, object]) -> dict[str, float]:
        return {"round": entry["round"], **self._tally.add(entry)}  # type: ignore[dict-item]

    def _widen(self, rows: Iterable[dict[str, float]]) -> bool:
        """Add a column for each new name; whether there was one."""
        before = len(self._columns)
        for row in rows:
            self._columns += [name for name in row if name not in self._columns]
        return len(self._columns) > before

    def _write_all(self) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(map(_safe, self._columns))
        whole = text.getvalue() + self._text(self._rows)
        write_whole(no_link(self._folder / ROUNDS), whole.encode())

    def _text(self, rows: Iterable[dict[str, float]]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            writer.writerow([_shown(row.get(name)) for name in self._columns])
        return text.getvalue()


def _shown(value: float | None) -> str:
    """As Python reads it back to the last bit; empty where there is none."""
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(value)


def _safe(name: str) -> str:
    """A name that a spreadsheet would read as a formula has an apostrophe before it."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name
