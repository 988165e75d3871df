"""Make an `Experiment` from a preset or a TOML file, with some settings overridden.

load_experiment     a preset or file, overridden by `table.key=value`, as on the command line
experiment          the same overridden by keywords of `Experiment`, as in Python
variants            one experiment per selector, each with a label of its own
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedcor.core.config import check_at_least, check_keys, convert, expand_home
from fedcor.core.describe import Described, describe
from fedcor.core.errors import ConfigError, errors_under, suggest
from fedcor.core.types import Selector
from fedcor.data.partitioners import PARTITIONS
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.rules.declaration import Rules
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.coerce import DEEPEST, as_selectors, check_finite
from fedcor.simulation.experiment import TABLES, Experiment, chosen_by
from fedcor.simulation.faults import Faults

_PRESETS = resources.files("fedcor.simulation") / "presets"
_PLAIN = ("name", "selector", "target_accuracy", "tags")
_KEYWORDS = {field.name for field in dataclasses.fields(Experiment)} - {"test_data"}
# The tables of a file: those that hold several keywords, and keywords that are a table each.
_TABLES = [*TABLES, *sorted(_KEYWORDS.difference(_PLAIN, TABLES, *TABLES.values()))]
_REQUIRED = {
    "data": "a table of settings with name",
    "partition": "a table of settings with kind and clients",
    "model": "a table of settings",
    **dict.fromkeys(("rounds", "clients_per_round", "batch_size", "local_steps"), "a whole number"),
    "learning_rate": "a number",
}


def preset_names() -> list[str]:
    """The names of the presets, sorted."""
    names = [file.name for file in _PRESETS.iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_experiment(
    source: str, overrides: Iterable[str] = (), selector: str | None = None
) -> Experiment:
    """The experiment of a preset or a TOML file, checked.

    Args:
        source: the name of a preset, or the path of a TOML file.
        overrides: single settings to override, each as `table.key=value`. Key and value are TOML;
            a value that is not TOML is taken as a string.
        selector: name of the selector that runs, or module:Class; None for the experiment's own.

    Raises:
        ConfigError: a setting is unknown or cannot work; `key` names it. `key` is "experiment"
            for a `source` that cannot be read, and "override" for one that is not key=value.

    Example:
        >>> from fedcor.simulation.experiment_files import load_experiment
        >>> load_experiment("fmnist-2spc", ["training.rounds=50"], selector="random").name
        'fmnist-2spc'
    """
    settings = read_settings(source)
    for override in overrides:
        _apply_override(settings, override)
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
    """The keywords of `Experiment` in nested tables. Refuses unknown keys."""
    check_keys(settings, [*_PLAIN, *_TABLES])
    for table in _TABLES:
        if not isinstance(settings.get(table, {}), Mapping):
            raise ConfigError(table, settings[table], "must be a table of settings")
    keywords = {key: value for key, value in settings.items() if key not in TABLES}
    for table, known in TABLES.items():
        values = dict(settings.get(table, {}))
        with errors_under(table):
            check_keys(values, ["name", *known] if table == "data" else list(known))
            if table == "data" and "name" in values:
                keywords["data"] = convert("name", values.pop("name"), str)
        keywords |= values
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
    check_finite(settings)
    return {"name": path.stem, **settings}


def _in_table(error: ConfigError) -> ConfigError:
    """The error about a keyword of `Experiment`, with the table in which files have it."""
    for table, keys in TABLES.items():
        if error.key in keys:
            return error.under(table)
    return error


def _apply_override(settings: dict[str, Any], override: str) -> None:
    """Override one setting in place."""
    key, equals, text = override.partition("=")
    path = _key_path(key)
    if not equals or not path:
        raise ConfigError(
            "override",
            override,
            "must have the form key=value, for example training.rounds=50; "
            "quote a name that has a colon: 'selectors.\"module:Class\".key=1'",
        )
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
        value = text
    target = settings
    for table in path[:-1]:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigError("override", override, f"{table} is not a table of settings")
    target[path[-1]] = value


def _key_path(key: str) -> list[str]:
    """The TOML key `a.b.c` as [a, b, c]; empty if it is not one key."""
    path: list[str] = []
    try:
        table: Any = tomllib.loads(f"{key} = 0")
        while isinstance(table, dict):
            ((name, table),) = table.items()  # a ValueError unless the table has one key
            path.append(name)
    except (ValueError, RecursionError):
        return []
    return path if len(path) <= DEEPEST else []


Selectors = str | Selector | Iterable[str | Selector] | Mapping[str, str | Selector]


def variants(experiment: Experiment, selectors: Selectors) -> list[Experiment]:
    """The experiment with each of `selectors`.

    Args:
        experiment: All settings but the selector.
        selectors: Names and objects; or labels of your own -> a name or an object. Objects of one
            class are labelled with the parameters in which they differ.

    Raises:
        ConfigError: The list is empty, has a repetition, or a selector does not fit the experiment.

    Example:
        >>> import fedcor
        >>> found = variants(fedcor.experiment("digits"), ["random", fedcor.FedCor(10, beta=0.5)])
        >>> [variant.selector for variant in found]
        ['random', 'fedcor']
    """
    if isinstance(selectors, str | Selector):
        selectors = [selectors]
    if not isinstance(selectors, Iterable):
        raise ConfigError("selectors", selectors, "must be names or objects of selectors")
    given: list[Any] = list(selectors.values() if isinstance(selectors, Mapping) else selectors)
    if not given:
        raise ConfigError("selectors", selectors, "must have at least one selector")
    if not experiment.clients_per_round:
        objects = [selector for selector in given if not isinstance(selector, str)]
        count = next(filter(None, map(chosen_by, objects)), 0)
        experiment = dataclasses.replace(experiment, clients_per_round=count)
    found = [experiment.with_selector(selector) for selector in given]
    if isinstance(selectors, Mapping):
        labels = [str(label) for label in selectors]
    else:
        labels = [
            selector if isinstance(selector, str) else _label(variant, found)
            for selector, variant in zip(given, found, strict=True)
        ]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError("selectors", label, "is listed twice")
        if not re.search(r"\w", label):
            allowed = "must have a letter or a digit: it names a folder"
            raise ConfigError("selectors", label, allowed)
    return [
        experiment.with_selector(variant.build_selector(), label)
        if label != variant.selector
        else variant
        for variant, label in zip(found, labels, strict=True)
    ]


def _label(variant: Experiment, others: list[Experiment]) -> str:
    """The selector's name; with the parameters in which it differs from others of that name."""
    selector = variant.build_selector()
    rivals = [
        describe(other.build_selector())
        for other in others
        if other is not variant and other.selector == variant.selector
    ]
    if not rivals:
        return variant.selector_label
    text = ", ".join(
        f"{key}={value}"
        for key, value in describe(selector).items()
        if any(rival.get(key) != value for rival in rivals)
    )
    if not text or len(text) > 60:
        allowed = "cannot be told from another of its class"
        hint = 'give each a label: {"one": ..., "other": ...}'
        raise ConfigError("selectors", selector, allowed, hint)
    return f"{variant.selector}({text})"


