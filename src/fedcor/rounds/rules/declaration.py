"""Rules and tags as a user gives them: checked when they are created.

`Rules` say which clients may be chosen, how many of each group, and how many in each round. They
refer to clients by *tags*, such as a site: a name with one value per client. In an experiment, tags
are a table: tag -> value -> the clients that have it. A file may write the clients as a list, as a
text of ranges, or all tags as a CSV file.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedcor.core.config import build_dataclass, check_at_least, expand_home, plain_keywords
from fedcor.core.describe import describe
from fedcor.core.errors import ConfigError, FedcorError, errors_under
from fedcor.core.types import Selector, selector_traits

# Tag -> value -> sorted ids.
TagTable: TypeAlias = Mapping[str, Mapping[str, tuple[int, ...]]]
# Of a tag: for each of its values, or value -> a number.
Bounds: TypeAlias = int | Mapping[str, int]
# Tag -> value or values; or a function of the client and its tags.
Eligible: TypeAlias = Mapping[str, Any] | Callable[[Any, Mapping[str, Any]], bool]
# Round -> clients from that round on, or a function of the round.
ClientsPerRound: TypeAlias = Mapping[int, int] | Callable[[int], int]

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
    ids = list(given) if isinstance(given, Iterable) else [given]
    for k in ids:
        whole = isinstance(k, int | np.integer) and not isinstance(k, bool)
        if not whole or not 0 <= k < _MOST_CLIENTS:
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


@plain_keywords
@dataclass(frozen=True)
class Rules:
    """Who may be chosen, how many of each group, and how many in each round.

    Clients have *tags*, such as a site or a region; the clients with one value of a tag form a
    group. A client without the tag is in none of its groups: no maximum limits it, and it counts
    for no minimum. Values are compared as texts, so 1 and "1" are the same.

    What a round cannot meet, because too few clients can be reached, is met as far as possible, and
    the record says what is missing (`unmet`). A maximum is never exceeded.

    Args:
        eligible: Who may be asked and chosen at all: tag -> the value or the list of values that a
            client must have; or a function of the client and its tags that gives True or False. In
            the simulator it is given the client's id, on Flower its name.
        at_least: Least number of clients in a round: tag -> a number for each of its values, or
            value -> a number.
        at_most: Most clients in a round, likewise; 1 or more. To leave a group out, use `eligible`.
        clients_per_round: Round -> clients per round from that round on, or a function of the
            round. Rounds have the engine's numbers: from 0 in the simulator, from 1 on Flower.
            Before the first of these rounds, the selector's own number holds.

    Example:
        >>> from fedcor import Rules
        >>> rules = Rules(at_least={"site": 1}, at_most={"region": {"eu": 2}})
        >>> rules.bounds("site", "a"), rules.bounds("region", "eu"), rules.bounds("region", "us")
        ((1, None), (0, 2), (0, None))
    """

    eligible: Eligible | None = None
    at_least: Mapping[str, Bounds] = field(default_factory=dict)
    at_most: Mapping[str, Bounds] = field(default_factory=dict)
    clients_per_round: ClientsPerRound | None = None

    def __post_init__(self) -> None:
        self._set("eligible", _as_eligible(self.eligible))
        self._set("at_least", _as_bounds("at_least", self.at_least, 0))
        self._set("at_most", _as_bounds("at_most", self.at_most, 1))
        self._set("clients_per_round", _as_schedule(self.clients_per_round))
        for tag in self.quota_tags:
            for value in sorted(self.bounded_values(tag)) or [""]:
                low, high = self.bounds(tag, value)
                if high is not None and low > high:
                    key = f"at_least.{tag}.{value}".rstrip(".")
                    raise ConfigError(key, low, f"must not be above at_most, which is {high}")

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    def __bool__(self) -> bool:
        """Whether there is any rule."""
        return bool(self.quota_tags) or self.eligible is not None or bool(self.clients_per_round)

    @property
    def quota_tags(self) -> list[str]:
        """The tags with a least or a most number, sorted."""
        return sorted({*self.at_least, *self.at_most})

    @property
    def tags(self) -> list[str]:
        """All tags that the rules name, sorted."""
        wanted = self.eligible if isinstance(self.eligible, Mapping) else {}
        return sorted({*self.quota_tags, *wanted})

    def bounded_values(self, tag: str) -> set[str]:
        """The values of a tag that a bound names."""
        return _named(self.at_least.get(tag)) | _named(self.at_most.get(tag))

    def bounds(self, tag: str, value: str) -> tuple[int, int | None]:
        """The least and the most clients with this value of `tag`; None for no maximum."""
        low, high = (
            given.get(value) if isinstance(given, Mapping) else given
            for given in (self.at_least.get(tag), self.at_most.get(tag))
        )
        return low or 0, high

    def is_eligible(self, client: int | str, tags: Mapping[str, Any]) -> bool:
        """Whether a client with these tags may be chosen.

        Raises FedcorError where a user's function fails, or gives neither True nor False.
        """
        if self.eligible is None:
            return True
        if isinstance(self.eligible, Mapping):
            return all(
                tag in tags and tag_text(tags[tag]) in values
                for tag, values in self.eligible.items()
            )
        try:
            answer: object = self.eligible(client, tags)
        except Exception as error:  # a user's function may fail in any way
            why = f"{type(error).__name__}: {error}"
            raise FedcorError(f"the rule `eligible` failed for client {client}: {why}") from error
        if not isinstance(answer, bool | np.bool_):
            wrong = f"gave {answer!r} for client {client}, not True or False"
            raise FedcorError(f"the rule `eligible` {wrong}")
        return bool(answer)

    def clients_at(self, round: int) -> int | None:
        """Clients in `round`, as the engine's users number it; None for the selector's own."""
        if callable(self.clients_per_round):
            try:
                count = self.clients_per_round(round)
                check_at_least("clients_per_round", count, 1)
            except Exception as error:
                why = f"in round {round}: {type(error).__name__}: {error}"
                allowed = f"must give a whole number of at least 1 in every round; {why}"
                raise ConfigError("clients_per_round", self.clients_per_round, allowed) from error
            return int(count)
        schedule = self.clients_per_round or {}
        passed = [start for start in schedule if start <= round]
        return schedule[max(passed)] if passed else None

    def describe(self) -> dict[str, Any]:
        """The rules that there are, as plain values for a record."""
        used = {key: value for key, value in vars(self).items() if value}
        return {key: describe(value) for key, value in used.items()}


def as_rules(given: Any) -> Rules:
    """Rules, of a table too; none of None."""
    if given is None or isinstance(given, Rules):
        return given or Rules()
    if not isinstance(given, Mapping):
        raise ConfigError("rules", given, "must be fedcor.Rules, or a table of settings")
    with errors_under("rules"):
        return build_dataclass(Rules, given)


def check_rules_for(rules: Rules, selector: Selector) -> None:
    """Refuse a selector that cannot be asked as the rules need it."""
    counted = bool(rules.quota_tags)
    if not counted and rules.clients_per_round is None:
        return
    key = "at_least" if rules.at_least else "at_most" if rules.at_most else "clients_per_round"
    check_can_ask(key, getattr(rules, key), selector)
    if counted and selector_traits(selector).replacement:
        allowed = f"counts clients, but {type(selector).__name__} may draw one twice"
        raise ConfigError(key, getattr(rules, key), allowed, "set replacement to false")


def check_can_ask(key: str, given: object, selector: Selector) -> None:
    """Refuse the setting `key` with a selector that cannot be asked for fewer or more clients."""
    fields = getattr(selector, "__dataclass_fields__", {})
    if "clients_per_round" not in fields or not fields["clients_per_round"].init:
        name = type(selector).__name__
        allowed = f"needs a selector with the setting clients_per_round, which {name} has not"
        hint = "it is asked for fewer or more clients; choose another selector"
        raise ConfigError(key, given, allowed, hint)


def with_clients(selector: Selector, count: int | None) -> Selector:
    """The selector with `count` clients per round; itself where that is None or its own."""
    if count is None or selector_traits(selector).clients_per_round == count:
        return selector
    changed: Selector = dataclasses.replace(selector, clients_per_round=count)  # type: ignore[type-var]
    return changed


def _is_table(key: str, given: Any, allowed: str) -> bool:
    """Whether a rule is a table: neither None nor a function; ConfigError for anything else."""
    if isinstance(given, Mapping):
        return True
    if given is not None and not callable(given):
        raise ConfigError(key, given, allowed)
    return False


def _as_eligible(given: Any) -> Any:
    allowed = "must be a table, tag -> value or values, or a function of the client and its tags"
    if not _is_table("eligible", given, allowed):
        return given
    wanted = {}
    for tag, values in given.items():
        several = isinstance(values, list | tuple | set | frozenset)
        if isinstance(values, Mapping) or values is None or (several and not values):
            allowed = "must be a value, or a list of values"
            raise ConfigError(f"eligible.{tag}", values, allowed)
        wanted[str(tag)] = sorted({tag_text(v) for v in (values if several else [values])})
    return wanted or None


def _as_bounds(key: str, given: Any, least: int) -> dict[str, Bounds]:
    if not isinstance(given, Mapping):
        raise ConfigError(key, given, 'must be a table, tag -> a number, as {"site": 1}')
    bounds: dict[str, Bounds] = {}
    for tag, of_tag in given.items():
        if isinstance(of_tag, Mapping):
            for value, number in of_tag.items():
                check_at_least(f"{key}.{tag}.{value}", number, least)
            bounds[str(tag)] = {tag_text(value): int(number) for value, number in of_tag.items()}
        else:
            check_at_least(f"{key}.{tag}", of_tag, least)
            bounds[str(tag)] = int(of_tag)
    return bounds


def _as_schedule(given: Any) -> Any:
    allowed = "must be a table, round -> clients from that round on, or a function of the round"
    if not _is_table("clients_per_round", given, allowed):
        return given
    schedule = {}
    for round, count in given.items():
        number = int(round) if isinstance(round, str) and round.isdecimal() else round
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            allowed = "must have the numbers of rounds as keys"
            raise ConfigError(f"clients_per_round.{round}", count, allowed)
        check_at_least(f"clients_per_round.{round}", count, 1)
        schedule[int(number)] = int(count)
    return dict(sorted(schedule.items())) or None


def _named(bounds: Bounds | None) -> set[str]:
    return set(bounds) if isinstance(bounds, Mapping) else set()
