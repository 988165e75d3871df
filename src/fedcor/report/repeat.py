"""The command that runs an experiment again, if one does.

It is tried before it is given: the settings that it stands for are those of the records.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcor.errors import FedcorError
from fedcor.experiments.files import load_experiment, preset_names
from fedcor.record import RunRecord, differences

__all__ = ["repeat_command", "seeds_argument"]

_KEPT = ("training.device",)  # of the machine, not of the experiment


def repeat_command(runs: Sequence[RunRecord]) -> str | None:
    """`fedcor compare ...` that makes these runs again; None where no single command does.

    Args:
        runs: of one experiment that can be compared. Those with parts of a user's own, made in
            Python or from a TOML file, or renamed, have no command
    """
    headers = [run.header for run in runs]
    if any(header.get("engine") for header in headers):
        return None
    try:
        configs = {str(h["selector"]): dict(h["config"]) for h in headers}
        name, rounds = str(headers[0]["experiment"]), max(_rounds(h) for h in headers)
        seeds = sorted({int(h["seed"]) for h in headers})
    except (KeyError, TypeError, ValueError):
        return None
    if name not in preset_names() or _names_code(configs):
        return None
    changes = _changes(name, configs, rounds)
    if changes is None:
        return None
    selectors = list(configs)
    words = ["fedcor", "run" if len(runs) == 1 else "compare", name]
    if len(runs) == 1:
        words += ["--selector", selectors[0], "--seed", str(seeds[0])]
    else:
        words += ["--selectors", ",".join(selectors), "--seeds", seeds_argument(seeds)]
    words += ["--rounds", str(rounds)]
    for change in changes:
        words += ["--set", change]
    return shlex.join(words)


def seeds_argument(seeds: Iterable[int]) -> str:
    """Sorted seeds as the command line takes them: `1-3`, `1,2,7`.

    Example:
        >>> seeds_argument([1, 2, 3]), seeds_argument([1, 2, 7])
        ('1-3', '1,2,7')
    """
    listed = list(seeds)
    if len(listed) > 2 and listed == list(range(listed[0], listed[-1] + 1)):
        return f"{listed[0]}-{listed[-1]}"
    return ",".join(map(str, listed))


def _rounds(header: Mapping[str, Any]) -> int:
    return int(header["config"]["training"]["rounds"])


def _names_code(value: Any) -> bool:
    """Whether settings name a `module:Class`. A record's code is not imported to read it."""
    if isinstance(value, Mapping):
        return any(_names_code(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return any(map(_names_code, value))
    return isinstance(value, str) and ":" in value


def _changes(name: str, configs: Mapping[str, Mapping[str, Any]], rounds: int) -> list[str] | None:
    """What must be set beside the rounds, as `table.key=value`; None where that is not enough."""
    changes: dict[str, str] = {}
    for selector, config in configs.items():
        found = _differing(name, selector, config, rounds, [])
        if found is None:
            return None
        changes |= {key: f"{key}={json.dumps(value)}" for key, value in found.items()}
    wanted = list(changes.values())
    for selector, config in configs.items():
        if _differing(name, selector, config, rounds, wanted) != {}:
            return None
    return wanted


def _differing(
    name: str, selector: str, config: Mapping[str, Any], rounds: int, changes: list[str]
) -> dict[str, Any] | None:
    """Where the settings differ from those of the command: key -> the record's value."""
    try:
        made = load_experiment(name, [*changes, f"training.rounds={rounds}"], selector).describe()
    except FedcorError:
        return None
    made = json.loads(json.dumps(made, default=repr))  # as a record has it
    found = differences(made, config)
    return {
        key: old for key, (_, old) in found.items() if key not in _KEPT and key != "training.rounds"
    }
