"""What robust means do about byzantine: random selection, aggregated in four ways.

The selector is random, so that nothing but the aggregation differs: no Byzantine client can get itself chosen.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcor.reporting.tables import markdown
from studies.byzantine.runs import DEFENCES, FRACTION, RANDOM, Cell, Measured, run_cells
from studies.byzantine.table import cell_text, difference_text
from studies.plan import Plan

MEAN = "fedavg"
MEANS = {
    MEAN: "mean",
    "trimmed_mean": "trimmed mean",
    "geometric_median": "geometric median",
    "multi_krum": "Multi-Krum",
}
DATA = "digits"
UPDATES = ("nobody", "flip", "scale", "copy")  # the others lie about losses alone


def means(plan: Plan) -> list[Path]:
    """Every mean under every attack on updates, without and with the defence, on the digits."""
    cells = [
        Cell(DATA, attack, defence, RANDOM, name)
        for attack in UPDATES
        for defence in DEFENCES
        for name in MEANS
    ]
    found = run_cells(plan, cells)
    numbers = {"fraction": FRACTION, "cells": [_numbers(found, cell) for cell in cells]}
    tables = [_accuracies(found, plan), _differences(found, plan)]
    return [plan.save("byzantine-means", numbers), plan.save_page("byzantine-means", tables)]


def _with_mean(cell: Cell) -> Cell:
    """The same with the plain mean."""
    return Cell(cell.data, cell.attack, cell.defence, cell.selector, MEAN)


def _numbers(found: dict[Cell, Measured], cell: Cell) -> dict[str, Any]:
    return {
        **asdict(cell),
        "accuracies": found[cell].accuracies,
        "paired_to_mean": asdict(found[cell].minus(found[_with_mean(cell)])),
    }


def _accuracies(found: dict[Cell, Measured], plan: Plan) -> str:
    rows = [
        [
            *(attack, defence),
            *(
                cell_text(Measured(found[Cell(DATA, attack, defence, RANDOM, name)].accuracies, []))
                for name in MEANS
            ),
        ]
        for attack in UPDATES
        for defence in DEFENCES
    ]
    title = f"{DATA}, {plan.seeds_text}, random selection: mean accuracy"
    return markdown(title, ["who lies", "defence", *MEANS.values()], rows)


def _differences(found: dict[Cell, Measured], plan: Plan) -> str:
    robust = {name: label for name, label in MEANS.items() if name != MEAN}
    rows = []
    for attack in UPDATES:
        for defence in DEFENCES:
            cells = [Cell(DATA, attack, defence, RANDOM, name) for name in robust]
            differences = [found[cell].minus(found[_with_mean(cell)]) for cell in cells]
            rows.append([attack, defence, *map(difference_text, differences)])
    title = f"{DATA}, {plan.seeds_text}: minus the plain mean under the same attack and defence"
    return markdown(title, ["who lies", "defence", *robust.values()], rows)
