"""An experiment with keywords changed: `fedcor.experiment("digits", rounds=50)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcor.config import suggests
from fedcor.data import PARTITIONS
from fedcor.defence import Defence
from fedcor.describe import Described
from fedcor.experiments.files import flatten, read_settings
from fedcor.experiments.given import as_selectors
from fedcor.experiments.settings import Experiment
from fedcor.faults import Faults
from fedcor.liars import Liars
from fedcor.rules import Rules
from fedcor.schedules import Schedule
from fedcor.tasks import MetricSetting
from fedcor.types import Selector

__all__ = ["experiment"]

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
    liars: Liars | Mapping[str, Any] = _SAME,
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
            noisy_clients, loss_noise, loss_clip, optimiser, faults, liars, defence, rules, tags,
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
    if isinstance(old, Liars | Defence):
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
