"""The verdict claims no more than its interval allows, and its numbers are the summary's."""

from __future__ import annotations

import re

import pytest
from fake_runs import fake_run, regression_run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from fedcor.core.text import bytes_text
from fedcor.reporting.metrics import difference, metrics_of, numbers
from fedcor.reporting.screen import screen_text, to_html, to_latex
from fedcor.reporting.series import short_names
from fedcor.reporting.summary import ExperimentSummary, ranking, summarise
from fedcor.reporting.tables import results_table, to_csv, to_json
from fedcor.reporting.verdict import experiment_verdict, verdict

SLOW, FAST = [0.1, 0.2, 0.3, 0.6], [0.4, 0.6, 0.7, 0.8]


def says(runs, baseline=None, measure=None) -> str:
    return verdict(summarise(runs, baseline, measure))


def runs_of(*curves_of, **options):
    """`(selector, curve, curve, ...)`: one curve per seed, from 1."""
    return [
        fake_run(curve, name, seed, **options)
        for name, *curves in curves_of
        for seed, curve in enumerate(curves, start=1)
    ]


def shifted(curve, by):
    return [value + by for value in curve]


# --- every case -----------------------------------------------------------------------------------


def test_a_clear_win():
    runs = runs_of(("random", SLOW, shifted(SLOW, 0.01)), ("fedcor", FAST, FAST))
    assert says(runs) == (
        "fedcor reaches 50 % after 2 rounds; random reaches 50 % after 4 rounds. "
        "fedcor is ahead of random on both seeds "
        "(mean accuracy +.320, 95 % interval +.256 to +.384), with the same bytes."
    )


def test_a_difference_that_may_be_noise():
    runs = runs_of(("random", SLOW, FAST, SLOW), ("fedcor", FAST, SLOW, FAST))
    text = says(runs)
    assert text.startswith("fedcor reaches 50 % after 2.7 rounds; random reaches 50 % after 3.3 ")
    assert ". The difference between fedcor and random may be noise (mean accuracy" in text
    assert "may be noise (mean accuracy +.108, 95 % interval -.824 to +1.041; ahead on 2 of" in text


def test_one_seed_has_no_interval():
    text = says([fake_run(SLOW), fake_run(FAST, "fedcor", down=200)])
    assert text == (
        "fedcor reaches 50 % after 2 rounds; random reaches 50 % after 4 rounds. The difference "
        "between fedcor and random may be noise (mean accuracy +.325; one seed has no interval); "
        "fedcor used 91 % more bytes."
    )


def test_the_baseline_may_be_the_best():
    runs = runs_of(("random", FAST, FAST), ("fedcor", SLOW, shifted(SLOW, 0.01)), target=None)
    assert says(runs).startswith(
        "No selector is ahead of random. random is ahead of fedcor on both seeds (mean accuracy"
    )


@pytest.mark.parametrize(
    ("random", "fedcor", "target", "begins"),
    [
        ([0.1], [0.2], 0.5, "No selector reaches 50 %. fedcor is ahead"),
        ([0.1], [0.6], 0.5, "fedcor reaches 50 % after 1 round; random does not reach 50 %. fed"),
        (
            [0.6, 0.1],
            [0.4, 0.4],
            0.5,
            "fedcor does not reach 50 %; random reaches 50 % after 1 round. f",
        ),
        ([0.1], [0.2], 0.125, "fedcor reaches 12.5 % after 1 round; random does not reach 12.5 %."),
        ([0.1], [0.2], None, "fedcor is ahead of random on both seeds"),
    ],
)
def test_the_target(random, fedcor, target, begins):
    pair = (("random", random, random), ("fedcor", fedcor, shifted(fedcor, 0.001)))
    assert says(runs_of(*pair, target=target)).startswith(begins)


