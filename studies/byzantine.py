"""What Byzantine clients do to each selector, what the defence does about it, and what it costs.

`STUDY` runs every selector under every attack, with and without the defence. `MEANS` compares
robust means of the updates: the selector is random there, so that nothing but the aggregation
differs and no Byzantine client can get itself chosen.

Accuracies are means over all rounds. Differences are paired over seeds: runs of a seed have the
same data, the same Byzantine clients and the same first model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from fedcor.reporting.metrics import Estimate, mean_estimate
from fedcor.reporting.notes import byzantine_share
from fedcor.rounds.defence.settings import Defence
from fedcor.runs.record import RunRecord
from fedcor.simulation.byzantine import Byzantine
from studies.plan import Plan
from studies.scaffold import Result, Runs, Scenario, Study, Variant
from studies.tables import display_name, markdown

FRACTION = 0.1  # share of the clients that are Byzantine
NOBODY, OFF, ON = "nobody", "off", "on"
ATTACKS: dict[str, Byzantine] = {
    NOBODY: Byzantine(),
    **{kind: Byzantine(FRACTION, kind) for kind in ("flip", "scale", "copy", "inflate", "deflate")},
}
# Chosen on the digits, seeds 1-3 (docs/results/byzantine.md).
DEFENCES: dict[str, Defence] = {
    OFF: Defence(),
    ON: Defence(clip_norms=2.0, clip_reports=2.0, most_share=1.25),
}
RANDOM = "random"
# Each with the optimiser that it goes with: FedRecall for aligned, FedAvg for the others.
SELECTORS = (RANDOM, "afl", "power_of_choice", "fedcor", "complement", "aligned")
DIGITS = "digits"
# Where the price of the defence is measured -> its name in the table.
PRICED = {"fmnist-2spc": "FMNIST, two shards", "fmnist-1spc": "FMNIST, one shard"}
PRICE_ROUNDS = 200
MOST_FAIR, MOST_PRICE = 1.5, 0.005  # the goals
MEAN = "fedavg"
MEAN_NAMES = {
    MEAN: "mean",
    "trimmed_mean": "trimmed mean",
    "geometric_median": "geometric median",
    "multi_krum": "Multi-Krum",
}
UPDATE_ATTACKS = (NOBODY, "flip", "scale", "copy")  # the other attacks change losses alone


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what runs on every seed.

    Attributes:
        data: Name of a preset.
        attack: A key of `ATTACKS`.
        defence: A key of `DEFENCES`.
        selector: Registered name.
        optimiser: Registered name; None for the one that the selector goes with.
    """

    data: str
    attack: str
    defence: str
    selector: str
    optimiser: str | None = None

    @property
    def scenario(self) -> Scenario:
        """The preset with the attack and the defence."""
        return Scenario(
            name=f"{self.data}-{self.attack}-defence-{self.defence}",
            family="byzantine",
            source=self.data,
            keywords={"byzantine": ATTACKS[self.attack], "defence": DEFENCES[self.defence]},
            rounds=PRICE_ROUNDS if self.data in PRICED else None,
        )

    @property
    def variant(self) -> Variant:
        """The selector with the optimiser."""
        if self.optimiser is None:
            return Variant(self.selector, self.selector)
        label = f"{self.selector}+{self.optimiser}"
        return Variant(label, self.selector, label, optimiser={"name": self.optimiser})


@dataclass(frozen=True)
class Measured:
    """The runs of a cell, seed by seed.

    Attributes:
        accuracies: Mean test accuracy over all rounds.
        times_fair: How often Byzantine clients were chosen, relative to their fair share; empty
            where there are none.
    """

    accuracies: list[float]
    times_fair: list[float]

    @classmethod
    def of(cls, runs: Sequence[RunRecord]) -> Measured:
        """The numbers of one run per seed."""
        shares = [byzantine_share(run) for run in runs]
        return cls(
            [fmean(entry["test_accuracy"] for entry in run.rounds) for run in runs],
            [share.times_fair for share in shares if share is not None],
        )

    def minus(self, other: Measured) -> Estimate:
        """The difference of mean accuracies, paired over seeds."""
        pairs = zip(self.accuracies, other.accuracies, strict=True)
        return mean_estimate([a - b for a, b in pairs])


Cells = Mapping[Cell, Measured]


def _measure(cells: Sequence[Cell], runs: Runs) -> Cells:
    return {cell: Measured.of(runs[cell.scenario.name][cell.variant.label]) for cell in cells}


# --- selectors ------------------------------------------------------------------------------------


