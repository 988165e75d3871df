"""The words of `fedcor explain`: what each reason means, and one sentence per round and per pick.

The numbers come from `fedcor.reporting.explanations`; the report page uses the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fedcor.core.text import one_line, seconds_text
from fedcor.reporting.series import selector_options
from fedcor.runs.record import RunRecord

# What each number of a pick means.
MEANINGS = {
    "gain": "expected decrease of everyone's loss by this pick, given the earlier picks, annealed: "
    "others + own, times annealing, minus redundancy",
    "redundancy": "the part of that which earlier picks already bring; negative where they make "
    "this pick more valuable",
    "annealing": "beta ^ (times chosen since the last refit)",
    "others": "expected decrease of all other clients' losses if this were the first pick",
    "own": "expected decrease of its own loss in the same sum",
    "change": "predicted change of the client's own loss in this round: the expected change given "
    "earlier picks, minus one standard deviation, annealed; actual: the measured change, if known",
    "explored": "1 if it was picked because none of its loss changes was ever measured: the "
    "Gaussian process does not know it yet",
    "loss": "the client's loss of the current model",
    "valuation": "sqrt(samples) * last reported loss",
    "by_valuation": "1 for a seat that is drawn by valuation, 0 for one that is drawn uniformly",
    "probability": "of being drawn for this seat, given those drawn before",
    "kept": "1 if the valuation was among the largest, which can be drawn by it; else 0",
    "utility": "what it was drawn by: (statistical + uncertainty) x slowdown; - for a client that "
    "is explored",
    "statistical": "samples x root mean square loss when it last took part, clipped, between 0 for "
    "the smallest and 1 for the largest",
    "uncertainty": "sqrt(weight x ln round / round in which it last took part)",
    "slowdown": "(preferred duration / its duration) ^ penalty where it is slower; else 1",
    "exploring": "1 for a client that was drawn because it never reported a loss",
    "distance": "of the group's mean update from the mean of all after this pick, relative to the "
    "length of the mean of all; - for a client's first training",
    "before": "the same before this pick",
    "cosine": "of the group's summed update, after this pick, with the mean update of all: 1 where "
    "they point the same way; - for a client's first training",
    "cosine_before": "the same before this pick",
    "age": "rounds since the client's last update came",
    "waited": "rounds since the client was last chosen",
    "waited_alike": "how many clients, itself among them, had waited as long",
    "overdue": "1 for a seat given to the client that had waited longest, wherever its update "
    "points",
}
# Numbers of a pick that a record's line has among its details.
PICK_DETAILS = ("waited", "overdue", "waited_alike")
# The parts that add up to FedCor's gain, in the order in which they are shown.
PARTS = ("others", "own", "annealed", "redundant")

# How a round was chosen, by selector.
_ROUNDS = {
    "random": "every available client had the same chance",
    "round_robin": "the clients that were chosen longest ago, in random order among equals",
    "full": "everyone who was available",
    "afl": "most seats are drawn by valuation among the largest valuations, the rest uniformly",
    "power_of_choice": "candidates are drawn by the size of their data; those with the largest "
    "losses train",
    "complement": "a known client starts the group; clients are added that bring the group's mean "
    "update closest to the mean of all",
    "aligned": "the client that has waited longest starts the group; clients are added that align "
    "the group's update with the mean of all",
}
_NEW_FIRST = "clients that never trained come first, in random order"
_WARM_UP = (
    "warm-up: chosen uniformly, and the resulting loss changes were measured for the Gaussian "
    "process"
)
_UNFITTED = "chosen uniformly: the Gaussian process was never fitted (no loss change was measured)"


def round_note(run: RunRecord, entry: Mapping[str, Any]) -> str:
    """One sentence on how a round was chosen; empty where nothing is to be said."""
    selector = str(run.header.get("selector"))
    without_reasons = bool(entry.get("selected")) and not entry.get("why")
    if selector == "fedcor" and without_reasons:
        warmup = selector_options(run).get("warmup")
        if not isinstance(warmup, int):
            return ""
        return _WARM_UP if int(entry["round"]) < warmup else _UNFITTED
    if selector in ("complement", "aligned") and without_reasons:
        return _NEW_FIRST
    if selector == "oort":
        return _oort_note(entry.get("details") or {})
    return _ROUNDS.get(selector, "")


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


# --- one pick -------------------------------------------------------------------------------------


def client_label(client: Mapping[str, Any]) -> str:
    """A client's number, and its name where it has one, made safe to show."""
    label = f"client {client['client']}"
    return f"{label} ({one_line(client['name'], 40)})" if "name" in client else label


