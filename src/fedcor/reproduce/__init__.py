"""The paper, reproduced, and what goes beyond it: each table and figure by one command that can be interrupted and goes on.

Numbers are computed and saved first (`OUT/<what>-<dataset>.json`), figures are drawn from them (`.svg`, `.png`).
"""

from collections.abc import Callable
from pathlib import Path

from fedcor.reproduce import beyond
from fedcor.reproduce.measurements import embedding, normality, stationarity, toy
from fedcor.reproduce.plan import Plan
from fedcor.reproduce.runs import annealing, convergence, interval, table1

__all__ = ["EXPERIMENTS", "Plan", "reproduce"]

EXPERIMENTS: dict[str, Callable[[Plan], list[Path]]] = {
    "table1": table1,
    "convergence": convergence,
    "toy": toy,
    "normality": normality,
    "stationarity": stationarity,
    "interval": interval,
    "annealing": annealing,
    "embedding": embedding,
    "beyond-table": beyond.table,
    "beyond-ablation": beyond.ablation,
    "beyond-limits": beyond.limits,
    "beyond-fairness": beyond.fairness,
    "beyond-confirmation": beyond.confirmation,
}


def reproduce(what: str, plan: Plan) -> list[Path]:
    """The files that one experiment, all of the paper's (`paper`), all that go `beyond` it, or simply `all`, have written."""
    groups = {
        "paper": [name for name in EXPERIMENTS if not name.startswith("beyond-")],
        "beyond": [name for name in EXPERIMENTS if name.startswith("beyond-")],
        "all": list(EXPERIMENTS),
    }
    return [path for name in groups.get(what, [what]) for path in EXPERIMENTS[name](plan)]
