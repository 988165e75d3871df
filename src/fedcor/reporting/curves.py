"""One run as arrays over its rounds, and a selector's runs as one curve with a band over seeds.

A *measure* is what is known of the model after each round: accuracy, loss, or a metric of the
user's.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.core.types import FloatArray, IntArray
from fedcor.reporting.series import (
    is_flower_app,
    optimiser_settings,
    shared_settings,
    was_renamed,
)
from fedcor.runs.record import RunRecord, first_round

# Metrics of a Flower app: `evaluate/accuracy`, `train/val_loss`.
_APP_METRIC = re.compile(r"(?:train|evaluate|server)/(?:.*[-_])?(accuracy|acc|loss)")


@dataclass(frozen=True, eq=False)
class Curve:
    """One run as arrays over its T finished rounds.

    Attributes:
        experiment: name of the experiment
        selector: name of the selector
        seed: of the run
        planned: rounds that the run is meant to have
        target: accuracy to reach; None without one
        settings: what runs must share to be compared
        options: the selector's own settings, which its runs must share to count as one selector
        optimiser: the settings of who aggregates, with a name; empty where the record has none
        renamed: whether it was given another name than its selector's
        measures: name -> (T,) values: `accuracy`, `loss` and the user's own; NaN where a round was
            not measured, infinite where the loss was not finite because the model diverged
        lists: names of metrics that are lists of numbers, which are no measure
        first_round: number of the first round where a person reads it: 1 on Flower, else 0
        down: (T,) bytes sent to clients in each round
        up: (T,) bytes that came back
        seconds: (T,) duration of each round; NaN where the record does not tell
        simulated: (T,) simulated seconds of each round; NaN without a simulated clock
    """

    experiment: str
    selector: str
    seed: int
    planned: int
    target: float | None
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    optimiser: Mapping[str, Any]
    renamed: bool
    measures: Mapping[str, FloatArray]
    lists: tuple[str, ...]
    first_round: int
    down: FloatArray
    up: FloatArray
    seconds: FloatArray
    simulated: FloatArray

    def better(self, measure: str) -> Literal["lower", "higher"] | None:
        """Which direction of a user's metric is better; None if it was not declared.

        A metric of a Flower app that is named as an accuracy or a loss needs no declaration.
        """
        if match := _APP_METRIC.fullmatch(measure):
            return "lower" if match[1] == "loss" else "higher"
        declared = self._own_metrics.get(measure)
        if not isinstance(declared, Mapping) or "function" not in declared:
            return None
        better = declared.get("better")
        return better if better in ("lower", "higher") else None

    def can_say_better(self, measure: str) -> bool:
        """Whether the settings name this metric, so that its direction can be declared there."""
        return measure in self._own_metrics

    @property
    def _own_metrics(self) -> Mapping[str, Any]:
        metrics = self.settings.get("metrics")
        return metrics if isinstance(metrics, Mapping) else {}

    @property
    def done(self) -> int:
        """Finished rounds."""
        return len(self.down)

    @property
    def has_clock(self) -> bool:
        """Whether the run has a simulated clock."""
        return bool(self.done) and bool(np.isfinite(self.simulated).all())

    @property
    def accuracy(self) -> FloatArray:
        """(T,) test accuracy; NaN where it was not measured."""
        return self.measures["accuracy"]

    def of(self, measure: str) -> FloatArray:
        """(T,) the values of a measure; all NaN if this run does not have it."""
        return self.measures.get(measure, np.full(self.done, np.nan))

    def first(self, rounds: int) -> Curve:
        """The curve of the first `rounds` rounds."""
        cut = {name: values[:rounds] for name, values in self.measures.items()}
        return replace(
            self,
            measures=cut,
            down=self.down[:rounds],
            up=self.up[:rounds],
            seconds=self.seconds[:rounds],
            simulated=self.simulated[:rounds],
        )

    def only_where(self, measure: str, known: np.ndarray[Any, np.dtype[np.bool_]]) -> Curve:
        """The curve with a measure known in some rounds only; (T,) `known` says in which."""
        values = np.where(known, self.of(measure), np.nan)
        return replace(self, measures={**self.measures, measure: values})


def read_curve(run: RunRecord) -> Curve:
    """The curve of a recorded run; a record with missing or unusable values is refused."""
    header = run.header
    name = f"run {header.get('experiment')}, {header.get('selector')}, seed {header.get('seed')}"
    try:
        config, target = header["config"], header["config"].get("target_accuracy")
        curve = Curve(
            experiment=str(header["experiment"]),
            selector=str(header["selector"]),
            seed=int(header["seed"]),
            planned=int(config["training"]["rounds"]),
            target=None if target is None else float(target),
            settings=shared_settings(run),
            options=config.get("selectors") or {},
            optimiser=optimiser_settings(run),
            renamed=was_renamed(run),
            measures=_measures(run),
            lists=_lists(run),
            first_round=first_round(run),
            down=_column(run, "bytes_down"),
            up=_column(run, "bytes_up"),
            seconds=np.array([_finite_or(row.get("seconds"), math.nan) for row in run.rounds]),
            simulated=np.array([_finite_or(row.get("duration"), math.nan) for row in run.rounds]),
        )
        order = [row["round"] for row in run.rounds]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"no usable {error}" if isinstance(error, KeyError) else f"unusable values ({error})"
        raise RecordError(f"{name}: the record has {what}; run it again or leave it out") from error
    if order != list(range(curve.done)) or not np.isfinite([curve.down, curve.up]).all():
        raise RecordError(
            f"{name}: rounds are missing, out of order or without bytes; "
            "run it again or leave it out"
        )
    return curve


def _measures(run: RunRecord) -> dict[str, FloatArray]:
    """Everything that was measured of the model, round by round.

    The record has null for a number that is not finite and for one that was never there. An
    accuracy and a user's own metric are finite where they were measured at all. A loss is not
    finite when the model has diverged; only a user's Flower app may leave rounds without one.
    """
    accuracy = _column(run, "test_accuracy")
    accuracy[~np.isfinite(accuracy)] = np.nan
    unusable = math.nan if is_flower_app(run) else math.inf
    losses = [_finite_or(row.get("test_loss"), unusable) for row in run.rounds]
    known = np.array(["test_loss" in row for row in run.rounds], dtype=bool)
    measures = {"accuracy": accuracy, "loss": np.where(known, losses, np.nan)}
    lists = _lists(run)
    for name in dict.fromkeys(key for row in run.rounds for key in row.get("metrics") or {}):
        if name in lists or not np.isnan(measures.get(name, np.nan)).all():
            continue
        values = [(row.get("metrics") or {}).get(name) for row in run.rounds]
        measures[name] = np.array([_finite_or(value, math.nan) for value in values])
    return measures


def _lists(run: RunRecord) -> tuple[str, ...]:
    """The metrics that are a list in any round."""
    metrics = [item for row in run.rounds for item in (row.get("metrics") or {}).items()]
    return tuple(dict.fromkeys(name for name, value in metrics if isinstance(value, list)))


def _finite_or(value: float | None, other: float) -> float:
    return float(value) if value is not None and math.isfinite(value) else other


def _column(run: RunRecord, key: str) -> FloatArray:
    values = [np.nan if row[key] is None else row[key] for row in run.rounds]
    return np.array(values, dtype=np.float64)


# --- the mean over seeds --------------------------------------------------------------------------


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
        nothing = np.empty(0)
        return SeedMeans(nothing, nothing, nothing, nothing, nothing, nothing, 0)
    values = np.array([curve.of(measure)[:length] for curve in begun])  # (seeds, rounds)
    values[np.isinf(values)] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds without any value
        smooth = np.array([_smooth(row, window) for row in values])
        mean = np.nanmean(smooth, axis=0)
        low, high = np.nanmin(smooth, axis=0), np.nanmax(smooth, axis=0)

    def until(columns: Iterable[FloatArray]) -> FloatArray:
        """The mean over seeds of all that was spent up to each round."""
        spent: FloatArray = np.mean([np.cumsum(column)[:length] for column in columns], axis=0)
        return spent

    return SeedMeans(
        mean=mean,
        low=low,
        high=high,
        bytes=until(curve.down + curve.up for curve in begun),
        seconds=until(curve.seconds for curve in begun),
        time=until(curve.simulated for curve in begun),
        seeds=len(begun),
    )


def _smooth(values: FloatArray, window: int) -> FloatArray:
    """(T,) the mean of each value and the `window - 1` before it, as far as they are there."""
    ends = np.arange(1, len(values) + 1)
    return np.array([np.nanmean(values[max(0, end - window) : end]) for end in ends])


MOST_POINTS = 700  # about as many as a screen has for a curve


def bucket_ends(rounds: int, most: int = MOST_POINTS) -> IntArray:
    """The last round, from 1, of each of at most `most` buckets of neighbouring rounds."""
    count = min(rounds, most)
    ends: IntArray = np.round(np.linspace(0, rounds, count + 1)[1:]).astype(np.int64)
    return ends


def downsample(means: SeedMeans, most: int = MOST_POINTS) -> tuple[IntArray, SeedMeans]:
    """Fewer points where the eye cannot tell: the rounds, from 1, and the curve at them.

    Each point stands for a bucket of rounds: the mean of the means, the lowest low, the highest
    high, and what was spent at its end.

    Args:
        means: over T rounds
        most: points; with at most as many rounds, nothing changes
    """
    ends = bucket_ends(len(means.mean), most)
    if len(ends) == len(means.mean):
        return ends, means
    starts = np.concatenate(([0], ends[:-1]))

    def each(values: FloatArray, reduce: np.ufunc) -> FloatArray:
        reduced: FloatArray = reduce.reduceat(values, starts)
        return reduced

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