def attack_cells() -> list[Cell]:
    """Every selector under every attack, without and with the defence, on the digits."""
    return [
        Cell(DIGITS, attack, defence, selector)
        for attack in ATTACKS
        for defence in DEFENCES
        for selector in SELECTORS
    ]


def price_cells() -> list[Cell]:
    """Every selector on Fashion-MNIST without Byzantine clients, without and with the defence."""
    return [
        Cell(data, NOBODY, defence, selector)
        for data in PRICED
        for defence in DEFENCES
        for selector in SELECTORS
    ]


def _cells(plan: Plan) -> list[Cell]:
    """The price of the defence is measured for the plan's data set Fashion-MNIST only."""
    return [*attack_cells(), *(price_cells() if plan.dataset == "fmnist" else [])]


def _scenarios(plan: Plan) -> list[Scenario]:
    return list({cell.scenario.name: cell.scenario for cell in _cells(plan)}.values())


def _selectors(plan: Plan, scenario: Scenario) -> list[Variant]:
    return [Variant(name, name) for name in SELECTORS]


def _evaluate(plan: Plan, runs: Runs) -> Iterator[Result]:
    """The table of attacks on the digits; for Fashion-MNIST, the price of the defence as well."""
    measured = _measure(_cells(plan), runs)
    prices = plan.dataset == "fmnist"
    goals = [*attack_goals(measured), *(price_goals(measured) if prices else [])]
    numbers = {
        "fraction": FRACTION,
        "defence": DEFENCES[ON].describe(),
        "cells": [_numbers(measured, cell) for cell in measured],
        "goals": goals,
    }
    tables = [_attack_table(measured, plan), _below_table(measured, plan)]
    tables += [_price_table(measured, plan)] if prices else []
    yield Result(numbers, [*tables, goal_lines(goals)])


STUDY = Study(_evaluate, _scenarios, _selectors)


def _to_random(measured: Cells, cell: Cell) -> Estimate:
    """Its accuracy minus random's under the same attack and defence."""
    return measured[cell].minus(measured[replace(cell, selector=RANDOM)])


def _to_off(measured: Cells, cell: Cell) -> Estimate:
    """Its accuracy minus that without a defence."""
    return measured[cell].minus(measured[replace(cell, defence=OFF)])


def _numbers(measured: Cells, cell: Cell) -> dict[str, Any]:
    return {
        **asdict(cell),
        "accuracies": measured[cell].accuracies,
        "mean_accuracy": asdict(mean_estimate(measured[cell].accuracies)),
        "times_fair": measured[cell].times_fair,
        "paired_to_random": asdict(_to_random(measured, cell)),
        "paired_to_no_defence": asdict(_to_off(measured, cell)),
    }


def _attack_table(measured: Cells, plan: Plan) -> str:
    rows = []
    for attack in ATTACKS:
        for defence in DEFENCES:
            cells = [measured[Cell(DIGITS, attack, defence, name)] for name in SELECTORS]
            rows.append([attack, defence, *map(cell_text, cells)])
    head = ["who lies", "defence", *map(display_name, SELECTORS)]
    title = f"digits, {plan.seeds_text}: mean accuracy (how often Byzantine clients were chosen)"
    return markdown(title, head, rows)


def cell_text(measured: Measured) -> str:
    """`0.672 (1.01)`: the mean accuracy, and the share of Byzantine clients, relative to fair."""
    accuracy = mean_estimate(measured.accuracies).mean
    text = f"{accuracy:.3f}" if accuracy is not None else "–"
    share = mean_estimate(measured.times_fair).mean
    return text if share is None else f"{text} ({share:.2f})"


def _below_table(measured: Cells, plan: Plan) -> str:
    """With the defence: each selector minus random under the same attack."""
    others = [name for name in SELECTORS if name != RANDOM]
    rows = [
        [
            attack,
            *(
                difference_text(_to_random(measured, Cell(DIGITS, attack, ON, name)))
                for name in others
            ),
        ]
        for attack in ATTACKS
    ]
    title = f"digits, {plan.seeds_text}, with the defence: minus random under the same attack"
    return markdown(title, ["who lies", *map(display_name, others)], rows)


def _price_table(measured: Cells, plan: Plan) -> str:
    """Where nobody lies: each selector with the defence minus without."""
    rows = []
    for data, label in {**PRICED, DIGITS: "digits"}.items():
        cells = [Cell(data, NOBODY, ON, name) for name in SELECTORS]
        rows.append([label, *(difference_text(_to_off(measured, cell)) for cell in cells)])
    title = f"{plan.seeds_text}, nobody lies: with the defence minus without"
    return markdown(title, ["", *map(display_name, SELECTORS)], rows)


