"""Rounds without a value are left out and counted; a metric that never came is absent, not 0."""

from __future__ import annotations

import json
import math
from statistics import mean

import numpy as np
import pytest
from fake_runs import fake_run
from hypothesis import given, settings
from hypothesis import strategies as st
from studies.summaries import smooth_curve

from fedcor.cli import main
from fedcor.core.errors import RecordError
from fedcor.reporting.curves import read_curve
from fedcor.reporting.metrics import METRICS, Estimate, paired_values
from fedcor.reporting.notes import missing_note
from fedcor.reporting.results import Result
from fedcor.reporting.screen import screen_text, sparklines
from fedcor.reporting.summary import summarise
from fedcor.reporting.tables import estimate_text, to_json
from fedcor.reporting.verdict import experiment_verdict
from fedcor.runs.record import json_line

FLOWER = {"flwr": "1"}
SOME = [None, 0.111, None, 0.279, None, 0.088]
NONE = [None] * 6
METRIC = {metric.key: metric for metric in METRICS}


def app_run(accuracy, selector="random", seed=1, **options):
    """A run of a user's Flower app, which need not evaluate every round."""
    return fake_run(accuracy, selector, seed, versions=FLOWER, **options)


def only(runs, **options):
    (experiment,) = summarise(runs, **options).experiments
    return experiment


def words(text):
    return " ".join(text.split())


def write(folder, runs):
    for number, run in enumerate(runs):
        path = folder / str(number) / "rounds.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(map(json_line, [run.header, *run.rounds])))


# --- one run --------------------------------------------------------------------------------------


def test_the_mean_is_that_of_the_rounds_with_a_value():
    experiment = only([app_run(SOME)])
    found = experiment.selector("random").estimates["mean_accuracy"].mean
    assert found == pytest.approx((0.111 + 0.279 + 0.088) / 3)
    assert missing_note(experiment) == (
        "accuracy is known in 3 of 6 rounds; the others are left out."
    )


accuracies = st.lists(st.none() | st.integers(0, 10).map(lambda n: n / 10), max_size=30)


def slow_values(accuracy, target):
    """Every metric of one run, read off its list of accuracies; each round costs 110 bytes."""
    known = [(number, value) for number, value in enumerate(accuracy, start=1) if value is not None]
    values = [value for _, value in known]
    reached = [number for number, value in known if value >= target]
    tens = [(known[end - 1][0], mean(values[end - 10 : end])) for end in range(10, len(values) + 1)]
    smooth = [number for number, value in tens if value >= target - 1e-7]
    return {
        "mean_accuracy": mean(values) if values else None,
        "final_accuracy": mean(values[-10:]) if values else None,
        "last_accuracy": values[-1] if values else None,
        "rounds_to_target": reached[0] if reached else None,
        "smooth_rounds_to_target": smooth[0] if smooth else None,
        "bytes_to_target": 110 * reached[0] if reached else None,
    }


@given(accuracies, st.integers(0, 10).map(lambda n: n / 10))
def test_every_metric_of_a_run_with_gaps(accuracy, target):
    one = app_run(accuracy, target=target, loss=[None] * len(accuracy))
    (run,) = only([one]).selectors[0].runs
    for key, expected in slow_values(accuracy, target).items():
        assert run.values[key] == (None if expected is None else pytest.approx(expected)), key


# --- two runs -------------------------------------------------------------------------------------


def slow_difference(key, ours, theirs, target):
    """Rounds that one of both did not measure count for neither; later ones of the longer run do,
    for the metrics that are fixed once the target is reached."""
    length = min(len(ours), len(theirs))
    keep = [ours[t] is not None and theirs[t] is not None for t in range(length)]
    found = []
    for values in (ours, theirs):
        both = [value if kept else None for value, kept in zip(values, keep, strict=False)]
        if key.endswith("to_target"):
            both += values[length:]
        found.append(slow_values(both, target)[key])
    return None if None in found else found[0] - found[1]


@given(accuracies, accuracies, st.integers(0, 10).map(lambda n: n / 10))
def test_a_pair_is_compared_over_the_rounds_that_both_have(ours, theirs, target):
    one, other = (read_curve(app_run(values, target=target)) for values in (ours, theirs))
    for key in slow_values(ours, target):
        found = paired_values(METRIC[key], {1: one}, {1: other})[1]
        expected = slow_difference(key, ours, theirs, target)
        assert found == (None if expected is None else pytest.approx(expected, abs=1e-12)), key


def test_the_rounds_of_a_comparison_are_those_that_both_have():
    runs = [app_run([0.1, None, 0.3, 0.4]), app_run([0.2, 0.3, None, None], "fedcor")]
    found = only(runs).selector("fedcor").differences
    assert found["mean_accuracy"].rounds == (1, 1)
    assert found["bytes_down"].rounds == (4, 4)
    text = experiment_verdict(only(runs))
    assert text.startswith("Over the 1 round in which both have a value: ")
    together = [app_run(SOME), app_run(SOME, "fedcor")]
    assert "in which both" not in experiment_verdict(only(together))
    assert only(together).selector("fedcor").differences["mean_accuracy"].rounds == (3, 3)


