"""Numbers over seeds that several studies share: summaries, paired differences, cells of tables."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedcor.core.types import FloatArray, IntArray
from fedcor.reporting.metrics import METRICS, Estimate
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary, summarise
from fedcor.reporting.tables import difference_text
from fedcor.runs.record import RunRecord
from studies.scaffold import Runs
from studies.tables import display_name

METRIC = {metric.key: metric for metric in METRICS}
ACCURACY = METRIC["mean_accuracy"]
SMOOTH = 10  # rounds per point of a curve
Summaries = Mapping[str, ExperimentSummary]


def summarise_variants(runs: Runs, baseline: str) -> dict[str, ExperimentSummary]:
    """Each scenario's variants over seeds, paired with the variant `baseline`."""
    return {
        scenario: summarise(
            [
                # Under its variant's label, so that variants of one selector stand side by side.
                RunRecord(run.path, {**run.header, "selector": label}, run.rounds)
                for label, seed_runs in by_label.items()
                for run in seed_runs
            ],
            baseline,
        ).experiments[0]
        for scenario, by_label in runs.items()
    }


def summary_numbers(summaries: Summaries) -> dict[str, Any]:
    """Scenario -> variant -> numbers to save, with each seed's values for later comparisons."""
    return {
        scenario: {
            s.name: {
                "seeds": {run.seed: dict(run.values) for run in s.runs},
                "estimates": {key: asdict(estimate) for key, estimate in s.estimates.items()},
                f"paired_to_{summary.baseline}": {
                    key: asdict(difference.estimate) for key, difference in s.differences.items()
                },
            }
            for s in summary.selectors
        }
        for scenario, summary in summaries.items()
    }


def accuracy_differences(summaries: Summaries) -> dict[str, dict[str, dict[str, Any]]]:
    """Scenario -> variant -> the paired difference of its mean accuracy from the baseline."""
    return {
        scenario: {
            s.name: asdict(s.differences["mean_accuracy"].estimate)
            for s in summary.selectors
            if s.differences
        }
        for scenario, summary in summaries.items()
    }


def total_bytes(s: SelectorSummary) -> float:
    """All bytes that a run moves, mean over seeds."""
    return sum(s.estimates[key].mean or 0.0 for key in ("bytes_down", "bytes_up"))


def paired_accuracy(s: SelectorSummary) -> str:
    """The paired difference of its mean accuracy from the baseline, as a table's cell."""
    paired = s.differences.get("mean_accuracy")
    return difference_text(ACCURACY, paired.estimate) if paired else "–"


def difference_rows(summaries: Summaries, baseline: str) -> list[list[str]]:
    """One row per variant: its mean accuracy and paired difference in each scenario, then its bytes
    relative to the baseline's."""
    rows: dict[str, list[str]] = {}
    moved: dict[str, float] = {}
    for summary in summaries.values():
        for s in summary.selectors:
            mean = s.estimates["mean_accuracy"].mean
            cell = "–" if mean is None else f"{mean:.3f}"
            if s.differences:
                cell += ", " + paired_accuracy(s)
            rows.setdefault(s.name, [display_name(s.name)]).append(cell)
            moved[s.name] = moved.get(s.name, 0.0) + total_bytes(s)
    return [[*row, f"{moved[name] / moved[baseline]:.2f}"] for name, row in rows.items()]


def mean_std(estimate: Estimate) -> str:
    """`94.8 ± 18.4`, as in the paper's table; N/A where some seed did not reach the target."""
    if estimate.mean is None:
        return f"N/A ({estimate.n}/{estimate.of})"
    return f"{estimate.mean:.1f}" + ("" if estimate.std is None else f" ± {estimate.std:.1f}")


def chosen_clients(run: RunRecord) -> IntArray:
    """The clients chosen in all rounds of a run, one after the other."""
    return np.concatenate([np.asarray(entry["selected"], dtype=np.int64) for entry in run.rounds])


def times_chosen(runs: Sequence[RunRecord]) -> FloatArray:
    """(N,) how often the most chosen client of a run was chosen, the next, ...; mean over seeds."""
    sorted_counts = []
    for run in runs:
        clients = run.header["config"]["partition"]["clients"]
        counts = np.bincount(chosen_clients(run), minlength=clients)
        sorted_counts.append(np.sort(counts)[::-1])
    mean: FloatArray = np.mean(sorted_counts, axis=0)
    return mean


def smooth_curve(runs: Sequence[RunRecord]) -> dict[str, list[float]]:
    """Mean over seeds of the ten-round mean accuracy, and one standard deviation around it."""
    length = min(len(run.rounds) for run in runs)
    accuracy = np.array(
        [[entry["test_accuracy"] for entry in run.rounds[:length]] for run in runs],
        dtype=np.float64,
    )  # (seeds, rounds); NaN where a round was not measured
    window = rounds_per_point(length)
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


def rounds_per_point(rounds: int) -> int:
    """Rounds per point of a curve; one where there are few rounds."""
    return SMOOTH if rounds > SMOOTH else 1


def _sliding(rows: np.ndarray[Any, Any], kernel: FloatArray) -> FloatArray:
    """Each row's sums of neighbours, weighted by `kernel`."""
    sums: FloatArray = np.apply_along_axis(
        lambda row: np.convolve(row, kernel, mode="valid"), 1, rows
    )
    return sums
