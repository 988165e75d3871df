"""Callbacks, and a tracker that needs no package; the others are in test_trackers.py."""

from __future__ import annotations

import csv
import dataclasses
import logging
import math
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from round_log import NAME, TABLE, RoundLog, read_log

import fedcor
from fedcor.cli import main
from fedcor.core.errors import ConfigError, MissingExtraError
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import read_run
from fedcor.runs.tracking.callback import (
    StartedRun,
    Tally,
    Tracker,
    as_entry,
    check_installed,
    flat_settings,
    scalars,
)
from fedcor.runs.tracking.session import build_callback, check_callbacks, following
from fedcor.runs.tracking.wandb_run import bars

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def digits(rounds=4):
    return fedcor.experiment("digits", rounds=rounds, partition={"clients": 20})


def plain(rounds):
    """Lines of a record without what differs from run to run."""
    return [{key: value for key, value in one.items() if key != "seconds"} for one in rounds]


class Listener:
    """Keeps everything that it hears."""

    def __init__(self):
        self.heard = []

    def on_start(self, run):
        self.heard.append(("start", run))

    def on_round(self, record):
        self.heard.append(("round", record))

    def on_end(self, run):
        self.heard.append(("end", run))

    def close(self):
        self.heard.append(("close", None))

    @property
    def words(self):
        return " ".join(word for word, _ in self.heard)


class Broken(Tracker):
    """Fails in its second round, and when it is closed."""

    def on_round(self, record):
        if record.round == 1:
            raise OSError("the disk\nis full")

    def close(self):
        raise RuntimeError("not open")


@pytest.mark.parametrize("out", [None, "run"])
def test_a_callback_hears_of_the_whole_run(out):
    listener, alone = Listener(), fedcor.run(digits(), "fedcor", progress=False)
    result = fedcor.run(digits(), "fedcor", out=out, progress=False, callbacks=[listener])
    assert listener.words == "start round round round round end close"
    (_, start), *rounds, (_, end), _ = listener.heard
    assert start.folder == (out and Path(out))
    assert start.name == "fedcor/seed-1"
    assert (start.resumed, list(start.rounds)) == (False, [])
    assert start.header == result.runs[0].header == end.header == alone.runs[0].header
    assert end.rounds == result.runs[0].rounds == [as_entry(record) for _, record in rounds]
    assert plain(end.rounds) == plain(alone.runs[0].rounds)


def test_a_resumed_run_says_which_rounds_are_not_run_again():
    def stop(record):
        if record.round == 12:
            raise KeyboardInterrupt

    first, second = Listener(), Listener()
    with pytest.raises(KeyboardInterrupt):
        fedcor.run(digits(15), "random", out="run", progress=False, callbacks=[first, stop])
    assert first.words.endswith("round close")
    result = fedcor.run(
        digits(15), "random", out="run", resume=True, progress=False, callbacks=[second]
    )
    start = second.heard[0][1]
    assert start.resumed
    assert start.rounds == result.runs[0].rounds[:10]
    assert [one.round for word, one in second.heard if word == "round"] == list(range(10, 15))
    third = Listener()
    fedcor.run(digits(15), "random", out="run", resume=True, progress=False, callbacks=[third])
    assert third.words == "start end close"
    assert third.heard[0][1].rounds == third.heard[1][1].rounds == result.runs[0].rounds


def test_functions_classes_and_objects_with_some_of_the_methods():
    rounds, made = [], []

    class Starts:
        def __init__(self):
            made.append(self)

        def on_start(self, run):
            self.seed = run.header["seed"]

    fedcor.compare(
        digits(2), ["random"], seeds=[3, 5], progress=False, callbacks=[rounds.append, Starts]
    )
    assert [record.round for record in rounds] == [0, 1, 0, 1]
    assert [one.seed for one in made] == [3, 5]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ("mlflow", r"must be a list, such as \[\"mlflow\"\]"),
        (print, "must be a list"),
        (7, "must be a list"),
        ([7], "must be a function of a round's record"),
        ([dict], "must be a function of a round's record"),
        (["tensorbord"], 'did you mean "tensorboard"'),
        (["nowhere:Mine"], "module nowhere could not be imported"),
        ([NAME], "folder of its run: give out"),
        ([RoundLog()], "folder of its run: give out"),
        ([RoundLog], "folder of its run: give out"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(callbacks, message):
    with pytest.raises(ConfigError, match=message):
        fedcor.run(digits(), "random", callbacks=callbacks)
    with pytest.raises(ConfigError, match=message):
        fedcor.compare(digits(), ["random"], callbacks=callbacks)


def test_an_error_of_a_users_callback_ends_the_run_and_closes_the_others():
    def fails(record):
        if record.round == 1:
            raise ZeroDivisionError("mine")

    listener = Listener()
    with pytest.raises(ZeroDivisionError, match="mine"):
        fedcor.run(digits(), "random", out="run", progress=False, callbacks=[listener, fails])
    assert listener.words == "start round round close"
    result = fedcor.run(digits(), "random", out="run", resume=True, progress=False)
    assert len(result.runs[0].rounds) == 4


def test_an_error_while_closing_does_not_hide_the_one_that_ended_the_run():
    class Closes:
        def close(self):
            raise ValueError("in close")

    listener = Listener()
    with pytest.raises(ZeroDivisionError), following([Closes(), listener]):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="in close"), following([Closes(), listener]):
        pass
    assert listener.words == "close close"


