"""Checks of single parameters, for every module that takes settings.

Each raises ConfigError with the name of the parameter, what was given, and what is allowed.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedcor.errors import ConfigError, suggest

__all__ = [
    "LARGEST_SEED",
    "check_at_least",
    "check_between",
    "check_counts",
    "check_fraction",
    "check_memory",
    "check_one_of",
    "check_positive",
    "expand_home",
    "machine_memory",
]

LARGEST = 1e100
LARGEST_COUNT = 2**31  # of rounds, clients, steps, ...
LARGEST_SEED = 2**63 - 1
_UNITS = ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
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
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in given):
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
    there = machine_memory()
    if there is not None and needed > there:
        allowed = (
            f"needs about {_bytes(needed)} of memory, and this machine has {_bytes(there)}: "
            "choose a smaller number"
        )
        raise ConfigError(key, given, allowed)


@functools.cache
def machine_memory() -> int | None:
    """Bytes of memory that this process can have, or fewer where a container limits it.

    None where the system does not tell.
    """
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None
    for path in map(Path, _CGROUP_LIMITS):
        try:
            found.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return min(size for size in found if size > 0)


def expand_home(key: str, given: object) -> Path:
    """`given` as a path, with `~` for a home folder."""
    text = str(given)
    try:
        if "\0" not in text:
            return Path(text).expanduser()
    except RuntimeError:  # there is no such user
        raise ConfigError(key, text, "this user has no home folder") from None
    raise ConfigError(key, text, "a path cannot hold a NUL character")


def _bytes(count: float) -> str:
    """`1.2 GB`."""
    scale, unit = next((pair for pair in _UNITS if count >= pair[0]), (1.0, "bytes"))
    return f"{count / scale:.3g} {unit}"


def _number(given: object) -> float:
    """`given` as a number; NaN, which lies in no range, where it is none or is too large."""
    if isinstance(given, bool) or not isinstance(given, int | float | np.integer | np.floating):
        return math.nan
    try:
        return float(given)
    except OverflowError:
        return math.nan
