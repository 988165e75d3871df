"""The explanations of a whole run in little room: columns of short numbers, for a page to embed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedcor.record import RunRecord, first_round
from fedcor.report.explain import explanations

__all__ = ["explanation_columns"]


def explanation_columns(
    run: RunRecord, rounds: Iterable[int] | None = None, digits: int = 3
) -> dict[str, Any]:
    """What `explanations` says of a run, without the sentences.

    Args:
        run: as `read_run` gives it
        rounds: those to take, from 0, as in the record; None for all
        digits: significant digits of a number

    Returns:
        selector: As the record has it: not safe to show.
        first: Number of the first round where a person reads it: 1 on Flower, else 0.
        reasons: Name of each reason -> what it means.
        by_what: What `by` is a difference of, as in `explanation`.
        missing: Sentences on what this record does not hold.
        notes: The different notes on rounds.
        rounds: Lists with an entry per round: `round`, from 0; `note`, its place in `notes`;
            `probed`; `predicted_change`; `picks`, how many there are.
        picks: Lists with an entry per pick of all these rounds, one round after another, in the
            order of choice: `client`; `delivered`, 1 or 0; each of `reasons`; `runner_up`, a
            client; `by`; `came`, a loss change; `came_from` and `came_to`, the rounds before which
            the losses were measured. None where there is nothing.

        FedCor's parts follow from them: `others`, `own`, annealed = (annealing - 1) (others + own),
        redundant = - redundancy.
    """
    wanted = None if rounds is None else set(rounds)
    found = [one for one in explanations(run) if wanted is None or one["round"] in wanted]
    reasons = {name: said for one in found for name, said in one["reasons"].items()}
    notes = list(dict.fromkeys(one["note"] for one in found))
    rows = [row for one in found for row in one["chosen"]]

    def short(value: Any) -> Any:
        return _short(value, digits)

    picks: dict[str, list[Any]] = {
        name: [short(row.get(name)) for row in rows]
        for name in reasons
        if name not in ("client", "delivered")  # a reason of a user's own may have any name
    }
    picks |= {
        "client": [row["client"] for row in rows],
        "delivered": [int(row["delivered"]) for row in rows],
    }
    for column, source, key in _NESTED:
        picks[column] = [None if row[source] is None else short(row[source][key]) for row in rows]
    return {
        "selector": run.header.get("selector"),
        "first": first_round(run),
        "reasons": reasons,
        "by_what": next((one["by_what"] for one in found if one["by_what"]), ""),
        "missing": list(dict.fromkeys(text for one in found for text in one["missing"])),
        "notes": notes,
        "rounds": {
            "round": [one["round"] for one in found],
            "note": [notes.index(one["note"]) for one in found],
            "probed": [one["probed"] for one in found],
            "predicted_change": [short(one["predicted_change"]) for one in found],
            "picks": [len(one["chosen"]) for one in found],
        },
        "picks": picks,
    }


_NESTED = (  # column, where it is in a row, and its name there
    ("runner_up", "runner_up", "client"),
    ("by", "runner_up", "by"),
    ("came", "came", "change"),
    ("came_from", "came", "from_round"),
    ("came_to", "came", "to_round"),
)


def _short(value: Any, digits: int) -> Any:
    """A number with few digits, and without a point where it is whole."""
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
