"""Time to accuracy: how long each selector takes to two targets, where clients differ in speed.

Differences are paired over seeds: runs of a seed have the same data, devices and first model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedcor.reporting.curves import seed_means
from fedcor.reporting.plots import save_figure
from fedcor.reporting.summary import ExperimentSummary
from fedcor.reporting.tables import difference_text, display_name, estimate_text, markdown
from studies.comparison import summarise_variants, summary_numbers
from studies.plan import Plan
from studies.timed.figure import draw
from studies.timed.runs import DEVICES, VARIANTS, scenarios_of, with_target
from studies.variants import RANDOM, run_variants

LOWER = 0.6  # a target that every selector reaches on Fashion-MNIST
SMOOTH = 10  # rounds per point of a curve
COLUMNS = ("mean_accuracy", "final_accuracy", "simulated_seconds")
TO_TARGET = ("rounds_to_target", "seconds_to_target")
Summaries = Mapping[str, ExperimentSummary]


def time_to_accuracy(plan: Plan) -> list[Path]:
    """Run every variant on all kinds of devices, and compare them."""
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
        "devices": {
            name: {"devices": table, "over_selection": more}
            for name, (table, more) in DEVICES.items()
        },
        "summary": {f"target {one:g}": summary_numbers(found) for one, found in by_target.items()},
        "curves": panels,
    }
    tables = [one for name in some for one in _tables(plan, titles[name], name, by_target)]
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


def _tables(plan: Plan, title: str, name: str, by_target: Mapping[float, Summaries]) -> list[str]:
    """A row for each variant: means over seeds, and in a second table their difference to random.

    The accuracies and the whole time are the same whatever the target is.
    """
    first = next(iter(by_target.values()))[name]
    columns = [(first, key, "") for key in COLUMNS]
    columns += [
        (summaries[name], key, f" of {100 * target:g} %")
        for target, summaries in by_target.items()
        for key in TO_TARGET
    ]
    head, means, differences = [""], _names(first), _names(first)
    for summary, key, of in columns:
        metric = next(one for one in summary.metrics if one.key == key)
        head.append(metric.title + of)
        for one in summary.selectors:
            means[one.name].append(estimate_text(metric, one.estimates[key]))
            if key in one.differences:
                text = difference_text(metric, one.differences[key].estimate)
                differences[one.name].append(text)
    del differences[first.baseline]
    about = f"{plan.dataset}, {plan.seeds_text}: {title}"
    minus = f"{about}, minus {display_name(first.baseline)}"
    return [
        markdown(about, head, list(means.values())),
        markdown(minus, head, list(differences.values())),
    ]


def _names(summary: ExperimentSummary) -> dict[str, list[str]]:
    """The first cell of each row."""
    return {one.name: [display_name(one.name)] for one in summary.selectors}
