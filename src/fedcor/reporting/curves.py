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
from typing import Any, Literal, TypeAlias

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.core.types import FloatArray, IntArray
from fedcor.reporting.series import is_flower_app
from fedcor.runs.record import RunRecord

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
# Metrics of a Flower app: `evaluate/accuracy`, `train/val_loss`.
_APP_METRIC = re.compile(r"(?:train|evaluate|server)/(?:.*[-_])?(accuracy|acc|loss)")


@dataclass(frozen=True, eq=False)
class Curve:
    """One run as arrays over its T finished rounds.

    Attributes:
        run: its record
        selector: name of the selector
        seed: of the run
        planned: rounds that the run is meant to have
        target: accuracy to reach; None without one
        measures: name -> (T,) values: `accuracy`, `loss` and the user's own; NaN where a round was
            not measured, infinite where the loss was not finite because the model diverged
        down: (T,) bytes sent to clients in each round
        up: (T,) bytes that came back
        seconds: (T,) duration of each round; NaN where the record does not tell
        simulated: (T,) simulated seconds of each round; NaN without a simulated clock
    """

    run: RunRecord
    selector: str
    seed: int
    planned: int
    target: float | None
    measures: Mapping[str, FloatArray]
    down: FloatArray
    up: FloatArray
    seconds: FloatArray
    simulated: FloatArray

    @property
    def declared_metrics(self) -> Mapping[str, Any]:
        """The metrics that the settings name, where a direction can be declared."""
        metrics = self.run.header["config"].get("metrics")
        return metrics if isinstance(metrics, Mapping) else {}

    def better(self, measure: str) -> Literal["lower", "higher"] | None:
        """Which direction of a user's metric is better; None if it was not declared.

        A metric of a Flower app that is named as an accuracy or a loss needs no declaration.
        """
        if match := _APP_METRIC.fullmatch(measure):
            return "lower" if match[1] == "loss" else "higher"
        match self.declared_metrics.get(measure):
            case {"function": _, "better": "lower"}:
                return "lower"
            case {"function": _, "better": "higher"}:
                return "higher"
        return None

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

    def known(self, measure: str | None) -> Mask:
        """(T,) in which rounds a measure has a value; in all for None."""
        return np.ones(self.done, dtype=bool) if measure is None else ~np.isnan(self.of(measure))

    def first(self, rounds: int) -> Curve:
        """The curve of the first `rounds` rounds."""
        measures = {name: values[:rounds] for name, values in self.measures.items()}
        spent = ("down", "up", "seconds", "simulated")
        cut = {name: getattr(self, name)[:rounds] for name in spent}
        return replace(self, measures=measures, **cut)

    def only_where(self, measure: str | None, known: Mask) -> Curve:
        """The curve with a measure known in some rounds only; (T,) `known` says in which."""
        if measure is None:
            return self
        values = np.where(known, self.of(measure), np.nan)
        return replace(self, measures={**self.measures, measure: values})


def read_curve(run: RunRecord) -> Curve:
    """The curve of a recorded run; a record with missing or unusable values is refused."""
    header, rounds = run.header, run.rounds
    name = f"run {header.get('experiment')}, {header.get('selector')}, seed {header.get('seed')}"
    try:
        target = header["config"].get("target_accuracy")
        curve = Curve(
            run=run,
            selector=str(header["selector"]),
            seed=int(header["seed"]),
            planned=int(header["config"]["training"]["rounds"]),
            target=None if target is None else float(target),
            measures=_measures(run),
            down=_array(row["bytes_down"] for row in rounds),
            up=_array(row["bytes_up"] for row in rounds),
            seconds=_array(row.get("seconds") for row in rounds),
            simulated=_array(row.get("duration") for row in rounds),
        )
        order = [row["round"] for row in rounds]
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
    """Everything that was measured of the model, round by round; lists of numbers are no measure.

    The record has null for a number that is not finite and for one that was never there. An
    accuracy and a user's own metric are finite where they were measured at all. A loss is not
    finite when the model has diverged; only a user's own app or loop may leave rounds without one.
    """
    rounds, own = run.rounds, is_flower_app(run) or run.header.get("engine") == "own"
    losses = _array((row.get("test_loss") for row in rounds), math.nan if own else math.inf)
    known = np.array(["test_loss" in row for row in rounds], dtype=bool)
    measures = {
        "accuracy": _array(row["test_accuracy"] for row in rounds),
        "loss": np.where(known, losses, np.nan),
    }
    metrics = [row.get("metrics") or {} for row in rounds]
    for name in dict.fromkeys(key for of_round in metrics for key in of_round):
        values = [of_round.get(name) for of_round in metrics]
        is_taken = not np.isnan(measures.get(name, np.nan)).all()
        if not is_taken and not any(isinstance(value, list) for value in values):
            measures[name] = _array(values)
    return measures


def _array(values: Iterable[float | None], unusable: float = math.nan) -> FloatArray:
    """Numbers of a record; `unusable` where there is none, or it is not finite."""
    given = [math.nan if value is None else float(value) for value in values]
    return np.where(np.isfinite(given), given, unusable)


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

    @property
    def rounds(self) -> FloatArray:
        """(T,) the rounds, from 1."""
        return np.arange(1, len(self.mean) + 1, dtype=np.float64)


def seed_means(curves: Mapping[int, Curve], measure: str, window: int = 1) -> SeedMeans:
    """The mean over seeds, round by round.

    Args:
        curves: the runs of one selector, by seed
        measure: `accuracy`, `loss`, or a metric of the user's
        window: rounds in each point: itself and those before it
    """
    begun = [curve for curve in curves.values() if curve.done] or list(curves.values())
    length = min(curve.done for curve in begun)
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
    known = np.isfinite(means.mean)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # buckets without any value
        sums = np.add.reduceat(np.where(known, means.mean, 0.0), starts)
        mean = sums / np.add.reduceat(known.astype(np.float64), starts)
    return ends, replace(
        means,
        mean=mean,
        low=np.fmin.reduceat(means.low, starts),
        high=np.fmax.reduceat(means.high, starts),
        bytes=means.bytes[ends - 1],
        seconds=means.seconds[ends - 1],
        time=means.time[ends - 1],
    )
