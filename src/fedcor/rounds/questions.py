"""A round whose answers come from outside: it says what it needs, and waits until it is told.

`AskedRound` is a `Round` that does no input or output. Where it needs an answer, it raises
`Pending`, which says what is wanted. Once the answer is told, the same call is made again. A round
keeps all answers, so a selector that is asked again from the start finds them, in the same order:
selectors are pure, and the random stream of a round begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import (
    Array,
    Delivery,
    FloatArray,
    IntArray,
    Optimiser,
    Outcome,
    Population,
    State,
)
from fedcor.rounds.aggregation import init_optimiser, read_only, take_step
from fedcor.rounds.defence.update_norms import PARTS
from fedcor.rounds.ledger import CURRENT, Ledger
from fedcor.rounds.loss_screening import screen_losses
from fedcor.rounds.model_arrays import Arrays, Layout, numbers_fault, shape_fault
from fedcor.rounds.round import Delivered, Round, mean_weights
from fedcor.rounds.state import RoundState
from fedcor.rounds.update_filter import NOT_FINITE, ArrayChanges, UpdateFilter

MALFORMED = "malformed"
Kind = Literal["losses", "train", "aggregate", "test"]


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a round needs next.

    Attributes:
        kind: "losses" of a model; that clients "train" from it; that their models are put together
            ("aggregate"); how good the new model is ("test").
        clients: (m,) Sorted ids of the clients that are asked, or whose models are put together.
        model: The model that is evaluated, trained from, or tested.
        trial: Whether the answer is for a model that may be dropped.
        enough: How many of `clients` suffice.
        weights: (m,) Of the clients in the mean, which is wanted; None for other kinds.
    """

    kind: Kind
    clients: IntArray
    model: Arrays
    trial: bool = False
    enough: int = 0
    weights: FloatArray | None = None


@dataclass(frozen=True)
class Trained:
    """What one client sent after its training.

    Attributes:
        arrays: Its model, by the names of its arrays.
        fault: Why its model could not be read; empty if it could.
        loss: Its loss of the model that it trained from; NaN where it is unknown.
        rms_loss: Root mean square of its samples' losses; `loss` where it is unknown.
        steps: Local steps; 1 where it is unknown.
        seconds: Until its model was back; NaN where it is unknown.
    """

    arrays: Arrays
    fault: str = ""
    loss: float = np.nan
    rms_loss: float = np.nan
    steps: int = 1
    seconds: float = np.nan


@dataclass(frozen=True)
class Answer:
    """What came of a question.

    Attributes:
        losses: Client -> its loss.
        trained: Client -> what it sent.
        failures: Client -> why it sent nothing usable. A client that is nowhere did not reply.
        model: The mean of the clients' models.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    trained: Mapping[int, Trained] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    model: Arrays = field(default_factory=dict)


class Pending(BaseException):
    """A question is open. No `except Exception` in a selector may stop it on its way."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted.kind)
        self.wanted = wanted


@dataclass(frozen=True)
class RoundTerms:
    """What all rounds of a run have in common.

    Attributes:
        population: Everyone.
        layout: Which arrays of the model an optimiser works on.
        optimiser: Puts the updates together; None where the answer to a question does.
        seed: Of the random streams.
        weighted: Whether a client's weight in the mean is proportional to its data.
    """

    population: Population
    layout: Layout
    optimiser: Optimiser | None
    seed: int
    weighted: bool


