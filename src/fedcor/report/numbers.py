"""Numbers in sentences and narrow tables: `.701`, `+.080`, `17.3`, `9.64 MB`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedcor.report.metrics import Metric

__all__ = ["TIME_UNITS", "bytes_text", "numbers", "percent", "rounds_text", "seconds_text"]

DIGITS = 3
MOST_DIGITS = 7
TIME_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def numbers(metric: Metric, values: Sequence[float], *, signed: bool = False) -> list[str]:
    """The values of one metric, all with the same number of digits.

    There are enough digits that no end of an interval but zero is written as zero: its sign is what
    matters. A mean within an interval may be.

    Args:
        metric: what the values are of
        values: finite ones: a single one, or a mean and then the ends of its interval
        signed: whether a plus is written too
    """
    sign = "+" if signed else ""
    ends = values[1:] or values
    if metric.unit == "accuracy":
        digits = DIGITS
        while digits < MOST_DIGITS and any(_vanishes(value, digits) for value in ends):
            digits += 1
        return [_without_zero(f"{value:{sign}z.{digits}f}") for value in values]
    if metric.unit == "number":
        return _significant(values, ends, sign)
    return [f"{value:{sign}.1f}".removesuffix(".0") for value in values]


def _significant(values: Sequence[float], ends: Sequence[float], sign: str) -> list[str]:
    """Three digits of the largest, and as many places for the others; powers of ten if need be."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest == 0 or 1e-3 <= largest < 1e5:
        places = 2 - math.floor(math.log10(largest)) if largest else 2
        for digits in range(max(places, 0), max(places, 0) + 3):
            if not any(_vanishes(value, digits) for value in ends):
                return [f"{value:{sign}z.{digits}f}" for value in values]
    return [f"{value:{sign}.2e}" for value in values]


def rounds_text(rounds: float) -> str:
    """`17.3`, or `17` where it is whole."""
    return f"{rounds:.1f}".removesuffix(".0")


def percent(fraction: float) -> str:
    """`80 %`."""
    return f"{100 * fraction:.6g} %"


def bytes_text(count: float) -> str:
    """Three digits and a unit: `9.64 MB`."""
    for size, unit in _UNITS:
        if count >= size * (1 - 5e-4):
            scaled = count / size
            digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{scaled:.{digits}f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: `41.0 s`, `12.3 min`, `2.31 h`, `1.20 d`."""
    scale, unit = next((pair for pair in TIME_UNITS if seconds >= 2 * pair[0]), TIME_UNITS[-1])
    scaled = seconds / scale
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def _vanishes(value: float, digits: int) -> bool:
    return value != 0 and math.isclose(round(value, digits), 0.0, abs_tol=0.0)


def _without_zero(text: str) -> str:
    """`0.701` as `.701`; `1.000` stays."""
    sign, number = ("", text) if text[0].isdigit() else (text[0], text[1:])
    return sign + (number[1:] if number.startswith("0.") else number)
