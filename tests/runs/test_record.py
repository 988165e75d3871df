"""Records and resume: kill a run at any moment, and its record comes out the same."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcor
from fedcor.core.errors import ConfigError, FedcorError, RecordError, RunExistsError
from fedcor.core.files import write_whole
from fedcor.rounds.record_line import FORMAT
from fedcor.runs.checkpoints import CHECKPOINT
from fedcor.runs.record import RECORD, count_rounds, read_run, read_runs
from fedcor.runs.resume import open_run
from fedcor.runs.runner import run
from fedcor.simulation.experiment_files import load_experiment

HEADER = {
    "format": FORMAT,
    "experiment": "e",
    "selector": "s",
    "seed": 1,
    "config": {"training": {"rounds": 5}, "target": 0.5},
}


# Processes that start quickly: their server has imported the packages already.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fedcor.runs.runner", "sklearn.datasets"])


def lines_without_seconds(folder: Path) -> list[dict]:
    entries = [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@functools.cache
def digits(selector="fedcor", rounds=25, *changes):
    small = [
        "selectors.fedcor.warmup=4",
        "selectors.fedcor.interval=6",
        "selectors.fedcor.warmup_steps=10",
    ]
    return load_experiment("digits", [f"training.rounds={rounds}", *small, *changes], selector)


class Interrupted(Exception):
    pass


def interrupt_after(last):
    """An `on_round` that ends the run after round `last`."""

    def on_round(record):
        if record.round == last:
            raise Interrupted

    return on_round


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs of 25 rounds, each made once: selector -> folder."""

    @functools.cache
    def make(selector):
        folder = tmp_path_factory.mktemp("whole") / selector
        run(digits(selector), 1, folder)
        return folder

    return make


@pytest.mark.parametrize("selector", ["fedcor", "afl", "random"])
def test_an_interrupted_run_resumes_to_the_same_record(tmp_path, selector, whole):
    """Interrupted before the first checkpoint, just before and after one, and before the last."""
    for last in (3, 10, 17, 24):
        with pytest.raises(Interrupted):
            run(digits(selector), 1, tmp_path, resume=True, callbacks=[interrupt_after(last)])
    run(digits(selector), 1, tmp_path, resume=True)
    assert lines_without_seconds(tmp_path) == lines_without_seconds(whole(selector))


def kill_repeatedly(folder, targets, start):
    """Start a process again and again, and kill each when the record has `targets` rounds."""
    kills = 0
    for target in targets:
        process = start()
        while process.is_alive() and count_rounds(folder) < target:
            time.sleep(0.002)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
    return kills


def test_kill_9_at_any_moment(tmp_path, whole):
    """Real processes, really killed at odd moments."""

    def start():
        process = PROCESSES.Process(
            target=run, args=(digits(), 1, tmp_path), kwargs={"resume": True}, daemon=True
        )
        process.start()
        return process

    kills = kill_repeatedly(tmp_path, (1, 2, 9, 12, 17, 21, 23), start)
    run(digits(), 1, tmp_path, resume=True)
    assert kills >= 3
    assert lines_without_seconds(tmp_path) == lines_without_seconds(whole("fedcor"))


