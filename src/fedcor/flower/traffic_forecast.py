"""What the rounds of a run will cost, before they begin.

It counts as the record does: a model for each client that does not hold that version yet, a model
for each training that comes back, and one number per answer. Names, notes and other metrics are not
in it. Who holds a model is a matter of chance, so the numbers are expectations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord

from fedcor.core.text import bytes_text
from fedcor.core.types import Questions, optimiser_traits, selector_traits
from fedcor.flower.optimiser_strategy import layout_of, optimiser_strategy_in
from fedcor.flower.protocol import LOG, flower_round
from fedcor.flower.settings import RoundSettings
from fedcor.rounds.aggregation import optimiser_class
from fedcor.rounds.ledger import ANSWER_BYTES
from fedcor.selectors import DEFAULT_SELECTOR, selector_name
from fedcor.selectors.baselines import Full, Random


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
    told = known / clients  # share of the clients whose loss of the current model is known
    for questions in plan:
        models_down = models_up = answers = 0.0
        probed = clients if questions.asked is None else min(questions.asked, clients)
        wanted: float = min(questions.losses, clients)
        if questions.candidates:  # those who train for a further candidate are asked, too
            more = (questions.candidates - 1) * chosen
            wanted = min(probed + more * (1 - probed / clients), clients)
        asked = wanted * (1 - told)
        told += asked / clients
        models_down += asked
        answers += asked
        # Whoever has told its loss has received the model.
        holding = with_mod * (1.0 if wanted >= chosen and not questions.candidates else told)
        drawn = questions.candidates + (not questions.adopted)  # selections that train
        trainings = clients * (1 - (1 - chosen / clients) ** drawn)
        tried = clients * (1 - (1 - chosen / clients) ** questions.candidates)  # all were asked
        models_down += tried * (1 - with_mod) + (trainings - tried) * (1 - holding)
        models_up += trainings
        models_down += questions.candidates * probed
        answers += questions.candidates * probed
        told = probed / clients if questions.adopted else 0.0
        models_down += evaluated * (1 - told * with_mod)
        told += (1 - told) * evaluated / clients
        rounds.append(
            Traffic(models_down * model_bytes, models_up * model_bytes + answers * ANSWER_BYTES)
        )
    return rounds


# Say before the first round what will happen, what it costs, and which settings make no sense.


LARGE_MEMORY = 500_000_000  # bytes of what an optimiser remembers


def say_who(settings: RoundSettings, clients: int) -> None:
    """Who selects, how many of them, and who aggregates."""
    chosen = selector_traits(settings.selector).clients_per_round
    many = "some" if chosen is None else str(min(chosen, clients))
    if isinstance(settings.selector, Full):
        many = "all"
    aggregating = optimiser_strategy_in(settings.strategy)
    LOG.info(
        "preflight: %s chooses %s of %d clients in each round; %s aggregates",
        selector_name(settings.selector),
        many,
        clients,
        type(settings.strategy).__name__
        if aggregating is None
        else optimiser_class(aggregating.optimiser),
    )
    if chosen is not None and chosen >= clients:
        LOG.warning(
            "preflight: %d clients per round, %d nodes: everyone trains in each round, so the "
            "selector has nothing to choose",
            *(chosen, clients),
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
            "preflight: %s chooses at random in its first %d rounds, and this run has %d: it is "
            'random selection at extra cost. %s a selector without a warm-up, such as "%s"',
            *(selector_name(settings.selector), warmup, rounds, shorter, other),
        )
        return
    shown = any(questions.candidates for questions in plan[: warmup - round])
    LOG.info(
        "preflight: rounds %d to %d of %d are a warm-up: clients are chosen at random%s",
        *(flower_round(round), warmup, rounds),
        ", and clients report their loss on the resulting model" if shown else "",
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
    every = settings.selection.checkpoint_every
    often = "each round" if every == 1 else f"every {every} rounds"
    written = f", in memory and in the checkpoint that is written {often}"
    rarely = ". checkpoint_every=10 writes it less often" if every == 1 else ""
    kept = settings.selection.checkpoint is not None
    halved = hasattr(aggregating.optimiser, "dtype") and stored.itemsize > 2
    LOG.warning(
        "preflight: %s remembers an update of every client: up to %s for %d clients%s%s",
        *(name, bytes_text(size), clients),
        written + rarely if kept else "",
        f'. {name}(dtype="float16") needs half of it' if halved else "",
    )


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
    nothing = [Questions()] * len(plan)
    random = total(expected(nothing, known - asked))
    left = f"all {len(plan)} rounds"
    first = f"{_text(total(ours[:2]))} in the first round, "
    if len(plan) < settings.num_rounds:
        left, first = f"the {len(plan)} rounds that are left", ""
    compared = "; as much as random selection"
    if any(questions != Questions() for questions in plan):
        compared = f"; random selection: {_text(random)}"
    LOG.info(
        "preflight: expected traffic, with a model of %s: %s%s in %s%s",
        *(bytes_text(model_bytes), first, _text(total(ours)), left),
        "" if isinstance(selector, Random | Full) else compared,
    )


def _evaluated(settings: RoundSettings, clients: int) -> int:
    """How many clients the strategy has evaluate in each round, as Flower's FedAvg counts them."""
    fraction = float(getattr(settings.strategy, "fraction_evaluate", 0.0))
    least = int(getattr(settings.strategy, "min_evaluate_nodes", 0))
    return min(clients, max(int(clients * fraction), least)) if fraction else 0


def _text(traffic: Traffic) -> str:
    return f"{bytes_text(traffic.down)} down and {bytes_text(traffic.up)} up"