def difference_text(estimate: Estimate) -> str:
    """`+.012 [+.003, +.021]`."""
    values = (estimate.mean, estimate.low, estimate.high)
    mean, low, high = ("–" if value is None else f"{value:+.3f}" for value in values)
    return mean if estimate.low is None else f"{mean} [{low}, {high}]"


def attack_goals(measured: Cells) -> list[dict[str, Any]]:
    """With the defence: no selector below random, no Byzantine client chosen too often."""
    attacks = [attack for attack in ATTACKS if attack != NOBODY]
    cells = [Cell(DIGITS, attack, ON, name) for attack in attacks for name in SELECTORS]
    below = {
        _name(cell): difference_text(_to_random(measured, cell))
        for cell in cells
        if cell.selector != RANDOM and (_to_random(measured, cell).mean or 0.0) < 0.0
    }
    often = {
        _name(cell): f"{max(measured[cell].times_fair):.2f}"
        for cell in cells
        if max(measured[cell].times_fair) > MOST_FAIR + 1e-9
    }
    return [
        _goal("no selector is below random under the same attack and defence", below),
        _goal(f"Byzantine clients get at most {MOST_FAIR:g} times their fair share", often),
    ]


def price_goals(measured: Cells) -> list[dict[str, Any]]:
    cells = [Cell(data, NOBODY, ON, name) for data in PRICED for name in SELECTORS]
    dear = {
        f"{cell.data} {_name(cell)}": difference_text(_to_off(measured, cell))
        for cell in cells
        if (_to_off(measured, cell).mean or 0.0) < -MOST_PRICE
    }
    return [_goal(f"without Byzantine clients, the defence costs at most {MOST_PRICE:g}", dear)]


def _name(cell: Cell) -> str:
    return f"{cell.selector} under {cell.attack}"


def _goal(title: str, fails: Mapping[str, str]) -> dict[str, Any]:
    return {"title": title, "met": not fails, "fails": dict(fails)}


def goal_lines(goals: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for goal in goals:
        fails = "; ".join(f"{where}: {figure}" for where, figure in goal["fails"].items())
        verdict = "met" if goal["met"] else f"missed: {fails}"
        lines.append(f"- {goal['title']}: {verdict}.\n")
    return "### Goals\n\n" + "".join(lines)


# --- robust means ---------------------------------------------------------------------------------


def _mean_cells() -> list[Cell]:
    """Every mean under every attack on updates, without and with the defence, on the digits."""
    return [
        Cell(DIGITS, attack, defence, RANDOM, name)
        for attack in UPDATE_ATTACKS
        for defence in DEFENCES
        for name in MEAN_NAMES
    ]


def _mean_scenarios(plan: Plan) -> list[Scenario]:
    return list({cell.scenario.name: cell.scenario for cell in _mean_cells()}.values())


def _means(plan: Plan, scenario: Scenario) -> list[Variant]:
    return [cell.variant for cell in _mean_cells() if cell.scenario.name == scenario.name]


def _evaluate_means(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Accuracies with each mean, and their differences from the plain mean."""
    measured = _measure(_mean_cells(), runs)
    to_mean = {
        cell: cells.minus(measured[replace(cell, optimiser=MEAN)])
        for cell, cells in measured.items()
    }
    numbers = {
        "fraction": FRACTION,
        "cells": [
            {
                **asdict(cell),
                "accuracies": measured[cell].accuracies,
                "paired_to_mean": asdict(to_mean[cell]),
            }
            for cell in measured
        ],
    }
    accuracies, differences = [], []
    for attack in UPDATE_ATTACKS:
        for defence in DEFENCES:
            cells = [Cell(DIGITS, attack, defence, RANDOM, name) for name in MEAN_NAMES]
            levels = [f"{fmean(measured[cell].accuracies):.3f}" for cell in cells]
            accuracies.append([attack, defence, *levels])
            robust = [difference_text(to_mean[c]) for c in cells if c.optimiser != MEAN]
            differences.append([attack, defence, *robust])
    about, names = f"{DIGITS}, {plan.seeds_text}", [*MEAN_NAMES.values()]
    head = ["who lies", "defence"]
    minus = f"{about}: minus the plain mean under the same attack and defence"
    tables = [
        markdown(f"{about}, random selection: mean accuracy", [*head, *names], accuracies),
        markdown(minus, [*head, *names[1:]], differences),
    ]
    yield Result(numbers, tables)


MEANS = Study(_evaluate_means, _mean_scenarios, _means)