@pytest.mark.slow
def test_kill_9_of_the_command_at_any_moment(tmp_path):
    """The command as a user starts it, killed again and again, until the run is done."""
    arguments = "run digits --selector fedcor --rounds 60 --set selectors.fedcor.warmup=5 --resume"
    command = [sys.executable, "-m", "fedcor", *arguments.split(), "--out"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    class Command(subprocess.Popen):
        def is_alive(self):
            return self.poll() is None

        join = subprocess.Popen.wait

    def start():
        return Command([*command, broken], stdout=subprocess.DEVNULL, cwd=tmp_path)

    kills = kill_repeatedly(broken, (2, 9, 23, 41, 55), start)
    for folder in (whole, broken):
        subprocess.run([*command, folder], check=True, capture_output=True, cwd=tmp_path)
    assert kills >= 3
    assert lines_without_seconds(broken) == lines_without_seconds(whole)


def test_resuming_a_finished_run_changes_nothing_and_it_can_get_more_rounds(tmp_path):
    run(digits("random", 10), 1, tmp_path / "run")
    before = (tmp_path / "run" / RECORD).read_bytes()
    run(digits("random", 10), 1, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / RECORD).read_bytes() == before
    run(digits("random", 15), 1, tmp_path / "run", resume=True)
    run(digits("random", 15), 1, tmp_path / "whole")
    assert lines_without_seconds(tmp_path / "run") == lines_without_seconds(tmp_path / "whole")


def test_a_shorter_or_a_refused_resume_leaves_the_record_as_it_is(tmp_path):
    run(digits("random", 20), 1, tmp_path / "run")
    before = (tmp_path / "run" / RECORD).read_bytes()
    run(digits("random", 5), 1, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / RECORD).read_bytes() == before


def test_what_cannot_be_built_starts_nothing(tmp_path):
    with pytest.raises(ConfigError, match="partition.clients"):
        run(digits("random", 5, "partition.clients=5000"), 1, tmp_path / "run")
    assert not (tmp_path / "run" / RECORD).exists()
    run(digits("random", 5), 1, tmp_path / "run")  # the folder is free


def test_devices_tied_to_labels_that_are_not_there_start_nothing(tmp_path):
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((20, 3)), rng.standard_normal(20)
    made = fedcor.Experiment(
        (*arrays, *arrays),
        fedcor.IID(5),
        lambda: torch.nn.Linear(3, 1),
        rounds=2,
        batch_size=4,
        local_steps=1,
        learning_rate=0.1,
        selector=fedcor.Random(2),
        faults=fedcor.Faults(devices=fedcor.Devices(1.0, tied_to="labels")),
    )
    with pytest.raises(FedcorError, match="the targets are not labels"):
        run(made, 1, tmp_path / "run")
    assert not (tmp_path / "run" / RECORD).exists()


@pytest.mark.parametrize("content", [None, b"", b"\0" * 500])
@pytest.mark.parametrize("resume", [True, False])
def test_a_checkpoint_whose_record_is_gone_is_kept(content, resume, tmp_path):
    run(digits("random", 20), 1, tmp_path)
    (tmp_path / RECORD).unlink()
    if content is not None:
        (tmp_path / RECORD).write_bytes(content)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = r"has a checkpoint, but rounds.jsonl is missing or empty.* delete .*checkpoint,"
    with pytest.raises(RecordError, match=said):
        run(digits("random", 20), 1, tmp_path, resume=resume)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shutil.rmtree(tmp_path / "checkpoint")
    run(digits("random", 20), 1, tmp_path, resume=resume)
    assert len(read_run(tmp_path).rounds) == 20


def test_a_checkpoint_inside_the_warm_up_keeps_who_holds_and_what_is_known(tmp_path):
    """Then the bytes of a round depend on the round before: on its holders and known losses."""
    experiment = load_experiment(
        "digits", ["training.rounds=14", "selectors.fedcor.warmup=14"], "fedcor"
    )
    run(experiment, 1, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(experiment, 1, tmp_path / "broken", callbacks=[interrupt_after(11)])
    run(experiment, 1, tmp_path / "broken", resume=True)
    assert lines_without_seconds(tmp_path / "broken") == lines_without_seconds(tmp_path / "whole")
    with np.load(tmp_path / "whole" / CHECKPOINT) as archive:
        assert archive["holders"].all()
        assert np.isfinite(archive["known"]).all()


def test_what_is_refused_leaves_nothing_behind(tmp_path):
    with pytest.raises(FedcorError, match="minimum_size"):
        run(
            load_experiment("digits", ["partition.kind=dirichlet", "partition.minimum_size=900"]),
            1,
            tmp_path / "new",
        )
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(FedcorError, match="minimum_size"):
        run(
            load_experiment("digits", ["partition.kind=dirichlet", "partition.minimum_size=900"]),
            1,
            tmp_path / "there",
        )
    assert (tmp_path / "there").is_dir()


def test_a_run_that_died_in_its_first_round_starts_over(tmp_path):
    with open_run(tmp_path / "run", HEADER, resume=False) as writer:
        writer.begin()
    changed = {**HEADER, "config": {"training": {"rounds": 5}, "target": 0.7}}
    with open_run(tmp_path / "run", changed, resume=False) as writer:
        writer.begin()
        writer.append({"round": 0})
    assert read_run(tmp_path / "run").header["config"]["target"] == 0.7


def test_resuming_is_advised_only_where_it_would_help(tmp_path):
    with open_run(tmp_path / "run", HEADER, resume=False) as writer:
        writer.begin()
        writer.append({"round": 0})
    changed = {**HEADER, "config": {"training": {"rounds": 5}, "target": 0.7, "new": True}}
    refused = (
        r"other settings \(new is not set there, True here; target is 0.5 there, 0.7 here\); "
        "choose another folder"
    )
    with (
        pytest.raises(RecordError, match=refused) as other,
        open_run(tmp_path / "run", changed, resume=False),
    ):
        pass
    assert not isinstance(other.value, RunExistsError)
    with (
        pytest.raises(RunExistsError, match="already holds a run: resume it") as same,
        open_run(tmp_path / "run", HEADER, resume=False),
    ):
        pass
    assert same.value.folder == tmp_path / "run"
    assert pickle.loads(pickle.dumps(same.value)).folder == tmp_path / "run"


def test_a_run_is_never_overwritten(tmp_path):
    run(digits("random", 2), 1, tmp_path / "run")
    before = (tmp_path / "run" / RECORD).read_bytes()
    with pytest.raises(RunExistsError, match="already holds a run: resume it"):
        run(digits("random", 2), 1, tmp_path / "run")
    for other, seed, refused in (
        (digits("afl", 2), 1, "selector is 'random'"),
        (digits("random", 2), 2, "seed is 1, not 2"),
        (
            digits("random", 2, "training.learning_rate=0.07"),
            1,
            "training.learning_rate is 0.05 there, 0.07 here",
        ),
    ):
        with pytest.raises(RecordError, match=refused):
            run(other, seed, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / RECORD).read_bytes() == before


def hold(folder, started, release):
    with open_run(folder, HEADER, resume=False):
        started.set()
        release.wait(30)


def test_two_processes_on_one_folder(tmp_path):
    started, release = PROCESSES.Event(), PROCESSES.Event()
    process = PROCESSES.Process(target=hold, args=(tmp_path, started, release))
    process.start()
    assert started.wait(30)
    try:
        with pytest.raises(RecordError, match="in use"), open_run(tmp_path, HEADER, resume=True):
            pass
    finally:
        os.kill(process.pid, signal.SIGKILL)  # the lock dies with its holder
        process.join()
    with open_run(tmp_path, HEADER, resume=True):
        pass


def write(folder, rounds, checkpoint_at=None):
    with open_run(folder, HEADER, resume=False) as writer:
        writer.begin()
        for t in range(rounds):
            writer.append({"round": t, "x": t / 3})
            if t + 1 == checkpoint_at:
                writer.save({"round": np.array(t + 1), "selector/a": np.arange(3)})


@given(st.integers(0, 120))
def test_a_torn_tail_is_tolerated(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("torn")
    write(folder, 4, checkpoint_at=2)
    path = folder / RECORD
    content = path.read_bytes()
    header_end = content.index(b"\n") + 1
    checkpointed = header_end + sum(len(line) + 1 for line in content[header_end:].split(b"\n")[:2])
    path.write_bytes(content[: max(checkpointed, len(content) - cut)])
    run = read_run(folder)
    assert [entry["round"] for entry in run.rounds] == list(range(len(run.rounds)))
    with open_run(folder, HEADER, resume=True) as writer:
        assert writer.checkpoint["selector/a"].tolist() == [0, 1, 2]
        assert writer.done == 2
        writer.begin()
    assert count_rounds(folder) == 2


def test_a_torn_header_is_a_run_that_never_started(tmp_path):
    (tmp_path / RECORD).write_text('{"kind": "hea')
    with pytest.raises(RecordError, match="no header yet"):
        read_run(tmp_path)
    with open_run(tmp_path, HEADER, resume=False) as writer:
        assert writer.checkpoint is None
        writer.begin()
    assert read_run(tmp_path).header["seed"] == 1


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    with open_run(tmp_path, HEADER, resume=False) as writer:
        writer.begin()
        writer.append({"round": 0, "test_loss": float("nan"), "other": float("inf")})
    assert read_run(tmp_path).rounds[0] == {"round": 0, "test_loss": None, "other": None}


def test_damage_is_named(tmp_path):
    write(tmp_path, 3)
    lines = (tmp_path / RECORD).read_text().splitlines()
    (tmp_path / RECORD).write_text("\n".join([lines[0], "nonsense", *lines[2:]]) + "\n")
    with pytest.raises(RecordError, match="line 2: not JSON"):
        read_run(tmp_path)
    (tmp_path / RECORD).write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    with pytest.raises(RecordError, match="line 2: expected the round 0"):
        read_run(tmp_path)
    (tmp_path / RECORD).write_bytes(b"\xff\xfe\n")
    with pytest.raises(RecordError, match="cannot be read"):
        read_run(tmp_path)


def test_a_damaged_checkpoint_is_named(tmp_path):
    write(tmp_path, 3, checkpoint_at=2)
    (tmp_path / CHECKPOINT).write_bytes(b"not a zip file")
    with (
        pytest.raises(RecordError, match="checkpoint .*: state.npz is damaged"),
        open_run(tmp_path, HEADER, resume=True),
    ):
        pass


def test_a_checkpoint_that_is_ahead_of_its_record_is_refused(tmp_path):
    write(tmp_path, 3, checkpoint_at=3)
    lines = (tmp_path / RECORD).read_text().splitlines()
    (tmp_path / RECORD).write_text("\n".join(lines[:2]) + "\n")
    with (
        pytest.raises(
            RecordError,
            match=r"state.npz is of round 3, but rounds.jsonl ends with 1; previous.npz is missing",
        ),
        open_run(tmp_path, HEADER, resume=True),
    ):
        pass


def test_no_pickle_goes_into_a_checkpoint_or_comes_out_of_one(tmp_path):
    with (
        pytest.raises(RecordError, match="plain arrays only"),
        open_run(tmp_path, HEADER, resume=False) as writer,
    ):
        writer.begin()
        writer.save({"round": np.array(0), "bad": np.array([object()])})
    write(tmp_path / "other", 1, checkpoint_at=1)
    np.savez(tmp_path / "other" / CHECKPOINT, round=np.array(1), evil=np.array([{}], dtype=object))
    with (
        pytest.raises(RecordError, match="damaged"),
        open_run(tmp_path / "other", HEADER, resume=True),
    ):
        pass


def test_reading_where_there_is_nothing(tmp_path):
    with pytest.raises(RecordError, match="there is no folder"):
        read_runs(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="no run in"):
        read_runs(tmp_path)
    with pytest.raises(RecordError, match="holds no run"):
        read_run(tmp_path)
    assert count_rounds(tmp_path) == 0


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RecordError, match="cannot be made"),
        open_run(tmp_path / "file" / "run", HEADER, resume=False),
    ):
        pass


def test_writing_whole_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"old")

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --- headers --------------------------------------------------------------------------------------


