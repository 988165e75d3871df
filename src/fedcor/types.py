"""The records and protocols that cross rooms. Imports nothing of ours.

A *selector* decides who trains next; a *federation* answers its questions in one round. Only what is
defined here stands between them, so the same selector object runs in the simulator, in a real
federation, and against a fake one in a test.

Notation
    N       number of clients; clients are the ids 0 .. N-1
    C       clients chosen in a round
    n_k     number of samples of client k                       (N,)
    p_k     n_k / sum n, the weight of client k                 (N,)
    l_k(w)  loss of model w over client k's own data
    w^t     the global model at the start of round t
    P       number of parameters of the model
"""

from __future__ import annotations

import dataclasses
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
    "SelectorTraits",
    "State",
    "selector_traits",
]

Array: TypeAlias = npt.NDArray[Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

# What a selector remembers: named arrays and nothing else, so that any selector's state can be
# written to a checkpoint without pickle.
State: TypeAlias = Mapping[str, Array]

# Why a choice was made: the name of a reason -> one number per chosen client.
Reasons: TypeAlias = Mapping[str, FloatArray]


@dataclass(frozen=True)
class Population:
    """Who is in the federation.

    >>> Population(np.array([30, 10])).weights
    array([0.75, 0.25])
    """

    sizes: IntArray  # (N,) n_k, number of training samples of each client

    @property
    def count(self) -> int:
        """N, the number of clients."""
        return len(self.sizes)

    @cached_property
    def weights(self) -> FloatArray:
        """(N,) p_k, each client's share of all samples."""
        weights: FloatArray = self.sizes / self.sizes.sum()
        return weights


class Federation(Protocol):
    """What a selector may ask in one round. Every answer costs communication, and a ledger counts it."""

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        ...

    @property
    def weights(self) -> FloatArray:
        """(N,) p_k, proportional to local data."""
        ...

    @property
    def available(self) -> IntArray:
        """Sorted ids of the clients that may be asked or chosen this round."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """This round's own random stream. Draw from nothing else, and runs repeat exactly."""
        ...

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; NaN where no usable answer came."""
        ...

    def loss_changes(self, selection: IntArray) -> FloatArray:
        """(N,) change of every client's loss if `selection` trained now; NaN where unknown.

        Trains `selection` from the current model and evaluates the result on all clients that can be
        reached. The global model does not change. If `selection` is then chosen, this training is
        reused and not paid for again.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """What came back from a round for free: who took part, and what they sent anyway.

    Losses and updates are computed when first read, so a selector that ignores them does not pay
    for them. An engine that does not know a client's step size or weight gives 1.
    """

    round: int
    selected: IntArray  # (C,) as chosen
    participated: IntArray  # (m,) sorted ids of those who trained and delivered
    step_sizes: (
        FloatArray  # (m,) learning rate x local steps: what turns an update into a direction
    )
    aggregation_weights: FloatArray  # (m,) weight of each update in the mean, up to a common factor
    read_losses: Callable[[], FloatArray]
    read_updates: Callable[[], Array]
    # Where the output layer's parameters are in an update.
    head: slice = field(default_factory=lambda: slice(None))

    @cached_property
    def losses(self) -> FloatArray:
        """(m,) l_k(w^t) of those who took part; NaN where unusable."""
        return self.read_losses()

    @cached_property
    def updates(self) -> Array:
        """(m, P) w_k - w^t, one flat model change per participant."""
        return self.read_updates()


@runtime_checkable
class Selector(Protocol):
    """Who trains next: a frozen dataclass of hyper-parameters with three pure verbs.

    A selector never changes. What it remembers is a `State`, which the engine keeps, checkpoints and
    hands back; each verb returns a new state and leaves the one it was given as it was. In every
    round the engine calls `select`, trains the chosen clients, and calls `observe`.

    Two more verbs are optional:

    `join(state, population) -> State`
        Called before `select` when clients have joined (they stand at the end of the population) or
        when sizes became known. A selector without it starts from `init` when a client joins.
    `reasons(state, federation, chosen) -> Reasons`
        Called after `select` with the state that it returned: why these clients. It may repeat a
        question that was asked in this round, which is free, but ask no new one.

    Some attributes tell an engine more; `SelectorTraits` lists them, all optional.
    """

    def init(self, population: Population) -> State:
        """The state before the first round. Called once per run, and it must not draw at random."""
        ...

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) ids of available clients that train now, in the order of choice, and the new state.

        Called once per round. It may ask `federation` for losses, which is billed, and draw from
        `federation.rng`.
        """
        ...

    def observe(self, state: State, outcome: Outcome) -> State:
        """The state after the round, given who delivered and what they sent.

        Called once per round, after training, also when nobody delivered. It can ask nothing.
        """
        ...


@dataclass(frozen=True)
class SelectorTraits:
    """What an engine reads from a selector beside its verbs: attributes, each with a default.

    Declare those that apply as fields of your selector, or as class variables.
    """

    clients_per_round: int | None = None  # C; the suite checks that so many are chosen
    warmup: int = 0  # rounds of uniform choice before the selector's own rule begins
    candidates: int | None = None  # clients that it asks before it chooses, at most all there are
    replacement: bool = False  # may choose a client twice; it trains once and counts twice
    needs_updates: bool = False  # reads single updates, which secure aggregation hides


def selector_traits(selector: Selector) -> SelectorTraits:
    """The traits of `selector`; the default of each that it does not declare."""
    default = dataclasses.asdict(SelectorTraits())
    return SelectorTraits(**{name: getattr(selector, name, default[name]) for name in default})
