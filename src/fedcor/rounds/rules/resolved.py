"""Rules checked against clients that are all known before the first round, as in the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedcor.core.errors import ConfigError, errors_under, suggest
from fedcor.core.types import BoolArray, Selector, selector_traits
from fedcor.rounds.rules.declaration import (
    Rules,
    TagTable,
    check_rules_for,
    tag_columns,
    with_clients,
)
from fedcor.rounds.rules.seats import Groups, Seats, make_groups


@dataclass(frozen=True, eq=False)
class FixedRules:
    """The rules of one run, for its clients.

    Attributes:
        rules: The user's rules.
        eligible: (N,) Clients that may be asked and chosen.
        groups: The bounds; None where there are none.
    """

    rules: Rules
    eligible: BoolArray
    groups: Groups | None

    def selector_at(self, selector: Selector, round: int) -> Selector:
        """The selector with the clients per round of this round."""
        return with_clients(selector, self.rules.clients_at(round))


def fix_rules(
    rules: Rules, tags: TagTable, clients: int, selector: Selector, rounds: int
) -> FixedRules | None:
    """The rules for `clients` clients with `tags`; None where there is no rule.

    Args:
        rules: As the user gave them.
        tags: Tag -> value -> ids.
        clients: N, the number of clients.
        selector: Chooses; it must be one that the rules can be kept with.
        rounds: Rounds of a run, from 0.

    Raises:
        ConfigError: A rule names a tag or a value that no client has, or could not be met even if
            all clients could be reached.
    """
    columns = tag_columns(tags, clients)
    if not rules:
        return None
    with errors_under("rules"):
        _check_names(rules, tags)
        check_rules_for(rules, selector)
        eligible = _eligible(rules, columns, clients)
        fixed = FixedRules(rules, eligible, make_groups(rules, columns, eligible))
        usual = selector_traits(selector).clients_per_round
        for number in sorted({rules.clients_at(round) or usual or 0 for round in range(rounds)}):
            if number:
                _check_number(fixed, selector, number)
    return fixed


def _eligible(rules: Rules, columns: Mapping[str, Sequence[str | None]], clients: int) -> BoolArray:
    """(N,) Clients that may be chosen; ConfigError where there is none."""
    tags_of: list[dict[str, str]] = [{} for _ in range(clients)]
    for tag, column in columns.items():
        for client, value in enumerate(column):
            if value is not None:
                tags_of[client][tag] = value
    eligible = np.array([rules.is_eligible(k, tags) for k, tags in enumerate(tags_of)], dtype=bool)
    if not eligible.any():
        raise ConfigError("eligible", rules.eligible, f"none of the {clients} clients is eligible")
    return eligible


def _check_names(rules: Rules, tags: TagTable) -> None:
    """Refuse a tag or a value that no client has: it is misspelt."""
    named = {"at_least": rules.at_least, "at_most": rules.at_most, "eligible": rules.eligible}
    for key, table in named.items():
        for tag, values in table.items() if isinstance(table, dict) else ():
            if tag not in tags:
                known = ", ".join(sorted(tags)) or "none"
                allowed = f"no client has this tag; there are: {known}"
                raise ConfigError(f"{key}.{tag}", values, allowed, suggest(tag, tags))
            for value in values if isinstance(values, dict | list) else ():
                if value not in tags[tag]:
                    known = ", ".join(sorted(tags[tag])) or "none"
                    allowed = f"no client has {tag} = {value!r}; there are: {known}"
                    raise ConfigError(f"{key}.{tag}", values, allowed, suggest(value, tags[tag]))


def _check_number(fixed: FixedRules, selector: Selector, number: int) -> None:
    """Refuse rules that cannot be met with `number` clients, whoever can be reached."""
    everyone, rules = np.flatnonzero(fixed.eligible), fixed.rules
    try:
        with_clients(selector, number)
    except ConfigError as error:
        allowed = f"{number} clients do not go with the selector: {error}"
        raise ConfigError("clients_per_round", rules.clients_per_round, allowed) from None
    if number > len(everyone) and rules.eligible is None:
        allowed = f"asks for {number} clients, but there are {len(everyone)}"
        raise ConfigError("clients_per_round", rules.clients_per_round, allowed)
    if number > len(everyone):
        allowed = f"lets {len(everyone)} clients in, but {number} are chosen in a round"
        raise ConfigError("eligible", rules.eligible, allowed, "lower clients_per_round")
    if fixed.groups is None:
        return
    seats = Seats(fixed.groups, number, everyone)
    if seats.shortfall:
        allowed = (
            f"cannot be met with {number} clients in a round, even if all can be reached: "
            f"{_why(seats)}"
        )
        hint = "lower it, or raise clients_per_round or at_most"
        raise ConfigError("at_least", rules.at_least, allowed, hint)
    if seats.size < number:
        allowed = f"lets {seats.size} clients in a round, but {number} are chosen"
        raise ConfigError("at_most", rules.at_most, allowed, "raise it, or lower clients_per_round")


def _why(seats: Seats) -> str:
    """Which minima are too high, by themselves or together."""
    groups, counts = seats.groups, seats.groups.count(seats.groups.in_cells(seats.candidates))
    needed: Counter[str] = Counter()
    for label, low, count in zip(groups.labels, groups.lower, counts, strict=False):
        if low > count:
            return f"{label} has {count} of {low} clients"
        needed[label.partition("=")[0]] += int(low)
    for tag, total in needed.items():
        if total > seats.count:
            return f"the groups of {tag} need {total} together"
    return "the minima and maxima contradict each other"
