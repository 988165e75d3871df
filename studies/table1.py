"""Table 1 of the paper: rounds to the target accuracy, and steadier numbers beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fedcor.reporting.metrics import Estimate
from fedcor.reporting.tables import difference_text, estimate_text
from studies.plan import Plan
from studies.scaffold import PAPER_SELECTORS, Result, Runs, Study, always, paper_scenarios
from studies.summaries import METRIC, mean_std, summarise_variants
from studies.tables import display_name, markdown

# The paper's numbers: rounds to target, mean ± standard deviation over five seeds.
_ROWS = {
    "fmnist": {
        "2spc": ("295.8 ± 92.0", "218.6 ± 117.3", "126.6 ± 78.2", "94.8 ± 18.4"),
        "1spc": ("N/A", "N/A", "167.2 ± 72.3", "84.0 ± 53.1"),
        "dir": ("141.0 ± 73.0", "169.0 ± 166.1", "123.0 ± 101.0", "68.8 ± 27.5"),
    },
    "cifar10": {
        "2spc": ("1561.2 ± 236.2", "N/A", "1558.2 ± 227.0", "1033.4 ± 123.7"),
        "1spc": ("1750.4 ± 190.3", "1845.2 ± 28.8", "1752.2 ± 186.2", "1269.2 ± 70.6"),
        "dir": ("N/A", "1524.4 ± 267.9", "1355.2 ± 151.3", "1076.8 ± 262.8"),
    },
}
PAPER = {
    dataset: {
        setting: {variant.label: cell for variant, cell in zip(PAPER_SELECTORS, row, strict=True)}
        for setting, row in rows.items()
    }
    for dataset, rows in _ROWS.items()
}
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


def _evaluate(plan: Plan, runs: Runs) -> Iterator[Result]:
    """The paper's four selectors, beside the paper's numbers."""
    to_random = summarise_variants(runs, "random")
    to_pow_d = summarise_variants(runs, "power_of_choice")
    numbers: dict[str, Any] = {}
    for setting, summary in to_random.items():
        numbers[setting] = {"target": summary.target, "selectors": {}}
        for s, other in zip(summary.selectors, to_pow_d[setting].selectors, strict=True):
            paired = {"random": s.differences, "power_of_choice": other.differences}
            numbers[setting]["selectors"][s.name] = {
                "paper": PAPER.get(plan.dataset, {}).get(setting, {}).get(s.name),
                "rounds_done": [run.rounds_done for run in s.runs],
                "values": {key: [run.values[key] for run in s.runs] for key in s.estimates},
                "estimates": {key: asdict(estimate) for key, estimate in s.estimates.items()},
                "paired": {
                    baseline: {key: asdict(d.estimate) for key, d in differences.items()}
                    for baseline, differences in paired.items()
                },
            }
    tables = [_table(plan, setting, content) for setting, content in numbers.items()]
    yield Result({"settings": numbers}, tables)


STUDY = Study(_evaluate, paper_scenarios, always(*PAPER_SELECTORS))


def _table(plan: Plan, setting: str, content: Mapping[str, Any]) -> str:
    """One setting's table, with the paper's number beside ours."""
    selectors = content["selectors"]
    done = sorted({rounds for numbers in selectors.values() for rounds in numbers["rounds_done"]})
    span = "–".join(map(str, dict.fromkeys((done[0], done[-1]))))
    title = f"{plan.dataset} {setting.upper()}, target {content['target']:.0%}"
    rows = [_row(name, numbers) for name, numbers in selectors.items()]
    return markdown(f"{title}, {plan.seeds_text}, {span} rounds", HEAD, rows)


def _row(name: str, numbers: Mapping[str, Any]) -> list[str]:
    estimates = {key: Estimate(**values) for key, values in numbers["estimates"].items()}
    cells = [display_name(name), numbers["paper"] or "–"]
    cells += [mean_std(estimates[key]) for key in ("rounds_to_target", "smooth_rounds_to_target")]
    cells += [
        estimate_text(METRIC[key], estimates[key]) for key in ("mean_accuracy", "bytes_to_target")
    ]
    for baseline in ("power_of_choice", "random"):
        paired = numbers["paired"][baseline].get("mean_accuracy")
        if paired and name != baseline:
            cells.append(difference_text(METRIC["mean_accuracy"], Estimate(**paired)))
        else:
            cells.append("–")
    return cells
