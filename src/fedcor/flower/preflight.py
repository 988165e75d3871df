"""Before the first round: check that clients answer with a loss, and log what the run will do.

A few clients are asked for a loss, if the selector will ask for losses. What they answer is not
asked for again in the first round. A resumed run asks nothing: its clients have answered before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from flwr.app import Message, MessageType, RecordDict

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.core.text import bytes_text
from fedcor.core.types import Questions, planned_questions, selector_traits
from fedcor.flower.exchange import Exchange, send_and_receive
from fedcor.flower.federation import FlowerFederation
from fedcor.flower.federation_state import FederationState
from fedcor.flower.logs import counted
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.protocol import LOG, NOTE, identity_note, payload_bytes
from fedcor.flower.reply_validation import reply_fault
from fedcor.flower.settings import RoundSettings
from fedcor.rounds.aggregation import optimiser_class
from fedcor.selectors import selector_name

FEW, MORE = 3, 20  # clients that are asked for a loss; and others, if none of the few has one


def preflight(
    settings: RoundSettings,
    state: FederationState,
    exchange: Exchange,
    federation: FlowerFederation,
    model_bytes: int,
) -> None:
    """Announce the run and check that clients answer, once per start.

    Args:
        settings: Of this start.
        state: After the nodes have said who they are.
        exchange: The traffic of the first round.
        federation: The clients of the first round.
        model_bytes: Bytes of the model.

    Raises:
        FedcorError: The selector asks for losses, and no client has a usable one.
    """
    if not settings.selection.preflight or "preflight" in state.said:
        return
    state.said.add("preflight")
    clients, rounds = len(federation.available), range(federation.round, settings.num_rounds)
    planned = [planned_questions(settings.selector, t, clients) for t in rounds]
    plan = [questions for questions in planned if questions is not None]
    _announce(settings, plan, clients, model_bytes, finished=state.finished)
    if state.finished or not any(asks.losses or asks.candidates for asks in plan):
        return
    seed = settings.selection.seed
    order = stream(seed, "preflight").permutation(federation.available)
    # Three broken clients in a large federation are no reason to end the run.
    answered = federation.check_answers(order[:FEW], order[FEW : FEW + MORE])
    _check_mod(settings, exchange, [client for client in answered if state.roster.has_mod(client)])


def _announce(
    settings: RoundSettings,
    plan: Sequence[Questions],
    clients: int,
    model_bytes: int,
    *,
    finished: int,
) -> None:
    """Log who selects and aggregates, the warm-up, and the expected traffic, in one line."""
    traits, rounds = selector_traits(settings.selector), settings.num_rounds
    chosen = clients if traits.clients_per_round is None else min(traits.clients_per_round, clients)
    aggregating, name = optimiser_strategy_in(settings.strategy), type(settings.strategy).__name__
    if aggregating is not None:
        name = optimiser_class(aggregating.optimiser)
    text = f"{selector_name(settings.selector)} chooses {chosen} of {counted(clients, 'client')} "
    text += f"in each round, {name} aggregates"
    only_warmup = finished < traits.warmup and rounds <= traits.warmup
    if only_warmup:
        text += f"; all {counted(rounds, 'round')} are a warm-up, in which the choice is random"
    elif finished < traits.warmup:
        text += f"; until round {traits.warmup} of {rounds}, a warm-up, the choice is random"
    if len(plan) == rounds - finished:
        evaluated = _evaluated(settings, clients)
        down, up = expected_models(plan, clients=clients, chosen=chosen, evaluated=evaluated)
        sizes = [bytes_text(models * model_bytes) for models in (down, up)]
        text += f"; expected traffic: {sizes[0]} down and {sizes[1]} up"
        text += f" in {counted(len(plan), 'round')}"
    LOG.log(logging.WARNING if only_warmup else logging.INFO, "preflight: %s", text)


def expected_models(
    plan: Iterable[Questions], *, clients: int, chosen: int, evaluated: int = 0
) -> tuple[float, float]:
    """How many models are sent to the clients, and how many come back.

    Everyone is taken to answer, to deliver, and to keep the models that it was sent, and the
    clients that train to be among those that were asked.

    Args:
        plan: What the selector asks in each round.
        clients: N, clients that can be reached.
        chosen: C, clients that train in a round.
        evaluated: Clients that evaluate the new model at the end of each round.
    """
    down = up = 0.0
    known = 0.0  # share of the clients that hold the current model
    for questions in plan:
        asked = clients if questions.asked is None else min(questions.asked, clients)
        first = asked if questions.candidates else min(questions.losses, clients)
        down += max(first, chosen) * (1 - known) + questions.candidates * asked
        up += chosen * (questions.candidates + (not questions.adopted))
        known = asked / clients if questions.adopted else 0.0
        down += evaluated * (1 - known)
        known += (1 - known) * evaluated / clients
    return down, up


def _evaluated(settings: RoundSettings, clients: int) -> int:
    """How many clients the strategy has evaluate in each round, as Flower's FedAvg counts them."""
    fraction = float(getattr(settings.strategy, "fraction_evaluate", 0.0))
    least = int(getattr(settings.strategy, "min_evaluate_nodes", 0))
    return min(clients, max(int(clients * fraction), least)) if fraction else 0


def _check_mod(settings: RoundSettings, exchange: Exchange, clients: Sequence[int]) -> None:
    """Refuse our mod at the train function alone: an evaluate message may lack the model then."""
    ttl = settings.probe_timeout
    sent = [
        Message(
            RecordDict({NOTE: identity_note()}),
            exchange.roster.node(client),
            MessageType.EVALUATE,
            ttl=ttl,
        )
        for client in clients
    ]
    exchange.count_sent(sent)
    wrong = []
    for reply in send_and_receive(exchange.grid, sent, ttl):
        fault = reply_fault(reply)
        if fault is None:
            exchange.bytes_up += payload_bytes(reply.content)
        wrong.append(fault[0] == "error" if fault is not None else NOTE not in reply.content)
    if wrong and all(wrong):
        raise FedcorError(
            f"{type(settings.selector).__name__} asks clients questions, and answers_probes() is "
            "not a mod of the evaluate function. Give it to the whole app, "
            "ClientApp(mods=[answers_probes(), ...]), not to the train function alone"
        )
