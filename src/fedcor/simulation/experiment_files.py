"""Presets and TOML files, with single settings changed, to an `Experiment`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedcor.core.config import check_at_least, check_keys, convert, expand_home, suggests
from fedcor.core.describe import Described, describe
from fedcor.core.errors import ConfigError, suggest
from fedcor.core.types import Selector, selector_traits
from fedcor.data.partitioners import PARTITIONS
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.rules.declaration import Rules
from fedcor.selectors import SELECTORS, selector_name
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.coerce import DEEPEST, as_selectors
from fedcor.simulation.experiment import TABLES, Experiment
from fedcor.simulation.faults import Faults
from fedcor.simulation.schedules import Schedule
from fedcor.simulation.tasks import MetricSetting

_PRESETS = resources.files("fedcor.simulation") / "presets"
_TABLES = (
    *("data", "partition", "model", "training", "optimiser", "faults", "rules", "selectors"),
    *("metrics", "byzantine", "defence", "privacy"),
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
        >>> from fedcor.simulation.experiment_files import load_experiment
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


# One experiment with several selectors, each under a name that tells it from the others.


Selectors = str | Selector | Iterable[str | Selector] | Mapping[str, str | Selector]


def variants(experiment: Experiment, selectors: Selectors) -> list[Experiment]:
    """The experiment with each of `selectors`.

    Args:
        experiment: All settings but the selector.
        selectors: Names and objects; or labels of your own -> a name or an object. Objects of one
            class are labelled with the parameters in which they differ.

    Raises:
        ConfigError: There is none, one is there twice, or one does not fit the experiment.

    Example:
        >>> import fedcor
        >>> found = variants(fedcor.experiment("digits"), ["random", fedcor.FedCor(10, beta=0.5)])
        >>> [one.selector for one in found]
        ['random', 'fedcor']
    """
    if isinstance(selectors, str | Selector):
        selectors = [selectors]
    given: list[Any] = list(selectors.values() if isinstance(selectors, Mapping) else selectors)
    if not given:
        raise ConfigError("selectors", selectors, "must have at least one selector")
    for one in given:
        if not isinstance(one, str):
            SELECTORS.check(one)
    if not experiment.clients_per_round:
        experiment = _with_their_number(experiment, given)
    if isinstance(selectors, Mapping):
        return [_labelled(experiment, str(label), one) for label, one in selectors.items()]
    made = [
        experiment.with_selector(one, label)
        for one, label in zip(given, _labels(experiment, given), strict=True)
    ]
    for index, one in enumerate(made):
        if one.selector_label in [other.selector_label for other in made[:index]]:
            raise ConfigError("selectors", one.selector_label, "is there twice")
    return made


def _with_their_number(experiment: Experiment, given: list[Any]) -> Experiment:
    """The experiment that leaves the number of clients per round to its selectors."""
    numbers = [selector_traits(one).clients_per_round for one in given if not isinstance(one, str)]
    number = next((int(number) for number in numbers if number is not None), 0)
    return dataclasses.replace(experiment, clients_per_round=number)


def _labelled(experiment: Experiment, label: str, selector: str | Selector) -> Experiment:
    if isinstance(selector, str):
        selector = experiment.with_selector(selector).build_selector()
    return experiment.with_selector(selector, label)


def _labels(experiment: Experiment, given: list[Any]) -> list[str | None]:
    """A label for each object that would else be called like another; None for all others."""
    names = [one if isinstance(one, str) else selector_name(one) for one in given]
    labels: list[str | None] = []
    for index, (one, name) in enumerate(zip(given, names, strict=True)):
        rivals = [other for i, other in enumerate(given) if i != index and names[i] == name]
        if isinstance(one, str) or not rivals:
            labels.append(None)
            continue
        own = describe(one)
        others = [_parameters(experiment, rival) for rival in rivals]
        differing = {
            key: value
            for key, value in own.items()
            if any(other.get(key) != value for other in others)
        }
        text = ", ".join(f"{key}={value}" for key, value in differing.items())
        if not text or len(text) > 60:
            hint = 'give each a label: {"one": ..., "other": ...}'
            raise ConfigError("selectors", one, "cannot be told from another of its class", hint)
        labels.append(f"{name}({text})")
    return labels


def _parameters(experiment: Experiment, selector: str | Selector) -> dict[str, Any]:
    if isinstance(selector, str):
        selector = experiment.with_selector(selector).build_selector()
    parameters: dict[str, Any] = describe(selector)
    return parameters


# An experiment with keywords changed: `fedcor.experiment("digits", rounds=50)`.


_SAME: Any = type("Same", (), {"__repr__": lambda _: "<as it is>"})()


@suggests
def experiment(
    source: str | Path | Experiment,
    *,
    data: Any = _SAME,
    partition: Any = _SAME,
    model: Any = _SAME,
    rounds: int = _SAME,
    clients_per_round: int = _SAME,
    batch_size: int = _SAME,
    local_steps: int = _SAME,
    learning_rate: float | str | Callable[[int], float] | Schedule = _SAME,
    name: str = _SAME,
    test_data: Any = _SAME,
    loss: str | Callable[..., Any] | None = _SAME,
    metrics: Mapping[str, MetricSetting] = _SAME,
    milestones: tuple[int, ...] = _SAME,
    factor: float = _SAME,
    weight_decay: float = _SAME,
    device: str = _SAME,
    holdout: float = _SAME,
    noisy_clients: float = _SAME,
    loss_noise: float = _SAME,
    loss_clip: float = _SAME,
    optimiser: Any = _SAME,
    faults: Faults | Mapping[str, Any] = _SAME,
    byzantine: Byzantine | Mapping[str, Any] = _SAME,
    defence: Defence | Mapping[str, float] = _SAME,
    rules: Rules | Mapping[str, Any] = _SAME,
    tags: Any = _SAME,
    selector: str | Selector = _SAME,
    selectors: Mapping[str, Mapping[str, Any] | Selector] = _SAME,
    target_accuracy: float | None = _SAME,
) -> Experiment:
    """A preset, a TOML file or an experiment, with some of its settings changed.

    Args:
        source: The name of a preset, the path of a TOML file, or an experiment.
        data, partition, model, rounds, clients_per_round, batch_size, local_steps, learning_rate,
            name, test_data, loss, metrics, milestones, factor, weight_decay, device, holdout,
            noisy_clients, loss_noise, loss_clip, optimiser, faults, byzantine, defence, rules, tags,
            selector, selectors, target_accuracy: As in `Experiment`. A dictionary changes single
            settings: `partition={"clients": 20}`, `selectors={"fedcor": {"beta": 0.9}}`; an object
            replaces what was there.

    Raises:
        ConfigError: A keyword is unknown (with a suggestion), or a setting cannot work.

    Example:
        >>> import fedcor
        >>> changed = fedcor.experiment("digits", rounds=50, selectors={"fedcor": {"beta": 0.9}})
        >>> changed.rounds, changed.selectors["fedcor"]
        (50, {'warmup': 10, 'beta': 0.9})
    """
    given = {key: value for key, value in locals().items() if value is not _SAME}
    changes = {key: value for key, value in given.items() if key != "source"}
    if isinstance(source, Experiment):
        if not changes:
            return source
        keywords = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.init}
    else:
        keywords = flatten(read_settings(source))
    for key, value in changes.items():
        keywords[key] = _merged(key, keywords.get(key), value)
    return Experiment(**keywords)


def _merged(key: str, old: Any, new: Any) -> Any:
    """`new`; where both are tables, the old one with single settings changed."""
    if key == "selectors":
        tables, changes = dict(old or {}), as_selectors(new)
        return tables | {k: _merged("options", tables.get(k), v) for k, v in changes.items()}
    if key == "partition" and isinstance(old, Described):
        old = old.describe()
    if isinstance(old, Byzantine | Defence):
        old = dataclasses.asdict(old)
    if isinstance(old, Faults):
        old = old.settings()
    if isinstance(old, Rules):
        old = {name: value for name, value in vars(old).items() if value}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if key in ("model", "optimiser") and new.get("name", old.get("name")) != old.get("name"):
        return new  # its options are of another one
    kinds = {old.get("kind"), new.get("kind", old.get("kind"))}
    if key == "partition" and len(kinds) > 1 and not kinds <= {*PARTITIONS.built_in}:
        return new
    return {**old, **new}
