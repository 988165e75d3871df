"""Why these clients were chosen in a round, as the selector explained it in the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fedcor.errors import RecordError
from fedcor.foreign import one_line
from fedcor.record import RunRecord, client_names, first_round
from fedcor.report.names import run_name
from fedcor.report.numbers import seconds_text

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

_UNFITTED = "chosen uniformly: the process was never fitted (no loss change could be measured)"


def explain(run: RunRecord, round: int | None = None) -> dict[str, Any]:
    """The choice of one round as plain values.

    Args:
        run: as `read_run` gives it
        round: from 0, as in the record; of a run on Flower as Flower counts, from 1, where the
            record says Flower's numbers; None for the last

    Returns:
        The run and selector; `round`, as numbered in the record, from 0; `server_round`, Flower's
        number, where the record says it; `probed`, the number of losses that clients were asked
        for; `reasons`, what each reason means; `note`, why there are none, where that is known;
        `chosen`, one row per chosen client in the order of choice, with `why_not` where somebody
        was missing; `left_alone`, the clients that were there but were not asked, after faults;
        `unreachable`, how many could not be reached; and `duration` and `clock`, in simulated
        seconds, where time was simulated.
    """
    where = run_name(run)
    if not run.rounds:
        raise RecordError(f"{where} has no finished round yet")
    first = first_round(run)
    last = first + len(run.rounds) - 1
    number = last - first if round is None else round - first
    if not 0 <= number < len(run.rounds):
        counted = ", numbered as in Flower" if first else ""
        raise RecordError(
            f"{where} has the rounds {first} to {last}{counted}; there is no round {round}"
        )
    entry, names = run.rounds[number], [] if run.path is None else client_names(run.path)
    why, selected = entry.get("why") or {}, entry.get("selected")
    if selected is None or any(len(values) != len(selected) for values in why.values()):
        raise RecordError(
            f"{where}, round {number}: the record does not say who was chosen, or gives other "
            "reasons than clients; it was edited or damaged"
        )
    missing = entry.get("missing") or {}
    why_not = {client: reason for reason, clients in missing.items() for client in clients}
    rows = []
    for place, client in enumerate(selected):
        row: dict[str, Any] = {"client": client}
        if client < len(names):
            row["name"] = names[client]
        row["delivered"] = client in (entry.get("participated") or ())
        if why_not:
            row["why_not"] = why_not.get(client, "")
        rows.append(row | {reason: values[place] for reason, values in why.items()})
    return {
        "run": where,
        "selector": run.header.get("selector"),
        "round": number,
        **({"server_round": number + first} if first else {}),
        "probed": entry.get("probed"),
        "reasons": {reason: MEANINGS.get(reason, "") for reason in why},
        "note": _UNFITTED if _is_unfitted(run, entry) else "",
        "chosen": rows,
        "left_alone": entry.get("quarantined") or [],
        "unreachable": entry.get("unreachable") or 0,
        **{key: entry[key] for key in ("duration", "clock") if entry.get(key) is not None},
    }


def render_explanation(explanation: dict[str, Any], console: Console) -> None:
    """Print what `explain` returned: a table of the chosen clients and what its columns mean."""
    asked = f", {explanation['probed']} losses asked for" if explanation["probed"] else ""
    round = f"round {explanation['round']}"
    if "server_round" in explanation:
        round = f"round {explanation['server_round']} (numbered as in Flower, from 1)"
    title = f"{explanation['selector']}, {round}{asked}"
    if "duration" in explanation and "clock" in explanation:
        took, clock = (seconds_text(explanation[key]) for key in ("duration", "clock"))
        title += f", {took} of simulated time ({clock} in all)"
    console.print(Text(one_line(title)))
    table = Table(box=None, pad_edge=False)
    rows = explanation["chosen"]
    for column in rows[0] if rows else ():
        justify: JustifyMethod = "left" if column in ("name", "why_not") else "right"
        table.add_column(Text(one_line(column.replace("why_not", "why not"))), justify=justify)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    console.print(table)
    if explanation["left_alone"]:
        clients = ", ".join(map(str, explanation["left_alone"]))
        console.print(f"left alone after faults: {clients}", highlight=False, soft_wrap=True)
    if explanation["unreachable"]:
        console.print(f"could not be reached: {explanation['unreachable']}", highlight=False)
    if explanation["note"]:
        console.print(explanation["note"], highlight=False)
    elif not explanation["reasons"]:
        console.print(
            "No reasons in the record: the choice was uniform (as in a warm-up round), or the "
            "selector gives none."
        )
    for reason, meaning in explanation["reasons"].items():
        if meaning:
            console.print(Text(f"{reason}: {meaning}"), soft_wrap=True)


def _is_unfitted(run: RunRecord, entry: Mapping[str, Any]) -> bool:
    """Whether FedCor gave no reason for a choice after its warm-up."""
    config = run.header.get("config") or {}
    options = (config.get("selectors") or {}).get(run.header["selector"]) or {}
    if run.header["selector"] != "fedcor" or "warmup" not in options:
        return False
    silent = entry.get("why") == {} and len(entry["selected"]) > 0
    return silent and entry["round"] >= int(options["warmup"])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else one_line(value)
