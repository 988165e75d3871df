"""What a person sees of a report: the verdict, one table, a small curve, and what is unfinished.

The same for a terminal, for a notebook (HTML) and for a paper (LaTeX).
"""

from __future__ import annotations

import html

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from fedcor.core.text import one_line
from fedcor.core.types import FloatArray
from fedcor.reporting.curves import seed_means
from fedcor.reporting.metrics import numbers
from fedcor.reporting.notes import all_notes
from fedcor.reporting.series import clean, short_names
from fedcor.reporting.summary import ExperimentSummary, Summary, ranking
from fedcor.reporting.tables import VERDICT_STYLES, WIDTH, ResultsTable, results_table, title
from fedcor.reporting.verdict import experiment_verdict

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = ".:-=+*#@"
_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_COLOURS = {"better": "#007a53", "worse": "#b04000"}


def screen(summary: Summary, *, ascii: bool = False, curve: bool = True) -> Text:
    """Every experiment with its verdict, table and curve, and what was left out; at most 80
    columns wide.

    Args:
        summary: as `summarise` gives it
        ascii: whether to draw curves with ASCII characters
        curve: whether to draw them
    """
    several = len(summary.experiments) > 1
    parts = []
    for experiment in summary.experiments:
        name = f"{clean(experiment.name)}: " if several else ""
        text = Text().append(_wrapped(name + experiment_verdict(experiment)), style="bold")
        text.append("\n\n" + _wrapped(title(experiment)) + "\n")
        table = results_table(experiment)
        head, *lines = table_lines(table)
        text.append(head, style="underline")
        for row, line in zip(table.rows, lines, strict=True):
            text.append("\n" + line, style=VERDICT_STYLES.get(row.verdict, ""))
        for note in all_notes(experiment):
            text.append("\n" + _wrapped(clean(note)))
        if curve and (drawn := sparklines(experiment, ascii)):
            text.append("\n\n" + "\n".join(drawn))
        parts.append(text)
    parts += [Text(_wrapped(clean(note))) for note in summary.notes]
    return Text("\n\n").join(parts)


def screen_text(summary: Summary, *, ascii: bool = False, curve: bool = True) -> str:
    """`screen` without colour."""
    return screen(summary, ascii=ascii, curve=curve).plain


def to_html(summary: Summary) -> str:
    """Verdict and table of every experiment, for a notebook; names are escaped."""
    parts = []
    for experiment in summary.experiments:
        parts.append(f"<p><b>{html.escape(experiment_verdict(experiment))}</b></p>")
        parts.append(html_table(experiment))
        parts += map(_html_note, all_notes(experiment))
    return "".join([*parts, *map(_html_note, summary.notes)])


def _html_note(note: str) -> str:
    return f"<p><small>{html.escape(clean(note))}</small></p>"


def to_latex(summary: Summary) -> str:
    r"""One table per experiment, with its verdict as a comment; needs `\usepackage{booktabs}`."""
    text = "".join(f"% {clean(note)}\n" for note in summary.notes)
    tables = []
    for experiment in summary.experiments:
        comments = [title(experiment), experiment_verdict(experiment), *all_notes(experiment)]
        above = "".join(f"% {clean(comment)}\n" for comment in comments)
        tables.append(above + latex_table(experiment))
    return text + "\n".join(tables)


# --- the table ------------------------------------------------------------------------------------


def table_lines(table: ResultsTable) -> list[str]:
    """The head and the rows in columns: names and differences to the left, numbers to the right."""
    texts = table.narrow()
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    last = len(widths) - 1

    def padded(place: int, text: str) -> str:
        blanks = " " * (widths[place] - cell_len(text))
        return text + blanks if place in (0, last) else blanks + text

    return ["  ".join(map(padded, range(len(cells)), cells)).rstrip() for cells in texts]


def html_table(experiment: ExperimentSummary) -> str:
    """The table for a notebook; names are escaped."""
    table = results_table(experiment)
    head, *lines = table.narrow()
    rows = [
        f'<tr title="{html.escape(one_line(row.selector))}" '
        f'style="color:{_COLOURS.get(row.verdict, "inherit")}">{_html_cells("td", cells)}</tr>'
        for row, cells in zip(table.rows, lines, strict=True)
    ]
    return (
        f'<table><caption style="white-space:nowrap">{html.escape(title(experiment))}</caption>'
        f"<thead><tr>{_html_cells('th', head)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _html_cells(tag: str, cells: list[str]) -> str:
    """The name to the left, all else to the right."""
    sides = ["left", *["right"] * (len(cells) - 1)]
    return "".join(
        f'<{tag} style="text-align:{side};padding:2px 8px;white-space:nowrap">'
        f"{html.escape(cell)}</{tag}>"
        for side, cell in zip(sides, cells, strict=True)
    )


def latex_table(experiment: ExperimentSummary) -> str:
    r"""The table for a paper; needs `\usepackage{booktabs}`."""
    table = results_table(experiment)
    head, *lines = table.narrow()
    rows = [
        [_latex_text(row.selector), *map(_latex_number, cells[1:])]
        for row, cells in zip(table.rows, lines, strict=True)
    ]
    above, *below = (" & ".join(cells) + r" \\" for cells in (map(_latex_text, head), *rows))
    columns = "l" + "r" * (len(head) - 1)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", above, r"\midrule", *below]
    return "\n".join([*body, r"\bottomrule", r"\end{tabular}", ""])


def _latex_number(text: str) -> str:
    r"""Numbers with a sign are mathematics, so that a minus is one; the rest is escaped."""
    if text[0] in "+-" and len(text) > 1:
        return "${}$".format(text.replace(" [", r"\ ["))
    return _latex_text(text)


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in one_line(text))


# --- the curve ------------------------------------------------------------------------------------


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
        if np.isfinite(mean).any():
            padded = np.append(mean, np.full(longest - len(mean), np.nan))
            parts = np.array_split(padded, columns)
            marked = "".join(_mark(part, low, high, marks) for part in parts)
            lines.append((set_cell_size(names[name], margin) + marked).rstrip())
    return lines


def _mark(part: FloatArray, low: float, high: float, marks: str) -> str:
    """The mean of some rounds as one character; a blank where there is none."""
    known = part[np.isfinite(part)]
    if not known.size:
        return " "
    share = (float(known.mean()) - low) / (high - low) if high > low else 0.0
    return marks[min(int(share * len(marks)), len(marks) - 1)]


def _wrapped(text: str) -> str:
    """In lines of at most 80 columns; some characters take two."""
    lines = Text(" ".join(text.split())).wrap(Console(), WIDTH)
    return "\n".join(line.plain.rstrip() for line in lines)
