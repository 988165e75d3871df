"""Accuracy over rounds (Figures 4 to 6): convergence, refit interval, annealing coefficient."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

from studies.figures import curve_result, frequencies
from studies.plan import Plan
from studies.runs import preset_fedcor
from studies.scaffold import (
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
from studies.summaries import times_chosen

# Data set -> (refit interval Δt, annealing coefficient β): the paper's; for digits, ours.
INTERVALS = {
    "fmnist": [(10, 0.95), (20, 0.95), (500, 0.99)],
    "cifar10": [(50, 0.97), (100, 0.97), (2000, 0.999)],
    "digits": [(5, 0.95), (10, 0.95), (500, 0.99)],
}
BETAS = {"fmnist": (0.5, 0.75, 0.95), "cifar10": (0.9, 0.95, 0.97), "digits": (0.5, 0.75, 0.95)}
ORDER = "clients ordered within each run by how often they were chosen, mean over seeds"


def _curves(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Accuracy over rounds of each variant."""
    yield curve_result(plan, runs)


def _curves_and_frequencies(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Accuracy over rounds, and how evenly clients are chosen."""
    yield curve_result(plan, runs)
    counts = {
        setting: {
            label: times_chosen(seed_runs).round(2).tolist()
            for label, seed_runs in by_label.items()
        }
        for setting, by_label in runs.items()
    }
    draw = partial(frequencies, counts, f"{plan.dataset}, {plan.seeds_text}; {ORDER}")
    yield Result({"times_chosen": counts}, draw=draw, name="annealing-frequencies")


def _intervals(plan: Plan, scenario: Scenario) -> Sequence[Variant]:
    """Some refit intervals Δt, and random selection."""
    variants = [
        fedcor_variant(plan, f"Δt = {dt}", interval=dt, beta=beta)
        for dt, beta in INTERVALS[plan.dataset]
    ]
    return [*variants, RANDOM]


def _betas(plan: Plan, scenario: Scenario) -> Sequence[Variant]:
    """Some annealing coefficients β, and random selection."""
    variants = [fedcor_variant(plan, f"β = {beta}", beta=beta) for beta in BETAS[plan.dataset]]
    return [*variants, RANDOM]


def fedcor_variant(plan: Plan, label: str, **options: float) -> Variant:
    """FedCor with `options`; where they are the preset's own, it shares the runs of Table 1."""
    preset = dataclasses.asdict(preset_fedcor(plan, plan.settings[0]))
    if all(preset[key] == value for key, value in options.items()):
        return Variant(label, "fedcor")
    folder = "-".join(["fedcor", *(f"{key}-{value}" for key, value in options.items())])
    return Variant(label, "fedcor", folder, options)


CONVERGENCE = Study(_curves, paper_scenarios, always(*PAPER_SELECTORS))
INTERVAL = Study(_curves, paper_scenarios, _intervals)
ANNEALING = Study(_curves_and_frequencies, paper_scenarios, _betas)
