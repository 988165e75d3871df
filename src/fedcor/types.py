"""The frozen records and the two protocols that cross rooms. Imports nothing of ours.

A *selector* decides who trains next; a *federation* answers its questions in one round. Between them stands only what
is defined here, so the same selector object runs in the simulator, on a real federation, and against a fake one.

Notation
    N       number of clients; clients are the ids 0 .. N-1
    C       clients chosen in a round
    n_k     number of samples of client k                       (N,)
    p_k     n_k / sum n, the weight of client k                 (N,)
    l_k(w)  loss of model w over client k's own data
    w^t     the global model at the start of round t
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "BoolArray",
    "Federation",
    "FloatArray",
    "IntArray",
    "Outcome",
    "Population",
    "Reasons",
    "Selector",
    "State",
]

Array: TypeAlias = npt.NDArray[Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

# What a selector remembers: named arrays, nothing else, so that any selector's memory can be checkpointed without pickle.
State: TypeAlias = Mapping[str, Array]

# Why a choice was made: a number for each chosen client, under what it is called.
Reasons: TypeAlias = Mapping[str, FloatArray]


@dataclass(frozen=True)
class Population:
    """Who is in the federation: one entry a client."""

    sizes: IntArray  # (N,) n_k

    @property
    def count(self) -> int:
        return len(self.sizes)

    @cached_property
    def weights(self) -> FloatArray:  # (N,) p_k
        weights: FloatArray = self.sizes / self.sizes.sum()
        return weights


class Federation(Protocol):
    """What a selector may ask in one round. Every answer costs communication, and a ledger counts it."""

    @property
    def round(self) -> int: ...

    @property
    def weights(self) -> FloatArray:
        """(N,) p_k, proportional to local data."""
        ...

    @property
    def available(self) -> IntArray:
        """Sorted ids that may be asked or chosen this round."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """This round's own stream."""
        ...

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; NaN where no usable answer came."""
        ...

    def loss_changes(self, selection: IntArray) -> FloatArray:
        """(N,) change of every client's loss if `selection` trained now; NaN where unknown.

        Trains `selection` from the current model and evaluates the candidate on all clients that can be reached. The
        global model does not move. If `selection` is then chosen, this training is reused and not paid for again.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """What came back from a round for free: who took part, and what they sent anyway.

    The losses and updates are computed when first read, so a selector that ignores them does not pay for them.
    """

    round: int
    selected: IntArray  # as chosen
    participated: IntArray  # (m,) sorted ids that trained and delivered
    read_losses: Callable[[], FloatArray]
    read_updates: Callable[[], Array]
    paces: FloatArray | None = (
        None  # (m,) learning rate x local steps of each; None where the engine cannot tell
    )
    head: slice = field(
        default_factory=lambda: slice(None)
    )  # where the output layer's numbers are in an update
    shares: FloatArray | None = (
        None  # (m,) what each counts in the mean, up to a factor of all rounds; None: the same
    )

    @cached_property
    def losses(self) -> FloatArray:  # (m,) l_k(w^t) of those who took part; NaN where unusable
        return self.read_losses()

    @property
    def pace(self) -> FloatArray:  # (m,) what an update is divided by to be a direction
        return np.ones(len(self.participated)) if self.paces is None else self.paces

    @property
    def share(self) -> FloatArray:  # (m,)
        return np.ones(len(self.participated)) if self.shares is None else self.shares

    @cached_property
    def updates(self) -> Array:  # (m, P) w_k - w^t, one flat model change each
        return self.read_updates()


@runtime_checkable
class Selector(Protocol):
    """Who trains next: a frozen dataclass of hyper-parameters with three pure verbs; its state is kept outside it.

    Two more verbs are optional:
    `join(state, population) -> State` takes in clients that came later (they stand at the end of the population) and sizes
    that became known; a selector without it begins afresh when a client joins.
    `reasons(state, federation, chosen) -> Reasons` says why, with the state that `select` returned; a question that was
    not asked before is not asked here.
    """

    def init(self, population: Population) -> State: ...

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]: ...

    def observe(self, state: State, outcome: Outcome) -> State: ...
