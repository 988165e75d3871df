"""Runs that differ in their optimiser stand side by side, and are never averaged together."""

from __future__ import annotations

import dataclasses
import json

import pytest
from fake_runs import fake_run
from studies.tables import display_name

import fedcor
from fedcor.cli import main
from fedcor.core.errors import RecordError
from fedcor.optimisers import OPTIMISERS
from fedcor.reporting.plots import PALETTE, line_style, plot_experiment
from fedcor.reporting.results import Result
from fedcor.reporting.screen import screen_text
from fedcor.reporting.series import find_name, series_names, short_names
from fedcor.reporting.summary import summarise
from fedcor.reporting.tables import to_csv, to_json
from fedcor.selectors import selector_names


def level(experiment, name):
    return experiment.selector(name).estimates["mean_accuracy"].mean


def pairs(seeds=(1, 2)):
    """Random selection with three optimisers, and aligned with its own."""
    return [
        fake_run([accuracy] * 3, selector, seed, optimiser=optimiser)
        for seed in seeds
        for selector, optimiser, accuracy in (
            ("random", "fedavg", 0.1),
            ("random", "fedvarp", 0.2),
            ("random", "my_module:Mine", 0.3),
            ("aligned", "fedrecall", 0.4),
        )
    ]


NAMES = ["random", "random + FedVARP", "random + Mine", "aligned + FedRecall"]


def test_runs_of_one_selector_with_other_optimisers_are_not_averaged_together():
    (experiment,) = summarise(pairs()).experiments
    assert [s.name for s in experiment.selectors] == NAMES
    assert [level(experiment, name) for name in NAMES] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert all(len(s.runs) == 2 for s in experiment.selectors)
    assert experiment.baseline == "random"


def test_they_are_not_even_if_their_seeds_differ():
    runs = [fake_run([0.1], seed=1, optimiser="fedavg"), fake_run([0.9], seed=2, optimiser="mifa")]
    (experiment,) = summarise(runs).experiments
    assert level(experiment, "random") == pytest.approx(0.1)
    assert level(experiment, "random + MIFA") == pytest.approx(0.9)


@pytest.mark.parametrize("optimiser", [None, "fedavg", "fedrecall"])
def test_where_all_have_one_optimiser_the_selector_says_it_all(optimiser):
    runs = [fake_run([0.1], name, optimiser=optimiser) for name in ("random", "aligned")]
    assert series_names(runs) == ["random", "aligned"]


def test_another_experiment_changes_no_name():
    runs = [
        fake_run([0.1], "random", optimiser="fedavg", experiment="one"),
        fake_run([0.1], "aligned", optimiser="fedrecall", experiment="other"),
    ]
    assert series_names(runs) == ["random", "aligned"]


def test_a_run_that_was_given_a_name_keeps_it():
    runs = pairs()
    for run in runs:
        run.header["config"]["selector"] = run.header["selector"]
    named = dataclasses.replace(runs[3], header={**runs[3].header, "selector": "our pair"})
    assert series_names([*runs[:3], named])[3] == "our pair"
    # Then its name may also stand for other options of the same optimiser.
    runs[2].header["config"]["optimiser"] = {"name": "fedrecall", "gain": 1.0}
    (experiment,) = summarise([*runs[:3], named]).experiments
    assert level(experiment, "our pair") == pytest.approx(0.4)


@pytest.mark.parametrize("name", OPTIMISERS.built_in)
def test_every_optimiser_has_its_class_for_a_name(name):
    runs = [fake_run([0.1], "random", 1, optimiser="x:Other"), fake_run([0.1], optimiser=name)]
    cls = OPTIMISERS.built_in[name].__name__
    assert series_names(runs)[1] == ("random" if name == "fedavg" else f"random + {cls}")


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            ("random", {"name": "fedvarp", "learning_rate": 1.0}),
            ("random", {"name": "fedvarp", "learning_rate": 0.5}),
            "optimiser.learning_rate is 1.0 in one and 0.5 in another",
        ),
        (
            ("random", {"name": "fedavg", "weighted": True}),
            ("fedcor", {"name": "fedavg"}),
            "optimiser.weighted is True in one and not set in another",
        ),
        (("random", "fedvarp"), ("fedcor", None), "optimiser.name is 'fedvarp' in one and not set"),
    ],
)
def test_an_optimiser_with_other_settings_is_refused(one, other, message):
    runs = [
        fake_run([0.1], selector, seed, optimiser=optimiser)
        for seed, (selector, optimiser) in enumerate((one, other))
    ]
    with pytest.raises(RecordError, match=message):
        summarise(runs)
    with pytest.raises(RecordError, match="report their folders one at a time"):
        summarise(runs[::-1])


