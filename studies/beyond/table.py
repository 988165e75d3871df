"""Every selector beside complement, and everyone training; and the same on fresh seeds."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path

from fedcor.reporting.estimates import Estimate, mean_estimate, ratio_estimate
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary
from fedcor.reporting.tables import display_name, estimate_text, markdown
from studies.beyond.shared import (
    ACCURACY,
    MAIN_THREE,
    METRIC,
    accuracy_differences,
    paired_accuracy,
    total_bytes,
)
from studies.comparison import mean_std, summarise_variants
from studies.drawing import draw_curves
from studies.plan import Plan
from studies.variants import COMPLEMENT, FULL, PAPER_SELECTORS, Runs, run_variants


def table(plan: Plan) -> list[Path]:
    """Every selector, and everyone training: accuracy, rounds, bytes, and the share of the gap
    between random choice and everyone training that is closed."""
    # A round in which everyone trains costs twenty others: for CIFAR-10's network, all of them
    # would take days on a processor.
    affordable = plan.dataset != "cifar10" or plan.device not in (None, "cpu")
    variants = [*PAPER_SELECTORS, COMPLEMENT, *([FULL] if affordable else [])]
    return _compare(plan, "beyond", run_variants(plan, variants))


def confirmation(plan: Plan) -> list[Path]:
    """Random, FedCor and complement on seeds that no default was chosen on."""
    plan.check_fresh_seeds()
    fresh = dataclasses.replace(plan, seeds=plan.fresh_seeds)
    return _compare(fresh, "beyond-confirmation", run_variants(fresh, MAIN_THREE))


def _compare(plan: Plan, what: str, runs: Runs) -> list[Path]:
    """Curves and tables, paired with random choice and with FedCor."""
    to_random, to_fedcor = summarise_variants(runs, "random"), summarise_variants(runs, "fedcor")
    closed = {name: _gap_closed(summary) for name, summary in to_random.items()}
    tables = [
        _table(plan, name, summary, to_fedcor[name], closed[name])
        for name, summary in to_random.items()
    ]
    extra = {
        "gap_closed": {
            name: {selector: asdict(share) for selector, share in shares.items()}
            for name, shares in closed.items()
        },
        "mean_accuracy_paired_to_fedcor": accuracy_differences(to_fedcor),
    }
    return [*draw_curves(plan, what, runs, extra), plan.save_page(what, tables)]


def _table(
    plan: Plan,
    setting: str,
    to_random: ExperimentSummary,
    to_fedcor: ExperimentSummary,
    closed: dict[str, Estimate],
) -> str:
    gap = ["of the gap to everyone"] if closed else []
    head = ["", "mean accuracy", "− Rand", "− FedCor", *gap, "rounds to target", "ten-round mean"]
    head += ["bytes to target", "bytes in all", "spread of the last 50"]
    rows = []
    for s, other in zip(to_random.selectors, to_fedcor.selectors, strict=True):
        row = [display_name(s.name), estimate_text(ACCURACY, s.estimates["mean_accuracy"])]
        row += [paired_accuracy(s), paired_accuracy(other)]
        row += [_share_text(closed[s.name]) if s.name in closed else "–"] if closed else []
        rows.append([*row, *_cost_cells(s)])
    done = to_random.selectors[0].runs[0].rounds_done
    title = f"{plan.dataset} {setting.upper()}, {plan.seeds_text}, {done} rounds"
    return markdown(title, head, rows)


def _cost_cells(s: SelectorSummary) -> list[str]:
    """Rounds and bytes to the target, all bytes, and the spread of the last rounds."""
    spread = s.estimates["spread"].mean
    return [
        mean_std(s.estimates["rounds_to_target"]),
        mean_std(s.estimates["smooth_rounds_to_target"]),
        estimate_text(METRIC["bytes_to_target"], s.estimates["bytes_to_target"]),
        estimate_text(METRIC["bytes_down"], mean_estimate([total_bytes(s)])),
        "–" if spread is None else f"{spread:.3f}",
    ]


def _gap_closed(summary: ExperimentSummary) -> dict[str, Estimate]:
    """How far each selector gets from random choice (0) to everyone training (1); empty where not
    everyone trained."""
    accuracy = {
        s.name: {run.seed: run.values["mean_accuracy"] or 0.0 for run in s.runs}
        for s in summary.selectors
    }
    if "full" not in accuracy:
        return {}
    random, full = accuracy["random"], accuracy["full"]
    return {
        name: ratio_estimate(
            [values[seed] - random[seed] for seed in values],
            [full[seed] - random[seed] for seed in values],
        )
        for name, values in accuracy.items()
        if name not in ("random", "full")
    }


def _share_text(share: Estimate) -> str:
    """`92% [88%, 98%]`; N/A without a ratio."""
    if share.mean is None:
        return "N/A"
    if share.low is None or share.high is None:
        return _percent(share.mean)
    return f"{_percent(share.mean)} [{_percent(share.low)}, {_percent(share.high)}]"


def _percent(share: float) -> str:
    return f"{round(share, 2) + 0.0:.0%}"  # + 0.0: no minus before a zero
