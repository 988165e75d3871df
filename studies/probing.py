"""What probing only a sample of the clients costs FedCor in accuracy, and saves in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from fedcor.reporting.summary import ExperimentSummary, SelectorSummary
from fedcor.reporting.tables import difference_text, estimate_text
from studies.figures import difference_draw
from studies.plan import Plan
from studies.scaffold import RANDOM, Result, Runs, Study, Variant, always, paper_scenarios
from studies.summaries import (
    ACCURACY,
    METRIC,
    accuracy_differences,
    paired_accuracy,
    summarise_variants,
    summary_numbers,
    total_bytes,
)
from studies.tables import display_name, markdown

EVERYONE = Variant("everyone asked", "fedcor")  # shares the runs of Table 1
# A process that knows less should perhaps be trusted less often: hence another annealing as well.
SAMPLES = [
    Variant("30 % asked", "fedcor", "fedcor-asked-30", {"probe_fraction": 0.3}),
    Variant("10 % asked", "fedcor", "fedcor-asked-10", {"probe_fraction": 0.1}),
    Variant(
        "30 % asked, β = 0.5",
        "fedcor",
        "fedcor-asked-30-beta-0.5",
        {"probe_fraction": 0.3, "beta": 0.5},
    ),
    Variant(
        "10 % asked, β = 0.5",
        "fedcor",
        "fedcor-asked-10-beta-0.5",
        {"probe_fraction": 0.1, "beta": 0.5},
    ),
]
HEAD = ["", "mean accuracy", "− everyone asked", "− Rand", "rounds to target, − Rand", "bytes"]
HEAD.append("bytes / Rand's")


def _evaluate(plan: Plan, runs: Runs) -> Iterator[Result]:
    """FedCor with all clients probed, and with samples; paired with random choice and with all."""
    to_random = summarise_variants(runs, RANDOM.label)
    to_everyone = summarise_variants(runs, EVERYONE.label)
    tables = [
        markdown(
            f"{plan.dataset} {setting.upper()}, {plan.seeds_text}",
            HEAD,
            _rows(to_random[setting], to_everyone[setting]),
        )
        for setting in runs
    ]
    numbers = {
        "summary": summary_numbers(to_random),
        "mean_accuracy_paired_to_everyone": accuracy_differences(to_everyone),
    }
    yield Result(numbers, tables, difference_draw(plan, to_random, "Rand"))


STUDY = Study(_evaluate, paper_scenarios, always(RANDOM, EVERYONE, *SAMPLES))


def _rows(to_random: ExperimentSummary, to_everyone: ExperimentSummary) -> list[list[str]]:
    least = total_bytes(to_random.selectors[0])  # of random choice
    return [
        [
            display_name(s.name),
            estimate_text(ACCURACY, s.estimates["mean_accuracy"]),
            paired_accuracy(other),
            paired_accuracy(s),
            _to_target(s),
            f"{total_bytes(s) / 1e6:.0f} MB",
            f"{total_bytes(s) / least:.2f}",
        ]
        for s, other in zip(to_random.selectors, to_everyone.selectors, strict=True)
    ]


def _to_target(s: SelectorSummary) -> str:
    """Rounds to the target accuracy, and the paired difference from the baseline."""
    key = "rounds_to_target"
    text = estimate_text(METRIC[key], s.estimates[key])
    paired = s.differences.get(key)
    return text if paired is None else f"{text}, {difference_text(METRIC[key], paired.estimate)}"
