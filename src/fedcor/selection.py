"""One round of selection, the same on every engine: decide who trains, and observe the outcome.

A selector may be a user's own. So what it returns is checked, and an error in it is reported with
the round, the method and the line where it happened.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from fedcor.errors import FedcorError
from fedcor.guard import check_clients
from fedcor.types import Federation, IntArray, Outcome, Population, Selector, State

__all__ = ["Decision", "blame", "check_state", "decide", "init_state", "join_clients", "observe"]


@dataclass(frozen=True)
class Decision:
    """What a selector decided in a round.

    Attributes:
        chosen: (C,) The clients that train, in the order of choice.
        state: The selector's state after the choice.
        why: Its reasons as they are recorded: a name -> one number per chosen client.
    """

    chosen: IntArray
    state: State
    why: Mapping[str, list[float | None]]


def init_state(selector: Selector, population: Population) -> State:
    """The selector's state before the first round."""
    with blame("the selector failed in init"):
        state = selector.init(population)
        check_state(state)
    return state


def decide(
    selector: Selector, state: State, federation: Federation, number: int | None = None
) -> Decision:
    """Ask the selector who trains in this round, and why.

    Args:
        selector: Ours or a user's own.
        state: Its state.
        federation: Answers its questions.
        number: What error messages call the round, where that is not `federation.round`.
    """
    number = federation.round if number is None else number
    with blame(f"round {number}: the selector failed in select"):
        chosen, state = selector.select(state, federation)
        chosen = check_clients(chosen, federation.available, number)
    with blame(f"round {number}: the selector failed in reasons"):
        why = _explain(selector, state, federation, chosen)
    return Decision(chosen, state, why)


def observe(selector: Selector, state: State, outcome: Outcome, number: int | None = None) -> State:
    """The selector's state after it has seen what came back from the round."""
    number = outcome.round if number is None else number
    with blame(f"round {number}: the selector failed in observe"):
        state = selector.observe(state, outcome)
        check_state(state)
    return state


def join_clients(selector: Selector, state: State, population: Population) -> State | None:
    """The state for a population that has grown; None for a selector without `join`."""
    join = getattr(selector, "join", None)
    if join is None:
        return None
    with blame("the selector failed in join"):
        joined: State = join(state, population)
        check_state(joined)
    return joined


def check_state(state: State, whose: str = "the selector") -> None:
    """Refuse a state that could not be written to a checkpoint."""
    if not isinstance(state, Mapping):
        raise FedcorError(
            f"{whose}'s state is a mapping of names to arrays, not a {type(state).__name__}"
        )
    for name, value in state.items():
        plain = isinstance(value, np.ndarray) and not value.dtype.hasobject
        if not isinstance(name, str) or not plain:
            raise FedcorError(
                f"{whose}'s state {name!r} is not a plain NumPy array, as checkpoints need"
            )


def _explain(
    selector: Selector, state: State, federation: Federation, chosen: IntArray
) -> dict[str, list[float | None]]:
    """The selector's reasons as a record takes them; empty where it gives none."""
    give = getattr(selector, "reasons", None)
    reasons = {} if give is None else give(state, federation, chosen)
    return {
        name: [float(v) if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]
        for name, values in reasons.items()
    }


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Report an error in a user's code with the method and the line where it happened."""
    try:
        yield
    except FedcorError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        raise FedcorError(f"{what}: {cause}") from error
