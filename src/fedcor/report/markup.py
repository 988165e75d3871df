"""The compact table for other programs: HTML for notebooks, LaTeX for papers."""

from __future__ import annotations

import html
from collections.abc import Iterable

from fedcor.foreign import one_line
from fedcor.report.compact import CompactTable, compact_table
from fedcor.report.names import clean
from fedcor.report.screen import notes, title
from fedcor.report.summary import ExperimentSummary, Summary
from fedcor.report.verdict import experiment_verdict

__all__ = ["to_html", "to_latex"]

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
