"""A report's numbers, held to closed forms and to scipy; and their text, held to the numbers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats
from studies.complement import ratio_estimate
from studies.tables import display_name

from fedcor.core.errors import RecordError
from fedcor.reporting.curves import read_curve
from fedcor.reporting.metrics import METRICS, Estimate
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary, summarise
from fedcor.reporting.tables import difference_text, estimate_text, render, to_csv, to_json
from fedcor.runs.record import RunRecord

METRIC = {metric.key: metric for metric in METRICS}


def run(
    accuracy: Sequence[float | None],
    selector: str = "random",
    seed: int = 1,
    *,
    target: float | None = 0.5,
    planned: int | None = None,
    experiment: str = "toy",
    down: int = 100,
    up: int = 10,
) -> RunRecord:
    config = {
        "training": {"rounds": len(accuracy) if planned is None else planned},
        "target_accuracy": target,
    }
    header = {
        "kind": "header",
        "experiment": experiment,
        "selector": selector,
        "seed": seed,
        "config": config,
    }
    rows = [
        {"round": t, "test_accuracy": a, "bytes_down": down, "bytes_up": up}
        for t, a in enumerate(accuracy)
    ]
    return RunRecord(None, header, rows)


def only(runs: Sequence[RunRecord], baseline: str | None = None) -> ExperimentSummary:
    (experiment,) = summarise(runs, baseline).experiments
    return experiment


def selector_of(experiment: ExperimentSummary, name: str) -> SelectorSummary:
    (found,) = [selector for selector in experiment.selectors if selector.name == name]
    return found


def values_of(one: RunRecord) -> Mapping[str, float | None]:
    return only([one]).selectors[0].runs[0].values


def shown(runs: Sequence[RunRecord], width: int = 120, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    render(summarise(runs), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width or options.get("force_terminal")
    return str(text)


accuracies = st.floats(0, 1, allow_nan=False, width=32)
curves = st.lists(accuracies, min_size=1, max_size=70)
# For each of 2..5 seeds, a pair of equally long curves.
paired_curves = st.lists(
    st.integers(1, 15).flatmap(
        lambda n: st.tuples(*[st.lists(accuracies, min_size=n, max_size=n)] * 2)
    ),
    min_size=2,
    max_size=5,
)


# --- one run --------------------------------------------------------------------------------------


def test_a_run_in_closed_form() -> None:
    values = values_of(run([0.1] * 8 + [0.5] * 2 + [0.6] * 10))
    assert values["rounds_to_target"] == 9  # index 8, so nine rounds were done
    # After 16 rounds the last ten are 2 * 0.1, 2 * 0.5, 6 * 0.6: mean 0.48.
    # After 17 rounds: 1 * 0.1, 2 * 0.5, 7 * 0.6: mean 0.53.
    assert values["smooth_rounds_to_target"] == 17
    assert values["mean_accuracy"] == pytest.approx((0.8 + 1.0 + 6.0) / 20)
    assert (values["final_accuracy"], values["last_accuracy"]) == pytest.approx((0.6, 0.6))
    assert (values["bytes_down"], values["bytes_up"], values["bytes_to_target"]) == (2000, 200, 990)
    assert values["spread"] == pytest.approx(np.std([0.1] * 8 + [0.5] * 2 + [0.6] * 10, ddof=1))


def test_a_target_met_exactly_by_ten_rounds_counts_although_their_mean_is_rounded() -> None:
    assert values_of(run([0.69] * 10, target=0.69))["smooth_rounds_to_target"] == 10
    assert values_of(run([0.6] * 10, target=0.6))["smooth_rounds_to_target"] == 10


def test_the_smoothed_target_needs_ten_rounds() -> None:
    assert values_of(run([0.9] * 9))["smooth_rounds_to_target"] is None
    assert values_of(run([0.9] * 10))["smooth_rounds_to_target"] == 10


def test_spread_and_final_accuracy_look_at_the_tail_only() -> None:
    values = values_of(run([0.0] * 100 + [0.4, 0.6] * 25))
    assert values["spread"] == pytest.approx(0.1 * (50 / 49) ** 0.5)
    assert values["final_accuracy"] == pytest.approx(0.5)


@pytest.mark.parametrize("missing", [float("nan"), None, float("inf")])
def test_a_round_without_an_accuracy_is_left_out(missing: float | None) -> None:
    values = values_of(run([0.6, missing, 0.4, missing]))
    assert values["mean_accuracy"] == pytest.approx(0.5)
    assert values["last_accuracy"] == 0.4
    assert values["bytes_down"] == 400  # every round is paid for
    values = values_of(run([missing, 0.4, missing, 0.6]))
    assert (values["rounds_to_target"], values["bytes_to_target"]) == (4, 440)
    assert values_of(run([missing, 0.9] * 10))["smooth_rounds_to_target"] == 20
    text = shown([run([0.6, missing, missing])])
    assert "accuracy is known in 1 of 3 rounds; the others are left out." in text


def test_a_pair_is_compared_over_the_rounds_that_both_measured() -> None:
    runs = [run([0.1, 0.2, 0.9], "random"), run([0.2, 0.3, None], "fedcor")]
    difference = selector_of(only(runs), "fedcor").differences["mean_accuracy"]
    assert difference.estimate.mean == pytest.approx(0.1)


def test_a_run_that_only_began_has_no_values() -> None:
    one = only([run([], planned=5)]).selectors[0]
    assert set(one.runs[0].values.values()) == {None}
    assert (one.runs[0].rounds_done, one.runs[0].finished) == (0, False)


@settings(max_examples=40, deadline=None)
@given(curves, accuracies)
def test_what_holds_for_every_run(accuracy: list[float], target: float) -> None:
    values = values_of(run(accuracy, target=target))
    assert values["mean_accuracy"] is not None
    assert min(accuracy) - 1e-12 <= values["mean_accuracy"] <= max(accuracy) + 1e-12
    first, smooth = values["rounds_to_target"], values["smooth_rounds_to_target"]
    assert (
        (first is None)
        == (values["bytes_to_target"] is None)
        == all(a < target - 1e-7 for a in accuracy)
    )
    if first is not None:
        assert all(a < target for a in accuracy[: int(first) - 1])
        assert values["bytes_to_target"] == 110 * first
    if smooth is not None:
        assert first is not None
        assert max(first, 10) <= smooth <= len(accuracy)


# --- over seeds -----------------------------------------------------------------------------------


def test_the_mean_over_seeds_has_a_t_interval() -> None:
    estimate = (
        only([run([a], seed=s) for s, a in enumerate((0.5, 0.6, 0.7))])
        .selectors[0]
        .estimates["mean_accuracy"]
    )
    assert (estimate.n, estimate.of) == (3, 3)
    assert estimate.mean == pytest.approx(0.6)
    assert estimate.std == pytest.approx(0.1)
    t_97_5 = 4.302652729911275  # with 2 degrees of freedom
    assert estimate.half_width == pytest.approx(t_97_5 * 0.1 / 3**0.5)


def test_one_seed_has_no_interval() -> None:
    estimate = only([run([0.6])]).selectors[0].estimates["mean_accuracy"]
    assert estimate.mean == 0.6
    assert (estimate.std, estimate.low, estimate.high, estimate.half_width) == (None,) * 4


def test_one_seed_that_misses_the_target_makes_the_mean_not_available() -> None:
    one = only(
        [run([0.4, 0.6], seed=1), run([0.6, 0.6], seed=2), run([0.1, 0.1], seed=3)]
    ).selectors[0]
    assert one.reached == (2, 3)
    assert one.estimates["rounds_to_target"].mean is None
    assert one.estimates["bytes_to_target"].mean is None
    assert one.estimates["mean_accuracy"].n == 3
    assert [r.values["rounds_to_target"] for r in one.runs] == [2, 1, None]


# --- in pairs -------------------------------------------------------------------------------------


def both(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], shift: float = 0.0
) -> list[RunRecord]:
    ours = [run([a + shift for a in a_s], "fedcor", seed) for seed, (a_s, _) in enumerate(pairs)]
    theirs = [run([b + shift for b in b_s], "random", seed) for seed, (_, b_s) in enumerate(pairs)]
    return ours + theirs


@settings(max_examples=40, deadline=None)
@given(paired_curves)
def test_identical_runs_differ_by_nothing(pairs: list[tuple[list[float], list[float]]]) -> None:
    twins = both([(a, a) for a, _ in pairs])
    for difference in selector_of(only(twins), "fedcor").differences.values():
        estimate = difference.estimate
        # A target missed, or a spread that one seed alone has.
        if estimate.mean is None or estimate.n == 1:
            assert difference.verdict is None
        else:
            assert (estimate.mean, estimate.low, estimate.high) == (0, 0, 0)
            assert difference.verdict == "equal"


@settings(max_examples=40, deadline=None)
@given(paired_curves, st.floats(-0.5, 0.5))
def test_a_constant_added_to_all_accuracies_leaves_the_differences(
    pairs: list[tuple[list[float], list[float]]], shift: float
) -> None:
    before, after = (selector_of(only(both(pairs, c)), "fedcor").differences for c in (0.0, shift))
    for key in ("mean_accuracy", "final_accuracy", "last_accuracy"):
        a, b = before[key].estimate, after[key].estimate
        assert (a.mean, a.low, a.high) == pytest.approx((b.mean, b.low, b.high), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=2, max_size=6))
def test_the_paired_interval_is_that_of_scipy(counts: list[tuple[int, int]]) -> None:
    ours, theirs = np.array(counts).T / 1000
    if np.ptp(ours - theirs) < 1e-6:  # scipy has no interval where all differences are equal
        return
    estimate = (
        selector_of(only(both([([a], [b]) for a, b in zip(ours, theirs, strict=True)])), "fedcor")
        .differences["mean_accuracy"]
        .estimate
    )
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_verdicts_follow_the_better_direction() -> None:
    slow, fast = [0.1, 0.1, 0.6, 0.6], [0.6, 0.6, 0.6, 0.6]
    runs = [run(slow, "random", s) for s in (1, 2)] + [
        run(fast, "fedcor", s, down=200) for s in (1, 2)
    ]
    differences = selector_of(only(runs), "fedcor").differences
    assert differences["rounds_to_target"].verdict == "better"
    assert differences["mean_accuracy"].verdict == "better"
    assert differences["bytes_down"].verdict == "worse"
    assert differences["bytes_up"].verdict == "equal"
    assert (
        selector_of(only(runs, "fedcor"), "random").differences["mean_accuracy"].verdict == "worse"
    )


def test_a_running_pair_is_compared_over_the_rounds_both_have() -> None:
    runs = [
        run([0.2, 0.4, 0.9, 0.9], "random", 1),
        run([0.3, 0.5], "fedcor", 1, planned=4),  # still running
        run([0.2, 0.4, 0.9, 0.9], "random", 2),
        run([0.5, 0.7, 0.9, 0.9], "fedcor", 2),
    ]
    fedcor = selector_of(only(runs), "fedcor")
    assert [r.finished for r in fedcor.runs] == [False, True]
    accuracy = fedcor.differences["mean_accuracy"]
    assert accuracy.rounds == (2, 4)
    assert accuracy.estimate.mean == pytest.approx((0.1 + 0.15) / 2)
    assert fedcor.differences["bytes_down"].estimate.mean == 0
    # Once reached, a target stays reached: the rest of random's run does count.
    to_target = fedcor.differences["rounds_to_target"]
    assert to_target.rounds is None
    assert to_target.estimate.mean == pytest.approx(((2 - 3) + (1 - 3)) / 2)


def test_a_pair_without_rounds_is_not_compared() -> None:
    runs = [run([0.2, 0.4], "random", s) for s in (1, 2)] + [
        run([0.3, 0.5], "fedcor", 1),
        run([], "fedcor", 2),
    ]
    accuracy = selector_of(only(runs), "fedcor").differences["mean_accuracy"]
    assert (accuracy.estimate.n, accuracy.estimate.of, accuracy.rounds) == (1, 2, (2, 2))
    assert accuracy.verdict is None  # one pair has no interval
    began = [run([0.2], "random"), run([], "fedcor")]
    assert selector_of(only(began), "fedcor").differences["mean_accuracy"].rounds is None


def test_only_common_seeds_are_paired() -> None:
    runs = [run([a], "random", s) for s, a in ((1, 0.1), (2, 0.2))] + [
        run([0.5], "fedcor", s) for s in (2, 3)
    ]
    estimate = selector_of(only(runs), "fedcor").differences["mean_accuracy"].estimate
    assert estimate.mean == pytest.approx(0.3)
    assert (estimate.n, estimate.of, estimate.low) == (1, 1, None)


def test_without_a_common_seed_there_is_no_difference() -> None:
    runs = [run([0.1], "random", 1), run([0.2], "fedcor", 2)]
    difference = selector_of(only(runs), "fedcor").differences["mean_accuracy"]
    assert (difference.estimate.mean, difference.estimate.of, difference.rounds) == (None, 0, None)
    assert "no common seed" in shown(runs)


def test_a_pair_in_which_one_misses_the_target_has_no_difference_in_rounds() -> None:
    runs = [
        run([0.1], "random", 1),
        run([0.6], "random", 2),
        run([0.6], "fedcor", 1),
        run([0.6], "fedcor", 2),
    ]
    estimate = selector_of(only(runs), "fedcor").differences["rounds_to_target"].estimate
    assert (estimate.mean, estimate.n, estimate.of) == (None, 1, 2)


# --- which runs belong together -------------------------------------------------------------------


def test_the_baseline_is_random_or_the_first_or_the_one_named() -> None:
    runs = [run([0.1], "fedcor"), run([0.1], "afl"), run([0.1], "random")]
    assert only(runs).baseline == "random"
    assert only(runs[:2]).baseline == "fedcor"
    assert only(runs, "afl").baseline == "afl"
    assert selector_of(only(runs, "afl"), "afl").differences == {}
    assert [s.name for s in only(runs).selectors] == ["fedcor", "afl", "random"]


def test_experiments_stay_apart_and_seeds_are_sorted() -> None:
    summary = summarise(
        [run([0.1], seed=2), run([0.2], seed=1), run([0.3], experiment="other", target=0.9)]
    )
    assert [e.name for e in summary.experiments] == ["toy", "other"]
    assert [r.seed for r in summary.experiments[0].selectors[0].runs] == [1, 2]
    assert [e.target for e in summary.experiments] == [0.5, 0.9]


def broken(key: str) -> RunRecord:
    good = run([0.1, 0.2])
    return RunRecord(
        None, good.header, [{k: v for k, v in row.items() if k != key} for row in good.rounds]
    )


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no runs.*fedcor compare"),
        ([run([0.1]), run([0.2])], "two runs of toy, random, seed 1.*one at a time"),
        ([broken("test_accuracy")], "seed 1.*'test_accuracy'.*run it again"),
        ([broken("round")], "'round'"),
        ([RunRecord(None, {"experiment": "toy"}, [])], "'config'"),
        ([RunRecord(None, run([]).header, run([0.1, 0.2]).rounds[1:])], "out of order"),
    ],
)
def test_runs_that_cannot_be_summarised_say_why_and_what_to_do(
    runs: list[RunRecord], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        summarise(runs)


def test_an_unknown_baseline_is_answered_with_a_suggestion() -> None:
    with pytest.raises(RecordError, match='no run of the baseline "randm": did you mean "random"'):
        summarise([run([0.1])], "randm")
    with pytest.raises(RecordError, match="there is random"):
        summarise([run([0.1])], "zzz")


def test_a_curve_is_cut_without_touching_the_run() -> None:
    curve = read_curve(run([0.1, 0.2, 0.3]))
    assert curve.first(2).done == 2
    assert (curve.done, curve.down.sum()) == (3, 300)


# --- text -----------------------------------------------------------------------------------------

RUNS = [
    run(np.linspace(0, top + seed / 100, 40).tolist(), name, seed, planned=40, down=down)
    for name, top, down in (
        ("fedcor", 0.8, 3_000_000),
        ("random", 0.7, 2_200_000),
        ("power-of-choice", 0.4, 2_300_000),
    )
    for seed in (1, 2, 3)
]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("terminal", [False, True])
def test_every_headline_of_every_selector_is_on_the_screen(width: int, terminal: bool) -> None:
    text = shown(RUNS, width, force_terminal=terminal, no_color=True)
    assert "…" not in text
    plain = "".join(text.split())
    experiment = only(RUNS)
    for selector in experiment.selectors:
        for metric in METRICS:
            if metric.headline and width >= 80:
                wanted = estimate_text(metric, selector.estimates[metric.key])
                assert all(part in text for part in wanted.split()), wanted
                if selector.differences:
                    assert (
                        difference_text(metric, selector.differences[metric.key].estimate) in text
                    )
            elif not metric.headline:
                assert "".join(metric.title.split()) in plain  # named as standing elsewhere


def test_the_caption_tells_seeds_rounds_target_and_what_is_missing() -> None:
    text = shown([*RUNS[:-1], run([0.1] * 7, "power-of-choice", 3, planned=40)])
    assert "7-40 rounds, seeds 1, 2, 3; to 50 %: in rounds" in text
    assert "N/A (0/3)" in text
    assert "N/A (k/n): only k of n seeds reached the target" in text
    assert "power-of-choice seed 3 (7 of 40 rounds)" in text
    assert "seeds fedcor (1), random (1, 2)" in shown([RUNS[0], RUNS[3], RUNS[4]])


def test_without_a_target_nothing_is_said_of_one() -> None:
    text = shown([run([0.1, 0.2], target=None)])
    assert "rounds to target" not in text
    assert "one seed alone has none" in text
    assert "N/A" not in text
    assert "paired" not in text  # nothing to compare with


def test_plain_text_has_no_colour_and_an_ascii_stream_gets_ascii() -> None:
    assert "\x1b" not in shown(RUNS)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    render(summarise(RUNS), Console(file=stream, width=100))
    stream.flush()
    assert "+/-" in stream.buffer.getvalue().decode("ascii")


def test_a_name_is_never_read_as_markup() -> None:
    text = shown(
        [run([0.1], "[red]x", experiment="[bold]e"), run([0.1], ":smile:", experiment="[bold]e")]
    )
    assert all(name in text for name in ("[red]x", "[bold]e", ":smile:"))


@pytest.mark.parametrize(
    ("down", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.50 kB"),
        (55_000_000, "55.0 MB"),
        (123_456_000_000, "123 GB"),
        (3e15, "3000 TB"),
    ],
)
def test_bytes_are_written_for_people(down: int, text: str) -> None:
    estimate = only([run([0.1], down=down)]).selectors[0].estimates["bytes_down"]
    assert estimate_text(METRIC["bytes_down"], estimate) == text


def test_a_selector_without_a_display_name_is_shown_by_its_own() -> None:
    assert display_name("power_of_choice") == "Pow-d"
    assert display_name("my_module:Mine") == "my_module:Mine"


def test_cells_of_one_seed_have_no_interval() -> None:
    experiment = only([run([0.5], "random", down=10), run([0.625], "fedcor", down=10)])
    fedcor = selector_of(experiment, "fedcor")
    assert estimate_text(METRIC["mean_accuracy"], fedcor.estimates["mean_accuracy"]) == "0.625"
    assert (
        difference_text(METRIC["mean_accuracy"], fedcor.differences["mean_accuracy"].estimate)
        == "+0.125"
    )
    assert (
        difference_text(METRIC["bytes_down"], fedcor.differences["bytes_down"].estimate) == "+0 B"
    )


def test_json_holds_the_summary_without_nan() -> None:
    runs = [*RUNS, run([float("nan")], "afl", 9)]
    text = to_json(summarise(runs))
    assert text == to_json(summarise(runs))
    data = json.loads(text, parse_constant=pytest.fail)
    assert [m["key"] for m in data["metrics"]] == list(METRIC)
    (experiment,) = data["experiments"]
    assert list(experiment) == ["name", "target", "baseline", "selectors", "notes"]
    fedcor = experiment["selectors"][0]
    assert list(fedcor["estimates"]) == list(fedcor["runs"][0]["values"]) == list(METRIC)
    assert fedcor["differences"]["mean_accuracy"]["rounds"] == [40, 40]
    assert fedcor["estimates"]["mean_accuracy"]["mean"] == pytest.approx(0.41)
    assert experiment["selectors"][2]["estimates"]["rounds_to_target"]["mean"] is None


def test_csv_has_one_line_per_metric_and_selector() -> None:
    summary = summarise(RUNS)
    text = to_csv(summary)
    columns = "experiment,selector,metric,mean,std,n,low,high,baseline,"
    columns += "paired_difference,paired_low,paired_high,pairs"
    assert text.splitlines()[0] == columns
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 3 * len(METRICS)
    by_key = {(row["selector"], row["metric"]): row for row in rows}
    fedcor = by_key["fedcor", "mean_accuracy"]
    difference = selector_of(only(RUNS), "fedcor").differences["mean_accuracy"].estimate
    assert float(fedcor["paired_difference"]) == difference.mean
    assert (fedcor["baseline"], fedcor["n"], fedcor["pairs"]) == ("random", "3", "3")
    assert (
        by_key["random", "mean_accuracy"]["paired_difference"]
        == by_key["random", "mean_accuracy"]["pairs"]
        == ""
    )
    assert by_key["power-of-choice", "rounds_to_target"]["mean"] == ""
    assert by_key["power-of-choice", "rounds_to_target"]["pairs"] == "0"


def test_runs_of_one_selector_with_other_hyper_parameters_are_not_one_selector() -> None:
    runs = [run([0.1, 0.2], seed=seed) for seed in (1, 2)]
    for one, sweep in zip(runs, (0.5, 1.0), strict=True):
        one.header["config"]["selectors"] = {"random": {"sweep": sweep}}
    with pytest.raises(
        RecordError,
        match=r"toy with random have different settings \(random.sweep is 0.5 in one and 1.0",
    ):
        summarise(runs)


# --- ratios ---------------------------------------------------------------------------------------

pairs = st.lists(
    st.tuples(
        st.floats(-1, 1).map(lambda x: round(x, 3)), st.floats(0.1, 1).map(lambda x: round(x, 3))
    ),
    min_size=2,
    max_size=8,
)


@given(pairs)
def test_a_ratios_interval_holds_what_a_paired_test_does_not_reject(values):
    """Fieller's interval by its definition: at its ends, parts - R wholes is just significant."""
    d, g = (np.array(column) for column in zip(*values, strict=True))
    ratio = ratio_estimate(d, g)
    critical = stats.t.ppf(0.975, len(d) - 1)

    def t(r):
        rest = d - r * g
        return abs(rest.mean()) / max(rest.std(ddof=1) / len(rest) ** 0.5, 1e-300)

    wholes_differ = abs(g.mean()) / max(g.std(ddof=1) / len(g) ** 0.5, 1e-300) > critical
    assume(abs(abs(g.mean()) / max(g.std(ddof=1) / len(g) ** 0.5, 1e-300) - critical) > 1e-6)
    assert (ratio.mean is not None) == wholes_differ
    if ratio.mean is None or ratio.high - ratio.low < 1e-6:
        return
    assert ratio.low <= ratio.mean <= ratio.high
    for end in (ratio.low, ratio.high):
        assert t(end) == pytest.approx(critical, rel=1e-4)


def test_a_ratio_of_one_pair_has_no_interval_and_of_none_no_value():
    assert ratio_estimate([0.5], [2.0]) == Estimate(0.25, None, None, None, 1, 1)
    assert ratio_estimate([], []) == Estimate(None, None, None, None, 0, 0)
    assert ratio_estimate([1.0], [0.0]).mean is None
