"""TensorBoard: event files in the run's folder, written with the package's own writer.

The package `tensorboard` alone is needed, neither PyTorch nor TensorFlow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcor.core.types import IntArray
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import RunRecord
from fedcor.runs.tracking.callback import (
    HISTOGRAM_EVERY,
    StartedRun,
    Tally,
    Tracker,
    as_entry,
    check_installed,
    known_clients,
    no_link,
)

FOLDER = "tensorboard"


@dataclass
class TensorBoard(Tracker):
    """Writes scalars, the header and the selection histogram to `tensorboard/` in the run's folder.

    A start replaces the event files that are there by one that begins with the rounds that are not
    run again, so they have each round once.
    """

    _writer: Any = field(init=False, repr=False, default=None)
    _tally: Tally = field(init=False, repr=False)
    _clients: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_installed("tensorboard", "tensorboard")

    def on_start(self, run: StartedRun) -> None:
        """Write the header and the rounds so far."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        assert run.folder is not None
        folder = no_link(run.folder / FOLDER)
        _remove_events(folder)
        self._tally, self._clients = Tally(), known_clients(run.header)
        self._writer = EventFileWriter(str(folder))
        # A TensorBoard that is open forgets what the replaced files said.
        status = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=status))
        self._add(_text("header", json.dumps(dict(run.header), indent=1)), 0, time.time())
        # The time of earlier rounds is that which they took, up to now.
        times = [float(entry.get("seconds") or 0.0) for entry in run.rounds]
        now = time.time() - sum(times)
        for entry, seconds in zip(run.rounds, times, strict=True):
            now += seconds
            self._write(entry, now)
        self._writer.flush()

    def on_round(self, record: RoundRecord) -> None:
        """Write the round's numbers."""
        self._write(as_entry(record), time.time())
        self._writer.flush()

    def on_end(self, run: RunRecord) -> None:
        """Write the last selection histogram."""
        if run.rounds and (run.rounds[-1]["round"] + 1) % HISTOGRAM_EVERY:
            self._write_counts(run.rounds[-1]["round"], time.time())

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, entry: Mapping[str, Any], now: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = self._tally.add(entry)
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._add(summary, entry["round"], now)
        if (entry["round"] + 1) % HISTOGRAM_EVERY == 0:
            self._write_counts(entry["round"], now)

    def _write_counts(self, step: int, now: float) -> None:
        self._add(_histogram("selection", self._tally.counts(self._clients)), step, now)

    def _add(self, summary: Any, step: int, now: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=now, step=step, summary=summary))


def _remove_events(folder: Path) -> None:
    for path in folder.glob("events.out.tfevents.*") if folder.is_dir() else ():
        path.unlink()


def _histogram(tag: str, counts: IntArray) -> Any:
    """A bar per client, around its number: how often it was chosen."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    clients = range(len(counts))
    histogram = HistogramProto(
        min=-0.5,
        max=len(counts) - 0.5,
        num=float(counts.sum()),
        sum=float(sum(client * int(times) for client, times in zip(clients, counts, strict=True))),
        sum_squares=float(
            sum(client**2 * int(times) for client, times in zip(clients, counts, strict=True))
        ),
        bucket_limit=[client + 0.5 for client in clients],
        bucket=[float(times) for times in counts],
    )
    return Summary(value=[Summary.Value(tag=tag, histo=histogram)])


def _text(tag: str, content: str) -> Any:
    """A text for the text page, as code."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shown = "\n".join(f"    {line}" for line in content.splitlines())  # markdown's code block
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[shown.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
