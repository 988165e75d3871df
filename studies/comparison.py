"""What the experiments that compare whole runs share: numbers over seeds, and how often clients
were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedcor.core.types import FloatArray, IntArray
from fedcor.reporting.estimates import Estimate
from fedcor.reporting.summary import ExperimentSummary, summarise
from fedcor.runs.record import RunRecord
from studies.variants import Runs


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


def summary_numbers(summaries: Mapping[str, ExperimentSummary]) -> dict[str, Any]:
    """Scenario -> variant -> what a file keeps of it. Each seed's values as well, so that later
    comparisons need no new run."""
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
