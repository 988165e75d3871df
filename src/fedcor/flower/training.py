"""One attempt at a round on Flower: a selector's questions become messages, a strategy aggregates.

The strategy's own configure_train and aggregate_train do all the configuring and averaging. They
may be called several times in a round, for candidates and for the choice; each call finds the
strategy as it was before. Nothing is aggregated twice: a candidate that is chosen becomes the model
as it is, since an aggregation that draws noise would make another one of the same results.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcor.core import types
from fedcor.core.errors import blame
from fedcor.core.rng import stream
from fedcor.core.text import listed, one_line
from fedcor.core.types import FloatArray, IntArray, Population, State, selector_traits
from fedcor.flower.client_registry import Roster
from fedcor.flower.exchange import Exchange, Holders, SomeNodes, limited, renewed, slim
from fedcor.flower.federation_state import FlowerState, RoundStart, eligible_clients
from fedcor.flower.logs import brief
from fedcor.flower.optimiser_strategy import Company, introduced
from fedcor.flower.preflight import check_model, no_loss
from fedcor.flower.protocol import LOG, flower_round, is_empty, version_of
from fedcor.flower.replies import (
    SIZE,
    UNREACHABLE,
    Reply,
    Unusable,
    common_contents,
    read_answer,
    read_model,
    read_trees,
    refused_replies,
    usual_bytes,
)
from fedcor.flower.settings import RunSettings, known_rate
from fedcor.flower.strategy_memory import Candidate as Made
from fedcor.flower.strategy_memory import adopt, restore, snapshot, trial
from fedcor.rounds.aggregation import members
from fedcor.rounds.defence.update_norms import FEWEST
from fedcor.rounds.ledger import CURRENT
from fedcor.rounds.model_arrays import layout_of, numbers_fault
from fedcor.rounds.round import Candidate, Delivered, Round, Step, mean_weights
from fedcor.rounds.update_filter import ArrayChanges, UpdateFilter


class FlowerRound(Round[ArrayRecord]):
    """One attempt at a round: asks and trains clients, and keeps every usable result.

    Args:
        settings: Of the run.
        exchange: The traffic of the round.
        roster: The clients.
        start: What the round starts from.
        state: What this attempt starts from.
        available: Clients that may be asked and chosen.
        attempt: Its number, from 0.
        doubted: Client -> the lengths of its update, of those refused for them in earlier attempts.

    Attributes:
        results: Client -> its usable reply to a train message.
        config: The train configuration, as the strategy left it after its last call.
        enough: How many replies to the messages of `request` are enough; None for all.
        made: After `close`, what the strategy made of the delivered updates; None after a rollback.
    """

    def __init__(
        self,
        settings: RunSettings,
        exchange: Exchange,
        roster: Roster,
        start: RoundStart,
        *,
        state: FlowerState,
        available: IntArray,
        attempt: int = 0,
        doubted: Mapping[int, FloatArray] | None = None,
    ) -> None:
        # The first attempt draws as the simulator does; a later one may choose differently.
        key = (exchange.round, attempt) if attempt else (exchange.round,)
        super().__init__(
            state,
            weights=roster.population().weights,
            available=available,
            rng=stream(settings.selection.seed, "select", *key),
            number=flower_round(exchange.round),
        )
        self._settings, self._exchange, self._roster = settings, exchange, roster
        self._start, self._state, self.config = start, state, start.config
        self.arrays = {name: array.numpy() for name, array in start.arrays.items()}
        self._holders = Holders(state.version, np.flatnonzero(state.holders).tolist())
        self._answered = state.answered
        self._questioned: set[int] = set()  # for a loss, unless they were known to be gone
        self.results: dict[int, Reply] = {}
        self._doubters: set[int] = set()  # clients whose update was of unusable numbers
        self._requests: dict[int, Message] = {}  # as the strategy made them, with the model
        self._configured: list[int] | None = None  # the selection that it is configured for
        self._counted: list[int] = []  # the clients to aggregate, one that was drawn twice is twice
        self._sent: dict[int, Message] = {}  # by the caller of `request`
        self._sent_at = 0.0
        self.enough: int | None = None
        self._doubted = doubted
        self._closing = self._adopts = False
        self.made: Made | None = None

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; NaN where no usable answer came."""
        losses = super().losses(clients)
        self._refuse_silence()
        return losses

    def check_answers(self, few: IntArray, others: IntArray) -> list[int]:
        """Ask `few` clients for l_k(w^t), and `others` if some reply and none has a usable loss.

        Returns who answered. Raises FedcorError if nobody did, and most could be reached.
        """
        super().losses(few)
        if np.isnan(self._known).all() and self._faults_heard():
            super().losses(others)
        self._refuse_silence()
        return np.flatnonzero(np.isfinite(self._known)).tolist()

    def ask(self, version: int, model: ArrayRecord, clients: IntArray) -> FloatArray:
        """Each client's loss of `model`; NaN without a usable answer. All are asked at once."""
        current = version == CURRENT
        name = self._state.version if current else version_of(model)
        if not current and name == self._state.version:
            return self._known[clients]  # the candidate is what the model is already
        # Without a loss before, a loss after says nothing about the change. An empty model (of
        # trees, before the first) is evaluated by nobody.
        asked = clients if current else clients[np.isfinite(self._known[clients])]
        asked = asked[: 0 if is_empty(model) else None]
        found = self._probe(name, model, asked.tolist())
        return np.array([found.get(client, np.nan) for client in clients.tolist()])

    def _probe(self, version: str, model: ArrayRecord, clients: list[int]) -> dict[int, float]:
        """Client -> its loss of `model`, of all who gave a usable answer."""
        exchange, settings, holders = self._exchange, self._settings, self._holders
        end = time.monotonic() + settings.probe_timeout
        self._questioned |= {*clients} - exchange.gone
        exchange.probed += len(clients)
        held = holders[version]

        def message(client: int) -> Message:
            plain = settings.probe_message(self.round, self._roster.node(client), model)
            if not self._roster.has_mod(client):
                return plain
            return slim(plain, model, version, client, holders, remember=True)

        def whole_message(client: int) -> Message:
            held.discard(client)
            return message(client)

        sent = {client: message(client) for client in clients}
        replies = exchange.ask(sent, settings.probe_timeout, task="probe")
        replies, _ = exchange.resend(sent, replies, whole_message, end, task="probe")
        answers: dict[int, float] = {}
        for client, reply in replies.items():
            if self._roster.has_mod(client):
                held.add(client)
            try:
                answers[client] = read_answer(reply, settings.loss_keys).loss
            except Unusable as wrong:
                exchange.refuse(client, wrong.kind, wrong.why, task="probe")
                if version == self._state.version:
                    self.unusable.add(client)
        exchange.accept(answers)
        self._answered = self._answered or bool(answers)
        return answers

    def _faults_heard(self) -> list[str]:
        """Why those sent no usable loss who were asked and could be reached."""
        faults = self._exchange.last_fault
        return [
            brief(faults[client][1])
            for client in sorted(self._questioned & faults.keys())
            if faults[client][0] not in UNREACHABLE
        ]

    def _refuse_silence(self) -> None:
        """Refuse to go on if this run has never seen a loss, and most replies came without one.

        If most clients could not be reached, it may be an outage, which may pass.
        """
        faults, asked = self._faults_heard(), len(self._questioned)
        reached = 2 * len(faults) >= len(self._questioned | self._exchange.gone)
        if faults and reached and not self._answered:
            summary = f"{len(faults)} of the {asked} clients that were asked for a loss"
            raise no_loss(self._settings, self.round, summary, faults, function="evaluate")

    def train(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """Have those of `selection` train who were not asked yet."""
        messages = self._new_messages(selection)
        end = time.monotonic() + self._settings.train_timeout
        replies = self._exchange.ask(
            messages, self._settings.train_timeout, task="train", enough=self._enough(selection)
        )
        self._take(messages, replies, end)
        return self._delivered(selection)

    def request(self, selection: IntArray) -> dict[int, Message]:
        """As `train`, but the caller sends the messages, and brings the replies to `receive`."""
        messages, gone = self._new_messages(selection), self._exchange.gone
        self.enough = self._enough(selection)
        self._sent = {client: m for client, m in messages.items() if client not in gone}
        self._sent_at = time.monotonic()
        self._exchange.count_sent(self._sent.values())
        return self._sent

    def receive(self, replies: Iterable[Message]) -> None:
        """Take the replies to `request`."""
        end = self._sent_at + self._settings.train_timeout
        matched = self._exchange.match(self._sent, replies, task="train", enough=self.enough)
        self._take(self._sent, matched, end)

    def _enough(self, selection: IntArray) -> int | None:
        """How many more clients of `selection` must come back; None for all."""
        _, needed = self._settings.selector_at(self.round)
        there = len({*selection.tolist()} & self.results.keys())
        return None if needed is None else max(1, needed - there)

    def _new_messages(self, selection: IntArray) -> dict[int, Message]:
        """The messages to those of `selection` who were not asked yet."""
        wanted = np.sort(selection).tolist()
        # Configuring anew would draw a second time in a strategy that draws.
        if not wanted or wanted == self._configured or self._is_tried(selection):
            return {}
        self._configured = wanted
        return self._configure(sorted(set(wanted)))

    def _is_tried(self, selection: IntArray) -> bool:
        """Whether there is a candidate of `selection`."""
        if not {*selection.tolist()} <= self._requests.keys():
            return False
        participants, weights = self._weighted(selection)
        return (participants.tobytes(), weights.tobytes()) in self._candidates

    def _configure(self, clients: list[int]) -> dict[int, Message]:
        """Have the strategy configure these clients; the messages to those not asked yet."""
        roster, strategy, start = self._roster, self._settings.strategy, self._start
        nodes = {roster.node(client): client for client in clients}
        grid, round = SomeNodes(self._exchange.grid, list(nodes)), flower_round(self.round)
        restore(strategy, start.memory)
        self.config = ConfigRecord(dict(start.config.items()))
        failed = f"round {round}: {type(strategy).__name__} failed in configure_train"
        with limited(strategy, len(nodes), everyone=True), blame(failed):
            messages = list(strategy.configure_train(round, start.arrays, self.config, grid))
        requests = {
            nodes[m.metadata.dst_node_id]: m for m in messages if m.metadata.dst_node_id in nodes
        }
        if len(requests) < len(nodes):
            LOG.warning(
                f"round {round}: {type(strategy).__name__} has no message for "
                f"{len(nodes) - len(requests)} of {len(nodes)} chosen clients: they do not train"
            )
        new = {
            client: requests[client] for client in sorted(requests.keys() - self._requests.keys())
        }
        self._requests |= new
        version = self._holders.current
        return {
            client: slim(message, start.arrays, version, client, self._holders)
            for client, message in new.items()
        }

    def _take(
        self, sent: Mapping[int, Message], replies: Mapping[int, Message], end: float
    ) -> None:
        """Keep the usable results; whoever lost the model is sent it, until the time `end`."""
        if not sent:
            return
        replies, lost = self._exchange.resend(
            sent, replies, lambda client: renewed(self._requests[client]), end, task="train"
        )
        self._holders[self._holders.current].difference_update(lost)
        read: dict[int, Reply] = {}
        came = {client: one.message for client, one in self.results.items()}
        usual = usual_bytes({**came, **replies}) if self._settings.grows_trees else {}
        for client, message in replies.items():
            try:
                read[client] = self._read(message, usual.get(client, np.inf))
            except Unusable as wrong:
                self._refuse(client, wrong)
        used = self._cap(self._judge(read))
        self.results |= used
        for client, reply in used.items():
            self._roster.learn_size(client, reply.weight)
            # The selector is told that there is no usable loss; the update is used.
            if selector_traits(self._settings.selector).needs_losses and reply.says_unusable_loss:
                self._exchange.refused += 1

    def _read(self, message: Message, usual: float) -> Reply:
        terms = self._settings.train_terms
        if self._settings.grows_trees:
            return read_trees(message, self.arrays, terms, usual)
        return read_model(message, self._trusted, terms)

    @cached_property
    def _trusted(self) -> dict[str, types.Array]:
        """What replies are compared with: the model, but not where it may have gone bad."""
        trusted, good = dict(self.arrays), self.before.good
        for name, values in self.arrays.items():
            if good is not None and numbers_fault(values, np.zeros_like(values)):
                before = good[name].numpy() if name in good else values
                if before.shape == values.shape and before.dtype == values.dtype:
                    trusted[name] = before
        return trusted

    @cached_property
    def _filter(self) -> UpdateFilter:
        # A number that clients say, such as their steps, would let them say how long is usual.
        limits = self._settings.selection.defence.norm_limits
        return UpdateFilter(limits, self.before.norms, known_rate(self.config), self._doubted)

    def _judge(self, replies: dict[int, Reply]) -> dict[int, Reply]:
        """The replies with updates of a usual length; others are counted."""
        if not self._settings.judges_updates or not replies:
            return replies
        changes = ArrayChanges(self.arrays, layout_of(self.arrays, self._settings.plain))
        lengths = np.array([changes.lengths(reply.named()) for reply in replies.values()])
        factors = self._filter.judge(list(replies), lengths)
        for client in sorted(replies.keys() - factors.keys()):
            why = f"its update is {self._filter.too_long[client]:.3g} times as long as usual"
            self._refuse(client, Unusable("outlier", why, doubts_model=True))
        new = sorted(self._filter.clipped.keys() & replies.keys())
        if new:
            names, ratios = self._roster.names, self._filter.clipped
            who = [f"client {k} ({one_line(names[k], 40)}), {ratios[k]:.3g} times" for k in new]
            limits = self._settings.selection.defence.norm_limits
            message = "round %d: updates longer than %g times the usual length were scaled down: %s"
            most = limits.clip or limits.refuse
            LOG.warning(message, flower_round(self.round), most, listed(who))
            self._exchange.clipped.update(new)
        for client in new:
            scaled = changes.scaled(replies[client].named(), factors[client].tolist())
            arrays = ArrayRecord({name: Array(values) for name, values in scaled.items()})
            replies[client] = dataclasses.replace(replies[client], arrays=arrays)
        return {client: reply for client, reply in replies.items() if client in factors}

    def _cap(self, replies: dict[int, Reply]) -> dict[int, Reply]:
        """The replies, none with a weight far beyond the population's."""
        key = self._settings.train_terms.weight_key
        sizes = self._roster.sizes if key == SIZE else [np.nan] * len(self._roster)
        return self._exchange.cap(replies, key, dict(enumerate(sizes)))

    def _refuse(self, client: int, wrong: Unusable) -> None:
        self._exchange.refuse(client, wrong.kind, wrong.why, task="train")
        if wrong.doubts_model:
            self._doubters.add(client)

    @property
    def too_long(self) -> Mapping[int, FloatArray]:
        """Client -> the lengths of its update, of those refused for them in this round."""
        return self._filter.refused_lengths

    @property
    def refused_clients(self) -> Collection[int]:
        """Clients whose update was of unusable numbers."""
        return self._doubters

    def _delivered(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """Clients of `selection` whose results can be averaged together, and their weights."""
        wanted = sorted(set(selection.tolist()))
        results = {client: self.results[client] for client in wanted if client in self.results}
        for client, why in refused_replies(results, self._settings.named_metrics).items():
            self._exchange.refuse(client, "malformed", why, task="train")
            del self.results[client], results[client]
        self._exchange.log_left_out(results, self._settings.loss_keys, "train")
        self._exchange.accept(results)
        self._counted = [k for k in np.sort(selection).tolist() if k in results]
        return self._weighted(selection)

    def _weighted(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        delivered = selection[np.isin(selection, list(self.results))]
        participants, times = np.unique(delivered, return_counts=True)
        return participants.astype(np.int64), mean_weights(times, None)

    def aggregate(
        self,
        participants: IntArray,  # noqa: ARG002
        weights: FloatArray,  # noqa: ARG002
    ) -> tuple[ArrayRecord, Made]:
        """What the strategy makes of the results; in a trial, it forgets that it was asked."""
        strategy = self._settings.strategy
        with ExitStack() as stack:
            if not self._closing:
                stack.enter_context(trial(strategy))
            arrays, metrics = self._aggregate()
            memory = None if self._closing else snapshot(strategy)
        return self.model if arrays is None else arrays, Made(arrays, metrics, memory, self.config)

    def _aggregate(self) -> tuple[ArrayRecord | None, Any]:
        """What the strategy makes of the results, in the order of the clients.

        A client that was drawn twice counts twice. With one order, sums are equal in every run.
        """
        results = [self.results[client] for client in self._counted]
        messages, clients = [], {}
        for client, result, content in zip(
            self._counted, results, common_contents(results), strict=True
        ):
            # A copy, since a strategy may change the messages that it is given.
            message = copy.copy(result.message)
            message.content = RecordDict({key: one.copy() for key, one in content.items()})
            messages.append(message)
            clients[message.metadata.src_node_id] = client
        round, strategy = flower_round(self.round), self._settings.strategy
        whole = {client: self.results[client].metrics for client in self._counted}
        company = Company(clients, self._members(whole), whole)
        failed = f"round {round}: {type(strategy).__name__} failed in aggregate_train"
        with introduced(strategy, company), blame(failed):
            arrays, metrics = strategy.aggregate_train(round, messages)
        if arrays is not None:
            check_model(self._settings, self.round, arrays, self.arrays)
        return arrays, metrics

    def _members(self, delivered: Collection[int]) -> Population:
        """Who is in the federation: those who may be chosen, and who was, if that has changed."""
        roster, rules = self._roster, self._settings.selection.rules
        population, may = roster.population(), eligible_clients(rules, roster)
        if may is None:
            return population
        eligible = [client in delivered or may(client) for client in range(len(roster))]
        return members(population, np.array(eligible, dtype=bool))

    def same_model(self, first: ArrayRecord, second: ArrayRecord) -> bool:
        """Whether two models are equal."""
        return first is second or (
            list(first) == list(second)
            and all(first[name].data == second[name].data for name in first)
        )

    def start_over(self, model: ArrayRecord) -> State:  # noqa: ARG002
        """The strategy is as it was before the first round."""
        assert self._settings.fresh is not None
        restore(self._settings.strategy, self._settings.fresh)
        return {}

    def past_norms(self, *, wrong: bool, alone: bool) -> State:
        """The lengths of updates for the next round."""
        # Of the clients that tried, most say that the usual lengths are wrong.
        most = len(self.too_long) >= max(FEWEST, len(self.results) + 1)
        wrong = wrong or (self._adopts and most)
        return self._filter.past(self.round, wrong=wrong, alone=alone)

    def retry(self, delivered: Delivered, *, last: bool = False) -> FlowerState:
        """What another attempt at this round starts from."""
        state = super().retry(delivered, last=last)
        assert isinstance(state, FlowerState)
        held = self._held(self._state.version)
        return dataclasses.replace(state, holders=held, answered=self._answered)

    def close(self, delivered: Delivered, step: Step, selector: State) -> FlowerState:
        """End the round: what the next one starts from."""
        self._closing, self._adopts = True, step is Step.ADOPT
        state = super().close(delivered, step, selector)
        assert isinstance(state, FlowerState)
        if state.model is self.model:
            return dataclasses.replace(state, known=self._known)
        version = version_of(state.model)
        return dataclasses.replace(state, version=version, holders=self._held(version))

    def _adopted(self, delivered: Delivered) -> Candidate[ArrayRecord]:
        """The candidate of the delivered updates; its strategy's memory is adopted with it."""
        candidate = super()._adopted(delivered)
        made: Made = candidate.after
        self.made, self.config = made, made.config
        if made.memory is not None:
            adopt(self._settings.strategy, made, flower_round(self.round))
        if made.arrays is None:
            message = "round %d: %s made no model of the replies: the model stays as it is"
            name = type(self._settings.strategy).__name__
            LOG.warning(message, flower_round(self.round), name)
        return dataclasses.replace(candidate, after={})

    def _held(self, version: str) -> types.BoolArray:
        """(N,) who holds `version`."""
        return np.isin(np.arange(len(self.weights)), list(self._holders.of(version)))
