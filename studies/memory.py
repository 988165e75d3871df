"""Selectors with optimisers: `aligned` with FedRecall beside its rivals, and the goals.

CIFAR-10's scenarios have fewer pairs: each of their runs takes 25 to 40 minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any

from fedcor.core.text import bytes_text
from fedcor.reporting.metrics import mean_estimate
from fedcor.reporting.plots import PALETTE, Figure, line_style, panel_row, write_caption
from studies.memory_comparison import ACCURACIES, Comparison, average_difference, compare
from studies.memory_goals import (
    NEGLIGIBLE,
    Goal,
    accuracy_text,
    goals,
    paired_text,
    share_of_gain,
)
from studies.memory_scenarios import EVERYONE, OURS, RANDOM, pairs_of, scenarios_of
from studies.plan import Plan
from studies.scaffold import Result, Runs, Study
from studies.summaries import smooth_curve
from studies.tables import markdown

KEPT_CURVES = ("2spc", "1spc", "dir", "table-20")  # scenarios


def _evaluate(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Compare every pair in every scenario of the plan's data set."""
    comparisons = [compare(s, runs[s.name]) for s in scenarios_of(plan)]
    reached = goals(comparisons)
    numbers = {
        "scenarios": {c.name: _numbers(c) for c in comparisons},
        "average_paired_to_random": _averages(comparisons),
        "goals": [asdict(goal) for goal in reached],
        "curves": {
            name: {label: smooth_curve(of_pair) for label, of_pair in runs[name].items()}
            for name in KEPT_CURVES
            if name in runs
        },
    }
    title = f"{plan.dataset}, {plan.seeds_text}: mean accuracy over rounds (over the last tenth)"
    tables = [accuracy_table(title, comparisons), goal_lines(reached), cost_table(comparisons)]
    rows = {
        c.title: {
            label: asdict(c.difference(label, RANDOM.label))
            for label in c.runs
            if label != RANDOM.label
        }
        for c in comparisons
    }
    caption = f"{plan.dataset}, {plan.seeds_text}; paired over seeds, bars: 95 % intervals"
    yield Result(numbers, tables, partial(draw, rows, caption))


STUDY = Study(_evaluate, scenarios_of, pairs_of)


def _numbers(comparison: Comparison) -> dict[str, Any]:
    share = share_of_gain(comparison)
    return {**comparison.numbers(), "share_of_best_rival": asdict(share)}


