"""Tables of settings -> frozen dataclasses. A wrong key or type is refused with its name, its value and what is allowed."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from fedcor.errors import ConfigError, suggest

__all__ = ["build_dataclass"]

T = TypeVar("T")
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def build_dataclass(cls: type[T], table: Mapping[str, Any]) -> T:
    """`cls(**table)`, with every key known, every needed key given, and every value of its field's type."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key, value in table.items():
        if key not in fields:
            raise ConfigError(
                key,
                value,
                f"no such key here; there are: {', '.join(fields) or 'none'}",
                suggest(key, fields),
            )
    for name, field in fields.items():
        needed = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if needed and name not in table:
            raise ConfigError(name, None, f"must be given, as {_describe(hints[name])}")
    return cls(**{key: _fitted(key, value, hints[key]) for key, value in table.items()})


def _fitted(key: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type takes it: whole numbers serve as numbers, lists as tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _fitted(key, value, option)
            except ConfigError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_fitted(key, item, arguments[0]) for item in value)
    elif origin is typing.Literal:
        if value in arguments:
            return value
        words = [str(a) for a in arguments]
        raise ConfigError(
            key, value, f"must be one of {', '.join(words)}", suggest(str(value), words)
        )
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is type(None) and value is None:
        return None
    elif hint in (int, str, bool) and type(value) is hint:
        return value
    elif hint not in (int, str, bool, float, type(None)) and origin is not tuple:
        return value  # a user's own class may have fields of any type; it checks them itself
    raise ConfigError(key, value, f"must be {_describe(hint)}")


def _describe(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in arguments if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"a list, each {_describe(arguments[0])}"
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if dataclasses.is_dataclass(hint):
        needed = [
            f.name
            for f in dataclasses.fields(hint)
            if f.default is f.default_factory is dataclasses.MISSING
        ]
        return f"a table of settings with {' and '.join(needed)}"
    if typing.get_origin(hint) is not None and issubclass(typing.get_origin(hint), Mapping):
        return "a table of settings"
    return _NAMES.get(hint, str(hint))
