"""`python -m studies memory`: waits, goals, the page, and all of it in miniature."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from fake_runs import fake_run
from hypothesis import given
from hypothesis import strategies as st
from studies.__main__ import main
from studies.memory import accuracy_table, cost_table, draw, goal_lines
from studies.memory_anatomy import estimates
from studies.memory_comparison import (
    RIVALS,
    Comparison,
    RunValues,
    average_difference,
    compare,
    longest_wait,
    measure,
)
from studies.memory_goals import Goal, goals, is_below, share_of_gain
from studies.memory_scenarios import (
    CIFAR10,
    DIGITS,
    EVERYONE,
    FMNIST,
    OURS,
    PAIRS,
    TABLES,
    pairs_of,
    scenarios_of,
)
from studies.plan import Plan
from studies.runs import build_experiment, run_all

from fedcor.core.errors import RecordError
from fedcor.reporting.metrics import mean_estimate
from fedcor.runs.record import RunRecord, read_run
from fedcor.simulation.build import build_simulation
from studies import GROUPS, memory_scenarios
from studies import runs as study_runs

ours, everyone = OURS.label, EVERYONE.label
# Every goal is met: random .5, rivals up to .58, ours .6, everyone .6.
MET = {
    "random": 0.5,
    "power-of-choice": 0.52,
    "FedCor": 0.54,
    "complement": 0.58,
    "random + FedVARP": 0.5,
    "round-robin + FedVARP": 0.56,
    ours: 0.6,
    everyone: 0.6,
}


def value(accuracy: float, **changes) -> RunValues:
    plain = RunValues(
        mean_accuracy=accuracy,
        last_tenth=accuracy,
        spread=0.02,
        bytes_down=1000.0,
        bytes_up=500.0,
        most_chosen=9,
        least_chosen=1,
        longest_wait=60,
        memory_bytes=0,
    )
    return dataclasses.replace(plain, **changes)


def comparison(
    accuracies: Mapping[str, float] | None = None,
    ours_differ: Mapping[str, object] | None = None,
    noise: Mapping[str, tuple[float, float, float]] | None = None,
    **settings,
) -> Comparison:
    """Three seeds; `noise` is added to a pair's accuracies, seed by seed."""
    runs = {
        label: {
            seed: value(
                mean + (noise or {}).get(label, (0.0, 0.0, 0.0))[place],
                **((ours_differ or {}) if label == ours else {}),
            )
            for place, seed in enumerate((31, 32, 33))
        }
        for label, mean in (MET if accuracies is None else accuracies).items()
    }
    return Comparison(
        **{
            "name": "2spc",
            "title": "two shards",
            "rounds": 100,
            "clients": 100,
            "clients_per_round": 5,
            "reliable": True,
            "runs": runs,
            **settings,
        }
    )


def verdicts(*comparisons: Comparison) -> dict[str, bool | None]:
    return {goal.title: goal.met for goal in goals(comparisons)}


BELOW_RANDOM = "(1) never below random"
LIKE_EVERYONE = "(2) like everyone training, two shards"
SHARE = "(3) at least 90 % of the best rival's gain in each scenario"
AHEAD = "(3) ahead of every rival on average"
BYTES = "the bytes of random"


def test_all_goals_are_met():
    found = verdicts(comparison())
    assert found == dict.fromkeys((BELOW_RANDOM, LIKE_EVERYONE, SHARE, AHEAD, BYTES), True)


