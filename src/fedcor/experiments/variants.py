"""One experiment with several selectors, each under a name that tells it from the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fedcor.describe import describe
from fedcor.errors import ConfigError
from fedcor.experiments.settings import Experiment
from fedcor.selectors import SELECTORS, selector_name
from fedcor.types import Selector, selector_traits

__all__ = ["Selectors", "variants"]

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
