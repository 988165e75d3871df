"""Before the first round: check that clients report a loss, and log what the run will cost.

A few clients are asked for a loss, if the selector will ask for losses. What they answer is not
asked for again in the first round. A resumed run asks nothing: its clients have answered before.

The traffic is counted as in the record: a model for each client that does not hold that version
yet, a model for each training that comes back, and one number per answer. Names, notes and other
metrics are not counted. Which client holds a model is a matter of chance, so the numbers are
expectations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.core.text import bytes_text
from fedcor.core.types import (
    IntArray,
    Questions,
    optimiser_traits,
    planned_questions,
    selector_traits,
)
from fedcor.flower.exchange import Exchange, Holders, send_and_receive, slim
from fedcor.flower.federation_state import FederationState
from fedcor.flower.logs import counted, listed
from fedcor.flower.missing_loss import no_loss_answered, reason_of
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.protocol import LOG, NOTE, flower_round, identity_note, payload_bytes
from fedcor.flower.reply_validation import UNREACHABLE, loss_fault, metrics_of, number, reply_fault
from fedcor.flower.settings import RoundSettings
from fedcor.flower.updates import layout_of
from fedcor.rounds.aggregation import optimiser_class
from fedcor.rounds.ledger import ANSWER_BYTES
from fedcor.selectors import DEFAULT_SELECTOR, selector_name
from fedcor.selectors.baselines import Full, Random

FEW, MORE = 3, 20  # clients that are asked for a loss; and others, if none of the few has one
LARGE_MEMORY = 500_000_000  # bytes of what an optimiser remembers


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
    _ask(settings, state, exchange, arrays, asked, found=found)
    _check_mods(settings, state, found)
    if found.answered and not found.losses:
        # Three broken clients in a large federation are no reason to end the run.
        others = sorted(order[FEW : FEW + MORE])
        _ask(settings, state, exchange, arrays, others, found=found)
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
        reason = found.fault(failed[0], settings.loss_keys)
        LOG.warning(
            f"preflight: no usable loss from {len(failed)} of {counted(len(asked), 'client')} "
            f"({_names(state, failed)}): {reason}"
        )
    if found.losses:
        keys = [_key_of(metrics_of(found.replies[client]), settings) for client in found.losses]
        who = "1 client was" if len(asked) == 1 else f"{len(asked)} clients were"
        losses = ", ".join(f"{loss:.4g}" for loss in found.losses.values())
        LOG.info(f"preflight: {who} asked for a loss; the metric {keys[0]!r} is {losses}")


def _ask(
    settings: RoundSettings,
    state: FederationState,
    exchange: Exchange,
    arrays: ArrayRecord,
    clients: Sequence[int],
    *,
    found: _Found,
) -> None:
    """Ask for losses as a round does; beside it, whether our mod answers evaluate messages."""
    roster, version = state.roster, state.model.version
    holders = Holders(version, state.model.holders)
    messages: dict[int, Message] = {}
    echoes: dict[int, Message] = {}
    for client in clients:
        node = roster.node(client)
        message = settings.probe_message(exchange.round, node, arrays)
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
    clients = set()
    for reply in replies:
        client = asked.get(reply.metadata.reply_to_message_id)
        if client is not None and reply_fault(reply) is None:
            exchange.bytes_up += payload_bytes(reply.content)
            if NOTE in reply.content:
                clients.add(client)
    return clients


def _key_of(metrics: MetricRecord, settings: RoundSettings) -> str:
    """The metric that holds the loss."""
    return next(key for key in settings.loss_keys if key in metrics)


def _names(state: FederationState, clients: Sequence[int]) -> str:
    return listed([state.roster.names[client] for client in clients], FEW)


def say_who(settings: RoundSettings, clients: int) -> None:
    """Who selects, how many of them, and who aggregates."""
    chosen = selector_traits(settings.selector).clients_per_round
    many = "some" if chosen is None else str(min(chosen, clients))
    if isinstance(settings.selector, Full):
        many = "all"
    aggregating, name = optimiser_strategy_in(settings.strategy), type(settings.strategy).__name__
    if aggregating is not None:
        name = optimiser_class(aggregating.optimiser)
    selector = selector_name(settings.selector)
    LOG.info(
        f"preflight: {selector} chooses {many} of {counted(clients, 'client')} in each round; "
        f"{name} aggregates"
    )
    if chosen is not None and chosen >= clients:
        LOG.warning(
            f"preflight: {counted(chosen, 'client')} per round, {counted(clients, 'node')}: "
            "everyone trains in each round, so the selector has nothing to choose"
        )


def say_warmup(settings: RoundSettings, round: int, plan: Sequence[Questions]) -> None:
    """How long the choice is random; `plan` begins with `round`."""
    warmup, rounds = selector_traits(settings.selector).warmup, settings.num_rounds
    if not round < warmup or not rounds:
        return
    if warmup >= rounds:
        proposal = max(2, rounds // 5)
        shorter = f"Set warmup={proposal}, or take" if proposal < rounds else "Take"
        other = "power_of_choice" if settings.selection.secure_aggregation else DEFAULT_SELECTOR
        LOG.warning(
            f"preflight: {selector_name(settings.selector)} chooses at random in its first "
            f"{counted(warmup, 'round')}, and this run has {rounds}: it is random selection at "
            f'extra cost. {shorter} a selector without a warm-up, such as "{other}"'
        )
        return
    probes = any(questions.candidates for questions in plan[: warmup - round])
    reports = ", and clients report their loss on the resulting model" if probes else ""
    LOG.info(
        f"preflight: rounds {flower_round(round)} to {warmup} of {rounds} are a warm-up: "
        f"clients are chosen at random{reports}"
    )


def say_memory(settings: RoundSettings, arrays: ArrayRecord, clients: int) -> None:
    """How much the optimiser will remember, where it is much."""
    aggregating = optimiser_strategy_in(settings.strategy)
    if aggregating is None or not optimiser_traits(aggregating.optimiser).remembers:
        return
    layout = layout_of({name: array.numpy() for name, array in arrays.items()}, settings.plain)
    stored = np.dtype(getattr(aggregating.optimiser, "dtype", "float32"))
    size = clients * sum(math.prod(shape) for _, shape, _ in layout.parts) * stored.itemsize
    if size < LARGE_MEMORY:
        return
    name = optimiser_class(aggregating.optimiser)
    message = f"preflight: {name} remembers an update of every client: up to {bytes_text(size)} "
    message += f"for {counted(clients, 'client')}"
    if settings.selection.checkpoint is not None:
        every = settings.selection.checkpoint_every
        often = "each round" if every == 1 else f"every {every} rounds"
        message += f", in memory and in the checkpoint that is written {often}"
        message += ". checkpoint_every=10 writes it less often" if every == 1 else ""
    if hasattr(aggregating.optimiser, "dtype") and stored.itemsize > 2:
        message += f'. {name}(dtype="float16") needs half of it'
    LOG.warning(message)


def say_traffic(
    settings: RoundSettings,
    plan: Sequence[Questions],
    model_bytes: int,
    clients: int,
    *,
    with_mod: float,
    known: int,
    asked: int,
) -> None:
    """What the rounds will cost, and what random selection would.

    Args:
        settings: Of this start.
        plan: What the selector will ask in each round that is left.
        model_bytes: Bytes of one model.
        clients: N, clients that can be reached.
        with_mod: Share of the clients that keep models.
        known: Clients whose loss of the current model is known.
        asked: Those of them that were asked just now.
    """
    selector = settings.selector
    chosen = selector_traits(selector).clients_per_round
    chosen = clients if chosen is None else chosen
    evaluated = _evaluated(settings, clients)

    def expected(questions: Sequence[Questions], known: int) -> list[Traffic]:
        return expected_traffic(
            questions,
            clients=clients,
            chosen=chosen,
            model_bytes=model_bytes,
            evaluated=evaluated,
            with_mod=with_mod,
            known=known,
        )

    ours = [Traffic(asked * model_bytes), *expected(plan, known)]
    rounds = f"all {len(plan)} rounds"
    first = f"{_text(total(ours[:2]))} in the first round, "
    if len(plan) < settings.num_rounds:
        rounds, first = f"the {counted(len(plan), 'round')} that are left", ""
    compared = "; as much as random selection"
    if isinstance(selector, Random | Full):
        compared = ""
    elif any(questions != Questions() for questions in plan):
        random = total(expected([Questions()] * len(plan), known - asked))
        compared = f"; random selection: {_text(random)}"
    LOG.info(
        f"preflight: expected traffic, with a model of {bytes_text(model_bytes)}: "
        f"{first}{_text(total(ours))} in {rounds}{compared}"
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes to the clients and from them."""

    down: float = 0.0
    up: float = 0.0