def test_a_tracker_that_fails_is_logged_once_and_the_run_goes_on(caplog):
    alone, listener = fedcor.run(digits(), "random", progress=False), Listener()
    with caplog.at_level(logging.WARNING, "fedcor"):
        result = fedcor.run(
            digits(), "random", out="run", progress=False, callbacks=[Broken(), listener]
        )
    assert plain(result.runs[0].rounds) == plain(alone.runs[0].rounds)
    assert listener.words == "start round round round round end close"
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "a tracker of run failed" in caplog.text
    assert r"OSError: the disk\nis full" in caplog.text


MINE = """
from dataclasses import dataclass
@dataclass
class Mine:
    def on_start(self, run):
        self.file = open(run.folder / "mine.txt", "a")
    def on_round(self, record):
        if record.round == 2:
            raise ValueError("of mine")
        print(record.round, len(record.selected), file=self.file)
    def close(self):
        self.file.close()
class NoDataclass:
    def on_round(self, record): ...
"""


def test_a_users_own_tracker_by_name(monkeypatch, capsys, caplog):
    monkeypatch.syspath_prepend(".")
    Path("mytracker.py").write_text(MINE)
    command = ["run", "digits", "--selector", "random", "--rounds", "4", "--out", "run", "--track"]
    assert main([*command, "mytracker:Mine"]) == 0
    assert Path("run/mine.txt").read_text() == "0 10\n1 10\n"
    assert "ValueError: of mine" in caplog.text
    assert main([*command, "mytracker:NoDataclass"]) == 2
    assert "--track = 'mytracker:NoDataclass': must be a dataclass" in capsys.readouterr().err


@pytest.mark.parametrize("name", PACKAGES)
def test_without_its_package_a_tracker_says_what_to_install(name, monkeypatch, capsys):
    def find(package, *_):
        return None if package == PACKAGES[name] else ModuleSpec(package, None, origin="here")

    monkeypatch.setattr("importlib.util.find_spec", find)
    said = f"pip install 'fedcor[{name}]' (from a clone: pip install '.[{name}]')"
    for command in ("run digits --out run", "compare digits --out run"):
        assert main([*command.split(), "--track", f"{NAME},{name}"]) == 2
        assert said in capsys.readouterr().err
    assert not Path("run").exists()
    with pytest.raises(MissingExtraError, match=name):
        fedcor.run(digits(), "random", out="run", callbacks=[name])


