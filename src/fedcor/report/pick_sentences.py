"""Why one client was picked, in a sentence or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcor.foreign import one_line

__all__ = ["client_label", "pick_sentence"]

_LONGEST_NAME = 40


def client_label(who: Mapping[str, Any]) -> str:
    """A client's number, and its name where it has one, made safe to show."""
    label = f"client {who['client']}"
    return f"{label} ({one_line(who['name'], _LONGEST_NAME)})" if "name" in who else label


def pick_sentence(row: Mapping[str, Any], explanation: Mapping[str, Any], first: int) -> str:
    """All that is known of a pick, in words.

    Args:
        row: Of `explanation["chosen"]`.
        explanation: The round, as `explain.explanation` gives it.
        first: The number of the first round where a person reads it, 0 or 1.
    """
    whole = [_reason(row, explanation), _rival(row, explanation["by_what"]), _change(row, first)]
    if not row["delivered"]:
        whole.append("It did not deliver.")
    label = client_label(row)
    return " ".join([f"{label[0].upper()}{label[1:]}:", *filter(None, whole)])


def _reason(row: Mapping[str, Any], explanation: Mapping[str, Any]) -> str:
    """Why the selector picked it."""
    if row["parts"]:
        explored = "explored, since no loss change of it was ever measured; "
        return (explored if row.get("explored") else "") + _gain(row)
    if _known(row, "by_valuation", "valuation", "probability"):
        return _draw(row)
    if _known(row, "exploring"):
        return _utility(row)
    if _known(row, "loss") and explanation["selector"] == "power_of_choice":
        rivals = len(explanation["candidates"])
        of = f" of {rivals} candidates" if rivals else ""
        return f"a loss of {_n(row['loss'])}, the {_ordinal(row['place'])} largest{of}."
    if {"before", "cosine_before", "overdue"} & row.keys():
        return _match(row)
    named = [f"{name} {_n(row[name])}" for name in explanation["reasons"] if _known(row, name)]
    if named:
        return one_line(", ".join(named)) + "."
    return (
        "the record gives no reason."
        if explanation["reasons"]
        else "chosen by the rule of this round."
    )


def _gain(row: Mapping[str, Any]) -> str:
    parts, taken = row["parts"], []
    text = f"worth {_n(parts['others'])} to the others and {_n(parts['own'])} to itself"
    if row["annealing"] < 1:
        taken.append(f"annealing (x {_n(row['annealing'])}) takes {_n(-parts['annealed'])}")
    if row["place"] > 1:
        redundant = parts["redundant"]
        verb = "take" if redundant <= 0 else "add"
        taken.append(f"earlier picks {verb} {_n(abs(redundant))}")
    whole = "; ".join([text, " and ".join(taken)] if taken else [text])
    return f"{whole}: gain {_n(row['gain'])}."


def _draw(row: Mapping[str, Any]) -> str:
    chance = f"probability {100 * row['probability']:.3g} %"
    value = f"valuation {_n(row['valuation'])}"
    if row["by_valuation"]:
        return f"drawn by its valuation ({value}, {chance})."
    where = {1: ", among the largest", 0: ", too small for a seat by valuation"}
    return f"drawn uniformly ({chance}; {value}{where.get(row.get('kept', -1), '')})."


def _utility(row: Mapping[str, Any]) -> str:
    if row["exploring"]:
        return "it never reported a loss, and is explored."
    if not _known(row, "utility", "statistical", "uncertainty", "slowdown"):
        return "it has taken part too often to be drawn by utility, and fills an empty seat."
    worth = f"{_n(row['statistical'])} for its losses, {_n(row['uncertainty'])} for not being seen"
    slow = f", times {_n(row['slowdown'])} since it is slow" if row["slowdown"] < 1 else ""
    return f"drawn by its utility {_n(row['utility'])} ({worth}{slow})."


def _match(row: Mapping[str, Any]) -> str:
    what, before = ("distance", "before") if "before" in row else ("cosine", "cosine_before")
    if not _known(row, what):
        return "no update of it is known: it trains for the first time, or rests no longer."
    seat = ""
    if row.get("overdue") and _known(row, "waited"):
        alike = row.get("waited_alike") or 1
        drawn = f", drawn among {alike} who waited as long" if alike > 1 else ""
        seat = f"it has its seat for waiting longest ({int(row['waited'])} rounds{drawn}); "
    aim = "the distance of the group's mean update from everyone's"
    if what == "cosine":
        aim = "the cosine of the group's update with everyone's"
    if _known(row, before):
        return f"{seat}{aim} went from {_n(row[before])} to {_n(row[what])}."
    return f"{seat}the first of the group: {aim} is {_n(row[what])}."


def _rival(row: Mapping[str, Any], by_what: str) -> str:
    rival = row["runner_up"]
    if rival is None or rival["by"] is None:
        return ""
    who, by = client_label(rival), rival["by"]
    if by_what in ("distance", "cosine"):
        larger = "larger" if (by >= 0) == (by_what == "distance") else "smaller"
        what = f"the whole group's {by_what} would be {_n(abs(by))} {larger}"
        return f"With {who} in its place, {what}."
    return f"It beat {who} by {_n(by)}." if by >= 0 else f"Before it came {who}, by {_n(-by)}."


def _change(row: Mapping[str, Any], first: int) -> str:
    """The predicted change of its loss beside the one that came."""
    if not _known(row, "change"):
        return ""
    text, came = f"Its loss was predicted to change by {_n(row['change'])}", row["came"]
    if came is None:
        return f"{text}; what came is unknown: it was not measured around this round."
    start, end = came["from_round"] + first, came["to_round"] + first
    if end - start == 1:
        return f"{text}; it changed by {_n(came['change'])}."
    return f"{text}; from round {start} to round {end} it changed by {_n(came['change'])}."


def _known(row: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(row.get(name), int | float) for name in names)


def _n(value: float) -> str:
    return f"{value:.3g}"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