def test_one_name_for_two_optimisers_is_refused():
    runs = pairs()[:2]
    for seed, run in enumerate(runs):
        run.header["config"]["selector"] = "random"
        run.header.update(selector="mine", seed=seed)
    with pytest.raises(RecordError, match="toy with mine have different settings .optimiser.name"):
        summarise(runs)


def test_two_runs_of_one_pair_and_seed_are_refused():
    with pytest.raises(RecordError, match=r"two runs of toy, random \+ FedVARP, seed 1"):
        summarise([*pairs([1]), pairs([1])[1]])


def test_the_baseline_is_random_with_whatever_optimiser():
    (experiment,) = summarise(pairs([1])[:0:-1]).experiments
    assert experiment.baseline == "random + Mine"
    assert summarise(pairs(), "aligned").experiments[0].baseline == "aligned + FedRecall"
    with pytest.raises(RecordError, match="no run of the baseline"):
        summarise(pairs()[1:3], "random")  # with which of two optimisers?


def test_a_warmup_is_found_under_the_selectors_own_name():
    run = fake_run([0.1, 0.2], "fedcor", optimiser="mifa", options={"warmup": 5})
    (experiment,) = summarise([run, fake_run([0.1, 0.2], optimiser="fedavg")]).experiments
    text = screen_text(summarise([run, fake_run([0.1, 0.2], optimiser="fedavg")]))
    assert "fedcor + MIFA" in [s.name for s in experiment.selectors]
    assert "fedcor + MIFA chose uniformly in all rounds" in " ".join(text.split())


def test_everything_that_is_shown_has_these_names():
    summary = summarise(pairs())
    text, result = screen_text(summary), Result(pairs())
    for name in NAMES:
        assert name in text
        assert f"toy,{name},mean_accuracy" in to_csv(summary)
    shown = json.loads(to_json(summary))["experiments"][0]["selectors"]
    assert [selector["name"] for selector in shown] == NAMES
    assert list(result.selectors) == NAMES
    assert result.best == "aligned + FedRecall"
    assert "aligned + FedRecall is ahead of random" in result.verdict
    assert set(result.summary().index) == set(NAMES)
    means = result.to_frame().groupby("selector")["accuracy"].mean()
    assert means[NAMES].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    found = result.difference("aligned", "random")
    assert found.loc["mean_accuracy", "mean"] == pytest.approx(0.3)
    assert max(map(len, text.splitlines())) <= 80
    legend = plot_experiment(summary.experiments[0]).legends[0]
    assert {entry.get_text() for entry in legend.get_texts()} == set(NAMES)


def test_names_are_found_and_shortened_with_an_optimiser():
    names = ["random", "random + FedVARP", "aligned + FedRecall", "my_module:Mine + MIFA"]
    assert find_name("random", names) == "random"
    assert find_name("aligned", names) == "aligned + FedRecall"
    assert find_name("Mine", names) == find_name("Mine + MIFA", names) == names[3]
    assert find_name("random", names[1:2] * 1 + ["random + MIFA"]) is None
    assert find_name("FedVARP", names) is None
    assert list(short_names(names).values()) == [*names[:3], "Mine + MIFA"]


def test_every_selector_has_a_look_of_its_own():
    named = [name for name in selector_names() if name != "proxy"] + ["aligned + FedRecall"]
    looks = {name: tuple(map(str, line_style(name, 0).values())) for name in named}
    assert len(set(looks.values())) == len(looks)
    # What has no look of its own takes a colour that none of these has.
    colours = {look[0] for look in looks.values()}
    for place in range(3):
        assert line_style("mine", place)["color"] in set(PALETTE) - colours
    assert display_name("round_robin") == "round-robin"
    assert display_name("aligned") == "aligned"


def test_a_comparison_with_the_default_pair_says_who_aggregated(tmp_path, capsys):
    result = fedcor.compare("digits", ["random", "aligned"], seeds=[1, 2], rounds=2, out=tmp_path)
    assert result.selectors == ("random", "aligned + FedRecall")
    assert main(["report", str(tmp_path), "--baseline", "aligned"]) == 0
    assert "aligned + FedRecall" in capsys.readouterr().out
    weighted = fedcor.experiment("digits", optimiser={"name": "fedavg"})
    alike = fedcor.compare(weighted, ["random", "aligned"], seeds=[1, 2], rounds=2)
    assert alike.selectors == ("random", "aligned")
