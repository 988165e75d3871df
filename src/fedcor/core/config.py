"""Settings: checks of single values, and tables or keywords turned into dataclasses.

A wrong value, key or type raises ConfigError with the name of the setting, the given value, and
what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from fedcor.core.errors import ConfigError, FedcorError, suggest
from fedcor.core.text import bytes_text
from fedcor.core.types import State

T = TypeVar("T")
P = ParamSpec("P")
LARGEST = 1e100
LARGEST_COUNT = 2**31  # of rounds, clients, steps, ...
LARGEST_SEED = 2**63 - 1
_LARGEST_INT = 10**18 - 1  # an array of whole numbers can hold it, and JSON can be read anywhere
_SCALARS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_at_least(key: str, given: object, least: int, most: int = LARGEST_COUNT) -> None:
    """`given` must be a whole number from `least` to `most`."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        raise ConfigError(key, given, f"must be a whole number of at least {least}")
    if given > most:
        raise ConfigError(key, given, f"must be a whole number of at most {most}")


def check_counts(key: str, given: Iterable[object]) -> None:
    """`given` must be whole numbers of at least 1."""
    given = list(given)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in given):
        raise ConfigError(key, given, "must be a list of whole numbers of at least 1")


def check_fraction(key: str, given: object, *, closed: bool = False) -> None:
    """`given` must lie in (0, 1), or in [0, 1] where `closed`."""
    number = _number(given)
    inside = 0.0 <= number <= 1.0 if closed else 0.0 < number < 1.0
    if not inside:
        allowed = "must lie in [0, 1]" if closed else "must lie strictly between 0 and 1"
        raise ConfigError(key, given, allowed)


def check_positive(key: str, given: object, *, zero: bool = False) -> None:
    """`given` must be a finite number above 0, or at least 0 where `zero` is allowed."""
    number = _number(given)
    if not 0.0 <= number <= LARGEST or (number == 0.0 and not zero):
        least = "of at least 0" if zero else "above 0"
        raise ConfigError(key, given, f"must be a finite number {least}")


def check_between(key: str, given: object, low: float, high: float) -> None:
    """`given` must be a number from `low` to `high`, both allowed."""
    if not low <= _number(given) <= high:
        raise ConfigError(key, given, f"must be a number from {low:g} to {high:g}")


def check_one_of(key: str, given: object, options: Iterable[str]) -> None:
    """`given` must be one of `options`; a near miss gets a suggestion."""
    options = list(options)
    if given not in options:
        allowed = f"must be one of {', '.join(options)}"
        raise ConfigError(key, given, allowed, suggest(str(given), options))


def check_memory(key: str, given: object, needed: float) -> None:
    """Refuse a setting that needs more bytes than the machine has, before they are asked for."""
    memory = machine_memory()
    if memory is not None and needed > memory:
        has = f"and this machine has {bytes_text(memory)}: choose a smaller number"
        raise ConfigError(key, given, f"needs about {bytes_text(needed)} of memory, {has}")


@functools.cache
def machine_memory() -> int | None:
    """Bytes of memory that this process can have, or fewer where a container limits it.

    None where the system does not tell.
    """
    try:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None
    for path in map(Path, _CGROUP_LIMITS):
        try:
            sizes.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return min(size for size in sizes if size > 0)


def check_state(state: State, whose: str = "the selector") -> None:
    """Refuse a state that could not be written to a checkpoint."""
    if not isinstance(state, Mapping):
        raise FedcorError(
            f"{whose}'s state is a mapping of names to arrays, not a {type(state).__name__}"
        )
    for name, value in state.items():
        plain = isinstance(value, np.ndarray) and not value.dtype.hasobject
        if not isinstance(name, str) or not plain:
            raise FedcorError(
                f"{whose}'s state {name!r} is not a plain NumPy array, as checkpoints need"
            )


def expand_home(key: str, given: object) -> Path:
    """`given` as a path, with `~` for a home folder."""
    text = str(given)
    try:
        if "\0" not in text:
            return Path(text).expanduser()
    except RuntimeError:  # there is no such user
        raise ConfigError(key, text, "this user has no home folder") from None
    raise ConfigError(key, text, "a path cannot hold a NUL character")


def _number(given: object) -> float:
    """`given` as a number; NaN, which lies in no range, where it is none or is too large."""
    if isinstance(given, bool) or not isinstance(given, int | float | np.integer | np.floating):
        return math.nan
    try:
        return float(given)
    except OverflowError:
        return math.nan


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
        fedcor.core.errors.ConfigError: round = 3: unknown setting; known here: rounds (did you \
mean "rounds"?)
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
        check_one_of(key, value, map(str, arguments))
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
