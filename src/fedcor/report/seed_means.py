"""A selector's runs as one curve: the mean over seeds after each round, with a band around it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedcor.report.curve import Curve
from fedcor.types import FloatArray

__all__ = ["SeedMeans", "seed_means"]


@dataclass(frozen=True, eq=False)
class SeedMeans:
    """A measure over the T rounds that all runs have which have begun.

    Attributes:
        mean: (T,) over seeds; NaN where no seed has a value
        low: (T,) the lowest seed
        high: (T,) the highest seed
        bytes: (T,) bytes down and up until then, mean over seeds
        seconds: (T,) time until then, mean over seeds; NaN where the records do not tell
        time: (T,) simulated time until then, mean over seeds; NaN without a simulated clock
        seeds: how many runs there are
    """

    mean: FloatArray
    low: FloatArray
    high: FloatArray
    bytes: FloatArray
    seconds: FloatArray
    time: FloatArray
    seeds: int


def seed_means(curves: Mapping[int, Curve], measure: str, window: int = 1) -> SeedMeans:
    """The mean over seeds, round by round.

    Args:
        curves: the runs of one selector, by seed
        measure: `accuracy`, `loss`, or a metric of the user's
        window: rounds in each point: itself and those before it
    """
    begun = [curve for curve in curves.values() if curve.done]
    length = min((curve.done for curve in begun), default=0)
    if not length:
        none = np.empty(0)
        return SeedMeans(none, none, none, none, none, none, 0)
    values = np.array([curve.of(measure)[:length] for curve in begun])  # (seeds, rounds)
    values[np.isinf(values)] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds without any value
        smooth = np.array([_smooth(row, window) for row in values])
        mean = np.nanmean(smooth, axis=0)
        low, high = np.nanmin(smooth, axis=0), np.nanmax(smooth, axis=0)
    total = np.mean([np.cumsum(curve.down + curve.up)[:length] for curve in begun], axis=0)
    seconds = np.mean([np.cumsum(curve.seconds)[:length] for curve in begun], axis=0)
    time = np.mean([np.cumsum(curve.simulated)[:length] for curve in begun], axis=0)
    return SeedMeans(mean, low, high, total, seconds, time, len(begun))


def _smooth(values: FloatArray, window: int) -> FloatArray:
    """(T,) the mean of each value and the `window - 1` before it, as far as they are there."""
    ends = np.arange(1, len(values) + 1)
    return np.array([np.nanmean(values[max(0, end - window) : end]) for end in ends])
