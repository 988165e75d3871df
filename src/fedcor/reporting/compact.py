"""One table of a whole experiment, best first, narrow enough for 80 columns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len, set_cell_size

from fedcor.core.types import FloatArray, IntArray
from fedcor.reporting.estimates import Estimate
from fedcor.reporting.metrics import (
    WINDOW,
    Metric,
    bytes_text,
    numbers,
    percent,
    rounds_text,
    seconds_text,
)
from fedcor.reporting.names import NAME_WIDTH, short_names
from fedcor.reporting.series import Curve
from fedcor.reporting.summary import ExperimentSummary, SelectorSummary, ranking

WIDTH = 80
BETWEEN = "  "
NARROWEST_NAME = 8


@dataclass(frozen=True)
class Row:
    """One selector of the table.

    Attributes:
        selector: its whole name
        cells: one per column
        verdict: what the interval of its difference to the baseline says; None without one
    """

    selector: str
    cells: tuple[str, ...]
    verdict: str | None


@dataclass(frozen=True)
class CompactTable:
    """The table as text.

    Attributes:
        head: the titles of the columns
        rows: best selector first
    """

    head: tuple[str, ...]
    rows: tuple[Row, ...]

    def lines(self) -> list[str]:
        """The head and the rows, in columns; at most 80 wide."""
        table = [self.head, *(row.cells for row in self.rows)]
        widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
        lines = []
        for cells in table:
            # The first and the last column begin at the left, numbers end at the right.
            padded = [
                set_cell_size(cell, width)
                if place in (0, len(cells) - 1)
                else " " * (width - cell_len(cell)) + cell
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            lines.append(BETWEEN.join(padded).rstrip())
        return lines


def compact_table(experiment: ExperimentSummary) -> CompactTable:
    """The table of an experiment.

    Its columns: the mean of the measure over all rounds and over the last ten, rounds to the
    target, simulated time to the target (in all, without one) where there is a clock, bytes down
    and up, and the paired difference of the mean to the baseline with its 95 %
    interval.

    Args:
        experiment: as `summarise` gives it
    """
    selectors = [experiment.selector(name) for name in ranking(experiment)]
    mean, final = experiment.headline, _metric(experiment, f"final_{experiment.measure}")
    columns = [
        ["mean", *(_level(mean, s.estimates[mean.key]) for s in selectors)],
        [f"last {WINDOW}", *(_level(final, s.estimates[final.key]) for s in selectors)],
    ]
    if experiment.target is not None:
        columns.append([f"to {percent(experiment.target)}", *map(_to_target, selectors)])
    if experiment.has_clock:
        key = "seconds_to_target" if experiment.target is not None else "simulated_seconds"
        columns.append(["time", *(_time(key, s) for s in selectors)])
    columns.append(["bytes", *map(_bytes, selectors)])
    compared = len(selectors) > 1
    gaps = [_gap(mean, s) for s in selectors] if compared else []
    used = sum(2 + max(map(cell_len, column)) for column in columns)
    used += 2 + max(map(cell_len, gaps)) if compared else 0
    room = min(max(WIDTH - used, NARROWEST_NAME), NAME_WIDTH)
    names = short_names((s.name for s in selectors), room)
    if compared:
        interval = " [95 %]" if any("[" in gap for gap in gaps) else ""
        name = short_names([experiment.baseline], NARROWEST_NAME + 2)[experiment.baseline]
        columns.append([f"vs {name}{interval}", *gaps])
    head, *cells = zip(["selector", *(names[s.name] for s in selectors)], *columns, strict=True)
    verdicts = [s.differences[mean.key].verdict if s.differences else None for s in selectors]
    rows = [
        Row(s.name, row, verdict)
        for s, row, verdict in zip(selectors, cells, verdicts, strict=True)
    ]
    return CompactTable(head, tuple(rows))


def _metric(experiment: ExperimentSummary, key: str) -> Metric:
    return next(metric for metric in experiment.metrics if metric.key == key)


def _level(metric: Metric, estimate: Estimate) -> str:
    return "-" if estimate.mean is None else numbers(metric, [estimate.mean])[0]


def _to_target(selector: SelectorSummary) -> str:
    """Rounds; `2/3` where only two of three seeds reached it, `-` where none did."""
    mean = selector.estimates["rounds_to_target"].mean
    if mean is not None:
        return rounds_text(mean)
    reached, runs = selector.reached
    return f"{reached}/{runs}" if reached else "-"


def _time(key: str, selector: SelectorSummary) -> str:
    mean = selector.estimates[key].mean
    return "-" if mean is None else seconds_text(mean)


def _bytes(selector: SelectorSummary) -> str:
    down, up = (selector.estimates[key].mean for key in ("bytes_down", "bytes_up"))
    return "-" if down is None or up is None else bytes_text(down + up)


def _gap(metric: Metric, selector: SelectorSummary) -> str:
    """The paired difference to the baseline."""
    if not selector.differences:
        return "baseline"
    estimate = selector.differences[metric.key].estimate
    if estimate.mean is None:
        return "-" if estimate.of else "no common seed"
    if estimate.low is None or estimate.high is None:
        return numbers(metric, [estimate.mean], signed=True)[0]
    values = [estimate.mean, estimate.low, estimate.high]
    return "{} [{}, {}]".format(*numbers(metric, values, signed=True))


# A selector's runs as one curve: the mean over seeds after each round, with a band around it.


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


# Fewer points for a curve where the eye cannot tell: a band keeps its peaks.


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
