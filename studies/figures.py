"""Figures of whole runs: accuracy over rounds, how often clients are chosen, paired differences.

`curve_result` and `difference_draw` make a study's numbers and figure from its runs. The other
functions take numbers that were computed before, and return a matplotlib Figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedcor.reporting.plots import (
    PALETTE,
    Figure,
    line_style,
    panel_row,
    write_caption,
)
from studies.plan import Plan
from studies.scaffold import Result, Runs
from studies.summaries import (
    SMOOTH,
    Summaries,
    accuracy_differences,
    rounds_per_point,
    smooth_curve,
    summarise_variants,
    summary_numbers,
)
from studies.tables import display_name, setting_title


def curve_result(
    plan: Plan,
    runs: Runs,
    *,
    extra: Mapping[str, Any] | None = None,
    tables: Sequence[str] = (),
    name: str = "",
) -> Result:
    """Each variant's curve, its summary compared with random selection, and `extra` numbers."""
    panels = {
        scenario: {label: smooth_curve(seed_runs) for label, seed_runs in by_label.items()}
        for scenario, by_label in runs.items()
    }
    summaries = summarise_variants(runs, "random")
    numbers = {"curves": panels, "summary": summary_numbers(summaries), **(extra or {})}
    targets = {name: s.target for name, s in summaries.items() if s.target is not None}
    draw = partial(curves, panels, _curve_caption(plan, runs), targets)
    return Result(numbers, tables, draw, name)


def _curve_caption(plan: Plan, runs: Runs) -> str:
    rounds = min(len(run.rounds) for by in runs.values() for rs in by.values() for run in rs)
    parts = [f"{plan.dataset}, {plan.seeds_text}, {rounds} rounds"]
    parts += [f"mean of the last {SMOOTH} rounds"] if rounds_per_point(rounds) > 1 else []
    parts += ["band: one standard deviation over seeds"] if len(plan.seeds) > 1 else []
    return "; ".join(parts)


def difference_draw(
    plan: Plan,
    summaries: Summaries,
    baseline: str,
    titles: Mapping[str, str] | None = None,
) -> Callable[[], Figure]:
    """Draws the paired differences of mean accuracy.

    Args:
        plan: The plan of the study.
        summaries: By scenario.
        baseline: Name of what the differences are taken from.
        titles: Titles of scenarios, by name.
    """
    panels = {
        (titles or {}).get(name, name): shown
        for name, shown in accuracy_differences(summaries).items()
    }
    rounds = next(iter(summaries.values())).selectors[0].runs[0].rounds_done
    source = f"{plan.dataset}, {plan.seeds_text}, {rounds} rounds"
    caption = f"{source}; paired over seeds, bars: 95 % intervals, each by itself"
    return partial(differences, panels, f"mean accuracy, difference from {baseline}", caption)


def curves(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    caption: str,
    target: Mapping[str, float],
) -> Figure:
    """Test accuracy over rounds: panels[setting][series] has `round`, `mean`, `low`, `high`."""
    room_for_legend = 1.2 / len(panels)
    figure, axes = panel_row(len(panels), width=3.6 + room_for_legend)
    for ax, (setting, series) in zip(axes, panels.items(), strict=True):
        for i, (label, numbers) in enumerate(series.items()):
            look = line_style(label, i)
            name = display_name(label)
            ax.plot(numbers["round"], numbers["mean"], label=name, linewidth=1.5, **look)
            ax.fill_between(
                numbers["round"],
                numbers["low"],
                numbers["high"],
                color=look["color"],
                alpha=0.15,
                linewidth=0,
            )
        if setting in target:
            ax.axhline(target[setting], color="grey", linewidth=0.8)
            ax.text(
                0.01,
                target[setting],
                "target",
                va="bottom",
                fontsize=7,
                color="grey",
                transform=ax.get_yaxis_transform(),
            )
        ax.set_title(setting_title(setting), fontsize=10)
        ax.set_xlabel("communication round")
    axes[0].set_ylabel("test accuracy")
    handles, labels = axes[-1].get_legend_handles_labels()
    # Outside, where it hides no curve.
    figure.legend(handles, labels, fontsize=8, loc="outside right center", frameon=False)
    write_caption(figure, caption)
    return figure


def frequencies(panels: Mapping[str, Mapping[str, Sequence[float]]], caption: str) -> Figure:
    """How often each client was chosen, most chosen first: panels[setting][series] has one number
    per client."""
    figure, axes = panel_row(len(panels))
    for ax, (setting, series) in zip(axes, panels.items(), strict=True):
        for i, (label, counts) in enumerate(series.items()):
            ax.step(
                np.arange(1, len(counts) + 1),
                sorted(counts, reverse=True),
                where="mid",
                label=display_name(label),
                **line_style(label, i),
            )
        ax.set_title(setting_title(setting), fontsize=10)
        ax.set_xlabel("client, most chosen first")
        ax.set_ylim(bottom=0)
    axes[0].set_ylabel("times chosen a run")
    axes[-1].legend(fontsize=8)
    write_caption(figure, caption)
    return figure


def differences(
    panels: Mapping[str, Mapping[str, Mapping[str, Any]]], what: str, caption: str
) -> Figure:
    """Paired differences with their intervals, one row per variant: panels[scenario][variant] has
    `mean`, `low`, `high`; `what` is the difference that is shown."""
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    width = 2.9 if len(panels) <= 3 else 2.4
    figure, axes = panel_row(len(panels), width=width, height=1.3 + 0.26 * len(names))
    shown = [row for rows in panels.values() for row in rows.values() if row["mean"] is not None]
    ends = [row[key] for row in shown for key in ("mean", "low", "high") if row[key] is not None]
    left, right = min([*ends, 0.0]), max([*ends, 0.0])
    room = 0.05 * (right - left) or 0.1
    for ax, (scenario, rows) in zip(axes, panels.items(), strict=True):
        ax.axvline(0, color="black", linewidth=0.8)
        for y, name in enumerate(names):
            if name not in rows or rows[name]["mean"] is None:
                continue
            mean, low, high = (rows[name][key] for key in ("mean", "low", "high"))
            clear = low is not None and (low > 0 or high < 0)
            colour = "#555555" if not clear else PALETTE[2] if mean > 0 else PALETTE[0]
            if low is not None:
                (bar,) = ax.plot([low, high], [y, y], color=colour, linewidth=2.2, alpha=0.6)
                bar.set_solid_capstyle("butt")
            marker = "o" if not clear else "^" if mean > 0 else "v"
            ax.plot(mean, y, marker=marker, color=colour, markersize=5)
        ax.set_title(setting_title(scenario), fontsize=9)
        ticks = [display_name(name) if ax is axes[0] else "" for name in names]
        ax.set_yticks(range(len(names)), ticks)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlim(left - room, right + room)  # one scale, so that panels can be compared
        ax.tick_params(labelsize=8)
    axes[len(axes) // 2].set_xlabel(what)
    write_caption(figure, f"{caption}; triangles: the interval excludes zero")
    return figure
