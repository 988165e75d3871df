"""One run's numbers: its curve over rounds, and the metrics, each of which gives one value per run.

A *measure* is what is known of the model after each round: accuracy, loss, or a metric of the
user's. A *metric* is one number of a run: the mean of a measure over rounds, the bytes sent.

Rounds are counted as communication rounds done: a target reached in the record's round 0 took
1 round. Rounds without a value are left out; they are never taken for 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcor.errors import RecordError
from fedcor.record import RunRecord
from fedcor.types import FloatArray

__all__ = ["METRICS", "ROUNDING", "Curve", "Metric", "metrics_of", "read_curve"]

# Rounds in the smoothed accuracy and in the mean of the last rounds.
WINDOW = 10
# Rounds in the spread.
TAIL = 50
# An accuracy is a count divided by the test size: values closer than this are equal.
ROUNDING = 1e-7


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
        measures: name -> (T,) values: `accuracy`, `loss` and the user's own; NaN where a round was
            not measured, infinite where the loss was not finite because the model diverged
        down: (T,) bytes sent to clients in each round
        up: (T,) bytes that came back
        seconds: (T,) duration of each round; NaN where the record does not tell
    """

    experiment: str
    selector: str
    seed: int
    planned: int
    target: float | None
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    measures: Mapping[str, FloatArray]
    down: FloatArray
    up: FloatArray
    seconds: FloatArray

    @property
    def done(self) -> int:
        """Finished rounds."""
        return len(self.down)

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
            settings=_shared_settings(config),
            options=config.get("selectors") or {},
            measures=_measures(run),
            down=_column(run, "bytes_down"),
            up=_column(run, "bytes_up"),
            seconds=np.array([_finite_or(row.get("seconds"), math.nan) for row in run.rounds]),
        )
        order = [row["round"] for row in run.rounds]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{name}: the record has no usable {error}; run it again or leave it out"
        ) from error
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
    unusable = math.nan if _is_flower_app(run) else math.inf
    loss = np.array(
        [
            math.nan if "test_loss" not in row else _finite_or(row["test_loss"], unusable)
            for row in run.rounds
        ],
        dtype=np.float64,
    )
    found = {"accuracy": accuracy, "loss": loss}
    for name in dict.fromkeys(key for row in run.rounds for key in row.get("metrics") or {}):
        values = [(row.get("metrics") or {}).get(name) for row in run.rounds]
        own = np.array([_finite_or(value, math.nan) for value in values])
        if name not in found or np.isnan(found[name]).all():
            found[name] = own
    return found


def _finite_or(value: float | None, other: float) -> float:
    return float(value) if value is not None and math.isfinite(value) else other


def _is_flower_app(run: RunRecord) -> bool:
    """Whether a user's own Flower app made the run, which need not evaluate every round."""
    versions = run.header.get("versions") or {}
    return "flwr" in versions and run.header.get("engine") is None


