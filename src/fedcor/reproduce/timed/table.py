"""Time to accuracy: how long each selector takes to two targets, where clients differ in speed.

Differences are paired over seeds: runs of a seed have the same data, devices and first model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcor.report.seed_means import seed_means
from fedcor.report.style import save_figure
from fedcor.report.summary import ExperimentSummary
from fedcor.report.text import difference_text, display_name, estimate_text, markdown
from fedcor.reproduce.comparison import summarise_variants, summary_numbers
from fedcor.reproduce.plan import Plan
from fedcor.reproduce.timed.figure import draw
from fedcor.reproduce.timed.runs import DEVICES, OVER_SELECTION, VARIANTS, scenarios_of, with_target
from fedcor.reproduce.variants import RANDOM, run_variants

__all__ = ["time_to_accuracy"]

LOWER = 0.6  # a target that every selector reaches on Fashion-MNIST
SMOOTH = 10  # rounds per point of a curve
COLUMNS = ("mean_accuracy", "final_accuracy", "simulated_seconds")
Summaries = Mapping[str, ExperimentSummary]


def time_to_accuracy(plan: Plan) -> list[Path]:
    """Run every variant on both kinds of devices, and compare them."""
    scenarios = scenarios_of(plan)
    runs = run_variants(plan, VARIANTS, scenarios)
    titles = {scenario.name: scenario.title for scenario in scenarios}
    own = plan.experiment(scenarios[0]).target_accuracy
    targets = sorted({LOWER, *([] if own is None else [own])})
    by_target = {one: summarise_variants(with_target(runs, one), RANDOM.label) for one in targets}
    some = by_target[targets[0]]
    panels = {
        titles[name]: {label: _curve(summary, label) for label in summary.curves}
        for name, summary in some.items()
    }
    numbers = {
        "plan": {**plan.describe(), "settings": list(titles)},
        "devices": DEVICES,
        "over_selection": OVER_SELECTION,
        "summary": {f"target {one:g}": summary_numbers(found) for one, found in by_target.items()},
        "curves": panels,
    }
    tables = [_table(plan, titles[name], name, by_target) for name in some]
    rounds = plan.experiment(scenarios[0]).rounds
    caption = f"{plan.dataset}, {plan.seeds_text}, {rounds} rounds; mean of the last {SMOOTH} "
    caption += "rounds and of the seeds, lowest to highest seed; grey: the targets"
    return [
        plan.save("time", numbers),
        *save_figure(draw(panels, targets, caption), plan.out / f"time-{plan.dataset}"),
        plan.save_page("time", tables),
    ]


def _curve(summary: ExperimentSummary, label: str) -> dict[str, list[float]]:
    """Accuracy over simulated minutes, the mean over seeds."""
    means = seed_means(summary.curves[label], "accuracy", SMOOTH)
    return {
        "minutes": (means.time / 60.0).round(3).tolist(),
        "mean": means.mean.round(4).tolist(),
        "low": means.low.round(4).tolist(),
        "high": means.high.round(4).tolist(),
    }


def _table(plan: Plan, title: str, name: str, by_target: Mapping[float, Summaries]) -> str:
    """A row for each variant: accuracies, times, and their paired differences to random."""
    some = next(iter(by_target.values()))[name]
    head = [""]
    rows: dict[str, list[str]] = {one.name: [display_name(one.name)] for one in some.selectors}
    for key in COLUMNS:
        _add(head, rows, some, key, "")
    for target, summaries in by_target.items():
        for key in ("rounds_to_target", "seconds_to_target"):
            _add(head, rows, summaries[name], key, f" of {100 * target:g} %")
    return markdown(f"{plan.dataset}, {plan.seeds_text}: {title}", head, list(rows.values()))


def _add(
    head: list[str],
    rows: Mapping[str, list[str]],
    summary: ExperimentSummary,
    key: str,
    of: str,
) -> None:
    """One more metric as two columns: its mean, and the difference to the baseline."""
    metric = next(one for one in summary.metrics if one.key == key)
    head += [metric.title + of, f"− {display_name(summary.baseline)}"]
    for one in summary.selectors:
        there: Sequence[str] = ("",)
        if key in one.differences:
            there = (difference_text(metric, one.differences[key].estimate),)
        rows[one.name].extend([estimate_text(metric, one.estimates[key]), *there])