def header_of(selector, options=None):
    """A header with the settings of one selector, as the simulator writes it."""
    config = {"selector": selector, "selectors": {selector: options or {}}}
    config["training"] = {"rounds": 5}
    return {**HEADER, "selector": selector, "config": config}


def of_flower(header):
    """The same as a Flower app writes it: no selector beside the tables, and Flower's version."""
    config = {key: value for key, value in header["config"].items() if key != "selector"}
    return {**header, "config": config, "versions": {"flwr": "1.41"}}


def write_rounds(folder, header):
    with open_run(folder, header, resume=False) as writer:
        writer.begin()
        for t in range(3):
            writer.append({"round": t, "test_accuracy": 0.1, "bytes_up": 4, "bytes_down": 4})
        writer.save({"round": np.array(3)})


@pytest.mark.parametrize("format", [2, 4, None], ids=str)
def test_a_record_with_another_format_is_refused(tmp_path, format):
    write_rounds(tmp_path, header_of("random"))
    path = tmp_path / RECORD
    path.write_text(path.read_text().replace('"format":3', f'"format":{json.dumps(format)}'))
    said = f"has the format {format}, and this version of fedcor reads format 3 only"
    with pytest.raises(RecordError, match=said):
        read_run(tmp_path)
    with (
        pytest.raises(RecordError, match=said),
        open_run(tmp_path, header_of("random"), resume=True),
    ):
        pass


