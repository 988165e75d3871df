"""What a run on Flower keeps from round to round, and which clients may be chosen now.

A checkpoint holds `FlowerState` and the names of the clients. The users' rules say which clients
may be chosen, by the tags that the clients report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.core.text import listed
from fedcor.core.types import Array, IntArray, Population, Selector, State, selector_traits
from fedcor.flower.client_registry import Roster, introduce
from fedcor.flower.exchange import Exchange
from fedcor.flower.logs import FaultLog, counted, log_once
from fedcor.flower.protocol import EVERY_TAG, LOG, flower_round, version_of
from fedcor.flower.settings import RunSettings
from fedcor.flower.strategy_memory import Memory, pack, unpack
from fedcor.rounds.backoff import grow, no_faults, offered_clients
from fedcor.rounds.rules.declaration import Rules, tag_text, with_clients
from fedcor.rounds.rules.seats import Groups, make_groups
from fedcor.rounds.selection import init_state, join_clients
from fedcor.rounds.state import RoundState, arrays_below, unpack_state

_FIRST_PAUSE, _PAUSE = 0.2, 1.0  # seconds between looks, before the first round and later
_SAY_AGAIN = 10.0  # seconds after which it is said once more that we wait


@dataclass(frozen=True, kw_only=True)
class FlowerState(RoundState[ArrayRecord]):
    """Everything that one round hands to the next, and what only a run on Flower knows.

    Attributes:
        version: The hash of w^t, by which clients are told to keep it.
        answered: Whether an evaluation, asked for or the strategy's, ever had a usable loss.
        reported: Whether a trained model ever came with one, if the selector needs it.
        silent: Until then, the clients that have trained in this start, without one.
    """

    version: str = ""
    answered: bool = False
    reported: bool = False
    silent: frozenset[int] = frozenset()

    def of_model(self, arrays: ArrayRecord) -> FlowerState:
        """The state for a round that starts from `arrays`, of which nothing may be known."""
        version = version_of(arrays)
        if version == self.version:
            return replace(self, model=arrays)
        unknown, nobody = np.full_like(self.known, np.nan), np.zeros_like(self.holders)
        return replace(self, model=arrays, version=version, known=unknown, holders=nobody)

    def for_clients(self, count: int) -> FlowerState:
        """The state for so many clients: of new ones, nothing is known."""
        more = count - len(self.known)
        return replace(
            self,
            known=np.pad(self.known, (0, more), constant_values=np.nan),
            holders=np.pad(self.holders, (0, more)),
            backoff=grow(self.backoff or no_faults(0), count),
        )


def first_state(model: ArrayRecord) -> FlowerState:
    """The state before the first round, without any clients."""
    nobody = np.zeros(0, dtype=bool)
    return FlowerState(round=0, model=model, known=np.empty(0), holders=nobody, selector={})


@dataclass
class FederationState:
    """What survives between rounds."""

    current: FlowerState
    finished: int = 0  # rounds that were done before this start
    roster: Roster = field(default_factory=Roster)
    population: Population | None = None  # that the selector's state was made for; None before
    fault_log: FaultLog = field(default_factory=FaultLog)
    doubted: bool = False  # whether this start has logged a doubt about the metrics of replies
    said: set[str] = field(default_factory=set)  # what this start has logged once
    unmet: Mapping[str, int] = field(default_factory=dict)  # rules that the last round did not meet
    assembled: bool = False  # whether the nodes that the first round waits for have been here

    def adapt_selector(self, selector: Selector) -> State:
        """The selector's state, for the clients that there are by now."""
        population, state = self.roster.population(), self.current.selector
        if self.population is None:
            state = init_state(selector, population)
        elif not np.array_equal(self.population.sizes, population.sizes):
            joined = join_clients(selector, state, population)
            if joined is not None:
                state = joined
            elif self.population.count < population.count:
                LOG.warning(
                    "%s has no join(), so it cannot take in new clients: its state starts over",
                    type(selector).__name__,
                )
                state = init_state(selector, population)
        self.population = population
        self.current = replace(self.current.for_clients(population.count), selector=state)
        return state


