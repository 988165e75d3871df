"""The rules that every selector keeps, as checks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedcor.core.types import IntArray, Selector, State, planned_questions, selector_traits
from fedcor.testing.conformance import check_frozen, check_state, round_trip, same
from fedcor.testing.fake_federation import FakeFederation


def check_selector(selector: Selector, clients: int = 12, rounds: int = 25) -> None:
    """Check that a selector keeps the rules of `fedcor.core.types.Selector`.

    It is run on fake federations: whole ones, with few clients available, with clients that never
    answer, and with clients that join. It must choose available clients, as many as it declares,
    the same ones when it is run again or resumed from a checkpoint, and change no state in place.

    Args:
        selector: Yours; fewer than `clients` per round, and a warm-up shorter than `rounds`.
        clients: N, the number of fake clients.
        rounds: How many rounds each of the runs has.

    Raises:
        AssertionError: It breaks a rule; the message says which.

    Example:
        >>> from fedcor import Random
        >>> check_selector(Random(clients_per_round=3))
    """
    check_frozen(selector)
    choices, _ = _play(selector, FakeFederation.example(clients), rounds)
    repeated, _ = _play(selector, FakeFederation.example(clients), rounds)
    assert same(choices, repeated), (
        "two runs with the same streams chose differently: draw from federation.rng alone"
    )
    resumed, _ = _play(selector, FakeFederation.example(clients), rounds, checkpoint=True)
    assert same(choices, resumed), (
        "a state that went through a checkpoint led to other choices: keep it all in the state"
    )

    for few in (1, clients // 2):
        _play(selector, FakeFederation.example(clients, available=range(0, 2 * few, 2)), rounds)
    _play(selector, FakeFederation.example(clients, silent=range(clients // 2)), rounds)
    _play(selector, FakeFederation.example(clients, silent=range(clients)), rounds)
    _check_join(selector, clients, rounds)
    _check_questions(selector, clients, rounds)


def _check_join(selector: Selector, clients: int, rounds: int) -> None:
    """Half of the clients join when the others have trained for a while."""
    join = getattr(selector, "join", None)
    if join is None:
        return
    early, late = FakeFederation.example(clients // 2), FakeFederation.example(clients)
    _, state = _play(selector, early, rounds)
    _play(selector, late, rounds, state=join(round_trip(state), late.population))


def _check_questions(selector: Selector, clients: int, rounds: int) -> None:
    """If it says what it will ask, it asks that."""
    federation = FakeFederation.example(clients)
    state = selector.init(federation.population)
    for t in range(rounds):
        planned = planned_questions(selector, t, clients)
        if planned is None:
            return
        federation.asked.clear()
        federation.tried.clear()
        federation.probed.clear()
        chosen, state = selector.select(state, federation)
        asked, tried = sum(map(len, federation.asked)), len(federation.tried)
        assert asked == planned.losses, (
            f"round {t}: asked {asked} clients for their losses, not {planned.losses} as "
            "questions says"
        )
        assert tried == planned.candidates, (
            f"round {t}: tried {tried} candidates, not {planned.candidates} as questions says"
        )
        wanted = clients if planned.asked is None else planned.asked
        for one in federation.probed:
            assert len(np.unique(one)) == wanted, (
                f"round {t}: asked {len(np.unique(one))} clients for a candidate's sake, not "
                f"{wanted} as questions says"
            )
        assert not planned.adopted or set(chosen) == set(federation.tried[0]), (
            f"round {t}: chose others than it had tried; questions says that it is adopted"
        )
        state = selector.observe(state, federation.train(chosen))


def _play(
    selector: Selector,
    federation: FakeFederation,
    rounds: int,
    *,
    checkpoint: bool = False,
    state: State | None = None,
) -> tuple[list[IntArray], State]:
    """Every round's choice, checked, and the last state.

    With `checkpoint`, each state goes through a checkpoint.
    """
    if state is None:
        state = check_state("init", selector.init(federation.population))
    choices = []
    for _ in range(rounds):
        before = {name: array.copy() for name, array in state.items()}
        answer = selector.select(state, federation)
        assert isinstance(answer, tuple) and len(answer) == 2, (  # noqa: PT018
            f"select returned {answer!r}, not (choice, state)"
        )
        chosen, after = answer[0], check_state("select", answer[1])
        _check_choice(selector, federation, chosen)
        _check_explanations(selector, state, after, federation, chosen)
        observed = check_state("observe", selector.observe(after, federation.train(chosen)))
        for name, array in before.items():
            assert same(array, state[name]), (
                f"select or observe changed the state {name!r} in place: return a new one"
            )
        state = round_trip(observed) if checkpoint else observed
        choices.append(chosen)
    return choices, state


def _check_explanations(
    selector: Selector, before: State, state: State, federation: FakeFederation, chosen: IntArray
) -> None:
    """Check `reasons`, `details` and `phase`, where the selector has them."""
    drawn = str(federation.rng.bit_generator.state)
    reasons: object = getattr(selector, "reasons", lambda *_: {})(state, federation, chosen)
    details: object = getattr(selector, "details", lambda *_: {})(before, state, federation, chosen)
    phase = getattr(selector, "phase", lambda *_: "")(state)
    assert isinstance(reasons, Mapping), (
        f"reasons returned {reasons!r}, not a mapping of names to one number per chosen client"
    )
    for name, values in reasons.items():
        assert np.shape(values) == np.shape(chosen), (
            f"the reason {name!r} has the shape {np.shape(values)}, not one number for each of "
            f"{len(chosen)} chosen clients"
        )
    assert isinstance(details, Mapping), (
        f"details returned {details!r}, not a mapping of names to lists of numbers"
    )
    for name, values in details.items():
        plain = np.ndim(values) == 1 and np.asarray(values).dtype.kind in "biuf"
        assert plain, f"the detail {name!r} is {values!r}, not a list of numbers"
    assert isinstance(phase, str) and "\n" not in phase, (  # noqa: PT018
        f"phase returned {phase!r}, not a text of one line"
    )
    assert str(federation.rng.bit_generator.state) == drawn, (
        "reasons, details or phase drew from federation.rng: they may not, since they only explain"
    )


def _check_choice(selector: Selector, federation: FakeFederation, chosen: IntArray) -> None:
    traits = selector_traits(selector)
    assert isinstance(chosen, np.ndarray), f"the choice is a {type(chosen).__name__}, not an array"
    assert chosen.ndim == 1, f"the choice has {chosen.ndim} dimensions, not one"
    assert chosen.dtype.kind == "i", f"the choice has the type {chosen.dtype}, not whole numbers"
    unavailable = np.setdiff1d(chosen, federation.available)
    assert not len(unavailable), (
        f"round {federation.round}: chose clients that are not available: {unavailable}"
    )
    if not traits.replacement:
        assert len(np.unique(chosen)) == len(chosen), (
            f"round {federation.round}: chose a client twice: {chosen}"
        )
    if traits.clients_per_round is not None:
        wanted = traits.clients_per_round
        if not traits.replacement:
            wanted = min(wanted, len(federation.available))
        assert len(chosen) == wanted, (
            f"round {federation.round}: chose {len(chosen)} clients, not {wanted}"
        )
