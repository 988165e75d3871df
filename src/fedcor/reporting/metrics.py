"""The numbers of a run (mean accuracy, rounds to the target, bytes), over seeds, and as text.

A *metric* gives one value per run. Rounds are counted as communication rounds done: a target that
was reached in the record's round 0 took 1 round. Rounds without a value are left out; they are
never counted as 0.

An *estimate* is a mean over seeds with its 95 % interval. One seed means the same partition,
weights and shuffles for all selectors, so two selectors are compared seed by seed: a *difference*.
A pair is compared over the rounds that both runs have, and in which both were measured. A metric
that is fixed once the target is reached includes the later rounds of the longer run, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from fedcor.core.text import BYTE_UNITS, TIME_UNITS, in_units
from fedcor.core.types import FloatArray
from fedcor.reporting.curves import Curve, Mask

WINDOW = 10  # rounds in the smoothed accuracy and in the mean of the last rounds
TAIL = 50  # rounds in the spread
CONFIDENCE = 0.95
ROUNDING = 1e-7  # an accuracy is a count divided by the test size: closer values are equal

Better = Literal["lower", "higher"]
Unit = Literal["rounds", "accuracy", "bytes", "seconds", "number"]
Measure = Callable[[Curve], float | None]
Curves = Mapping[int, Curve]  # of one selector, by seed
Verdict = Literal["better", "worse", "higher", "lower", "unclear", "equal"]


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
    unit: Unit
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
    values: FloatArray = curve.of(measure)[curve.known(measure)]
    return values


def _sum(values: FloatArray) -> float | None:
    return float(values.sum()) if values.size else None


def _bytes(curve: Curve) -> float | None:
    return _sum(curve.down + curve.up)


def _time(curve: Curve) -> float | None:
    return _sum(curve.simulated) if curve.has_clock else None


def _spread(curve: Curve) -> float | None:
    values = _known(curve)
    return float(values[-TAIL:].std(ddof=1)) if len(values) > 1 else None


def _mean_of_last(curve: Curve, measure: str, rounds: int) -> float | None:
    """The mean of a measure over the last `rounds` rounds; over all rounds for 0."""
    values = _known(curve, measure)[-rounds:]
    return float(values.mean()) if values.size else None


def _rounds_to_target(curve: Curve, window: int = 1) -> float | None:
    """The first round, from 1, at which the mean of the last `window` accuracies is at the target
    or above it."""
    accuracy = _known(curve)
    if curve.target is None or len(accuracy) < window:
        return None
    means = np.lib.stride_tricks.sliding_window_view(accuracy, window).mean(axis=1)
    rounds = np.flatnonzero(curve.known("accuracy"))[window - 1 :] + 1
    hits = rounds[means >= curve.target - ROUNDING]
    return float(hits[0]) if hits.size else None


def _until_target(curve: Curve, spent: Measure) -> float | None:
    """What was spent up to the first round that is at the target."""
    rounds = _rounds_to_target(curve)
    return None if rounds is None else spent(curve.first(int(rounds)))


# --- the metrics ----------------------------------------------------------------------------------


def _to_target(key: str, title: str, unit: Unit, measure: Measure, headline: bool = True) -> Metric:
    return Metric(key, title, unit, "lower", measure, True, headline, of="accuracy")


def _means(measure: str, unit: Unit, better: Better | None) -> list[Metric]:
    """The mean of a measure over all rounds, over the last ten, and its last value."""
    return [
        Metric(
            key=f"{name}_{measure}",
            title=title,
            unit=unit,
            better=better,
            measure=partial(_mean_of_last, measure=measure, rounds=rounds),
            headline=rounds != 1,
            of=measure,
        )
        for name, title, rounds in (
            ("mean", f"mean {measure}", 0),
            ("final", f"mean of the last {WINDOW}", WINDOW),
            ("last", f"last {measure}", 1),
        )
    ]


_BYTES = (
    Metric("bytes_down", "bytes down", "bytes", "lower", lambda c: _sum(c.down)),
    Metric("bytes_up", "bytes up", "bytes", "lower", lambda c: _sum(c.up)),
)
_SMOOTH = partial(_rounds_to_target, window=WINDOW)
_BYTES_TO, _TIME_TO = (partial(_until_target, spent=spent) for spent in (_bytes, _time))
_MEAN, _FINAL, _LAST = _means("accuracy", "accuracy", "higher")
# Of runs with a simulated clock.
TIME = Metric("simulated_seconds", "simulated time", "seconds", "lower", _time, headline=False)
# Every metric of a classifier, in the order of tables and files.
METRICS: tuple[Metric, ...] = (
    _to_target("rounds_to_target", "rounds to target", "rounds", _rounds_to_target),
    _to_target("smooth_rounds_to_target", f"{WINDOW}-round mean to target", "rounds", _SMOOTH),
    _MEAN,
    _FINAL,
    *_BYTES,
    _to_target("bytes_to_target", "bytes to target", "bytes", _BYTES_TO, headline=False),
    _LAST,
    replace(
        _LAST, key="spread", title=f"spread of the last {TAIL}", better="lower", measure=_spread
    ),
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
    time = (TIME,) if clock else ()
    if measure == "accuracy":
        to_target = _to_target("seconds_to_target", "time to target", "seconds", _TIME_TO)
        return (*METRICS, to_target, *time) if clock else METRICS
    mean, final, last = _means(measure, "number", "lower" if measure == "loss" else better)
    return (mean, final, *_BYTES, last, *time)


# --- means over seeds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean or a ratio over seeds with its 95 % interval: `n` values out of `of`.

    Attributes:
        mean: None where there is no value, or where every seed was needed and some had none
        std: standard deviation over seeds (ddof = 1); None for one value and for a ratio
        low: lower end of the interval; None where there is none, as for one value
        high: upper end of the interval
        n: how many runs or pairs had a value
        of: how many runs or pairs there are
    """

    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    n: int
    of: int

    @property
    def known(self) -> list[float]:
        """The mean, and the ends of the interval: those that there are."""
        return [value for value in (self.mean, self.low, self.high) if value is not None]

    @property
    def half_width(self) -> float | None:
        """Distance from the mean to the upper end of the interval."""
        return None if self.mean is None or self.high is None else self.high - self.mean


