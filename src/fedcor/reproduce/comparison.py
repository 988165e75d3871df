"""What the experiments that compare whole runs share: numbers over seeds, how often clients were chosen, curves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.record import RunRecord
from fedcor.report.summary import Estimate, ExperimentSummary, summarise
from fedcor.reproduce.plan import Plan, Runs
from fedcor.types import FloatArray

__all__ = ["as_numbers", "compared", "draw_curves", "mean_std", "times_chosen"]

SMOOTH = 10  # rounds that a curve's point is the mean of


def mean_std(estimate: Estimate) -> str:
    """As the paper's table: N/A when some seed never got there."""
    if estimate.mean is None:
        return f"N/A ({estimate.n}/{estimate.of})"
    return f"{estimate.mean:.1f}" + ("" if estimate.std is None else f" ± {estimate.std:.1f}")


def times_chosen(runs: Sequence[RunRecord]) -> FloatArray:
    """(N,) times the most chosen client, the next, ... was chosen in a run, mean over seeds."""
    sorted_counts = []
    for run in runs:
        clients = run.header["config"]["partition"]["clients"]
        chosen = np.concatenate(
            [np.asarray(entry["selected"], dtype=np.int64) for entry in run.rounds]
        )
        sorted_counts.append(np.sort(np.bincount(chosen, minlength=clients))[::-1])
    mean: FloatArray = np.mean(sorted_counts, axis=0)
    return mean


def compared(runs: Runs, baseline: str) -> dict[str, ExperimentSummary]:
    """Each scenario's variants over seeds, and in pairs with the variant `baseline`."""
    return {
        name: summarise(
            [
                # under its variant's name, so that two variants of one selector stand side by side
                RunRecord(run.path, {**run.header, "selector": label}, run.rounds)
                for label, of_one in by_label.items()
                for run in of_one
            ],
            baseline,
        ).experiments[0]
        for name, by_label in runs.items()
    }


def as_numbers(summaries: Mapping[str, ExperimentSummary]) -> dict[str, Any]:
    """scenario -> variant -> what a file keeps of it: each seed's values, too, so that nothing must run again to be compared."""
    return {
        name: {
            s.name: {
                "seeds": {run.seed: dict(run.values) for run in s.runs},
                "estimates": {key: dataclasses.asdict(e) for key, e in s.estimates.items()},
                f"paired_to_{experiment.baseline}": {
                    key: dataclasses.asdict(d.estimate) for key, d in s.differences.items()
                },
            }
            for s in experiment.selectors
        }
        for name, experiment in summaries.items()
    }


def draw_curves(
    plan: Plan, what: str, runs: Runs, further: Mapping[str, Any] | None = None
) -> list[Path]:
    """Accuracy over rounds, compared with random: the numbers (and `further` ones) saved, then the picture."""
    from fedcor.report.figures import curves, save_figure

    panels = {
        setting: {label: _curve(of_one) for label, of_one in by_label.items()}
        for setting, by_label in runs.items()
    }
    every = compared(runs, "random")
    saved = plan.save(what, {"curves": panels, "summary": as_numbers(every), **(further or {})})
    targets = {setting: e.target for setting, e in every.items() if e.target is not None}
    figure = curves(panels, _caption(plan, runs), targets)
    return [saved, *save_figure(figure, plan.out / f"{what}-{plan.dataset}")]


def _curve(runs: Sequence[RunRecord]) -> dict[str, list[float]]:
    """Mean and one standard deviation over seeds of the ten-round mean accuracy."""
    length = min(len(run.rounds) for run in runs)
    accuracy = np.array(
        [[entry["test_accuracy"] or 0.0 for entry in run.rounds[:length]] for run in runs]
    )  # (seeds, rounds)
    window = _window(length)
    smooth = np.apply_along_axis(
        lambda a: np.convolve(a, np.full(window, 1 / window), mode="valid"), 1, accuracy
    )
    mean, spread = (
        smooth.mean(axis=0),
        smooth.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(smooth.shape[1]),
    )
    return {
        "round": list(range(window, length + 1)),
        "mean": mean.round(4).tolist(),
        "low": (mean - spread).round(4).tolist(),
        "high": (mean + spread).round(4).tolist(),
    }


def _window(rounds: int) -> int:
    """Rounds that a point of a curve is the mean of: of few rounds, each by itself."""
    return SMOOTH if rounds > SMOOTH else 1


def _caption(plan: Plan, runs: Runs) -> str:
    lengths = sorted({len(run.rounds) for by in runs.values() for rs in by.values() for run in rs})
    shown = [f"{plan.dataset}, {plan.of_seeds}, {lengths[0]} rounds"]
    shown += [f"mean of the last {SMOOTH} rounds"] if _window(lengths[0]) > 1 else []
    shown += ["band: one standard deviation over seeds"] if len(plan.seeds) > 1 else []
    return "; ".join(shown)
