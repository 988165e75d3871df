"""Table 1 of the paper: rounds to the target accuracy, and steadier numbers beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcor.reporting.estimates import Estimate
from fedcor.reporting.metrics import METRICS
from fedcor.reporting.summary import summarise
from fedcor.reporting.tables import difference_text, display_name, estimate_text, markdown
from studies.comparison import mean_std
from studies.paper import TABLE_1
from studies.plan import Plan
from studies.variants import PAPER_SELECTORS, run_variants

HEAD = [
    "",
    "paper: rounds",
    "rounds (mean ± std)",
    "ten-round mean",
    "mean accuracy",
    "bytes to target",
    "− Pow-d, mean accuracy",
    "− Rand, mean accuracy",
]


def table1(plan: Plan) -> list[Path]:
    """Rounds to the target accuracy of the paper's four selectors, beside the paper's numbers."""
    numbers: dict[str, Any] = {}
    for setting, by_selector in run_variants(plan, PAPER_SELECTORS).items():
        runs = [run for seed_runs in by_selector.values() for run in seed_runs]
        to_random, to_pow_d = (
            summarise(runs, baseline).experiments[0] for baseline in ("random", "power_of_choice")
        )
        numbers[setting] = {"target": to_random.target, "selectors": {}}
        for one, other in zip(to_random.selectors, to_pow_d.selectors, strict=True):
            metrics = list(one.estimates)
            numbers[setting]["selectors"][one.name] = {
                "paper": TABLE_1.get(plan.dataset, {}).get(setting, {}).get(one.name),
                "rounds_done": [run.rounds_done for run in one.runs],
                "values": {key: [run.values[key] for run in one.runs] for key in metrics},
                "estimates": {key: asdict(estimate) for key, estimate in one.estimates.items()},
                "paired": {
                    "random": {key: asdict(d.estimate) for key, d in one.differences.items()},
                    "power_of_choice": {
                        key: asdict(d.estimate) for key, d in other.differences.items()
                    },
                },
            }
    tables = [_table(plan, setting, content) for setting, content in numbers.items()]
    return [plan.save("table1", {"settings": numbers}), plan.save_page("table1", tables)]


def _table(plan: Plan, setting: str, content: Mapping[str, Any]) -> str:
    """One setting's table; the paper's number stands beside ours."""
    selectors = content["selectors"]
    done = sorted({rounds for numbers in selectors.values() for rounds in numbers["rounds_done"]})
    span = "–".join(map(str, dict.fromkeys((done[0], done[-1]))))
    title = f"{plan.dataset} {setting.upper()}, target {content['target']:.0%}"
    rows = [_row(name, numbers) for name, numbers in selectors.items()]
    return markdown(f"{title}, {plan.seeds_text}, {span} rounds", HEAD, rows)


def _row(name: str, numbers: Mapping[str, Any]) -> list[str]:
    metric = {m.key: m for m in METRICS}
    estimates = {key: Estimate(**values) for key, values in numbers["estimates"].items()}
    cells = [display_name(name), numbers["paper"] or "–"]
    cells += [mean_std(estimates[key]) for key in ("rounds_to_target", "smooth_rounds_to_target")]
    cells += [
        estimate_text(metric[key], estimates[key]) for key in ("mean_accuracy", "bytes_to_target")
    ]
    for baseline in ("power_of_choice", "random"):
        paired = numbers["paired"][baseline].get("mean_accuracy")
        if paired and name != baseline:
            cells.append(difference_text(metric["mean_accuracy"], Estimate(**paired)))
        else:
            cells.append("–")
    return cells
