"""Why these clients were chosen in a round, as the selector explained it in the record."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from fedcor.errors import RecordError
from fedcor.record import RunRecord, client_names
from fedcor.report.names import run_name

__all__ = ["explain", "render_explanation"]

MEANINGS = {
    "gain": "expected decrease of everyone's loss by this pick, given the picks before it, "
    "annealed",
    "redundancy": "what the picks before it took from that; below zero where they made it more "
    "valuable",
    "annealing": "beta ^ (times chosen since the last refit)",
    "loss": "the client's loss of the current model",
    "valuation": "sqrt(samples) * last reported loss",
    "distance": "of the group's mean update from everyone's after this pick, relative to the "
    "length of everyone's; - for a client's first training",
    "cosine": "of the group's summed update, after this pick, with everyone's mean update: 1 where "
    "they point the same way; - for a client's first training",
    "age": "rounds since the client's last update came",
}


def explain(run: RunRecord, round: int | None = None) -> dict[str, Any]:
    """The choice of one round as plain values.

    Args:
        run: as `read_run` gives it
        round: as numbered in the record, from 0; None for the last

    Returns:
        The run, selector and round; `probed`, the number of losses that clients were asked for;
        `reasons`, what each reason means; and `chosen`, one row per chosen client in the order of
        choice.
    """
    where = run_name(run)
    if not run.rounds:
        raise RecordError(f"{where} has no finished round yet")
    number = len(run.rounds) - 1 if round is None else round
    if not 0 <= number < len(run.rounds):
        raise RecordError(
            f"{where} has the rounds 0 to {len(run.rounds) - 1}; there is no round {number}"
        )
    entry, names = run.rounds[number], [] if run.path is None else client_names(run.path)
    why = entry.get("why") or {}
    rows = []
    for place, client in enumerate(entry["selected"]):
        row: dict[str, Any] = {"client": client}
        if client < len(names):
            row["name"] = names[client]
        row["delivered"] = client in entry["participated"]
        rows.append(row | {reason: values[place] for reason, values in why.items()})
    return {
        "run": where,
        "selector": run.header["selector"],
        "round": number,
        "probed": entry.get("probed"),
        "reasons": {reason: MEANINGS.get(reason, "") for reason in why},
        "chosen": rows,
    }


def render_explanation(explanation: dict[str, Any], console: Console) -> None:
    """Print what `explain` returned: a table of the chosen clients and what its columns mean."""
    asked = f", {explanation['probed']} losses asked for" if explanation["probed"] else ""
    title = f"{explanation['selector']}, round {explanation['round']}{asked}"
    console.print(title, highlight=False)
    table = Table(box=None, pad_edge=False)
    rows = explanation["chosen"]
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)
    if not explanation["reasons"]:
        console.print(
            "No reasons in the record: the choice was uniform (as in a warm-up round), or the "
            "selector gives none."
        )
    for reason, meaning in explanation["reasons"].items():
        if meaning:
            console.print(f"{reason}: {meaning}", highlight=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
