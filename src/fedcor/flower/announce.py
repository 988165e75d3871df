"""Say before the first round what will happen, what it costs, and which settings make no sense."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from flwr.app import ArrayRecord

from fedcor.aggregation import optimiser_class
from fedcor.flower.expected import Traffic, expected_traffic, total
from fedcor.flower.layout import layout_of
from fedcor.flower.numbering import flower_round
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.settings import RoundSettings
from fedcor.flower.wire import LOG
from fedcor.report.numbers import bytes_text
from fedcor.selectors import DEFAULT_SELECTOR, Full, Random, selector_name
from fedcor.types import Questions, optimiser_traits, selector_traits

__all__ = ["say_memory", "say_traffic", "say_warmup", "say_who"]

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