@pytest.mark.parametrize(
    ("mean", "noise", "below"),
    [
        (-0.004, (0.0, 0.01, -0.01), False),  # the interval contains zero
        (-0.004, (0.0, 0.001, -0.001), True),  # it does not
        (-0.006, (0.0, 0.1, -0.1), True),  # too low, whatever the interval
        (0.0, (0.0, 0.0, 0.0), False),
        (0.01, (0.0, 0.001, -0.001), False),
    ],
)
@pytest.mark.parametrize("key", ["mean_accuracy", "last_tenth"])
def test_never_below_random(mean, noise, below, key):
    assert is_below(mean_estimate([mean + n for n in noise])) == below
    where = comparison(name="iid", title="iid")
    runs = {
        seed: dataclasses.replace(run, **{key: 0.5 + mean + n})
        for (seed, run), n in zip(where.runs[ours].items(), noise, strict=True)
    }
    where = dataclasses.replace(where, runs={**where.runs, ours: runs})
    found, *_ = goals([comparison(), where])
    assert found.met == (not below)
    named = {"mean_accuracy": "iid (mean accuracy)", "last_tenth": "iid (last tenth)"}[key]
    assert found.figures.endswith(f"Below random: {named if below else 'nowhere'}")


def test_one_seed_has_no_interval_and_its_mean_decides():
    assert not is_below(mean_estimate([-0.0049]))
    assert is_below(mean_estimate([-0.0051]))
    assert is_below(mean_estimate([None]))  # nothing was measured


@pytest.mark.parametrize(
    ("changes", "accuracies", "failed"),
    [
        ({"spread": 0.0301}, {}, "spread 1.50 of everyone's, at most 1.5 (not met)"),
        ({"longest_wait": 81}, {}, "longest wait 4.05 N/C, at most 4 (not met)"),
        ({}, {everyone: 0.6051}, "Minus everyone -.005 [-.005, -.005], at least 0 (not met)"),
        (
            {},
            {everyone: 0.601},
            "Minus everyone -.001 [-.001, -.001], at least 0 (not met)",
        ),  # significant
        ({}, {"complement": 0.601}, "minus complement -.001 [-.001, -.001], not below (not met)"),
    ],
)
def test_like_everyone_needs_all_of_its_parts(changes, accuracies, failed):
    found = {g.title: g for g in goals([comparison({**MET, **accuracies}, changes)])}
    assert found[LIKE_EVERYONE].met is False
    assert failed in found[LIKE_EVERYONE].figures
    assert found[LIKE_EVERYONE].figures.count("(not met)") == 1


def test_like_everyone_on_its_edges():
    edge = comparison(ours_differ={"spread": 0.03 - 1e-12, "longest_wait": 80})
    assert verdicts(edge)[LIKE_EVERYONE] is True


def test_like_everyone_where_everyone_was_not_run():
    without = {label: mean for label, mean in MET.items() if label != everyone}
    assert verdicts(comparison(without))["(2) like everyone training"] is None
    only = {label: MET[label] for label in ("random", "complement", ours)}
    assert verdicts(comparison(only))[SHARE] is True


@pytest.mark.parametrize(("of_ours", "enough"), [(0.5719, False), (0.5721, True)])
def test_the_share_of_the_best_rivals_gain(of_ours, enough):
    """Complement gains .08, of which 90 % is .072."""
    share = share_of_gain(comparison({**MET, ours: of_ours}))
    assert (share.rival, share.enough) == ("complement", enough)
    assert share.share == pytest.approx((of_ours - 0.5) / 0.08)
    assert share.text == "90 % of complement's"
    assert verdicts(comparison({**MET, ours: of_ours}))[SHARE] == enough


@pytest.mark.parametrize(("of_ours", "enough"), [(0.4961, True), (0.4959, True), (0.4949, False)])
def test_where_there_is_no_gain_to_share(of_ours, enough):
    """The best rival gains nothing: ours may be up to .005 below it."""
    nothing = dict.fromkeys(MET, 0.49) | {"random": 0.5, "FedCor": 0.5, ours: of_ours}
    share = share_of_gain(comparison(nothing))
    assert (share.rival, share.share, share.enough) == ("FedCor", None, enough)
    assert share.text.startswith("no gain to share, -.00")
    figures = next(g for g in goals([comparison(nothing)]) if g.title == SHARE).figures
    assert figures.endswith("No gain to share in 1 of 1, compared by difference")


