"""One round of a federated optimiser, the same on every engine: corrections, then a step.

An optimiser may be a user's own. So what it returns is checked, and an error in it is reported with
the round, the method and the line where it happened.
"""

from __future__ import annotations

import numpy as np

from fedcor.core.config import check_state
from fedcor.core.errors import FedcorError, blame
from fedcor.core.types import Array, BoolArray, Delivery, IntArray, Optimiser, Population, State


def init_optimiser(optimiser: Optimiser, population: Population, model: Array) -> State:
    """The optimiser's state before the first round. `model` is w^0, (P,)."""
    who = f"the optimiser {optimiser_class(optimiser)}"
    with blame(f"{who} failed in init"):
        state = optimiser.init(population, read_only(model))
        check_state(state, who)
    return state


def take_step(
    optimiser: Optimiser, state: State, delivery: Delivery, number: int | None = None
) -> tuple[Array, State]:
    """The next model, of the same type as the one before, and the state after the round.

    Args:
        optimiser: Ours or a user's own.
        state: Its state.
        delivery: What came back from the round.
        number: What error messages call the round, where that is not `delivery.round`.
    """
    name = optimiser_class(optimiser)
    where = f"round {delivery.round if number is None else number}: the optimiser {name}"
    method = "aggregate" if hasattr(optimiser, "short_form") else "step"
    with blame(f"{where} failed in {method}"):
        answer = optimiser.step(state, delivery)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise FedcorError(f"{where} must return (model, state) from step")
        given, after = answer
        check_state(after, where)
    _check_array(given, delivery.model.shape, where)
    with np.errstate(over="ignore"):  # what does not fit the type becomes infinite
        model = np.array(given, dtype=delivery.model.dtype)
    if not np.isfinite(model).all():
        raise FedcorError(f"{where} made numbers that are not finite out of updates that are")
    return model, after


def find_corrections(
    optimiser: Optimiser, state: State, clients: IntArray, size: int, round: int
) -> Array | None:
    """(len(clients), size) float32, what each client adds to its gradients; None for nothing.

    Args:
        optimiser: Ours or a user's own.
        state: Its state.
        clients: The clients that train.
        size: P, the number of parameters of the model.
        round: The number of the round, for error messages.
    """
    give = getattr(optimiser, "corrections", None)
    if give is None:
        return None
    where = f"round {round}: the optimiser {optimiser_class(optimiser)}"
    with blame(f"{where} failed in corrections"):
        given = give(state, read_only(clients))
    _check_array(given, (len(clients), size), where)
    corrections: Array = np.asarray(given, dtype=np.float32)
    if not np.isfinite(corrections).all():
        raise FedcorError(f"{where} made corrections that are not finite")
    return corrections


def join_optimiser(optimiser: Optimiser, state: State, population: Population) -> State:
    """The state for a population that has grown, or whose sizes became known.

    It is as it was for an optimiser without `join`.
    """
    join = getattr(optimiser, "join", None)
    if join is None:
        return state
    who = f"the optimiser {optimiser_class(optimiser)}"
    with blame(f"{who} failed in join"):
        joined: State = join(state, population)
        check_state(joined, who)
    return joined


def members(population: Population, eligible: BoolArray | None) -> Population:
    """The population as an optimiser sees it: who can never be chosen has no samples.

    Otherwise it would be waited for, and count as zero in every mean over all, for good.

    Args:
        population: Everyone.
        eligible: (N,) Who may be chosen; None for everyone.

    Example:
        >>> members(Population(np.array([30, 10])), np.array([False, True])).sizes
        array([ 0, 10])
    """
    if eligible is None or eligible.all():
        return population
    return Population(np.where(eligible, population.sizes, 0))


def state_bytes(state: State) -> int:
    """How many bytes the arrays of a state take.

    >>> state_bytes({"momentum": np.zeros(3, dtype=np.float32), "rounds": np.array(7)})
    20
    """
    return sum(int(array.nbytes) for array in state.values())


def optimiser_class(optimiser: Optimiser) -> str:
    """The name of an optimiser's class, as messages have it: for a short form, the user's own."""
    return type(getattr(optimiser, "short_form", optimiser)).__name__


def read_only(array: Array) -> Array:
    """A view of `array` that refuses to be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def _check_array(given: object, shape: tuple[int, ...], where: str) -> None:
    if isinstance(given, np.ndarray) and given.dtype.kind == "f" and given.shape == shape:
        return
    kind = f"{given.dtype} array" if isinstance(given, np.ndarray) else type(given).__name__
    found = tuple(getattr(given, "shape", ()))
    raise FedcorError(
        f"{where} returned a {kind} of shape {found}, not an array of floats of shape {shape}"
    )
