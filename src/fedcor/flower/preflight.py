"""Checks before a run, and of the losses that a selector needs.

What does not go together is refused when a strategy is made. Before the first round, a few clients
are asked for a loss, if the selector will ask for losses; what they answer is not asked for again.
A resumed run asks nothing: its clients have answered before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedXgbCyclic,
    Strategy,
)

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.rng import stream
from fedcor.core.text import bytes_text
from fedcor.core.types import (
    IntArray,
    Questions,
    Selector,
    SelectorTraits,
    optimiser_traits,
    planned_questions,
    selector_traits,
)
from fedcor.flower.exchange import Exchange, send_and_receive
from fedcor.flower.federation_state import FederationState, FlowerState, check_minima
from fedcor.flower.logs import counted
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.protocol import (
    LOG,
    NOTE,
    flower_round,
    identity_note,
    is_empty,
    payload_bytes,
)
from fedcor.flower.replies import Reply, reply_fault, trees_fault
from fedcor.flower.settings import RunSettings, SelectionSettings
from fedcor.flower.strategy_memory import grows_trees, strategy_setting, wrapped
from fedcor.rounds.aggregation import optimiser_class
from fedcor.rounds.model_arrays import Arrays, numbers_fault
from fedcor.rounds.rules.declaration import check_can_ask, check_rules_for
from fedcor.selectors import selector_name

FEW, MORE = 3, 20  # clients that are asked for a loss; and others, if none of the few has one
# The selectors that run without an evaluate function.
_ASK_NOTHING = "random, round_robin, full, complement and aligned"
# Flower's differential privacy: its noise is sized for a number of clients.
_PRIVATE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def check_setup(strategy: Strategy, selector: Selector, settings: SelectionSettings) -> None:
    """Refuse what cannot run, and what would run to the end and be wrong.

    Raises:
        ConfigError: Names the setting, and says what to do instead.
    """
    _check_strategy(strategy)
    _check_selector(selector, settings)
    _check_optimiser(strategy, settings)
    _check_pair(strategy, selector)


def _check_strategy(strategy: Strategy) -> None:
    """Refuse no strategy, one with its own loop or choice of clients, one that trains nobody."""
    if not isinstance(strategy, Strategy):
        raise ConfigError("strategy", strategy, "must be a flwr.serverapp.strategy.Strategy")
    for _, one in wrapped(strategy):
        if type(one).start is not Strategy.start:
            allowed = "has its own loop (start), which would not be run"
            raise ConfigError("strategy", type(one).__name__, allowed)
        if isinstance(one, FedXgbCyclic):
            allowed = "chooses by itself who trains: one client after the other"
            hint = "start it alone, without a selector, or select for FedXgbBagging"
            raise ConfigError("strategy", type(one).__name__, allowed, hint)
    if strategy_setting(strategy, "fraction_train", 1.0) == 0.0:
        allowed = "switches training off, so there is nobody to select"
        raise ConfigError("fraction_train", 0.0, allowed)


def _check_selector(selector: Selector, settings: SelectionSettings) -> None:
    """Refuse what is no selector, and one that reads what `settings` hide from it."""
    if not isinstance(selector, Selector):
        raise ConfigError("selector", selector, "must have the methods init, select and observe")
    if settings.secure_aggregation and selector_traits(selector).needs_updates:
        allowed = "reads single updates, which secure aggregation hides"
        hint = "choose one that does not, such as random, power_of_choice or fedcor"
        raise ConfigError("selector", selector, allowed, hint)
    if settings.over_selection != 1.0:
        check_can_ask("over_selection", settings.over_selection, selector)
    check_rules_for(settings.rules, selector)
    check_minima(settings.rules, selector)


def _check_optimiser(strategy: Strategy, settings: SelectionSettings) -> None:
    """Refuse a strategy whose optimiser reads what `settings` hide from it."""
    aggregating = optimiser_strategy_in(strategy)
    if aggregating is None or not settings.secure_aggregation:
        return
    optimiser = aggregating.optimiser
    if optimiser_traits(optimiser).needs_updates:
        allowed = "reads single updates, which secure aggregation hides"
        hint = "choose one that reads the mean alone, such as fedavg, or a strategy of Flower's"
        raise ConfigError("optimiser", optimiser, allowed, hint)


def _check_pair(strategy: Strategy, selector: Selector) -> None:
    """Refuse a strategy and a selector that would run to the end together, and be wrong."""
    traits, trees = selector_traits(selector), grows_trees(strategy)
    if trees and traits.needs_updates:
        allowed = "reads updates of the model, and clients that grow trees send none"
        hint = "choose one that does not, such as random, power_of_choice or fedcor"
        raise ConfigError("selector", selector, allowed, hint)
    for _, one in wrapped(strategy):
        if isinstance(one, _PRIVATE):
            if trees:
                allowed = "clips numbers and adds noise to them, and a model of trees is a text"
                raise ConfigError("strategy", type(one).__name__, allowed)
            _check_privacy(one, traits)
            _log_privacy(one, selector)
        if isinstance(one, Bulyan):
            _check_bulyan(one, traits.clients_per_round)


def _check_privacy(strategy: Strategy, traits: SelectorTraits) -> None:
    """Refuse a choice of clients for which the noise of `strategy` would be too small."""
    sized_for = getattr(strategy, "num_sampled_clients", 0)
    chosen = traits.clients_per_round
    if chosen is not None and chosen < sized_for:
        allowed = (
            f"is more than the {chosen} clients that the selector chooses: "
            "the noise is divided by it, and would be too small"
        )
        raise ConfigError("num_sampled_clients", sized_for, allowed, f"set it to {chosen}")
    if traits.replacement:
        allowed = "may count a client twice in the mean, for which the noise is not sized"
        hint = "choose without replacement"
        raise ConfigError("replacement", True, allowed, hint)


def _log_privacy(strategy: Strategy, selector: Selector) -> None:
    """Say what the noise of `strategy` does not cover."""
    traits, name = selector_traits(selector), type(selector).__name__
    asked = planned_questions(selector, 0, 1)
    losses = traits.needs_losses or asked is None or asked.losses or asked.candidates
    read = ["losses of single clients"] if losses else []
    read += ["single updates before they are clipped on the server"] if traits.needs_updates else []
    if read:
        LOG.warning(
            f"{name} reads {' and '.join(read)}, which the differential privacy of "
            f"{type(strategy).__name__} does not cover; see docs/security.md"
        )


def _check_bulyan(strategy: Bulyan, chosen: int | None) -> None:
    """Refuse a round of too few clients, of which Bulyan makes nothing."""
    needed = 4 * strategy.num_malicious_nodes + 3
    if chosen is not None and chosen < needed:
        allowed = (
            f"needs {needed} clients in a round, and the selector chooses {chosen}: "
            "the model would never change"
        )
        raise ConfigError("num_malicious_nodes", strategy.num_malicious_nodes, allowed)


def preflight(
    settings: RunSettings,
    state: FederationState,
    exchange: Exchange,
    available: IntArray,
    check_answers: Callable[[IntArray, IntArray], list[int]],
) -> None:
    """Announce the run and check that clients answer, once per start.

    Args:
        settings: Of this start.
        state: After the nodes have said who they are.
        exchange: The traffic of the first round.
        available: The clients of the first round.
        check_answers: Asks the first clients for a loss, and the second ones if none has one.

    Raises:
        FedcorError: The selector asks for losses, and no client has a usable one.
    """
    if not settings.selection.preflight or "preflight" in state.said:
        return
    state.said.add("preflight")
    clients, rounds = len(available), range(exchange.round, settings.num_rounds)
    planned = [planned_questions(settings.selector, t, clients) for t in rounds]
    plan = [questions for questions in planned if questions is not None]
    model = state.current.model
    _announce(settings, plan, clients, model, finished=state.finished)
    if is_empty(model):
        return  # trees, before the first: nobody is asked for a loss of nothing
    if state.finished or not any(asks.losses or asks.candidates for asks in plan):
        return
    order = stream(settings.selection.seed, "preflight").permutation(available)
    # Three broken clients in a large federation are no reason to end the run.
    answered = check_answers(order[:FEW], order[FEW : FEW + MORE])
    with_mod = [client for client in answered if state.roster.has_mod(client)]
    _check_mod(settings, exchange, list(map(state.roster.node, with_mod)))


def _announce(
    settings: RunSettings,
    plan: Sequence[Questions],
    clients: int,
    model: ArrayRecord,
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
    if len(plan) == rounds - finished and not settings.grows_trees:
        evaluated = _evaluated(settings, clients)
        down, up = expected_models(plan, clients=clients, chosen=chosen, evaluated=evaluated)
        sizes = [bytes_text(models * model.count_bytes()) for models in (down, up)]
        text += f"; expected traffic, if the model keeps its size: {sizes[0]} down and {sizes[1]} "
        text += f"up in {counted(len(plan), 'round')}"
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


def _evaluated(settings: RunSettings, clients: int) -> int:
    """How many clients the strategy has evaluate in each round, as Flower's FedAvg counts them."""
    fraction = float(getattr(settings.strategy, "fraction_evaluate", 0.0))
    least = int(getattr(settings.strategy, "min_evaluate_nodes", 0))
    return min(clients, max(int(clients * fraction), least)) if fraction else 0


