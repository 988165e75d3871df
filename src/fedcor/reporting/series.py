"""Which runs can be compared: those of one experiment, on one engine, with the same settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcor.core.errors import RecordError
from fedcor.core.types import FloatArray
from fedcor.optimisers import OPTIMISERS
from fedcor.runs.record import RunRecord, first_round

MOST_SETTINGS = 3  # in a note
LONGEST = 60  # characters of what tells groups apart


def group_names(runs: Sequence[RunRecord]) -> list[str]:
    """One name per run. Runs that share a name can be compared.

    It is the name of the experiment. Where runs of an experiment differ in more than the selector,
    the optimiser and the number of rounds, it says in what: `toy (data.name=fmnist)`.

    Args:
        runs: Of one experiment, or of several.
    """
    names: dict[tuple[str, str], str] = {}
    for experiment, groups in _by_experiment(runs).items():
        for key, label in zip(groups, _labels(list(groups.values())), strict=True):
            names[experiment, key] = f"{experiment} ({label})" if label else experiment
    return [names[_experiment(run), _key(run)] for run in runs]


def group_notes(runs: Sequence[RunRecord]) -> list[str]:
    """For each experiment whose runs cannot all be compared, which cannot, and why."""
    names, notes = group_names(runs), []
    for experiment, groups in _by_experiment(runs).items():
        if len(groups) > 1:
            own = [n for n, run in zip(names, runs, strict=True) if _experiment(run) == experiment]
            keys = _differing(list(groups.values()))
            more = len(keys) - MOST_SETTINGS
            shown = ", ".join(keys[:MOST_SETTINGS]) + (f" and {more} more" if more > 0 else "")
            notes.append(
                f"Not compared with each other, as their settings differ ({shown}): "
                f"{', '.join(dict.fromkeys(own))}."
            )
    return notes


def shared_settings(run: RunRecord) -> dict[str, Any]:
    """What two runs must share to be compared: the engine, and every setting but the selector, who
    aggregates, and the number of rounds."""
    config = run.header.get("config")
    config = config if isinstance(config, Mapping) else {}
    settings = {
        key: value
        for key, value in config.items()
        if key not in ("selector", "selectors", "optimiser") and not key.startswith("strategy")
    }
    training = config.get("training")
    if isinstance(training, Mapping):
        settings["training"] = {key: value for key, value in training.items() if key != "rounds"}
    own = "flower app" if is_flower_app(run) else "simulator"
    return {"engine": run.header.get("engine") or own, **settings}


def is_flower_app(run: RunRecord) -> bool:
    """Whether a user's own Flower app made the run, which need not evaluate every round."""
    versions = run.header.get("versions") or {}
    return "flwr" in versions and run.header.get("engine") is None


def _experiment(run: RunRecord) -> str:
    return str(run.header.get("experiment"))


def _key(run: RunRecord) -> str:
    return json.dumps(shared_settings(run), sort_keys=True, default=repr)


def _by_experiment(runs: Sequence[RunRecord]) -> dict[str, dict[str, dict[str, Any]]]:
    """Experiment -> key -> the settings of each of its groups, by dotted name."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        groups = found.setdefault(_experiment(run), {})
        groups.setdefault(_key(run), flat_settings(shared_settings(run)))
    return found


def flat_settings(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as one: `training.rounds`; the names begin with `before`."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        flat |= flat_settings(value, f"{before}{key}.") if nested else {f"{before}{key}": value}
    return flat


def _differing(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which groups differ."""
    keys = dict.fromkeys(key for group in groups for key in group)
    first = groups[0]
    return [key for key in keys if any(one.get(key) != first.get(key) for one in groups)]


def _labels(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells each group from the others; no two alike. Empty for the only one."""
    keys = _differing(groups)
    labels: list[str] = []
    for number, group in enumerate(groups, start=1):
        parts = [
            f"{key}={group[key]}" if group.get(key) is not None else f"{key} not set"
            for key in keys
        ]
        label = ", ".join(parts)
        if len(label) > LONGEST:
            label = f"{label[:LONGEST]}.., {number}"
        labels.append(label)
    return labels


# What runs are called in a table: by their selector, and by who aggregated where that differs.


_USUAL = "FedAvg"  # goes without saying
_OURS = "OptimiserStrategy"  # the Flower strategy that aggregates with an optimiser of ours


def series_names(runs: Sequence[RunRecord]) -> list[str]:
    """One name per run. Runs of one experiment that share a name are one row of its table.

    It is the name of the selector. Where runs that are compared differ in their optimiser, too, or
    in their Flower strategy, it says who aggregated: `aligned + FedRecall`, `random + FedAdam`; of
    FedAvg it says nothing. A run that was given another name than its selector's keeps it.

    Args:
        runs: Of one experiment, or of several.
    """
    groups = group_names(runs)
    used: dict[str, set[tuple[str, str]]] = {}
    for group, run in zip(groups, runs, strict=True):
        used.setdefault(group, set()).add(_aggregating(run))
    return [_name(run, used[group]) for group, run in zip(groups, runs, strict=True)]


def optimiser_settings(run: RunRecord) -> Mapping[str, Any]:
    """The settings of who aggregated in a run, with its `name`; empty where the record has none.

    Those of a Flower app's strategy are among them; without an optimiser of ours, it is the `name`.
    """
    config = run.header.get("config")
    config = config if isinstance(config, Mapping) else {}
    settings = config.get("optimiser")
    settings = settings if isinstance(settings, Mapping) else {}
    strategy = {key: value for key, value in config.items() if key.startswith("strategy")}
    name = {"name": strategy["strategy"]} if "strategy" in strategy else {}
    return {**name, **settings, **strategy}


def was_renamed(run: RunRecord) -> bool:
    """Whether a run was given another name than its selector's, which then says what it is."""
    config, name = run.header.get("config"), run.header.get("selector")
    return isinstance(config, Mapping) and config.get("selector", name) != name


def optimiser_title(name: str) -> str:
    """What an optimiser is called in tables, by its registered name or `module:Class`.

    Example:
        >>> optimiser_title("fedrecall"), optimiser_title("my_module:Mine")
        ('FedRecall', 'Mine')
    """
    known = OPTIMISERS.built_in.get(name)
    return name.rpartition(":")[2] if known is None else known.__name__


def _name(run: RunRecord, used: set[tuple[str, str]]) -> str:
    """`used` has whoever aggregated in one of the runs that it is compared with."""
    selector, own = str(run.header.get("selector")), _aggregating(run)
    title = _title(*own)
    if own[1] == _OURS and any(_title(*other) == title for other in used - {own}):
        title = f"{_OURS}({title})"  # Flower has a strategy of this name, which others use
    if len(used) == 1 or title in ("", _USUAL) or was_renamed(run):
        return selector
    return f"{selector} + {title}"


def _aggregating(run: RunRecord) -> tuple[str, str]:
    """The names of the optimiser and of the Flower strategy; empty where there is none."""
    settings = optimiser_settings(run)
    strategy = str(settings.get("strategy", ""))
    name = str(settings.get("name", ""))
    return ("" if name == strategy else name), strategy


def _title(optimiser: str, strategy: str) -> str:
    title = optimiser_title(optimiser)
    if strategy in ("", _OURS):
        return title
    return f"{strategy}({title})" if title else strategy


# One run as arrays over its rounds: what was measured of the model, and what it cost.
#
# A *measure* is what is known of the model after each round: accuracy, loss, or a metric of the
# user's.


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
