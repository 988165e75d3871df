"""The types that selectors, optimisers and engines share. This module imports nothing of fedcor.

A *selector* decides who trains next. A *federation* answers its questions in one round. A federated
*optimiser* makes the next model of what came back. An *engine*, the simulator or Flower, calls them
and trains the clients. They know of each other only what is defined here, so the same objects run
in the simulator, in a real federation, and against fake clients in a test.

Notation
    N       number of clients; clients are the ids 0 .. N-1
    C       clients chosen in a round
    n_k     number of samples of client k                       (N,)
    p_k     n_k / sum n, the weight of client k                 (N,)
    l_k(w)  loss of model w over client k's own data
    w^t     the global model at the start of round t
    P       number of parameters of the model
    Delta_k w_k - w^t, the change of the model by client k      (P,)
    a_k     weight of client k in the mean of a round           (m,)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

# What a selector remembers: named arrays and nothing else, so that any selector's state can be
# written to a checkpoint without pickle. A number is an array too: np.array(3).
State: TypeAlias = Mapping[str, Array]

# Why a choice was made: the name of a reason -> (C,) one number per chosen client.
Reasons: TypeAlias = Mapping[str, FloatArray]


@dataclass(frozen=True)
class Population:
    """Who is in the federation.

    Args:
        sizes: (N,) n_k, the number of training samples of each client.

    Example:
        >>> Population(np.array([30, 10])).weights
        array([0.75, 0.25])
    """

    sizes: IntArray

    @property
    def count(self) -> int:
        """N, the number of clients."""
        return len(self.sizes)

    @cached_property
    def weights(self) -> FloatArray:
        """(N,) p_k, each client's fraction of all samples."""
        weights: FloatArray = self.sizes / self.sizes.sum()
        return weights


