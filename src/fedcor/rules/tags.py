"""Tags: what rules know clients by, such as their site. Each is a name with one value per client.

In an experiment, tags are a table: tag -> value -> the clients that have it. A file may write the
clients as a list, as a text of ranges, or all tags as a CSV file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedcor.checks import expand_home
from fedcor.errors import ConfigError

__all__ = ["TagTable", "as_tags", "describe_tags", "tag_columns", "tag_text"]

# Tag -> value -> sorted ids.
TagTable: TypeAlias = Mapping[str, Mapping[str, tuple[int, ...]]]

_MOST_CLIENTS = 10_000_000


def tag_text(value: Any) -> str:
    """A tag's value as a text, so that 1 in Python and "1" in a file are the same.

    >>> tag_text(True), tag_text(3), tag_text("eu")
    ('true', '3', 'eu')
    """
    value = value.item() if isinstance(value, np.generic) else value
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_tags(given: Any) -> TagTable:
    """The tags of an experiment.

    Args:
        given: Tag -> value -> clients, as a list of ids or as a text of ranges ("0-9, 12"); or
            tag -> a list with the value of each client, None where it has none; or the path of a
            CSV file with the columns `client` and one per tag, whose empty fields are no value.

    Raises:
        ConfigError: It is none of these, or a client has two values of one tag.

    Example:
        >>> as_tags({"site": {"a": "0-2", "b": [3, 4]}})
        {'site': {'a': (0, 1, 2), 'b': (3, 4)}}
        >>> as_tags({"site": ["a", "b", None, "a"]})
        {'site': {'a': (0, 3), 'b': (1,)}}
    """
    if isinstance(given, str | Path):
        return _read(expand_home("tags", given))
    if not isinstance(given, Mapping):
        raise ConfigError("tags", given, "must be a table of tags, or the path of a CSV file")
    return {str(tag): _values(f"tags.{tag}", values) for tag, values in given.items()}


def _values(key: str, given: Any) -> dict[str, tuple[int, ...]]:
    """Value -> ids of one tag."""
    if isinstance(given, Mapping):
        found = {
            tag_text(value): _ids(f"{key}.{value}", clients) for value, clients in given.items()
        }
    elif isinstance(given, Sequence | np.ndarray) and not isinstance(given, str):
        found = _by_value(enumerate(given))
    else:
        allowed = "must be a table, value -> clients, or a list with the value of each client"
        raise ConfigError(key, given, allowed)
    owner: dict[int, str] = {}
    for value, clients in found.items():
        for client in clients:
            if owner.setdefault(client, value) != value:
                allowed = f"client {client} has two values: {owner[client]!r} and {value!r}"
                raise ConfigError(key, given, allowed)
    return found


def _by_value(pairs: Iterable[tuple[int, Any]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for client, value in pairs:
        if value is not None:
            found.setdefault(tag_text(value), []).append(client)
    return {value: tuple(found[value]) for value in sorted(found)}


def _ids(key: str, given: Any) -> tuple[int, ...]:
    """Sorted ids of a list, or of a text of ranges."""
    allowed = 'must be a list of client ids, or a text of ranges such as "0-9, 12"'
    if isinstance(given, str):
        found: set[int] = set()
        for part in given.split(","):
            match = re.fullmatch(r"\s*(\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", part)
            if match is None:
                raise ConfigError(key, given, allowed)
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ConfigError(key, given, f"the range {part.strip()} ends before it starts")
            found.update(range(first, last + 1))
        return tuple(sorted(found))
    if isinstance(given, bool) or not isinstance(given, int | np.integer | Iterable):
        raise ConfigError(key, given, allowed)
    ids = [given] if isinstance(given, int | np.integer) else list(given)
    whole = all(isinstance(k, int | np.integer) and not isinstance(k, bool) for k in ids)
    if not whole or any(not 0 <= k < _MOST_CLIENTS for k in ids):
        raise ConfigError(key, given, allowed)
    return tuple(sorted({int(k) for k in ids}))


def _read(path: Path) -> TagTable:
    """The tags in a CSV file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            names = [name for name in rows.fieldnames or [] if name != "client"]
            if not names or "client" not in (rows.fieldnames or []):
                allowed = "must have the column client, and one column per tag"
                raise ConfigError("tags", str(path), allowed)
            seen: dict[int, dict[str, str]] = {}
            for row in rows:
                text = (row["client"] or "").strip()
                if not re.fullmatch(r"\d{1,7}", text) or int(text) in seen:
                    why = "is there twice" if text.isdecimal() else "is no client id"
                    raise ConfigError("tags", str(path), f"line {rows.line_num}: {text!r} {why}")
                seen[int(text)] = {name: (row[name] or "").strip() for name in names}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("tags", str(path), f"the file cannot be read: {error}") from None
    clients = sorted(seen)
    return {name: _by_value((k, seen[k][name] or None) for k in clients) for name in names}


def tag_columns(tags: TagTable, clients: int) -> dict[str, list[str | None]]:
    """Tag -> the value of each of so many clients; None where a client has none.

    Raises ConfigError where a tag names a client that there is not.
    """
    columns: dict[str, list[str | None]] = {}
    for tag, values in tags.items():
        columns[tag] = [None] * clients
        for value, ids in values.items():
            if ids and ids[-1] >= clients:
                allowed = f"there is no client {ids[-1]}: the clients are 0 to {clients - 1}"
                raise ConfigError(f"tags.{tag}.{value}", _ranges(ids), allowed)
            for client in ids:
                columns[tag][client] = value
    return columns


def describe_tags(tags: TagTable) -> dict[str, dict[str, str]]:
    """As plain values for a record: tag -> value -> ranges of clients.

    >>> describe_tags({"site": {"a": (0, 1, 2, 7)}})
    {'site': {'a': '0-2, 7'}}
    """
    return {
        tag: {value: _ranges(ids) for value, ids in sorted(values.items())}
        for tag, values in sorted(tags.items())
    }


def _ranges(ids: Sequence[int]) -> str:
    if not ids:
        return ""
    numbers = np.array(ids)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
