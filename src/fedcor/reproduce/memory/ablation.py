"""Which parts of the pair matter, and whether it holds for other learning rates and local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fedcor.report.text import markdown
from fedcor.reproduce.beyond.shared import difference_rows, draw_differences
from fedcor.reproduce.comparison import summarise_variants
from fedcor.reproduce.memory.runs import OURS, RANDOM, Pair, run_pairs
from fedcor.reproduce.memory.scenarios import DIGITS, FMNIST, TABLES, MemoryScenario
from fedcor.reproduce.plan import Plan

__all__ = ["ablation", "stress"]

_FIXED = {"adaptation": 0.0, "rate": 1.0}
PARTS = [
    RANDOM,
    OURS,
    Pair("aligned + FedAvg", "aligned"),
    Pair("aligned + FedVARP", "aligned", "fedvarp"),
    Pair("complement + FedRecall", "complement", "fedrecall"),
    Pair("round-robin + FedRecall", "round_robin", "fedrecall"),
    Pair("random + FedRecall", "random", "fedrecall"),
    Pair("ours, rate always 1", "aligned", "fedrecall", _FIXED),
    Pair("ours, rate 1, gain 1", "aligned", "fedrecall", {**_FIXED, "gain": 1.0}),
    Pair("ours, rate starts at 1", "aligned", "fedrecall", {"rate": 1.0}),
    Pair("ours, rate always 2", "aligned", "fedrecall", {"adaptation": 0.0}),
    Pair("random, server rate 2", "random", "fedavgm", {"momentum": 0.0, "learning_rate": 2.0}),
    Pair("random, server momentum .5", "random", "fedavgm", {"momentum": 0.5}),
]
RIVALS = [
    RANDOM,
    OURS,
    Pair("complement", "complement"),
    Pair("round-robin + FedVARP", "round_robin", "fedvarp"),
]


def ablation(plan: Plan) -> list[Path]:
    """The pair with one part changed, on the paper's settings, the digits and the tables."""
    main = (
        [scenario for scenario in FMNIST if scenario.everyone] if plan.dataset != "digits" else []
    )
    return _compared(plan, "memory-ablation", PARTS, [*main, *DIGITS, *TABLES])


def stress(plan: Plan) -> list[Path]:
    """Learning rates of 4 and 16 times the preset's; one local step, and fifty."""
    few = [*DIGITS, TABLES[0]]
    changes = {"rate × 4": 4.0, "rate × 16": 16.0}
    scenarios = [_with_rate(one, title, by) for title, by in changes.items() for one in few]
    scenarios += [_with_steps(one, steps) for steps in (1, 50) for one in few]
    return _compared(plan, "memory-stress", RIVALS, scenarios)


def _compared(
    plan: Plan, what: str, pairs: Sequence[Pair], scenarios: Sequence[MemoryScenario]
) -> list[Path]:
    summaries = summarise_variants(run_pairs(plan, pairs, scenarios), RANDOM.label)
    titles = {scenario.name: scenario.title for scenario in scenarios}
    heads = ["", *(titles[name] for name in summaries), "bytes / random's"]
    table = markdown(
        f"mean accuracy, − random, {plan.seeds_text}",
        heads,
        difference_rows(summaries, RANDOM.label),
    )
    return [
        *draw_differences(plan, what, summaries, "random", titles),
        plan.save_page(what, [table]),
    ]


def _with_rate(scenario: MemoryScenario, title: str, factor: float) -> MemoryScenario:
    def build(changes: list[str]):  # type: ignore[no-untyped-def]
        made = scenario.build(changes)
        return dataclasses.replace(made, learning_rate=made.learning_rate * factor)

    return dataclasses.replace(
        scenario,
        name=f"{scenario.name}-rate-{factor:g}",
        title=f"{scenario.title}, {title}",
        build=build,
    )


def _with_steps(scenario: MemoryScenario, steps: int) -> MemoryScenario:
    def build(changes: list[str]):  # type: ignore[no-untyped-def]
        return dataclasses.replace(scenario.build(changes), local_steps=steps)

    return dataclasses.replace(
        scenario,
        name=f"{scenario.name}-steps-{steps}",
        title=f"{scenario.title}, {steps} local step{'s' if steps > 1 else ''}",
        build=build,
    )