def _shared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share to be compared: all but the selector and the number of rounds."""
    settings = {key: value for key, value in config.items() if key not in ("selector", "selectors")}
    training = {key: value for key, value in config["training"].items() if key != "rounds"}
    return {**settings, "training": training}


def _column(run: RunRecord, key: str) -> FloatArray:
    values = [np.nan if row[key] is None else row[key] for row in run.rounds]
    return np.array(values, dtype=np.float64)


def _known(curve: Curve, measure: str) -> FloatArray:
    """The values of the rounds that were measured."""
    values = curve.of(measure)
    known: FloatArray = values[~np.isnan(values)]
    return known


def _first_reach(rounds: np.ndarray[Any, Any], values: FloatArray, target: float) -> float | None:
    """The first of `rounds` whose value is at or above the target."""
    hits = np.flatnonzero(values >= target - ROUNDING)
    return float(rounds[hits[0]]) if hits.size else None


def _measured_rounds(curve: Curve) -> np.ndarray[Any, Any]:
    """The rounds with an accuracy, counted from 1."""
    return np.flatnonzero(~np.isnan(curve.accuracy)) + 1


def _rounds_to_target(curve: Curve) -> float | None:
    if curve.target is None:
        return None
    return _first_reach(_measured_rounds(curve), _known(curve, "accuracy"), curve.target)


def _smooth_rounds_to_target(curve: Curve) -> float | None:
    accuracy = _known(curve, "accuracy")
    if len(accuracy) < WINDOW or curve.target is None:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(accuracy, WINDOW)
    ends = _measured_rounds(curve)[WINDOW - 1 :]
    return _first_reach(ends, windows.mean(axis=1), curve.target)


def _bytes_to_target(curve: Curve) -> float | None:
    rounds = _rounds_to_target(curve)
    return None if rounds is None else float((curve.down + curve.up)[: int(rounds)].sum())


def _spread(curve: Curve) -> float | None:
    values = _known(curve, "accuracy")
    return float(values[-TAIL:].std(ddof=1)) if len(values) > 1 else None


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None


def _sum(values: FloatArray) -> float | None:
    return float(values.sum()) if values.size else None


@dataclass(frozen=True)
class Metric:
    """What is measured of a run, how it is written, and which direction is better.

    Attributes:
        key: name in JSON and CSV
        title: name in tables
        unit: how values are written
        better: which direction is better; None where nobody said
        measure: the value of one run; None where the target was not reached, or with too few
            rounds; infinite where the model diverged
        to_target: whether the value is fixed once the target is reached
        headline: whether it stands in the table on the screen
        of: the measure that it is about; None for bytes
    """

    key: str
    title: str
    unit: Literal["rounds", "accuracy", "bytes", "number"]
    better: Literal["lower", "higher"] | None
    measure: Callable[[Curve], float | None]
    to_target: bool = False
    headline: bool = True
    of: str | None = None

    @property
    def tolerance(self) -> float:
        """Values that are closer than this are equal."""
        return 0.0 if self.unit == "number" else ROUNDING


BYTES = (
    Metric("bytes_down", "bytes down", "bytes", "lower", lambda c: _sum(c.down)),
    Metric("bytes_up", "bytes up", "bytes", "lower", lambda c: _sum(c.up)),
)
# Every metric of a classifier, in the order of tables and files.
METRICS: tuple[Metric, ...] = (
    Metric(
        "rounds_to_target",
        "rounds to target",
        "rounds",
        "lower",
        _rounds_to_target,
        to_target=True,
        of="accuracy",
    ),
    Metric(
        "smooth_rounds_to_target",
        f"{WINDOW}-round mean to target",
        "rounds",
        "lower",
        _smooth_rounds_to_target,
        to_target=True,
        of="accuracy",
    ),
    Metric(
        "mean_accuracy",
        "mean accuracy",
        "accuracy",
        "higher",
        lambda c: _mean(_known(c, "accuracy")),
        of="accuracy",
    ),
    Metric(
        "final_accuracy",
        f"mean of the last {WINDOW}",
        "accuracy",
        "higher",
        lambda c: _mean(_known(c, "accuracy")[-WINDOW:]),
        of="accuracy",
    ),
    *BYTES,
    Metric(
        "bytes_to_target",
        "bytes to target",
        "bytes",
        "lower",
        _bytes_to_target,
        to_target=True,
        headline=False,
        of="accuracy",
    ),
    Metric(
        "last_accuracy",
        "last accuracy",
        "accuracy",
        "higher",
        lambda c: _mean(_known(c, "accuracy")[-1:]),
        headline=False,
        of="accuracy",
    ),
    Metric(
        "spread",
        f"spread of the last {TAIL}",
        "accuracy",
        "lower",
        _spread,
        headline=False,
        of="accuracy",
    ),
)


def metrics_of(measure: str) -> tuple[Metric, ...]:
    """The metrics that say how a run did by one measure, and what it cost.

    Args:
        measure: `accuracy`, `loss`, or the name of a metric of the user's, of which nobody knows
            whether more is better
    """
    if measure == "accuracy":
        return METRICS

    def mean_of_last(rounds: int) -> Callable[[Curve], float | None]:
        return lambda curve: _mean(_known(curve, measure)[-rounds:])

    better: Literal["lower"] | None = "lower" if measure == "loss" else None
    return (
        Metric(
            f"mean_{measure}",
            f"mean {measure}",
            "number",
            better,
            lambda curve: _mean(_known(curve, measure)),
            of=measure,
        ),
        Metric(
            f"final_{measure}",
            f"mean {measure} of the last {WINDOW}",
            "number",
            better,
            mean_of_last(WINDOW),
            of=measure,
        ),
        *BYTES,
        Metric(
            f"last_{measure}",
            f"last {measure}",
            "number",
            better,
            mean_of_last(1),
            headline=False,
            of=measure,
        ),
    )