def _averages(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Pair -> its mean difference from random over all scenarios; only pairs that are in all."""
    first, *others = comparisons
    return {
        label: {
            key: asdict(average_difference(comparisons, label, RANDOM.label, key))
            for key in ACCURACIES
        }
        for label in first.runs
        if label != RANDOM.label and all(label in other.runs for other in others)
    }


# --- the page -------------------------------------------------------------------------------------

_NOTE = """The column `random` has its mean accuracy over all rounds; the others, their
difference from it, paired over seeds. In round brackets: the same over the last tenth of the
rounds. {interval}
Bold: the best of a row, not counting everyone training.

"""
_INTERVAL = "In square brackets: the 95 % interval."
_NO_INTERVAL = "One seed gives no interval."

_GOALS = """### Goals

Each line names a goal, whether it was met, and each measured value followed by its bound.

"""

_BELOW = f"""
`aligned` + FedRecall counts as below another pair if the 95 % interval of the difference is below
zero, or its mean is below {paired_text(mean_estimate([-NEGLIGIBLE]))}.

"""


def accuracy_table(title: str, comparisons: Sequence[Comparison]) -> str:
    """One row per scenario: random's accuracy, and each pair's difference from it."""
    labels = _labels(comparisons)
    head = ["", *labels, "share of the best rival's gain"]
    rows = [
        [
            comparison.title,
            *_bold_best(
                {label: _cell([comparison], label) for label in labels if label in comparison.runs},
                {label: comparison.gain(label) for label in comparison.runs},
                labels,
            ),
            share_of_gain(comparison).text,
        ]
        for comparison in comparisons
    ]
    everywhere = [label for label in labels if all(label in c.runs for c in comparisons)]
    means = _bold_best(
        {label: _cell(comparisons, label) for label in everywhere},
        {label: fmean(c.gain(label) for c in comparisons) for label in everywhere},
        labels,
    )
    several = any(len(comparison.seeds) > 1 for comparison in comparisons)
    note = _NOTE.format(interval=_INTERVAL if several else _NO_INTERVAL)
    return markdown(title, head, [*rows, ["mean of all", *means, "–"]]) + note


def goal_lines(goals: Sequence[Goal]) -> str:
    """One line per goal: its verdict, and the figures behind it."""
    lines = [f"- {goal.title}: **{goal.verdict}**. {goal.figures}.\n" for goal in goals]
    return _GOALS + "".join(lines) + _BELOW


def cost_table(comparisons: Sequence[Comparison]) -> str:
    """Bytes of each pair relative to random's, and how much its optimiser remembers."""
    rows = []
    for label in _labels(comparisons):
        run = [c for c in comparisons if label in c.runs]
        down, up, both = (
            [c.bytes_ratio(label, key) for c in run]
            for key in ("bytes_down", "bytes_up", "all_bytes")
        )
        memory = max(r.memory_bytes for c in run for r in c.runs[label].values())
        waits = [c.turns_waited(label) for c in run if c.reliable]
        cells = [f"{fmean(down):.2f}", f"{fmean(up):.2f}", f"{fmean(both):.2f}", f"{max(both):.2f}"]
        cells += [bytes_text(memory) if memory else "–", f"{max(waits):.1f}" if waits else "–"]
        rows.append([label, *cells])
    head = ["", "bytes down", "bytes up", "both", "both, at most", "memory, at most"]
    head.append("longest wait / (N/C)")
    return markdown("Bytes relative to random's, mean of all scenarios", head, rows)


def _labels(comparisons: Sequence[Comparison]) -> list[str]:
    """Of all pairs, in their order."""
    return list(dict.fromkeys(label for c in comparisons for label in c.runs))


def _cell(comparisons: Sequence[Comparison], label: str) -> str:
    """A pair's cell: of one scenario, or of the mean of several."""
    if label == RANDOM.label:
        mean, last = (
            accuracy_text(fmean(c.estimate(label, key).mean or 0.0 for c in comparisons))
            for key in ACCURACIES
        )
        return f"{mean} ({last})"
    first, then = (average_difference(comparisons, label, RANDOM.label, k) for k in ACCURACIES)
    return f"{paired_text(first, label == OURS.label)} ({paired_text(then, False)})"


def _bold_best(cells: dict[str, str], gains: dict[str, float], labels: Sequence[str]) -> list[str]:
    """The cells in the order of `labels`, the one with the largest gain in bold; – for none."""
    best = max((label for label in gains if label != EVERYONE.label), key=lambda k: gains[k])
    return [f"**{cells[label]}**" if label == best else cells.get(label, "–") for label in labels]


# --- the figure -----------------------------------------------------------------------------------

# Label -> colour and marker. Selectors have the colours that they have elsewhere.
_LOOKS = {
    "power-of-choice": (line_style("power_of_choice", 0)["color"], "v"),
    "FedCor": (line_style("fedcor", 0)["color"], "s"),
    "complement": (line_style("complement", 0)["color"], "^"),
    "random + FedVARP": (PALETTE[5], "X"),
    "round-robin + FedVARP": (PALETTE[2], "P"),
    OURS.label: ("#000000", "D"),
    EVERYONE.label: (line_style("full", 0)["color"], "o"),
}
WIDTH = 6.4  # inches: about 1000 pixels
ROW = 0.066  # inches per pair


def draw(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], caption: str) -> Figure:
    """Dots with intervals: rows[scenario][pair] has `mean`, `low`, `high` of a difference."""
    labels = [label for label in _LOOKS if any(label in pairs for pairs in rows.values())]
    height = 1.6 + ROW * (len(labels) + 2) * len(rows)
    figure, (ax,) = panel_row(1, WIDTH, height)
    ax.axvline(0, color="black", linewidth=0.8)
    for place in range(1, len(rows), 2):
        ax.axhspan(place - 0.5, place + 0.5, color="#000000", alpha=0.04, linewidth=0)
    for i, label in enumerate(labels):
        _draw_pair(ax, label, [pairs.get(label) for pairs in rows.values()], _offset(i, labels))
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("mean accuracy, difference from random")
    figure.legend(fontsize=8.5, loc="outside upper center", ncols=3, frameon=False)
    write_caption(figure, caption)
    return figure


def _offset(i: int, labels: Sequence[str]) -> float:
    """Where the i-th pair stands within a scenario's row."""
    return (i - (len(labels) - 1) / 2) / (len(labels) + 2)


def _draw_pair(
    ax: Any, label: str, numbers: Sequence[Mapping[str, Any] | None], offset: float
) -> None:
    colour, marker = _LOOKS[label]
    ours = label == OURS.label
    shown = [(y + offset, n) for y, n in enumerate(numbers) if n and n["mean"] is not None]
    for y, n in shown:
        if n["low"] is not None:
            ax.plot([n["low"], n["high"]], [y, y], color=colour, linewidth=1.6, alpha=0.6)
    ax.plot(
        [n["mean"] for _, n in shown],
        [y for y, _ in shown],
        linestyle="none",
        marker=marker,
        color=colour,
        markersize=5.5 if ours else 4.5,
        label=label,
        zorder=3 if ours else 2,
    )
