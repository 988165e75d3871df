"""Two selectors seed by seed: one seed means the same partition, weights and shuffles for both.

A metric that is fixed once the target is reached is taken as it is. Any other is compared over the
rounds that both runs of a pair have, and in which both were measured.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedcor.report.curve import Curve
from fedcor.report.estimates import Difference, judge, mean_estimate
from fedcor.report.metrics import Metric

__all__ = ["bytes_ratio", "difference", "paired_values"]

Curves = Mapping[int, Curve]  # of one selector, by seed


def difference(metric: Metric, ours: Curves, theirs: Curves) -> Difference:
    """The mean paired difference of one metric, ours minus theirs, with its interval."""
    rounds = None
    if not metric.to_target:
        # A pair without rounds is not compared.
        compared = [rounds for rounds in _common_rounds(ours, theirs).values() if rounds > 0]
        rounds = (min(compared), max(compared)) if compared else None
    values = paired_values(metric, ours, theirs)
    estimate = mean_estimate(values.values(), metric.to_target)
    return Difference(estimate, rounds, judge(estimate, metric.better, metric.tolerance))


def paired_values(metric: Metric, ours: Curves, theirs: Curves) -> dict[int, float | None]:
    """Ours minus theirs for each common seed; None where one of both has no value."""
    found: dict[int, float | None] = {}
    for seed, rounds in _common_rounds(ours, theirs).items():
        a, b = ours[seed], theirs[seed]
        if not metric.to_target:
            a, b = a.first(rounds), b.first(rounds)
            if metric.of is not None:
                known = ~(np.isnan(a.of(metric.of)) | np.isnan(b.of(metric.of)))
                a, b = a.only_where(metric.of, known), b.only_where(metric.of, known)
        one, other = metric.measure(a), metric.measure(b)
        found[seed] = None if one is None or other is None else one - other
    return found


def bytes_ratio(ours: Curves, theirs: Curves) -> float | None:
    """Our bytes, down and up, divided by theirs, over the rounds that both have; None without."""
    pairs = _common_rounds(ours, theirs).items()
    mine, others = (
        sum(float((curves[seed].down + curves[seed].up)[:rounds].sum()) for seed, rounds in pairs)
        for curves in (ours, theirs)
    )
    return mine / others if others > 0 else None


def _common_rounds(ours: Curves, theirs: Curves) -> dict[int, int]:
    """How many rounds both runs of each common seed have."""
    common = sorted(ours.keys() & theirs.keys())
    return {seed: min(ours[seed].done, theirs[seed].done) for seed in common}
