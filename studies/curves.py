"""The experiments that show accuracy over rounds: convergence, and the ablations of refit interval
and annealing coefficient."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedcor.reporting.plots import save_figure
from studies.comparison import times_chosen
from studies.drawing import draw_curves
from studies.figures import frequencies
from studies.plan import Plan
from studies.variants import PAPER_SELECTORS, RANDOM, Variant, preset_fedcor, run_variants

# Data set -> (refit interval Δt, annealing coefficient β): the paper's; for digits, ours.
INTERVALS = {
    "fmnist": [(10, 0.95), (20, 0.95), (500, 0.99)],
    "cifar10": [(50, 0.97), (100, 0.97), (2000, 0.999)],
    "digits": [(5, 0.95), (10, 0.95), (500, 0.99)],
}
BETAS = {"fmnist": (0.5, 0.75, 0.95), "cifar10": (0.9, 0.95, 0.97), "digits": (0.5, 0.75, 0.95)}


def convergence(plan: Plan) -> list[Path]:
    """Accuracy over rounds of the paper's four selectors."""
    return draw_curves(plan, "convergence", run_variants(plan, PAPER_SELECTORS))


def interval(plan: Plan) -> list[Path]:
    """How rarely may the process be refitted? Some intervals Δt, and random selection."""
    variants = [
        _fedcor_variant(plan, f"Δt = {dt}", interval=dt, beta=beta)
        for dt, beta in INTERVALS[plan.dataset]
    ]
    return draw_curves(plan, "interval", run_variants(plan, [*variants, RANDOM]))


def annealing(plan: Plan) -> list[Path]:
    """The annealing coefficient β: accuracy, and how evenly clients are chosen."""
    variants = [_fedcor_variant(plan, f"β = {beta}", beta=beta) for beta in BETAS[plan.dataset]]
    runs = run_variants(plan, [*variants, RANDOM])
    paths = draw_curves(plan, "annealing", runs)
    counts = {
        setting: {
            label: times_chosen(seed_runs).round(2).tolist()
            for label, seed_runs in by_label.items()
        }
        for setting, by_label in runs.items()
    }
    saved = plan.save("annealing-frequencies", {"times_chosen": counts})
    order = "clients ordered within each run by how often they were chosen, mean over seeds"
    figure = frequencies(counts, f"{plan.dataset}, {plan.seeds_text}; {order}")
    stem = plan.out / f"annealing-frequencies-{plan.dataset}"
    return [*paths, saved, *save_figure(figure, stem)]


def _fedcor_variant(plan: Plan, label: str, **options: float) -> Variant:
    """FedCor with `options`; where they are the preset's own, it shares the runs of Table 1."""
    preset = dataclasses.asdict(preset_fedcor(plan, plan.settings[0]))
    if all(preset[key] == value for key, value in options.items()):
        return Variant(label, "fedcor", "fedcor")
    folder = "-".join(["fedcor", *(f"{key}-{value}" for key, value in options.items())])
    return Variant(label, "fedcor", folder, options)
