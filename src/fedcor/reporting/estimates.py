"""Statistics over seeds: means, ratios and paired differences, with their 95 % intervals.

One seed means the same partition, weights and shuffles for all selectors, so two selectors are
compared seed by seed. A pair is compared over the rounds that both runs have, and in which both
were measured. A metric that is fixed once the target is reached takes in the later rounds of the
longer run, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from scipy import stats

from fedcor.reporting.curves import Curve
from fedcor.reporting.metrics import Metric

CONFIDENCE = 0.95

Curves = Mapping[int, Curve]  # of one selector, by seed
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Verdict = Literal["better", "worse", "higher", "lower", "unclear", "equal"]


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
    half = _critical_t(n) * std / n**0.5
    return Estimate(mean, std, mean - half, mean + half, n, of)


def ratio_estimate(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """The mean of `parts` divided by the mean of `wholes`, paired by seed, with Fieller's interval.

    The interval contains every R for which the paired differences parts - R wholes do not differ
    significantly from zero. Where the wholes themselves do not, there is no ratio.
    """
    d, g = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    n = len(d)
    if n == 0 or g.mean() == 0:
        return Estimate(None, None, None, None, 0, n)
    ratio = float(d.mean() / g.mean())
    if n == 1:
        return Estimate(ratio, None, None, None, n, n)
    # The ends of the interval are the roots of a R^2 - 2 b R + c.
    q = _critical_t(n) ** 2 / n
    spread = np.cov(d, g)
    a = float(g.mean() ** 2 - q * spread[1, 1])
    b = float(d.mean() * g.mean() - q * spread[0, 1])
    c = float(d.mean() ** 2 - q * spread[0, 0])
    if a <= 0:
        return Estimate(None, None, None, None, 0, n)
    root = max(b * b - a * c, 0.0) ** 0.5
    return Estimate(ratio, None, (b - root) / a, (b + root) / a, n, n)


def _critical_t(n: int) -> float:
    """Student's t of a two-sided interval for the mean of `n` values."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))


def judge(
    estimate: Estimate, better: Literal["lower", "higher"] | None, tolerance: float
) -> Verdict | None:
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
        not np.isnan(curve.of(metric.of)[: len(both)][~both]).all()
        for a, b in _pairs(ours, theirs).values()
        for both in [_both(metric, a, b)]
        for curve in (a, b)
        if metric.of is not None
    )


def bytes_ratio(ours: Curves, theirs: Curves) -> float | None:
    """Our bytes, down and up, divided by theirs, over the rounds that both have; None without."""
    totals = [0.0, 0.0]
    for pair in _pairs(ours, theirs).values():
        rounds = min(curve.done for curve in pair)
        for place, curve in enumerate(pair):
            totals[place] += float((curve.down + curve.up)[:rounds].sum())
    return totals[0] / totals[1] if totals[1] > 0 else None


def _pairs(ours: Curves, theirs: Curves) -> dict[int, tuple[Curve, Curve]]:
    """The two runs of each common seed."""
    return {seed: (ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}


def _both(metric: Metric, a: Curve, b: Curve) -> Mask:
    """In which of the rounds that both have a metric counts: those that both have measured."""
    rounds = min(a.done, b.done)
    if metric.of is None:
        return np.ones(rounds, dtype=bool)
    return ~(np.isnan(a.of(metric.of)[:rounds]) | np.isnan(b.of(metric.of)[:rounds]))


def _cut(metric: Metric, curve: Curve, both: Mask) -> Curve:
    """The part of a run that is compared."""
    later = 0 if not metric.to_target else curve.done - len(both)
    curve = curve.first(len(both) + later)
    if metric.of is None:
        return curve
    return curve.only_where(metric.of, np.concatenate([both, np.ones(later, dtype=bool)]))
