"""One run's numbers: its curve over rounds, and the metrics, each of which gives one value per run.

Rounds are counted as communication rounds done: a target reached in the record's round 0 took
1 round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcor.errors import RecordError
from fedcor.record import RunRecord
from fedcor.types import FloatArray

__all__ = ["METRICS", "ROUNDING", "Curve", "Metric", "read_curve"]

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
        accuracy: (T,) test accuracy; one that is not finite (the model diverged) counts as 0
        down: (T,) bytes sent to clients in each round
        up: (T,) bytes that came back
    """

    experiment: str
    selector: str
    seed: int
    planned: int
    target: float | None
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    accuracy: FloatArray
    down: FloatArray
    up: FloatArray

    @property
    def done(self) -> int:
        """Finished rounds."""
        return len(self.accuracy)

    def first(self, rounds: int) -> Curve:
        """The curve of the first `rounds` rounds."""
        return replace(
            self, accuracy=self.accuracy[:rounds], down=self.down[:rounds], up=self.up[:rounds]
        )


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
            accuracy=np.nan_to_num(_column(run, "test_accuracy"), nan=0.0, posinf=0.0, neginf=0.0),
            down=_column(run, "bytes_down"),
            up=_column(run, "bytes_up"),
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


def _shared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share to be compared: all but the selector and the number of rounds."""
    settings = {key: value for key, value in config.items() if key not in ("selector", "selectors")}
    training = {key: value for key, value in config["training"].items() if key != "rounds"}
    return {**settings, "training": training}


def _column(run: RunRecord, key: str) -> FloatArray:
    values = [np.nan if row[key] is None else row[key] for row in run.rounds]
    return np.array(values, dtype=np.float64)


def _first_reach(accuracy: FloatArray, target: float | None) -> int | None:
    """Index of the first accuracy at or above the target."""
    if target is None:
        return None
    hits = np.flatnonzero(accuracy >= target - ROUNDING)
    return int(hits[0]) if hits.size else None


def _rounds_to_target(curve: Curve) -> float | None:
    index = _first_reach(curve.accuracy, curve.target)
    return None if index is None else float(index + 1)


def _smooth_rounds_to_target(curve: Curve) -> float | None:
    if curve.done < WINDOW:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(curve.accuracy, WINDOW)
    index = _first_reach(windows.mean(axis=1), curve.target)  # of (T - WINDOW + 1,) means
    return None if index is None else float(index + WINDOW)


def _bytes_to_target(curve: Curve) -> float | None:
    index = _first_reach(curve.accuracy, curve.target)
    return None if index is None else float((curve.down + curve.up)[: index + 1].sum())


def _spread(curve: Curve) -> float | None:
    return float(curve.accuracy[-TAIL:].std(ddof=1)) if curve.done > 1 else None


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
        better: which direction is better
        measure: the value of one run; None where the target was not reached, or with too few rounds
        to_target: whether the value is fixed once the target is reached
        headline: whether it stands in the table on the screen
    """

    key: str
    title: str
    unit: Literal["rounds", "accuracy", "bytes"]
    better: Literal["lower", "higher"]
    measure: Callable[[Curve], float | None]
    to_target: bool = False
    headline: bool = True


# Every metric, in the order of tables and files.
METRICS: tuple[Metric, ...] = (
    Metric(
        "rounds_to_target",
        "rounds to target",
        "rounds",
        "lower",
        _rounds_to_target,
        to_target=True,
    ),
    Metric(
        "smooth_rounds_to_target",
        f"{WINDOW}-round mean to target",
        "rounds",
        "lower",
        _smooth_rounds_to_target,
        to_target=True,
    ),
    Metric("mean_accuracy", "mean accuracy", "accuracy", "higher", lambda c: _mean(c.accuracy)),
    Metric(
        "final_accuracy",
        f"mean of the last {WINDOW}",
        "accuracy",
        "higher",
        lambda c: _mean(c.accuracy[-WINDOW:]),
    ),
    Metric("bytes_down", "bytes down", "bytes", "lower", lambda c: _sum(c.down)),
    Metric("bytes_up", "bytes up", "bytes", "lower", lambda c: _sum(c.up)),
    Metric(
        "bytes_to_target",
        "bytes to target",
        "bytes",
        "lower",
        _bytes_to_target,
        to_target=True,
        headline=False,
    ),
    Metric(
        "last_accuracy",
        "last accuracy",
        "accuracy",
        "higher",
        lambda c: _mean(c.accuracy[-1:]),
        headline=False,
    ),
    Metric("spread", f"spread of the last {TAIL}", "accuracy", "lower", _spread, headline=False),
)