def test_runs_that_were_never_measured_together_are_not_compared():
    runs = [app_run([0.1, None]), app_run([None, 0.9], "fedcor")]
    experiment = only(runs)
    found = experiment.selector("fedcor").differences["mean_accuracy"]
    assert (found.estimate.mean, found.rounds, found.verdict) == (None, None, None)
    assert "there is no round in which both have a value of accuracy" in (
        experiment_verdict(experiment)
    )


# --- a metric that never came ---------------------------------------------------------------------


def test_runs_without_any_value_are_named_as_left_out():
    experiment = only([app_run(SOME), app_run(NONE, "fedcor"), app_run(SOME, "afl")])
    assert missing_note(experiment) == (
        "Left out, as no round has a value of accuracy: fedcor seed 1. "
        "accuracy is known in 3 of 6 rounds of the others; the rest is left out."
    )
    uneven = only([app_run(SOME), app_run([0.1] * 6, "afl"), app_run(SOME[:4], "fedcor")])
    assert missing_note(uneven) == (
        "Rounds without a value of accuracy are left out; it is known in 3 of 6 rounds of random "
        "seed 1, in 2 of 4 rounds of fedcor seed 1."
    )


def test_a_baseline_without_values_does_not_hide_the_others():
    runs = [
        app_run(values, name, seed, target=None)
        for name, values in (("random", NONE), ("afl", [0.1] * 6), ("fedcor", [0.4] * 6))
        for seed in (1, 2)
    ]
    text = experiment_verdict(only(runs))
    assert text.startswith("fedcor is ahead of afl on both seeds")
    assert "random" not in text


def test_what_was_never_measured_is_a_dash_and_no_curve(tmp_path, capsys):
    runs = [app_run(NONE, name, loss=NONE, target=None) for name in ("random", "fedcor")]
    summary = summarise(runs)
    text = screen_text(summary)
    assert "No comparison of mean accuracy: random has none: no round has a value" in words(text)
    rows = [line.split() for line in text.splitlines() if line.startswith(("random ", "fedcor "))]
    assert [row[1:3] for row in rows] == [["-", "-"]] * 2
    assert sparklines(summary.experiments[0]) == []
    with pytest.raises(RecordError, match="toy cannot be drawn: no round has a value of accuracy"):
        Result(runs).plot()
    write(tmp_path, runs)
    assert main(["report", str(tmp_path), "--plot", str(tmp_path / "x.png")]) == 0
    shown = capsys.readouterr()
    assert "toy cannot be drawn: no round has a value of accuracy" in shown.err
    assert not (tmp_path / "x.png").exists()
    assert "x.png" not in shown.out
    assert main(["report", str(tmp_path), "--full"]) == 0
    out = capsys.readouterr().out
    assert "N/A (0/1)" not in out.partition("paired difference")[0]
    values = json.loads(to_json(summary))["experiments"][0]
    assert values["selectors"][0]["runs"][0]["values"]["mean_accuracy"] is None
    assert values["notes"] == [
        "Left out, as no round has a value of accuracy: random seed 1, fedcor seed 1."
    ]


def test_a_selector_without_values_has_no_line_in_a_plot():
    runs = [app_run(SOME), app_run(NONE, "fedcor")]
    figure = Result(runs).plot()
    assert [entry.get_text() for entry in figure.legends[0].get_texts()] == ["random"]
    assert len([line for line in sparklines(only(runs)) if line.startswith("fedcor")]) == 0


def test_a_dash_where_there_is_no_number():
    none = Estimate(None, None, None, None, 0, 2)
    assert estimate_text(METRIC["mean_accuracy"], none) == "-"
    assert estimate_text(METRIC["rounds_to_target"], none) == "N/A (0/2)"


@settings(max_examples=30)
@given(st.lists(accuracies.filter(len), min_size=1, max_size=3))
def test_a_figure_of_the_paper_never_takes_a_missing_value_for_0(seeds):
    length = min(map(len, seeds))
    drawn = smooth_curve([fake_run(values, seed=seed) for seed, values in enumerate(seeds)])
    window = drawn["round"][0]
    for place, end in enumerate(drawn["round"]):
        means = []
        for values in seeds:
            known = [value for value in values[end - window : end] if value is not None]
            means += [mean(known)] if known else []
        found = drawn["mean"][place]
        if means:
            assert found == pytest.approx(mean(means), abs=1e-4)
        else:
            assert found is None or math.isnan(found)
    assert len(drawn["mean"]) == length - window + 1


def test_lists_are_no_measure():
    run = app_run([0.1, 0.2], metrics={"server/per-class": [[0.1, 0.2], None], "f1": [1, None]})
    curve = read_curve(run)
    assert "server/per-class" not in curve.measures
    assert np.array_equal(curve.measures["f1"], [1.0, np.nan], equal_nan=True)
    frame = Result([run]).to_frame()
    assert frame["server/per-class"].tolist() == [(0.1, 0.2), None]
