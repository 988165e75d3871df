"""One round of selection, the same on every engine: decide who trains, and observe the outcome.

A selector may be a user's own. So what it returns is checked, and an error in it is reported with
the round, the method and the line where it happened.

Where rules bound the number of clients in groups, the selector is asked as always. If its choice
keeps the rules, that is the choice. Else the clients that may stay have their seat, and it is asked
again, from the same state, for the seats that are left, among the clients that may have one. At
last it is asked for exactly the clients that were found, so that its state and its reasons are
those of this choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcor.core.config import check_state
from fedcor.core.errors import FedcorError, blame
from fedcor.core.types import (
    Array,
    Federation,
    IntArray,
    Outcome,
    Population,
    Selector,
    State,
    selector_traits,
)
from fedcor.rounds.rules.declaration import with_clients
from fedcor.rounds.rules.seats import Groups, Seats, fill


@dataclass(frozen=True)
class Decision:
    """What a selector decided in a round.

    Attributes:
        chosen: (C,) The clients that train, in the order of choice.
        state: The selector's state after the choice.
        why: Its reasons as they are recorded: a name -> one number per chosen client.
        details: What it says of the round as a whole: a name -> numbers. With them `known` and
            `losses`, the clients whose loss of the current model is known without a further
            question, and that loss; and `before_rules`, the choice that rules have changed.
        unmet: Rules that could not be met in this round: `tag=value`, or `clients_per_round` -> how
            many clients are missing.
    """

    chosen: IntArray
    state: State
    why: Mapping[str, list[float | None]]
    details: Mapping[str, list[float | int | None]] = field(default_factory=dict)
    unmet: Mapping[str, int] = field(default_factory=dict)


def init_state(selector: Selector, population: Population) -> State:
    """The selector's state before the first round."""
    with blame("the selector failed in init"):
        state = selector.init(population)
        check_state(state)
    return state


def decide(
    selector: Selector,
    state: State,
    federation: Federation,
    number: int | None = None,
    groups: Groups | None = None,
) -> Decision:
    """Ask the selector who trains in this round, and why.

    Args:
        selector: Ours or a user's own.
        state: Its state.
        federation: Answers its questions.
        number: What error messages call the round, where that is not `federation.round`.
        groups: Bounds on the number of clients; the selector must have `clients_per_round`.
    """
    number = federation.round if number is None else number
    if groups is None:
        seen, (chosen, after) = federation, _ask(selector, state, federation, number)
        own, unmet = chosen, {}
    else:
        wanted = selector_traits(selector).clients_per_round
        assert wanted is not None, "check_rules_for() comes first"
        seats = Seats(groups, wanted, federation.available)
        selector, seen, own, (chosen, after) = _keep_rules(
            selector, state, federation, number, seats
        )
        few = min(wanted, len(federation.available)) - len(chosen)
        unmet = groups.missing(chosen) | ({"clients_per_round": few} if few else {})
    with blame(f"round {number}: the selector failed in reasons"):
        reasons = _call(selector, "reasons", {}, after, seen, chosen)
        why = {name: _finite_or_none(np.asarray(v)) for name, v in reasons.items()}
    with blame(f"round {number}: the selector failed in details"):
        told = _call(selector, "details", {}, state, after, seen, chosen)
        details = {name: _short_numbers(np.asarray(v)) for name, v in told.items()}
    details |= _known_losses(federation)
    if not np.array_equal(np.sort(chosen), np.sort(own)):
        details["before_rules"] = own.tolist()
    return Decision(chosen, after, why, details, unmet)


def _keep_rules(
    selector: Selector, state: State, federation: Federation, number: int, seats: Seats
) -> tuple[Selector, Federation, IntArray, tuple[IntArray, State]]:
    """A choice that keeps the rules.

    Returns:
        The selector and the federation as it saw it when it made this choice, its own choice, and
        the choice with the state after it.
    """
    asked: list[tuple[IntArray, State]] = []

    def ask(seats: Seats, clients: IntArray) -> IntArray:
        one = with_clients(selector, seats.count)
        asked.append(_ask(one, state, _Part(federation, clients, seats), number))
        return asked[-1][0]

    chosen = fill(seats, ask)
    own = asked[0][0]
    if len(asked) == 1 and np.array_equal(chosen, own):
        return selector, _Part(federation, federation.available, seats), own, asked[0]
    one, part = with_clients(selector, len(chosen)), _Part(federation, np.sort(chosen), None)
    answer = _ask(one, state, part, number)
    if not np.array_equal(np.sort(answer[0]), part.available):
        raise FedcorError(
            f"round {number}: asked for exactly the clients {part.available.tolist()}, which keep "
            f"the rules, the selector chose {answer[0].tolist()}; with rules, it must choose "
            "clients_per_round different clients if there are as many"
        )
    return one, part, own, answer


