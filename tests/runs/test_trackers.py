"""Trackers with their real packages: what was written is read back with the package's own reader.

`make test-trackers` installs the packages and sets FEDCOR_TRACKERS; else a test whose package is
missing is skipped.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedcor
from fedcor.cli import main
from fedcor.runs.record import count_rounds, read_run
from fedcor.runs.tracking.callback import Tally

NAMES = ["tensorboard", "mlflow", "wandb"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages themselves


def need(package):
    if "FEDCOR_TRACKERS" in os.environ:
        return importlib.import_module(package)
    return pytest.importorskip(package)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch, tmp_path):
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    # Whatever is asked for over a network would be refused.
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def settings(rounds):
    return fedcor.experiment(
        "digits",
        rounds=rounds,
        partition={"clients": 20},
        selectors={"fedcor": {"warmup": 3, "interval": 4}},
    )


def stop_after(last):
    def stop(record):
        if record.round == last:
            raise KeyboardInterrupt

    return stop


def start(rounds, *callbacks):
    return fedcor.run(
        settings(rounds), "fedcor", out="run", resume=True, progress=False, callbacks=callbacks
    )


def interrupted(name, rounds=25):
    """A run of fedcor that was ended three times, each time with the tracker."""
    for last in (3, 10, 17):
        with pytest.raises(KeyboardInterrupt):
            start(rounds, name, stop_after(last))
    Path("run/report.html").write_text("<p>the page</p>")
    start(rounds, name)
    return Path("run")


def expected(run):
    """Name -> [(round, value), ...] of a record."""
    tally, series = Tally(), {}
    for entry in run.rounds:
        for name, value in tally.add(entry).items():
            series.setdefault(name, []).append((entry["round"], value))
    assert {"accuracy", "loss", "bytes", "participants", "refused", "why/gain"} <= set(series)
    return series


def counts(run, rounds=None):
    """How often each client was chosen, slowly."""
    chosen = [client for entry in run.rounds[:rounds] for client in entry["selected"]]
    return [chosen.count(client) for client in range(20)]


def table(run):
    """`selection.csv`, slowly."""
    delivered = [client for entry in run.rounds for client in entry["participated"]]
    rows = [f"{k},{times},{delivered.count(k)}\n" for k, times in enumerate(counts(run))]
    return "".join(["client,selected,participated\n", *rows])


def without_seconds(series):
    return {name: values for name, values in series.items() if name != "seconds"}


# TensorBoard


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "histograms": 0, "tensors": 0}
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    events.Reload()
    return events


def check_tensorboard(folder):
    run, events = read_run(folder), read_events(folder)
    tags = events.Tags()
    series = expected(run)
    assert set(tags["scalars"]) == set(series)
    for name, values in series.items():
        found = events.Scalars(name)
        assert [one.step for one in found] == [step for step, _ in values], name
        assert [one.value for one in found] == pytest.approx([value for _, value in values])
    last = events.Histograms("selection")[-1]
    assert last.step == run.rounds[-1]["round"]
    assert last.histogram_value.bucket == counts(run)
    assert last.histogram_value.bucket_limit == [client + 0.5 for client in range(20)]
    text = events.Tensors("header")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text) == run.header


def test_tensorboard_holds_the_record():
    need("tensorboard")
    folder = interrupted("tensorboard")
    check_tensorboard(folder)
    assert len(list((folder / "tensorboard").iterdir())) == 1
    events = read_events(folder)
    assert [one.step for one in events.Histograms("selection")] == [9, 19, 24]
    times = [one.wall_time for one in events.Scalars("loss")]
    assert times == sorted(times)


# MLflow


def store_of(folder):
    return f"sqlite:///{(folder / 'mlflow.db').resolve()}"


def check_mlflow(folder, root):
    from mlflow import MlflowClient

    client, run = MlflowClient(store_of(root)), read_run(folder)
    id = json.loads((folder / "mlflow.json").read_text())["run_id"]
    found = client.get_run(id)
    assert found.info.status == "FINISHED"
    selector, seed = run.header["selector"], run.header["seed"]
    assert found.info.run_name == f"{selector}/seed-{seed}"
    series = expected(run)
    assert set(found.data.metrics) == set(series)
    for name, values in without_seconds(series).items():
        history = client.get_metric_history(id, name)
        assert sorted((one.step, one.value) for one in history) == values, name
    steps = sorted(one.step for one in client.get_metric_history(id, "seconds"))
    assert steps == list(range(len(run.rounds)))
    parameters = found.data.params
    assert parameters["selector"] == selector
    assert parameters["config.training.clients_per_round"] == "10"
    assert parameters["versions.fedcor"] == fedcor.__version__
    assert found.data.tags["rounds"] == str(len(run.rounds))
    place = Path(client.download_artifacts(id, ""))
    assert (place / "record.jsonl").read_bytes() == (folder / "rounds.jsonl").read_bytes()
    assert (place / "selection.csv").read_text() == table(run)
    assert json.loads((place / "header.json").read_text()) == run.header
    return client, place


def test_mlflow_holds_the_record_once():
    need("mlflow")
    folder = interrupted("mlflow")
    client, place = check_mlflow(folder, folder)
    assert (place / "report.html").read_text() == "<p>the page</p>"
    experiments = [one.experiment_id for one in client.search_experiments()]
    assert len(client.search_runs(experiments)) == 1
    start(28, "mlflow")  # more rounds: the same run goes on
    check_mlflow(folder, folder)
    assert len(client.search_runs(experiments)) == 1


def test_an_interrupted_mlflow_run_says_so_and_a_new_run_is_a_new_one():
    need("mlflow")
    from mlflow import MlflowClient

    with pytest.raises(KeyboardInterrupt):
        start(5, "mlflow", stop_after(1))
    first = json.loads(Path("run/mlflow.json").read_text())["run_id"]
    client = MlflowClient(store_of(Path("run")))
    assert client.get_run(first).info.status == "KILLED"
    Path("run/rounds.jsonl").unlink()  # as a person does who starts over
    start(5, "mlflow")
    check_mlflow(Path("run"), Path("run"))
    assert json.loads(Path("run/mlflow.json").read_text())["run_id"] != first


def test_mlflow_writes_where_its_variable_says(monkeypatch, tmp_path):
    need("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    start(4, "mlflow")
    assert not Path("run/mlflow.db").exists()
    assert "store" not in json.loads(Path("run/mlflow.json").read_text())
    check_mlflow(Path("run"), tmp_path)


# Weights & Biases


def read_wandb(path):
    """The records of an offline file: a log of LevelDB's format, each of them a message."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block, position, whole = path.read_bytes(), 32768, 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if block - position % block < 7:  # the rest of a block is empty
            position += block - position % block
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def parsed(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def check_wandb(folder):
    run, kept = read_run(folder), json.loads((folder / "wandb.json").read_text())
    place = folder / kept["folder"]
    records = list(read_wandb(place / f"run-{kept['id']}.wandb"))
    history = [parsed(one.history.item) for one in records if one.HasField("history")]
    assert [line["_step"] for line in history] == [one["round"] for one in run.rounds]
    for name, values in expected(run).items():
        found = [(line["_step"], line[name]) for line in history if name in line]
        assert found == values, name
    (begun,) = (one.run for one in records if one.HasField("run"))
    assert begun.run_id == kept["id"]
    assert begun.display_name == f"{run.header['selector']}/seed-{run.header['seed']}"
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    for key in ("experiment", "selector", "seed", "config", "versions"):
        assert config[key] == run.header[key]
    files = place / "files"
    assert (files / "record.jsonl").read_bytes() == (folder / "rounds.jsonl").read_bytes()
    assert (files / "selection.csv").read_text() == table(run)
    saved = {item.path for one in records for item in one.files.files}
    assert {"record.jsonl", "selection.csv"} <= saved
    shown = {
        line["_step"]: line["selection/values"] for line in history if "selection/values" in line
    }
    tenths = [step for step in range(len(history)) if step % 10 == 9]
    assert shown == {step: counts(run, step + 1) for step in tenths}
    summaries = [parsed(one.summary.update) for one in records if one.HasField("summary")]
    last = [one["selection"] for one in summaries if "selection" in one][-1]
    assert last["values"] == counts(run)
    assert [one.exit.exit_code for one in records if one.HasField("exit")] == [0]
    return place


def test_wandb_holds_the_record_offline():
    need("wandb")
    place = check_wandb(interrupted("wandb"))
    assert [one.name for one in place.parent.glob("*run-*")] == [place.name]
    assert place.name.startswith("offline-run-")
    assert (place / "files" / "report.html").read_text() == "<p>the page</p>"


# All of them


def test_all_trackers_in_two_processes_leave_the_records_as_they_are(capsys):
    for package in NAMES:
        need(package)
    what = "compare digits --selectors random,fedcor --seeds 1,2 --rounds 12"
    command = what.split()
    command += ["--set", "partition.clients=20", "--set", "selectors.fedcor.warmup=3"]
    assert main([*command, "--out", "alone"]) == 0
    tracked = [*command, "--out", "all", "--jobs", "2", "--track", ",".join(NAMES)]
    assert main(tracked) == 0
    assert "failed" not in capsys.readouterr().err
    for path in sorted(Path("alone").rglob("rounds.jsonl")):
        folder = Path("all") / path.parent.relative_to("alone")
        ours, theirs = read_run(folder), read_run(path.parent)
        for one, other in zip(ours.rounds, theirs.rounds, strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        if ours.header["selector"] == "fedcor":
            check_tensorboard(folder)
            check_mlflow(folder, Path("all"))
            check_wandb(folder)
    assert len(list(Path("all/wandb").glob("offline-run-*"))) == 4
    assert main(["report", "all", "--json"]) == 0
    assert main([*tracked, "--resume"]) == 0  # finished runs: nothing is there twice
    check_mlflow(Path("all/fedcor/seed-1"), Path("all"))
    check_wandb(Path("all/fedcor/seed-1"))
    check_tensorboard(Path("all/fedcor/seed-1"))
    assert len(list(Path("all/wandb").glob("offline-run-*"))) == 4


def test_a_run_that_is_killed_outright_continues_in_every_tracker():
    for package in NAMES:
        need(package)
    what = "run digits --selector fedcor --out run --set partition.clients=20 --resume"
    command = [*what.split(), "--set", "selectors.fedcor.warmup=3", "--track", ",".join(NAMES)]
    program = [sys.executable, "-m", "fedcor", *command, "--rounds", "5000"]
    # W&B's service of this process would be used, too, and would outlive the run that is killed.
    alone = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, env=alone) as process:
        try:
            while process.poll() is None and count_rounds(Path("run")) < 24:
                time.sleep(0.01)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    rounds = max(30, count_rounds(Path("run")) // 10 * 10 + 6)
    assert main([*command, "--rounds", str(rounds)]) == 0
    assert len(read_run(Path("run")).rounds) == rounds
    check_tensorboard(Path("run"))
    check_mlflow(Path("run"), Path("run"))
    check_wandb(Path("run"))


def test_flower_runs_are_tracked(tmp_path):
    need("mlflow")
    need("tensorboard")
    from flower_grid import MemoryGrid, initial, numpy_app, quiet, server_score
    from mlflow import MlflowClient

    from fedcor.flower import select_with

    callbacks = ["mlflow", "tensorboard"]
    selecting = select_with(quiet(), fedcor.Random(2), wait_for=3, checkpoint=tmp_path,
                            callbacks=callbacks)  # fmt: skip
    grid = MemoryGrid(numpy_app(), 3)
    selecting.start(grid, initial(), num_rounds=3, timeout=0.1, evaluate_fn=server_score)
    run = read_run(tmp_path)
    wanted = [entry["test_accuracy"] for entry in run.rounds]
    id = json.loads((tmp_path / "mlflow.json").read_text())["run_id"]
    client = MlflowClient(store_of(tmp_path))
    history = client.get_metric_history(id, "accuracy")
    assert [one.value for one in sorted(history, key=lambda one: one.step)] == wanted
    assert {one.path for one in client.list_artifacts(id)} == {
        "clients.tsv", "header.json", "record.jsonl", "selection.csv",
    }  # fmt: skip
    found = read_events(tmp_path).Scalars("server/accuracy")
    assert [one.value for one in found] == pytest.approx(wanted)