class AskedRound(Round[Arrays]):
    """One attempt at a round that asks, and waits for what it is told.

    Args:
        terms: What all rounds of the run have in common.
        state: What the round starts from.
        available: Sorted ids of the clients that may be asked and chosen.
        attempt: The number of the attempt, from 0.
        accepts: Judges the lengths of updates.
        learning_rate: Of local training; NaN where it is unknown.
        enough: How many trained models suffice; None for all that are asked.

    Attributes:
        ledger: What the round has cost so far.
        faults: Clients that failed -> whether they replied.
        usable: Clients that sent something usable.
        reasons: Client -> why it failed.
        refused: How many answers and updates were unusable.
        delivering: Whether the clients were chosen, so that training is no trial.
    """

    def __init__(
        self,
        terms: RoundTerms,
        state: RoundState[Arrays],
        available: IntArray,
        *,
        attempt: int,
        accepts: UpdateFilter,
        learning_rate: float,
        enough: int | None,
    ) -> None:
        # The first attempt draws as the simulator does; a later one may choose differently.
        self._stream = (state.round, attempt) if attempt else (state.round,)
        super().__init__(
            state,
            weights=terms.population.weights,
            available=available,
            rng=stream(terms.seed, "select", *self._stream),
        )
        self._terms, self._layout, self.filter = terms, terms.layout, accepts
        self._rate, self._enough = learning_rate, enough
        model_bytes = sum(array.nbytes for array in self.model.values())
        self.ledger = Ledger(terms.population.count, model_bytes, state.holders)
        self.faults: dict[int, bool] = {}
        self.usable: set[int] = set()
        self.reasons: dict[int, str] = {}
        self.refused = 0
        self.delivering = False
        self._open: Wanted | None = None
        self._answer: Answer | None = None
        self._asked_to_train: set[int] = set()
        self._trained: dict[int, Trained] = {}
        self._updates: dict[int, Array] = {}  # client -> (P,)

    def restart(self) -> None:
        """Begin the random stream anew, before the selector is asked again."""
        self.rng = stream(self._terms.seed, "select", *self._stream)

    def tell(self, answer: Answer) -> None:
        """The answer to the question that is open. The call that raised `Pending` finds it."""
        self._answer = answer

    def ask(self, version: int, model: Arrays, clients: IntArray) -> FloatArray:
        """The loss of each client; see `Round.ask`."""
        trial = version != CURRENT
        answer = self._told(Wanted("losses", clients, model, trial, len(clients)))
        losses = np.array([answer.losses.get(client, np.nan) for client in clients.tolist()])
        replied = np.array([k in answer.losses for k in clients.tolist()], dtype=bool)
        alive = np.zeros(len(self.weights), dtype=bool)
        alive[clients[replied]] = True
        self.ledger.send(version, clients, alive)
        self.ledger.question(asked=len(clients), answered=int(replied.sum()))
        clean, _ = screen_losses(losses)
        self._count(answer, clients, set(clients[~np.isnan(clean)].tolist()))
        for client in clients[replied & np.isnan(clean)].tolist():
            self._fail(client, f"its loss is {answer.losses[client]}", replied=True)
            self.refused += 1
            if version == CURRENT:
                self.unusable.add(client)
        return clean

    def train(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """Who delivered, and their weights; see `Round.train`."""
        clients, times = np.unique(selection, return_counts=True)
        new = np.array([k for k in clients.tolist() if k not in self._asked_to_train], np.int64)
        if len(new):
            enough = len(new) if self._enough is None else min(self._enough, len(new))
            trial = not self.delivering
            self._take(self._told(Wanted("train", new, self.model, trial, enough)), new, enough)
        accepted = np.array([k in self._updates for k in clients.tolist()], dtype=bool)
        participants = clients[accepted]
        sizes = self._terms.population.sizes[participants] if self._terms.weighted else None
        return participants, mean_weights(times[accepted], sizes)

    def aggregate(self, participants: IntArray, weights: FloatArray) -> tuple[Arrays, State]:
        """The next model, and the optimiser's state after it."""
        optimiser, state = self._terms.optimiser, self.before.optimiser
        if optimiser is None:
            trial, many = not self.delivering, len(participants)
            wanted = Wanted("aggregate", participants, self.model, trial, many, weights)
            return self._told(wanted).model, {}
        delivery = Delivery(
            self.round,
            read_only(self._layout.flatten(self.model)),
            read_only(participants),
            read_only(weights),
            read_only(self._steps(participants)),
            1.0 if np.isnan(self._rate) else self._rate,
            read_updates=lambda: read_only(self._rows(participants)),
        )
        vector, state = take_step(optimiser, state, delivery)
        stepped = self._layout.unflatten(vector)
        plain = {
            name: self._mean(name, participants, weights)
            for name in self.model
            if name not in stepped
        }
        return {name: {**stepped, **plain}[name] for name in self.model}, state

    def start_over(self, model: Arrays) -> State:
        """The optimiser's state before the first round."""
        if self._terms.optimiser is None:
            return {}
        vector = self._layout.flatten(model)
        return init_optimiser(self._terms.optimiser, self._terms.population, vector)

    def past_norms(self, *, wrong: bool, alone: bool) -> State:
        """The lengths of updates for the next round or attempt."""
        return self.filter.past(self.round, wrong=wrong, alone=alone)

    @property
    def refused_clients(self) -> Collection[int]:
        """Clients whose update was refused for its numbers: perhaps the model is at fault."""
        refused = self.filter.refused.items()
        return [client for why, clients in refused if why != MALFORMED for client in clients]

    @property
    def tried(self) -> set[int]:
        """Everyone who was asked to train."""
        return self._asked_to_train

    def outcome(self, delivered: Delivered, participants: IntArray) -> Outcome:
        """What the selector observes."""
        sent = [self._trained[client] for client in participants.tolist()]
        seconds = np.array([one.seconds for one in sent])
        losses, _ = screen_losses(np.array([one.loss for one in sent]))
        rms, _ = screen_losses(np.array([one.rms_loss for one in sent]))
        rate = 1.0 if np.isnan(self._rate) else self._rate
        sizes = self._terms.population.sizes[participants].astype(np.float64)
        return Outcome(
            self.round,
            delivered.chosen,
            participants,
            step_sizes=rate * self._steps(participants).astype(np.float64),
            aggregation_weights=sizes if self._terms.weighted else np.ones(len(participants)),
            read_losses=lambda: losses,
            read_rms_losses=lambda: np.where(np.isnan(rms), losses, rms),
            read_updates=lambda: self._rows(participants),
            head=self._layout.head,
            durations=seconds if np.isfinite(seconds).any() else None,
        )

    def same_model(self, first: Arrays, second: Arrays) -> bool:
        """Whether two models are equal."""
        return all(np.array_equal(first[name], second[name], equal_nan=True) for name in first)

    def _told(self, wanted: Wanted) -> Answer:
        """The answer to a question; raises `Pending` where it has yet to come."""
        answer, self._answer, asked = self._answer, None, self._open
        if answer is None:
            self._open = wanted
            raise Pending(wanted)
        assert asked is not None
        if asked.kind != wanted.kind or not np.array_equal(asked.clients, wanted.clients):
            raise FedcorError(
                f"round {self.round}: asked again, the selector asks other clients than before; it "
                "must draw from federation.rng alone, and keep nothing but its state"
            )
        return answer

    def _take(self, answer: Answer, asked: IntArray, enough: int) -> None:
        """Judge what clients sent after training, and keep what is accepted."""
        self._asked_to_train.update(asked.tolist())
        replied = np.array([client in answer.trained for client in asked.tolist()], dtype=bool)
        alive = np.zeros(len(self.weights), dtype=bool)
        alive[asked[replied]] = True
        self.ledger.send(CURRENT, asked, alive)
        self.ledger.training(int(replied.sum()))
        sound: dict[int, Trained] = {}
        for client, sent in sorted(answer.trained.items()):
            why, fault = self._fault(sent)
            if fault:
                self.filter.refuse(why, [client])
                self._refuse(client, fault)
            else:
                sound[client] = sent
        changes, start = ArrayChanges(self.model, self._layout), self._layout.flatten(self.model)
        lengths = [changes.lengths(sent.arrays) for sent in sound.values()]
        accepted = self.filter.judge(list(sound), np.array(lengths).reshape(-1, PARTS))
        for client, sent in sound.items():
            if client not in accepted:
                ratio = self.filter.too_long.get(client)
                far = "not finite" if ratio is None else f"{ratio:.3g} times as long as usual"
                self._refuse(client, f"its update is {far}")
                continue
            if client in self.filter.clipped:
                factors = accepted[client].tolist()
                sent = replace(sent, arrays=changes.scaled(sent.arrays, factors))
            self._trained[client] = sent
            self._updates[client] = self._layout.flatten(sent.arrays) - start
        late = replied.sum() >= enough  # then nobody waits for the others, and nobody blames them
        self._count(answer, asked[:0] if late else asked, set(accepted))

    def _fault(self, sent: Trained) -> tuple[str, str]:
        """What is wrong with a client's model, in a word and in a sentence; empty if nothing is."""
        arrays = sent.arrays
        if sent.fault or arrays.keys() != self.model.keys():
            return MALFORMED, sent.fault or "its arrays have other names than the model's"
        for name, like in self.model.items():
            if fault := shape_fault(arrays[name], like):
                return MALFORMED, f"{name} {fault}"
            if fault := numbers_fault(arrays[name], like):
                return NOT_FINITE, f"{name} {fault}"
        return "", ""

    def _refuse(self, client: int, fault: str) -> None:
        self.refused += 1
        self._fail(client, fault, replied=True)

    def _count(self, answer: Answer, asked: IntArray, usable: set[int]) -> None:
        """Note who failed: those who say so, and those of `asked` who did not reply."""
        self.usable |= usable
        for client, why in answer.failures.items():
            self._fail(client, why, replied=True)
        replied = {*answer.losses, *answer.trained, *answer.failures}
        for client in asked.tolist():
            if client not in replied:
                self._fail(client, "no reply", replied=False)

    def _fail(self, client: int, why: str, *, replied: bool) -> None:
        self.faults[client] = replied and self.faults.get(client, True)
        self.reasons[client] = why

    def _rows(self, clients: IntArray) -> Array:
        """(m, P) updates."""
        rows = [self._updates[client] for client in clients.tolist()]
        width = sum(int(np.prod(shape)) for _, shape, _ in self._layout.parts)
        return np.array(rows, dtype=self._layout.dtype).reshape(len(rows), width)

    def _steps(self, clients: IntArray) -> IntArray:
        return np.array([self._trained[client].steps for client in clients.tolist()], np.int64)

    def _mean(self, name: str, clients: IntArray, weights: FloatArray) -> Array:
        """The mean of an array that no optimiser sees; whole numbers are rounded."""
        like = self.model[name]
        wide = np.float64 if like.dtype.kind == "f" else np.int64
        rows = [self._trained[client].arrays[name] for client in clients.tolist()]
        with np.errstate(invalid="ignore"):  # of infinite numbers that stay as they are
            changes = np.stack([row.astype(wide) - like.astype(wide) for row in rows])
        mean = np.tensordot(weights, np.where(np.isfinite(changes), changes, 0), axes=1)
        if like.dtype.kind == "f":
            return np.asarray(like + mean).astype(like.dtype)
        return np.asarray(like.astype(wide) + np.rint(mean).astype(wide)).astype(like.dtype)
