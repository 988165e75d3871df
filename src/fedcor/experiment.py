"""An experiment: TOML <-> frozen settings, and the presets named after the paper's. Everything is checked before it runs."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from fedcor.config import build_dataclass
from fedcor.data import Partition
from fedcor.engine.faults import Faults
from fedcor.engine.models import check_model_options
from fedcor.engine.optimisers import OPTIMISERS, Optimiser
from fedcor.errors import ConfigError, suggest
from fedcor.selectors import build_selector
from fedcor.types import Selector

__all__ = ["Experiment", "load_experiment", "preset_names"]


@dataclass(frozen=True)
class DataSettings:
    name: str  # a known data set, or the path of an .npz file
    holdout: float = (
        0.0  # share of each client's data kept out of training; its loss is measured there
    )
    noisy_clients: float = 0.0  # share of the clients whose labels are drawn at random

    def __post_init__(self) -> None:
        if not 0.0 <= self.holdout < 1.0:
            raise ConfigError("holdout", self.holdout, "must lie in [0, 1)")
        if not 0.0 <= self.noisy_clients <= 1.0:
            raise ConfigError("noisy_clients", self.noisy_clients, "must lie in [0, 1]")


@dataclass(frozen=True)
class TrainingSettings:
    rounds: int
    clients_per_round: int  # C
    batch_size: int  # B
    local_steps: int  # E
    learning_rate: float
    milestones: tuple[int, ...] = ()  # rounds at which the learning rate is multiplied by `factor`
    factor: float = 0.5
    weight_decay: float = 0.0
    device: str = "cpu"  # or "cuda", "mps"; "auto" takes an accelerator when there is one

    def __post_init__(self) -> None:
        for key in ("rounds", "clients_per_round", "batch_size", "local_steps"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "must be a whole number of at least 1")
        for key in ("learning_rate", "factor"):
            if not 0.0 < getattr(self, key) <= 1e6:
                raise ConfigError(
                    key,
                    getattr(self, key),
                    "must be a finite number above 0, and at most a million",
                )
        if not 0.0 <= self.weight_decay <= 1e6:
            raise ConfigError(
                "weight_decay", self.weight_decay, "must be a finite number from 0 to a million"
            )
        if self.device.partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise ConfigError("device", self.device, "must be auto, cpu, cuda or mps")


@dataclass(frozen=True)
class Experiment:
    """One experiment, all of it but the seed."""

    name: str
    data: DataSettings
    partition: Partition
    model: Mapping[str, Any]  # name, and the options of its factory
    training: TrainingSettings
    optimiser: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    faults: Faults = field(default_factory=Faults)
    selector: str = "fedcor"
    selectors: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # options by selector name
    target_accuracy: float | None = None

    def build_selector(self) -> Selector:
        try:
            return build_selector(
                self.selector, self.training.clients_per_round, self.selectors.get(self.selector)
            )
        except ConfigError as error:
            raise (
                error if error.key == "selector" else error.under(f"selectors.{self.selector}")
            ) from None

    def build_optimiser(self) -> Optimiser:
        options = dict(self.optimiser)
        name = options.pop("name", "fedavg")
        if name not in OPTIMISERS:
            raise ConfigError(
                "optimiser.name",
                name,
                f"must be one of {', '.join(OPTIMISERS)}",
                suggest(str(name), OPTIMISERS),
            )
        try:
            return build_dataclass(OPTIMISERS[name], options)
        except ConfigError as error:
            raise error.under("optimiser") from None

    def check(self) -> Experiment:
        """Refuse what cannot work, before anything is loaded or written."""
        if self.training.clients_per_round > self.partition.clients:
            raise ConfigError(
                "training.clients_per_round",
                self.training.clients_per_round,
                f"must be at most partition.clients = {self.partition.clients}",
            )
        if not self.name.strip(". ") or any(mark in self.name for mark in "/\\:"):
            raise ConfigError("name", self.name, "must be a plain name: it names a folder")
        if self.target_accuracy is not None and not 0.0 < self.target_accuracy <= 1.0:
            raise ConfigError("target_accuracy", self.target_accuracy, "must lie in (0, 1]")
        self.build_optimiser()
        for (
            name,
            options,
        ) in (
            self.selectors.items()
        ):  # a misspelt name or key is refused even where another selector runs
            if not isinstance(options, Mapping):
                raise ConfigError(f"selectors.{name}", options, "must be a table of settings")
            if "clients_per_round" in options:
                given = options["clients_per_round"]
                raise ConfigError(
                    f"selectors.{name}.clients_per_round",
                    given,
                    "is set for all by training.clients_per_round",
                )
            if name != self.selector:
                dataclasses.replace(self, selector=name).build_selector()
        selector = self.build_selector()
        candidates = getattr(selector, "candidates", None)
        if candidates is not None and candidates > self.partition.clients:
            raise ConfigError(
                f"selectors.{self.selector}.candidates",
                candidates,
                f"must be at most {self.partition.clients} clients",
            )
        if not isinstance(self.model.get("name"), str):
            raise ConfigError(
                "model.name",
                self.model.get("name"),
                "must be given: mlp, cnn, logistic, or module:factory",
            )
        try:
            check_model_options(
                self.model["name"], {k: v for k, v in self.model.items() if k != "name"}
            )
        except ConfigError as error:
            raise error.under("model") from None
        _check_finite(self.describe())
        return self

    def with_selector(self, name: str) -> Experiment:
        return dataclasses.replace(self, selector=name).check()

    def describe(self) -> dict[str, Any]:
        """Every setting as plain values; of the selectors, the one that runs, with all its hyper-parameters."""
        settings = dataclasses.asdict(self)
        for table, key in _LATER:
            if not settings[table][key]:
                del settings[table][key]
        settings["selectors"] = {self.selector: dataclasses.asdict(self.build_selector())}  # type: ignore[call-overload]
        return settings


# Settings that came after the first records, off where they are not named: a record says them only where they are on,
# so that runs made before them go on and can be compared.
_LATER = (("data", "noisy_clients"), ("partition", "size_skew"))

_TABLES: dict[str, type[Any]] = {
    "data": DataSettings,
    "partition": Partition,
    "training": TrainingSettings,
    "faults": Faults,
}


def preset_names() -> list[str]:
    files = (resources.files("fedcor") / "presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_experiment(
    source: str, changes: Iterable[str] = (), selector: str | None = None
) -> Experiment:
    """A preset by name or a TOML file by path, with `key=value` changes applied; checked."""
    raw = _read(source)
    for change in changes:
        _apply(raw, change)
    if selector is not None:
        raw["selector"] = selector
    return parse_experiment(raw).check()


def parse_experiment(raw: Mapping[str, Any]) -> Experiment:
    tables: dict[str, Any] = {}
    for key, value in raw.items():
        if key in _TABLES:
            if not isinstance(value, Mapping):
                raise ConfigError(key, value, "must be a table of settings")
            try:
                tables[key] = build_dataclass(_TABLES[key], value)
            except ConfigError as error:
                raise error.under(key) from None
        else:
            tables[key] = value
    for key in ("model", "optimiser", "selectors"):
        if not isinstance(tables.get(key, {}), Mapping):
            raise ConfigError(key, tables[key], "must be a table of settings")
    return build_dataclass(Experiment, tables)


def _read(source: str) -> dict[str, Any]:
    names = preset_names()
    if source in names:
        text = (resources.files("fedcor") / "presets" / f"{source}.toml").read_text(
            encoding="utf-8"
        )
        return tomllib.loads(text)
    path = Path(source)
    if path.suffix != ".toml":
        allowed = f"must be a preset ({', '.join(names)}) or the path of a .toml file"
        raise ConfigError("EXPERIMENT", source, allowed, suggest(source, names))
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "EXPERIMENT", source, f"the file cannot be read: {error.strerror}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("EXPERIMENT", source, f"the file is not TOML: {error}") from None
    return {"name": path.stem, **raw}


def _apply(raw: dict[str, Any], change: str) -> None:
    """One `--set table.key=value`; key and value are read as TOML, or the value as a text where it is not TOML."""
    key, equals, text = change.partition("=")
    try:
        path = _keys(tomllib.loads(f"{key} = 0")) if equals else []
    except tomllib.TOMLDecodeError:
        path = []
    if not path:
        example = "for example training.rounds=50; quote a name that has a colon: 'selectors.\"module:Class\".key=1'"
        raise ConfigError("--set", change, f"must have the form key=value, {example}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = path
    here = raw
    for table in tables:
        here = here.setdefault(table, {})
        if not isinstance(here, dict):
            raise ConfigError("--set", change, f"{table} is not a table of settings")
    here[last] = value


def _keys(table: Any) -> list[str]:
    """The dotted key of a table that holds nothing else."""
    if not isinstance(table, dict):
        return []
    ((key, below),) = table.items()
    return [key, *_keys(below)]


def _check_finite(settings: Any, path: str = "") -> None:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            _check_finite(value, f"{path}.{key}".removeprefix("."))
    elif isinstance(settings, list | tuple):
        for value in settings:
            _check_finite(value, path)
    elif isinstance(settings, float) and not math.isfinite(settings):
        raise ConfigError(path, settings, "must be a finite number")
