"""What a person sees first: the verdict, one table, a small curve, and what is unfinished."""

from __future__ import annotations

from rich.cells import cell_len, chop_cells
from rich.text import Text

from fedcor.report.compact import WIDTH, compact_table
from fedcor.report.names import clean
from fedcor.report.notes import all_notes, seeds_text, span
from fedcor.report.sparkline import sparklines
from fedcor.report.summary import ExperimentSummary, Summary
from fedcor.report.verdict import experiment_verdict

__all__ = ["notes", "screen", "screen_text", "title"]

STYLES = {"better": "green", "worse": "red"}


def screen(summary: Summary, *, ascii: bool = False, curve: bool = True) -> Text:
    """Every experiment with its verdict, table and curve, and what was left out; at most 80
    columns wide.

    Args:
        summary: as `summarise` gives it
        ascii: whether to draw curves with ASCII characters
        curve: whether to draw them
    """
    several = len(summary.experiments) > 1
    parts = [_experiment(e, ascii, curve, several) for e in summary.experiments]
    parts += [Text(_wrapped(clean(note))) for note in summary.notes]
    return Text("\n\n").join(parts)


def screen_text(summary: Summary, *, ascii: bool = False, curve: bool = True) -> str:
    """`screen` without colour."""
    return screen(summary, ascii=ascii, curve=curve).plain


def _experiment(experiment: ExperimentSummary, ascii: bool, curve: bool, named: bool) -> Text:
    text = Text()
    name = f"{clean(experiment.name)}: " if named else ""
    text.append(_wrapped(name + experiment_verdict(experiment)), style="bold")
    text.append("\n\n" + _wrapped(title(experiment)) + "\n")
    table = compact_table(experiment)
    head, *lines = table.lines()
    text.append(head, style="underline")
    for row, line in zip(table.rows, lines, strict=True):
        text.append("\n" + line, style=STYLES.get(row.verdict or "", ""))
    for note in notes(experiment):
        text.append("\n" + _wrapped(note))
    if curve and (drawn := sparklines(experiment, ascii)):
        text.append("\n\n" + "\n".join(drawn))
    return text


def notes(experiment: ExperimentSummary) -> list[str]:
    """What is unfinished, and what is missing."""
    return [clean(note) for note in all_notes(experiment)]


def title(experiment: ExperimentSummary) -> str:
    """What the table is about: experiment, measure, rounds and seeds."""
    done = [run.rounds_done for s in experiment.selectors for run in s.runs]
    rounds = f"{span((min(done), max(done)))} rounds"
    what = (
        f"test {experiment.measure}"
        if experiment.measure in ("accuracy", "loss")
        else (experiment.measure)
    )
    to = f"; to {100 * experiment.target:g} %: in rounds" if experiment.target is not None else ""
    if experiment.has_clock:
        to += " and simulated time" if to else "; time: simulated"
    seeds = seeds_text(experiment)
    if len(experiment.curves) == 1 or "(" not in seeds:
        seeds = seeds if "," in seeds else seeds.replace("seeds", "seed")
    return clean(f"{experiment.name}: {what} over {rounds}, {seeds}{to}")


def _wrapped(text: str) -> str:
    """In lines of at most 80 columns; some characters take two."""
    lines = [""]
    for word in text.split():
        for part in chop_cells(word, WIDTH):
            joined = f"{lines[-1]} {part}".lstrip()
            if cell_len(joined) <= WIDTH:
                lines[-1] = joined
            else:
                lines.append(part)
    return "\n".join(lines)
