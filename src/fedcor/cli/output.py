"""What commands print: finished runs, verdicts and tables, warnings."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedcor.foreign import one_line
from fedcor.record import RunRecord, read_run
from fedcor.types import selector_traits

if TYPE_CHECKING:
    from fedcor.experiments import Experiment
    from fedcor.report.summary import Summary

__all__ = [
    "last_score",
    "print_finished",
    "print_full",
    "print_screen",
    "print_who",
    "warn_about_warmup",
]


class _Console(Console):
    """A console that leaves it to `main` to end when whoever reads the output has ended."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_who(experiment: Experiment) -> None:
    """Who selects and who aggregates; on a terminal, as other programs read it in the result."""
    if sys.stdout.isatty():
        from fedcor.report.series import optimiser_title

        aggregating = optimiser_title(experiment.describe()["optimiser"]["name"])
        print(
            one_line(f"{experiment.name}: {experiment.selector} selects, {aggregating} aggregates")
        )


def print_finished(folder: Path, terminal: bool) -> None:
    """A finished run as one line: JSON for other programs, a sentence on a terminal."""
    run = read_run(folder)
    idle = sum(not entry.get("participated") for entry in run.rounds)
    if idle:
        where = f"in {idle} of {len(run.rounds)} rounds"
        _warn(f"{folder}: {where} nobody delivered a usable update")
    if terminal:
        last = run.rounds[-1]
        score = last_score(last.get("test_accuracy"), last.get("test_loss"))
        print(f"{folder}: {len(run.rounds)} rounds, test {score}")
        return
    line = {
        "run": str(folder),
        "selector": run.header["selector"],
        "optimiser": (run.header["config"].get("optimiser") or {}).get("name"),
        "seed": run.header["seed"],
        "rounds": len(run.rounds),
        **_scores(run),
    }
    print(json.dumps(line), flush=True)


def last_score(accuracy: float | None, loss: float | None) -> str:
    """`accuracy 0.812`; the loss where there is no accuracy."""
    for name, value, digits in (("accuracy", accuracy, ".3f"), ("loss", loss, ".4g")):
        if value is not None and math.isfinite(value):
            return f"{name} {value:{digits}}"
    return "loss not finite"


def _scores(run: RunRecord) -> dict[str, float | None]:
    """Mean over rounds and last value of the accuracy; of the loss where there is no accuracy."""
    for name in ("accuracy", "loss"):
        values = [entry.get(f"test_{name}") for entry in run.rounds]
        known = [value for value in values if value is not None]
        if known or name == "loss":
            mean = sum(known) / len(known) if known else None
            return {f"mean_{name}": mean, f"test_{name}": values[-1]}
    return {}


def print_screen(summary: Summary, *, curve: bool = True) -> None:
    """Verdict, one table and a small curve for each experiment; in colour on a terminal."""
    from fedcor.report.screen import screen

    console = _Console()
    shown = screen(summary, ascii=console.options.ascii_only, curve=curve)
    console.print(shown, soft_wrap=True)


def print_full(summary: Summary) -> None:
    """Every headline metric, with its intervals and paired differences."""
    from fedcor.report.tables import render

    console = _Console()
    console.width = max(console.width, 80)  # columns would be lost in less
    render(summary, console)


def warn_about_warmup(experiment: Experiment) -> None:
    """Warns if the run ends before the selector's own rule begins."""
    warmup = selector_traits(experiment.build_selector()).warmup
    rounds = experiment.rounds
    if warmup >= rounds:
        _warn(
            f"warning: {experiment.selector} chooses at random in its first {warmup} rounds, "
            f"but this run has only {rounds}: set a shorter warmup, or run more rounds"
        )


def _warn(message: str) -> None:
    print(f"fedcor: {one_line(message, None)}", file=sys.stderr)
