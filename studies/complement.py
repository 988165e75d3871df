"""`complement` beside other selectors, its parts one at a time, and the same on held-out seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedcor.core.errors import ConfigError
from fedcor.reporting.metrics import Estimate, critical_t, mean_estimate
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary
from fedcor.reporting.tables import estimate_text
from studies.figures import curve_result, difference_draw
from studies.plan import Plan
from studies.runs import preset_fedcor
from studies.scaffold import (
    COMPLEMENT,
    FEDCOR,
    FULL,
    PAPER_SELECTORS,
    RANDOM,
    Result,
    Runs,
    Scenario,
    Study,
    Variant,
    always,
    paper_scenarios,
)
from studies.summaries import (
    ACCURACY,
    METRIC,
    accuracy_differences,
    difference_rows,
    mean_std,
    paired_accuracy,
    summarise_variants,
    summary_numbers,
    total_bytes,
)
from studies.tables import display_name, markdown

MAIN_THREE = (RANDOM, FEDCOR, COMPLEMENT)


def complement_variant(label: str, **options: Any) -> Variant:
    """Complement with some of its hyper-parameters changed."""
    folder = "-".join(["complement", *(f"{key}-{value}" for key, value in options.items())])
    return Variant(label, "complement", folder, options)


# --- beside other selectors -----------------------------------------------------------------------


def _every_selector(plan: Plan, scenario: Scenario) -> list[Variant]:
    """The paper's selectors, complement, and everyone training where that is affordable."""
    # A round in which everyone trains costs twenty others: CIFAR-10's would take days on a
    # processor.
    affordable = plan.dataset != "cifar10" or plan.device not in (None, "cpu")
    return [*PAPER_SELECTORS, COMPLEMENT, *([FULL] if affordable else [])]


def _on_fresh_seeds(plan: Plan) -> Plan:
    """The plan with the held-out seeds, which its own seeds must leave out."""
    if set(plan.seeds) & set(plan.fresh_seeds):
        kept = ", ".join(map(str, plan.fresh_seeds))
        allowed = f"seeds {kept} are kept for the confirmation: leave them out"
        raise ConfigError("seeds", list(plan.seeds), allowed)
    return dataclasses.replace(plan, seeds=plan.fresh_seeds)


def _table(plan: Plan, runs: Runs) -> Iterator[Result]:
    yield _compare(plan, runs, "beyond")


def _confirmation(plan: Plan, runs: Runs) -> Iterator[Result]:
    yield _compare(plan, runs, "")


TABLE = Study(_table, paper_scenarios, _every_selector)
CONFIRMATION = Study(_confirmation, paper_scenarios, always(*MAIN_THREE), adapt=_on_fresh_seeds)


def _compare(plan: Plan, runs: Runs, name: str) -> Result:
    """Accuracy, rounds, bytes, and the share of the gap between random choice and everyone
    training that is closed; paired with random choice and with FedCor."""
    to_random, to_fedcor = summarise_variants(runs, "random"), summarise_variants(runs, "fedcor")
    closed = {name: _gap_closed(summary) for name, summary in to_random.items()}
    tables = [
        _selector_table(plan, name, summary, to_fedcor[name], closed[name])
        for name, summary in to_random.items()
    ]
    extra = {
        "gap_closed": {
            name: {selector: asdict(share) for selector, share in shares.items()}
            for name, shares in closed.items()
        },
        "mean_accuracy_paired_to_fedcor": accuracy_differences(to_fedcor),
    }
    return curve_result(plan, runs, extra=extra, tables=tables, name=name)


def _selector_table(
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
        row += [share_text(closed[s.name]) if s.name in closed else "–"] if closed else []
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


def ratio_estimate(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """The mean of `parts` divided by the mean of `wholes`, paired by seed, with Fieller's interval.

    The interval contains every R for which the paired differences parts - R wholes do not differ
    significantly from zero. Where the wholes themselves do not, there is no ratio.
    """
    d, g = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    n = len(d)
    if n == 0 or g.mean() == 0:
        return Estimate(None, None, None, None, 0, n)
    ratio = float(d.mean() / g.mean())
    if n == 1:
        return Estimate(ratio, None, None, None, n, n)
    # The ends of the interval are the roots of a R^2 - 2 b R + c.
    q = critical_t(n) ** 2 / n
    spread = np.cov(d, g)
    a = float(g.mean() ** 2 - q * spread[1, 1])
    b = float(d.mean() * g.mean() - q * spread[0, 1])
    c = float(d.mean() ** 2 - q * spread[0, 0])
    if a <= 0:
        return Estimate(None, None, None, None, 0, n)
    root = max(b * b - a * c, 0.0) ** 0.5
    return Estimate(ratio, None, (b - root) / a, (b + root) / a, n, n)


def share_text(share: Estimate) -> str:
    """`92% [88%, 98%]`; N/A without a ratio."""
    if share.mean is None:
        return "N/A"
    if share.low is None or share.high is None:
        return _percent(share.mean)
    return f"{_percent(share.mean)} [{_percent(share.low)}, {_percent(share.high)}]"


def _percent(share: float) -> str:
    return f"{round(share, 2) + 0.0:.0%}"  # + 0.0: no minus before a zero


# --- its parts ------------------------------------------------------------------------------------


def _greedy(label: str, **options: Any) -> Variant:
    """Without the swaps, which would hide what the greedy choice depends on."""
    return complement_variant(label, swaps=0, **options)


def _relative(label: str, name: str, **options: Any) -> Variant:
    return Variant(label, f"studies.relatives:{name}", name.lower(), options)


GREEDY = _greedy("without swaps")


def _parts(plan: Plan, scenario: Scenario) -> list[Variant]:
    """The greedy choice alone; with swaps, as by default; with one other thing changed; and
    relatives, which differ in more."""
    # Those that share hyper-parameters with FedCor take the data set's.
    fedcor = dataclasses.asdict(preset_fedcor(plan, plan.settings[0]))
    annealing = {key: fedcor[key] for key in ("beta", "interval")}
    process = {
        key: value for key, value in fedcor.items() if key not in ("beta", "clients_per_round")
    }
    return [
        GREEDY,
        COMPLEMENT,
        _greedy("start: longest unseen", start="oldest"),
        _greedy("sketch: 8 numbers", sketch=8),
        _greedy("sketch: 16 numbers", sketch=16),
        _greedy("sketch: 64 numbers", sketch=64),
        _greedy("sketch: whole update", sketch="full"),
        _greedy("directions of length one", normalised=True),
        _greedy("ageing .98 a round", ageing=0.98),
        _greedy("ageing .9 a round", ageing=0.9),
        _relative("target: plain mean", "EqualTarget", swaps=0),
        _relative("herding over rounds", "Herding", swaps=0),
        _relative("posterior on the updates", "UpdateProcess", swaps=0, **annealing),
        _relative("with FedCor's process", "Combined", **process),
    ]


def _ablation(plan: Plan, runs: Runs) -> Iterator[Result]:
    """One thing changed at a time, and relatives, paired with the greedy choice alone."""
    summaries = summarise_variants(runs, GREEDY.label)
    head = ["", *(f"{name.upper()}, − without swaps" for name in summaries), "bytes / complement's"]
    title = f"{plan.dataset}, mean accuracy, {plan.seeds_text}"
    table = markdown(title, head, difference_rows(summaries, GREEDY.label))
    draw = difference_draw(plan, summaries, "the greedy choice")
    yield Result({"summary": summary_numbers(summaries)}, [table], draw)


ABLATION = Study(_ablation, paper_scenarios, _parts)