@dataclass(frozen=True)
class Difference:
    """A selector minus the baseline, seed by seed.

    Attributes:
        estimate: of the mean paired difference; `n` and `of` count pairs
        rounds: fewest and most rounds that a pair was compared over, those in which both have a
            value; None for a metric that is fixed once the target is reached
        verdict: "unclear" where the interval contains zero; None without an interval; "higher" or
            "lower" if no direction was declared to be better
    """

    estimate: Estimate
    rounds: tuple[int, int] | None
    verdict: Verdict | None


def mean_estimate(values: Iterable[float | None], all_needed: bool = False) -> Estimate:
    """The mean over seeds with its t-interval.

    Args:
        values: one per seed; None where a seed has no value. One that is not finite (its model
            diverged) is no value either, and leaves no mean: that of the others would flatter
        all_needed: give no mean unless every seed has a value (the paper's N/A)
    """
    given = list(values)
    known = [value for value in given if value is not None and math.isfinite(value)]
    n, of = len(known), len(given)
    diverged = n < sum(value is not None for value in given)
    if n == 0 or diverged or (all_needed and n < of):
        return Estimate(None, None, None, None, n, of)
    mean = float(np.mean(known))
    if n == 1:
        return Estimate(mean, None, None, None, n, of)
    std = float(np.std(known, ddof=1))
    half = critical_t(n) * std / n**0.5
    return Estimate(mean, std, mean - half, mean + half, n, of)


def critical_t(n: int) -> float:
    """Student's t of a two-sided interval for the mean of `n` values."""
    from scipy import stats  # takes long to import

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))


def judge(estimate: Estimate, better: Better | None, tolerance: float) -> Verdict | None:
    """What the interval of a difference says; ends within `tolerance` of zero count as zero."""
    if estimate.low is None or estimate.high is None:
        return None
    if max(abs(estimate.low), abs(estimate.high)) <= tolerance:
        return "equal"
    if estimate.low <= tolerance and estimate.high >= -tolerance:
        return "unclear"
    if better is None:
        return "higher" if estimate.low > 0 else "lower"
    return "better" if (estimate.low > 0) == (better == "higher") else "worse"


# --- two selectors, seed by seed ------------------------------------------------------------------


