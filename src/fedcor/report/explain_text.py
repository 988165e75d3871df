"""An explanation on a terminal: one short table, and a sentence per pick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fedcor.foreign import one_line
from fedcor.report.meanings import MEANINGS
from fedcor.report.numbers import seconds_text

__all__ = ["render_explanation"]

_NAME_WIDTH = 20
# What a table has no room for is in the sentences.
_HIDDEN = ("place", "parts", "runner_up", "came", "sentence", "delivered", "why_not")
_FIRST = ("client", "name", "others", "own", "annealing", "redundancy", "gain", "change")
_SHOWN_ONCE = (
    "by_valuation",
    "kept",
    "exploring",
    "overdue",
    "waited",
    "waited_alike",
    "before",
    "cosine_before",
)


def render_explanation(explanation: Mapping[str, Any], console: Console) -> None:
    """Print what `explanation` returned.

    Args:
        explanation: As `explain.explanation` gives it.
        console: Where to print.
    """
    asked = f", {explanation['probed']} losses asked for" if explanation["probed"] else ""
    round = f"round {explanation['round']}"
    if "server_round" in explanation:
        round = f"round {explanation['server_round']} (numbered as in Flower, from 1)"
    title = f"{explanation['selector']}, {round}{asked}"
    if "duration" in explanation and "clock" in explanation:
        took, clock = (seconds_text(explanation[key]) for key in ("duration", "clock"))
        title += f", {took} of simulated time ({clock} in all)"
    console.print(Text(one_line(title)), soft_wrap=True)
    for line in _above(explanation):
        console.print(Text(line), soft_wrap=True)
    console.print(_table(explanation))
    for row in explanation["chosen"] if explanation["reasons"] else ():
        console.print(Text(f"{row['place']}. {row['sentence']}"), soft_wrap=True)
    for line in _below(explanation):
        console.print(Text(line), soft_wrap=True)


def _above(explanation: Mapping[str, Any]) -> list[str]:
    """What is said of the round as a whole."""
    lines = [explanation["note"]] if explanation["note"] else []
    if not explanation["note"] and not explanation["reasons"]:
        lines.append("No reasons in the record: the selector gives none.")
    if explanation["predicted_change"] is not None:
        change = explanation["predicted_change"]
        lines.append(f"predicted change of everyone's mean loss: {change:.3g} (all gains)")
    if explanation["before_rules"]:
        clients = ", ".join(map(str, explanation["before_rules"]))
        lines.append(f"rules changed the choice; before them it was: {clients}")
    return lines


def _table(explanation: Mapping[str, Any]) -> Table:
    rows = explanation["chosen"]
    table = Table(box=None, pad_edge=False)
    columns = [
        column
        for column in (rows[0] if rows else ())
        if column not in _HIDDEN and column not in _SHOWN_ONCE
    ]
    columns.sort(key=lambda column: _FIRST.index(column) if column in _FIRST else len(_FIRST))
    late = not all(row["delivered"] for row in rows)
    came = "change" in columns and any(row["came"] for row in rows)
    for column in ["", *columns, *(["came"] if came else []), *(["delivered"] if late else [])]:
        justify: JustifyMethod = "left" if column == "name" else "right"
        table.add_column(Text(one_line(column, _NAME_WIDTH)), justify=justify)
    for row in rows:
        cells = [f"{row['place']}.", *(_cell(row[column]) for column in columns)]
        if came:
            cells.append("?" if row["came"] is None else _cell(row["came"]["change"]))
        if late:
            cells.append("yes" if row["delivered"] else row["why_not"] or "no")
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _below(explanation: Mapping[str, Any]) -> list[str]:
    """Who else was there, what is missing, and what the columns mean."""
    lines = []
    if explanation["candidates"]:
        named = ", ".join(
            f"{one['client']} ({_cell(one['loss'])})" for one in explanation["candidates"]
        )
        lines.append(f"candidates and their losses: {named}")
    if explanation["left_alone"]:
        clients = ", ".join(map(str, explanation["left_alone"]))
        lines.append(f"left alone after faults: {clients}")
    if explanation["unreachable"]:
        lines.append(f"could not be reached: {explanation['unreachable']}")
    lines += explanation["missing"]
    for reason in explanation["reasons"]:
        if reason in MEANINGS and reason not in _SHOWN_ONCE:
            lines.append(f"{reason}: {MEANINGS[reason]}")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else one_line(value, _NAME_WIDTH)
