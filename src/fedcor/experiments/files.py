"""Presets and TOML files, with single settings changed, to an `Experiment`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedcor.config import build_dataclass
from fedcor.data import Partition
from fedcor.errors import ConfigError, suggest
from fedcor.experiments.settings import DataSettings, Experiment, TrainingSettings
from fedcor.faults import Faults

__all__ = ["load_experiment", "parse_experiment", "preset_names"]

_PRESETS = resources.files("fedcor") / "presets"
_DATACLASSES: dict[str, type[Any]] = {
    "data": DataSettings,
    "partition": Partition,
    "training": TrainingSettings,
    "faults": Faults,
}
_PLAIN_TABLES = ("model", "optimiser", "selectors")


def preset_names() -> list[str]:
    """The names of the presets, sorted."""
    names = [file.name for file in _PRESETS.iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_experiment(
    source: str, changes: Iterable[str] = (), selector: str | None = None
) -> Experiment:
    """The experiment of a preset or a TOML file, checked.

    Args:
        source: the name of a preset, or the path of a TOML file.
        changes: single settings to change, each as `table.key=value`. Key and value are TOML; a
            value that is not TOML is taken as text.
        selector: name of the selector that runs, or module:Class; None for the experiment's own.

    Raises:
        ConfigError: a setting is unknown or cannot work; `key` names it. `key` is "experiment"
            for a `source` that cannot be read, and "change" for a change that is not key=value.

    Example:
        >>> from fedcor.experiments import load_experiment
        >>> load_experiment("fmnist-2spc", ["training.rounds=50"], selector="random").name
        'fmnist-2spc'
    """
    settings = _read(source)
    for change in changes:
        _apply_change(settings, change)
    if selector is not None:
        settings["selector"] = selector
    return parse_experiment(settings).check()


def parse_experiment(settings: Mapping[str, Any]) -> Experiment:
    """The experiment of nested tables, as TOML gives them; not checked as a whole yet."""
    fields: dict[str, Any] = dict(settings)
    for key in (*_DATACLASSES, *_PLAIN_TABLES):
        if not isinstance(fields.get(key, {}), Mapping):
            raise ConfigError(key, fields[key], "must be a table of settings")
    for key in [key for key in fields if key in _DATACLASSES]:
        try:
            fields[key] = build_dataclass(_DATACLASSES[key], fields[key])
        except ConfigError as error:
            raise error.under(key) from None
    return build_dataclass(Experiment, fields)


def _read(source: str) -> dict[str, Any]:
    names = preset_names()
    if source in names:
        return tomllib.loads((_PRESETS / f"{source}.toml").read_text(encoding="utf-8"))
    path = Path(source)
    if path.suffix != ".toml":
        allowed = f"must be a preset ({', '.join(names)}) or the path of a .toml file"
        raise ConfigError("experiment", source, allowed, suggest(source, names))
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"the file cannot be read: {error.strerror}"
        raise ConfigError("experiment", source, why) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("experiment", source, f"the file is not TOML: {error}") from None
    return {"name": path.stem, **settings}


def _apply_change(settings: dict[str, Any], change: str) -> None:
    """Change one setting in place."""
    *tables, last = _changed_key(change)
    text = change.partition("=")[2]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    here = settings
    for table in tables:
        here = here.setdefault(table, {})
        if not isinstance(here, dict):
            raise ConfigError("change", change, f"{table} is not a table of settings")
    here[last] = value


def _changed_key(change: str) -> list[str]:
    """The key of `a.b.c=value` as [a, b, c]."""
    key, equals, _ = change.partition("=")
    try:
        path = _only_key(tomllib.loads(f"{key} = 0")) if equals else []
    except tomllib.TOMLDecodeError:
        path = []
    if not path:
        raise ConfigError(
            "change",
            change,
            "must have the form key=value, for example training.rounds=50; "
            "quote a name that has a colon: 'selectors.\"module:Class\".key=1'",
        )
    return path


def _only_key(table: Any) -> list[str]:
    """The dotted key of a table that holds nothing else."""
    if not isinstance(table, dict):
        return []
    ((key, below),) = table.items()
    return [key, *_only_key(below)]
