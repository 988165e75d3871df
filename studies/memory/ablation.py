"""Which parts of the pair matter, and whether it holds for other learning rates and local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcor.reporting.tables import markdown
from fedcor.simulation.experiment import Experiment
from studies.memory.goals import accuracy_text, paired_text
from studies.memory.runs import OURS, RANDOM, Pair, rounds_of, run_pairs
from studies.memory.scenarios import DIGITS, FMNIST, TABLES, MemoryScenario
from studies.memory.values import ACCURACIES, Comparison, compare
from studies.plan import Plan

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
    Pair("ours, rate always 1, gain 1", "aligned", "fedrecall", {**_FIXED, "gain": 1.0}),
    Pair("ours, rate starts at 1", "aligned", "fedrecall", {"rate": 1.0}),
    Pair("ours, rate always 2", "aligned", "fedrecall", {"adaptation": 0.0}),
    Pair("random, server rate 2", "random", "fedavgm", {"momentum": 0.0, "learning_rate": 2.0}),
    Pair("random, server momentum .5", "random", "fedavgm", {"momentum": 0.5}),
]
STRESSED = [
    RANDOM,
    OURS,
    Pair("complement", "complement"),
    Pair("round-robin + FedVARP", "round_robin", "fedvarp"),
]


def ablation(plan: Plan) -> list[Path]:
    """The pair with one part changed, on the paper's settings, the digits and the tables."""
    main = [scenario for scenario in FMNIST if scenario.everyone]
    scenarios = [*DIGITS, *TABLES] if plan.dataset == "digits" else [*main, *DIGITS, *TABLES]
    return _compare(plan, "memory-ablation", PARTS, scenarios)


def stress(plan: Plan) -> list[Path]:
    """Learning rates of 4 and 16 times the preset's; one local step, and fifty."""
    few = [*DIGITS, TABLES[0]]
    scenarios = [_with_rate(one, factor) for factor in (4, 16) for one in few]
    scenarios += [_with_steps(one, steps) for steps in (1, 50) for one in few]
    return _compare(plan, "memory-stress", STRESSED, scenarios)


def _compare(
    plan: Plan, what: str, pairs: Sequence[Pair], scenarios: Sequence[MemoryScenario]
) -> list[Path]:
    runs = run_pairs(plan, pairs, scenarios)
    comparisons = [compare(s, rounds_of(plan, s), runs[s.name]) for s in scenarios]
    numbers = {
        "plan": {**plan.describe(), "settings": [c.name for c in comparisons]},
        "scenarios": {c.name: c.numbers() for c in comparisons},
    }
    labels = [pair.label for pair in pairs]
    if len(labels) < len(comparisons):  # the shorter list becomes the columns
        rows = [[c.title, *(_cell(c, label) for label in labels)] for c in comparisons]
        head = ["", *labels]
    else:
        rows = [[label, *(_cell(c, label) for c in comparisons)] for label in labels]
        head = ["", *(c.title for c in comparisons)]
    title = f"{plan.seeds_text}: mean accuracy (last tenth of the rounds), − random"
    return [plan.save(what, numbers), plan.save_page(what, [markdown(title, head, rows)])]


def _cell(comparison: Comparison, label: str) -> str:
    """Random's accuracy; of the others, the difference to it."""
    if label == RANDOM.label:
        means = (comparison.estimate(label, key).mean for key in ACCURACIES)
        mean, last = (accuracy_text(value or 0.0) for value in means)
        return f"{mean} ({last})"
    first, then = (comparison.difference(label, RANDOM.label, key) for key in ACCURACIES)
    return f"{paired_text(first)} ({paired_text(then, False)})"


def _with_rate(scenario: MemoryScenario, factor: int) -> MemoryScenario:
    def change(made: Experiment) -> dict[str, Any]:
        assert isinstance(made.learning_rate, float)
        return {"learning_rate": made.learning_rate * factor}

    return _changed(scenario, f"rate-{factor}", f"learning rate × {factor}", change)


def _with_steps(scenario: MemoryScenario, steps: int) -> MemoryScenario:
    title = f"{steps} local step{'s' if steps > 1 else ''}"
    return _changed(scenario, f"steps-{steps}", title, lambda _: {"local_steps": steps})


def _changed(scenario: MemoryScenario, name: str, title: str, change: Any) -> MemoryScenario:
    def build() -> Experiment:
        made = scenario.build()
        return dataclasses.replace(made, **change(made))

    return dataclasses.replace(
        scenario,
        name=f"{scenario.name}-{name}",
        title=f"{scenario.title}, {title}",
        build=build,
    )
