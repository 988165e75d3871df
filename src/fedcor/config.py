"""Tables and keywords to settings: a wrong key or type is refused, with what is allowed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from fedcor.errors import ConfigError, suggest

__all__ = ["build_dataclass", "check_keys", "convert", "plain_keywords", "suggests"]

T = TypeVar("T")
P = ParamSpec("P")
_LARGEST_INT = 10**18 - 1  # an array of whole numbers can hold it, and JSON can be read anywhere
_SCALARS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def build_dataclass(cls: type[T], table: Mapping[str, Any]) -> T:
    """`cls(**table)`, checked.

    Args:
        cls: a dataclass whose fields have types.
        table: values by field name. Whole numbers become floats and lists become tuples where
            the field's type asks for it.

    Raises:
        ConfigError: a key is unknown, a field without default is missing, or a value has the
            wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    check_keys(table, list(fields))
    for name, field in fields.items():
        if _is_required(field) and name not in table:
            raise ConfigError(name, None, f"must be given, as {_describe(hints[name])}")
    return cls(**{key: convert(key, value, hints[key]) for key, value in table.items()})


def suggests(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which refuses a keyword that it does not have as the command line does.

    Raises:
        ConfigError: by the returned function: a keyword is unknown (with a suggestion), or one that
            must be given is missing.

    Example:
        >>> @suggests
        ... def train(rounds: int) -> int:
        ...     return rounds
        >>> train(round=3)
        Traceback (most recent call last):
            ...
        fedcor.errors.ConfigError: round = 3: unknown setting; known here: rounds (did you mean \
"rounds"?)
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    required = [name for name in known if parameters[name].default is inspect.Parameter.empty]

    @functools.wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
        check_keys(keywords, known)
        given = {*list(parameters)[: len(arguments)], *keywords}
        missing = [name for name in required if name not in given]
        if missing:
            more = f"; so must {', '.join(missing[1:])}" if missing[1:] else ""
            raise ConfigError(missing[0], None, f"must be given{more}")
        return function(*arguments, **keywords)

    return checked


def plain_keywords(cls: type[T]) -> type[T]:
    """The dataclass `cls`, which refuses an unknown keyword with a suggestion (see `suggests`)."""
    cls.__init__ = suggests(cls.__init__)  # type: ignore[method-assign]
    return cls


def check_keys(table: Mapping[str, Any], known: list[str]) -> None:
    """Refuse a key that is not one of `known`; a near miss gets a suggestion."""
    for key, value in table.items():
        if key not in known:
            allowed = f"unknown setting; known here: {', '.join(known) or 'none'}"
            raise ConfigError(key, value, allowed, suggest(key, known))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def convert(key: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`. Raises ConfigError about `key` if it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return convert(key, value, option)
            except ConfigError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(key, item, arguments[0]) for item in value)
    elif origin is typing.Literal:
        if value in arguments:
            return value
        words = [str(argument) for argument in arguments]
        allowed = f"must be one of {', '.join(words)}"
        raise ConfigError(key, value, allowed, suggest(str(value), words))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(key, value, "must be a number of at most 300 digits") from None
    elif hint is type(None) and value is None:
        return None
    elif hint is int and type(value) is int and not -_LARGEST_INT <= value <= _LARGEST_INT:
        raise ConfigError(key, value, "must be a whole number of at most 18 digits")
    elif hint in (int, str, bool) and type(value) is hint:
        return value
    elif hint not in (*_SCALARS, type(None)) and origin is not tuple:
        return value  # a user's own class may have fields of any type, and checks them itself
    raise ConfigError(key, value, f"must be {_describe(hint)}")


def _describe(hint: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in arguments if a is not type(None))
    if origin is tuple:
        return f"a list, each {_describe(arguments[0])}"
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if dataclasses.is_dataclass(hint):
        required = [field.name for field in dataclasses.fields(hint) if _is_required(field)]
        return f"a table of settings with {' and '.join(required)}"
    if origin is not None and issubclass(origin, Mapping):
        return "a table of settings"
    return _SCALARS.get(hint, str(hint))
