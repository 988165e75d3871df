"""What asking a sample of the clients costs FedCor in accuracy, and what it saves in bytes."""

from __future__ import annotations

from pathlib import Path

from fedcor.reporting.summary import ExperimentSummary, SelectorSummary
from fedcor.reporting.tables import difference_text, display_name, estimate_text, markdown
from studies.beyond.shared import (
    ACCURACY,
    METRIC,
    accuracy_differences,
    draw_differences,
    paired_accuracy,
    total_bytes,
)
from studies.comparison import summarise_variants
from studies.plan import Plan
from studies.variants import RANDOM, Variant, run_variants

# With the runs of Table 1.
EVERYONE = Variant("everyone asked", "fedcor", "fedcor")
# A process that knows less had better choose less often by it: hence another annealing, too.
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


def probing(plan: Plan) -> list[Path]:
    """FedCor with all clients asked, and with samples; paired with random choice and with all."""
    runs = run_variants(plan, [RANDOM, EVERYONE, *SAMPLES])
    to_random = summarise_variants(runs, RANDOM.label)
    to_everyone = summarise_variants(runs, EVERYONE.label)
    tables = [
        markdown(
            f"{plan.dataset} {setting.upper()}, {plan.seeds_text}",
            [
                *("", "mean accuracy", "− everyone asked", "− Rand"),
                *("rounds to target, − Rand", "bytes", "bytes / Rand's"),
            ],
            _rows(to_random[setting], to_everyone[setting]),
        )
        for setting in plan.settings
    ]
    extra = {"mean_accuracy_paired_to_everyone": accuracy_differences(to_everyone)}
    return [
        *draw_differences(plan, "probing", to_random, "Rand", extra=extra),
        plan.save_page("probing", tables),
    ]


def _rows(to_random: ExperimentSummary, to_everyone: ExperimentSummary) -> list[list[str]]:
    least = total_bytes(to_random.selectors[0])  # of random choice
    pairs = zip(to_random.selectors, to_everyone.selectors, strict=True)
    return [
        [
            display_name(one.name),
            estimate_text(ACCURACY, one.estimates["mean_accuracy"]),
            paired_accuracy(other),
            paired_accuracy(one),
            _to_target(one),
            f"{total_bytes(one) / 1e6:.0f} MB",
            f"{total_bytes(one) / least:.2f}",
        ]
        for one, other in pairs
    ]


def _to_target(s: SelectorSummary) -> str:
    """Rounds to the target accuracy, and the paired difference to the baseline."""
    key = "rounds_to_target"
    text = estimate_text(METRIC[key], s.estimates[key])
    paired = s.differences.get(key)
    return text if paired is None else f"{text}, {difference_text(METRIC[key], paired.estimate)}"
