"""What a run on Flower keeps from round to round, as a checkpoint holds it, and the users' rules.

The rules say which clients may be chosen, by the tags that the clients report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.core.text import listed
from fedcor.core.types import Array, Population, Selector, State, selector_traits
from fedcor.flower.client_registry import Roster
from fedcor.flower.logs import FaultLog, counted, log_once
from fedcor.flower.protocol import EVERY_TAG, LOG, flower_round
from fedcor.flower.strategy_memory import pack, unpack
from fedcor.rounds.defence.guarded_federation import no_turns, read_turns
from fedcor.rounds.defence.model_health import Health
from fedcor.rounds.defence.update_norms import PARTS, read_norms
from fedcor.rounds.rules.declaration import Rules, tag_text, with_clients
from fedcor.rounds.rules.seats import Groups, make_groups
from fedcor.rounds.selection import init_state, join_clients


@dataclass(frozen=True)
class SeenReplies:
    """What the replies of this run have been like."""

    answered: bool = False  # whether an evaluation, asked for or the strategy's, had a usable loss
    reported: bool = False  # whether a trained model came with one, if the selector needs it
    silent: frozenset[int] = frozenset()  # until then: who has trained in this start, without one


@dataclass(frozen=True)
class CurrentModel:
    """What is known of the current model w^t, beside its parameters."""

    version: str = ""
    losses: Mapping[int, float] = field(default_factory=dict)  # client -> l_k(w^t), where known
    holders: frozenset[int] = frozenset()  # clients that hold w^t
    replies: SeenReplies = SeenReplies()  # to it and to the models before it


@dataclass
class FederationState:
    """What survives between rounds."""

    finished: int = 0  # rounds that were done before this start
    roster: Roster = field(default_factory=Roster)
    model: CurrentModel = field(default_factory=CurrentModel)
    selector: State | None = None  # the selector's state; None before its first round
    population: Population | None = None  # that the selector's state was made for
    norms: State = field(default_factory=dict)  # lengths of updates that the last rounds accepted
    good: ArrayRecord | None = None  # the last model that somebody has trained usably from
    health: Health = field(default_factory=Health)  # of the current model
    turns: State = field(default_factory=no_turns)  # who was chosen lately, where that is capped
    fault_log: FaultLog = field(default_factory=FaultLog)
    doubted: bool = False  # whether this start has logged a doubt about the metrics of replies
    said: set[str] = field(default_factory=set)  # what this start has logged once
    unmet: Mapping[str, int] = field(default_factory=dict)  # rules that the last round did not meet
    assembled: bool = False  # whether the nodes that the first round waits for have been here

    def meet_model(self, version: str) -> None:
        """Forget what was known of another model: this is the first one, or somebody changed it."""
        if self.model.version != version:
            self.model = CurrentModel(version, replies=self.model.replies)

    def adapt_selector(self, selector: Selector) -> State:
        """The selector's state, for the clients that there are by now."""
        population = self.roster.population()
        if self.selector is None or self.population is None:
            self.selector = init_state(selector, population)
        elif not np.array_equal(self.population.sizes, population.sizes):
            joined = join_clients(selector, self.selector, population)
            if joined is not None:
                self.selector = joined
            elif self.population.count < population.count:
                LOG.warning(
                    "%s has no join(), so it cannot take in new clients: its state starts over",
                    type(selector).__name__,
                )
                self.selector = init_state(selector, population)
        self.population = population
        return self.selector


@dataclass(frozen=True)
class Checkpoint:
    """A run after a finished round."""

    done: int  # rounds
    arrays: ArrayRecord  # the model
    state: FederationState
    strategy: Mapping[str, Any]  # what the strategy remembers
    config: Mapping[str, Any]  # what it changed in the train configuration

    def to_arrays(self) -> dict[str, Array]:
        """As named arrays, which a file takes without pickle."""
        state = self.state
        assert state.population is not None
        assert state.selector is not None
        known, replies = sorted(state.model.losses), state.model.replies
        return {
            "round": np.array(self.done),
            "sizes": state.population.sizes,
            "version": np.array(state.model.version, dtype=np.str_),
            "known_clients": np.array(known, dtype=np.int64),
            "known_losses": np.array([state.model.losses[client] for client in known]),
            "replies/answered": np.array(replies.answered),
            "replies/reported": np.array(replies.reported),
            **{f"roster/{name}": array for name, array in state.roster.to_arrays().items()},
            **{f"selector/{name}": array for name, array in state.selector.items()},
            **{f"norms/{name}": array for name, array in state.norms.items()},
            **{f"health/{name}": array for name, array in state.health.to_arrays().items()},
            **({} if state.good is None else pack({"arrays": state.good}, "good")),
            **{f"turns/{name}": array for name, array in state.turns.items() if len(array)},
            **pack({"arrays": self.arrays}, "model"),
            **pack(self.strategy, "strategy"),
            **pack(self.config, "config"),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Checkpoint:
        """The checkpoint in `arrays`. Nobody is taken to hold the model: nodes may have restarted.

        Raises RecordError where the arrays are not a checkpoint of this room.
        """
        try:
            clients, known = arrays["known_clients"].tolist(), arrays["known_losses"].tolist()
            losses = dict(zip(clients, known, strict=True))
            state = FederationState(
                finished=int(arrays["round"]),
                roster=Roster.from_arrays(_below(arrays, "roster/")),
                model=CurrentModel(str(arrays["version"]), losses, replies=_replies(arrays)),
                selector=_below(arrays, "selector/"),
                population=Population(arrays["sizes"]),
                norms=read_norms(_below(arrays, "norms/"), PARTS),
                health=Health.from_arrays(_below(arrays, "health/")),
                good=unpack(arrays, "good")["arrays"] if "good" in arrays else None,
                turns=read_turns(_below(arrays, "turns/")),
            )
            return cls(
                done=state.finished,
                arrays=unpack(arrays, "model")["arrays"],
                state=state,
                strategy=unpack(arrays, "strategy"),
                config=unpack(arrays, "config"),
            )
        except (LookupError, ValueError, AttributeError) as error:
            raise RecordError(f"the checkpoint does not fit this run: {error!r}") from error


def _replies(arrays: Mapping[str, Array]) -> SeenReplies:
    """What the replies have been like."""
    return SeenReplies(
        answered=bool(arrays["replies/answered"]),
        reported=bool(arrays["replies/reported"]),
    )


def _below(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def wanted_tags(rules: Rules) -> list[str]:
    """The tags that clients are asked for."""
    return [EVERY_TAG] if callable(rules.eligible) else rules.tags


def scheduled(rules: Rules, selector: Selector, round: int) -> Selector:
    """The selector with the clients per round of our `round`."""
    return with_clients(selector, rules.clients_at(flower_round(round)))


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
            allowed = "no client has this tag"
            hint = (
                "it is set in the configuration of a node, and sent by answers_probes(), which "
                "must be in the mods of the ClientApp"
            )
            raise ConfigError(f"{key}.{tag}", getattr(rules, key)[tag], allowed, hint)


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
