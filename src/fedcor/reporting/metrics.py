"""The metrics: each gives one number of a run, such as its mean accuracy or the bytes sent.

Rounds are counted as communication rounds done: a target reached in the record's round 0 took
1 round. Rounds without a value are left out; they are never taken for 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedcor.core.types import FloatArray
from fedcor.reporting.series import Curve

# Rounds in the smoothed accuracy and in the mean of the last rounds.
WINDOW = 10
# Rounds in the spread.
TAIL = 50
# An accuracy is a count divided by the test size: values closer than this are equal.
ROUNDING = 1e-7


def _known(curve: Curve, measure: str) -> FloatArray:
    """The values of the rounds that were measured."""
    values = curve.of(measure)
    known: FloatArray = values[~np.isnan(values)]
    return known


def _first_reach(rounds: np.ndarray[Any, Any], values: FloatArray, target: float) -> float | None:
    """The first of `rounds` whose value is at or above the target."""
    hits = np.flatnonzero(values >= target - ROUNDING)
    return float(rounds[hits[0]]) if hits.size else None


def _measured_rounds(curve: Curve) -> np.ndarray[Any, Any]:
    """The rounds with an accuracy, counted from 1."""
    return np.flatnonzero(~np.isnan(curve.accuracy)) + 1


def _rounds_to_target(curve: Curve) -> float | None:
    if curve.target is None:
        return None
    return _first_reach(_measured_rounds(curve), _known(curve, "accuracy"), curve.target)


def _smooth_rounds_to_target(curve: Curve) -> float | None:
    accuracy = _known(curve, "accuracy")
    if len(accuracy) < WINDOW or curve.target is None:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(accuracy, WINDOW)
    ends = _measured_rounds(curve)[WINDOW - 1 :]
    return _first_reach(ends, windows.mean(axis=1), curve.target)


def _bytes_to_target(curve: Curve) -> float | None:
    rounds = _rounds_to_target(curve)
    return None if rounds is None else float((curve.down + curve.up)[: int(rounds)].sum())


def _time_to_target(curve: Curve) -> float | None:
    rounds = _rounds_to_target(curve)
    return None if rounds is None else _time(curve.first(int(rounds)))


def _time(curve: Curve) -> float | None:
    return _sum(curve.simulated) if curve.has_clock else None


def _spread(curve: Curve) -> float | None:
    values = _known(curve, "accuracy")
    return float(values[-TAIL:].std(ddof=1)) if len(values) > 1 else None


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None


def _sum(values: FloatArray) -> float | None:
    return float(values.sum()) if values.size else None


@dataclass(frozen=True)
class Metric:
    """What is measured of a run, how it is written, and which direction is better.

    Attributes:
        key: name in JSON and CSV
        title: name in tables
        unit: how values are written
        better: which direction is better; None where nobody said
        measure: the value of one run; None where the target was not reached, or with too few
            rounds; infinite where the model diverged
        to_target: whether the value is fixed once the target is reached
        headline: whether it stands in the table on the screen
        of: the measure that it is about; None for bytes and time
    """

    key: str
    title: str
    unit: Literal["rounds", "accuracy", "bytes", "seconds", "number"]
    better: Literal["lower", "higher"] | None
    measure: Callable[[Curve], float | None]
    to_target: bool = False
    headline: bool = True
    of: str | None = None

    @property
    def tolerance(self) -> float:
        """Values that are closer than this are equal."""
        return 0.0 if self.unit == "number" else ROUNDING


BYTES = (
    Metric("bytes_down", "bytes down", "bytes", "lower", lambda c: _sum(c.down)),
    Metric("bytes_up", "bytes up", "bytes", "lower", lambda c: _sum(c.up)),
)
# Of runs with a simulated clock.
TIME = Metric("simulated_seconds", "simulated time", "seconds", "lower", _time, headline=False)
TIME_TO_TARGET = Metric(
    "seconds_to_target",
    "time to target",
    "seconds",
    "lower",
    _time_to_target,
    to_target=True,
    of="accuracy",
)
# Every metric of a classifier, in the order of tables and files.
METRICS: tuple[Metric, ...] = (
    Metric(
        "rounds_to_target",
        "rounds to target",
        "rounds",
        "lower",
        _rounds_to_target,
        to_target=True,
        of="accuracy",
    ),
    Metric(
        "smooth_rounds_to_target",
        f"{WINDOW}-round mean to target",
        "rounds",
        "lower",
        _smooth_rounds_to_target,
        to_target=True,
        of="accuracy",
    ),
    Metric(
        "mean_accuracy",
        "mean accuracy",
        "accuracy",
        "higher",
        lambda c: _mean(_known(c, "accuracy")),
        of="accuracy",
    ),
    Metric(
        "final_accuracy",
        f"mean of the last {WINDOW}",
        "accuracy",
        "higher",
        lambda c: _mean(_known(c, "accuracy")[-WINDOW:]),
        of="accuracy",
    ),
    *BYTES,
    Metric(
        "bytes_to_target",
        "bytes to target",
        "bytes",
        "lower",
        _bytes_to_target,
        to_target=True,
        headline=False,
        of="accuracy",
    ),
    Metric(
        "last_accuracy",
        "last accuracy",
        "accuracy",
        "higher",
        lambda c: _mean(_known(c, "accuracy")[-1:]),
        headline=False,
        of="accuracy",
    ),
    Metric(
        "spread",
        f"spread of the last {TAIL}",
        "accuracy",
        "lower",
        _spread,
        headline=False,
        of="accuracy",
    ),
)


def metrics_of(
    measure: str, better: Literal["lower", "higher"] | None = None, *, clock: bool = False
) -> tuple[Metric, ...]:
    """The metrics that say how a run did by one measure, and what it cost.

    Args:
        measure: `accuracy`, `loss`, or the name of a metric of the user's
        better: which direction of the user's metric is better; None where nobody said
        clock: whether the runs have a simulated clock
    """
    if measure == "accuracy":
        return (*METRICS, TIME_TO_TARGET, TIME) if clock else METRICS

    def mean_of_last(rounds: int) -> Callable[[Curve], float | None]:
        return lambda curve: _mean(_known(curve, measure)[-rounds:])

    better = "lower" if measure == "loss" else better
    return (
        Metric(
            f"mean_{measure}",
            f"mean {measure}",
            "number",
            better,
            lambda curve: _mean(_known(curve, measure)),
            of=measure,
        ),
        Metric(
            f"final_{measure}",
            f"mean {measure} of the last {WINDOW}",
            "number",
            better,
            mean_of_last(WINDOW),
            of=measure,
        ),
        *BYTES,
        Metric(
            f"last_{measure}",
            f"last {measure}",
            "number",
            better,
            mean_of_last(1),
            headline=False,
            of=measure,
        ),
        *([TIME] if clock else []),
    )


# Numbers in sentences and narrow tables: `.701`, `+.080`, `17.3`, `9.64 MB`.


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
