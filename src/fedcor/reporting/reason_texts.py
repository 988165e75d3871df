"""What the reasons in a record mean, how a round was chosen, and what a record lacks: in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fedcor.core.text import one_line
from fedcor.reporting.metrics import seconds_text

MEANINGS = {
    "gain": "expected decrease of everyone's loss by this pick, given the picks before it, "
    "annealed: others + own, times annealing, minus redundancy",
    "redundancy": "what the picks before it took from that; below zero where they made it more "
    "valuable",
    "annealing": "beta ^ (times chosen since the last refit)",
    "others": "decrease of all other clients' losses that is expected of it as the first pick",
    "own": "decrease of its own loss in the same sum",
    "change": "predicted change of the client's own loss in this round: what the picks before it "
    "let expect, minus one standard deviation, annealed; came: what came, where it is known",
    "explored": "1 where it has its seat because no loss change of it was ever measured: it has no "
    "part in the process yet",
    "loss": "the client's loss of the current model",
    "valuation": "sqrt(samples) * last reported loss",
    "by_valuation": "1 for a seat that is drawn by valuation, 0 for one that is drawn uniformly",
    "probability": "of being drawn for this seat, given those drawn before",
    "kept": "1 where the valuation was among the largest, who can be drawn by it; 0 where not",
    "utility": "what it was drawn by: (statistical + uncertainty) x slowdown; - for one that is "
    "explored",
    "statistical": "samples x root mean square loss when it last took part, clipped, between 0 for "
    "the smallest and 1 for the largest",
    "uncertainty": "sqrt(weight x ln round / round in which it last took part)",
    "slowdown": "(preferred duration / its duration) ^ penalty where it is slower; else 1",
    "exploring": "1 for a client that never reported a loss, and is drawn for that",
    "distance": "of the group's mean update from everyone's after this pick, relative to the "
    "length of everyone's; - for a client's first training",
    "before": "the same before this pick",
    "cosine": "of the group's summed update, after this pick, with everyone's mean update: 1 where "
    "they point the same way; - for a client's first training",
    "cosine_before": "the same before this pick",
    "age": "rounds since the client's last update came",
    "waited": "rounds since the client was last chosen",
    "waited_alike": "how many clients, itself among them, had waited as long",
    "overdue": "1 for a seat that went to who has waited longest, whatever it points to",
}

# What the details of a line say of each pick.
PICK_DETAILS = ("waited", "overdue", "waited_alike")

# The parts that add up to FedCor's gain, in the order in which they are shown.
PARTS = ("others", "own", "annealed", "redundant")

_UNFITTED = "chosen uniformly: the process was never fitted (no loss change could be measured)"
_WARM_UP = (
    "warm-up: chosen uniformly, and the loss changes that this choice makes were measured for the "
    "process"
)
_PLAIN = {
    "random": "every available client had the same chance",
    "round_robin": "those who were chosen longest ago, in random order among equals",
    "full": "everyone who was available",
    "afl": "most seats are drawn by valuation among the largest valuations, the rest uniformly",
    "power_of_choice": "candidates are drawn by the size of their data; those with the largest "
    "losses train",
}
_MATCHED = {
    "complement": "a known client starts the group; those join that bring its mean update closest "
    "to everyone's",
    "aligned": "who has waited longest starts the group; those join that turn its update to where "
    "everyone's points",
}
_NEW_FIRST = "clients that never trained come first, in random order"


def round_note(header: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """One sentence on how a round was chosen; empty where nothing is to be said."""
    selector, silent = header.get("selector"), not entry.get("why") and bool(entry.get("selected"))
    if selector == "fedcor" and silent:
        warmup = _options(header).get("warmup")
        if not isinstance(warmup, int):
            return ""
        return _WARM_UP if int(entry["round"]) < warmup else _UNFITTED
    if selector == "oort":
        return _oort_note(entry.get("details") or {})
    if selector in ("complement", "aligned") and silent:
        return _NEW_FIRST
    return (_PLAIN | _MATCHED).get(str(selector), "")


def _oort_note(details: Mapping[str, Any]) -> str:
    """How Oort's seats are dealt out."""
    (epsilon,) = details.get("epsilon") or (None,)
    (preferred,) = details.get("preferred") or (None,)
    share = "some" if epsilon is None else f"{100 * epsilon:.3g} %"
    note = f"{share} of the seats are for clients that never reported a loss, while there are any; "
    note += "the others are drawn by utility among the best"
    if preferred is not None:
        note += f", where clients count for less that take longer than {seconds_text(preferred)}"
    return note


def what_is_missing(header: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    """What a record does not hold that those of this version do: a sentence each."""
    selector, why = header.get("selector"), entry.get("why") or {}
    details = entry.get("details") or {}
    old = "this record was made by an earlier version of fedcor"
    if "gain" in why and "others" not in why:
        return [
            f"{old}: what a pick does for others and for itself, the predicted loss change and the "
            "runner-up are not in it"
        ]
    if selector == "power_of_choice" and "loss" in why and "candidates" not in details:
        return [f"{old}: the candidates that were not chosen are not in it"]
    if selector == "afl" and "valuation" in why and "probability" not in why:
        return [f"{old}: how each seat was drawn is not in it"]
    if selector == "complement" and "distance" in why and "before" not in why:
        return [f"{old}: the distance before each pick and the runner-up are not in it"]
    if selector == "aligned" and "cosine" in why and "cosine_before" not in why:
        return [f"{old}: the cosine before each pick, how long clients waited and the runner-up "
                "are not in it"]  # fmt: skip
    return []


def _options(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """The selector's settings."""
    found: Any = header
    for key in ("config", "selectors", header.get("selector")):
        found = found.get(key) if isinstance(found, Mapping) and isinstance(key, str) else None
    return found if isinstance(found, Mapping) else {}


# Why one client was picked, in a sentence or two.


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


# An explanation on a terminal: one short table, and a sentence per pick.


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
