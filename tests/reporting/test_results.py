"""A Result: what it shows, its frames and its plots are what the records hold."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from fake_runs import fake_run, regression_run
from PIL import Image

from fedcor.core.errors import ConfigError, MissingExtraError, RecordError
from fedcor.reporting.explanations import explanation as explain
from fedcor.reporting.results import Result
from fedcor.reporting.summary import summarise
from fedcor.runs.record import RunRecord, read_runs
from fedcor.runs.runner import run as run_experiment
from fedcor.simulation.experiment_files import load_experiment


def both(**options):
    return [
        fake_run(np.linspace(0, top + seed / 100, 12).tolist(), name, seed, **options)
        for name, top in (("random", 0.6), ("fedcor", 0.9))
        for seed in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def result():
    return Result(both(metrics={"f1": np.linspace(0, 1, 12).tolist()}))


@pytest.mark.parametrize(
    ("better", "order", "verdict"),
    [
        (None, ["random", "afl", "fedcor"], "lower"),
        ("lower", ["afl", "fedcor", "random"], "better"),
        ("higher", ["random", "fedcor", "afl"], "worse"),
    ],
)
def test_the_direction_of_a_users_metric(better, order, verdict):
    runs = [
        fake_run([0.1, 0.2], name, seed, metrics={"mae": [v, v * seed]}, better={"mae": better})
        for name, v in (("random", 0.9), ("afl", 0.1), ("fedcor", 0.85))
        for seed in (1.0, 1.01)
    ]
    for run, seed in zip(runs, (1, 2) * 3, strict=True):
        run.header["seed"] = seed
    result = Result(runs)
    assert [*result.summary("mae").index] == order
    lines = result.plot(metric="mae").axes[0].lines
    assert [line.get_label() for line in lines] == order
    frame = result.difference("afl", metric="mae")
    assert frame.loc["mean_mae", "verdict"] == verdict


def test_what_there_is(result):
    assert (len(result), len(list(result)), result.finished) == (6, 6, True)
    assert result.selectors == ("random", "fedcor")
    assert result.seeds == (1, 2, 3)
    assert result.experiments == ("toy",)
    assert result.best == "fedcor"
    assert list(result) == list(result.runs)


def test_it_shows_itself(result):
    text = repr(result)
    assert text.replace("\n", " ").startswith(result.verdict)
    assert "\x1b" not in text
    assert "vs random [95 %]" in text
    assert result._repr_html_().startswith(f"<p><b>{result.verdict}</b></p><table>")


def test_a_name_in_html_is_escaped():
    shown = Result([fake_run([0.1], "<i>&", experiment="<script>")])._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "&lt;i&gt;&amp;" in shown
    assert "<i>" not in shown


def test_the_frame_has_a_row_per_round(result):
    frame = result.to_frame()
    columns = "experiment selector seed round accuracy loss learning_rate bytes_down bytes_up bytes"
    columns += " probed refused selected participated seconds f1"
    assert list(frame.columns) == columns.split()
    assert len(frame) == 6 * 12
    one = frame[(frame.selector == "fedcor") & (frame.seed == 2)]
    assert one["accuracy"].tolist() == [e["test_accuracy"] for e in result.runs[4].rounds]
    assert one["bytes"].tolist() == [110 * n for n in range(1, 13)]
    assert one["selected"].iloc[1] == (1, 3)
    assert one["f1"].iloc[-1] == 1.0
    assert frame["seed"].dtype == frame["bytes"].dtype == np.int64
    assert frame["accuracy"].dtype == np.float64


def test_values_that_are_missing_are_nan_in_the_frame():
    frame = Result([regression_run([2.0, None], metrics={"loss": [7.0, None]})]).to_frame()
    assert frame["accuracy"].isna().all()
    assert frame["loss"].tolist()[0] == 2.0
    assert np.isnan(frame["loss"].tolist()[1])
    assert frame["metric_loss"].tolist()[0] == 7.0  # a metric may not hide a column
    assert len(Result([fake_run([], planned=3)]).to_frame()) == 0


def test_what_the_defence_did_is_in_the_frame_where_there_is_any():
    run = fake_run([0.1, 0.2])
    run.rounds[1].update(clipped=[3], refused_updates={"norm": [0]}, rolled_back=1)
    frame = Result([run]).to_frame()
    assert frame["clipped"].tolist()[1] == (3,)
    assert frame["refused_updates"].tolist()[1] == {"norm": [0]}
    assert np.array_equal(frame["rolled_back"], [np.nan, 1.0], equal_nan=True)
    assert "capped" not in frame
    assert "clipped" not in Result([fake_run([0.1])]).to_frame()


def test_the_summary_is_that_of_the_report(result):
    frame = result.summary()
    assert list(frame.index) == ["fedcor", "random"]  # best first
    (experiment,) = summarise(result.runs).experiments
    for selector in experiment.selectors:
        for key, estimate in selector.estimates.items():
            cells = frame.loc[selector.name, key]
            assert cells["n"] == estimate.n
            for part in ("mean", "low", "high"):
                value = getattr(estimate, part)
                assert cells[part] == value or (value is None and np.isnan(cells[part]))
    assert frame[("mean_accuracy", "n")].dtype == np.int64
    assert list(result.summary("f1")["mean_f1"].columns) == ["mean", "low", "high", "n"]


def test_the_difference_is_paired(result):
    frame = result.difference("fedcor", "random")
    wanted = summarise(result.runs).experiments[0].selector("fedcor").differences
    assert list(frame.index) == list(wanted)
    for key, found in wanted.items():
        assert frame.loc[key, "n"] == found.estimate.n
        assert frame.loc[key, "verdict"] == found.verdict or found.verdict is None
        if found.estimate.mean is not None:
            assert frame.loc[key, "mean"] == found.estimate.mean
            assert frame.loc[key, "low"] == found.estimate.low
    pd.testing.assert_frame_equal(frame, result.difference("fedcor"))
    back = result.difference("random", "fedcor")
    assert back.loc["mean_accuracy", "mean"] == -frame.loc["mean_accuracy", "mean"]
    assert Result(result.runs, "fedcor").difference("random").equals(back)


@pytest.mark.parametrize("x", ["rounds", "bytes", "seconds"])
@pytest.mark.parametrize("metric", [None, "loss", "f1"])
def test_plots(result, x, metric):
    figure = result.plot(x, metric)
    (ax,) = figure.axes
    lines = [line for line in ax.lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == [*result.summary(metric).index]
    assert ax.get_ylabel() == (metric if metric == "f1" else f"test {metric or 'accuracy'}")
    if metric is None:
        frame = result.to_frame()
        means = frame[frame.selector == "fedcor"].groupby("round")["accuracy"].mean()
        assert lines[0].get_ydata() == pytest.approx(means.to_numpy())
        ends = {"rounds": 12, "bytes": 1.32, "seconds": 6.0}
        assert lines[0].get_xdata()[-1] == pytest.approx(ends[x])
        picture = Image.open(io.BytesIO(figure._repr_png_()))
        assert picture.width > picture.height


def test_a_plot_can_be_smoothed(result):
    (ax,) = result.plot(smooth=4).axes
    first = ax.lines[0].get_ydata()
    (raw,) = result.plot(smooth=1).axes
    values = raw.lines[0].get_ydata()
    assert first[0] == values[0]
    assert first[-1] == pytest.approx(np.mean(values[-4:]))
    with pytest.raises(ConfigError, match="smooth"):
        result.plot(smooth=0)


def test_runs_that_have_just_begun_can_be_plotted():
    runs = [fake_run([], "random", planned=5), fake_run([0.2], "fedcor", planned=5)]
    result = Result(runs)
    assert not result.finished
    result.plot()._repr_png_()
    result.plot("bytes")._repr_png_()
    assert "no round is finished yet" in result.verdict
    assert "Not finished" in repr(result)
    Result(runs[:1]).plot()._repr_png_()


def test_several_experiments():
    result = Result([*both(), *both(experiment="other", target=None)])
    assert result.experiments == ("toy", "other")
    assert result.summary().index[0] == ("toy", "fedcor")
    assert len(result.verdict.splitlines()) == 2
    assert "other: test accuracy" in repr(result)
    assert result._repr_html_().count("<table>") == 2
    for ask in (lambda: result.best, result.plot, lambda: result.difference("fedcor")):
        with pytest.raises(RecordError, match="choose one of toy, other with `only`"):
            ask()
    assert result.only("other").best == "fedcor"
    with pytest.raises(RecordError, match='did you mean "other"'):
        result.only("othr")


def test_runs_that_cannot_be_summarised_still_show_what_they_are():
    result = Result([fake_run([0.1]), fake_run([0.2])])
    assert repr(result).startswith("2 runs of toy with random. Two runs of toy, random, seed 1")
    assert "2 runs of toy" in result._repr_html_()
    assert len(result.to_frame()) == 2
    with pytest.raises(RecordError, match="two runs of toy"):
        _ = result.verdict


def test_mistakes_are_answered(result):
    with pytest.raises(RecordError, match="there are no runs"):
        Result([])
    with pytest.raises(RecordError, match='baseline = "randm".*did you mean "random"'):
        Result(result.runs, "randm")
    with pytest.raises(RecordError, match='a = "fedcorr".*did you mean "fedcor"'):
        result.difference("fedcorr")
    with pytest.raises(RecordError, match='toy has no metric "los": did you mean "loss"'):
        result.summary("los")
    with pytest.raises(ConfigError, match="x = 'round'.*did you mean \"rounds\""):
        result.plot("round")


def test_without_pandas_it_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (result.to_frame, result.summary, lambda: result.difference("fedcor")):
        with pytest.raises(MissingExtraError, match=r"pip install 'fedcor\[plot\]'"):
            ask()
    assert result.verdict
    assert repr(result)


def test_importing_it_brings_neither_pandas_nor_matplotlib():
    program = """
import sys, fedcor.reporting.results
assert not {"pandas", "matplotlib", "torch", "scipy", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_runs_of_a_folder_and_of_memory_say_the_same(tmp_path):
    for name in ("random", "full"):
        experiment = load_experiment("digits", ["training.rounds=3"], name)
        run_experiment(experiment, 1, tmp_path / name)
    runs = read_runs(tmp_path)
    in_memory = [RunRecord(None, run.header, run.rounds) for run in runs]
    assert repr(Result(runs)) == repr(Result(in_memory))
    assert Result(runs).to_frame().equals(Result(in_memory).to_frame())
    assert explain(in_memory[0])["run"] == "the run of digits, full, seed 1"
    assert explain(in_memory[0])["chosen"] == explain(runs[0])["chosen"]
    with pytest.raises(RecordError, match="the run of digits, full, seed 1 has the rounds 0 to 2"):
        explain(in_memory[0], 9)