def test_a_target_that_some_seeds_reach():
    some, none = [[0.6], [0.4]], [[0.1], [0.1]]
    partly = runs_of(("random", *none), ("fedcor", *some))
    assert says(partly).startswith("fedcor reaches 50 % on 1 of 2 seeds; random does not reach")
    partly = runs_of(("random", [0.5], [0.1]), ("fedcor", [0.6], [0.4]))
    assert says(partly).startswith("fedcor reaches 50 % on 1 of 2 seeds; random reaches 50 % on 1 ")
    third = runs_of(("random", *none), ("fedcor", [0.2], [0.2]), ("afl", [0.01], [0.5]))
    assert says(third, "random").startswith("afl reaches 50 % on 1 of 2 seeds; random does not")
    neither = runs_of(("random", [0.1, 0.1]), ("fedcor", [0.3, 0.3]), ("afl", [0.5, 0.0]))
    assert says(neither).startswith("fedcor does not reach 50 %; random does not reach 50 %. The")


def test_ties():
    text = says(runs_of(("random", SLOW, FAST), ("fedcor", SLOW, FAST)))
    assert text.startswith("No selector is ahead of random. random reaches 50 % after 3 rounds; ")
    assert "random and fedcor have the same mean accuracy on both seeds" in text
    assert "ahead on" not in text


def test_who_else_may_be_as_good():
    runs = runs_of(
        ("random", SLOW, SLOW), ("fedcor", FAST, shifted(FAST, 0.01)), ("afl", FAST, FAST)
    )
    assert says(runs).endswith(" Not clearly behind fedcor: afl.")


def test_a_clear_winner_is_named_though_another_has_the_larger_mean():
    runs = runs_of(
        ("random", [0.1], [0.1], [0.1]),
        ("fedcor", [0.9], [0.1], [0.3]),
        ("afl", [0.3], [0.31], [0.3]),
    )
    text = says(runs)
    assert "The difference between fedcor and random may be noise" in text
    assert text.endswith(" Clearly ahead of random: afl.")


def test_one_selector_is_not_compared():
    text = says(runs_of(("random", SLOW, SLOW)))
    assert text == (
        "random reaches 50 % after 4 rounds, with a mean accuracy of .300 (2 seeds, 95 % interval "
        ".300 to .300). There is no other selector to compare it with."
    )
    assert says([fake_run([0.3], target=None)]).startswith(
        "random has a mean accuracy of .300 (1 seed). There is no other selector"
    )
    assert says([fake_run([0.3], planned=9)]).startswith("So far, random has not reached 50 % yet,")


def test_runs_that_are_still_running():
    runs = [
        *runs_of(("random", SLOW, SLOW)),
        fake_run(FAST, "fedcor", 1),
        fake_run(FAST[:2], "fedcor", 2, planned=4),
    ]
    text = says(runs)
    assert text.startswith("So far (over the first 2 to 4 rounds, which both have): fedcor reaches")
    assert "Not finished" in screen_text(summarise(runs))
    assert says([fake_run([], planned=3)]) == "No round is finished yet."
    assert "no round is finished yet" in says([*runs[:2], fake_run([], "fedcor", planned=3)])


def test_finished_runs_of_unequal_length():
    runs = runs_of(("random", SLOW[:3], SLOW[:3]), ("fedcor", FAST, FAST), target=None)
    assert says(runs).startswith("Over the first 3 rounds, which both have: fedcor is ahead")


def test_seeds_that_only_one_has():
    runs = [*runs_of(("random", SLOW, SLOW)), fake_run(FAST, "fedcor", 1)]
    runs += [fake_run(shifted(FAST, 0.01), "fedcor", 2), fake_run(FAST, "fedcor", 3)]
    assert "ahead of random on both seeds that both have" in says(runs)
    apart = [fake_run(SLOW), fake_run(FAST, "fedcor", 2)]
    assert says(apart).endswith("there is no comparison: random and fedcor have no seed in common.")


