"""What commands print: finished runs, tables, warnings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedcor.record import read_run, read_runs
from fedcor.types import selector_traits

if TYPE_CHECKING:
    from fedcor.experiments import Experiment

__all__ = ["print_finished", "print_tables", "warn_about_warmup"]


def print_finished(folder: Path, terminal: bool) -> None:
    """A finished run as one line: JSON for other programs, a sentence on a terminal."""
    run = read_run(folder)
    accuracies = [entry.get("test_accuracy") or 0.0 for entry in run.rounds]
    idle = sum(not entry.get("participated") for entry in run.rounds)
    if idle:
        where = f"in {idle} of {len(run.rounds)} rounds"
        _warn(f"{folder}: {where} nobody delivered a usable update")
    if terminal:
        print(f"{folder}: {len(run.rounds)} rounds, test accuracy {accuracies[-1]:.3f}")
        return
    line = {
        "run": str(folder),
        "selector": run.header["selector"],
        "seed": run.header["seed"],
        "rounds": len(run.rounds),
        "mean_accuracy": sum(accuracies) / len(accuracies),
        "test_accuracy": accuracies[-1],
    }
    print(json.dumps(line), flush=True)


def print_tables(folder: Path, baseline: str | None = None) -> None:
    """The tables of all runs in `folder`."""
    from fedcor.report.summary import summarise
    from fedcor.report.tables import render

    console = Console()
    console.width = max(console.width, 80)  # columns would be lost in less
    render(summarise(read_runs(folder), baseline), console)


def warn_about_warmup(experiment: Experiment) -> None:
    """Warns if the run ends before the selector's own rule begins."""
    warmup = selector_traits(experiment.build_selector()).warmup
    rounds = experiment.training.rounds
    if warmup >= rounds:
        _warn(
            f"{experiment.selector} chooses at random in its first {warmup} rounds, "
            f"and this run has {rounds}"
        )


def _warn(message: str) -> None:
    print(f"fedcor: {message}", file=sys.stderr)
