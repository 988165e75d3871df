"""Federated evaluation: the strategy's own, without sending a model twice.

The losses that it brings need not be asked for in the next round.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcor.core.errors import blame
from fedcor.flower.exchange import (
    Exchange,
    Holders,
    SomeNodes,
    cap_evaluations,
    limited,
    renewed,
    slim,
)
from fedcor.flower.federation_state import CurrentModel
from fedcor.flower.protocol import flower_round
from fedcor.flower.reply_schema import log_left_out, refused_replies, with_common_parts
from fedcor.flower.reply_validation import (
    Terms,
    Unusable,
    clean_evaluation,
    main_metrics,
    number,
    usable_metric,
)
from fedcor.flower.settings import RoundSettings
from fedcor.rounds.loss_screening import screen_losses


@dataclass(frozen=True)
class Evaluation:
    """A federated evaluation whose messages are out."""

    settings: RoundSettings
    exchange: Exchange
    requests: Mapping[int, Message]  # client -> message, as the strategy made it
    sent: Mapping[int, Message]  # as sent, without the model for those who hold it
    sent_at: float

    def aggregate(
        self, replies: Iterable[Message], model: CurrentModel
    ) -> tuple[MetricRecord | None, CurrentModel]:
        """What the strategy makes of the usable replies, and what is known of the model then."""
        exchange, settings = self.exchange, self.settings
        received, lost = exchange.resend(
            self.sent,
            exchange.match(self.sent, replies, task="evaluate"),
            lambda client: renewed(self.requests[client]),
            self.sent_at + settings.train_timeout,
            task="evaluate",
        )
        usable, seen = self._usable(received), model.replies
        exchange.accept(usable, task="evaluate")
        exchange.log_faults()
        losses = dict(model.losses)
        for client, reply in usable.items():
            loss = number(main_metrics(reply.content), *settings.loss_keys)
            if np.isfinite(screen_losses(np.array([loss]))[0][0]):
                losses[client] = loss
                seen = dataclasses.replace(seen, answered=True)
        remember = {client for client in usable if exchange.roster.has_mod(client)} - lost
        holders = (model.holders | remember) - lost
        contents = [reply.content for reply in usable.values()]
        common = with_common_parts(contents, settings.loss_keys, trained=False)
        for reply, content in zip(usable.values(), common, strict=True):
            reply.content = content
        round, name = flower_round(exchange.round), type(settings.strategy).__name__
        failed = f"round {round}: {name} failed in aggregate_evaluate"
        with blame(failed):
            metrics = settings.strategy.aggregate_evaluate(round, list(usable.values()))
        model = dataclasses.replace(model, losses=losses, holders=holders, replies=seen)
        return metrics, model

    def _usable(self, received: Mapping[int, Message]) -> dict[int, Message]:
        """The replies that the strategy can average; the others are counted as faults."""
        usable: dict[int, Message] = {}
        terms = self._terms(received.values())
        for client, reply in received.items():
            try:
                reply.content = clean_evaluation(reply.content, terms)
                usable[client] = reply
            except Unusable as wrong:
                self.exchange.count_fault(client, wrong.kind, wrong.why, task="evaluate")
        contents = {client: reply.content for client, reply in usable.items()}
        for client, why in refused_replies(contents, trained=False).items():
            self.exchange.count_fault(client, "malformed", why, task="evaluate")
            del usable[client], contents[client]
        cap_evaluations(self.exchange, contents, terms.weight_key)
        log_left_out(self.exchange, contents, terms.loss_keys, trained=False)
        return usable

    def _terms(self, received: Collection[Message]) -> Terms:
        """What a reply must be like: it has what the record takes, if most replies have it."""
        settings = self.settings
        counts = Counter(
            name
            for reply in received
            for record in reply.content.metric_records.values()
            for name, value in record.items()
            if isinstance(value, int | float) and usable_metric(name, value, settings.loss_keys)
        )
        most = {name for name in settings.recorded_metrics if 2 * counts[name] > len(received)}
        return settings.evaluate_terms(most)


def configure_evaluation(
    settings: RoundSettings,
    exchange: Exchange,
    grid: Grid,
    *,
    model: CurrentModel,
    arrays: ArrayRecord,
    config: ConfigRecord,
) -> Evaluation:
    """Have the strategy choose who evaluates `arrays`, among the nodes that can be reached."""
    roster, nodes = exchange.roster, list(grid.get_node_ids())
    clients_now = roster.reachable(nodes, exchange.round, task="evaluate").tolist()
    some = [roster.node(client) for client in clients_now] or nodes
    round, strategy = flower_round(exchange.round), settings.strategy
    failed = f"round {round}: {type(strategy).__name__} failed in configure_evaluate"
    with limited(strategy, len(some)), blame(failed):
        messages = list(strategy.configure_evaluate(round, arrays, config, SomeNodes(grid, some)))
    clients = {roster.client(message.metadata.dst_node_id): message for message in messages}
    requests = {client: message for client, message in clients.items() if client >= 0}
    holders = Holders(model.version, model.holders)
    sent = {
        client: slim(message, arrays, model.version, client, holders, remember=True)
        if roster.has_mod(client)
        else message
        for client, message in requests.items()
    }
    exchange.count_sent(sent.values())
    return Evaluation(settings, exchange, requests, sent, time.monotonic())
