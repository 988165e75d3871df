"""TensorBoard: event files in the run's folder, written with the package's own writer.

The package `tensorboard` alone is needed, neither PyTorch nor TensorFlow.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.types import IntArray
from fedcor.runs.record import RunRecord
from fedcor.runs.tracking.callback import (
    HISTOGRAM_EVERY,
    RoundTracker,
    StartedRun,
    check_installed,
    no_link,
)

FOLDER = "tensorboard"


@dataclass
class TensorBoard(RoundTracker):
    """Writes scalars, the header and the selection histogram to `tensorboard/` in the run's folder.

    A start replaces the event files that are there by one that begins with the rounds that are not
    run again, so they have each round once.
    """

    def __post_init__(self) -> None:
        check_installed("tensorboard", "tensorboard")
        self._writer: Any = None

    def open(self, run: StartedRun, folder: Path) -> None:
        """Begin an event file with the header."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        place = no_link(folder / FOLDER)
        for path in place.glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = EventFileWriter(str(place))
        # A TensorBoard that is open forgets what the replaced files said.
        status = SessionLog(status=SessionLog.START)
        self.now = time.time()
        self._writer.add_event(Event(wall_time=self.now, step=0, session_log=status))
        self._add(_text("header", json.dumps(dict(run.header), indent=1)), 0)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the round's numbers."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Summary(value=scalars), step)
        if (step + 1) % HISTOGRAM_EVERY == 0:
            self._add_histogram(step)

    def flush(self) -> None:
        """Write what has gathered."""
        self._writer.flush()

    def on_end(self, run: RunRecord) -> None:
        """Write the last selection histogram."""
        if len(run.rounds) % HISTOGRAM_EVERY:
            self.now = time.time()
            self._add_histogram(len(run.rounds) - 1)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_histogram(self, step: int) -> None:
        self._add(_histogram("selection", self.tally.counts(self.clients)), step)

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=self.now, step=step, summary=summary))


def _histogram(tag: str, counts: IntArray) -> Any:
    """A bar per client, around its number: how often it was chosen."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    clients = np.arange(len(counts))
    histogram = HistogramProto(
        min=-0.5,
        max=len(counts) - 0.5,
        num=float(counts.sum()),
        sum=float(counts @ clients),
        sum_squares=float(counts @ clients**2),
        bucket_limit=clients + 0.5,
        bucket=counts.astype(float),
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
