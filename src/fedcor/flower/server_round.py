"""One round: select clients, have them train, and try it with others if nobody delivers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcor.core.errors import FedcorError
from fedcor.core.text import listed
from fedcor.core.types import IntArray, Outcome, State
from fedcor.flower.client_registry import Task
from fedcor.flower.evaluation import Evaluation
from fedcor.flower.exchange import Exchange
from fedcor.flower.federation import FlowerFederation, check_losses, read_outcome
from fedcor.flower.federation_state import (
    FederationState,
    count_eligible,
    eligible_clients,
    groups_now,
    log_unmet,
    scheduled,
)
from fedcor.flower.identify import reachable_clients
from fedcor.flower.logs import brief, counted
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.preflight import preflight
from fedcor.flower.protocol import LOG, flower_round, version_of
from fedcor.flower.reply_validation import number, read_local_training
from fedcor.flower.run_record import FinishedRound, flat_metrics
from fedcor.flower.settings import RoundSettings
from fedcor.flower.strategy_memory import snapshot
from fedcor.flower.training import Doubt, PutAway, RoundStart, Training
from fedcor.flower.updates import known_rate
from fedcor.rounds.aggregation import state_bytes
from fedcor.rounds.defence.guarded_federation import after_round, guard_federation, guard_outcome
from fedcor.rounds.defence.model_health import Condition, Health, examine
from fedcor.rounds.record_line import RoundRecord
from fedcor.rounds.selection import Decision, decide, observe, phase_of, told_losses

# In the log of a choice: names up to so many characters, and so many of them.
_SHORT_NAME, _MOST_NAMES = 40, 10


@dataclass
class Attempt:
    """One choice of clients, and their training."""

    training: Training
    federation: FlowerFederation
    decision: Decision
    available: IntArray  # clients, those included who failed in an earlier attempt


@dataclass
class Round:
    """Everything that belongs to one round, and lives as long as it."""

    exchange: Exchange
    start: RoundStart
    arrays: ArrayRecord  # the model: w^t, and what the round has made of it
    started: float  # by time.perf_counter
    norms: State  # lengths of updates that earlier rounds accepted
    attempt: Attempt | None = None  # the last one
    failed: set[int] = field(default_factory=set)  # clients chosen in earlier attempts, in vain
    doubt: Doubt = field(default_factory=Doubt)  # of the model, the clients and the past
    outcome: Outcome | None = None  # once somebody has delivered
    evaluation: Evaluation | None = None  # federated, once it is configured
    left_alone: list[int] = field(default_factory=list)  # connected clients, after faults
    metrics: dict[str, MetricRecord] = field(default_factory=dict)  # aggregated: train, ...

    @property
    def number(self) -> int:
        """Of this round, from 0."""
        return self.exchange.round

    def select(
        self, settings: RoundSettings, state: FederationState, retries: int = 0
    ) -> list[Message]:
        """Choose who trains now.

        Returns messages for the caller to send: to the chosen who have not trained for a question.
        """
        number, rules = flower_round(self.number), settings.selection.rules
        selector = scheduled(rules, settings.selector, self.number)
        available = reachable_clients(settings, state, self.exchange, retry=retries > 0)
        eligible = eligible_clients(rules, state.roster)
        selector_state = state.adapt_selector(selector)
        training = Training(
            settings, self.exchange, self.start, state.model, norms=state.norms, good=state.good
        )
        untried = self._not_failed(available)
        federation = FlowerFederation(training, state.model, untried, retries)
        groups = groups_now(rules, settings.selector, state)
        try:
            size = self.start.arrays.count_bytes()
            preflight(settings, state, self.exchange, federation, size)
            self.left_alone = state.roster.left_alone(self.number, eligible)
            guards, sharing = settings.selection.defence, _sharing(settings, state)
            shown = guard_federation(guards, state.turns, selector, federation, sharing)
            decision = decide(selector, selector_state, shown, number, groups)
        finally:
            self.exchange.log_faults()
        log_unmet(number, decision.unmet, state)
        messages = training.request(decision.chosen)
        self.attempt = Attempt(training, federation, decision, available)
        notes = [f"attempt {retries + 1}"] if retries else []
        notes += [phase_of(selector, decision.state, number)]
        self._log_choice(settings, decision.chosen.tolist(), len(available), notes)
        return messages

    def _not_failed(self, available: IntArray) -> IntArray:
        """Those who did not fail in an earlier attempt at this round; all, once everyone has.

        A selector that prefers clients which never delivered would choose the same ones again.
        """
        untried = self._untried(available)
        return self.doubt.witnesses_first(untried if len(untried) else available)

    def _untried(self, available: IntArray) -> IntArray:
        return available[~np.isin(available, sorted(self.failed))]

    def _log_choice(
        self, settings: RoundSettings, chosen: list[int], reachable: int, notes: list[str]
    ) -> None:
        """Log who was chosen, of whom, and what was asked for that; `notes` come first."""
        names, total = self.exchange.roster.names, settings.num_rounds
        number = f"{flower_round(self.number)} of {total}" if total else flower_round(self.number)
        if all(len(names[client]) <= _SHORT_NAME for client in chosen):
            who = listed([names[client] for client in chosen], _MOST_NAMES)
        else:
            who = listed([f"client {client}" for client in chosen], _MOST_NAMES)
        alone = f", {len(self.left_alone)} left alone" if self.left_alone else ""
        probed = self.exchange.probed
        asked = f"{probed} {'loss' if probed == 1 else 'losses'} asked for" if probed else ""
        facts = "; ".join(filter(None, (*notes, f"{reachable} reachable{alone}", asked)))
        message = "round %s: selected %d of %d clients: %s (%s)"
        LOG.info(message, number, len(chosen), len(names), who, facts)

    def aggregate(
        self, settings: RoundSettings, state: FederationState, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies of the selected clients; `state` is then the next round's."""
        attempt, participated = self._deliver(settings, state, replies)
        training, chosen = attempt.training, attempt.decision.chosen
        check_losses(training, participated)
        # A strategy may decide to leave the model as it is.
        arrays, metrics = training.aggregate(chosen)
        self.arrays = self.arrays if arrays is None else arrays
        version = state.model.version if arrays is None else version_of(arrays)
        trained = read_local_training(training.metrics(participated))
        if not state.doubted:
            names = [f"client {k} ({state.roster.names[k]})" for k in participated.tolist()]
            state.doubted = trained.log_doubts(names)
        outcome = read_outcome(training, chosen, participated, trained)
        state.model = attempt.federation.facts(version)
        state.norms = training.judged.past(self.number)
        # What the strategy changed in the configuration lasts, as it does without us.
        for key, value in training.config.items():
            self.start.config[key] = value
        decided, number = attempt.decision.state, flower_round(self.number)
        selector = scheduled(settings.selection.rules, settings.selector, self.number)
        guards = settings.selection.defence
        state.selector = observe(selector, decided, guard_outcome(guards, outcome), number)
        sharing = _sharing(settings, state)
        state.turns = after_round(guards, state.turns, selector, outcome, sharing)
        self.outcome = outcome
        self.note("train", metrics)
        # Where a strategy leaves the model as it is, Flower's loop keeps what it had.
        return self.arrays if self.exchange.rolled_back else arrays, metrics

    def finish(
        self, settings: RoundSettings, arrays: ArrayRecord, scores: MetricRecord | None
    ) -> FinishedRound:
        """The round as it is written; it ended with the model `arrays`."""
        assert self.outcome is not None
        assert self.attempt is not None
        exchange, config, decision = self.exchange, self.start.config, self.attempt.decision
        aggregating = optimiser_strategy_in(settings.strategy)
        evaluated = MetricRecord() if scores is None else scores
        _ = self.outcome.losses  # they came anyway, so they are read for the record
        record = RoundRecord(
            round=self.number,
            selected=self.outcome.selected.tolist(),
            participated=self.outcome.participated.tolist(),
            test_accuracy=number(evaluated, *settings.accuracy_keys),
            test_loss=number(evaluated, *settings.loss_keys),
            learning_rate=known_rate(config),
            probed=exchange.probed,
            refused=exchange.refused,
            clipped=sorted(exchange.clipped),
            refused_updates=exchange.refused_updates,
            capped=sorted(exchange.capped),
            rolled_back=exchange.rolled_back,
            bytes_down=exchange.bytes_down,
            bytes_up=exchange.bytes_up,
            seconds=round(time.perf_counter() - self.started, 6),
            why=decision.why,
            unmet=decision.unmet,
            details={**decision.details, **told_losses(self.outcome)},
            memory_bytes=0 if aggregating is None else state_bytes(aggregating.memory),
            quarantined=self.left_alone,
            metrics=flat_metrics(self.metrics),
            server_round=flower_round(self.number),
        )
        return FinishedRound(
            record,
            arrays=arrays,
            config=config,
            scores=scores,
            metrics=self.metrics,
            faults=exchange.faults,
        )

    def note(self, part: str, metrics: MetricRecord | None) -> None:
        """Keep the aggregated metrics of a part of the round, for the record."""
        if metrics is not None:
            self.metrics[part] = metrics

    def _deliver(
        self, settings: RoundSettings, state: FederationState, replies: Iterable[Message]
    ) -> tuple[Attempt, IntArray]:
        """The first attempt in which somebody delivers, and who they are."""
        tried = 0
        while True:
            attempt = self.attempt
            assert attempt is not None, "select() comes first"
            attempt.training.receive(replies)
            participated = attempt.training.delivered(attempt.decision.chosen)
            self.exchange.log_faults()
            condition = self._examine(state, attempt, participated)
            bad = condition is Condition.BAD
            if bad and self.doubt.put_away is not None:
                self._take_back(settings, state)
                if len(participated):  # of every model, losses alone are unusable: they say nothing
                    state.health = Health()
                else:
                    tried += 1
                    self._try_again(settings, state, attempt, tried, at_once=True)
            elif bad and self._asks_others(state, attempt, participated):
                self.doubt.ask_others(attempt.decision.chosen.tolist())
            elif bad and self._can_go_back(state):
                self._roll_back(settings, state)
            elif len(participated):
                return attempt, participated
            else:
                if bad:
                    self._doubt_past(settings, state)
                tried += 1
                self._try_again(settings, state, attempt, tried)
            messages = self.select(settings, state, tried)
            replies = self.exchange.grid.send_and_receive(messages, timeout=settings.train_timeout)

    def _examine(
        self, state: FederationState, attempt: Attempt, participated: IntArray
    ) -> Condition:
        """What an attempt says of the model; who was asked in vain is not asked next."""
        signs = attempt.federation.signs(participated, len(attempt.available))
        doubted = state.health.doubters
        condition, state.health = examine(state.health, signs)
        condition = self.doubt.weigh(condition, signs)
        state.model = attempt.federation.facts(state.model.version)
        if condition is Condition.GOOD:
            state.good = self.start.arrays
        if condition is Condition.BAD or not len(participated):
            doubters = {*signs.refused, *signs.unusable_losses}
            self.doubt.doubters |= doubted | doubters
            self.failed |= doubters | (
                {*attempt.decision.chosen.tolist()} - {*participated.tolist()}
            )
        self.doubt.too_long |= attempt.training.judged.too_long
        return condition

    def _asks_others(
        self, state: FederationState, attempt: Attempt, participated: IntArray
    ) -> bool:
        """Whether others are asked before the model is put away, or the past is doubted."""
        if self.doubt.asked_others or not len(self._untried(attempt.available)):
            return False
        return self._can_go_back(state) or not len(participated)

    def _can_go_back(self, state: FederationState) -> bool:
        """Whether there is a good model, not the one that went bad, and somebody new says so."""
        exists = state.good is not None and version_of(state.good) != state.model.version
        return exists and not self.doubt.doubters <= self.doubt.refuted

    def _roll_back(self, settings: RoundSettings, state: FederationState) -> None:
        """Put the last good model back. What the strategy remembers may be bad: it starts over."""
        good, fresh = state.good, settings.fresh
        assert good is not None
        LOG.error(
            f"round {flower_round(self.number)}: the MODEL WENT BAD: no client could train from "
            "it. The last good model is put back, and "
            f"{type(settings.strategy).__name__} starts over from it"
        )
        tasks: tuple[Task, ...] = ("train", "probe")
        forgiven = tuple(  # it was the model's fault, not theirs
            (client, task)
            for client in sorted(self.doubt.doubters)
            for task in tasks
            if state.roster.forgive(client, task, self.number)
        )
        away = PutAway(
            start=self.start,
            arrays=self.arrays,
            model=state.model,
            failed=frozenset(self.failed),
            forgiven=forgiven,
            too_long=self.doubt.too_long,
        )
        self.doubt.put_back(away)
        memory = self.start.memory if fresh is None else fresh
        self.start = RoundStart(good, self.start.config, memory)
        self.arrays = good
        self.exchange.rolled_back += 1
        self.exchange.gone.clear()
        self.failed.clear()
        state.meet_model(version_of(good))

    def _take_back(self, settings: RoundSettings, state: FederationState) -> None:
        """Those who doubted the model refuse the last good one as well: it was their fault."""
        away = self.doubt.take_back()
        LOG.warning(
            "round %d: clients that could not train from the model cannot train from the last "
            "good model either: the model was not at fault, and is put back",
            flower_round(self.number),
        )
        self.start, self.arrays = away.start, away.arrays
        self.exchange.rolled_back -= 1
        self.failed |= away.failed
        for client, task in away.forgiven:  # it counts once in a round
            state.roster.failed(client, self.number, task, replied=True)
        state.model = dataclasses.replace(away.model, replies=state.model.replies)
        self._doubt_past(settings, state)

    def _doubt_past(self, settings: RoundSettings, state: FederationState) -> None:
        """Nothing usable comes of a good model: what is thought to be usual may be wrong.

        Clients outside the majority keep their strike.
        """
        if self.doubt.too_long:
            LOG.warning(
                "round %d: every update is far longer than usual, and the model is not at fault: "
                "these norms are added to the history",
                flower_round(self.number),
            )
            self._correct_past(settings, state, self.doubt.outvoted(self.norms, self.number))

    def _replace_past(self, settings: RoundSettings, state: FederationState) -> bool:
        """Where everyone says that the past is wrong, forget it; returns whether that was done."""
        norms = self.doubt.replaced(len(self.failed), self.number)
        if norms is not None:
            LOG.warning(
                f"round {flower_round(self.number)}: {len(self.doubt.too_long)} of the "
                f"{len(self.failed)} clients that were asked sent updates far longer than usual, "
                "and none sent a usable one: the history of update norms is reset"
            )
            self._correct_past(settings, state, norms)
        return norms is not None

    def _correct_past(self, settings: RoundSettings, state: FederationState, norms: State) -> None:
        """Set the past right, and forgive those who were refused for it."""
        state.norms = norms
        limits = settings.selection.defence.norm_limits
        for client in self.doubt.usual_now(limits, norms):
            state.roster.forgive(client, "train", self.number)
            self.failed.discard(client)

    def _try_again(
        self,
        settings: RoundSettings,
        state: FederationState,
        attempt: Attempt,
        tried: int,
        *,
        at_once: bool = False,
    ) -> None:
        """Nobody delivered in so many attempts: prepare one more, or end the run.

        `at_once` is for an attempt whose outcome was the clients' fault, if there are others.
        """
        others = len(self._untried(attempt.available)) > 0
        if (tried >= settings.selection.attempts or not others) and self._replace_past(
            settings, state
        ):
            return
        self._give_up_or_pause(settings, tried, at_once=at_once and others)

    def _give_up_or_pause(
        self, settings: RoundSettings, tried: int, *, at_once: bool = False
    ) -> None:
        """Nobody delivered: wait a little, since an outage may pass, or end the run."""
        number, counts = flower_round(self.number), self.exchange.faults
        faults = ", ".join(map(_faults_text, counts, counts.values())) or "nobody was asked"
        lost = f"round {number}: NO CLIENT delivered a usable update ({faults})"
        attempts = settings.selection.attempts
        if tried >= attempts:
            reasons = [brief(why) for _, why in self.exchange.last_fault.values()]
            example = f"for example: {reasons[-1]}; " if reasons else ""
            raise FedcorError(
                f"round {number}: no client delivered a usable update in "
                f"{counted(tried, 'attempt')} ({faults}); {example}"
                "look at the nodes' logs. Finished rounds are kept: with a checkpoint, the same "
                "start resumes after them"
            )
        pause = 0.0 if at_once else min(2.0 ** (tried - 1), settings.probe_timeout)
        message = "%s: trying again in %g s (attempt %d of %d)"
        LOG.error(message, lost, pause, tried + 1, attempts)
        time.sleep(pause)
        self.exchange.gone.clear()


def _faults_text(kind: str, count: int) -> str:
    """How often a fault occurred: `3 errors`, `1 late reply`, `2 unreachable nodes`."""
    nouns = {"error": "error", "outlier": "outlier", "unreachable": "unreachable node"}
    if kind in nouns:
        return counted(count, nouns[kind])
    return f"{count} {kind} {'reply' if count == 1 else 'replies'}"


def _sharing(settings: RoundSettings, state: FederationState) -> int:
    """How many clients share the rounds among them; a user's rule is asked only if it matters."""
    chosen = settings.selection
    return count_eligible(chosen.rules, state) if chosen.defence.most_share else len(state.roster)


def open_round(
    settings: RoundSettings,
    state: FederationState,
    grid: Grid,
    *,
    round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
) -> Round:
    """A round that starts from the model `arrays`."""
    started = time.perf_counter()
    state.meet_model(version_of(arrays))
    start = RoundStart(arrays, config, snapshot(settings.strategy))
    exchange = Exchange(grid, state.roster, round, state.fault_log)
    return Round(exchange, start, arrays, started, state.norms)