def total(rounds: Iterable[Traffic]) -> Traffic:
    """The sum of several rounds."""
    rounds = list(rounds)
    return Traffic(sum(one.down for one in rounds), sum(one.up for one in rounds))


def expected_traffic(
    plan: Iterable[Questions],
    *,
    clients: int,
    chosen: int,
    model_bytes: int,
    evaluated: int = 0,
    with_mod: float = 1.0,
    known: int = 0,
) -> list[Traffic]:
    """The traffic of each round, in which everyone answers and delivers.

    A selector is taken to choose among those that it asks, and to try selections that are drawn
    uniformly; a client that was tried and is then chosen trains once. Where a part of the clients
    is asked for the sake of candidates, those who train for them are in it, and the other clients
    are the same for all candidates of a round.

    Args:
        plan: What the selector asks in each round.
        clients: N, clients that can be reached.
        chosen: C, clients that train in a round; at most N do.
        model_bytes: Bytes of one model.
        evaluated: Clients that evaluate the new model at the end of each round.
        with_mod: Share of the clients that keep models; to the others each message carries one.
        known: Clients that have received the first model and told their loss already.
    """
    chosen, evaluated = min(chosen, clients), min(evaluated, clients)
    rounds = []
    reported = known / clients  # share of the clients whose loss of the current model is known
    for questions in plan:
        models_down = models_up = answers = 0.0
        probed = clients if questions.asked is None else min(questions.asked, clients)
        wanted: float = min(questions.losses, clients)
        if questions.candidates:  # those who train for a further candidate are asked, too
            more = (questions.candidates - 1) * chosen
            wanted = min(probed + more * (1 - probed / clients), clients)
        asked = wanted * (1 - reported)
        reported += asked / clients
        models_down += asked
        answers += asked
        # Whoever has told its loss has received the model.
        holding = with_mod * (1.0 if wanted >= chosen and not questions.candidates else reported)
        drawn = questions.candidates + (not questions.adopted)  # selections that train
        trainings = clients * (1 - (1 - chosen / clients) ** drawn)
        tried = clients * (1 - (1 - chosen / clients) ** questions.candidates)  # all were asked
        models_down += tried * (1 - with_mod) + (trainings - tried) * (1 - holding)
        models_up += trainings
        models_down += questions.candidates * probed
        answers += questions.candidates * probed
        reported = probed / clients if questions.adopted else 0.0
        models_down += evaluated * (1 - reported * with_mod)
        reported += (1 - reported) * evaluated / clients
        rounds.append(
            Traffic(models_down * model_bytes, models_up * model_bytes + answers * ANSWER_BYTES)
        )
    return rounds


def _evaluated(settings: RoundSettings, clients: int) -> int:
    """How many clients the strategy has evaluate in each round, as Flower's FedAvg counts them."""
    fraction = float(getattr(settings.strategy, "fraction_evaluate", 0.0))
    least = int(getattr(settings.strategy, "min_evaluate_nodes", 0))
    return min(clients, max(int(clients * fraction), least)) if fraction else 0


def _text(traffic: Traffic) -> str:
    return f"{bytes_text(traffic.down)} down and {bytes_text(traffic.up)} up"