def test_regression_is_judged_by_its_loss():
    runs = [
        regression_run([level, level / 2 + seed / 100], name, seed)
        for name, level in (("random", 4.0), ("fedcor", 2.0))
        for seed in (1, 2)
    ]
    summary = summarise(runs)
    assert summary.experiments[0].measure == "loss"
    assert verdict(summary) == (
        "fedcor is ahead of random on both seeds "
        "(mean loss -1.50, 95 % interval -1.50 to -1.50), with the same bytes."
    )
    for text in (screen_text(summary), to_json(summary), to_csv(summary)):
        assert "loss" in text
        assert "accuracy" not in text


def test_a_diverged_loss_is_not_left_out():
    fine = [regression_run([2.0, 1.0], "random", seed) for seed in (1, 2)]
    runs = [
        *fine,
        regression_run([0.1, None], "fedcor", 1),
        regression_run([0.1, 0.1], "fedcor", 2),
    ]
    experiment = summarise(runs).experiments[0]
    assert ranking(experiment) == ("random", "fedcor")
    assert experiment.selector("fedcor").estimates["mean_loss"].mean is None
    assert "fedcor has none: its model diverged" in experiment_verdict(experiment)
    shown = " ".join(screen_text(summarise(runs)).split())
    assert "The model of fedcor diverged (seeds 1; its loss is not finite from round 1 on)" in shown
    # A user's own Flower app need not evaluate every round.
    app = [
        regression_run([2.0, None, 1.0], name, versions={"flwr": "1"}) for name in ("random", "afl")
    ]
    assert summarise(app).experiments[0].selector("afl").estimates["mean_loss"].mean == 1.5


def own_metric(*levels, seeds=(1, 2), better=None, **options):
    """Runs with a metric `mae`; `better` is what the header says of it, if anything."""
    return [
        fake_run(
            SLOW,
            name,
            seed,
            metrics={"mae": [level, level + len(name) * seed / 1000, None, level]},
            better=better,
            **options,
        )
        for name, level in levels
        for seed in seeds
    ]


TWO = (("random", 0.4), ("fedcor", 0.5))
NOT_SAID = ". No direction of this metric is declared to be better"


def test_a_metric_without_a_direction_names_no_winner():
    runs = own_metric(*TWO)
    text = says(runs, measure="mae")
    assert (
        text == f"The difference in mean mae from random: fedcor +0.100 [+0.100, +0.100]{NOT_SAID}."
    )
    shown = screen_text(summarise(runs, measure="mae"))
    assert "mae is known in 3 of 4 rounds; the others are left out." in shown
    assert says(runs, "fedcor", "mae").startswith(
        "The difference in mean mae from fedcor: random -0.1"
    )
    assert says(runs, measure="loss").startswith("No selector is ahead of random.")
    for levels in (TWO, TWO[::-1], (("fedcor", 0.1), ("random", 0.4))):
        experiment = summarise(own_metric(*levels), measure="mae").experiments[0]
        assert ranking(experiment) == tuple(name for name, _ in levels)  # as they were given
    hint = f'{NOT_SAID}: give metrics={{"mae": (mae, "lower")}} or "higher".'
    assert says(own_metric(*TWO, better={"mae": None}), measure="mae").endswith(hint)


def test_a_metric_without_a_direction_of_other_runs():
    one = says(own_metric(*TWO, seeds=(1,)), measure="mae")
    assert one == (
        f"The difference in mean mae from random: fedcor +0.100 (one seed, no interval){NOT_SAID}."
    )
    five = own_metric(*TWO, ("afl", 0.3), ("full", 0.4), ("proxy", 0.4), planned=9)
    text = says(five, measure="mae")
    assert text.startswith("So far: the difference in mean mae from random: fedcor +0.1")
    assert ", afl -0.1" in text
    assert f"] and 1 more{NOT_SAID}" in text
    apart = own_metric(TWO[0]) + own_metric(TWO[1], seeds=(3,))
    assert "no comparison: fedcor and random have no seed in common" in says(apart, measure="mae")
    uneven = own_metric(TWO[0]) + own_metric(TWO[1], ("afl", 0.3), planned=9)
    assert says(uneven, measure="mae").startswith("So far: the difference in mean mae from random")
    assert says(own_metric(TWO[0]), measure="mae").startswith("random has a mean mae of 0.40")


