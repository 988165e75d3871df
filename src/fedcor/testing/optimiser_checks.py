"""The rules that every federated optimiser keeps, as checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from fedcor.core.errors import ConfigError
from fedcor.core.rng import stream
from fedcor.core.types import (
    Array,
    Delivery,
    IntArray,
    Optimiser,
    Population,
    State,
    optimiser_traits,
)
from fedcor.optimisers import check_traits
from fedcor.rounds.aggregation import read_only
from fedcor.testing.conformance import check_frozen, check_state, round_trip, same

T = TypeVar("T")
_SIZE = 6  # P, the parameters of the model


def check_optimiser(optimiser: Optimiser, clients: int = 12, rounds: int = 12) -> None:
    """Check that a federated optimiser keeps the rules of `fedcor.core.types.Optimiser`.

    It takes invented steps: after rounds of one client, of all, and of some that come for the first
    time; with unequal weights and numbers of local steps; with updates that are zero or large; with
    clients that join, whose sizes become known, or that rules exclude. Its methods must change
    nothing that they are given, return the same when they are called again or on a state that went
    through a checkpoint, and return finite numbers.

    Args:
        optimiser: Yours.
        clients: N, the number of invented clients.
        rounds: How many steps each of the runs has.

    Raises:
        AssertionError: It breaks a rule; the message says which.

    Example:
        >>> from fedcor import FedAvg
        >>> check_optimiser(FedAvg())
    """
    assert isinstance(optimiser, Optimiser), (
        "it has no methods init and step; the short form, with aggregate alone, keeps nothing, and "
        "needs no check"
    )
    check_frozen(optimiser)
    try:
        check_traits(optimiser)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    everyone = _population(clients)
    models, _ = _play(optimiser, everyone, rounds)
    dropped, _ = _play(optimiser, everyone, rounds, try_others=True)
    assert same(models, dropped), (
        "steps that were tried and dropped changed those that followed: keep it all in the state"
    )
    resumed, _ = _play(optimiser, everyone, rounds, checkpoint=True)
    assert same(models, resumed), (
        "a state that went through a checkpoint led to other models: keep it all in the state"
    )
    _play(optimiser, _population(1), rounds)
    excluded = Population(read_only(np.append(everyone.sizes, 0)))  # the last, by rules
    _play(optimiser, everyone, rounds, state=_init(optimiser, excluded))
    _check_join(optimiser, clients, rounds)


def _population(clients: int) -> Population:
    return Population(read_only(stream(clients, "sizes").integers(5, 50, size=clients)))


def _check_join(optimiser: Optimiser, clients: int, rounds: int) -> None:
    """When clients have trained for a while, other sizes become known, and then as many join."""
    early, late = _population(clients // 2), _population(clients)
    known = Population(read_only(early.sizes + np.arange(1, early.count + 1)))
    join = getattr(optimiser, "join", None)
    if join is None:
        assert same(_init(optimiser, early), _init(optimiser, late)), (
            "init gave another state for more clients, so clients cannot join: give it `join`"
        )
    _, state = _play(optimiser, early, rounds)
    for population in (known, late):
        if join is not None:
            state = _join(join, state, population)
        _play(optimiser, population, rounds, state=state)


def _join(
    join: Callable[[State, Population], State], state: State, population: Population
) -> State:
    return _pure("join", state, lambda: check_state("join", join(state, population)))


def _play(
    optimiser: Optimiser,
    population: Population,
    rounds: int,
    *,
    checkpoint: bool = False,
    try_others: bool = False,
    state: State | None = None,
) -> tuple[list[Array], State]:
    """The model after every round, checked, and the last state.

    With `checkpoint`, each state goes through a checkpoint; with `try_others`, a step with other
    clients is taken and dropped before each.
    """
    model, models = _start(), []
    state = _init(optimiser, population) if state is None else state
    for t in range(rounds):
        delivery = _delivery(optimiser, population, t, model)
        _check_corrections(optimiser, state, delivery.clients)
        if try_others:
            _step(optimiser, state, _delivery(optimiser, population, t + 1, model))
        model, state = _step(optimiser, state, delivery)
        state = round_trip(state) if checkpoint else state
        models.append(model)
    return models, state


def _start() -> Array:
    """w^0."""
    start: Array = stream(0, "start").standard_normal(_SIZE).astype(np.float32)
    return start


def _delivery(optimiser: Optimiser, population: Population, t: int, model: Array) -> Delivery:
    """What comes back from round t: the same for the same arguments."""
    rng, N = stream(population.count, "delivery", t), population.count
    turns = {0: [0], 1: [0, 1, 2], 2: [N - 1], 3: range(N)}  # of one, of newcomers, of all
    drawn = rng.choice(N, size=rng.integers(1, N + 1), replace=False)
    clients = np.unique(np.array(turns.get(t, drawn)) % N).astype(np.int64)
    m, size = len(clients), {4: 0.0, 5: 1e4}.get(t, 0.1)
    updates = (size * rng.standard_normal((m, _SIZE))).astype(np.float32)
    weights = rng.dirichlet(np.ones(m))

    def read_updates() -> Array:
        assert optimiser_traits(optimiser).needs_updates, (
            "it read the updates of single clients: declare needs_updates = True"
        )
        return read_only(updates)

    return Delivery(
        t,
        read_only(model),
        read_only(clients),
        read_only(weights),
        read_only(rng.integers(1, 10, size=m)),
        learning_rate=0.1 / (1 + t),
        read_updates=read_updates,
        read_mean=lambda: read_only(weights.astype(np.float32) @ updates),
    )


def _init(optimiser: Optimiser, population: Population) -> State:
    model = read_only(_start())
    return _pure("init", {}, lambda: check_state("init", optimiser.init(population, model)))


def _step(optimiser: Optimiser, state: State, delivery: Delivery) -> tuple[Array, State]:
    where = f"round {delivery.round}: step"

    def take() -> tuple[Array, State]:
        answer: Any = optimiser.step(state, delivery)
        assert isinstance(answer, tuple) and len(answer) == 2, (  # noqa: PT018
            f"step returned {answer!r}, not (model, state)"
        )
        return _check_numbers(where, answer[0], (_SIZE,)), check_state("step", answer[1])

    model, after = _pure("step", state, take)
    return model.astype(np.float32), after


def _check_corrections(optimiser: Optimiser, state: State, clients: IntArray) -> None:
    give: Callable[[State, IntArray], Array] | None = getattr(optimiser, "corrections", None)
    if give is None:
        return

    def ask() -> Array:
        shape = (len(clients), _SIZE)
        return _check_numbers("corrections", give(state, read_only(clients)), shape)

    given = _pure("corrections", state, ask)
    for i in range(len(clients)):
        alone = give(state, read_only(clients[i : i + 1]))
        assert same(alone[0].astype(np.float32), given[i].astype(np.float32)), (
            f"the correction of client {clients[i]} depends on who trains beside it"
        )


def _pure(verb: str, state: State, call: Callable[[], T]) -> T:
    """What `call` returns, after a check that it changes nothing and returns it again."""
    before = {name: array.copy() for name, array in state.items()}
    first, again = _call(verb, call), _call(verb, call)
    assert same(state, before), f"{verb} changed the state in place: return a new one"
    assert same(first, again), f"{verb} returned something else when it was called again"
    return first


def _call(verb: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise AssertionError(f"{verb} wrote into what it was given: {error}") from error


def _check_numbers(where: str, given: object, shape: tuple[int, ...]) -> Array:
    assert isinstance(given, np.ndarray), f"{where} returned a {type(given).__name__}, not an array"
    assert given.shape == shape, f"{where} returned an array of shape {given.shape}, not {shape}"
    assert given.dtype.kind == "f", f"{where} returned numbers of type {given.dtype}, not floats"
    assert np.isfinite(given).all(), f"{where} returned numbers that are not finite"
    return given