def test_a_gain_is_to_share_from_half_a_percent_on():
    small = dict.fromkeys(MET, 0.5) | {"FedCor": 0.5049}
    assert share_of_gain(comparison(small)).share is None
    assert share_of_gain(comparison({**small, "FedCor": 0.5051})).share == 0


def test_ahead_on_average_weighs_every_scenario_alike():
    lost = comparison({**MET, "FedCor": 0.64}, name="other")  # .04 above ours, .06 below before
    assert verdicts(comparison(), lost)[AHEAD] is True
    lost = comparison({**MET, "FedCor": 0.67}, name="other")
    assert verdicts(comparison(), lost)[AHEAD] is False
    assert average_difference([comparison(), lost], ours, "FedCor").mean == pytest.approx(-0.005)


def test_averages_are_paired_by_seed():
    one = comparison(noise={ours: (0.03, 0.0, -0.03)})
    other = comparison(noise={ours: (-0.01, 0.0, 0.01)}, name="other")
    found = average_difference([one, other], ours, "random")
    assert found.mean == pytest.approx(0.1)
    assert found.std == pytest.approx(0.01)  # of .11, .10, .09


def test_no_more_bytes_than_random():
    more = {"bytes_down": 1010.0}
    assert verdicts(comparison(ours_differ=more))[BYTES] is False
    # Where clients fail, chance decides who comes back.
    assert verdicts(comparison(), comparison(ours_differ=more, reliable=False))[BYTES] is True
    assert verdicts(comparison(reliable=False))[BYTES] is None


def slow_longest_wait(chosen: list[list[int]], clients: int) -> int:
    longest = 0
    for client in range(clients):
        waited = 1
        for group in chosen:
            if client in group:
                longest, waited = max(longest, waited), 1
            else:
                waited += 1
        longest = max(longest, waited)
    return longest


@given(st.data())
def test_the_longest_wait_equals_its_slow_twin(data):
    clients = data.draw(st.integers(1, 6))
    group = st.lists(st.integers(0, clients - 1), max_size=clients)
    chosen = data.draw(st.lists(group, max_size=12))
    assert longest_wait(chosen, clients) == slow_longest_wait(chosen, clients)


@pytest.mark.parametrize(
    ("chosen", "wait"),
    [
        ([[0], [1], [0], [1]], 2),
        ([[0], [1], [1], [1]], 4),  # client 0 comes in round 4 at the earliest
        ([[0], [0], [0], [1]], 4),  # client 1 comes in the fourth round
        ([[0], [0], [0], [0]], 5),  # never
    ],
)
def test_a_wait_is_counted_from_choice_to_choice(chosen, wait):
    assert longest_wait(chosen, 2) == wait


def run_of(accuracy: list[float], **header) -> RunRecord:
    run = fake_run(accuracy, down=100, up=50)
    config = {
        **run.header["config"],
        "partition": {"clients": 4},
        "training": {"rounds": len(accuracy), "clients_per_round": 2},
        "faults": {"availability": 1.0, "dropout": 0.0, "stragglers": 0.0, **header},
    }
    rounds = [{**row, "memory_bytes": 10 * row["round"]} for row in run.rounds]
    return RunRecord(Path("there"), {**run.header, "config": config}, rounds)


def test_the_values_of_a_run():
    """In each round client 3 is chosen, and one of the others in turn."""
    accuracy = [t / 100 for t in range(60)]
    found = measure(run_of(accuracy))
    assert found.mean_accuracy == pytest.approx(0.295)
    assert found.last_tenth == pytest.approx(np.mean(accuracy[54:]))
    assert found.spread == pytest.approx(np.std(accuracy[10:], ddof=1))
    assert (found.bytes_down, found.bytes_up, found.all_bytes) == (6000, 3000, 9000)
    assert (found.most_chosen, found.least_chosen, found.longest_wait) == (60, 20, 3)
    assert found.memory_bytes == 590


