"""One run as arrays over its rounds: what was measured of the model, and what it cost.

A *measure* is what is known of the model after each round: accuracy, loss, or a metric of the
user's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcor.errors import RecordError
from fedcor.record import RunRecord, first_round
from fedcor.report.groups import is_flower_app, shared_settings
from fedcor.report.series import optimiser_settings, was_renamed
from fedcor.types import FloatArray

__all__ = ["Curve", "read_curve"]

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
        """Which direction of a metric of the user's is better; None where nobody said.

        Of a Flower app's metrics, its name says it where it is that of an accuracy or a loss.
        """
        if found := _APP_METRIC.fullmatch(measure):
            return "lower" if found[1] == "loss" else "higher"
        said = self._own_metrics.get(measure)
        better = said.get("better") if isinstance(said, Mapping) and "function" in said else None
        return better if better in ("lower", "higher") else None

    def can_say_better(self, measure: str) -> bool:
        """Whether the settings name this metric, so that its direction can be said with it."""
        return measure in self._own_metrics

    @property
    def _own_metrics(self) -> Mapping[str, Any]:
        own = self.settings.get("metrics")
        return own if isinstance(own, Mapping) else {}

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
    loss = np.array(
        [
            math.nan if "test_loss" not in row else _finite_or(row["test_loss"], unusable)
            for row in run.rounds
        ],
        dtype=np.float64,
    )
    found, lists = {"accuracy": accuracy, "loss": loss}, _lists(run)
    for name in _metric_names(run):
        if name in lists:
            continue
        values = [(row.get("metrics") or {}).get(name) for row in run.rounds]
        own = np.array([_finite_or(value, math.nan) for value in values])
        if name not in found or np.isnan(found[name]).all():
            found[name] = own
    return found


def _finite_or(value: float | None, other: float) -> float:
    return float(value) if value is not None and math.isfinite(value) else other


def _metric_names(run: RunRecord) -> list[str]:
    """The further metrics that any round has."""
    return list(dict.fromkeys(key for row in run.rounds for key in row.get("metrics") or {}))


def _lists(run: RunRecord) -> tuple[str, ...]:
    """Those that are a list in any round."""
    found = {
        key: True
        for row in run.rounds
        for key, value in (row.get("metrics") or {}).items()
        if isinstance(value, list)
    }
    return tuple(found)


def _column(run: RunRecord, key: str) -> FloatArray:
    values = [np.nan if row[key] is None else row[key] for row in run.rounds]
    return np.array(values, dtype=np.float64)
