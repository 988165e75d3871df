"""Runs on Flower's own simulation, ten virtual nodes in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedcor.cli import main
from fedcor.rounds.record_line import FORMAT
from fedcor.runs.record import count_rounds, read_run
from fedcor.runs.runner import run
from fedcor.simulation.experiment_files import load_experiment

ROUNDS, KILLED_AFTER = 12, 6
CHANGES = [
    "partition.clients=10",
    "training.clients_per_round=3",
    f"training.rounds={ROUNDS}",
    "selectors.fedcor.warmup=4",
    "selectors.fedcor.interval=3",
]


def arguments(out, *more):
    changes = [word for change in CHANGES for word in ("--set", change)]
    run = ["run", "digits", "--engine", "flower", "--selector", "fedcor"]
    return [*run, "--out", str(out), *changes, *more]


def command(out, *more):
    return [sys.executable, "-m", "fedcor", *arguments(out, *more)]


def on_flower(out, *more):
    done = subprocess.run(
        command(out, *more), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_run(out)


def model(out):
    with np.load(out / "checkpoint" / "state.npz", allow_pickle=False) as arrays:
        return arrays["model/0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, only_ray):
    """An uninterrupted run on Flower: starting Ray is most of its time, so the tests share it."""
    return on_flower(tmp_path_factory.mktemp("flower") / "whole")


def test_flower_repeats_the_simulator(whole, tmp_path):
    run(load_experiment("digits", CHANGES, "fedcor"), 1, tmp_path / "simulator")
    simulated = read_run(tmp_path / "simulator")
    assert len(whole.rounds) == ROUNDS
    for ours, theirs in zip(simulated.rounds, whole.rounds, strict=True):
        for key in ("round", "selected", "participated", "probed", "refused", "learning_rate"):
            assert theirs[key] == ours[key], key
        # One of 257 test images.
        assert theirs["test_accuracy"] == pytest.approx(ours["test_accuracy"], abs=0.004)
        assert theirs["test_loss"] == pytest.approx(ours["test_loss"], rel=1e-5)
        assert theirs["faults"] == {}
        # The models, and beside them what the messages need: names, numbers, notes.
        most = ours["bytes_down"] + 700 * (theirs["probed"] + 23)
        assert ours["bytes_down"] <= theirs["bytes_down"] <= most
    assert whole.header["engine"] == "flower"


@pytest.mark.slow
def test_a_killed_server_resumes_as_if_it_was_not_killed(whole, tmp_path):
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(killed),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 300
        while count_rounds(killed) < KILLED_AFTER and time.monotonic() < end:
            time.sleep(0.005)
    finally:
        # The server and its nodes, at whatever instant this is.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = count_rounds(killed)
    assert KILLED_AFTER <= done < ROUNDS
    resumed = on_flower(killed, "--resume")
    for key in ("selected", "test_loss"):
        assert [entry[key] for entry in resumed.rounds] == [entry[key] for entry in whole.rounds]
    assert np.array_equal(model(killed), model(whole.path))


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--set", "faults.dropout=0.2"], "faults"), (["--selector", "nobody"], "selector")],
    ids=["faults", "selector"],
)
def test_what_flower_cannot_run_is_refused_at_once(more, said, tmp_path, capsys):
    assert main(arguments(tmp_path / "x", *more)) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "x").exists()


def test_a_folder_with_a_run_is_refused_at_once(tmp_path, capsys):
    (tmp_path / "rounds.jsonl").write_text(json.dumps({"kind": "header", "format": FORMAT}) + "\n")
    assert main(arguments(tmp_path)) == 2
    assert "already holds a run" in capsys.readouterr().err