@dataclass(frozen=True)
class RoundStart:
    """What every attempt at a round starts from."""

    arrays: ArrayRecord  # the model w^t
    config: ConfigRecord  # Flower's train configuration
    memory: Memory  # the strategy, before it was asked to configure this round


@dataclass(frozen=True)
class Checkpoint:
    """A run after a finished round."""

    state: FederationState
    strategy: Mapping[str, Any]  # what the strategy remembers
    config: Mapping[str, Any]  # what it changed in the train configuration
    given_config: Mapping[str, Any]  # the train configuration that `start` was given

    def to_arrays(self) -> dict[str, Array]:
        """As named arrays, which a file takes without pickle."""
        state, current = self.state, self.state.current
        assert state.population is not None
        return {
            **current.pack(lambda name, model: pack({"arrays": model}, name)),
            "sizes": state.population.sizes,
            "version": np.array(current.version, dtype=np.str_),
            "answered": np.array(current.answered),
            "reported": np.array(current.reported),
            **{f"roster/{name}": array for name, array in state.roster.to_arrays().items()},
            **pack(self.strategy, "strategy"),
            **pack(self.config, "config"),
            **pack(self.given_config, "given_config"),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Checkpoint:
        """The checkpoint in `arrays`. Nobody is taken to hold the model: nodes may have restarted.

        Raises RecordError where the arrays are not a checkpoint of this room.
        """

        def model(name: str) -> ArrayRecord | None:
            return unpack(arrays, name)["arrays"] if name in arrays else None

        try:
            fields = unpack_state(arrays, model)
            fields["holders"] = np.zeros_like(fields["holders"])
            current = FlowerState(
                **fields,
                version=str(arrays["version"]),
                answered=bool(arrays["answered"]),
                reported=bool(arrays["reported"]),
            )
            roster = Roster.from_arrays(arrays_below(arrays, "roster/"))
            sizes = arrays["sizes"]
            if current.model is None or not len(current.known) == len(sizes) <= len(roster):
                raise ValueError("it is not of these clients")
            state = FederationState(current, current.round, roster, Population(sizes))
            return cls(
                state,
                strategy=unpack(arrays, "strategy"),
                config=unpack(arrays, "config"),
                given_config=unpack(arrays, "given_config"),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"the checkpoint does not fit this run: {error!r}") from error


# --- who may be chosen ----------------------------------------------------------------------------


def reachable_clients(
    settings: RunSettings, state: FederationState, exchange: Exchange, *, retry: bool = False
) -> tuple[IntArray, list[int]]:
    """Sorted clients that may be asked or chosen in this round, and connected ones left alone.

    The first round of a start waits for the wanted number of nodes; later rounds wait for anyone.
    """
    roster = state.roster
    waiting = _Waiting(settings, 1 if state.assembled else settings.wait_for)
    while True:
        nodes = list(exchange.grid.get_node_ids())
        if len(nodes) >= waiting.wanted:
            _enrol(settings, state, exchange, nodes)
            connected = roster.connect(nodes, eligible_clients(settings.selection.rules, roster))
            if len(connected):
                state.assembled = True
                backoff = grow(state.current.backoff or no_faults(0), len(roster))
                available = offered_clients(backoff, exchange.round, connected)
                return available, sorted({*connected.tolist()} - {*available.tolist()})
            reachable = len(roster.connect(nodes))
            if reachable:
                _check_eligible_tags(settings.selection.rules, roster, len(nodes))
                text = (
                    f"no eligible client among {counted(reachable, 'client')} that can be reached"
                )
            else:
                nodes_text = counted(len(nodes), "node")
                text = f"no answer to the question for the identity from {nodes_text}"
            number = flower_round(exchange.round)
            waiting.log(logging.ERROR, reachable or len(nodes), f"round {number}: {text}")
            roster.forget_unidentified()
        else:
            waiting.too_few(len(nodes))
        time.sleep(_PAUSE if retry or state.assembled else _FIRST_PAUSE)


class _Waiting:
    """Logs that nodes are waited for: at once, when their number changes, and every ten seconds."""

    def __init__(self, settings: RunSettings, wanted: int) -> None:
        self._settings, self.wanted, self._start = settings, wanted, time.monotonic()
        self._connected, self._said = -1, 0.0  # what was said last, and when, in seconds

    def too_few(self, connected: int) -> None:
        """Fewer nodes are connected than are needed."""
        first_advice = self._said < _SAY_AGAIN <= time.monotonic() - self._start
        advice = self._advice(connected) if connected and first_advice else ""
        text = f"waiting for nodes: {connected} connected, {self.wanted} needed"
        self.log(logging.INFO, connected, text, advice)

    def log(self, level: int, connected: int, text: str, advice: str = "") -> None:
        """Log why there is nobody to choose, if it is time to say it again."""
        seconds = time.monotonic() - self._start
        if connected != self._connected or seconds - self._said >= _SAY_AGAIN:
            self._connected, self._said = connected, seconds
            LOG.log(level, "%s (%d s)%s", text, seconds, advice)

    def _advice(self, connected: int) -> str:
        """How to begin with those who are here."""
        chosen = selector_traits(self._settings.selector).clients_per_round
        if self._settings.selection.wait_for is None and chosen == self.wanted:
            return f": each round has {chosen} clients. wait_for={connected} begins with fewer"
        return f". wait_for={connected} begins with those who are here"


def _enrol(
    settings: RunSettings, state: FederationState, exchange: Exchange, nodes: list[int]
) -> None:
    """Ask the unknown ones of `nodes` who they are, and take them in."""
    roster, number = state.roster, flower_round(exchange.round)
    unknown = roster.unknown(nodes, exchange.round)
    if not unknown:
        return
    if roster.names and state.assembled:
        LOG.info("round %d: %s", number, counted(len(unknown), "new node"))
    by_key = settings.selection.identity == "key"
    tags = wanted_tags(settings.selection.rules)
    answers = introduce(exchange, unknown, settings.probe_timeout, by_key=by_key, tags=tags)
    answers.log_doubts(state.said, by_key=by_key)
    roster.connect(nodes)  # who has left is nobody's rival
    roster.enrol(answers.claims)
    silent = sorted(set(unknown) - answers.claims.keys())
    for node in silent:
        roster.unidentified(node, exchange.round)
    if silent:
        nodes_text = listed([str(node) for node in silent])
        message = "round %d: %d of %s did not answer the question for their identity: %s"
        LOG.warning(message, number, len(silent), counted(len(unknown), "new node"), nodes_text)


def wanted_tags(rules: Rules) -> list[str]:
    """The tags that clients are asked for."""
    return [EVERY_TAG] if callable(rules.eligible) else rules.tags


def eligible_clients(rules: Rules, roster: Roster) -> Callable[[int], bool] | None:
    """Says of a client whether it may be asked and chosen; None where everyone may."""
    if rules.eligible is None:
        return None

    def eligible(client: int) -> bool:
        tags = roster.tags(client)
        try:
            return rules.is_eligible(roster.names[client], tags or {})
        except FedcorError:
            if tags is None:  # it needs what this client does not say
                return False
            raise

    return eligible


def count_eligible(rules: Rules, state: FederationState) -> int:
    """How many of the clients that are known by now may be chosen."""
    eligible, known = eligible_clients(rules, state.roster), range(len(state.roster))
    return len(known) if eligible is None else sum(map(eligible, known))


def groups_now(rules: Rules, selector: Selector, state: FederationState) -> Groups | None:
    """The bounds for the clients that are known by now. Says what should be said, once.

    Raises:
        ConfigError: Before the first round: nobody has a tag that a bound names, or the minima need
            more seats than there are. Later, both may be due to who comes and goes.
    """
    roster, eligible = state.roster, eligible_clients(rules, state.roster)
    _log_untagged(rules, roster, state.said)
    if not rules.quota_tags:
        return None
    columns = {tag: _column(roster, tag) for tag in rules.quota_tags}
    may = [eligible is None or eligible(client) for client in range(len(roster))]
    found = {
        tag: {v for v, ok in zip(column, may, strict=True) if ok and v is not None}
        for tag, column in columns.items()
    }
    if state.finished == 0 and "rules checked" not in state.said:
        state.said.add("rules checked")
        _check_tags(rules, found)
        check_minima(rules, selector, found)
    for tag, values in found.items():
        for value in sorted(rules.bounded_values(tag) - values):
            key = f"nobody {tag} {value}"
            log_once(state.said, key, f"rules: no client has {tag} = {value!r} so far")
    return make_groups(rules, columns, np.array(may, dtype=bool))


def check_minima(
    rules: Rules, selector: Selector, found: Mapping[str, Iterable[str]] | None = None
) -> None:
    """Refuse minima that need more seats than a round has.

    Args:
        rules: With their bounds.
        selector: As the user gave it.
        found: Tag -> values that clients have, beside those that a bound names.
    """
    schedule, first = rules.clients_per_round, rules.clients_at(1)
    changing = set(schedule.values()) if isinstance(schedule, Mapping) else set()
    if first is None:
        first = selector_traits(selector).clients_per_round
    numbers = {*changing, *({first} if first is not None else ())}
    for number in numbers:
        with_clients(selector, number)  # the selector may refuse it
    least = min(numbers, default=None)
    for tag in rules.at_least:
        values = {*rules.bounded_values(tag), *((found or {}).get(tag, ()))}
        needed = sum(rules.bounds(tag, value)[0] for value in values)
        if least is not None and needed > least:
            allowed = f"needs {needed} clients in a round, but {least} are chosen"
            hint = "lower it, or raise clients_per_round"
            raise ConfigError(f"at_least.{tag}", rules.at_least[tag], allowed, hint)


def _check_eligible_tags(rules: Rules, roster: Roster, nodes: int) -> None:
    """Refuse a rule about a tag that nobody has, once every connected node has answered."""
    if callable(rules.eligible) or len(roster) < nodes:
        return
    for tag in rules.eligible or {}:
        if not any(tag in (roster.tags(client) or {}) for client in range(len(roster))):
            raise _no_such_tag(f"eligible.{tag}", (rules.eligible or {})[tag])


def log_unmet(number: int, unmet: Mapping[str, int], state: FederationState) -> None:
    """Log the rules that a round does not meet, if they are others than in the round before."""
    if dict(unmet) == state.unmet:
        return
    state.unmet = dict(unmet)
    if not unmet:
        LOG.info("round %d: all rules are met", number)
        return
    missing = ", ".join(f"{label} lacks {count}" for label, count in unmet.items())
    message = "round %d: not all rules can be met with the clients that can be reached: %s"
    LOG.warning(message, number, missing)


def _column(roster: Roster, tag: str) -> list[str | None]:
    """(N,) a tag's value as a text; None where a client has none."""
    all_tags = [roster.tags(client) or {} for client in range(len(roster))]
    return [tag_text(tags[tag]) if tag in tags else None for tags in all_tags]


def _check_tags(rules: Rules, found: Mapping[str, Iterable[str]]) -> None:
    for tag, values in found.items():
        if not values:
            key = "at_least" if tag in rules.at_least else "at_most"
            raise _no_such_tag(f"{key}.{tag}", getattr(rules, key)[tag])


def _no_such_tag(key: str, given: Any) -> ConfigError:
    hint = (
        "it is set in the configuration of a node, and sent by answers_probes(), which must be in "
        "the mods of the ClientApp"
    )
    return ConfigError(key, given, "no client has this tag", hint)


def _log_untagged(rules: Rules, roster: Roster, said: set[str]) -> None:
    """Say once that some clients cannot say their tags."""
    silent = [name for k, name in enumerate(roster.names) if roster.tags(k) is None]
    if not rules.tags or not silent:
        return
    effect = "not eligible" if rules.eligible is not None else "in no group"
    log_once(
        said,
        "no tags",
        f"rules: {counted(len(silent), 'client')} without tags and therefore {effect} "
        f"({listed(silent)}): add answers_probes() of this version to the ClientApp",
    )
