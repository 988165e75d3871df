"""What the experiments beyond the paper share: variants, cells of tables, and the figure of paired
differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcor.reporting.metrics import METRICS
from fedcor.reporting.plots import save_figure
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary
from fedcor.reporting.tables import difference_text, display_name
from studies.comparison import summary_numbers
from studies.figures import differences
from studies.plan import Plan
from studies.variants import COMPLEMENT, FEDCOR, RANDOM, Variant

MAIN_THREE = [RANDOM, FEDCOR, COMPLEMENT]
METRIC = {metric.key: metric for metric in METRICS}
ACCURACY = METRIC["mean_accuracy"]


def complement_variant(label: str, **options: Any) -> Variant:
    """Complement with some of its hyper-parameters changed."""
    folder = "-".join(["complement", *(f"{key}-{value}" for key, value in options.items())])
    return Variant(label, "complement", folder, options)


def paired_accuracy(s: SelectorSummary) -> str:
    """The paired difference of its mean accuracy to the baseline, as a table's cell."""
    paired = s.differences.get("mean_accuracy")
    return difference_text(ACCURACY, paired.estimate) if paired else "–"


def total_bytes(s: SelectorSummary) -> float:
    """All bytes that a run moves, mean over seeds."""
    return sum(s.estimates[key].mean or 0.0 for key in ("bytes_down", "bytes_up"))


def accuracy_differences(
    summaries: Mapping[str, ExperimentSummary],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Scenario -> variant -> the paired difference of its mean accuracy to the baseline."""
    return {
        scenario: {
            s.name: asdict(s.differences["mean_accuracy"].estimate)
            for s in summary.selectors
            if s.differences
        }
        for scenario, summary in summaries.items()
    }


def difference_rows(summaries: Mapping[str, ExperimentSummary], baseline: str) -> list[list[str]]:
    """One row per variant: in each scenario its mean accuracy and the paired difference to the
    baseline; then its bytes, relative to the baseline's."""
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


def draw_differences(
    plan: Plan,
    what: str,
    summaries: Mapping[str, ExperimentSummary],
    baseline: str,
    titles: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Save the summaries and `extra` numbers; and draw the paired differences of mean accuracy.

    Args:
        plan: of the experiment
        what: name of the experiment
        summaries: by scenario
        baseline: what the differences are to, in words
        titles: of scenarios, in the figure
        extra: numbers to save with the summaries
    """
    described = {**plan.describe(), "settings": list(summaries)}  # what was really run
    numbers = {"plan": described, "summary": summary_numbers(summaries), **(extra or {})}
    saved = plan.save(what, numbers)
    titles = titles or {}
    panels = {
        titles.get(name, name): shown for name, shown in accuracy_differences(summaries).items()
    }
    rounds = next(iter(summaries.values())).selectors[0].runs[0].rounds_done
    source = f"{plan.dataset}, {plan.seeds_text}, {rounds} rounds"
    caption = f"{source}; paired over seeds, bars: 95 % intervals, each by itself"
    figure = differences(panels, f"mean accuracy, difference to {baseline}", caption)
    return [saved, *save_figure(figure, plan.out / f"{what}-{plan.dataset}")]
