"""Which runs are compared with each other, and what they are called in tables.

Runs are compared if they belong to one experiment and differ only in the selector, in who
aggregates and in the number of rounds. A *group* is a set of such runs; a *series* is the runs of
a group that share a selector and an optimiser, one per seed: a row of a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcor.core.text import listed, one_line
from fedcor.optimisers import OPTIMISERS
from fedcor.runs.record import RunRecord

LONGEST = 60  # characters of what tells groups apart
NAME_WIDTH = 22  # columns of a short name
_USUAL = "FedAvg"  # goes without saying
_OURS = "OptimiserStrategy"  # the Flower strategy that aggregates with an optimiser of ours
_MODULE_AND_CLASS = re.compile(r"[\w.<>]+:([\w.<>]+(\(.*\))?( \+ [\w.<>]+)?)")


# --- groups: runs that are compared ---------------------------------------------------------------


def group_names(runs: Sequence[RunRecord]) -> list[str]:
    """The name of each run's group: that of its experiment, with the settings in which the groups
    of an experiment differ: `toy (data.name=fmnist)`."""
    names: dict[tuple[str, str], str] = {}
    for experiment, groups in _by_experiment(runs).items():
        names |= {(experiment, key): name for key, name in _names(experiment, groups).items()}
    return [names[_experiment(run), _key(run)] for run in runs]


def group_notes(runs: Sequence[RunRecord]) -> list[str]:
    """For each experiment whose runs cannot all be compared, which cannot, and why."""
    return [
        f"Not compared with each other, as their settings differ ({listed(_differing(groups), 3)}):"
        f" {', '.join(_names(experiment, groups).values())}."
        for experiment, groups in _by_experiment(runs).items()
        if len(groups) > 1
    ]


def shared_settings(run: RunRecord) -> dict[str, Any]:
    """What two runs must share to be compared: the engine, and every setting but the selector, who
    aggregates, and the number of rounds."""
    settings = {
        key: value
        for key, value in _config(run).items()
        if key not in ("selector", "selectors", "optimiser") and not key.startswith("strategy")
    }
    if training := settings.get("training"):
        settings["training"] = {key: value for key, value in training.items() if key != "rounds"}
    engine = run.header.get("engine") or ("flower app" if is_flower_app(run) else "simulator")
    return {"engine": engine, **settings}


def is_flower_app(run: RunRecord) -> bool:
    """Whether a user's own Flower app made the run, which need not evaluate every round."""
    versions = run.header.get("versions") or {}
    return "flwr" in versions and run.header.get("engine") is None


