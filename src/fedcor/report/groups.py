"""Which runs can be compared: those of one experiment, on one engine, with the same settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedcor.record import RunRecord

__all__ = ["flat_settings", "group_names", "group_notes", "is_flower_app", "shared_settings"]

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