def _check_mod(settings: RunSettings, exchange: Exchange, nodes: Sequence[int]) -> None:
    """Refuse our mod at the train function alone: an evaluate message may lack the model then."""
    ttl = settings.probe_timeout
    note = RecordDict({NOTE: identity_note()})
    sent = [Message(note, node, MessageType.EVALUATE, ttl=ttl) for node in nodes]
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


def no_loss(
    settings: RunSettings, round: int, summary: str, faults: Sequence[str], *, function: str
) -> FedcorError:
    """The error of a run whose selector needs losses, and in which no client has ever sent one.

    Args:
        settings: Of the run.
        round: Its number, from 0.
        summary: How many clients sent none.
        faults: Why, for each of them.
        function: Which one should return the loss: `train` or `evaluate`.
    """
    ((fault, times),) = Counter(faults).most_common(1)
    often = "" if times == len(faults) else f" ({times} times)"
    key, advice = settings.selection.loss_key, ""
    if key is None:
        names = f"{', '.join(settings.loss_keys)}; name another one with loss_key"
    else:
        names = f"loss_key = {key!r}"
    if function == "evaluate":
        advice = (
            "; a mod that rejects evaluate messages belongs to the train function, "
            "@app.train(mods=[...])"
        )
    return FedcorError(
        f"round {flower_round(round)}: {summary} sent no usable one{often}: {fault}. "
        f"{type(settings.selector).__name__} needs losses: the {function} function of the "
        f"ClientApp must return the loss as a metric ({names}){advice}. The selectors "
        f"{_ASK_NOTHING} need none; afl and oort read the losses in train replies"
    )


