"""The metrics of a Flower app: in the record, in Flower's result, and under Flower's numbers."""

from __future__ import annotations

import json
import logging
import math
import shutil

import pytest
from flower_grid import MemoryGrid, initial, lines, logged, numpy_app, server_score, vector
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg, Result
from hypothesis import given
from hypothesis import strategies as st

import fedcor
from fedcor.cli import main
from fedcor.flower import FedCorStrategy, select_with
from fedcor.flower.run_record import flat_metrics, other_records, read_metrics, with_earlier
from fedcor.runs.record import json_line, read_run
from fedcor.selectors.baselines import Random

ROUNDS = 6
FIELDS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class Killed(BaseException):
    """As kill -9: nothing of ours gets to clean up in between."""


def collect(contents, _weighted_by):
    """What a user's own aggregation of metrics may give: whole numbers, lists, NaN."""
    counts = [int(one["num-examples"]) for c in contents for one in c.metric_records.values()]
    return MetricRecord(
        {
            "clients": len(counts),
            "share": 0.1 + 0.2,
            "sizes": sorted(counts),
            "none": [],
            "empty/mean": math.nan,
            "worst": [math.inf, -math.inf, math.nan, 1e-300],
        }
    )


def rich_score(server_round, arrays):
    """Central evaluation in some rounds only, once without any metric."""
    if server_round == 2:
        return None
    if server_round == 3:
        return MetricRecord()
    scores = server_score(server_round, arrays)
    return MetricRecord({**scores, "round": server_round, "per-class": [scores["loss"], 1.0]})


def strategy():
    return FedAvg(fraction_evaluate=1.0, train_metrics_aggr_fn=collect)


def start(folder, rounds=ROUNDS, evaluate_fn=rich_score, wrapped=None, seed=0, **settings):
    settings = {"wait_for": 5, **settings}
    selecting = select_with(wrapped or strategy(), Random(3), checkpoint=folder, **settings)
    grid = MemoryGrid(numpy_app(), 5, seed)
    return selecting.start(grid, initial(), num_rounds=rounds, timeout=0.1, evaluate_fn=evaluate_fn)


def text_of(result: Result):
    """All metrics, with the type of every number: 1 is not 1.0, and NaN is itself."""
    return {
        name: {number: repr(dict(record)) for number, record in getattr(result, name).items()}
        for name in FIELDS
    }


# --- the record -----------------------------------------------------------------------------------


def test_the_record_has_every_metric_of_the_app(tmp_path):
    result = start(tmp_path)
    found = lines(tmp_path)
    for line in found:
        number = line["round"] + 1
        assert line["server_round"] == number
        trained, evaluated = (getattr(result, name)[number] for name in FIELDS[:2])
        assert line["metrics"]["train/clients"] == trained["clients"] == 3
        assert line["metrics"]["train/sizes"] == trained["sizes"]
        assert line["metrics"]["train/empty/mean"] is None
        assert line["metrics"]["train/worst"] == [None, None, None, 1e-300]
        assert line["metrics"]["evaluate/accuracy"] == evaluated["accuracy"]
        assert ("server/accuracy" in line["metrics"]) == (number not in (2, 3))
    assert (
        found[0]["metrics"]["server/per-class"] == result.evaluate_metrics_serverapp[1]["per-class"]
    )
    frame = fedcor.load(tmp_path).to_frame()
    assert frame["server_round"].tolist() == [1, 2, 3, 4, 5, 6]
    assert frame["evaluate/loss"].notna().all()
    assert frame["server/loss"].isna().tolist() == [False, True, True, False, False, False]
    assert frame["train/sizes"][0] == tuple(found[0]["metrics"]["train/sizes"])
    assert frame["train/clients"].tolist() == [3] * ROUNDS


def test_a_user_hears_of_the_metrics_of_a_round(tmp_path):
    heard = []
    start(None, on_round=heard.append)
    assert [one.server_round for one in heard] == [1, 2, 3, 4, 5, 6]
    assert heard[0].metrics["train/clients"] == 3
    assert "metrics" not in json.loads(json_line({"round": 0, "metrics": {}, "server_round": None}))


@pytest.mark.parametrize("wrapper", [select_with, FedCorStrategy])
def test_the_accuracy_may_have_any_name(wrapper, tmp_path, caplog):
    def score(server_round, arrays):
        found = server_score(server_round, arrays)
        return MetricRecord({"top1": found["accuracy"], "loss": found["loss"]})

    given = {"checkpoint": tmp_path, "wait_for": 5, "accuracy_key": "top1"}
    quiet = FedAvg(fraction_evaluate=0.0)
    if wrapper is select_with:
        selecting = select_with(quiet, Random(3), **given)
    else:
        selecting = FedCorStrategy(3, quiet, warmup=5, **given)
    with logged(caplog):
        result = selecting.start(
            MemoryGrid(numpy_app(), 5), initial(), num_rounds=2, evaluate_fn=score
        )
    expected = [result.evaluate_metrics_serverapp[number]["top1"] for number in (1, 2)]
    assert [line["test_accuracy"] for line in lines(tmp_path)] == expected
    assert not [text for text in caplog.messages if "accuracy" in text]


