"""Which parts of complement matter: one thing changed at a time, and relatives of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fedcor.reporting.tables import markdown
from studies.beyond.shared import complement_variant, difference_rows, draw_differences
from studies.comparison import summarise_variants
from studies.plan import Plan
from studies.variants import COMPLEMENT, Variant, preset_fedcor, run_variants


def ablation(plan: Plan) -> list[Path]:
    """One thing changed at a time, and relatives, paired with the greedy choice alone."""
    summaries = summarise_variants(run_variants(plan, _variants(plan)), GREEDY.label)
    head = ["", *(f"{name.upper()}, − without swaps" for name in summaries), "bytes / complement's"]
    title = f"{plan.dataset}, mean accuracy, {plan.seeds_text}"
    page = markdown(title, head, difference_rows(summaries, GREEDY.label))
    return [
        *draw_differences(plan, "beyond-ablation", summaries, "the greedy choice"),
        plan.save_page("beyond-ablation", [page]),
    ]


def _greedy(label: str, **options: Any) -> Variant:
    """Without the swaps, which would hide what the greedy choice depends on."""
    return complement_variant(label, swaps=0, **options)


def _relative(label: str, name: str, **options: Any) -> Variant:
    return Variant(label, f"studies.relatives:{name}", name.lower(), options)


GREEDY = _greedy("without swaps")


def _variants(plan: Plan) -> list[Variant]:
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
