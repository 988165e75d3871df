"""Before the first round: check that clients can answer, and say what will happen.

A few clients are asked for a loss, if the selector will ask for losses. What they answer is not
asked for again in the first round. A resumed run asks nothing: its clients have answered before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import IntArray, planned_questions
from fedcor.flower.exchange import Exchange, Holders, probe_message, send_and_receive, slim
from fedcor.flower.federation_state import FederationState
from fedcor.flower.logs import listed
from fedcor.flower.missing_loss import loss_fault, no_loss_answered, reason_of
from fedcor.flower.protocol import LOG, NOTE, flower_round, identity_note, payload_bytes
from fedcor.flower.reply_validation import UNREACHABLE, metrics_of, number, reply_fault
from fedcor.flower.settings import RoundSettings
from fedcor.flower.traffic_forecast import say_memory, say_traffic, say_warmup, say_who

FEW, MORE = 3, 20  # clients that are asked for a loss; and others, if none of the few has one


def preflight(
    settings: RoundSettings,
    state: FederationState,
    exchange: Exchange,
    arrays: ArrayRecord,
    available: IntArray,
) -> None:
    """Check and announce the run, once per start; `state` then knows the losses that came.

    Args:
        settings: Of this start.
        state: After the nodes have said who they are.
        exchange: The traffic of the first round.
        arrays: The model.
        available: Clients that may be asked.

    Raises:
        FedcorError: The selector asks for losses, and no client has a usable one.
    """
    if not settings.selection.preflight or "preflight" in state.said:
        return
    state.said.add("preflight")
    clients, rounds = len(available), range(exchange.round, settings.num_rounds)
    planned = [planned_questions(settings.selector, t, clients) for t in rounds]
    plan = [questions for questions in planned if questions is not None]
    say_who(settings, clients)
    say_warmup(settings, exchange.round, plan)
    say_memory(settings, arrays, clients)
    asks = any(questions.losses or questions.candidates for questions in plan)
    asked = 0
    if asks and not state.finished:
        asked = _check_losses(settings, state, exchange, arrays, available)
    if plan and len(plan) == len(planned):
        say_traffic(
            settings,
            plan,
            arrays.count_bytes(),
            clients,
            with_mod=float(np.mean([state.roster.has_mod(k) for k in available.tolist()])),
            known=len(state.model.losses.keys() & set(available.tolist())),
            asked=asked,
        )


@dataclass
class _Found:
    """What clients answered to the question for a loss."""

    losses: dict[int, float] = field(default_factory=dict)  # usable ones
    replies: dict[int, RecordDict] = field(default_factory=dict)  # all with content
    errors: dict[int, str] = field(default_factory=dict)  # the reasons of the others
    # Clients whose evaluate function answers, but without our mod, which their train function has.
    without_mod: set[int] = field(default_factory=set)

    @property
    def answered(self) -> set[int]:
        """Who could be reached."""
        return self.replies.keys() | self.errors.keys()

    def fault(self, client: int, loss_keys: Sequence[str]) -> str:
        """Why this client has no usable loss."""
        if client in self.replies:
            return loss_fault(metrics_of(self.replies[client]), loss_keys)
        return reason_of(self.errors[client]) if client in self.errors else "no answer came"


def _check_losses(
    settings: RoundSettings,
    state: FederationState,
    exchange: Exchange,
    arrays: ArrayRecord,
    available: IntArray,
) -> int:
    """Ask a few clients for a loss, and remember what they say; how many were asked."""
    order = stream(settings.selection.seed, "preflight").permutation(available).tolist()
    asked, found = sorted(order[:FEW]), _Found()
    _ask(settings, state, exchange, arrays, asked, found)
    _check_mods(settings, state, found)
    if found.answered and not found.losses:
        # Three broken clients in a large federation are no reason to end the run.
        others = sorted(order[FEW : FEW + MORE])
        _ask(settings, state, exchange, arrays, others, found)
        asked = sorted([*asked, *others])
    # Where most could not be reached it is an outage, which may pass.
    if found.answered and not found.losses and 2 * len(found.answered) >= len(asked):
        round = flower_round(exchange.round)
        replies, errors = list(found.replies.values()), list(found.errors.values())
        raise no_loss_answered(settings, round, len(asked), replies, errors)
    _say_losses(settings, state, asked, found)
    return len(asked)


def _check_mods(settings: RoundSettings, state: FederationState, found: _Found) -> None:
    """Our mod must stand before the evaluate function too."""
    if not found.without_mod:
        return
    advice = (
        "answers_probes() is not a mod of the evaluate function. Give it to the whole app, "
        "ClientApp(mods=[answers_probes(), ...]), not to the train function alone"
    )
    if found.without_mod == found.replies.keys():
        selector = type(settings.selector).__name__
        raise FedcorError(f"{selector} asks clients questions, and {advice}")
    LOG.warning("preflight: %s: %s", _names(state, sorted(found.without_mod)), advice)


def _say_losses(
    settings: RoundSettings, state: FederationState, asked: Sequence[int], found: _Found
) -> None:
    """What the clients answered."""
    failed = [client for client in asked if client not in found.losses]
    if failed:
        LOG.warning(
            "preflight: %d of %d clients that were asked for a loss have no usable one (%s): %s",
            len(failed),
            len(asked),
            _names(state, failed),
            found.fault(failed[0], settings.loss_keys),
        )
    if found.losses:
        keys = [_key_of(metrics_of(found.replies[client]), settings) for client in found.losses]
        LOG.info(
            "preflight: %d clients were asked for a loss; the metric %r is %s",
            len(asked),
            keys[0],
            ", ".join(f"{loss:.4g}" for loss in found.losses.values()),
        )


def _ask(
    settings: RoundSettings,
    state: FederationState,
    exchange: Exchange,
    arrays: ArrayRecord,
    clients: Sequence[int],
    found: _Found,
) -> None:
    """Ask for losses as a round does; beside it, whether our mod answers evaluate messages."""
    roster, version = state.roster, state.model.version
    holders = Holders(version, state.model.holders)
    messages: dict[int, Message] = {}
    echoes: dict[int, Message] = {}
    for client in clients:
        node = roster.node(client)
        message = probe_message(settings, exchange.round, node, arrays)
        if roster.has_mod(client):
            message = slim(message, arrays, version, client, holders, remember=True)
            note = RecordDict({NOTE: identity_note()})
            ttl = settings.probe_timeout
            echoes[client] = Message(note, node, MessageType.EVALUATE, ttl=ttl)
        messages[client] = message
    sent = [*echoes.values(), *messages.values()]
    exchange.probed += len(messages)
    exchange.count_sent(sent)
    replies = send_and_receive(exchange.grid, sent, settings.probe_timeout)
    _read_errors(messages, replies, found)
    for client, reply in exchange.match(messages, replies, task="probe").items():
        reply.content.pop(NOTE, None)
        found.replies[client] = reply.content
        metrics = metrics_of(reply.content)
        if not loss_fault(metrics, settings.loss_keys):
            found.losses[client] = number(metrics, *settings.loss_keys)
        if roster.has_mod(client):
            holders[version].add(client)
    echoed = _echoed(exchange, echoes, replies)
    found.without_mod |= (echoes.keys() & found.replies.keys()) - echoed
    exchange.accept(found.losses, task="probe")
    exchange.log_faults()
    losses, seen = {**state.model.losses, **found.losses}, state.model.replies
    if found.losses:
        seen = dataclasses.replace(seen, answered=True)
    state.model = dataclasses.replace(
        state.model, losses=losses, holders=holders.of(version), replies=seen
    )


def _read_errors(
    messages: Mapping[int, Message], replies: Sequence[Message], found: _Found
) -> None:
    """Take the reasons of those who could be reached, but replied with an error."""
    asked = {message.metadata.message_id: client for client, message in messages.items()}
    for reply in replies:
        client, fault = asked.get(reply.metadata.reply_to_message_id), reply_fault(reply)
        if client is not None and fault is not None and fault[0] not in UNREACHABLE:
            found.errors[client] = fault[1]


def _echoed(
    exchange: Exchange, echoes: Mapping[int, Message], replies: Sequence[Message]
) -> set[int]:
    """The clients whose mod answered a question that was an evaluate message."""
    asked = {message.metadata.message_id: client for client, message in echoes.items()}
    found = set()
    for reply in replies:
        client = asked.get(reply.metadata.reply_to_message_id)
        if client is not None and reply_fault(reply) is None:
            exchange.bytes_up += payload_bytes(reply.content)
            if NOTE in reply.content:
                found.add(client)
    return found


def _key_of(metrics: MetricRecord, settings: RoundSettings) -> str:
    """The metric that holds the loss."""
    return next(key for key in settings.loss_keys if key in metrics)


def _names(state: FederationState, clients: Sequence[int]) -> str:
    return listed([state.roster.names[client] for client in clients], FEW)
