"""Fewer points for a curve where the eye cannot tell: a band keeps its peaks."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from fedcor.report.seed_means import SeedMeans
from fedcor.types import FloatArray, IntArray

__all__ = ["bucket_ends", "thinned"]

MOST_POINTS = 700  # about as many as a screen has for a curve


def bucket_ends(rounds: int, most: int = MOST_POINTS) -> IntArray:
    """The last round, from 1, of each of at most `most` buckets of neighbouring rounds."""
    count = min(rounds, most)
    ends: IntArray = np.round(np.linspace(0, rounds, count + 1)[1:]).astype(np.int64)
    return ends


def thinned(means: SeedMeans, most: int = MOST_POINTS) -> tuple[IntArray, SeedMeans]:
    """The rounds, from 1, and the curve at them: of each bucket the mean of the means, the lowest
    low and the highest high, and what was spent at its end.

    Args:
        means: over T rounds
        most: points; with at most as many rounds, nothing changes
    """
    ends = bucket_ends(len(means.mean), most)
    if len(ends) == len(means.mean):
        return ends, means
    starts = np.concatenate(([0], ends[:-1]))

    def each(values: FloatArray, of: np.ufunc) -> FloatArray:
        found: FloatArray = of.reduceat(values, starts)
        return found

    known = np.isfinite(means.mean)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # buckets without any value
        sums = each(np.where(known, means.mean, 0.0), np.add)
        mean = sums / each(known.astype(np.float64), np.add)
    return ends, replace(
        means,
        mean=mean,
        low=each(means.low, np.fmin),
        high=each(means.high, np.fmax),
        bytes=means.bytes[ends - 1],
        seconds=means.seconds[ends - 1],
        time=means.time[ends - 1],
    )
