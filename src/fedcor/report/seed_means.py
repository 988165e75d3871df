"""A selector's runs as one curve: the mean over seeds after each round, with a band around it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedcor.report.estimates import critical_t
from fedcor.report.metrics import Curve
from fedcor.types import FloatArray

__all__ = ["SeedMeans", "seed_means"]


@dataclass(frozen=True, eq=False)
class SeedMeans:
    """A measure over the T rounds that all runs have which have begun.

    Attributes:
        mean: (T,) over seeds; NaN where no seed has a value
        low: (T,) lower end of the 95 % interval of the mean; the mean itself where there is none
        high: (T,) upper end
        bytes: (T,) bytes down and up until then, mean over seeds
        seconds: (T,) time until then, mean over seeds; NaN where the records do not tell
        seeds: how many runs there are
    """

    mean: FloatArray
    low: FloatArray
    high: FloatArray
    bytes: FloatArray
    seconds: FloatArray
    seeds: int


def seed_means(curves: Mapping[int, Curve], measure: str) -> SeedMeans:
    """The mean over seeds, round by round.

    Args:
        curves: the runs of one selector, by seed
        measure: `accuracy`, `loss`, or a metric of the user's
    """
    begun = [curve for curve in curves.values() if curve.done]
    length = min((curve.done for curve in begun), default=0)
    if not length:
        none = np.empty(0)
        return SeedMeans(none, none, none, none, none, 0)
    values = np.array([curve.of(measure)[:length] for curve in begun])  # (seeds, rounds)
    values[np.isinf(values)] = np.nan
    n = np.isfinite(values).sum(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds without any value
        mean = np.nanmean(values, axis=0)
        std = np.nanstd(values, axis=0, ddof=1)
    t = np.array([critical_t(count) if count > 1 else 0.0 for count in n.tolist()])
    half = np.where(n > 1, t * std / np.sqrt(np.maximum(n, 1)), 0.0)
    total = np.mean([np.cumsum(curve.down + curve.up)[:length] for curve in begun], axis=0)
    seconds = np.mean([np.cumsum(curve.seconds)[:length] for curve in begun], axis=0)
    return SeedMeans(mean, mean - half, mean + half, total, seconds, len(begun))
