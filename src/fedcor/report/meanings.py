"""What the reasons in a record mean, how a round was chosen, and what a record lacks: in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcor.report.numbers import seconds_text

__all__ = ["MEANINGS", "PARTS", "PICK_DETAILS", "round_note", "what_is_missing"]

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