def pick_sentence(row: Mapping[str, Any], explanation: Mapping[str, Any], first: int) -> str:
    """All that is known of a pick, in words.

    Args:
        row: Of `explanation["chosen"]`.
        explanation: The round, as `explanations.explanation` gives it.
        first: The number of the first round where a person reads it, 0 or 1.
    """
    label = client_label(row)
    sentences = [
        f"{label[0].upper()}{label[1:]}: {_reason(row, explanation)}",
        _rival(row, explanation["by_what"]),
        _change(row, first),
        "" if row["delivered"] else "It did not deliver.",
    ]
    return " ".join(filter(None, sentences))


def _reason(row: Mapping[str, Any], explanation: Mapping[str, Any]) -> str:
    """Why the selector picked it: by the numbers that it gave for this pick."""
    if row["parts"]:
        return _gain(row)
    if _known(row, "by_valuation", "valuation", "probability"):
        return _valuation(row)
    if _known(row, "exploring"):
        return _utility(row)
    if _known(row, "loss") and explanation["selector"] == "power_of_choice":
        place, candidates = row["place"], len(explanation["candidates"])
        return f"a loss of {_n(row['loss'])}, number {place} of {candidates} candidates."
    if {"before", "cosine_before", "overdue"} & row.keys():
        return _group(row)
    known = [f"{name} {_n(row[name])}" for name in explanation["reasons"] if _known(row, name)]
    return one_line(", ".join(known) or "chosen by the rule of this round") + "."


def _gain(row: Mapping[str, Any]) -> str:
    """FedCor."""
    parts, taken = row["parts"], []
    if row["annealing"] < 1:
        taken.append(f"annealing (x {_n(row['annealing'])}) takes {_n(-parts['annealed'])}")
    if row["place"] > 1:
        verb = "take" if parts["redundant"] <= 0 else "add"
        taken.append(f"earlier picks {verb} {_n(abs(parts['redundant']))}")
    explored = "explored, since none of its loss changes was ever measured; "
    text = explored if row.get("explored") else ""
    text += f"worth {_n(parts['others'])} to the others and {_n(parts['own'])} to itself"
    text += f"; {' and '.join(taken)}" if taken else ""
    return f"{text}: gain {_n(row['gain'])}."


def _valuation(row: Mapping[str, Any]) -> str:
    """AFL."""
    chance = f"probability {100 * row['probability']:.3g} %"
    value = f"valuation {_n(row['valuation'])}"
    if row["by_valuation"]:
        return f"drawn by its valuation ({value}, {chance})."
    where = {1: ", among the largest", 0: ", too small for a seat by valuation"}
    return f"drawn uniformly ({chance}; {value}{where.get(row.get('kept', -1), '')})."


def _utility(row: Mapping[str, Any]) -> str:
    """Oort."""
    if row["exploring"]:
        return "it never reported a loss, and is explored."
    if not _known(row, "utility", "statistical", "uncertainty", "slowdown"):
        return "it has taken part too often to be drawn by utility, and fills an empty seat."
    worth = f"{_n(row['statistical'])} for its losses, {_n(row['uncertainty'])} for not being seen"
    slow = f", times {_n(row['slowdown'])} since it is slow" if row["slowdown"] < 1 else ""
    return f"drawn by its utility {_n(row['utility'])} ({worth}{slow})."


def _group(row: Mapping[str, Any]) -> str:
    """Complement and aligned."""
    what, before = ("distance", "before") if "before" in row else ("cosine", "cosine_before")
    if not _known(row, what):
        return "none of its updates is known: it trains for the first time, or after a back-off."
    seat = ""
    if row.get("overdue") and _known(row, "waited"):
        tied = row.get("waited_alike") or 1
        drawn = f", drawn from {tied} clients tied on waiting time" if tied > 1 else ""
        seat = f"chosen because it had waited longest ({int(row['waited'])} rounds{drawn}); "
    aim = "the distance of the group's mean update from the mean of all"
    if what == "cosine":
        aim = "the cosine of the group's update with the mean of all"
    if _known(row, before):
        return f"{seat}{aim} went from {_n(row[before])} to {_n(row[what])}."
    return f"{seat}the first of the group: {aim} is {_n(row[what])}."


def _rival(row: Mapping[str, Any], by_what: str) -> str:
    """How far the best other client was from this seat."""
    rival = row["runner_up"]
    if rival is None or rival["by"] is None:
        return ""
    label, by = client_label(rival), rival["by"]
    if by_what in ("distance", "cosine"):
        larger = "larger" if (by >= 0) == (by_what == "distance") else "smaller"
        change = f"the whole group's {by_what} would be {_n(abs(by))} {larger}"
        return f"With {label} in its place, {change}."
    return f"It beat {label} by {_n(by)}." if by >= 0 else f"Ahead of it was {label}, by {_n(-by)}."


