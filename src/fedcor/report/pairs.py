"""Two selectors seed by seed: one seed means the same partition, weights and shuffles for both.

A pair is compared over the rounds that both runs have, and in which both were measured. A metric
that is fixed once the target is reached takes in the later rounds of the longer run, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from fedcor.report.curve import Curve
from fedcor.report.estimates import Difference, judge, mean_estimate
from fedcor.report.metrics import Metric

__all__ = ["bytes_ratio", "difference", "drops_values", "paired_values"]

Curves = Mapping[int, Curve]  # of one selector, by seed
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


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
    """Ours minus theirs for each common seed; None where one of both has no value."""
    found: dict[int, float | None] = {}
    for seed, (a, b) in _pairs(ours, theirs).items():
        both = _both(metric, a, b)
        one, other = (metric.measure(_cut(metric, curve, both)) for curve in (a, b))
        found[seed] = None if one is None or other is None else one - other
    return found


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
    pairs = _pairs(ours, theirs).values()
    mine, others = (
        sum(
            float((pair[place].down + pair[place].up)[: min(one.done for one in pair)].sum())
            for pair in pairs
        )
        for place in (0, 1)
    )
    return mine / others if others > 0 else None


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