def experiment(source: str | Path | Experiment, **overrides: Any) -> Experiment:
    """A preset, a TOML file or an experiment, with some of its settings overridden.

    Args:
        source: The name of a preset, the path of a TOML file, or an experiment.
        **overrides: Keywords of `Experiment`. A dictionary overrides single settings:
            `partition={"clients": 20}`, `selectors={"fedcor": {"beta": 0.9}}`; an object replaces
            the old one.

    Raises:
        ConfigError: A keyword is unknown (with a suggestion), or a setting cannot work.

    Example:
        >>> import fedcor
        >>> longer = fedcor.experiment("digits", rounds=50, selectors={"fedcor": {"beta": 0.9}})
        >>> longer.rounds, longer.selectors["fedcor"]
        (50, {'warmup': 10, 'beta': 0.9})
    """
    if isinstance(source, Experiment):
        if not overrides:
            return source
        keywords = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.init}
    else:
        keywords = flatten(read_settings(source))
    for key, value in overrides.items():
        keywords[key] = _merged(key, keywords.get(key), value)
    return Experiment(**keywords)


def _merged(key: str, old: Any, new: Any) -> Any:
    """`new`; where both are tables, the old one with single settings overridden."""
    if key == "selectors":
        tables, overrides = dict(old or {}), as_selectors(new)
        return tables | {k: _merged("options", tables.get(k), v) for k, v in overrides.items()}
    if key == "partition" and isinstance(old, Described):
        old = old.describe()
    if isinstance(old, Byzantine | Defence | Faults | Rules):
        old = {name: value for name, value in vars(old).items() if value not in (None, {})}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if key in ("model", "optimiser") and new.get("name", old.get("name")) != old.get("name"):
        return new  # the old options belong to another one
    kinds = [old.get("kind"), new.get("kind", old.get("kind"))]
    built_in = all(kind in list(PARTITIONS.built_in) for kind in kinds)
    if key == "partition" and kinds[0] != kinds[1] and not built_in:
        return new
    return {**old, **new}
