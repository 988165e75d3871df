"""Rounds that are driven from outside: what is needed next, and what follows from an answer.

`RoundMachine` does everything that belongs to a round but reach clients: it asks the selector,
screens what comes, retries with other clients, rolls back, aggregates, observes, counts bytes, and
makes the record's line. `advance` gives the question that is open; `tell` takes its answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from fedcor.core.config import LARGEST_SEED, check_at_least, check_between
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.text import counted, listed
from fedcor.core.types import (
    IntArray,
    Optimiser,
    Population,
    Selector,
    State,
    optimiser_traits,
    selector_traits,
)
from fedcor.rounds.aggregation import init_optimiser, join_optimiser, state_bytes
from fedcor.rounds.backoff import count_faults, grow, no_faults, offered_clients
from fedcor.rounds.defence.guarded_federation import after_round, guard_federation, guard_outcome
from fedcor.rounds.defence.settings import Defence, as_defence
from fedcor.rounds.defence.update_norms import NormLimits
from fedcor.rounds.model_arrays import Arrays, layout_of
from fedcor.rounds.questions import Answer, AskedRound, Pending, RoundTerms, Wanted
from fedcor.rounds.record_line import RoundRecord
from fedcor.rounds.round import Delivered, Step, next_step
from fedcor.rounds.rules.declaration import with_clients
from fedcor.rounds.selection import (
    Decision,
    decide,
    init_state,
    join_clients,
    observe,
    told_losses,
    without_losses,
)
from fedcor.rounds.state import RoundState
from fedcor.rounds.update_filter import UpdateFilter

LOG = logging.getLogger("fedcor")


def over_selected(needed: int, factor: float, clients: int) -> int:
    """How many of `clients` are asked to train where `needed` must come back.

    >>> over_selected(10, 1.1, 100), over_selected(10, 2.0, 15)
    (11, 15)
    """
    # A product such as 1.1 x 10 must not become 12 by its last bit.
    return max(needed, min(math.ceil(factor * needed * (1 - 1e-12)), clients))


@dataclass(frozen=True)
class Scores:
    """How good a model is: accuracy and loss on test data, NaN where unknown, and other metrics."""

    accuracy: float = np.nan
    loss: float = np.nan
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """How rounds are run.

    Attributes:
        selector: Chooses who trains.
        optimiser: Puts the updates together; None where whoever answers does.
        seed: Random seed of the selector's draws.
        attempts: How often a round in which nobody delivers is tried, each time with other clients.
        over_selection: How many times as many clients are asked to train as are waited for.
        defence: What is done against faulty and malicious clients: `fedcor.Defence`, or a table of
            its settings.
        weighted: Where whoever answers puts the updates together, whether models count in
            proportion to their clients' data.
        record_losses: Whether the losses of single clients are in the record.
        tests: Whether each round ends with the question how good its model is.
    """

    selector: Selector
    optimiser: Optimiser | None
    seed: int = 0
    attempts: int = 5
    over_selection: float = 1.0
    defence: Defence = field(default_factory=Defence)
    weighted: bool = False
    record_losses: bool = True
    tests: bool = False

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0, LARGEST_SEED)
        check_at_least("attempts", self.attempts, 1)
        check_between("over_selection", self.over_selection, 1.0, 100.0)
        object.__setattr__(self, "defence", as_defence(self.defence))
        for key in ("weighted", "record_losses", "tests"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(key, getattr(self, key), "must be True or False")


@dataclass
class _Attempt:
    """One attempt at a round, as far as it has come."""

    round: AskedRound
    number: int
    reachable: IntArray  # everyone who may be chosen, tried before or not
    left_alone: list[int]  # clients that can be reached and may not be chosen, after faults
    unreachable: int  # clients that cannot be reached
    asked: bool = False  # whether the selector was asked before
    decision: Decision | None = None
    delivered: Delivered | None = None


@dataclass
class _Effort:
    """What all attempts at a round have cost, and who failed in them."""

    started: float
    probed: int = 0
    refused: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    faults: dict[int, bool] = field(default_factory=dict)
    usable: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    clipped: set[int] = field(default_factory=set)
    refused_updates: dict[str, list[int]] = field(default_factory=dict)

    def forget(self) -> None:
        """The round begins anew; what it has cost stays."""
        self.faults, self.usable, self.reasons, self.tried = {}, set(), {}, set()

    def add(self, round: AskedRound) -> None:
        """Count an attempt."""
        self.probed += round.ledger.questions
        self.refused += round.refused
        self.bytes_down += round.ledger.bytes_down
        self.bytes_up += round.ledger.bytes_up
        for client, replied in round.faults.items():
            self.faults[client] = replied and self.faults.get(client, True)
        self.usable |= round.usable
        self.reasons |= round.reasons
        self.clipped |= set(round.filter.clipped)
        for why, clients in round.filter.refused.items():
            self.refused_updates[why] = sorted({*self.refused_updates.get(why, []), *clients})


@dataclass(frozen=True)
class _Closed:
    """A round that is over but for its scores."""

    record: RoundRecord
    state: RoundState[Arrays]


class RoundMachine:
    """The rounds of one run.

    Args:
        settings: How they are run.
        population: Everyone who is known by now.
        model: w^0, by the names of its arrays.
        state: Where to go on; None before the first round.
        name: What messages call a client, by its id.

    Attributes:
        state: What the round that is under way started from.
        population: Everyone who is known by now.
    """

    def __init__(
        self,
        settings: MachineSettings,
        population: Population,
        model: Arrays,
        state: RoundState[Arrays] | None = None,
        *,
        name: Callable[[int], str] = str,
    ) -> None:
        self.settings, self.population, self._name = settings, population, name
        self._layout = layout_of(model)
        self.state = self._first_state(model) if state is None else state
        self._attempt: _Attempt | None = None
        self._effort: _Effort | None = None
        self._closed: _Closed | None = None
        self._retry: tuple[int, RoundState[Arrays]] | None = None  # the attempt that comes next
        self._rate = np.nan
        self._gave_up = 0  # how often the round that is under way was given up

    def advance(self, available: IntArray, learning_rate: float = np.nan) -> Wanted | RoundRecord:
        """What is needed next.

        Args:
            available: Sorted ids of the clients that can be reached. They count when an attempt at
                a round begins.
            learning_rate: Of local training in this round; NaN where it is unknown.

        Raises:
            FedcorError: Nobody delivered in any attempt. The round can then be tried again.
        """
        if self._closed is not None:
            return Wanted("test", available[:0], self._closed.state.model)
        if self._effort is None:
            self._effort, self._rate = _Effort(time.perf_counter()), learning_rate
        if self._attempt is None:
            self._attempt = self._open(available, *(self._retry or (0, self.state)))
            self._retry = None
        try:
            followed = self._play(self._attempt)
        except Pending as pending:
            return pending.wanted
        return self.advance(available, learning_rate) if followed is None else followed

    def tell(self, answer: Answer | Scores) -> RoundRecord | None:
        """The answer to the question that is open; the record of the round, if it ends with it.

        Raises:
            FedcorError: Nobody delivered in any attempt. The round can then be tried again.
        """
        if self._closed is not None:
            assert isinstance(answer, Scores)
            closed, self._closed = self._closed, None
            return self._finish(_scored(closed.record, answer), closed.state)
        assert self._attempt is not None
        assert isinstance(answer, Answer)
        self._attempt.round.tell(answer)
        with suppress(Pending):
            return self._play(self._attempt)
        return None

    def join(self, population: Population) -> None:
        """Clients join, at the end of the population, or their sizes become known."""
        if self._attempt is not None or self._retry is not None:
            raise FedcorError("clients can join between two rounds only")
        state, more = self.state, population.count - self.population.count
        selector = join_clients(self.settings.selector, state.selector, population)
        if selector is None:
            name = type(self.settings.selector).__name__
            LOG.warning("%s has no join(), so its state starts over with new clients", name)
        memory = state.optimiser
        if self.settings.optimiser is not None:
            memory = join_optimiser(self.settings.optimiser, memory, population)
        self.population = population
        self.state = replace(
            state,
            known=np.pad(state.known, (0, more), constant_values=np.nan),
            holders=np.pad(state.holders, (0, more)),
            backoff=grow(state.backoff, population.count),
            selector=init_state(self.settings.selector, population)
            if selector is None
            else selector,
            optimiser=memory,
        )

    def _first_state(self, model: Arrays) -> RoundState[Arrays]:
        clients, optimiser = self.population.count, self.settings.optimiser
        memory: State = {}
        if optimiser is not None:
            memory = init_optimiser(optimiser, self.population, self._layout.flatten(model))
        return RoundState(
            round=0,
            model=model,
            known=np.full(clients, np.nan),
            holders=np.zeros(clients, dtype=bool),
            selector=init_state(self.settings.selector, self.population),
            optimiser=memory,
            backoff=no_faults(clients),
        )

    def _play(self, attempt: _Attempt) -> RoundRecord | None:
        """Go on with an attempt until it is over, or a question is open, which raises `Pending`.

        Returns the record of the round, if it is over.
        """
        assert self._effort is not None
        round, settings = attempt.round, self.settings
        if attempt.decision is None:
            if attempt.asked:
                round.restart()
            attempt.asked = True
            selector, before = self._asked_selector, self.state
            shown = guard_federation(settings.defence, before.turns, selector, round)
            attempt.decision = decide(selector, before.selector, shown)
        round.delivering = True
        delivered = attempt.delivered = attempt.delivered or round.deliver(attempt.decision.chosen)
        tried = {*self._effort.tried, *delivered.chosen.tolist()}
        step = next_step(
            delivered,
            can_return=round.can_return,
            attempt=attempt.number,
            attempts=settings.attempts,
            others=bool({*attempt.reachable.tolist()} - tried),
        )
        if step in (Step.ADOPT, Step.ROLL_BACK):
            return self._close(attempt, attempt.decision, delivered, step)
        self._effort.add(round)
        self._effort.tried, self._attempt = tried, None
        number = attempt.number + 1
        last = number + 1 >= settings.attempts
        state = replace(round.retry(delivered, last=last), holders=round.ledger.holders())
        if step is Step.GIVE_UP:
            raise self._give_up(state)
        self._retry = number, state
        return None

    @property
    def _asked_selector(self) -> Selector:
        """The selector with the number of clients that are asked to train."""
        chosen, extra = self._waited_for, self.settings.over_selection
        if chosen is None or extra == 1.0:
            return self.settings.selector
        return with_clients(
            self.settings.selector, over_selected(chosen, extra, self.population.count)
        )

    @property
    def _limits(self) -> NormLimits:
        """How long an update may be. Who averages models that we do not, sees them unscaled."""
        limits = self.settings.defence.norm_limits
        return limits if self.settings.optimiser is not None else replace(limits, clip=0.0)

    @property
    def _waited_for(self) -> int | None:
        return selector_traits(self.settings.selector).clients_per_round

    def _open(self, available: IntArray, number: int, state: RoundState[Arrays]) -> _Attempt:
        """A new attempt at the round, with clients that were not tried yet, if there are any."""
        assert self._effort is not None
        settings = self.settings
        offered = offered_clients(state.backoff, state.round, available)
        tried = self._effort.tried
        others = offered[[client not in tried for client in offered.tolist()]] if tried else offered
        optimiser = settings.optimiser
        weighted = settings.weighted
        if optimiser is not None:
            weighted = optimiser_traits(optimiser).weighted
        terms = RoundTerms(self.population, self._layout, optimiser, settings.seed, weighted)
        round = AskedRound(
            terms,
            state,
            (others if len(others) else offered).copy(),
            # A round that is tried anew must not ask those again who did not answer.
            attempt=number + self._gave_up * settings.attempts,
            accepts=UpdateFilter(self._limits, state.norms, self._rate),
            learning_rate=self._rate,
            enough=None if settings.over_selection == 1.0 else self._waited_for,
        )
        alone = sorted({*available.tolist()} - {*offered.tolist()})
        return _Attempt(round, number, offered, alone, self.population.count - len(available))

    def _close(
        self, attempt: _Attempt, decision: Decision, delivered: Delivered, step: Step
    ) -> RoundRecord | None:
        """End the round: the selector observes it, and the record's line is made."""
        round, settings, effort = attempt.round, self.settings, self._effort
        assert effort is not None
        state = round.close(delivered, step, decision.state)
        self._log_faults({**effort.reasons, **round.reasons})
        # What was trained from a bad model is no use.
        participants = delivered.participants[: 0 if step is Step.ROLL_BACK else None]
        outcome = round.outcome(delivered, participants)
        selector = self._asked_selector
        observed = observe(selector, decision.state, guard_outcome(settings.defence, outcome))
        count = self.population.count
        turns = after_round(settings.defence, state.turns, selector, outcome, count)
        effort.add(round)
        round.ledger.close_round(round.adopted_version)
        _ = outcome.losses  # they came anyway, so they are read for the record
        details = {**decision.details, **told_losses(outcome)}
        tried = sorted(round.tried - {*outcome.selected.tolist()})
        if tried:  # they trained for a trial, and were not chosen
            details["tried"] = list(tried)
        why = dict(decision.why)
        if not settings.record_losses:
            why, details = without_losses(why, details)
        record = RoundRecord(
            round=round.round,
            selected=outcome.selected.tolist(),
            participated=participants.tolist(),
            test_accuracy=np.nan,
            test_loss=np.nan,
            learning_rate=self._rate,
            probed=effort.probed,
            refused=effort.refused,
            clipped=sorted(effort.clipped),
            refused_updates=effort.refused_updates,
            rolled_back=int(step is Step.ROLL_BACK),
            bytes_down=effort.bytes_down,
            bytes_up=effort.bytes_up,
            seconds=np.round(time.perf_counter() - effort.started, 6).item(),
            why=why,
            memory_bytes=state_bytes(state.optimiser),
            quarantined=attempt.left_alone,
            missing=_missing(delivered, participants, effort),
            unreachable=attempt.unreachable,
            details=details,
        )
        after = replace(
            state,
            selector=observed,
            turns=turns,
            holders=round.ledger.holders(),
            backoff=count_faults(state.backoff, round.round, effort.faults, effort.usable),
        )
        self._attempt = None
        if settings.tests:
            self._closed = _Closed(record, after)
            return None
        return self._finish(record, after)

    def _log_faults(self, reasons: Mapping[int, str]) -> None:
        """Log who failed in the round, and why."""
        if reasons:
            texts = [f"{self._name(client)}: {why}" for client, why in sorted(reasons.items())]
            LOG.warning("round %d: clients failed: %s", self.state.round, listed(texts))

    def _finish(self, record: RoundRecord, state: RoundState[Arrays]) -> RoundRecord:
        self.state, self._effort, self._gave_up = state, None, 0
        return record

    def _give_up(self, state: RoundState[Arrays]) -> FedcorError:
        """Nobody delivered. What was learnt of clients stays; the round begins anew when asked."""
        effort = self._effort
        assert effort is not None
        backoff = count_faults(state.backoff, state.round, effort.faults, effort.usable)
        self.state, self._gave_up = replace(state, backoff=backoff), self._gave_up + 1
        reasons = [f"{self._name(client)}: {why}" for client, why in sorted(effort.reasons.items())]
        effort.forget()
        tried = counted(self.settings.attempts, "attempt")
        return FedcorError(
            f"round {state.round}: no client delivered a usable update in {tried} "
            f"({listed(reasons) or 'nobody was asked'}). The rounds before it are kept: ask again "
            "to try it once more"
        )


def _missing(delivered: Delivered, participants: IntArray, effort: _Effort) -> dict[str, list[int]]:
    """Why chosen clients did not take part: reason -> sorted clients."""
    missing: dict[str, list[int]] = {}
    refused = {client for clients in effort.refused_updates.values() for client in clients}
    for client in sorted({*delivered.chosen.tolist()} - {*participants.tolist()}):
        if client in refused:
            reason = "refused"
        elif client in effort.faults:
            reason = "failed" if effort.faults[client] else "dropped"
        else:
            reason = "late"
        missing.setdefault(reason, []).append(client)
    return dict(sorted(missing.items()))


def _scored(record: RoundRecord, scores: Scores) -> RoundRecord:
    return replace(
        record, test_accuracy=scores.accuracy, test_loss=scores.loss, metrics=dict(scores.metrics)
    )
