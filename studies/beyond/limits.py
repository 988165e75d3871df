"""Where complement may fail: six scenarios, compared with random choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.rng import stream
from fedcor.data.partition import noisy_clients
from fedcor.reporting.tables import markdown
from fedcor.runs.record import RunRecord
from fedcor.simulation.build import LABEL_NOISE
from studies.beyond.shared import (
    MAIN_THREE,
    accuracy_differences,
    complement_variant,
    difference_rows,
    draw_differences,
    paired_accuracy,
)
from studies.comparison import chosen_clients, summarise_variants
from studies.plan import Plan, Scenario
from studies.variants import COMPLEMENT, run_variants

# With many clients, the sweep over all who never trained takes many rounds.
EXPLORING = [
    complement_variant("sweep mixed in", sweep=0.5),
    complement_variant("sweep and oldest mixed in", sweep=0.5, explore=0.2),
]


def limits(plan: Plan) -> list[Path]:
    """Six scenarios, paired with random choice; the same whatever settings the plan names."""
    few, many = _scenarios(plan)
    scenarios = [*few, many]
    runs = {
        **run_variants(plan, MAIN_THREE, few),
        **run_variants(plan, [*MAIN_THREE, *EXPLORING], [many]),
    }
    to_random = summarise_variants(runs, "random")
    to_complement = summarise_variants(runs, COMPLEMENT.label)
    tables = []
    extra: dict[str, Any] = {"scenarios": {s.name: [s.setting, *s.changes] for s in scenarios}}
    for scenario in scenarios:
        name, head = scenario.name, ["", "mean accuracy, − Rand", "− complement", "bytes / Rand's"]
        rows = difference_rows({name: to_random[name]}, "random")
        for row, s in zip(rows, to_complement[name].selectors, strict=True):
            row.insert(2, paired_accuracy(s))
        share = plan.experiment(scenario).noisy_clients
        if share:
            picks = {
                label: _noisy_share(seed_runs, share) for label, seed_runs in runs[name].items()
            }
            extra["picks_of_noisy_clients"] = picks
            head.append("picks of noisy clients")
            for row, picked in zip(rows, picks.values(), strict=True):
                row.append(f"{picked:.1%}")
        title = f"{plan.dataset}, {scenario.title}, {plan.seeds_text}"
        tables.append(markdown(title, head, rows))
    extra["mean_accuracy_paired_to_complement"] = accuracy_differences(to_complement)
    titles = {scenario.name: scenario.title for scenario in scenarios}
    return [
        *draw_differences(plan, "beyond-limits", to_random, "Rand", titles, extra),
        plan.save_page("beyond-limits", tables),
    ]


def _scenarios(plan: Plan) -> tuple[list[Scenario], Scenario]:
    """Five scenarios with as many clients as in the paper, and one with many more."""
    many = 100 if plan.dataset == "digits" else 1000
    unreliable = ("faults.availability=0.5", "faults.dropout=0.3")
    crowd = (f"partition.clients={many}", "training.clients_per_round=10")
    few = [
        Scenario("iid", "2spc", ("partition.kind=iid",), "iid"),
        Scenario("unequal", "2spc", ("partition.size_skew=1.5",), "very unequal sizes"),
        Scenario("weighted", "dir", ("optimiser.weighted=true",), "Dir, mean weighted by data"),
        Scenario("noise", "2spc", ("data.noisy_clients=0.3333",), "a third with random labels"),
        Scenario("dropouts", "2spc", unreliable, "half away, 30 % of the chosen die"),
    ]
    return few, Scenario("many", "2spc", crowd, f"{many} clients, 10 a round")


def _noisy_share(runs: Sequence[RunRecord], share: float) -> float:
    """The share of all picks that went to clients with random labels, who are `share` of all."""
    hits = picks = 0
    for run in runs:
        clients = run.header["config"]["partition"]["clients"]
        noisy = noisy_clients(clients, share, stream(run.header["seed"], LABEL_NOISE))
        chosen = chosen_clients(run)
        hits, picks = hits + int(np.isin(chosen, noisy).sum()), picks + len(chosen)
    return hits / max(picks, 1)