def _ask(
    selector: Selector, state: State, federation: Federation, number: int
) -> tuple[IntArray, State]:
    """Who trains, and the state after the choice."""
    with blame(f"round {number}: the selector failed in select"):
        chosen, state = selector.select(state, federation)
        return check_clients(chosen, federation.available, number), state


def check_clients(clients: IntArray, available: IntArray, round: int) -> IntArray:
    """The client ids that a selector returned, as an array.

    Raises:
        FedcorError: They are not a list of ids, or name a client that is not available.
    """
    clients = np.asarray(clients)
    if clients.ndim != 1 or (clients.size and clients.dtype.kind not in "iu"):
        raise FedcorError(
            f"round {round}: the selector returned {clients!r}, which is not a list of client ids"
        )
    clients = clients.astype(np.int64)
    places = np.searchsorted(available, clients)  # `available` is sorted
    found = np.append(available, -1)[places] == clients
    if not found.all():
        unavailable = np.unique(clients[~found])
        raise FedcorError(
            f"round {round}: the selector chose clients that are not available: {unavailable}"
        )
    return clients


def _call(owner: object, method: str, default: Any, *arguments: object) -> Any:
    """What an optional method returns; `default` where there is none."""
    found = getattr(owner, method, None)
    return default if found is None else found(*arguments)


def _finite_or_none(values: Array) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values.astype(np.float64)]


def _known_losses(federation: Federation) -> dict[str, list[float | int | None]]:
    """The losses of the current model that are known, where the engine says so."""
    losses = _call(federation, "known_losses", np.empty(0))
    known = np.flatnonzero(np.isfinite(losses))
    if not len(known):
        return {}
    return {"known": _short_numbers(known), "losses": _short_numbers(losses[known])}


def _short_numbers(values: Array) -> list[float | int | None]:
    """As the record takes them: whole numbers, or six digits, which are enough to look at."""
    if values.dtype.kind in "biu":
        return [int(value) for value in values]
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.astype(np.float64)]


class _Part:
    """A federation of which some clients are available: those who may have the seats."""

    def __init__(self, whole: Federation, available: IntArray, seats: Seats | None) -> None:
        self.round, self.weights, self.rng = whole.round, whole.weights, whole.rng
        self.losses, self.loss_changes = whole.losses, whole.loss_changes
        self.available, self.seats = available.copy(), seats
        self.available.flags.writeable = False


def observe(selector: Selector, state: State, outcome: Outcome, number: int | None = None) -> State:
    """The selector's state after it has seen what came back from the round."""
    number = outcome.round if number is None else number
    with blame(f"round {number}: the selector failed in observe"):
        state = selector.observe(state, outcome)
        check_state(state)
    return state


def told_losses(outcome: Outcome) -> dict[str, list[float | int | None]]:
    """`told`: the losses that came with the updates, if they were read; else nothing.

    In the simulator they are only computed if a selector wants them.
    """
    losses = vars(outcome).get("losses", np.empty(0))
    return {"told": _short_numbers(losses)} if np.isfinite(losses).any() else {}


def without_losses(
    why: Mapping[str, list[float | None]], details: Mapping[str, list[float | int | None]]
) -> tuple[dict[str, list[float | None]], dict[str, list[float | int | None]]]:
    """Reasons and details of a round without the losses of single clients."""
    reasons = {name: values for name, values in why.items() if "loss" not in name}
    hidden = ("known", "losses", "told")
    return reasons, {name: values for name, values in details.items() if name not in hidden}


def join_clients(selector: Selector, state: State, population: Population) -> State | None:
    """The state for a population that has grown; None for a selector without `join`."""
    join = getattr(selector, "join", None)
    if join is None:
        return None
    with blame("the selector failed in join"):
        joined: State = join(state, population)
        check_state(joined)
    return joined


def phase_of(selector: Selector, state: State, number: int) -> str:
    """What the selector is doing in round `number`, in a few words; empty where it does not say."""
    with blame(f"round {number}: the selector failed in phase"):
        return " ".join(str(_call(selector, "phase", "", state)).split())