class Federation(Protocol):
    """What a selector may ask in one round.

    Answers cost communication, which the record of the run shows. An answer that was given in this
    round is not paid for again.

    Where rules bound the number of clients in groups, it also has `seats`, a
    `fedcor.rounds.rules.seats.Seats`: which clients have a seat in the round already, and which may
    take the next one. A selector need not read it.
    """

    @property
    def round(self) -> int:
        """t, the number of this round, from 0."""
        ...

    @property
    def weights(self) -> FloatArray:
        """(N,) p_k, proportional to local data. Read-only."""
        ...

    @property
    def available(self) -> IntArray:
        """Sorted ids of the clients that may be asked or chosen this round. Read-only."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """This round's own random stream. Draw from nothing else, and runs repeat exactly."""
        ...

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; NaN where no usable answer came.

        Raises FedcorError for a client that is not available.
        """
        ...

    def loss_changes(self, selection: IntArray, clients: IntArray | None = None) -> FloatArray:
        """(N,) l_k(w') - l_k(w^t), where w' is the model that training `selection` would give.

        NaN where it is unknown: for clients that are not asked, not available or do not answer, and
        for everyone if nobody of `selection` delivers. The global model does not change. If
        `selection` is then chosen, this training is reused and not paid for again.

        Args:
            selection: Who trains.
            clients: Whose losses are asked for: available clients, each of which is sent w'. None
                for everyone. A federation without this argument serves selectors that ask everyone.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """What came back from a round: who took part, and what they sent anyway.

    Reading it costs no communication. Losses and updates are computed when they are first read, so
    a selector that ignores them does not pay for them in time either.

    Attributes:
        round: t, the number of the round.
        selected: (C,) The clients as chosen; a client may be in it twice.
        participated: (m,) Sorted ids of the clients that trained and delivered, each once.
        step_sizes: (m,) Learning rate x local steps of each participant: an update divided by it is
            minus a mean gradient. 1 where the engine does not know it.
        aggregation_weights: (m,) Weight of each update in the mean, up to a common factor; 1 where
            the engine does not know it.
        read_losses: Computes `losses`.
        read_updates: Computes `updates`.
        head: Where the parameters of the output layer are in an update; all of it if unknown.
        durations: (m,) Seconds until the update of each participant was back; None where the engine
            does not know it.
        read_rms_losses: Computes `rms_losses`; None where the engine does not know it.
    """

    round: int
    selected: IntArray
    participated: IntArray
    step_sizes: FloatArray
    aggregation_weights: FloatArray
    read_losses: Callable[[], FloatArray]
    read_updates: Callable[[], Array]
    head: slice = field(default_factory=lambda: slice(None))
    durations: FloatArray | None = None
    read_rms_losses: Callable[[], FloatArray] | None = None

    @cached_property
    def losses(self) -> FloatArray:
        """(m,) l_k(w^t) of each participant, before it trained; NaN where unusable."""
        return self.read_losses()

    @cached_property
    def rms_losses(self) -> FloatArray:
        """(m,) Root mean square of the losses of each participant's samples, of w^t; NaN where
        unusable. `losses` where the engine does not know it."""
        return self.losses if self.read_rms_losses is None else self.read_rms_losses()

    @cached_property
    def updates(self) -> Array:
        """(m, P) w_k - w^t, the change of the model by each participant, flattened."""
        return self.read_updates()


@runtime_checkable
class Selector(Protocol):
    """Who trains next: a frozen dataclass of hyper-parameters with three methods.

    A selector never changes. What it remembers is a `State`, which the engine keeps, saves in
    checkpoints and passes in; each method returns a new state and leaves the given one as it was.

    In every round the engine calls `select`, trains the chosen clients, and calls `observe`.

    Some more methods are optional:

    `join(state, population) -> State`
        Called before `select` when clients have joined (they stand at the end of the population) or
        when their sizes became known. A selector without it starts over from `init` when a client
        joins. In the simulator, nobody joins.
    `questions(round, clients) -> Questions`
        What it will ask in a round, if so many clients are available. An engine can then say before
        the first round what a run will cost, and check that clients answer.
    `reasons(state, federation, chosen) -> Reasons`
        Called after `select`, with the state that it returned: why it chose these clients. It may
        repeat a question that was asked in this round, which is free, but not ask a new one, and
        draws nothing. The names `gain`, `runner_up` and `margin` are understood by
        `fedcor explain`: what a pick was worth, the other client that it beat, and by how much.
    `details(before, state, federation, chosen) -> Mapping[str, array]`
        Called after `reasons`, with the states before and after `select`: what there is to say of
        the round as a whole, as named lists of numbers of any length. The record keeps them.
        The same rules as for `reasons` hold.
    `phase(state) -> str`
        Called after `select`, with the state that it returned: what it is doing in this round, in
        a few words for the log, such as "warm-up 3 of 15: at random". Empty for its usual rule.

    Some attributes tell an engine more. `SelectorTraits` lists them; all are optional.

    `fedcor.testing.check_selector` tests that a selector keeps these rules.

    Example:
        Always the clients with the most data::

            @dataclass(frozen=True)
            class Largest:
                clients_per_round: int

                def init(self, population):
                    return {"sizes": population.sizes}

                def select(self, state, federation):
                    order = np.argsort(-state["sizes"][federation.available], kind="stable")
                    return federation.available[order[: self.clients_per_round]], state

                def observe(self, state, outcome):
                    return state
    """

    def init(self, population: Population) -> State:
        """The state before the first round. Called once per run; it must not draw at random."""
        ...

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """Choose who trains now. Called once per round.

        It may ask `federation` for losses, which is billed, and draw from `federation.rng`.

        Returns:
            (C,) ids of available clients in the order of choice, and the new state.
        """
        ...

    def observe(self, state: State, outcome: Outcome) -> State:
        """The state after the round, given who delivered and what they sent.

        Called once per round, after training, also when nobody delivered. It can ask nothing.
        """
        ...


@dataclass(frozen=True)
class SelectorTraits:
    """What an engine reads from a selector besides its methods: attributes, each with a default.

    Declare those that apply as fields or as class variables of your selector.

    Attributes:
        clients_per_round: C, the number of clients that it chooses, if it is fixed. Fewer are
            chosen when fewer are available.
        warmup: Rounds of uniform choice before the selector's own rule starts.
        candidates: How many clients it asks before it chooses, if it is fixed.
        replacement: Whether it may choose a client twice in a round. Such a client trains once and
            counts twice in the mean.
        needs_updates: Whether it reads the updates of single clients, which secure aggregation
            hides.
        needs_losses: Whether it reads the losses that clients send with their updates
            (`Outcome.losses`). On Flower, a run in which nobody ever sends one ends with an error.
        reads_rms_losses: Whether it reads `Outcome.rms_losses`. An experiment's clients on Flower
            then send them.
        optimiser: Name of the federated optimiser that it goes with. It aggregates where nobody
            says how.
    """

    clients_per_round: int | None = None
    warmup: int = 0
    candidates: int | None = None
    replacement: bool = False
    needs_updates: bool = False
    needs_losses: bool = False
    reads_rms_losses: bool = False
    optimiser: str = "fedavg"


def selector_traits(selector: Selector) -> SelectorTraits:
    """The traits of `selector`, with the default of each that it does not declare."""
    default = vars(SelectorTraits())
    return SelectorTraits(**{name: getattr(selector, name, default[name]) for name in default})


@dataclass(frozen=True)
class Questions:
    """What a selector asks in one round.

    Attributes:
        losses: How many clients it asks for the loss of the current model, beside those that are
            asked for a candidate's sake.
        candidates: How many selections it tries (`loss_changes`).
        adopted: Whether the candidate is then chosen, so that nobody trains twice.
        asked: How many clients are asked for the losses of the current model and of a candidate;
            None for everyone.
    """

    losses: int = 0
    candidates: int = 0
    adopted: bool = False
    asked: int | None = None


def planned_questions(selector: Selector, round: int, clients: int) -> Questions | None:
    """What `selector` will ask in a round with so many clients; None if it does not say.

    A subclass with a `select` of its own has to say it itself.
    """
    kind = type(selector).__mro__
    says = next((i for i, one in enumerate(kind) if "questions" in vars(one)), len(kind))
    selects = next((i for i, one in enumerate(kind) if "select" in vars(one)), 0)
    if says > selects:
        return None
    planned: Questions = selector.questions(round, clients)  # type: ignore[attr-defined]
    return planned


@dataclass(frozen=True)
class Delivery:
    """What a federated optimiser is given of a round: the model, and what came back.

    The mean and the single updates are computed when they are first read. Where an optimiser reads
    only the mean, it also works under secure aggregation.

    Attributes:
        round: t, the number of the round.
        model: (P,) w^t, the parameters of the global model, flattened. Read-only, as are all arrays
            of a delivery. Buffers, such as a running variance, are averaged by the engine.
        clients: (m,) Sorted ids of the clients that delivered, each once; m is at least 1.
        weights: (m,) a_k, the weight of each in the mean; they sum to 1.
        steps: (m,) Local steps of each; 1 where the engine does not know it.
        learning_rate: eta, of the local steps; 1 where the engine does not know it.
        read_updates: Computes `updates`.
        read_mean: Computes `mean`; `weights @ updates` unless it is given.
    """

    round: int
    model: Array
    clients: IntArray
    weights: FloatArray
    steps: IntArray
    learning_rate: float
    read_updates: Callable[[], Array]
    read_mean: Callable[[], Array] | None = None

    @cached_property
    def updates(self) -> Array:
        """(m, P) Delta_k = w_k - w^t, the change of the model by each client."""
        return self.read_updates()

    @cached_property
    def mean(self) -> Array:
        """(P,) sum_k a_k Delta_k, the weighted mean of the updates."""
        if self.read_mean is not None:
            return self.read_mean()
        weights = self.weights.astype(self.updates.dtype)
        mean: Array = weights @ self.updates
        return mean


@runtime_checkable
class Optimiser(Protocol):
    """How clients' updates become the next model: a frozen dataclass with two methods.

    Like a selector it never changes. What it remembers is a `State` of named arrays, which the
    engine keeps, saves in checkpoints and passes in.

    Two more methods are optional:

    `corrections(state, clients) -> (m, P) array`
        e_k, what each of `clients` adds to its gradient in every local step of this round:
        w <- w - eta (gradient + lambda w + mu (w - w^t) + e_k). It must not depend on who trains
        beside the client.
    `join(state, population) -> State`
        Called before `step` when clients have joined (they stand at the end of the population),
        when their sizes became known, or when rules let in others than before. In the simulator,
        none of it happens. Without it, the state must not depend on the number of clients or on
        their sizes.

    Some attributes tell an engine more. `OptimiserTraits` lists them; all are optional.

    `fedcor.testing.check_optimiser` tests that an optimiser keeps these rules.

    Example:
        Half of the way to the clients' mean::

            @dataclass(frozen=True)
            class HalfStep:
                def init(self, population, model):
                    return {}

                def step(self, state, delivery):
                    return delivery.model + 0.5 * delivery.mean, state
    """

    def init(self, population: Population, model: Array) -> State:
        """The state before the first round. `model` is w^0, (P,).

        A client of size 0 is not in the federation: rules exclude it, and it never delivers.
        """
        ...

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """The next model w^{t+1}, (P,), and the state after the round.

        It changes neither the given state nor the delivery: an engine also calls it for models that
        are only tried, and then drops what it returned. Not called when nobody delivered.
        """
        ...


@dataclass(frozen=True)
class OptimiserTraits:
    """What an engine reads from an optimiser besides its methods: attributes, each with a default.

    Attributes:
        weighted: Whether a client's weight in the mean is proportional to its data.
        proximal: mu of the proximal term mu/2 |w - w^t|^2 in local training; 0 for none.
        needs_updates: Whether it reads the updates of single clients, which secure aggregation
            hides.
        remembers: Whether its state holds an update of every client that was seen.
        extra_down: Further vectors of P numbers that each training client receives.
        extra_up: Further vectors of P numbers that each training client sends.
    """

    weighted: bool = False
    proximal: float = 0.0
    needs_updates: bool = False
    remembers: bool = False
    extra_down: int = 0
    extra_up: int = 0


def optimiser_traits(optimiser: Optimiser) -> OptimiserTraits:
    """The traits of `optimiser`, with the default of each that it does not declare."""
    default = vars(OptimiserTraits())
    return OptimiserTraits(**{name: getattr(optimiser, name, default[name]) for name in default})