@pytest.mark.parametrize(
    ("better", "best", "rest"),
    [
        ("lower", "random", "fedcor"),
        ("higher", "fedcor", "random"),
    ],
)
def test_a_metric_with_a_direction_is_ranked_by_it(better, best, rest):
    runs = own_metric(*TWO, better={"mae": better})
    (experiment,) = summarise(runs, measure="mae").experiments
    assert ranking(experiment) == (best, rest)
    text = experiment_verdict(experiment)
    assert f"{best} is ahead of {rest} on both seeds (mean mae" in text
    assert text.startswith("No selector is ahead of random.") == (best == "random")
    found = experiment.selector("fedcor").differences["mean_mae"].verdict
    assert found == ("worse" if better == "lower" else "better")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("higher", "metrics.mae.better"),
        (None, "metrics.mae.function, metrics.mae.better, metrics.mae"),
    ],
)
def test_runs_that_disagree_on_the_direction_are_not_compared(other, said):
    runs = own_metric(TWO[0], better={"mae": "lower"}) + own_metric(TWO[1], better={"mae": other})
    summary = summarise(runs, measure="mae")
    assert [len(experiment.selectors) for experiment in summary.experiments] == [1, 1]
    assert f"as their settings differ ({said})" in summary.notes[0]


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        3,
        {"mae": {"better": "lower"}},
        {"mae": {"function": "f", "better": 1}},
    ],
)
def test_a_header_that_says_no_direction(metrics):
    runs = own_metric(*TWO)
    for run in runs:
        run.header["config"]["metrics"] = metrics
    (experiment,) = summarise(runs, measure="mae").experiments
    assert experiment.headline.better is None


def test_several_experiments_have_a_verdict_each():
    runs = runs_of(("random", SLOW)) + runs_of(("random", FAST), experiment="other")
    first, second = says(runs).splitlines()
    assert first.startswith("toy: random reaches")
    assert second.startswith("other: random reaches")


# --- whatever the runs are ------------------------------------------------------------------------

levels = st.one_of(st.none(), st.integers(0, 8).map(lambda n: n / 8), st.floats(0, 1, width=32))
losses = st.one_of(st.none(), st.floats(0, 1e6, width=32))


@st.composite
def comparisons(draw):
    """Runs of one experiment, as odd as they may be."""
    names = draw(
        st.lists(
            st.one_of(
                st.sampled_from(["random", "fedcor", "a_package.a_module:AVeryLongClassName"]),
                st.text(min_size=1, max_size=40),
            ),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    target = draw(st.one_of(st.none(), st.floats(0, 1)))
    regression, short = draw(st.booleans()), draw(st.booleans())
    planned = draw(st.integers(1, 12))
    runs = []
    for name in names:
        for seed in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True)):
            length = draw(st.integers(0, planned)) if short else planned
            values = draw(st.lists(levels, min_size=length, max_size=length))
            loss = draw(st.lists(losses, min_size=length, max_size=length))
            down = draw(st.sampled_from([0, 1, 100, 101, 10**9]))
            options = {"planned": planned, "target": target, "down": down, "up": 0}
            if regression:
                runs.append(regression_run(loss, name, seed, **options))
            else:
                runs.append(fake_run(values, name, seed, loss=loss, **options))
    return runs


def duel(experiment: ExperimentSummary):
    """The difference that the verdict is about, and which sign means ahead."""
    order = ranking(experiment)
    if len(order) == 1:
        return None, 1
    rival = experiment.baseline if order[0] != experiment.baseline else order[1]
    curves = experiment.curves
    found = difference(experiment.headline, curves[order[0]], curves[rival])
    return found, -1 if experiment.measure == "loss" else 1


