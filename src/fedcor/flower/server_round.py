"""One round on Flower: select, train, evaluate, and what the record says of it.

The attempts at a round follow `fedcor.rounds.round.next_step`; the first goes through Flower's
loop, the others are sent from here. Losses that the strategy's own evaluation brings need not be
asked for in the next round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcor.core.errors import FedcorError, blame
from fedcor.core.text import listed
from fedcor.core.types import FloatArray, IntArray, Outcome
from fedcor.flower.exchange import (
    EnoughGrid,
    Exchange,
    Holders,
    SomeNodes,
    limited,
    renewed,
    send_and_receive,
    slim,
)
from fedcor.flower.federation_state import (
    FederationState,
    RoundStart,
    count_eligible,
    groups_now,
    log_unmet,
    reachable_clients,
)
from fedcor.flower.logs import brief, counted
from fedcor.flower.optimiser_strategy import optimiser_strategy_in, read_local_training
from fedcor.flower.preflight import check_losses, preflight
from fedcor.flower.protocol import LOG, flower_round
from fedcor.flower.replies import (
    Reply,
    Unusable,
    common_contents,
    number,
    read_evaluation,
    refused_replies,
    usable_metric,
)
from fedcor.flower.run_record import FinishedRound, flat_metrics
from fedcor.flower.settings import RunSettings, known_rate
from fedcor.flower.strategy_memory import snapshot
from fedcor.flower.training import FlowerRound
from fedcor.rounds.aggregation import state_bytes
from fedcor.rounds.backoff import offered_clients
from fedcor.rounds.defence.guarded_federation import after_round, guard_federation, guard_outcome
from fedcor.rounds.model_arrays import layout_of
from fedcor.rounds.record_line import RoundRecord
from fedcor.rounds.round import Delivered, Step, next_step
from fedcor.rounds.selection import Decision, decide, observe, phase_of, told_losses, without_losses

# In the log of a choice: names up to so many characters, and so many of them.
_SHORT_NAME, _MOST_NAMES = 40, 10


@dataclass
class ServerRound:
    """Everything that belongs to one round, and lives as long as it."""

    settings: RunSettings
    state: FederationState
    exchange: Exchange
    start: RoundStart
    arrays: ArrayRecord  # the model: w^t, and what the round has made of it
    started: float  # by time.perf_counter
    tried: set[int] = field(default_factory=set)  # clients chosen in earlier attempts, in vain
    rolled_back: bool = False
    left_alone: list[int] = field(default_factory=list)  # connected clients, after faults
    metrics: dict[str, MetricRecord] = field(default_factory=dict)  # aggregated: train, ...
    # Of the last attempt:
    attempt: FlowerRound = field(init=False)
    decision: Decision = field(init=False)
    others: IntArray = field(init=False)  # reachable clients, those tried before included
    outcome: Outcome = field(init=False)  # once somebody has delivered
    evaluation: Evaluation = field(init=False)  # federated, once it is configured

    @property
    def number(self) -> int:
        """Flower's number of this round."""
        return flower_round(self.exchange.round)

    def select(self, retries: int = 0) -> dict[int, Message]:
        """Choose who trains now.

        Returns messages for the caller to send: to the chosen who have not trained for a question.
        """
        settings, state, exchange = self.settings, self.state, self.exchange
        selector, _ = settings.selector_at(exchange.round)
        self.others, self.left_alone = reachable_clients(
            settings, state, exchange, retry=retries > 0
        )
        before = state.adapt_selector(selector)
        untried = self._untried()
        # A selector that prefers clients which never delivered would choose the same ones again.
        self.attempt = attempt = FlowerRound(
            settings,
            exchange,
            state.roster,
            self.start,
            state=state.current,
            available=untried if len(untried) else self.others,
            attempt=retries,
            doubted=self.attempt.too_long if retries else None,
        )
        attempt.reachable = len(self.others)
        groups = groups_now(settings.selection.rules, settings.selector, state)
        guards, turns = settings.selection.defence, state.current.turns
        try:
            preflight(settings, state, exchange, attempt.available, attempt.check_answers)
            shown = guard_federation(guards, turns, selector, attempt, self._sharing())
            self.decision = decide(selector, before, shown, self.number, groups)
        finally:
            exchange.log_faults()
        log_unmet(self.number, self.decision.unmet, state)
        messages = attempt.request(self.decision.chosen)
        if isinstance(exchange.grid, EnoughGrid):
            exchange.grid.enough = attempt.enough
        notes = [f"attempt {retries + 1}"] if retries else []
        self._log_choice([*notes, phase_of(selector, self.decision.state, self.number)])
        return messages

    def _untried(self) -> IntArray:
        return self.others[~np.isin(self.others, sorted(self.tried))]

    def _sharing(self) -> int:
        """How many clients share the rounds; a user's rule is asked only if it matters."""
        chosen, state = self.settings.selection, self.state
        if chosen.defence.most_share:
            return count_eligible(chosen.rules, state)
        return len(state.roster)

    def _log_choice(self, notes: list[str]) -> None:
        """Log who was chosen, of whom, and what was asked for that; `notes` come first."""
        names, total = self.state.roster.names, self.settings.num_rounds
        chosen, probed = self.decision.chosen.tolist(), self.exchange.probed
        if all(len(names[client]) <= _SHORT_NAME for client in chosen):
            who = listed([names[client] for client in chosen], _MOST_NAMES)
        else:
            who = listed([f"client {client}" for client in chosen], _MOST_NAMES)
        alone = f", {len(self.left_alone)} left alone" if self.left_alone else ""
        asked = f"{probed} {'loss' if probed == 1 else 'losses'} asked for" if probed else ""
        names_of = [names[k] for k in sorted(self.attempt.results.keys() - {*chosen})]
        trial = f"trained for a trial only: {listed(names_of, _MOST_NAMES)}" if names_of else ""
        facts = (*notes, f"{len(self.others)} reachable{alone}", asked, trial)
        message = "round %d of %d: selected %d of %d clients: %s (%s)"
        told = "; ".join(filter(None, facts))
        LOG.info(message, self.number, total, len(chosen), len(names), who, told)

    def aggregate(
        self, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies of the selected clients; the state is then the next round's."""
        delivered, step = self._deliver(replies)
        attempt, state, settings = self.attempt, self.state, self.settings
        self.rolled_back = step is Step.ROLL_BACK
        if self.rolled_back:
            self._log_rollback()
        # What was trained from a bad model is no use.
        participated = delivered.participants[: 0 if self.rolled_back else None]
        replies_of = {client: attempt.results[client] for client in participated.tolist()}
        current = attempt.close(delivered, step, self.decision.state)
        self.outcome = read_outcome(settings, attempt, delivered.chosen, replies_of)
        if not state.doubted:
            names = [f"client {k} ({state.roster.names[k]})" for k in replies_of]
            metrics = [reply.metrics for reply in replies_of.values()]
            state.doubted = read_local_training(metrics).log_doubts(names)
        # What the strategy changed in the configuration lasts, as it does without us.
        for key, value in attempt.config.items():
            self.start.config[key] = value
        self._look_elsewhere()
        guards, (selector, _) = settings.selection.defence, settings.selector_at(attempt.round)
        seen = guard_outcome(guards, self.outcome)
        state.current = replace(
            check_losses(settings, current, replies_of, len(state.roster)),
            selector=observe(selector, self.decision.state, seen, self.number),
            turns=after_round(guards, current.turns, selector, self.outcome, self._sharing()),
            backoff=self.exchange.back_off(current.backoff),
        )
        made, self.arrays = attempt.made, current.model
        # Where a strategy leaves the model as it is, Flower's loop keeps what it had.
        arrays = current.model if made is None else made.arrays
        self.note("train", None if made is None else made.metrics)
        return arrays, self.metrics.get("train")

    def _deliver(self, replies: Iterable[Message]) -> tuple[Delivered, Step]:
        """The attempt with which the round ends, and how it ends."""
        number, attempts = 0, self.settings.selection.attempts
        while True:
            chosen = self.decision.chosen
            self.tried.update(chosen.tolist())
            self.attempt.receive(replies)
            delivered = self.attempt.deliver(chosen)
            self.tried |= {*self.attempt.refused_clients, *self.attempt.unusable}
            self.exchange.log_faults()
            others, back = len(self._untried()) > 0, self.attempt.can_return
            step = next_step(
                delivered, can_return=back, attempt=number, attempts=attempts, others=others
            )
            if step is Step.GIVE_UP:
                self._give_up(number + 1)
            if step is not Step.TRY_OTHERS:
                return delivered, step
            number += 1
            self._pause(number, len(delivered.participants), others=others)
            # Most clients say that the usual lengths are wrong, and more than one.
            asked = len({*self.tried, *self.left_alone})
            many = len(self.attempt.too_long) > max(1, asked / 2)
            last = many and (number + 1 == attempts or not others)
            self.state.current = self.attempt.retry(delivered, last=last)
            messages = list(self.select(number).values())
            grid, timeout = self.exchange.grid, self.settings.train_timeout
            replies = send_and_receive(grid, messages, timeout, self.attempt.enough)

    def _pause(self, number: int, delivered: int, *, others: bool) -> None:
        """Wait before the next attempt, if an outage may have to pass; `number` were made."""
        gone = {*self.attempt.available.tolist()} <= self.exchange.gone
        pause = (
            0.0 if others and not gone else min(2.0 ** (number - 1), self.settings.probe_timeout)
        )
        lost = f"round {self.number}: NO CLIENT delivered a usable update ({self._faults()})"
        if delivered:
            lost = f"round {self.number}: the model may be BAD ({self._faults()})"
        wait = f"in {pause:g} s" if pause else "with other clients"
        attempts = self.settings.selection.attempts
        LOG.error("%s: trying again %s, attempt %d of %d", lost, wait, number + 1, attempts)
        time.sleep(pause)
        self._look_elsewhere()
        self.exchange.gone.clear()

    def _look_elsewhere(self) -> None:
        for client in sorted(self.exchange.gone):
            self.state.roster.look_elsewhere(client)

    def _give_up(self, attempts: int) -> NoReturn:
        reasons = [brief(why) for _, why in self.exchange.last_fault.values()]
        example = f"for example: {reasons[-1]}; " if reasons else ""
        raise FedcorError(
            f"round {self.number}: no client delivered a usable update in "
            f"{counted(attempts, 'attempt')} ({self._faults()}); {example}"
            "look at the nodes' logs. Finished rounds are kept: with a checkpoint, the same "
            "start resumes after them"
        )

    def _faults(self) -> str:
        """How often which fault occurred: `3 errors`, `1 late reply`, `2 unreachable nodes`."""
        nouns = {"error": "error", "outlier": "outlier", "unreachable": "unreachable node"}
        texts = []
        for kind, count in self.exchange.faults.items():
            replies = f"{count} {kind} {'reply' if count == 1 else 'replies'}"
            texts.append(counted(count, nouns[kind]) if kind in nouns else replies)
        return ", ".join(texts) or "nobody was asked"

    def _log_rollback(self) -> None:
        name = type(self.settings.strategy).__name__
        LOG.error(
            f"round {self.number}: the MODEL WENT BAD: no client could train from it. The last "
            f"good model is put back, and {name} starts over from it in the next round"
        )

    def finish(self, arrays: ArrayRecord, scores: MetricRecord | None) -> FinishedRound:
        """The round as it is written; it ended with the model `arrays`."""
        exchange, decision, settings = self.exchange, self.decision, self.settings
        aggregating = optimiser_strategy_in(settings.strategy)
        evaluated = MetricRecord() if scores is None else scores
        why, details = dict(decision.why), dict(decision.details)
        _ = self.outcome.losses  # they came anyway, so they are read for the record
        details |= told_losses(self.outcome)
        if not settings.selection.record_losses:
            why, details = without_losses(why, details)
        record = RoundRecord(
            round=exchange.round,
            selected=self.outcome.selected.tolist(),
            participated=self.outcome.participated.tolist(),
            test_accuracy=number(evaluated, *settings.accuracy_keys),
            test_loss=number(evaluated, *settings.loss_keys),
            learning_rate=known_rate(self.start.config),
            probed=exchange.probed,
            refused=exchange.refused,
            clipped=sorted(exchange.clipped),
            refused_updates=exchange.refused_updates,
            capped=sorted(exchange.capped),
            rolled_back=int(self.rolled_back),
            missing={"late": sorted(exchange.late)} if exchange.late else {},
            bytes_down=exchange.bytes_down,
            bytes_up=exchange.bytes_up,
            seconds=round(time.perf_counter() - self.started, 6),
            why=why,
            unmet=decision.unmet,
            details=details,
            memory_bytes=0 if aggregating is None else state_bytes(aggregating.memory),
            quarantined=self.left_alone,
            metrics=flat_metrics(self.metrics),
            server_round=self.number,
        )
        faults = exchange.faults
        return FinishedRound(record, arrays, self.start.config, scores, self.metrics, faults)

    def note(self, part: str, metrics: MetricRecord | None) -> None:
        """Keep the aggregated metrics of a part of the round, for the record."""
        if metrics is not None:
            self.metrics[part] = metrics

    def evaluate(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Have the strategy choose who evaluates `arrays`, among the nodes that can be reached."""
        self.evaluation = configure_evaluation(self, arrays, config, grid)
        return list(self.evaluation.sent.values())


def open_round(
    settings: RunSettings,
    state: FederationState,
    grid: Grid,
    arrays: ArrayRecord,
    config: ConfigRecord,
) -> ServerRound:
    """A round that starts from the model `arrays`."""
    started = time.perf_counter()
    state.current = state.current.of_model(arrays)
    start = RoundStart(arrays, config, snapshot(settings.strategy))
    exchange = Exchange(grid, state.roster.names, state.current.round, state.fault_log)
    return ServerRound(settings, state, exchange, start, arrays, started)


def read_outcome(
    settings: RunSettings, attempt: FlowerRound, selected: IntArray, replies: Mapping[int, Reply]
) -> Outcome:
    """What the selector observes; updates are computed when they are needed.

    Args:
        settings: Of the run.
        attempt: With which the round ended.
        selected: (C,) As chosen.
        replies: Client -> its reply, of those who delivered.
    """
    came = list(replies.values())
    # A counter of batches grows alike for everyone, and would drown what tells clients apart.
    layout = layout_of(attempt.arrays, settings.plain)
    seconds = np.array([reply.seconds for reply in came], dtype=np.float64)
    measured = np.isfinite(seconds) & (seconds > 0.0)

    def updates() -> FloatArray:  # (m, P)
        hidden = "single updates are hidden by secure aggregation"
        if settings.grows_trees:
            hidden = "clients that grow trees send no updates of a model"
        if not settings.judges_updates:
            raise FedcorError(f"{hidden}: this selector cannot be used")
        start = layout.flatten(attempt.arrays).astype(np.float64)
        rows = [layout.flatten(reply.named()) for reply in came]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(start)) - start

    # A strategy that is not known to weight replies is taken to weight them alike.
    weights = [reply.weight if settings.weighted else 1.0 for reply in came]
    return Outcome(
        attempt.round,
        selected,
        np.array(list(replies), dtype=np.int64),
        step_sizes=read_local_training([reply.metrics for reply in came]).step_sizes,
        aggregation_weights=np.array(weights, dtype=np.float64),
        read_losses=lambda: np.array([reply.loss for reply in came], dtype=np.float64),
        read_updates=updates,
        head=layout.head,
        durations=np.where(measured, seconds, np.nan) if measured.any() else None,
        read_rms_losses=lambda: np.array([reply.rms_loss for reply in came], dtype=np.float64),
    )


@dataclass(frozen=True)
class Evaluation:
    """A federated evaluation whose messages are out."""

    round: ServerRound
    requests: Mapping[int, Message]  # client -> message, as the strategy made it
    sent: Mapping[int, Message]  # as sent, without the model for those who hold it
    sent_at: float

    def aggregate(self, replies: Iterable[Message]) -> MetricRecord | None:
        """What the strategy makes of the usable replies. Losses in them are known then."""
        exchange, settings, state = self.round.exchange, self.round.settings, self.round.state
        received, lost = exchange.resend(
            self.sent,
            exchange.match(self.sent, replies, task="evaluate"),
            lambda client: renewed(self.requests[client]),
            self.sent_at + settings.train_timeout,
            task="evaluate",
        )
        usable, current = self._usable(received), state.current
        exchange.log_faults()
        known, holders = current.known.copy(), current.holders.copy()
        for client, reply in usable.items():
            known[client] = reply.loss if np.isfinite(reply.loss) else known[client]
            holders[client] |= state.roster.has_mod(client)
        holders[sorted(lost)] = False
        answered = current.answered or any(np.isfinite(one.loss) for one in usable.values())
        state.current = replace(current, known=known, holders=holders, answered=answered)
        for reply, content in zip(
            usable.values(), common_contents(list(usable.values())), strict=True
        ):
            reply.message.content = content
        name = type(settings.strategy).__name__
        with blame(f"round {self.round.number}: {name} failed in aggregate_evaluate"):
            return settings.strategy.aggregate_evaluate(
                self.round.number, [reply.message for reply in usable.values()]
            )

    def _usable(self, received: Mapping[int, Message]) -> dict[int, Reply]:
        """The replies that the strategy can average; the others are counted as faults."""
        exchange, settings = self.round.exchange, self.round.settings
        # A reply must have what the record takes, if most replies have it.
        counts = Counter(
            name
            for message in received.values()
            for record in message.content.metric_records.values()
            for name, value in record.items()
            if isinstance(value, int | float) and usable_metric(name, value, settings.loss_keys)
        )
        most = {name for name in settings.recorded_metrics if 2 * counts[name] > len(received)}
        terms = replace(settings.evaluate_terms, required=frozenset(most))
        usable: dict[int, Reply] = {}
        for client, message in received.items():
            try:
                usable[client] = read_evaluation(message, terms)
            except Unusable as wrong:
                exchange.count_fault(client, wrong.kind, wrong.why, task="evaluate")
        for client, why in refused_replies(usable).items():
            exchange.count_fault(client, "malformed", why, task="evaluate")
            del usable[client]
        # A client may evaluate on other data than it trains on: this round's replies are compared.
        usable = exchange.cap(usable, terms.weight_key, {})
        exchange.log_left_out(usable, terms.loss_keys, "evaluate")
        return usable


def configure_evaluation(
    round: ServerRound, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> Evaluation:
    """Have the strategy choose who evaluates `arrays`, among the nodes that can be reached."""
    roster, current, nodes = round.state.roster, round.state.current, list(grid.get_node_ids())
    offered = offered_clients(current.backoff, current.round, roster.connect(nodes)).tolist()
    some = [roster.node(k) for k in offered if k not in round.left_alone] or nodes
    strategy, number = round.settings.strategy, round.number
    failed = f"round {number}: {type(strategy).__name__} failed in configure_evaluate"
    with limited(strategy, len(some)), blame(failed):
        messages = list(strategy.configure_evaluate(number, arrays, config, SomeNodes(grid, some)))
    clients = {roster.client(message.metadata.dst_node_id): message for message in messages}
    requests = {client: message for client, message in clients.items() if client >= 0}
    holders = Holders(current.version, np.flatnonzero(current.holders).tolist())
    sent = {
        client: slim(message, arrays, current.version, client, holders, remember=True)
        if roster.has_mod(client)
        else message
        for client, message in requests.items()
    }
    round.exchange.count_sent(sent.values())
    return Evaluation(round, requests, sent, time.monotonic())
