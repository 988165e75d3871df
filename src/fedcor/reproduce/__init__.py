"""The paper, reproduced: each of its tables and figures by one command that can be interrupted and goes on.

Numbers are computed and saved first (`OUT/<what>-<dataset>.json`), figures are drawn from them (`.svg`, `.png`).
"""

from collections.abc import Callable
from pathlib import Path

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
}


def reproduce(what: str, plan: Plan) -> list[Path]:
    """The files that one experiment (or `all` of them) has written."""
    chosen = list(EXPERIMENTS.values()) if what == "all" else [EXPERIMENTS[what]]
    return [path for experiment in chosen for path in experiment(plan)]