def test_the_last_tenth_of_few_rounds_is_the_last_round():
    assert measure(run_of([0.1, 0.2, 0.7])).last_tenth == 0.7


def test_a_run_that_was_not_measured_is_refused():
    with pytest.raises(RecordError, match="no accuracy"):
        measure(run_of([0.1, None, 0.7]))


@pytest.mark.parametrize(
    ("faults", "reliable"), [({}, True), ({"availability": 0.5}, False), ({"dropout": 0.3}, False)]
)
def test_where_clients_fail_no_wait_is_promised(faults, reliable):
    found = compare(DIGITS[0], {"random": [run_of([0.1, 0.2, 0.7], **faults)]})
    assert found.reliable == reliable
    assert found.turn == 2
    assert found.numbers()["waits_are_bounded"] == reliable


def rows_of(page: str) -> list[list[str]]:
    return [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]


def test_the_form_of_the_table():
    without = {label: mean for label, mean in MET.items() if label != everyone}
    other = comparison({**without, ours: 0.57}, name="iid", title="iid")
    page = accuracy_table("a title", [comparison(), other])
    assert page.startswith("### a title\n\n")
    head, line, first, second, mean = rows_of(page)
    assert head == ["", *MET, "share of the best rival's gain"]
    assert {len(row) for row in (line, first, second, mean)} == {len(head)}
    column = {label: place for place, label in enumerate(head)}
    assert first[0] == "two shards"
    assert first[column["random"]] == ".500 (.500)"
    assert first[column["FedCor"]] == "+.040 (+.040)"
    assert first[column[ours]] == "**+.100 [+.100, +.100] (+.100)**"  # not everyone, as high
    assert first[-1] == "125 % of complement's"
    assert second[column["complement"]] == "**+.080 (+.080)**"
    assert second[column[everyone]] == mean[column[everyone]] == "–"
    assert mean[0] == "mean of all"
    assert mean[column[ours]].startswith("**+.085 [")
    assert page.count("**") == 2 * 3  # one bold cell a row
    assert "95 % interval" in page


def test_the_table_of_one_seed_says_that_it_has_no_intervals():
    whole = comparison()
    first = whole.seeds[0]
    runs = {label: {first: of_pair[first]} for label, of_pair in whole.runs.items()}
    one = dataclasses.replace(whole, runs=runs)
    page = accuracy_table("a title", [one])
    assert "**+.100 (+.100)**" in page
    assert "One seed gives no interval." in page
    assert "95 %" not in page


def test_random_is_bold_where_it_is_best():
    page = accuracy_table("a title", [comparison(dict.fromkeys(MET, 0.4) | {"random": 0.5})])
    assert "**.500 (.500)**" in page


def test_the_lines_of_the_goals():
    reached = [Goal("one", True, "1"), Goal("two", False, "2"), Goal("three", None, "3")]
    assert goal_lines(reached).startswith("### Goals\n\n")
    said = "\n- one: **met**. 1.\n- two: **not met**. 2.\n- three: **not measured**. 3.\n\n"
    assert said in goal_lines(reached)
    assert goal_lines(reached).endswith("its mean is below -.005.\n\n")


def test_the_costs():
    more = {"bytes_down": 2000.0, "memory_bytes": 1_230_000}
    away = comparison(ours_differ={"longest_wait": 99}, name="away", reliable=False)
    head, _, *rows = rows_of(cost_table([comparison(ours_differ=more), away]))
    found = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(found) == list(MET)
    assert list(found[ours].values())[1:] == ["1.50", "1.00", "1.33", "1.67", "1.23 MB", "3.0"]
    assert list(found["random"].values())[1:] == ["1.00"] * 4 + ["–", "3.0"]


