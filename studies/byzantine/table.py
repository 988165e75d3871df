"""What byzantine do to each selector, what the defence does about it, and what it costs.

Accuracies are means over all rounds. Differences are paired over seeds: runs of a seed have the
same data, the same byzantine and the same first model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcor.reporting.estimates import Estimate, mean_estimate
from fedcor.reporting.tables import display_name, markdown
from studies.byzantine.runs import (
    ATTACKS,
    DEFENCES,
    FRACTION,
    NOBODY,
    OFF,
    ON,
    PRICE_ROUNDS,
    PRICE_SETTINGS,
    RANDOM,
    SELECTORS,
    Cell,
    Measured,
    price_cells,
    run_cells,
    table_cells,
)
from studies.plan import Plan

MOST_FAIR, MOST_PRICE = 1.5, 0.005  # the goals
Cells = Mapping[Cell, Measured]


def byzantine(plan: Plan) -> list[Path]:
    """The table of attacks on the digits; for Fashion-MNIST, the price of the defence as well."""
    found: dict[Cell, Measured] = run_cells(plan, table_cells())
    prices = plan.dataset == "fmnist"
    if prices:
        found |= run_cells(plan, price_cells(), PRICE_ROUNDS)
    goals = [*_goals(found), *(_price_goals(found) if prices else [])]
    numbers = {
        "fraction": FRACTION,
        "defence": DEFENCES[ON].describe(),
        "cells": [_numbers(found, cell) for cell in found],
        "goals": goals,
    }
    title = f"digits, {plan.seeds_text}: mean accuracy (how often byzantine were chosen)"
    page = [_attack_table(title, found), _below_table(found, plan)]
    if prices:
        page.append(_price_table(found, plan))
    page.append(_goal_lines(goals))
    return [plan.save("byzantine", numbers), plan.save_page("byzantine", page)]


def _to_random(found: Cells, cell: Cell) -> Estimate:
    """Its accuracy minus random's under the same attack and defence."""
    random = Cell(cell.data, cell.attack, cell.defence, RANDOM)
    return found[cell].minus(found[random])


def _to_off(found: Cells, cell: Cell) -> Estimate:
    """Its accuracy minus that without a defence."""
    return found[cell].minus(found[Cell(cell.data, cell.attack, OFF, cell.selector)])


def _numbers(found: Cells, cell: Cell) -> dict[str, Any]:
    measured = found[cell]
    return {
        **asdict(cell),
        "accuracies": measured.accuracies,
        "mean_accuracy": asdict(mean_estimate(measured.accuracies)),
        "times_fair": measured.times_fair,
        "paired_to_random": asdict(_to_random(found, cell)),
        "paired_to_no_defence": asdict(_to_off(found, cell)),
    }


def _attack_table(title: str, found: Cells) -> str:
    rows = []
    for attack in ATTACKS:
        for defence in DEFENCES:
            cells = [found[Cell("digits", attack, defence, name)] for name in SELECTORS]
            rows.append([attack, defence, *map(cell_text, cells)])
    head = ["who lies", "defence", *map(display_name, SELECTORS)]
    return markdown(title, head, rows)


def cell_text(measured: Measured) -> str:
    """`0.672 (1.01)`: the mean accuracy, and how often byzantine were chosen, relative to fair."""
    accuracy = mean_estimate(measured.accuracies).mean
    text = f"{accuracy:.3f}" if accuracy is not None else "–"
    share = mean_estimate(measured.times_fair).mean
    return text if share is None else f"{text} ({share:.2f})"


def _below_table(found: Cells, plan: Plan) -> str:
    """With the defence: each selector minus random under the same attack."""
    others = [name for name in SELECTORS if name != RANDOM]
    rows = [
        [
            attack,
            *(
                difference_text(_to_random(found, Cell("digits", attack, ON, name)))
                for name in others
            ),
        ]
        for attack in ATTACKS
    ]
    title = f"digits, {plan.seeds_text}, with the defence: minus random under the same attack"
    return markdown(title, ["who lies", *map(display_name, others)], rows)


def _price_table(found: Cells, plan: Plan) -> str:
    """Where nobody lies: each selector with the defence minus without."""
    rows = []
    for setting, label in PRICE_SETTINGS.items():
        cells = [Cell(f"fmnist-{setting}", NOBODY, ON, name) for name in SELECTORS]
        rows.append([label, *(difference_text(_to_off(found, cell)) for cell in cells)])
    cells = [Cell("digits", NOBODY, ON, name) for name in SELECTORS]
    rows.append(["digits", *(difference_text(_to_off(found, cell)) for cell in cells)])
    title = f"{plan.seeds_text}, nobody lies: with the defence minus without"
    return markdown(title, ["", *map(display_name, SELECTORS)], rows)


def difference_text(estimate: Estimate) -> str:
    """`+.012 [+.003, +.021]`."""
    given = (estimate.mean, estimate.low, estimate.high)
    mean, low, high = ("–" if value is None else f"{value:+.3f}" for value in given)
    return mean if estimate.low is None else f"{mean} [{low}, {high}]"


def _goals(found: Cells) -> list[dict[str, Any]]:
    """On the digits, with the defence: nobody below random, no Byzantine client too often."""
    attacks = [attack for attack in ATTACKS if attack != NOBODY]
    cells = [Cell("digits", attack, ON, name) for attack in attacks for name in SELECTORS]
    below = {
        _name(cell): difference_text(_to_random(found, cell))
        for cell in cells
        if cell.selector != RANDOM and (_to_random(found, cell).mean or 0.0) < 0.0
    }
    often = {
        _name(cell): f"{max(found[cell].times_fair):.2f}"
        for cell in cells
        if max(found[cell].times_fair) > MOST_FAIR + 1e-9
    }
    return [
        _goal("no selector is below random under the same attack and defence", below),
        _goal(f"on no seed do byzantine get more than {MOST_FAIR:g} times their fair share", often),
    ]


def _price_goals(found: Cells) -> list[dict[str, Any]]:
    cells = [
        Cell(f"fmnist-{setting}", NOBODY, ON, name)
        for setting in PRICE_SETTINGS
        for name in SELECTORS
    ]
    dear = {
        f"{cell.data} {_name(cell)}": difference_text(_to_off(found, cell))
        for cell in cells
        if (_to_off(found, cell).mean or 0.0) < -MOST_PRICE
    }
    return [_goal(f"without byzantine, the defence costs at most {MOST_PRICE:g}", dear)]


def _name(cell: Cell) -> str:
    return f"{cell.selector} under {cell.attack}"


def _goal(title: str, fails: Mapping[str, str]) -> dict[str, Any]:
    return {"title": title, "met": not fails, "fails": dict(fails)}


def _goal_lines(goals: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for goal in goals:
        fails = "; ".join(f"{where}: {figure}" for where, figure in goal["fails"].items())
        verdict = "met" if goal["met"] else f"missed: {fails}"
        lines.append(f"- {goal['title']}: {verdict}.\n")
    return "### Goals\n\n" + "".join(lines)