def difference(metric: Metric, ours: Curves, theirs: Curves) -> Difference:
    """The mean paired difference of one metric, ours minus theirs, with its interval."""
    rounds = None
    if not metric.to_target:
        counts = [int(_both(metric, *pair).sum()) for pair in _pairs(ours, theirs).values()]
        compared = [count for count in counts if count]  # a pair without rounds is not compared
        rounds = (min(compared), max(compared)) if compared else None
    values = paired_values(metric, ours, theirs)
    estimate = mean_estimate(values.values(), metric.to_target)
    return Difference(estimate, rounds, judge(estimate, metric.better, metric.tolerance))


def paired_values(metric: Metric, ours: Curves, theirs: Curves) -> dict[int, float | None]:
    """Ours minus theirs for each common seed; None where one of them has no value."""
    values: dict[int, float | None] = {}
    for seed, pair in _pairs(ours, theirs).items():
        both = _both(metric, *pair)
        x, y = (metric.measure(_cut(metric, curve, both)) for curve in pair)
        values[seed] = None if x is None or y is None else x - y
    return values


def drops_values(metric: Metric, ours: Curves, theirs: Curves) -> bool:
    """Whether rounds are left out of a comparison although one of the two runs was measured."""
    return any(
        (curve.known(metric.of)[: len(both)] & ~both).any()
        for pair in _pairs(ours, theirs).values()
        for both in [_both(metric, *pair)]
        for curve in pair
    )


def bytes_ratio(ours: Curves, theirs: Curves) -> float | None:
    """Our bytes, down and up, divided by theirs, over the rounds that both have; None without."""
    totals = np.zeros(2)
    for pair in _pairs(ours, theirs).values():
        rounds = min(curve.done for curve in pair)
        totals += [(curve.down + curve.up)[:rounds].sum() for curve in pair]
    return float(totals[0] / totals[1]) if totals[1] > 0 else None


def _pairs(ours: Curves, theirs: Curves) -> dict[int, tuple[Curve, Curve]]:
    """The two runs of each common seed."""
    return {seed: (ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}


def _both(metric: Metric, a: Curve, b: Curve) -> Mask:
    """In which of the rounds that both have a metric counts: those that both have measured."""
    rounds = min(a.done, b.done)
    both: Mask = a.known(metric.of)[:rounds] & b.known(metric.of)[:rounds]
    return both


def _cut(metric: Metric, curve: Curve, both: Mask) -> Curve:
    """The part of a run that is compared."""
    later = curve.done - len(both) if metric.to_target else 0
    kept = np.append(both, np.ones(later, dtype=bool))
    return curve.first(len(kept)).only_where(metric.of, kept)


# --- numbers as text ------------------------------------------------------------------------------


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
    if metric.unit == "accuracy":
        fraction = f"{sign}z.{_digits(values, 3, 7) or 7}f"
        # `0.701` as `.701`; `1.000` stays.
        return [re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{fraction}}") for value in values]
    if metric.unit != "number":
        return [f"{value:{sign}.1f}".removesuffix(".0") for value in values]
    largest = max((abs(value) for value in values), default=0.0)
    if largest == 0 or 1e-3 <= largest < 1e5:
        # Three digits of the largest, and as many places for the others.
        places = max(2 - math.floor(math.log10(largest)), 0) if largest else 2
        if (digits := _digits(values, places, places + 3)) is not None:
            return [f"{value:{sign}z.{digits}f}" for value in values]
    return [f"{value:{sign}.2e}" for value in values]


def _digits(values: Sequence[float], first: int, stop: int) -> int | None:
    """The fewest digits of `range(first, stop)` with which no end of an interval but zero is
    written as zero; None if there are none."""
    ends = [value for value in values[1:] or values if value != 0]
    return next((n for n in range(first, stop) if all(round(end, n) for end in ends)), None)


def numbers_with_unit(
    metric: Metric, values: Sequence[float], sign: str = ""
) -> tuple[list[str], str]:
    """The values of one metric for wide tables, and their unit; never a `-0.0`."""
    if metric.unit in ("bytes", "seconds"):
        return in_units(values, BYTE_UNITS if metric.unit == "bytes" else TIME_UNITS, sign)
    style = {"number": ".4g", "rounds": "z.1f", "accuracy": "z.3f"}[metric.unit]
    return [f"{value:{sign}{style}}" for value in values], ""


def with_interval(texts: Sequence[str]) -> str:
    """`+.052 [+.041, +.063]`; without the bracket where there is no interval."""
    mean, *ends = texts
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def percent(fraction: float) -> str:
    """`80 %`."""
    return f"{100 * fraction:.6g} %"
