"""A measure over rounds as one line of text per selector."""

from __future__ import annotations

import html
from collections.abc import Iterable

import numpy as np
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from fedcor.core.text import one_line
from fedcor.core.types import FloatArray
from fedcor.reporting.compact import WIDTH, CompactTable, compact_table, seed_means
from fedcor.reporting.metrics import numbers
from fedcor.reporting.names import clean, short_names
from fedcor.reporting.notes import all_notes, seeds_text, span
from fedcor.reporting.summary import ExperimentSummary, Summary, ranking
from fedcor.reporting.verdict import experiment_verdict

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = ".:-=+*#@"


def sparklines(experiment: ExperimentSummary, ascii: bool = False) -> list[str]:
    """A title, and then one line per selector, best first: the mean over seeds, on one scale.

    Args:
        experiment: as `summarise` gives it
        ascii: whether to draw with ASCII characters

    Returns:
        The lines; none where there is nothing to draw.
    """
    marks = ASCII if ascii else BLOCKS
    names = short_names(s.name for s in experiment.selectors)
    margin = max(map(cell_len, names.values())) + 2
    means = {
        name: seed_means(experiment.curves[name], experiment.measure).mean
        for name in ranking(experiment)
    }
    longest = max((len(mean) for mean in means.values()), default=0)
    known = np.concatenate([mean[np.isfinite(mean)] for mean in means.values()])
    if not known.size or longest < 2:
        return []
    low, high = float(known.min()), float(known.max())
    columns = min(WIDTH - margin, longest)
    bottom, top = numbers(experiment.headline, [low, high])
    scale = f"from {marks[0]} {bottom} to {marks[-1]} {top}"
    lines = [f"{clean(experiment.measure)}, rounds 1 to {longest}, {scale}"]
    for name, mean in means.items():
        if not np.isfinite(mean).any():
            continue
        padded = np.full(longest, np.nan)
        padded[: len(mean)] = mean
        marked = "".join(_mark(part, low, high, marks) for part in np.array_split(padded, columns))
        lines.append((set_cell_size(names[name], margin) + marked).rstrip())
    return lines


def _mark(part: FloatArray, low: float, high: float, marks: str) -> str:
    """The mean of some rounds as one character; a blank where there is none."""
    known = part[np.isfinite(part)]
    if not known.size:
        return " "
    share = (float(known.mean()) - low) / (high - low) if high > low else 0.0
    return marks[min(int(share * len(marks)), len(marks) - 1)]


# What a person sees first: the verdict, one table, a small curve, and what is unfinished.


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


# The compact table for other programs: HTML for notebooks, LaTeX for papers.


_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_COLOURS = {"better": "#007a53", "worse": "#b04000"}


def to_html(summary: Summary) -> str:
    """Verdict and table of every experiment, for a notebook; names are escaped."""
    experiments = "".join(_html_experiment(experiment) for experiment in summary.experiments)
    return experiments + _html_notes(summary.notes)


def _html_notes(notes: Iterable[str]) -> str:
    return "".join(f"<p><small>{html.escape(note)}</small></p>" for note in notes)


def _html_experiment(experiment: ExperimentSummary) -> str:
    table = compact_table(experiment)
    head = "".join(_html_cell("th", cell, place) for place, cell in enumerate(table.head))
    rows = "".join(_html_row(table, place) for place in range(len(table.rows)))
    below = _html_notes(notes(experiment))
    return (
        f"<p><b>{html.escape(experiment_verdict(experiment))}</b></p>"
        f'<table><caption style="white-space:nowrap">{html.escape(title(experiment))}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{below}"
    )


def _html_row(table: CompactTable, place: int) -> str:
    row = table.rows[place]
    *first, last = row.cells
    colour = _COLOURS.get(row.verdict or "", "")
    cells = [_html_cell("td", cell, column) for column, cell in enumerate(first)]
    cells.append(_html_cell("td", last, len(first), f"color:{colour};" if colour else ""))
    return f'<tr title="{html.escape(one_line(row.selector))}">{"".join(cells)}</tr>'


def _html_cell(tag: str, text: str, column: int, style: str = "") -> str:
    align = "left" if column == 0 else "right"
    look = f"text-align:{align};padding:2px 8px;white-space:nowrap;{style}"
    return f'<{tag} style="{look}">{html.escape(text)}</{tag}>'


def to_latex(summary: Summary) -> str:
    r"""One table per experiment, with its verdict as a comment; needs `\usepackage{booktabs}`."""
    above = "".join(f"% {clean(note)}\n" for note in summary.notes)
    return above + "\n".join(_latex_experiment(experiment) for experiment in summary.experiments)


def _latex_experiment(experiment: ExperimentSummary) -> str:
    table = compact_table(experiment)
    columns = "l" + "r" * (len(table.head) - 1)
    comments = (title(experiment), experiment_verdict(experiment), *notes(experiment))
    lines = [
        *(f"% {comment}" for comment in comments),
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _latex_row(table.head[0], *map(_latex_text, table.head[1:])),
        r"\midrule",
        *(_latex_row(row.selector, *map(_latex_number, row.cells[1:])) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(name: str, *cells: str) -> str:
    return " & ".join([_latex_text(name), *cells]) + r" \\"


def _latex_number(text: str) -> str:
    r"""Numbers with a sign are mathematics, so that a minus is one; the rest is escaped."""
    if text[0] in "+-" and len(text) > 1:
        return "${}$".format(text.replace(" [", r"\ ["))
    return _latex_text(text)


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in one_line(text))
