"""How well a process predicts the clients' loss changes, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["health_sentence"]

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
