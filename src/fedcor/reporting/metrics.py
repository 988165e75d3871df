"""The metrics of a run, such as its mean accuracy or the bytes sent, and how they are written.

Rounds are counted as communication rounds done: a target reached in the record's round 0 took
1 round. Rounds without a value are left out; they are never taken for 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcor.core.text import BYTE_UNITS, TIME_UNITS, in_units
from fedcor.core.types import FloatArray
from fedcor.reporting.curves import Curve

WINDOW = 10  # rounds in the smoothed accuracy and in the mean of the last rounds
TAIL = 50  # rounds in the spread
ROUNDING = 1e-7  # an accuracy is a count divided by the test size: closer values are equal

Better = Literal["lower", "higher"]
Measure = Callable[[Curve], float | None]


@dataclass(frozen=True)
class Metric:
    """A number that describes a run, how it is written, and which direction is better.

    Attributes:
        key: name in JSON and CSV
        title: name in tables
        unit: how values are written
        better: which direction is better; None if it was not declared
        measure: the value of one run; None where the target was not reached, or with too few
            rounds; infinite where the model diverged
        to_target: whether the value is fixed once the target is reached
        headline: whether it stands in the table on the screen
        of: the measure that it is about; None for bytes and time
    """

    key: str
    title: str
    unit: Literal["rounds", "accuracy", "bytes", "seconds", "number"]
    better: Better | None
    measure: Measure
    to_target: bool = False
    headline: bool = True
    of: str | None = None

    @property
    def tolerance(self) -> float:
        """Values that are closer than this are equal."""
        return 0.0 if self.unit == "number" else ROUNDING


# --- values of a run ------------------------------------------------------------------------------


def _known(curve: Curve, measure: str = "accuracy") -> FloatArray:
    """The values of the rounds that were measured."""
    values = curve.of(measure)
    known: FloatArray = values[~np.isnan(values)]
    return known


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None


def _sum(values: FloatArray) -> float | None:
    return float(values.sum()) if values.size else None


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
    return _first_reach(_measured_rounds(curve), _known(curve), curve.target)


def _smooth_rounds_to_target(curve: Curve) -> float | None:
    accuracy = _known(curve)
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
    values = _known(curve)
    return float(values[-TAIL:].std(ddof=1)) if len(values) > 1 else None


def _mean_of_last(measure: str, rounds: int = 0) -> Measure:
    """The mean of a measure over the last `rounds` rounds; over all rounds for 0."""
    return lambda curve: _mean(_known(curve, measure)[-rounds:])


# --- the metrics ----------------------------------------------------------------------------------


def _to_target(
    key: str, title: str, unit: Literal["rounds", "bytes", "seconds"], measure: Measure
) -> Metric:
    return Metric(key, title, unit, "lower", measure, to_target=True, of="accuracy")


def _accuracy(key: str, title: str, measure: Measure, better: Better = "higher") -> Metric:
    return Metric(key, title, "accuracy", better, measure, of="accuracy")


def _not_shown(metric: Metric) -> Metric:
    """The metric in files only."""
    return replace(metric, headline=False)


BYTES = (
    Metric("bytes_down", "bytes down", "bytes", "lower", lambda c: _sum(c.down)),
    Metric("bytes_up", "bytes up", "bytes", "lower", lambda c: _sum(c.up)),
)
# Of runs with a simulated clock.
TIME = _not_shown(Metric("simulated_seconds", "simulated time", "seconds", "lower", _time))
TIME_TO_TARGET = _to_target("seconds_to_target", "time to target", "seconds", _time_to_target)
_SMOOTH = f"{WINDOW}-round mean to target"
# Every metric of a classifier, in the order of tables and files.
METRICS: tuple[Metric, ...] = (
    _to_target("rounds_to_target", "rounds to target", "rounds", _rounds_to_target),
    _to_target("smooth_rounds_to_target", _SMOOTH, "rounds", _smooth_rounds_to_target),
    _accuracy("mean_accuracy", "mean accuracy", _mean_of_last("accuracy")),
    _accuracy("final_accuracy", f"mean of the last {WINDOW}", _mean_of_last("accuracy", WINDOW)),
    *BYTES,
    _not_shown(_to_target("bytes_to_target", "bytes to target", "bytes", _bytes_to_target)),
    _not_shown(_accuracy("last_accuracy", "last accuracy", _mean_of_last("accuracy", 1))),
    _not_shown(_accuracy("spread", f"spread of the last {TAIL}", _spread, "lower")),
)


def metrics_of(
    measure: str, better: Better | None = None, *, clock: bool = False
) -> tuple[Metric, ...]:
    """The metrics that say how a run did by one measure, and what it cost.

    Args:
        measure: `accuracy`, `loss`, or the name of a metric of the user's
        better: which direction of the user's metric is better; None if it was not declared
        clock: whether the runs have a simulated clock
    """
    if measure == "accuracy":
        return (*METRICS, TIME_TO_TARGET, TIME) if clock else METRICS
    better = "lower" if measure == "loss" else better
    mean, final, last = (
        Metric(key, title, "number", better, _mean_of_last(measure, rounds), of=measure)
        for key, title, rounds in (
            (f"mean_{measure}", f"mean {measure}", 0),
            (f"final_{measure}", f"mean {measure} of the last {WINDOW}", WINDOW),
            (f"last_{measure}", f"last {measure}", 1),
        )
    )
    metrics = (mean, final, *BYTES, _not_shown(last))
    return (*metrics, TIME) if clock else metrics


# --- numbers as text ------------------------------------------------------------------------------

DIGITS = 3
MOST_DIGITS = 7


def numbers(metric: Metric, values: Sequence[float], *, signed: bool = False) -> list[str]:
    """The values of one metric for sentences and narrow tables, all with the same number of digits:
    `.701`, `+.080`, `17.3`.

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


def numbers_with_unit(
    metric: Metric, values: Sequence[float], sign: str = ""
) -> tuple[list[str], str]:
    """The values of one metric for wide tables, and their unit; never a `-0.0`."""
    if metric.unit in ("bytes", "seconds"):
        return in_units(values, BYTE_UNITS if metric.unit == "bytes" else TIME_UNITS, sign)
    style = {"number": ".4g", "rounds": "z.1f", "accuracy": "z.3f"}[metric.unit]
    return [f"{value:{sign}{style}}" for value in values], ""


def rounds_text(rounds: float) -> str:
    """`17.3`, or `17` where it is whole."""
    return f"{rounds:.1f}".removesuffix(".0")


def percent(fraction: float) -> str:
    """`80 %`."""
    return f"{100 * fraction:.6g} %"


def _significant(values: Sequence[float], ends: Sequence[float], sign: str) -> list[str]:
    """Three digits of the largest, and as many places for the others; powers of ten if need be."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest == 0 or 1e-3 <= largest < 1e5:
        places = 2 - math.floor(math.log10(largest)) if largest else 2
        for digits in range(max(places, 0), max(places, 0) + 3):
            if not any(_vanishes(value, digits) for value in ends):
                return [f"{value:{sign}z.{digits}f}" for value in values]
    return [f"{value:{sign}.2e}" for value in values]


def _vanishes(value: float, digits: int) -> bool:
    return value != 0 and math.isclose(round(value, digits), 0.0, abs_tol=0.0)


def _without_zero(text: str) -> str:
    """`0.701` as `.701`; `1.000` stays."""
    sign, number = ("", text) if text[0].isdigit() else (text[0], text[1:])
    return sign + (number[1:] if number.startswith("0.") else number)