@settings(max_examples=150)
@given(comparisons())
def test_the_verdict_claims_what_its_interval_allows_and_nothing_crashes(runs):
    summary = summarise(runs)
    (experiment,) = summary.experiments
    text = experiment_verdict(experiment)
    found, sign = duel(experiment)
    says_ahead = re.search(r" is ahead (of|on) ", text.removeprefix("No selector is ahead of "))
    if found is None or found.estimate.mean is None:
        assert not says_ahead
        assert "interval" not in text or found is None
        return
    estimate = found.estimate
    if estimate.low is None:
        assert "one seed has no interval" in text or "no comparison" in text
        assert not says_ahead
        return
    holds_zero = (
        min(estimate.low, estimate.high) <= 1e-7 and max(estimate.low, estimate.high) >= -1e-7
    )
    if experiment.measure == "loss":
        holds_zero = estimate.low <= 0 <= estimate.high
    assert bool(says_ahead) == (not holds_zero)
    assert ("may be noise" in text or "have the same" in text) == holds_zero
    if says_ahead:
        assert sign * estimate.low > 0
        assert sign * estimate.high > 0
    written = re.search(r"([+-]\S+), 95 % interval (\S+) to ([^\s;)]+)", text)
    if written:
        wanted = numbers(
            experiment.headline, [estimate.mean, estimate.low, estimate.high], signed=True
        )
        assert list(written.groups()) == wanted
        for shown, value in zip(wanted, (estimate.mean, estimate.low, estimate.high), strict=True):
            assert float(shown) == pytest.approx(value, rel=0.01, abs=5e-4 * max(1, abs(value)))
            assert (float(shown) == 0) == (abs(value) < 1e-7)


@given(comparisons())
def test_everything_that_is_shown_fits_and_holds_every_selector(runs):
    summary = summarise(runs)
    (experiment,) = summary.experiments
    for ascii in (False, True):
        text = screen_text(summary, ascii=ascii)
        assert max(map(cell_len, text.split("\n"))) <= 80
    table = results_table(experiment)
    assert {row.selector for row in table.rows} == {s.name for s in experiment.selectors}
    assert len({cells[0] for cells in table.narrow()}) == len(table.rows) + 1
    assert to_html(summary).count("<tr") == len(table.rows) + 1
    assert to_latex(summary).count(r"\\") >= len(table.rows) + 1
    means = {s.name: s.estimates[experiment.headline.key].mean for s in experiment.selectors}
    for row in table.rows:
        cell, mean = row.cells["mean"], means[row.selector]
        assert cell.value == mean
        assert (cell.text == "-") == (mean is None)
        if mean is not None:
            assert float(cell.text) == pytest.approx(mean, rel=0.01, abs=5e-4)


@given(st.lists(st.text(max_size=60), unique=True, max_size=6), st.integers(6, 30))
def test_short_names_fit_and_differ(names, width):
    short = short_names(names, width)
    assert list(short) == names
    assert len(set(short.values())) == len(names)
    assert all(cell_len(name) <= width for name in short.values())


def test_short_names_keep_the_class():
    names = ["fedcor", "my_package.selectors:Longest", "other.selectors.module:Longest"]
    assert list(short_names(names).values()) == ["fedcor", "Longest", "Longest~2"]
    assert list(short_names(["m:OneNameOfAClass", "m:OneNameOfBClass"], 12).values()) == [
        "OneNa..Class",
        "OneN..lass~2",
    ]


@given(st.floats(1, 1e15))
def test_bytes_have_three_digits(count):
    number, unit = bytes_text(count).split()
    size = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) * size == pytest.approx(count, rel=0.006, abs=0.5)
    assert len(bytes_text(count)) <= 8


def test_numbers_show_what_is_not_zero():
    accuracy, loss = metrics_of("accuracy")[2], metrics_of("loss")[0]
    assert numbers(accuracy, [0.08, 0.0002, 0.14], signed=True) == ["+.0800", "+.0002", "+.1400"]
    assert numbers(accuracy, [1.0, -0.0]) == ["1.000", ".000"]
    assert numbers(loss, [-0.056, -0.0749], signed=True) == ["-0.0560", "-0.0749"]
    assert numbers(loss, [1234.5, 0.0]) == ["1234", "0"]
    assert numbers(loss, [1.5e-9]) == ["1.50e-09"]
