"""Which parts of `aligned` with FedRecall matter, and how it holds up under other training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from studies.memory_comparison import ACCURACIES, Comparison, compare
from studies.memory_goals import accuracy_text, paired_text
from studies.memory_scenarios import DIGITS, EVERYONE_SCENARIOS, FMNIST, OURS, RANDOM, TABLES, pair
from studies.plan import Plan
from studies.runs import build_experiment
from studies.scaffold import Result, Runs, Scenario, Study, always
from studies.tables import markdown

PARTS = [
    RANDOM,
    OURS,
    pair("aligned + FedAvg", "aligned"),
    pair("aligned + FedVARP", "aligned", "fedvarp"),
    pair("complement + FedRecall", "complement", "fedrecall"),
    pair("round-robin + FedRecall", "round_robin", "fedrecall"),
    pair("random + FedRecall", "random", "fedrecall"),
    pair("ours, rate always 1", "aligned", "fedrecall", adaptation=0.0, rate=1.0),
    pair("ours, rate always 1, gain 1", "aligned", "fedrecall", adaptation=0.0, rate=1.0, gain=1.0),
    pair("ours, rate starts at 1", "aligned", "fedrecall", rate=1.0),
    pair("ours, rate always 2", "aligned", "fedrecall", adaptation=0.0),
    pair("random, server rate 2", "random", "fedavgm", momentum=0.0, learning_rate=2.0),
    pair("random, server momentum .5", "random", "fedavgm", momentum=0.5),
]
STRESSED = [
    RANDOM,
    OURS,
    pair("complement", "complement"),
    pair("round-robin + FedVARP", "round_robin", "fedvarp"),
]


def _few(plan: Plan) -> list[Scenario]:
    """The paper's settings, the digits and the generated data; the fast ones for the digits."""
    main = [scenario for scenario in FMNIST if scenario.name in EVERYONE_SCENARIOS]
    return [*DIGITS, *TABLES] if plan.dataset == "digits" else [*main, *DIGITS, *TABLES]


def _stressed(plan: Plan) -> list[Scenario]:
    """Learning rates of 4 and 16 times the preset's; one local step, and fifty."""
    few = [*DIGITS, TABLES[0]]
    scenarios = []
    for factor in (4, 16):
        for scenario in few:
            rate = build_experiment(plan, scenario, RANDOM).learning_rate
            assert isinstance(rate, float)
            title = f"learning rate × {factor}"
            change = {"learning_rate": rate * factor}
            scenarios.append(_changed(scenario, f"rate-{factor}", title, change))
    for steps in (1, 50):
        title = f"{steps} local step{'s' if steps > 1 else ''}"
        scenarios += [_changed(s, f"steps-{steps}", title, {"local_steps": steps}) for s in few]
    return scenarios


def _changed(scenario: Scenario, name: str, title: str, change: dict[str, float]) -> Scenario:
    return dataclasses.replace(
        scenario,
        name=f"{scenario.name}-{name}",
        title=f"{scenario.title}, {title}",
        keywords={**scenario.keywords, **change},
    )


def _evaluate_parts(plan: Plan, runs: Runs) -> Iterator[Result]:
    yield _compare(plan, runs, _few(plan))


def _evaluate_stress(plan: Plan, runs: Runs) -> Iterator[Result]:
    yield _compare(plan, runs, _stressed(plan))


ABLATION = Study(_evaluate_parts, _few, always(*PARTS))
STRESS = Study(_evaluate_stress, _stressed, always(*STRESSED))


def _compare(plan: Plan, runs: Runs, scenarios: Sequence[Scenario]) -> Result:
    """A table of all pairs in all scenarios; the shorter list becomes the columns."""
    comparisons = [compare(scenario, runs[scenario.name]) for scenario in scenarios]
    labels = list(next(iter(runs.values())))
    if len(labels) < len(comparisons):
        rows = [[c.title, *(_cell(c, label) for label in labels)] for c in comparisons]
        head = ["", *labels]
    else:
        rows = [[label, *(_cell(c, label) for c in comparisons)] for label in labels]
        head = ["", *(c.title for c in comparisons)]
    title = f"{plan.seeds_text}: mean accuracy (last tenth of the rounds), − random"
    numbers = {"scenarios": {c.name: c.numbers() for c in comparisons}}
    return Result(numbers, [markdown(title, head, rows)])


def _cell(comparison: Comparison, label: str) -> str:
    """Random's accuracy; for the other pairs, the difference from it."""
    if label == RANDOM.label:
        means = (comparison.estimate(label, key).mean for key in ACCURACIES)
        mean, last = (accuracy_text(value or 0.0) for value in means)
        return f"{mean} ({last})"
    first, then = (comparison.difference(label, RANDOM.label, key) for key in ACCURACIES)
    return f"{paired_text(first)} ({paired_text(then, False)})"