def flat_settings(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as one: `training.rounds`; the names begin with `before`."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        flat |= flat_settings(value, f"{before}{key}.") if nested else {f"{before}{key}": value}
    return flat


def _config(run: RunRecord) -> Mapping[str, Any]:
    return run.header.get("config") or {}


def _experiment(run: RunRecord) -> str:
    return str(run.header.get("experiment"))


def _key(run: RunRecord) -> str:
    return json.dumps(shared_settings(run), sort_keys=True, default=repr)


def _by_experiment(runs: Sequence[RunRecord]) -> dict[str, dict[str, dict[str, Any]]]:
    """Experiment -> key -> the settings of each of its groups, by dotted name."""
    experiments: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        groups = experiments.setdefault(_experiment(run), {})
        groups.setdefault(_key(run), flat_settings(shared_settings(run)))
    return experiments


def _differing(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The settings in which groups differ."""
    first, *others = groups.values()
    keys = dict.fromkeys(key for group in groups.values() for key in group)
    return [key for key in keys if any(group.get(key) != first.get(key) for group in others)]


def _names(experiment: str, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The name of each group of an experiment, by its key; the only one has the experiment's."""
    keys, names = _differing(groups), {}
    for number, (group, settings) in enumerate(groups.items(), start=1):
        values = {key: settings.get(key) for key in keys}
        label = ", ".join(
            f"{key} not set" if value is None else f"{key}={value}" for key, value in values.items()
        )
        if len(label) > LONGEST:
            label = f"{label[:LONGEST]}.., {number}"
        names[group] = f"{experiment} ({label})" if label else experiment
    return names


# --- series: rows of a table ----------------------------------------------------------------------


def named_runs(runs: Sequence[RunRecord]) -> list[tuple[str, str, RunRecord]]:
    """Each run, after the names of its group and of its series.

    A series is named by its selector, and by who aggregated where that differs in its group:
    `aligned + FedRecall`, `random + FedAdam`. FedAvg is not mentioned. A run that was given another
    name than its selector's keeps it.
    """
    grouped = list(zip(group_names(runs), runs, strict=True))
    used: dict[str, set[tuple[str, str]]] = {}
    for group, run in grouped:
        used.setdefault(group, set()).add(_aggregating(run))
    return [(group, _name(run, used[group]), run) for group, run in grouped]


def series_names(runs: Sequence[RunRecord]) -> list[str]:
    """The name of each run's series, as in `named_runs`."""
    return [name for _, name, _ in named_runs(runs)]


def optimiser_settings(run: RunRecord) -> Mapping[str, Any]:
    """The settings of who aggregated in a run, with its `name`; empty where the record has none.

    Those of a Flower app's strategy are among them; without an optimiser of ours, it is the `name`.
    """
    config = _config(run)
    strategy = {key: value for key, value in config.items() if key.startswith("strategy")}
    name = {"name": strategy["strategy"]} if "strategy" in strategy else {}
    return {**name, **(config.get("optimiser") or {}), **strategy}


def selector_options(run: RunRecord) -> Mapping[str, Any]:
    """The selector's own settings, which its runs must share to count as one selector."""
    options = (_config(run).get("selectors") or {}).get(run.header.get("selector"))
    return options if isinstance(options, Mapping) else {}


def was_renamed(run: RunRecord) -> bool:
    """Whether a run was given another name than its selector's, which then says what it is."""
    name = run.header.get("selector")
    return bool(_config(run).get("selector", name) != name)


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
    selector, pair = str(run.header.get("selector")), _aggregating(run)
    title = _title(*pair)
    if pair[1] == _OURS and any(_title(*other) == title for other in used - {pair}):
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


# --- names as they are shown ----------------------------------------------------------------------


def clean(text: str) -> str:
    """The text on one line: characters that a terminal would act on are shown, as `\\x1b`."""
    return one_line(text, None)


def run_name(run: RunRecord) -> str:
    """The folder of a run; a run in memory is called by what it ran."""
    if run.path is not None:
        return str(run.path)
    parts = (run.header.get(key) for key in ("experiment", "selector"))
    return f"the run of {', '.join(map(str, parts))}, seed {run.header.get('seed')}"


def short_names(names: Iterable[str], width: int = NAME_WIDTH) -> dict[str, str]:
    """Each name in at most `width` columns, all different.

    `module:Class` becomes the class; a name that is still too long is cut in the middle.

    Example:
        >>> short_names(["random", "my_package.selectors:LongestUnseen"])
        {'random': 'random', 'my_package.selectors:LongestUnseen': 'LongestUnseen'}
    """
    taken: dict[str, str] = {}
    for name in dict.fromkeys(names):
        whole = clean(name)
        if match := _MODULE_AND_CLASS.fullmatch(whole):
            whole = match[1].rpartition("<locals>.")[2]
        short, number = _cut(whole, width), 2
        while short in taken.values():
            ending = f"~{number}"
            short = _cut(whole, width - len(ending)) + ending
            number += 1
        taken[name] = short
    return taken


def find_name(given: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `given` is, or is the short form of; None if there is none.

    A selector without an optimiser is found if it was run with one optimiser only.

    Example:
        >>> find_name("Mine", ["random", "my_module:Mine"])
        'my_module:Mine'
        >>> find_name("aligned", ["random", "aligned + FedRecall"])
        'aligned + FedRecall'
    """
    short = short_names(names, 10_000)
    if given in short:
        return given
    matches = [name for name in short if short[name] == given] or [
        name
        for name in short
        if given in (name.rpartition(" + ")[0], short[name].rpartition(" + ")[0])
    ]
    return matches[0] if len(matches) == 1 else None


def _cut(text: str, width: int) -> str:
    """The beginning and the end, if the whole is too long: the end is often what differs."""
    from rich.cells import cell_len, set_cell_size  # takes long to import

    if cell_len(text) <= width:
        return text
    last = (width - 2) // 2
    end = text[-last:] if last > 0 else ""
    while cell_len(end) > last:
        end = end[1:]
    return set_cell_size(text, width - 2 - last).rstrip() + ".." + end
