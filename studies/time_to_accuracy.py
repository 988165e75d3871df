"""Time to accuracy: how long each selector takes to two targets, where clients differ in speed.

Speed is tied to the data or not. Differences are paired over seeds: runs of a seed have the same
data, devices and first model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedcor.reporting.curves import seed_means
from fedcor.reporting.plots import Figure, line_style, panel_row, write_caption
from fedcor.reporting.summary import ExperimentSummary
from fedcor.reporting.tables import difference_text, estimate_text
from fedcor.runs.record import RunRecord
from studies.plan import Plan
from studies.scaffold import (
    FEDCOR,
    RANDOM,
    Result,
    Runs,
    Scenario,
    Study,
    Variant,
    always,
    paper_scenario,
)
from studies.summaries import SMOOTH, Summaries, summarise_variants, summary_numbers
from studies.tables import display_name, markdown

ROUNDS = 150
LOWER = 0.6  # a target that every selector reaches on Fashion-MNIST
COLUMNS = ("mean_accuracy", "final_accuracy", "simulated_seconds")
TO_TARGET = ("rounds_to_target", "seconds_to_target")
INDEPENDENT, TIED, UNEQUAL = "time-independent", "time-tied", "time-unequal"
# FedScale's model of a mini-batch of 64 samples (docs/how-to/faults.md).
_FEDSCALE = "seconds_per_step=0.87, speed_spread=0.6, bandwidth_spread=0.5"
# Scenario -> how fast clients are, and how many times as many are chosen as are needed.
DEVICES = {
    INDEPENDENT: (_FEDSCALE, 1.3),
    TIED: (f'{_FEDSCALE}, tied_to="labels"', 1.3),
    UNEQUAL: ("seconds_per_step=0.87, speed_spread=1.2, bandwidth_spread=0.5", 1.0),
}
TITLES = {
    INDEPENDENT: "speed independent of the data",
    TIED: "speed tied to the labels",
    UNEQUAL: "speeds far apart, nobody is left behind",
}
# Oort without its system utility: no client is too slow.
BLIND = Variant("Oort, blind to time", "oort", "oort-blind", {"penalty": 0.0})
VARIANTS = (RANDOM, Variant("oort", "oort"), BLIND, FEDCOR, Variant("aligned", "aligned"))
_LOOKS = {BLIND.label: {"color": "#88CCEE", "linestyle": "--"}}


def _scenarios(plan: Plan) -> list[Scenario]:
    """Two shards per client, on three kinds of devices."""
    scenarios = []
    for name, (table, more) in DEVICES.items():
        changes = (f"faults.over_selection={more}", f"faults.devices={{{table}}}")
        scenario = paper_scenario(plan, "2spc", name, changes, TITLES[name])
        scenarios.append(replace(scenario, rounds=ROUNDS))
    return scenarios


def _evaluate(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Compare the variants on each kind of devices, by two targets."""
    first = next(iter(next(iter(runs.values())).values()))[0]
    preset = first.header["config"]["target_accuracy"]
    targets = sorted({LOWER, *([] if preset is None else [preset])})
    by_target = {
        target: summarise_variants(_with_target(runs, target), RANDOM.label) for target in targets
    }
    lowest = by_target[targets[0]]
    panels = {
        TITLES[name]: {label: _curve(summary, label) for label in summary.curves}
        for name, summary in lowest.items()
    }
    numbers = {
        "devices": {
            name: {"devices": table, "over_selection": more}
            for name, (table, more) in DEVICES.items()
        },
        "summary": {
            f"target {target:g}": summary_numbers(summaries)
            for target, summaries in by_target.items()
        },
        "curves": panels,
    }
    tables = [table for name in lowest for table in _tables(plan, name, by_target)]
    source = f"{plan.dataset}, {plan.seeds_text}, {len(first.rounds)} rounds"
    caption = f"{source}; mean of the last {SMOOTH} rounds and of the seeds, lowest to highest seed"
    yield Result(numbers, tables, partial(draw, panels, targets, f"{caption}; grey: the targets"))


STUDY = Study(_evaluate, _scenarios, always(*VARIANTS))


def _with_target(runs: Runs, target: float) -> Runs:
    """The same runs, judged by another target accuracy."""

    def with_goal(run: RunRecord) -> RunRecord:
        config: Mapping[str, object] = {**run.header["config"], "target_accuracy": target}
        return replace(run, header={**run.header, "config": config})

    return {
        scenario: {
            label: [with_goal(run) for run in of_label] for label, of_label in by_label.items()
        }
        for scenario, by_label in runs.items()
    }


def _curve(summary: ExperimentSummary, label: str) -> dict[str, list[float]]:
    """Accuracy over simulated minutes, the mean over seeds."""
    means = seed_means(summary.curves[label], "accuracy", SMOOTH)
    return {
        "minutes": (means.time / 60.0).round(3).tolist(),
        "mean": means.mean.round(4).tolist(),
        "low": means.low.round(4).tolist(),
        "high": means.high.round(4).tolist(),
    }


def _tables(plan: Plan, name: str, by_target: Mapping[float, Summaries]) -> list[str]:
    """A row for each variant: means over seeds, and in a second table the difference from random.

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
        metric = next(m for m in summary.metrics if m.key == key)
        head.append(metric.title + of)
        for s in summary.selectors:
            means[s.name].append(estimate_text(metric, s.estimates[key]))
            if key in s.differences:
                text = difference_text(metric, s.differences[key].estimate)
                differences[s.name].append(text)
    del differences[first.baseline]
    about = f"{plan.dataset}, {plan.seeds_text}: {TITLES[name]}"
    minus = f"{about}, minus {display_name(first.baseline)}"
    return [
        markdown(about, head, list(means.values())),
        markdown(minus, head, list(differences.values())),
    ]


def _names(summary: ExperimentSummary) -> dict[str, list[str]]:
    """The first cell of each row."""
    return {s.name: [display_name(s.name)] for s in summary.selectors}


def draw(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    targets: Sequence[float],
    caption: str,
) -> Figure:
    """Test accuracy over time: panels[title][series] has `minutes`, `mean`, `low`, `high`."""
    figure, axes = panel_row(len(panels), width=3.9, height=3.4)
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for i, (label, numbers) in enumerate(series.items()):
            look = _LOOKS.get(label) or line_style(label, i)
            x, band = numbers["minutes"], (numbers["low"], numbers["high"])
            ax.plot(x, numbers["mean"], label=display_name(label), linewidth=1.5, **look)
            ax.fill_between(x, *band, color=look["color"], alpha=0.08, linewidth=0)
        for target in targets:
            ax.axhline(target, color="grey", linewidth=0.8)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("minutes of simulated time")
    axes[0].set_ylabel("test accuracy")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center", frameon=False)
    write_caption(figure, caption)
    return figure
