"""Selectors with optimisers: ours beside its rivals in every scenario, and whether goals were met.

CIFAR-10's scenarios are others, with fewer pairs: each of their runs takes 25 to 40 minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcor.reporting.plots import save_figure
from studies.drawing import smooth_curve
from studies.memory.figure import draw
from studies.memory.goals import goals, share_of_gain
from studies.memory.page import accuracy_table, cost_table, goal_lines
from studies.memory.runs import (
    EVERYONE,
    OURS,
    PAIRS,
    RANDOM,
    Pair,
    rounds_of,
    run_pairs,
    scenarios_of,
)
from studies.memory.values import ACCURACIES, Comparison, average_difference, compare
from studies.plan import Plan

DRAWN = ("2spc", "1spc", "dir", "table-20")  # the scenarios whose curves are kept
CIFAR10_PAIRS = (RANDOM.label, "complement", OURS.label)


def memory(plan: Plan) -> list[Path]:
    """Run every pair in every scenario of the plan's data set, and compare them.

    Only those of CIFAR-10 depend on the settings that the plan names.
    """
    scenarios = scenarios_of(plan)
    runs = run_pairs(plan, _pairs_of(plan), scenarios)
    comparisons = [compare(s, rounds_of(plan, s), runs[s.name]) for s in scenarios]
    reached = goals(comparisons)
    numbers = {
        "plan": {**plan.describe(), "settings": [c.name for c in comparisons]},
        "scenarios": {c.name: _numbers(c) for c in comparisons},
        "average_paired_to_random": _averages(comparisons),
        "goals": [asdict(goal) for goal in reached],
        "curves": {
            name: {label: smooth_curve(of_pair) for label, of_pair in runs[name].items()}
            for name in DRAWN
            if name in runs
        },
    }
    saved = plan.save("memory", numbers)
    title = f"{plan.dataset}, {plan.seeds_text}: mean accuracy over rounds (over the last tenth)"
    page = [accuracy_table(title, comparisons), goal_lines(reached), cost_table(comparisons)]
    caption = f"{plan.dataset}, {plan.seeds_text}; paired over seeds, bars: 95 % intervals"
    rows = {
        c.title: {
            label: asdict(c.difference(label, RANDOM.label))
            for label in c.runs
            if label != RANDOM.label
        }
        for c in comparisons
    }
    return [
        saved,
        *save_figure(draw(rows, caption), plan.out / f"memory-{plan.dataset}"),
        plan.save_page("memory", page),
    ]


def _pairs_of(plan: Plan) -> list[Pair]:
    if plan.dataset == "cifar10":
        return [pair for pair in PAIRS if pair.label in CIFAR10_PAIRS]
    return [*PAIRS, EVERYONE]


def _numbers(comparison: Comparison) -> dict[str, Any]:
    share = share_of_gain(comparison)
    return {**comparison.numbers(), "share_of_best_rival": asdict(share)}


def _averages(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Pair -> the mean over scenarios of its differences to random, of pairs that are in all."""
    first, *others = comparisons
    return {
        label: {
            key: asdict(average_difference(comparisons, label, RANDOM.label, key))
            for key in ACCURACIES
        }
        for label in first.runs
        if label != RANDOM.label and all(label in other.runs for other in others)
    }