def test_a_selector_of_a_script_is_the_same_when_the_script_is_imported(tmp_path):
    write_rounds(tmp_path, of_flower(header_of("__main__:Mine")))
    with open_run(tmp_path, of_flower(header_of("app:Mine")), resume=True) as writer:
        assert writer.done == 3


def test_a_built_in_selector_is_not_taken_for_a_users_class_of_that_name(tmp_path):
    write_rounds(tmp_path, of_flower(header_of("random")))
    with (
        pytest.raises(RecordError, match="its selector is 'random', not 'mine:Random'"),
        open_run(tmp_path, of_flower(header_of("mine:Random")), resume=True),
    ):
        pass


def test_a_selector_of_the_simulator_is_not_taken_for_a_class_of_that_name(tmp_path):
    write_rounds(tmp_path, header_of("random"))
    with (
        pytest.raises(RecordError, match="its selector is 'random', not 'mine:Random'"),
        open_run(tmp_path, header_of("mine:Random"), resume=True),
    ):
        pass


@pytest.mark.parametrize("config", [1, {"selectors": [1]}], ids=str)
def test_a_header_whose_tables_are_none_is_refused(tmp_path, config):
    header = {"kind": "header", "format": FORMAT, "selector": "random", "config": config}
    (tmp_path / RECORD).write_text(json.dumps(header) + "\n")
    with pytest.raises(RecordError, match="unusable"):
        read_run(tmp_path)
