"""Numbers for the page: as many digits as can be seen, and nothing that JSON does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcor.reporting.explanations import explanations
from fedcor.reporting.gp_calibration import health
from fedcor.reporting.names import clean
from fedcor.reporting.reason_texts import MEANINGS, PARTS
from fedcor.runs.record import RunRecord

DIGITS = 4


def compact(value: float | None, digits: int = DIGITS) -> float | int | None:
    """A number with so many significant digits; None where it is not finite.

    Example:
        >>> compact(0.123456), compact(3.0), compact(float("nan"))
        (0.1235, 3, None)
    """
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 10**15:
        return int(value)
    return float(f"{value:.{digits}g}")


def compact_list(values: Iterable[float | None], digits: int = DIGITS) -> list[float | int | None]:
    """`compact` of each; of an array, of its values."""
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    return [compact(value, digits) for value in listed]


def escaped_json(data: Any) -> str:
    """JSON that can stand within a script element: it holds no `<`, and no line separator that an
    older browser would take for the end of a line."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# How well a process predicts the clients' loss changes, in a sentence.


FEWEST = 30  # forecasts of a client; of fewer, nothing is said of the intervals
TOLERANCE = 0.1  # how far from the half an interval of 50 % may be and still be about right


def health_sentence(found: Mapping[str, Any]) -> str:
    """What the numbers of `report.health` come to; empty where nothing was foretold.

    Args:
        found: as `health` gives it
    """
    total = found["forecasts"]
    if not total:
        return ""
    parts = [
        f"Client by client the process beats independent clients in "
        f"{_of(found['better_each'], total)} {'forecast' if total == 1 else 'forecasts'}"
    ]
    if width := _width(found["calibration"]):
        parts.append(width)
    parts.append(
        "for all clients at once, which also asks how clients change together, it does in "
        f"{_of(found['better'], total)}"
    )
    return "; ".join(parts) + "."


def _of(count: int, total: int) -> str:
    """`22 of 22`; `only 8 of 22` where it is less than half."""
    return f"{'only ' if 2 * count < total else ''}{count} of {total}"


def _width(fit: Mapping[str, Any] | None) -> str:
    """Whether intervals are as wide as they should be, by the one nearest to 50 %."""
    if fit is None or fit["clients"] < FEWEST:
        return ""
    level, held = min(
        zip(fit["levels"], fit["coverage"], strict=True), key=lambda pair: abs(pair[0] - 0.5)
    )
    says = "about as wide as they should be"
    if abs(held - level) > TOLERANCE:
        says = "too wide" if held > level else "too narrow"
    return f"its intervals are {says} (a {level:.0%} interval holds {held:.0%})".replace("%", " %")


# What the page shows of a run's choices, and of the process that its selector learns.


REASON_DIGITS = 3
# What the parts of a gain say already.
_IN_PARTS = ("others", "own", "redundancy")
_MORE = 4  # numbers per pick beside its reasons: the runner-up, by how much, what came, and when
MOST_CANDIDATES = 40
_COLUMNS = (
    "error", "zero_error", "residual", "log_score", "each", "independent", "agreement",
    "similarity",
)  # fmt: skip


def count_reasons(run: RunRecord) -> int:
    """About how many numbers `why_data` gives of a run if every round is there."""
    return sum(
        len(entry.get("selected") or ()) * (_MORE + len(entry["why"]))
        for entry in run.rounds
        if entry.get("why")
    )


def why_data(run: RunRecord, stride: int = 1) -> dict[str, Any]:
    """The explanation of each round.

    Args:
        run: as `read_run` gives it
        stride: of every how many rounds it is there; of the last one always

    Returns:
        `reasons`, what each means; `notes` and `missing`, sentences that rounds refer to by number;
        `rounds`, None where a round is left out.
    """
    notes, missing = _Numbered(), _Numbered()
    reasons: dict[str, str] = {}
    rounds: list[dict[str, Any] | None] = []
    found = explanations(run)
    for number, one in enumerate(found):
        if number % stride and number < len(found) - 1:
            rounds.append(None)
            continue
        reasons |= {clean(name): meaning for name, meaning in one["reasons"].items()}
        rounds.append(_round(one, notes, missing))
    return {
        "reasons": reasons,
        "meanings": {part: MEANINGS.get(part, "") for part in PARTS},
        "notes": notes.texts,
        "missing": missing.texts,
        "rounds": rounds,
        "stride": stride,
    }


def health_data(run: RunRecord) -> dict[str, Any] | None:
    """The health of the process; None where the selector learns none."""
    found = health(run)
    if found["note"] and not found["refits"]:
        return None
    columns = found["rounds"]
    fit = found["calibration"]
    return {
        "note": clean(found["note"]),
        "sentence": health_sentence(found),
        "rounds": columns["round"],
        **{name: compact_list(columns[name]) for name in _COLUMNS},
        "extra_bytes": compact_list(columns["extra_bytes"]),
        "calibration": None
        if fit is None
        else {
            "levels": compact_list(fit["levels"]),
            "coverage": compact_list(fit["coverage"]),
            "clients": fit["clients"],
        },
        "means": {name: compact(found[name]) for name in ("log_score", "each", "independent")},
        **{key: found[key] for key in ("forecasts", "better", "better_each", "refits")},
        **{key: found[key] for key in ("probed", "probe_rounds", "bytes", "probe_bytes")},
    }


class _Numbered:
    """Texts, each once, by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)


def _round(one: Mapping[str, Any], notes: _Numbered, missing: _Numbered) -> dict[str, Any]:
    """A round, with a list over its picks for each reason; what is not there is left out."""
    rows = one["chosen"]
    found: dict[str, Any] = {}
    reasons = {
        clean(name): compact_list([_number(row.get(name)) for row in rows], REASON_DIGITS)
        for name in one["reasons"]
        if not (name in _IN_PARTS and rows and rows[0]["parts"])
    }
    if reasons:
        found["reasons"] = reasons
    if one["note"]:
        found["note"] = notes.number(clean(one["note"]))
    if one["missing"]:
        found["missing"] = [missing.number(clean(text)) for text in one["missing"]]
    if rows and all(row["parts"] for row in rows):
        found["parts"] = [
            compact_list([row["parts"][p] for row in rows], REASON_DIGITS) for p in PARTS
        ]
    if any(row["runner_up"] for row in rows):
        rivals = [row["runner_up"] or {} for row in rows]
        found["rivals"] = [rival.get("client") for rival in rivals]
        found["by"] = compact_list([_number(rival.get("by")) for rival in rivals], REASON_DIGITS)
        found["by_what"] = one["by_what"]
    if any(row["came"] for row in rows):
        came = [row["came"] or {} for row in rows]
        found["came"] = compact_list([_number(row.get("change")) for row in came], REASON_DIGITS)
        found["spans"] = [
            row["to_round"] - row["from_round"] if "to_round" in row else None for row in came
        ]
    if one["candidates"]:
        found["candidates"] = [
            [row["client"], compact(_number(row["loss"]), REASON_DIGITS)]
            for row in one["candidates"][:MOST_CANDIDATES]
        ]
    if one["before_rules"]:
        found["before_rules"] = one["before_rules"]
    if one["unmet"]:
        found["unmet"] = {clean(str(rule)): count for rule, count in one["unmet"].items()}
    if one["probed"]:
        found["probed"] = one["probed"]
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