def test_a_folder_with_the_name_of_a_package_is_no_package(monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("not_installed").mkdir()
    with pytest.raises(MissingExtraError, match=r"fedcor\[wandb\]"):
        check_installed("not_installed", "wandb")
    check_installed("numpy", "wandb")


def mean_of(values):
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def expected_rows(run):
    """Slowly, from the record alone."""
    rows = []
    for number, entry in enumerate(run.rounds):
        so_far = run.rounds[: number + 1]
        row = {
            "round": number,
            "selected": len(entry["selected"]),
            "participants": len(entry["participated"]),
            "accuracy": entry["test_accuracy"],
            "loss": entry["test_loss"],
            "bytes": sum(one["bytes_down"] + one["bytes_up"] for one in so_far),
            "clients_seen": len({client for one in so_far for client in one["selected"]}),
            **{f"why/{k}": mean_of(v) for k, v in entry["why"].items() if k != "runner_up"},
        }
        same = ["learning_rate", "probed", "refused", "bytes_down", "bytes_up", "seconds"]
        rows.append({**row, **{key: entry[key] for key in same}})
    return rows


def check_log(folder):
    run = read_run(folder)
    assert read_log(folder) == expected_rows(run)
    chosen = [client for one in run.rounds for client in one["selected"]]
    with (folder / TABLE).open(newline="") as file:
        table = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert [row["client"] for row in table] == list(
        range(run.header["config"]["partition"]["clients"])
    )
    assert [row["selected"] for row in table] == [chosen.count(k) for k in range(len(table))]


def test_a_tracker_has_each_round_once_however_the_run_was_interrupted():
    def stop_after(last):
        def stop(record):
            if record.round == last:
                raise KeyboardInterrupt

        return stop

    made = fedcor.experiment(digits(25), selectors={"fedcor": {"warmup": 3, "interval": 4}})
    for last in (3, 10, 17, 24):
        with pytest.raises(KeyboardInterrupt):
            fedcor.run(
                made,
                "fedcor",
                out="run",
                resume=True,
                progress=False,
                callbacks=[NAME, stop_after(last)],
            )
        rows = read_log("run")
        assert [row["round"] for row in rows] == list(range(last + 1))
        with open("run/log.jsonl", "a") as file:
            file.write('{"round":')  # torn by a crash
    result = fedcor.run(made, "fedcor", out="run", resume=True, progress=False, callbacks=[NAME])
    check_log(Path("run"))
    alone = fedcor.run(made, "fedcor", progress=False)
    assert plain(result.runs[0].rounds) == plain(alone.runs[0].rounds)


def test_runs_in_several_processes_each_have_a_tracker_of_their_own():
    command = "compare digits --selectors random,afl --seeds 1,2 --rounds 3 --jobs 2 --out runs"
    assert main([*command.split(), "--track", NAME]) == 0
    for selector in ("random", "afl"):
        for seed in (1, 2):
            check_log(Path("runs") / selector / f"seed-{seed}")
    assert main(["report", "runs"]) == 0


def test_a_finished_run_can_be_given_to_a_tracker():
    command = ["run", "digits", "--selector", "random", "--rounds", "3", "--out", "run"]
    assert main(command) == 0
    before = Path("run/rounds.jsonl").read_bytes()
    assert main([*command, "--resume", "--track", NAME]) == 0
    check_log(Path("run"))
    assert Path("run/rounds.jsonl").read_bytes() == before


def test_a_tracker_does_not_write_through_a_link(caplog):
    Path("run").mkdir()
    Path("elsewhere").write_text("mine")
    Path("run/log.jsonl").symlink_to(Path("elsewhere").absolute())
    result = fedcor.run(digits(2), "random", out="run", progress=False, callbacks=[NAME])
    assert len(result.runs[0].rounds) == 2
    assert "log.jsonl is a symbolic link" in caplog.text
    assert Path("elsewhere").read_text() == "mine"


def a_round(number, **values):
    """A record of a round with these values."""
    known = {
        "round": number, "selected": [0], "participated": [0], "test_accuracy": 0.5,
        "test_loss": 1.0, "learning_rate": 0.1, "probed": 0, "refused": 0, "bytes_down": 1,
        "bytes_up": 1, "seconds": 0.1,
    }  # fmt: skip
    return RoundRecord(**{**known, **values})


def test_a_round_is_numbers_under_names_that_do_not_clash(tmp_path):
    tracker, header = RoundLog(), {"selector": "random", "seed": 1}
    tracker.on_start(StartedRun(header, tmp_path, tmp_path))
    tracker.on_round(a_round(0, test_accuracy=math.nan))
    tracker.on_round(a_round(1, metrics={"f1": 0.25, "bytes": 3.0, "list": [1.0, 2.0]}))
    tracker.on_round(a_round(2))
    first, second, third = read_log(tmp_path)
    assert "accuracy" not in first
    assert (second["f1"], second["metric/bytes"], second["accuracy"]) == (0.25, 3.0, 0.5)
    assert (third["round"], third["bytes"]) == (2, 6)
    assert not any("list" in name for name in second)


NUMBERS = st.one_of(st.floats(), st.integers(-5, 5))
REASONS = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))
ROUNDS = st.lists(
    st.fixed_dictionaries(
        {
            "selected": st.lists(st.integers(0, 9), unique=True),
            "bytes_down": st.integers(0, 10**12),
            "why": st.dictionaries(st.text(max_size=3), st.lists(REASONS, max_size=3), max_size=2),
            "metrics": st.dictionaries(st.text(max_size=3), NUMBERS, max_size=3),
            "test_loss": st.floats(),
        }
    ),
    max_size=8,
)


@given(ROUNDS, st.integers(0, 12))
def test_totals_over_any_rounds(drawn, clients):
    tally, records = Tally(), [a_round(i, **values) for i, values in enumerate(drawn)]
    for number, record in enumerate(records):
        values = tally.add(as_entry(record))
        assert values["bytes"] == sum(
            one.bytes_down + one.bytes_up for one in records[: number + 1]
        )
        assert all(map(math.isfinite, values.values()))
        assert ("loss" in values) == math.isfinite(record.test_loss)
    chosen = [client for record in records for client in record.selected]
    counts = tally.counts(clients)
    assert len(counts) >= clients
    assert counts.tolist() == [chosen.count(client) for client in range(len(counts))]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 20))
def test_bars_hold_every_choice(counts, most):
    heights, edges = bars(np.array(counts), most)
    assert len(heights) == len(edges) - 1 <= most
    width = edges[1]
    assert heights.tolist() == [sum(counts[low : low + width]) for low in edges[:-1]]
    assert heights.sum() == sum(counts)


def test_settings_are_flat_texts():
    tree = {"a": {"b": [1, 2], "c": {"d": "x"}}, "e": None}
    assert flat_settings(tree) == {"a.b": "[1, 2]", "a.c.d": "x", "e": "null"}
    assert scalars({})["selected"] == 0


def test_a_tracker_object_is_copied_for_each_run():
    tracker = RoundLog()
    assert build_callback(tracker) is not tracker
    listener = Listener()
    assert build_callback(listener) is listener
    assert check_callbacks([tracker, listener], "run") == (tracker, listener)
    assert dataclasses.is_dataclass(tracker)