def test_a_key_that_never_comes_is_said_once(tmp_path, caplog):
    def score(server_round, arrays):
        return None if server_round == 1 else server_score(server_round, arrays)

    with logged(caplog):
        start(tmp_path / "a", 4, score, accuracy_key="top5", loss_key="nll")
    assert caplog.messages == [
        'accuracy_key = "top5": the evaluation of round 2 has no such number; its metrics are '
        "accuracy, loss. The record has no accuracy until it comes",
        'loss_key = "nll": the evaluation of round 2 has no such number; its metrics are '
        "accuracy, loss. The record has no loss until it comes",
    ]
    assert [line["test_accuracy"] for line in lines(tmp_path / "a")] == [None] * 4
    caplog.clear()
    with logged(caplog):  # federated evaluation has it, and the server's is what counts
        start(tmp_path / "b", 2, lambda *_: MetricRecord({"f1": 0.5}), accuracy_key="accuracy")
    assert caplog.messages == [
        'accuracy_key = "accuracy": the evaluation of round 1 has no such number; its metrics are '
        "f1. The record has no accuracy until it comes; the clients' own evaluation is in it as "
        "evaluate/accuracy"
    ]


def test_without_a_key_an_unknown_name_is_mentioned(tmp_path, caplog):
    with logged(caplog, logging.INFO):
        start(tmp_path, 2, lambda *_: MetricRecord({"top1": 0.5, "loss": 1.0}))
    (said,) = [text for text in caplog.messages if "accuracy_key" in text]
    assert said.startswith("the evaluation of round 1 has no accuracy under a known name (accuracy")
    assert said.endswith(
        "its metrics are top1, loss. If one of them is the accuracy, name it with accuracy_key"
    )


# --- Flower's result ------------------------------------------------------------------------------

scalars = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats())
values = st.one_of(
    scalars,
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.lists(st.floats(), max_size=3),
)
records = st.dictionaries(st.text(max_size=8), values, max_size=3).map(MetricRecord)


@given(
    st.dictionaries(st.sampled_from(["train", "evaluate", "server"]), records),
    st.none() | records,
)
def test_a_line_gives_back_what_was_put_into_it(parts, first):
    line = {
        "metrics": flat_metrics(parts),
        "metric_records": other_records(parts, first),
    }
    read = read_metrics(json.loads(json_line(line)))
    before = read.pop("initial", None)
    assert repr(None if first is None else dict(first)) == repr(
        None if before is None else dict(before)
    )
    assert {part: repr(dict(record)) for part, record in read.items()} == {
        part: repr(dict(record)) for part, record in parts.items()
    }


@pytest.mark.parametrize("killed_in", [1, 2, 4, 6])
@pytest.mark.parametrize("central", [True, False])
def test_the_result_of_a_resumed_run_is_that_of_one_that_was_not_killed(
    killed_in, central, tmp_path
):
    evaluate_fn = rich_score if central else None
    whole = start(tmp_path / "whole", evaluate_fn=evaluate_fn)
    assert central == (0 in whole.evaluate_metrics_serverapp)

    def kill(record):
        if record.round == killed_in - 1:
            raise Killed

    with pytest.raises(Killed):
        start(tmp_path / "run", evaluate_fn=evaluate_fn, on_round=kill)
    assert len(lines(tmp_path / "run")) == killed_in
    resumed = start(tmp_path / "run", evaluate_fn=evaluate_fn, seed=3)
    assert text_of(resumed) == text_of(whole)
    assert vector(resumed.arrays).tolist() == vector(whole.arrays).tolist()
    # In the same order, too, and once more when there is nothing left to do.
    for name in FIELDS:
        assert list(getattr(resumed, name)) == list(getattr(whole, name))
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    again = start(tmp_path / "run", evaluate_fn=evaluate_fn)
    assert text_of(again) == text_of(whole)
    assert vector(again.arrays).tolist() == vector(whole.arrays).tolist()
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == before