def check_losses(
    settings: RunSettings, state: FlowerState, replies: Mapping[int, Reply], clients: int
) -> FlowerState:
    """Refuse to go on if the selector needs the losses in replies, and no reply has ever had one.

    It takes a few clients to say so: one alone may err, where few train in a round.

    Args:
        settings: Of the run.
        state: After the round.
        replies: Of those who delivered, by client.
        clients: How many clients there are.
    """
    if state.reported or not replies or not selector_traits(settings.selector).needs_losses:
        return state
    faults = [reply.loss_fault for reply in replies.values()]
    if not all(faults):
        return dataclasses.replace(state, reported=True)
    silent = state.silent | replies.keys()
    if len(silent) >= min(FEW, clients):
        summary = f"the {counted(len(faults), 'client')} that trained and should report a loss"
        raise no_loss(settings, state.round - 1, summary, faults, function="train")
    return dataclasses.replace(state, silent=silent)


def check_model(settings: RunSettings, round: int, arrays: ArrayRecord, like: Arrays) -> None:
    """Only usable numbers went in: stop a strategy that makes unusable ones of them.

    Args:
        settings: Of the run.
        round: Its number, from 0.
        arrays: What the strategy made.
        like: The model before it.
    """
    for name, before in like.items():
        if name not in arrays:
            wrong = "is missing"
        elif settings.grows_trees:
            wrong = trees_fault(arrays[name])
        else:
            values = arrays[name].numpy()  # a mean of whole numbers may be of floats
            usual = before if before.dtype.kind == "f" else before.astype(np.float64)
            shaped = values.shape == before.shape
            wrong = numbers_fault(values, usual) if shaped else "has another shape"
        if wrong:
            raise FedcorError(
                f"round {flower_round(round)}: the model that {type(settings.strategy).__name__} "
                f"made is unusable: {name} {wrong}"
            )
