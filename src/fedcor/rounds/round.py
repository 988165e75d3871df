"""One round, the same on every engine: the questions of a selector, candidates, and the outcome.

`Round` is the `Federation` that a selector sees. It knows what was asked, what is known, and which
candidates were tried. How clients are reached is up to an engine, which is a subclass with three
verbs: ask clients for losses, have clients train, and make a model of their updates. A verb may
answer at once, as in the simulator and on Flower; or raise an exception, where the answer has yet
to be told (`fedcor.rounds.questions`). The selector is then asked again when it is.

A round may be tried several times, each time as a new `Round`. `next_step` says what follows from
an attempt:

    somebody delivered  model   last good model       attempts left    then
    ------------------  ------  --------------------  ---------------  -----------------------------
    yes                 usable  -                     -                ADOPT their updates
    either              bad     another one           some, and other  TRY_OTHERS: perhaps these
                                                      clients          clients are at fault
    either              bad     another one           none, or no      ROLL_BACK to it, and end the
                                                      other clients    round
    no                  -       none, or the same     some             TRY_OTHERS
    no                  -       none, or the same     none             GIVE_UP: an error, or, in the
                                                                       simulator, the model stays

A bad model is one that nobody can train from; see `fedcor.rounds.defence.model_health`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray, State
from fedcor.rounds.defence.model_health import Condition, Health, Signs, examine
from fedcor.rounds.ledger import CURRENT
from fedcor.rounds.selection import check_clients
from fedcor.rounds.state import Model, RoundState


@dataclass(frozen=True)
class Candidate(Generic[Model]):
    """A model that may become the next one.

    Attributes:
        model: The model.
        after: What the engine keeps if this model is adopted: the optimiser's state.
        version: Its number in this round; None if no client was ever sent it.
        losses: (N,) The clients' losses of it; NaN where unknown.
        asked: (N,) Which clients were asked for that loss.
    """

    model: Model
    after: Any
    version: int | None
    losses: FloatArray
    asked: BoolArray


@dataclass(frozen=True)
class Delivered:
    """What came of one attempt at a round.

    Attributes:
        chosen: (C,) The clients, as the selector named them.
        participants: (m,) Sorted clients whose update was accepted.
        weights: (m,) Their weights in the mean; they sum to 1.
        condition: The condition of the model that they trained from.
        health: What is known of its condition, for the next attempt or round.
    """

    chosen: IntArray
    participants: IntArray
    weights: FloatArray
    condition: Condition
    health: Health


class Step(Enum):
    """What follows from an attempt at a round."""

    ADOPT = "adopt"
    TRY_OTHERS = "try others"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"


def next_step(
    delivered: Delivered, *, can_return: bool, attempt: int, attempts: int, others: bool
) -> Step:
    """What follows from an attempt; see the table above.

    Args:
        delivered: What came of it.
        can_return: Whether there is a last good model, other than the one of this round.
        attempt: The number of the attempt, from 0.
        attempts: How many there may be.
        others: Whether clients can be reached that were not tried yet in this round.
    """
    left = attempt + 1 < attempts
    if delivered.condition is Condition.BAD and can_return:
        return Step.TRY_OTHERS if left and others else Step.ROLL_BACK
    if len(delivered.participants):
        return Step.ADOPT
    return Step.TRY_OTHERS if left else Step.GIVE_UP


def mean_weights(times: IntArray, sizes: IntArray | None) -> FloatArray:
    """(m,) weights in the mean, which sum to 1; `sizes` (m,) where data counts, else None."""
    weights = times.astype(np.float64)
    if sizes is not None:
        weights *= sizes
    return weights / weights.sum() if len(weights) else weights


class Round(ABC, Generic[Model]):
    """One attempt at a round: answers a selector's questions, and trains the clients it chose.

    Args:
        state: What the round starts from.
        weights: (N,) p_k, proportional to local data.
        available: Sorted ids of the clients that may be asked and chosen.
        rng: The random stream of the round.
        number: What error messages call the round, where that is not `state.round`.

    Attributes:
        before: The state that the round started from.
        unusable: Clients whose loss of w^t was asked for, and was no usable number.
        reachable: How many clients can be reached, those included who were tried in vain before.
        adopted_version: After `close`, the number of the candidate that became the model; `CURRENT`
            where the model stays, None where no client was ever sent the new one.
    """

    def __init__(
        self,
        state: RoundState[Model],
        *,
        weights: FloatArray,
        available: IntArray,
        rng: np.random.Generator,
        number: int | None = None,
    ) -> None:
        self.before, self.round, self.model = state, state.round, state.model
        self.weights, self.available, self.rng = weights, available, rng
        # A selector only reads them.
        self.available.flags.writeable = self.weights.flags.writeable = False
        self._number = state.round if number is None else number
        self._known, self._asked = state.known.copy(), np.zeros(len(weights), dtype=bool)
        self.unusable: set[int] = set()
        self.reachable = len(available)
        self.adopted_version: int | None = None
        # By the participants and their weights.
        self._candidates: dict[tuple[bytes, bytes], Candidate[Model]] = {}

    @abstractmethod
    def ask(self, version: int, model: Model, clients: IntArray) -> FloatArray:
        """(len(clients),) The loss of `model` of each client; NaN where no usable answer came.

        Args:
            version: `CURRENT`, or the number of a candidate of this round.
            model: The model of that version.
            clients: Sorted; each is asked at most once for a version.
        """

    @abstractmethod
    def train(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """Have those of `selection` train who have not yet trained in this round.

        Returns:
            The clients of `selection` whose update was accepted, sorted, and their weights in the
            mean. A client that is in `selection` twice counts twice.
        """

    @abstractmethod
    def aggregate(self, participants: IntArray, weights: FloatArray) -> tuple[Model, Any]:
        """The model that the updates of these clients make, and the optimiser's state after it."""

    @abstractmethod
    def start_over(self, model: Model) -> Any:
        """The optimiser's state before the first round, for a return to the last good `model`."""

    @abstractmethod
    def past_norms(self, *, wrong: bool, alone: bool) -> State:
        """The lengths of updates for the next round or attempt; see `UpdateFilter.past`."""

    @property
    @abstractmethod
    def refused_clients(self) -> Collection[int]:
        """Clients whose update was refused for its numbers."""

    def same_model(self, first: Model, second: Model) -> bool:
        """Whether two models are equal."""
        return first is second

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; see `Federation.losses`."""
        clients = check_clients(clients, self.available, self._number)
        unasked = np.unique(clients[np.isnan(self._known[clients]) & ~self._asked[clients]])
        if len(unasked):
            self._known[unasked] = self.ask(CURRENT, self.model, unasked)
            self._asked[unasked] = True  # clients that do not answer are not asked again
        return self._known[clients]

    def known_losses(self) -> FloatArray:
        """(N,) l_k(w^t) of all clients that have reported it, else NaN. Asks nothing."""
        return self._known.copy()

    def loss_changes(self, selection: IntArray, clients: IntArray | None = None) -> FloatArray:
        """(N,) change of each loss if `selection` trained; see `Federation.loss_changes`."""
        changes = np.full(len(self.weights), np.nan)
        wanted = self.available if clients is None else np.unique(clients)
        before = self.losses(wanted)
        participants, weights = self.train(self._checked(selection))
        if len(participants):
            key = (participants.tobytes(), weights.tobytes())
            if key not in self._candidates:
                version = len(self._candidates) + 1
                self._candidates[key] = self._candidate(participants, weights, version)
            candidate = self._candidates[key]
            new = wanted[~candidate.asked[wanted]]
            if len(new) and candidate.version is not None:
                candidate.losses[new] = self.ask(candidate.version, candidate.model, new)
                candidate.asked[new] = True
            changes[wanted] = candidate.losses[wanted] - before
        return changes

    def deliver(self, chosen: IntArray) -> Delivered:
        """Train the chosen clients. A training that was done for a question is not repeated."""
        chosen = self._checked(chosen)
        participants, weights = self.train(chosen)
        usable = np.flatnonzero(~np.isnan(self._known)).tolist()
        delivered, refused = participants.tolist(), self.refused_clients
        signs = Signs(delivered, refused, usable, self.unusable, self.reachable)
        condition, health = examine(self.before.health, signs)
        return Delivered(chosen, participants, weights, condition, health)

    @property
    def can_return(self) -> bool:
        """Whether there is a last good model, other than the one of this round."""
        good = self.before.good
        return good is not None and not self.same_model(good, self.model)

    def close(self, delivered: Delivered, step: Step, selector: State) -> RoundState[Model]:
        """End the round: what the next one starts from, but for what the engine adds.

        Args:
            delivered: What came of this attempt.
            step: What follows from it. With `GIVE_UP`, the model stays as it is.
            selector: The selector's state.
        """
        returns = step is Step.ROLL_BACK
        adopted = self._last_good() if returns else self._adopted(delivered)
        good = self.model if delivered.condition is Condition.GOOD else self.before.good
        self.adopted_version = adopted.version
        # Where updates of the last good model are usable and losses are not, these say nothing.
        deaf = step is Step.ADOPT and delivered.condition is Condition.BAD
        return replace(
            self.retry(delivered),
            health=Health() if deaf else delivered.health,
            round=self.round + 1,
            model=adopted.model,
            known=adopted.losses,
            selector=selector,
            optimiser=adopted.after,
            good=good,
        )

    def retry(self, delivered: Delivered, *, last: bool = False) -> RoundState[Model]:
        """What another attempt at this round starts from; `last` if it is the last one.

        Nobody delivered anything usable, and there is no model to blame: then perhaps the lengths
        that are thought to be usual are wrong. Before the last attempt, they are forgotten.
        """
        bad = delivered.condition is Condition.BAD
        wrong = bad and not self.can_return and not len(delivered.participants)
        norms, health = self.past_norms(wrong=wrong, alone=last), delivered.health
        if bad:  # those who find the model bad still do
            doubters = {*self.before.health.doubters, *self.refused_clients, *self.unusable}
            health = replace(health, doubters=frozenset(doubters))
        return replace(self.before, known=self._known, norms=norms, health=health)

    def _adopted(self, delivered: Delivered) -> Candidate[Model]:
        """The model of the next round, of the updates that were delivered."""
        participants, weights = delivered.participants, delivered.weights
        if not len(participants):
            # Nobody delivered: the model stays, and so does what is known of it.
            memory = self.before.optimiser
            return Candidate(self.model, memory, CURRENT, self._known, self._asked)
        candidate = self._candidates.get((participants.tobytes(), weights.tobytes()))
        return candidate or self._candidate(participants, weights, None)

    def _last_good(self) -> Candidate[Model]:
        """The model to return to. The optimiser's memory may be bad too, so it starts over."""
        good = self.before.good
        assert good is not None
        return self._unknown(good, self.start_over(good), None)

    def _candidate(
        self, participants: IntArray, weights: FloatArray, version: int | None
    ) -> Candidate[Model]:
        model, after = self.aggregate(participants, weights)
        return self._unknown(model, after, version)

    def _unknown(self, model: Model, after: Any, version: int | None) -> Candidate[Model]:
        """A model of which no loss is known."""
        clients = len(self.weights)
        nothing, nobody = np.full(clients, np.nan), np.zeros(clients, dtype=bool)
        return Candidate(model, after, version, nothing, nobody)

    def _checked(self, clients: IntArray) -> IntArray:
        return check_clients(clients, self.available, self._number)