def _change(row: Mapping[str, Any], first: int) -> str:
    """The predicted change of its loss beside the actual one."""
    if not _known(row, "change"):
        return ""
    text, came = f"Its loss was predicted to change by {_n(row['change'])}", row["came"]
    if came is None:
        return f"{text}; actual change unknown: not measured near this round."
    start, end = came["from_round"] + first, came["to_round"] + first
    if end - start == 1:
        return f"{text}; it changed by {_n(came['change'])}."
    return f"{text}; from round {start} to round {end} it changed by {_n(came['change'])}."


def _known(row: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(row.get(name), int | float) for name in names)


def _n(value: float) -> str:
    return f"{value:.3g}"


# --- a round on a terminal ------------------------------------------------------------------------

_NAME_WIDTH = 20
_FIRST = ("client", "name", "others", "own", "annealing", "redundancy", "gain", "change")
# The table has no room for these; the sentences say them.
_HIDDEN = (
    {"place", "parts", "runner_up", "came", "sentence", "delivered", "why_not"}
    | {"by_valuation", "kept", "exploring", "before", "cosine_before"}
    | set(PICK_DETAILS)
)  # fmt: skip


def render_explanation(explanation: Mapping[str, Any], console: Console) -> None:
    """Print what `explanation` returned: one short table, and a sentence per pick.

    Args:
        explanation: As `explanations.explanation` gives it.
        console: Where to print.
    """

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    for line in _above(explanation):
        say(line)
    console.print(_table(explanation["chosen"]))
    for row in explanation["chosen"] if explanation["reasons"] else ():
        say(f"{row['place']}. {row['sentence']}")
    for line in _below(explanation):
        say(line)


def _above(explanation: Mapping[str, Any]) -> list[str]:
    """The title, and what is said of the round as a whole."""
    number = f"round {explanation['round']}"
    if "server_round" in explanation:
        number = f"round {explanation['server_round']} (numbered as in Flower, from 1)"
    title = f"{explanation['selector']}, {number}"
    if explanation["probed"]:
        title += f", {explanation['probed']} losses asked for"
    if "duration" in explanation and "clock" in explanation:
        took, clock = (seconds_text(explanation[key]) for key in ("duration", "clock"))
        title += f", {took} of simulated time ({clock} in all)"
    lines = [one_line(title), explanation["note"]]
    if not explanation["note"] and not explanation["reasons"]:
        lines.append("No reasons in the record: the selector gives none.")
    if explanation["predicted_change"] is not None:
        change = _n(explanation["predicted_change"])
        lines.append(f"predicted change of everyone's mean loss: {change} (all gains)")
    if explanation["before_rules"]:
        clients = ", ".join(map(str, explanation["before_rules"]))
        lines.append(f"rules changed the choice; before them it was: {clients}")
    return list(filter(None, lines))


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = [column for column in (rows[0] if rows else ()) if column not in _HIDDEN]
    columns.sort(key=lambda column: _FIRST.index(column) if column in _FIRST else len(_FIRST))
    actual = ["actual"] if "change" in columns and any(row["came"] for row in rows) else []
    delivered = [] if all(row["delivered"] for row in rows) else ["delivered"]
    table = Table(box=None, pad_edge=False)
    for column in ["", *columns, *actual, *delivered]:
        justify: JustifyMethod = "left" if column == "name" else "right"
        table.add_column(Text(one_line(column, _NAME_WIDTH)), justify=justify)
    for row in rows:
        cells = [f"{row['place']}.", *(_cell(row[column]) for column in columns)]
        if actual:
            cells.append("?" if row["came"] is None else _cell(row["came"]["change"]))
        if delivered:
            cells.append("yes" if row["delivered"] else row["why_not"] or "no")
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _below(explanation: Mapping[str, Any]) -> list[str]:
    """The other candidates, clients that were not asked, and what the columns mean."""
    lines = []
    if candidates := explanation["candidates"]:
        losses = ", ".join(f"{row['client']} ({_cell(row['loss'])})" for row in candidates)
        lines.append(f"candidates and their losses: {losses}")
    if explanation["left_alone"]:
        clients = ", ".join(map(str, explanation["left_alone"]))
        lines.append(f"left alone after faults: {clients}")
    if explanation["unreachable"]:
        lines.append(f"could not be reached: {explanation['unreachable']}")
    shown = [name for name in explanation["reasons"] if name in MEANINGS and name not in _HIDDEN]
    return lines + [f"{name}: {MEANINGS[name]}" for name in shown]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return _n(value) if isinstance(value, float) else one_line(value, _NAME_WIDTH)
