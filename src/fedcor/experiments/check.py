"""Checks of single settings of an experiment; `settings.py` has those of several at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedcor.checks import (
    check_at_least,
    check_between,
    check_fraction,
    check_memory,
    check_positive,
)
from fedcor.errors import ConfigError
from fedcor.faults import Faults
from fedcor.model_options import MODEL_OPTIONS, check_model_options
from fedcor.rules import FixedRules, check_can_ask, with_clients
from fedcor.types import Selector, optimiser_traits, selector_traits

__all__ = [
    "BYTES_PER_CLIENT",
    "LARGEST",
    "check_faults",
    "check_finite",
    "check_model",
    "check_numbers",
    "check_optimiser_memory",
    "check_selector_memory",
    "chosen_by",
    "errors_under",
    "is_table",
    "plain",
]

DEEPEST = 20  # levels of tables and lists within one another
BYTES_PER_CLIENT = 400  # at the least: its rows, its size, and what is known of it
LARGEST = 1e6  # of a learning rate, of its factor and of the weight decay
_DEVICES = ("auto", "cpu", "cuda", "mps")


def check_numbers(experiment: Any) -> None:
    """Refuse numbers of an experiment that are out of range, and unknown devices."""
    for key in ("rounds", "batch_size", "local_steps"):
        check_at_least(key, getattr(experiment, key), 1)
    check_at_least("clients_per_round", experiment.clients_per_round, 0)
    check_positive("factor", experiment.factor)
    for key in ("factor", "weight_decay"):
        check_between(key, getattr(experiment, key), 0.0, LARGEST)
    if experiment.device.partition(":")[0] not in _DEVICES:
        raise ConfigError("device", experiment.device, f"must be one of {', '.join(_DEVICES)}")
    check_fraction("holdout", experiment.holdout, closed=True)
    if experiment.holdout == 1.0:
        raise ConfigError("holdout", experiment.holdout, "must be below 1, to leave training data")
    check_fraction("noisy_clients", experiment.noisy_clients, closed=True)


def check_faults(
    faults: Faults, selector: Selector, rules: FixedRules | None, clients: int, rounds: int
) -> None:
    """Refuse faults that do not go with so many clients, with the rules, or with the selector.

    Args:
        faults: As the user gave them.
        selector: Chooses; with over-selection it must be one that can be asked for more clients.
        rules: Who may be chosen; None for everyone.
        clients: N.
        rounds: Of a run.
    """
    with errors_under("faults"):
        faults.check_for(clients, None if rules is None else rules.eligible)
        if faults.over_selection == 1.0:
            return
        given, own = faults.over_selection, selector_traits(selector).clients_per_round
        check_can_ask("over_selection", given, selector)
        numbers = {None} if rules is None else {rules.rules.clients_at(t) for t in range(rounds)}
        for needed in sorted(number or int(own or 0) for number in numbers):
            chosen = faults.choose(needed, clients)
            try:
                with_clients(selector, chosen)
            except ConfigError as error:
                allowed = f"{chosen} clients do not go with the selector: {error}"
                raise ConfigError("over_selection", given, allowed) from None


def check_model(model: Any) -> None:
    """Refuse the table of a model that there is not, or of options that it does not have."""
    if not isinstance(model, Mapping):
        return
    check_finite({"model": model})
    options = dict(model)
    name = options.pop("name", None)
    if not isinstance(name, str):
        allowed = f"must be given: {', '.join(MODEL_OPTIONS)}, or module:factory"
        raise ConfigError("model.name", name, allowed)
    with errors_under("model"):
        check_model_options(name, options)


def check_selector_memory(
    name: str, selector: Any, clients: int, parameters: int | None = None
) -> None:
    """Refuse a selector whose state does not fit into memory.

    Args:
        name: What the selector is called in the settings.
        selector: One that may have `memory_bytes(clients, parameters)`: setting -> bytes.
        clients: N.
        parameters: P, of the model; None where it is not known yet.
    """
    needs = getattr(selector, "memory_bytes", None)
    for key, needed in needs(clients, parameters).items() if callable(needs) else ():
        check_memory(f"selectors.{name}.{key}", getattr(selector, key), needed)


def check_optimiser_memory(optimiser: Any, clients: int, parameters: int) -> None:
    """Refuse an optimiser that remembers a vector of each client, if they do not fit into memory.

    Args:
        optimiser: One whose trait `remembers` may be true.
        clients: How many take part in a run, at the most.
        parameters: P, of the model.
    """
    if optimiser_traits(optimiser).remembers:
        number = np.dtype(getattr(optimiser, "dtype", "float32")).itemsize
        given = f"{type(optimiser).__name__} of {clients} clients with {parameters} parameters each"
        check_memory("optimiser.name", given, float(number) * clients * parameters)


@contextmanager
def errors_under(table: str) -> Iterator[None]:
    """A ConfigError raised within names its key inside `table`."""
    try:
        yield
    except ConfigError as error:
        raise error.under(table) from None


def check_finite(settings: Any, path: str = "", depth: int = 0) -> None:
    """Refuse NaN and infinity anywhere in tables of settings, and tables that nest too deeply."""
    if depth > DEEPEST:
        raise ConfigError(path, settings, f"is nested more than {DEEPEST} levels deep")
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            check_finite(value, f"{path}.{key}".removeprefix("."), depth + 1)
    elif isinstance(settings, list | tuple):
        for value in settings:
            check_finite(value, path, depth + 1)
    elif isinstance(settings, float) and not math.isfinite(settings):
        raise ConfigError(path, settings, "must be a finite number")


def chosen_by(selector: Selector) -> int | None:
    """How many clients a selector chooses; None if it does not say."""
    chosen: int | None = plain(selector_traits(selector).clients_per_round)
    return chosen


def is_table(value: Any) -> bool:
    """Whether it is a table of settings."""
    return isinstance(value, Mapping)


def plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value
