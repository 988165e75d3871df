"""A tracker that needs no package: a line of JSON per round, and the selection table at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

NAME = "round_log:RoundLog"
LOG, TABLE = "log.jsonl", "selection.csv"


@dataclass
class RoundLog(Tracker):
    """Writes the numbers of each round to `log.jsonl`, which each start begins anew."""

    _folder: Path = field(init=False, repr=False)
    _tally: Tally = field(init=False, repr=False)

    def on_start(self, run: StartedRun) -> None:
        assert run.folder is not None
        self._folder, self._tally = run.folder, Tally()
        no_link(self._folder / LOG).write_text("")
        for entry in run.rounds:
            self._write(entry)

    def on_round(self, record: RoundRecord) -> None:
        self._write(as_entry(record))

    def on_end(self, run: RunRecord) -> None:
        (self._folder / TABLE).write_text(self._tally.table(known_clients(run.header)))

    def _write(self, entry: Mapping[str, Any]) -> None:
        with no_link(self._folder / LOG).open("a") as file:
            file.write(json.dumps({"round": entry["round"], **self._tally.add(entry)}) + "\n")


def read_log(folder: Path | str) -> list[dict[str, float]]:
    """The numbers of each round."""
    return [json.loads(line) for line in (Path(folder) / LOG).read_text().splitlines()]
