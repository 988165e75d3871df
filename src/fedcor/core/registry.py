"""A user's own code, which settings name: as `module:attribute`, or by an entry point.

Selectors, partitions and optimisers are found in the same way, by a `Registry` each. A package
registers its own with an entry point in its pyproject.toml:

    [project.entry-points."fedcor.optimisers"]
    mine = "my_package.my_module:MyOptimiser"
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from importlib.metadata import entry_points
from typing import Any

from fedcor.core.config import build_dataclass
from fedcor.core.errors import ConfigError, FedcorError, suggest


@dataclass(frozen=True)
class Registry:
    """Classes by name: built-in ones, those of installed packages, and any as `module:Class`.

    Args:
        key: the setting that holds a name, for error messages.
        group: the group of entry points.
        built_in: name -> class, or `module:Class` to import it when it is first used.
        methods: what every class must have.
        short_form: methods that can stand for them; none if it is empty.

    Example:
        >>> from fedcor.optimisers import FedAvg
        >>> registry = Registry("name", "fedcor.optimisers", {"fedavg": FedAvg}, ("init", "step"))
        >>> registry.build("fedavg", {"weighted": True})
        FedAvg(weighted=True)
    """

    key: str
    group: str
    built_in: Mapping[str, Any]
    methods: tuple[str, ...]
    short_form: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """All built-in and registered names."""
        return [*self.built_in, *sorted(point.name for point in entry_points(group=self.group))]

    def find(self, name: str) -> type[Any]:
        """The dataclass called `name`.

        Raises:
            ConfigError: there is none (with a suggestion), or it lacks some of the methods.
        """
        if isinstance(name, str) and name in self.built_in:
            known: type[Any] | str = self.built_in[name]
            return load_object(known, self.key) if isinstance(known, str) else known
        points = entry_points(group=self.group, name=name)
        if points:
            found = load_object(next(iter(points)).value, self.key)
        elif isinstance(name, str) and ":" in name:
            found = load_object(name, self.key)
        else:
            names = self.names()
            allowed = f"must be one of {', '.join(names)}, or module:Class"
            raise ConfigError(self.key, name, allowed, suggest(str(name), names))
        if not (isinstance(found, type) and is_dataclass(found) and self.accepts(found)):
            raise ConfigError(self.key, name, f"must be a dataclass with {self._needed()}")
        return found

    def build(self, name: str, options: Mapping[str, Any]) -> Any:
        """The object called `name`, made with `options`; raises ConfigError for wrong ones."""
        found = self.find(name)
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise ConfigError(self.key, name, f"is abstract: it lacks {missing}")
        try:
            return build_dataclass(found, options)
        except FedcorError:
            raise
        except Exception as error:  # a user's class may fail in any way
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(self.key, name, f"could not be made ({why})") from error

    def check(self, given: object) -> None:
        """Refuse an object of a user's that lacks some of the methods, or is a class."""
        if isinstance(given, type) or not self.accepts(given):
            kind = "an object, not a class," if isinstance(given, type) else "an object"
            raise ConfigError(self.key, given, f"must be a name, or {kind} with {self._needed()}")

    def accepts(self, found: object) -> bool:
        """Whether an object or a class has the methods."""
        return any(
            all(callable(getattr(found, method, None)) for method in methods)
            for methods in (self.methods, self.short_form)
            if methods
        )

    def name_of(self, given: object) -> str:
        """The name of an object's class: built-in or registered, else `module:Class`."""
        cls = type(given)
        reference = f"{cls.__module__}:{cls.__qualname__}"
        for name, known in self.built_in.items():
            if known in (cls, reference):
                return name
        for point in entry_points(group=self.group):
            if point.value == reference:
                return point.name
        return reference

    def _needed(self) -> str:
        forms = [_listed(methods) for methods in (self.methods, self.short_form) if methods]
        return ", or ".join(forms)


def _listed(methods: tuple[str, ...]) -> str:
    *first, last = methods
    named = f"{', '.join(first)} and {last}" if first else last
    return f"the method{'s' if first else ''} {named}"


def load_object(reference: str, key: str) -> Any:
    """The object that `reference` names.

    Args:
        reference: `module:attribute`. Modules in the current folder are found too.
        key: the setting that holds `reference`, for error messages.

    Raises:
        ConfigError: the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(key, reference, "must have the form module:attribute")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        why = f"{type(error).__name__}: {error}"
        allowed = f"the module {module_name} could not be imported ({why})"
        raise ConfigError(key, reference, allowed) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        allowed = f"the module {module_name} has no {attribute}"
        raise ConfigError(key, reference, allowed, suggest(attribute, names))
    return getattr(module, attribute)
