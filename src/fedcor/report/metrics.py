"""The metrics: each gives one number of a run, such as its mean accuracy or the bytes sent.

Rounds are counted as communication rounds done: a target reached in the record's round 0 took
1 round. Rounds without a value are left out; they are never taken for 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedcor.report.curve import Curve
from fedcor.types import FloatArray

__all__ = ["METRICS", "ROUNDING", "Metric", "metrics_of"]

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
