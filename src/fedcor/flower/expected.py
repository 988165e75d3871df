"""What the rounds of a run will cost, before they begin.

It counts as the record does: a model for each client that does not hold that version yet, a model
for each training that comes back, and one number per answer. Names, notes and other metrics are not
in it. Who holds a model is a matter of chance, so the numbers are expectations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedcor.ledger import ANSWER_BYTES
from fedcor.types import Questions

__all__ = ["Traffic", "expected_traffic", "total"]


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