class Keeping(FedAvg):
    """Leaves the model as it is after the third round."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return (None if server_round > 3 else arrays), metrics


def test_a_model_that_resumed_rounds_left_as_it_is_is_in_the_result(tmp_path):
    whole = start(tmp_path / "whole", 5, wrapped=Keeping())
    start(tmp_path / "run", 3, wrapped=Keeping())
    assert vector(start(tmp_path / "run", 5, wrapped=Keeping()).arrays).tolist() == (
        vector(whole.arrays).tolist()
    )


def test_earlier_rounds_stand_before_those_of_the_loop():
    entries = [{"round": 0, "metrics": {"train/a": 1}}, {"round": 1, "metrics": {"train/a": 2}}]
    result = with_earlier(Result(train_metrics_clientapp={3: MetricRecord({"a": 3})}), entries)
    assert {k: dict(v) for k, v in result.train_metrics_clientapp.items()} == {
        1: {"a": 1},
        2: {"a": 2},
        3: {"a": 3},
    }


# --- on the command line --------------------------------------------------------------------------


def test_the_report_shows_any_metric(tmp_path, capsys):
    start(tmp_path)
    assert main(["report", str(tmp_path), "--metric", "evaluate/accuracy"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "random has a mean evaluate/accuracy of" in out
    assert main(["report", str(tmp_path), "--metric", "server/loss"]) == 0
    assert "server/loss is known in 4 of 6 rounds" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(tmp_path), "--metric", "evaluate/acuracy"]) == 2
    error = capsys.readouterr().err
    assert 'has no metric "evaluate/acuracy": did you mean "evaluate/accuracy"?' in error
    for name in ("accuracy", "loss", "train/clients", "evaluate/loss", "server/round"):
        assert name in error.partition("there is ")[2]
    assert "train/sizes" not in error
    assert main(["report", str(tmp_path), "--metric", "train/sizes"]) == 2
    assert "train/sizes is a list of numbers, which a report does not show" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("evaluate/accuracy", "higher"),
        ("server/val_acc", "higher"),
        ("train/loss", "lower"),
        ("server/eval-loss", "lower"),
        ("server/glossary", None),
        ("loss-ratio", None),
        ("other/accuracy", None),
    ],
)
def test_which_direction_of_a_flower_apps_metric_is_better(name, better):
    from fake_runs import fake_run

    from fedcor.reporting.curves import read_curve

    assert read_curve(fake_run([0.1], metrics={name: [0.5]})).better(name) == better


def test_explain_counts_rounds_as_flower_does(tmp_path, capsys):
    start(tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    assert "random, round 6 (numbered as in Flower, from 1)" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--round", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["round"], shown["server_round"]) == (1, 2)
    selected = read_run(tmp_path).rounds[1]["selected"]
    assert [row["client"] for row in shown["chosen"]] == selected
    for number in ("0", "7"):
        assert main(["explain", str(tmp_path), "--round", number]) == 2
        said = f"has the rounds 1 to 6, numbered as in Flower; there is no round {number}"
        assert said in capsys.readouterr().err
    # A record from before: as it was.
    path = tmp_path / "rounds.jsonl"
    header, *rest = map(json.loads, path.read_text().splitlines())
    old = [header, *({k: v for k, v in one.items() if k != "server_round"} for one in rest)]
    path.write_text("".join(json.dumps(one) + "\n" for one in old))
    shutil.rmtree(tmp_path / "checkpoint")  # it knows what was written
    assert main(["explain", str(tmp_path), "--round", "0"]) == 0
    assert "random, round 0\n" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--round", "0", "--json"]) == 0
    assert "server_round" not in json.loads(capsys.readouterr().out)


def test_a_run_that_diverged_on_flower_is_reported_with_flowers_number():
    from fake_runs import fake_run

    from fedcor.reporting.screen import screen_text
    from fedcor.reporting.summary import summarise

    run = fake_run([0.1, 0.1, 0.1], loss=[1.0, None, None])
    assert "from round 1 on" in " ".join(screen_text(summarise([run])).split())
    for number, row in enumerate(run.rounds, start=1):
        row["server_round"] = number
    assert "from round 2 on" in " ".join(screen_text(summarise([run])).split())


def test_a_list_of_the_clients_is_aggregated_and_kept(tmp_path):
    selecting = select_with(FedAvg(), Random(3), checkpoint=tmp_path, wait_for=5)
    grid = MemoryGrid(numpy_app(), 5)

    def add_list(_message, reply):
        if reply.has_content() and "metrics" in reply.content.metric_records:
            reply.content["metrics"]["steps"] = [1, 2]
        return reply

    grid.trouble = dict.fromkeys(range(5), add_list)
    selecting.start(grid, initial(), num_rounds=1)
    (line,) = lines(tmp_path)
    assert line["metrics"]["train/steps"] == pytest.approx([1.0, 2.0])
    assert line["test_accuracy"] == line["metrics"]["evaluate/accuracy"]
