"""A folder of runs that differ in more than their selector: what can be compared is, and the report
says what is not."""

from __future__ import annotations

import json

import pytest
from fake_runs import fake_run

from fedcor.cli import main
from fedcor.core.errors import RecordError
from fedcor.reporting.results import Result
from fedcor.reporting.screen import screen_text, to_html, to_latex
from fedcor.reporting.series import series_names
from fedcor.reporting.summary import summarise
from fedcor.reporting.tables import to_json
from fedcor.runs.record import json_line, read_runs

FLOWER = {"flwr": "1"}


def app_run(strategy, selector="random", seed=1, level=0.1, **options):
    run = fake_run([level] * 3, selector, seed, versions=FLOWER, target=None, **options)
    run.header["config"]["strategy"] = strategy
    return run


def words(text):
    return " ".join(text.split())


def test_two_strategies_under_one_selector_are_two_series():
    runs = [
        app_run(strategy, selector, seed, level)
        for seed in (1, 2)
        for strategy, selector, level in (
            ("FedAvg", "random", 0.1),
            ("FedAdam", "random", 0.2),
            ("FedAdam", "fedcor", 0.3),
        )
    ]
    (experiment,) = summarise(runs).experiments
    names = ["random", "random + FedAdam", "fedcor + FedAdam"]
    assert [s.name for s in experiment.selectors] == names
    assert experiment.baseline == "random"
    means = [experiment.selector(name).estimates["mean_accuracy"].mean for name in names]
    assert means == pytest.approx([0.1, 0.2, 0.3])
    assert "fedcor + FedAdam is ahead of random on both seeds" in screen_text(summarise(runs))
    # Where all have one strategy, the selector says it all.
    assert series_names(runs[1:3]) == ["random", "fedcor"]


def test_the_default_pair_beside_a_strategy_of_flowers():
    runs = [
        app_run("FedAvg"),
        app_run("OptimiserStrategy", "aligned", optimiser={"name": "fedrecall", "keep": 1}),
        app_run("OptimiserStrategy", "random", optimiser="fedavg"),
        app_run("FedAdam"),
        app_run("OptimiserStrategy", optimiser="fedadam"),
        app_run("Private", optimiser="fedadam"),
    ]
    assert series_names(runs) == [
        "random",
        "aligned + FedRecall",
        "random + OptimiserStrategy(FedAvg)",
        "random + FedAdam",
        "random + OptimiserStrategy(FedAdam)",
        "random + Private(FedAdam)",
    ]
    (experiment,) = summarise(runs).experiments
    assert len(experiment.selectors) == 6
    assert series_names(runs[1:3]) == ["aligned + FedRecall", "random"]


def test_a_strategy_with_other_settings_is_refused():
    runs = [app_run("FedAdam", seed=seed) for seed in (1, 2)]
    for run, eta in zip(runs, (0.1, 0.2), strict=True):
        run.header["config"]["strategy_settings"] = {"eta": eta}
    with pytest.raises(RecordError, match=r"strategy_settings.eta is 0.1 in one and 0.2"):
        summarise(runs)


def test_two_runs_of_one_kind_are_named_by_their_folders(tmp_path):
    write(tmp_path, [app_run("FedAvg"), app_run("FedAvg")])
    with pytest.raises(RecordError, match=r"two runs of toy, random, seed 1 \(.*0 and .*1\)"):
        summarise(read_runs(tmp_path))


def other_settings(run, key, value, engine=None):
    run.header["config"][key] = value
    if engine:
        run.header["engine"] = engine
    return run


def side_by_side():
    return [
        other_settings(fake_run([level] * 3, selector, seed), "data", {"name": data}, engine)
        for seed in (1, 2)
        for data, engine, shift in (("digits", None, 0.0), ("fmnist", None, 0.2))
        for selector, level in (("random", 0.1 + shift), ("fedcor", 0.3 + shift))
    ]