def test_the_figure_shows_each_pair_once():
    numbers = dataclasses.asdict(mean_estimate([0.1, 0.2]))
    none = dataclasses.asdict(mean_estimate([None]))
    figure = draw({"a": {ours: numbers, "FedCor": numbers}, "b": {ours: none}}, "a caption")
    (axes,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedCor", ours]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    (of_ours,) = (line for line in axes.lines if line.get_label() == ours)
    assert list(of_ours.get_xdata()) == pytest.approx([0.15])  # b has no mean


def test_what_is_run_on_which_data():
    plan = Plan(Path("nowhere"), None)
    assert scenarios_of(plan) == [*FMNIST, *DIGITS, *TABLES]
    assert pairs_of(plan, FMNIST[0]) == [*PAIRS, EVERYONE]
    assert pairs_of(plan, FMNIST[3]) == PAIRS
    assert plan.seeds == (1, 2, 3, 4, 5)
    slow = dataclasses.replace(plan, dataset="cifar10")
    assert scenarios_of(slow) == CIFAR10
    some = dataclasses.replace(slow, settings=("dir", "2spc"))
    assert [scenario.name for scenario in scenarios_of(some)] == ["cifar10-2spc", "cifar10-dir"]
    assert scenarios_of(dataclasses.replace(some, dataset="fmnist")) == scenarios_of(plan)
    assert [pair.label for pair in pairs_of(slow, CIFAR10[0])] == ["random", "complement", ours]
    assert "memory" in GROUPS["beyond"]
    assert "memory" in GROUPS["all"]
    assert "memory" not in GROUPS["paper"]
    assert len(RIVALS) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two scenarios in miniature, one of them with everyone training."""
    out = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        assert miniature(patch, out) == 0
    return out


def miniature(patch: pytest.MonkeyPatch, out: Path, rounds: int = 5) -> int:
    patch.setattr(memory_scenarios, "DIGITS", [dataclasses.replace(DIGITS[1], name="2spc")])
    patch.setattr(memory_scenarios, "TABLES", TABLES[1:2])
    return main(["memory", "--quick", "--rounds", str(rounds), "--out", str(out)])


def test_from_command_to_files(folder):
    saved = json.loads((folder / "memory-digits.json").read_text())
    assert saved["plan"]["settings"] == list(saved["scenarios"]) == ["2spc", "table-10"]
    assert saved["plan"]["seeds"] == [1, 2]
    pairs = saved["scenarios"]["2spc"]["pairs"]
    assert list(pairs) == list(MET)
    assert everyone not in saved["scenarios"]["table-10"]["pairs"]
    gained = []
    for seed in (1, 2):
        accuracies = {}
        for label, name in ((ours, "aligned+fedrecall"), ("random", "random")):
            run = read_run(folder / "runs" / "memory-2spc" / name / f"seed-{seed}")
            values = [row["test_accuracy"] for row in run.rounds]
            accuracies[label] = np.mean(values)
            of_seed = pairs[label]["seeds"][str(seed)]
            assert of_seed["mean_accuracy"] == pytest.approx(accuracies[label])
            assert of_seed["last_tenth"] == pytest.approx(values[-1])
            assert of_seed["turns_waited"] == pytest.approx(of_seed["longest_wait"] / 10)
            assert of_seed["memory_bytes"] == run.rounds[-1].get("memory_bytes", 0)
        gained.append(accuracies[ours] - accuracies["random"])
    paired = pairs[ours]["paired_to_random"]["mean_accuracy"]
    assert paired == pytest.approx(dataclasses.asdict(mean_estimate(gained)))
    assert pairs[ours]["bytes_to_random"]["all_bytes"] == pytest.approx(1)
    assert pairs[everyone]["bytes_to_random"]["bytes_up"] == pytest.approx(10)
    average = saved["average_paired_to_random"]
    assert everyone not in average
    both = [
        s["pairs"][ours]["paired_to_random"]["last_tenth"]["mean"]
        for s in saved["scenarios"].values()
    ]
    assert average[ours]["last_tenth"]["mean"] == pytest.approx(np.mean(both))


def test_the_page_and_the_figure_are_written(folder):
    page = (folder / "memory-digits.md").read_text()
    assert re.findall("^### (.*)", page, re.MULTILINE) == [
        "digits, seeds 1, 2: mean accuracy over rounds (over the last tenth)",
        "Goals",
        "Bytes relative to random's, mean of all scenarios",
    ]
    assert page.count("| digits, two shards |") == page.count("| 10 classes |") == 1
    assert "- (2) like everyone training, digits, two shards: **" in page
    png = (folder / "memory-digits.png").read_bytes()
    assert 1000 <= int.from_bytes(png[16:20], "big") <= 1100
    assert (folder / "memory-digits.svg").stat().st_size > 10_000


def test_again_gives_the_same_and_an_unfinished_run_is_an_error(folder, monkeypatch, capsys):
    written = [folder / f"memory-digits.{suffix}" for suffix in ("json", "md", "png")]
    before = [path.read_bytes() for path in written]
    assert miniature(monkeypatch, folder) == 0
    assert [path.read_bytes() for path in written] == before
    monkeypatch.setattr(study_runs, "run_shown", lambda plan, jobs: None)  # runs nothing
    assert miniature(monkeypatch, folder, rounds=6) == 2
    assert "seed-1: 5 of 6 rounds are there" in capsys.readouterr().err
    assert [path.read_bytes() for path in written] == before


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path):
    assert main(["memory", "--quick", "--out", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "memory-digits.json").read_text())
    assert list(saved["scenarios"]) == [s.name for s in (*DIGITS, *TABLES)]
    assert {s["rounds"] for s in saved["scenarios"].values()} == {30}


def test_the_anatomy_holds_estimates_against_everyone():
    plan = Plan(Path("unused"), None, dataset="digits")
    simulation = build_simulation(build_experiment(plan, DIGITS[1], OURS), seed=1)
    *_, (_, state) = simulation.run(12)
    assert (state.optimiser["seen"] >= 0).all()
    found = {}
    for group, step, (error, cosine, length) in estimates(simulation, state):
        # |d - D|^2 = |d|^2 + |D|^2 - 2 d'D
        assert error == pytest.approx(1 + length**2 - 2 * length * cosine)
        found.setdefault((group, step), []).append(error)
    means = {key: np.mean(errors) for key, errors in found.items()}
    assert means["random", "gain .3"] < means["random", "FedVARP's"]
    assert means["random", "FedVARP's"] < means["random", "mean of the group"]


def test_everyone_training_has_fewer_seeds_and_is_compared_on_those(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(study_runs, "run_shown", lambda plan, jobs: started.extend(jobs))
    monkeypatch.setattr(study_runs, "_read_finished", lambda job: job.seed)
    pairs = [(DIGITS[0], pair) for pair in (EVERYONE, OURS)]
    runs = run_all(Plan(tmp_path, None, seeds=[1, 2, 3, 4, 5]), pairs)
    assert runs == {"digits-1spc": {everyone: [1, 2, 3], ours: [1, 2, 3, 4, 5]}}
    assert len(started) == 8
    whole = comparison(MET, {})
    runs = {label: dict(by_seed) for label, by_seed in whole.runs.items()}
    first = sorted(runs[EVERYONE.label])[0]
    runs[EVERYONE.label] = {first: runs[EVERYONE.label][first]}
    fewer = dataclasses.replace(whole, runs=runs)
    found = fewer.difference(OURS.label, EVERYONE.label)
    one, other = runs[OURS.label][first], runs[EVERYONE.label][first]
    assert found.n == 1
    assert found.mean == pytest.approx(one.mean_accuracy - other.mean_accuracy)
    assert goals([fewer])
    assert accuracy_table("", [fewer])
    assert cost_table([fewer])
