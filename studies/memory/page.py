"""The page of the comparison: a table of accuracies, the goals, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedcor.core.text import bytes_text
from fedcor.reporting.estimates import mean_estimate
from fedcor.reporting.tables import markdown
from studies.memory.goals import NEGLIGIBLE, Goal, accuracy_text, paired_text, share_of_gain
from studies.memory.runs import EVERYONE, OURS, RANDOM
from studies.memory.values import ACCURACIES, Comparison, average_difference

_NOTE = """The column `random` has its mean accuracy over all rounds; the others, their differences
to it, paired over seeds. In round brackets: the same over the last tenth of the rounds. {interval}
Bold: the best of a row, not counting everyone training.

"""
_INTERVAL = "In square\nbrackets: the 95 % interval."
_NO_INTERVAL = "One seed\ngives no interval."

_GOALS = """### Goals

Each line names a goal, whether it was met, and each measured value followed by its bound.

"""

_BELOW = f"""
`aligned` + FedRecall counts as below another pair if the 95 % interval of the difference is below
zero, or its mean is below {paired_text(mean_estimate([-NEGLIGIBLE]))}.

"""


def accuracy_table(title: str, comparisons: Sequence[Comparison]) -> str:
    """One row per scenario: random's accuracy, and each pair's difference to it."""
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
