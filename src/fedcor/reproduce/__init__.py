"""The paper, reproduced, and what goes beyond it: each table and figure by one command that can be interrupted and goes on.

Numbers are computed and saved first (`OUT/<what>-<dataset>.json`), figures are drawn from them (`.svg`, `.png`).
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcor.reproduce.plan import Plan

    EXPERIMENTS: dict[str, Callable[[Plan], list[Path]]]

__all__ = ["EXPERIMENTS", "NAMES", "Plan", "reproduce"]

# Name -> function. Their modules need the extra `sim` and are imported when an experiment is run.
_FUNCTIONS = {
    "table1": "runs:table1",
    "convergence": "runs:convergence",
    "toy": "measurements:toy",
    "normality": "measurements:normality",
    "stationarity": "measurements:stationarity",
    "interval": "runs:interval",
    "annealing": "runs:annealing",
    "embedding": "measurements:embedding",
    "beyond-table": "beyond:table",
    "beyond-ablation": "beyond:ablation",
    "beyond-limits": "beyond:limits",
    "beyond-fairness": "beyond:fairness",
    "beyond-confirmation": "beyond:confirmation",
}
_GROUPS = {
    "paper": [name for name in _FUNCTIONS if not name.startswith("beyond-")],
    "beyond": [name for name in _FUNCTIONS if name.startswith("beyond-")],
    "all": list(_FUNCTIONS),
}
NAMES = (*_FUNCTIONS, *_GROUPS)


def __getattr__(name: str) -> Any:
    if name == "Plan":
        return importlib.import_module("fedcor.reproduce.plan").Plan
    if name == "EXPERIMENTS":
        return {experiment: _function(experiment) for experiment in _FUNCTIONS}
    raise AttributeError(f"module 'fedcor.reproduce' has no attribute {name!r}")


def _function(experiment: str) -> Callable[["Plan"], list[Path]]:
    module, _, name = _FUNCTIONS[experiment].partition(":")
    function: Callable[[Plan], list[Path]]
    function = getattr(importlib.import_module(f"fedcor.reproduce.{module}"), name)
    return function


def reproduce(what: str, plan: "Plan") -> list[Path]:
    """The files that one experiment, all of the paper's (`paper`), all that go `beyond` it, or simply `all`, have written."""
    return [path for name in _GROUPS.get(what, [what]) for path in _function(name)(plan)]
