"""Accuracy over rounds: the numbers are saved, then the figure is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.types import FloatArray
from fedcor.reporting.plots import save_figure
from fedcor.runs.record import RunRecord
from studies.comparison import summarise_variants, summary_numbers
from studies.figures import curves
from studies.plan import Plan
from studies.variants import Runs

SMOOTH = 10  # rounds per point of a curve


def draw_curves(
    plan: Plan, what: str, runs: Runs, extra: Mapping[str, Any] | None = None
) -> list[Path]:
    """Save each variant's curve, its summary compared with random selection, and `extra` numbers;
    and draw the curves."""
    panels = {
        scenario: {label: smooth_curve(seed_runs) for label, seed_runs in by_label.items()}
        for scenario, by_label in runs.items()
    }
    summaries = summarise_variants(runs, "random")
    numbers = {"curves": panels, "summary": summary_numbers(summaries), **(extra or {})}
    saved = plan.save(what, numbers)
    targets = {name: s.target for name, s in summaries.items() if s.target is not None}
    figure = curves(panels, _caption(plan, runs), targets)
    return [saved, *save_figure(figure, plan.out / f"{what}-{plan.dataset}")]


def smooth_curve(runs: Sequence[RunRecord]) -> dict[str, list[float]]:
    """Mean over seeds of the ten-round mean accuracy, and one standard deviation around it."""
    length = min(len(run.rounds) for run in runs)
    accuracy = np.array(
        [[entry["test_accuracy"] for entry in run.rounds[:length]] for run in runs],
        dtype=np.float64,
    )  # (seeds, rounds); NaN where a round was not measured
    window = _window(length)
    # A point is the mean of those of its rounds that were measured.
    sums = _sliding(np.nan_to_num(accuracy), np.full(window, 1 / window))
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # points without any value
        smooth = sums * (window / _sliding(~np.isnan(accuracy), np.ones(window)))
        mean = np.nanmean(smooth, axis=0)
        spread = np.nanstd(smooth, axis=0, ddof=1) if len(runs) > 1 else np.zeros_like(mean)
    return {
        "round": list(range(window, length + 1)),
        "mean": mean.round(4).tolist(),
        "low": (mean - spread).round(4).tolist(),
        "high": (mean + spread).round(4).tolist(),
    }


def _sliding(rows: np.ndarray[Any, Any], kernel: FloatArray) -> FloatArray:
    """Each row's sums of neighbours, weighted by `kernel`."""
    sums: FloatArray = np.apply_along_axis(
        lambda row: np.convolve(row, kernel, mode="valid"), 1, rows
    )
    return sums


def _window(rounds: int) -> int:
    """Rounds per point of a curve; where there are few rounds, one."""
    return SMOOTH if rounds > SMOOTH else 1


def _caption(plan: Plan, runs: Runs) -> str:
    lengths = {len(run.rounds) for by in runs.values() for rs in by.values() for run in rs}
    rounds = min(lengths)
    parts = [f"{plan.dataset}, {plan.seeds_text}, {rounds} rounds"]
    parts += [f"mean of the last {SMOOTH} rounds"] if _window(rounds) > 1 else []
    parts += ["band: one standard deviation over seeds"] if len(plan.seeds) > 1 else []
    return "; ".join(parts)