def test_runs_on_other_data_are_reported_each_for_itself():
    summary = summarise(side_by_side())
    names = ["toy (data.name=digits)", "toy (data.name=fmnist)"]
    assert [experiment.name for experiment in summary.experiments] == names
    for experiment, level in zip(summary.experiments, (0.1, 0.3), strict=True):
        found = experiment.selector("random").estimates["mean_accuracy"]
        assert (found.mean, found.n) == (pytest.approx(level), 2)
    note = (
        "Not compared with each other, as their settings differ (data.name): "
        "toy (data.name=digits), toy (data.name=fmnist)."
    )
    assert summary.notes == (note,)
    assert note in words(screen_text(summary))
    assert json.loads(to_json(summary))["notes"] == [note]
    assert note in to_html(summary)
    assert f"% {note}" in to_latex(summary)
    result = Result(side_by_side())
    assert result.experiments == tuple(names)
    assert result.only(names[1]).best == "fedcor"
    assert set(result.to_frame()["experiment"]) == set(names)
    with pytest.raises(RecordError, match="choose one of"):
        _ = result.best


def test_engines_are_not_mixed():
    runs = [fake_run([0.1] * 3), fake_run([0.2] * 3)]
    runs[1].header["engine"] = "flower"
    summary = summarise(runs)
    assert [e.name for e in summary.experiments] == [
        "toy (engine=simulator)",
        "toy (engine=flower)",
    ]
    assert "as their settings differ (engine)" in summary.notes[0]
    app = app_run("FedAvg")
    names = [e.name for e in summarise([runs[0], app]).experiments]
    assert len(set(names)) == 2
    assert all("engine=" in name for name in names)


def test_many_differing_settings_still_give_two_names():
    runs = [fake_run([0.1]) for _ in range(3)]
    for number, run in enumerate(runs):
        run.header["config"] |= {f"key{k}": [number] * 30 for k in range(6)}
    names = [e.name for e in summarise(runs).experiments]
    assert len(set(names)) == 3
    assert all(len(name) <= 120 for name in names)


def test_an_experiment_without_the_metric_is_left_out():
    runs = [
        fake_run([0.1, 0.2], metrics={"f1": [0.3, 0.4]}),
        fake_run([0.1, 0.2], experiment="other"),
    ]
    summary = summarise(runs, measure="f1")
    assert [e.name for e in summary.experiments] == ["toy"]
    assert summary.notes == ('Left out, without a metric "f1": other.',)
    with pytest.raises(RecordError, match='none of toy, other has a metric "ff1": did you'):
        summarise(runs, measure="ff1")


def test_a_baseline_that_one_experiment_does_not_have():
    runs = [
        fake_run([0.1], "fedcor"),
        fake_run([0.1], "afl"),
        fake_run([0.1], "random", experiment="other"),
    ]
    summary = summarise(runs, "afl")
    assert [e.name for e in summary.experiments] == ["toy"]
    assert summary.notes == ('Left out, without a run of the baseline "afl": other.',)


def write(folder, runs):
    for number, run in enumerate(runs):
        path = folder / str(number) / "rounds.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(map(json_line, [run.header, *run.rounds])))


def test_the_command_says_what_was_left_out(tmp_path, capsys):
    runs = [
        app_run("FedAvg", level=0.1),
        app_run("FedAdam", level=0.2),
        app_run("FedYogi", level=None),
        *side_by_side(),
    ]
    for run in runs[3:]:
        run.header["experiment"] = "own"
    write(tmp_path, runs)
    assert main(["report", str(tmp_path)]) == 0
    out = words(capsys.readouterr().out)
    assert "random + FedAdam" in out
    assert "Left out, as no round has a value of accuracy: random + FedYogi seed 1." in out
    assert "Not compared with each other" in out
    assert main(["report", str(tmp_path), "--full"]) == 0
    assert "Not compared with each other" in words(capsys.readouterr().out)
    plot = tmp_path / "p.png"
    assert main(["report", str(tmp_path), "--plot", str(plot)]) == 0
    assert len(list(tmp_path.glob("p-*.png"))) == 3
