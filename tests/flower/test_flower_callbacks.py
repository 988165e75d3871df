"""Callbacks and trackers of runs on Flower."""

from __future__ import annotations

from pathlib import Path

import pytest
from flower_grid import MemoryGrid, initial, numpy_app, quiet, server_score
from round_log import NAME, read_log

from fedcor import Random
from fedcor.core.errors import ConfigError
from fedcor.flower import FedCorStrategy, select_with
from fedcor.runs.record import read_run


class Listener:
    def __init__(self):
        self.words, self.start, self.end = [], None, None

    def on_start(self, run):
        self.words.append("start")
        self.start = run

    def on_round(self, record):
        self.words.append(record.round)

    def on_end(self, run):
        self.words.append("end")
        self.end = run

    def close(self):
        self.words.append("close")


def start(rounds, **settings):
    selecting = select_with(quiet(), Random(2), wait_for=3, **settings)
    grid = MemoryGrid(numpy_app(), 3)
    return selecting.start(grid, initial(), rounds, timeout=0.1, evaluate_fn=server_score)


def test_callbacks_hear_of_a_run_without_a_folder():
    listener, rounds = Listener(), []
    start(3, callbacks=[listener, rounds.append])
    assert listener.words == ["start", 0, 1, 2, "end", "close"]
    assert [one.round for one in rounds] == [0, 1, 2]
    assert listener.start.folder is None
    assert listener.start.header["selector"] == "random"
    assert [one["server_round"] for one in listener.end.rounds] == [1, 2, 3]


def test_a_resumed_run_continues_its_tracker(tmp_path):
    def stop(record):
        if record.round == 1:
            raise KeyboardInterrupt

    first, second, third = Listener(), Listener(), Listener()
    with pytest.raises(KeyboardInterrupt):
        start(4, checkpoint=tmp_path, callbacks=[NAME, first, stop])
    assert first.words == ["start", 0, 1, "close"]
    start(4, checkpoint=tmp_path, callbacks=[NAME, second])
    assert second.words == ["start", 2, 3, "end", "close"]
    run = read_run(tmp_path)
    assert second.start.rounds == run.rounds[:2]
    assert second.end.rounds == run.rounds
    rows = read_log(tmp_path)
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    for row, entry in zip(rows, run.rounds, strict=True):
        assert row["accuracy"] == entry["test_accuracy"]
        assert row["bytes_up"] == entry["bytes_up"]
        assert row["server/accuracy"] == entry["metrics"]["server/accuracy"]
    start(4, checkpoint=tmp_path, callbacks=[third])
    assert third.words == ["start", "end", "close"]


def test_a_tracker_needs_the_checkpoints_folder():
    with pytest.raises(ConfigError, match="folder of its run: give checkpoint"):
        select_with(quiet(), Random(2), callbacks=[NAME])
    with pytest.raises(ConfigError, match='did you mean "mlflow"'):
        FedCorStrategy(2, callbacks=["mlfow"], checkpoint=Path("run"))
