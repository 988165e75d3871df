"""Real runs on Flower's own simulation, ten virtual nodes in their own processes: the bridge, and a server that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedcor.experiment import load_experiment
from fedcor.record import count_rounds, read_run
from fedcor.runner import run

ROUNDS, KILLED_AFTER = 12, 6
CHANGES = [
    "partition.clients=10",
    "training.clients_per_round=3",
    f"training.rounds={ROUNDS}",
    "selectors.fedcor.warmup=4",
    "selectors.fedcor.interval=3",
]


def command(out, *more):
    changes = [word for change in CHANGES for word in ("--set", change)]
    return [
        sys.executable,
        "-m",
        "fedcor",
        "run",
        "digits",
        "--engine",
        "flower",
        "--out",
        str(out),
        *changes,
        *more,
    ]


def on_flower(out, *more):
    done = subprocess.run(
        command(out, *more), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_run(out)


def model(out):
    with np.load(out / "checkpoint" / "state.npz", allow_pickle=False) as arrays:
        return arrays["model/0"]


def test_flower_repeats_the_simulator_and_goes_on_after_a_kill(tmp_path):
    whole = on_flower(tmp_path / "whole")
    run(load_experiment("digits", CHANGES, "fedcor"), 1, tmp_path / "simulator")
    simulated = read_run(tmp_path / "simulator")
    assert len(whole.rounds) == ROUNDS
    for ours, theirs in zip(simulated.rounds, whole.rounds, strict=True):
        for key in ("round", "selected", "participated", "probed", "refused", "learning_rate"):
            assert theirs[key] == ours[key], key
        assert theirs["test_accuracy"] == pytest.approx(
            ours["test_accuracy"], abs=0.004
        )  # one of 257 test images
        assert theirs["test_loss"] == pytest.approx(ours["test_loss"], rel=1e-5)
        assert theirs["faults"] == {}
        # The models, and beside them what the messages need: names, numbers, notes.
        assert (
            ours["bytes_down"]
            <= theirs["bytes_down"]
            <= ours["bytes_down"] + 700 * (theirs["probed"] + 23)
        )
    assert whole.header["engine"] == "flower"

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
        os.killpg(
            process.pid, signal.SIGKILL
        )  # the server and its nodes, at whatever instant this is
        process.wait()
    done = count_rounds(killed)
    assert KILLED_AFTER <= done < ROUNDS
    resumed = on_flower(killed, "--resume")
    assert [entry["selected"] for entry in resumed.rounds] == [
        entry["selected"] for entry in whole.rounds
    ]
    assert [entry["test_loss"] for entry in resumed.rounds] == [
        entry["test_loss"] for entry in whole.rounds
    ]
    assert np.array_equal(model(killed), model(tmp_path / "whole"))


def test_what_flower_cannot_run_is_refused_at_once(tmp_path):
    for more, said in (
        (["--set", "faults.dropout=0.2"], "faults"),
        (["--selector", "nobody"], "selector"),
    ):
        done = subprocess.run(
            command(tmp_path / "x", *more), capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    (tmp_path / "x").mkdir(exist_ok=True)
    header = json.dumps({"kind": "header"})
    (tmp_path / "x" / "rounds.jsonl").write_text(header + "\n")
    done = subprocess.run(
        command(tmp_path / "x"), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
