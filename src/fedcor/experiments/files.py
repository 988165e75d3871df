"""Presets and TOML files, with single settings changed, to an `Experiment`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedcor.checks import check_at_least, expand_home
from fedcor.config import check_keys, convert
from fedcor.errors import ConfigError, suggest
from fedcor.experiments.check import DEEPEST
from fedcor.experiments.settings import TABLES, Experiment

__all__ = ["flatten", "load_experiment", "parse_experiment", "preset_names", "read_settings"]

_PRESETS = resources.files("fedcor") / "presets"
_TABLES = (
    *("data", "partition", "model", "training", "optimiser", "faults", "rules", "selectors"),
    *("metrics", "liars", "defence", "privacy"),
)
_PLAIN = ("name", "selector", "target_accuracy", "tags")
_REQUIRED = {
    "data": "a table of settings with name",
    "partition": "a table of settings with kind and clients",
    "model": "a table of settings",
    "rounds": "a whole number",
    "clients_per_round": "a whole number",
    "batch_size": "a whole number",
    "local_steps": "a whole number",
    "learning_rate": "a number",
}


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
    settings = read_settings(source)
    for change in changes:
        _apply_change(settings, change)
    if selector is not None:
        settings["selector"] = selector
    return parse_experiment(settings)


def parse_experiment(settings: Mapping[str, Any]) -> Experiment:
    """The experiment of nested tables, as TOML gives them."""
    keywords = flatten(settings)
    for key, wanted in _REQUIRED.items():
        if key not in keywords:
            raise _in_table(ConfigError(key, None, f"must be given, as {wanted}"))
    try:
        check_at_least("clients_per_round", keywords["clients_per_round"], 1)
        return Experiment(**keywords)
    except ConfigError as error:
        raise _in_table(error) from None


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `Experiment` in nested tables. Refuses keys that there are not."""
    check_keys(settings, [*_PLAIN, *_TABLES])
    for table in _TABLES:
        if not isinstance(settings.get(table, {}), Mapping):
            raise ConfigError(table, settings[table], "must be a table of settings")
    keywords = {key: value for key, value in settings.items() if key not in TABLES}
    for table, known in TABLES.items():
        own = dict(settings.get(table, {}))
        try:
            check_keys(own, ["name", *known] if table == "data" else list(known))
            if table == "data" and "name" in own:
                keywords["data"] = convert("name", own.pop("name"), str)
        except ConfigError as error:
            raise error.under(table) from None
        keywords |= own
    return keywords


def read_settings(source: str | Path) -> dict[str, Any]:
    """The nested tables of a preset or a TOML file."""
    source, names = str(source), preset_names()
    if source in names:
        return tomllib.loads((_PRESETS / f"{source}.toml").read_text(encoding="utf-8"))
    path = expand_home("experiment", source)
    if path.suffix != ".toml":
        allowed = f"must be a preset ({', '.join(names)}) or the path of a .toml file"
        raise ConfigError("experiment", source, allowed, suggest(source, names))
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"the file cannot be read: {error.strerror}"
        raise ConfigError("experiment", source, why) from None
    except (ValueError, RecursionError) as error:
        # It is not UTF-8, not TOML, or has a number of thousands of digits, or endless brackets.
        raise ConfigError("experiment", source, f"the file is not TOML: {error}") from None
    if _nests_deeper_than(DEEPEST, settings):
        why = f"it has tables or lists within one another, more than {DEEPEST} levels deep"
        raise ConfigError("experiment", source, why)
    return {"name": path.stem, **settings}


def _nests_deeper_than(depth: int, settings: Mapping[str, Any]) -> bool:
    """Whether tables and lists have more levels than what follows can go down."""
    level: list[Any] = [settings]
    for _ in range(depth):
        inner = (one.values() if isinstance(one, Mapping) else one for one in level)
        level = [below for one in inner for below in one if isinstance(below, Mapping | list)]
    return bool(level)


def _in_table(error: ConfigError) -> ConfigError:
    """The error about a keyword of `Experiment`, with the table in which files have it."""
    for table, keys in TABLES.items():
        if error.key in keys:
            return error.under(table)
    return error


def _apply_change(settings: dict[str, Any], change: str) -> None:
    """Change one setting in place."""
    *tables, last = _changed_key(change)
    text = change.partition("=")[2]
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
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
    except (ValueError, RecursionError):
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
    """The dotted key of a table that holds nothing else; empty where it holds more, or nothing."""
    path: list[str] = []
    while isinstance(table, dict):
        if len(table) != 1 or len(path) == DEEPEST:
            return []
        ((key, table),) = table.items()
        path.append(key)
    return path
