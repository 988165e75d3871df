"""One round of a simulated federation: the `Federation` that a selector sees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedcor.core.rng import stream
from fedcor.core.types import (
    Array,
    BoolArray,
    FloatArray,
    IntArray,
    Optimiser,
    Outcome,
    State,
    optimiser_traits,
)
from fedcor.rounds.aggregation import find_corrections, init_optimiser, members
from fedcor.rounds.defence.model_health import Condition, Signs, examine
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.ledger import ANSWER_BYTES, CURRENT, Ledger
from fedcor.rounds.loss_screening import LossNoise, screen_losses
from fedcor.rounds.selection import check_clients
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.clock import Speeds
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import as_tensor
from fedcor.simulation.faults import Attendance, Faults
from fedcor.simulation.server_step import UpdateFilter, next_model, parameters_of
from fedcor.simulation.state import SimulationState

HONEST = Byzantine()


class _Candidate(NamedTuple):
    """A model that may become the next one."""

    model: Tensor
    memory: State  # of the optimiser, if this model is adopted
    version: int | None  # in the ledger; None if no client received it
    losses: FloatArray  # (N,) NaN where unknown
    asked: BoolArray  # (N,) which clients were asked for that loss


class SimulatedRound:
    """One round of a simulated federation: answers questions, bills them, and trains.

    It is the `Federation` that the selector sees in this round; `close` ends it.

    Args:
        engine: Trains and evaluates.
        optimiser: Aggregates the clients' updates.
        faults: Which clients are unavailable, drop out, or are slow.
        learning_rate: The clients' learning rate in this round.
        seed: Random seed for everything.
        state: The state after the previous round.
        eligible: (N,) Which clients may be asked and chosen; None for all.
        defence: How the server defends itself against faulty and Byzantine clients.
        byzantine: Which clients send false updates or losses, and how.
        speeds: How fast clients are; None without a clock.
        goal: How many trainings are enough; None for all.
        noise: Noise on the losses that clients report.

    Attributes:
        attendance: Which clients can be reached, fail, or are late; and the seconds so far.
        ledger: What this round has cost so far.
        refused: How many answers and updates were unusable numbers.
        results: The accepted results of the clients.
        rolled_back: Whether the round ended with a return to the last good model.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        optimiser: Optimiser,
        faults: Faults,
        learning_rate: float,
        seed: int,
        state: SimulationState,
        eligible: BoolArray | None = None,
        defence: Defence | None = None,
        byzantine: Byzantine = HONEST,
        speeds: Speeds | None = None,
        goal: int | None = None,
        noise: LossNoise | None = None,
    ) -> None:
        self._noise, self._seed = noise or LossNoise(), seed
        self._engine, self._optimiser = engine, optimiser
        self._members = members(engine.population, eligible)
        self._traits = optimiser_traits(optimiser)
        self.round, self.learning_rate = state.round, learning_rate
        self.weights, clients = engine.population.weights, engine.population.count
        self.rng = stream(seed, "select", self.round)
        self.attendance = Attendance(
            faults,
            seed,
            self.round,
            clients=clients,
            local_steps=engine.local_training.local_steps,
            eligible=eligible,
            speeds=speeds,
            goal=goal,
        )
        self.available, self._steps = self.attendance.available, self.attendance.steps
        # A selector only reads them.
        self.available.flags.writeable = self.weights.flags.writeable = False
        self._model, self._known = state.model, state.known.copy()
        self._memory, self._before = state.optimiser, state
        self._byzantine, self._is_byzantine = byzantine, byzantine.who(seed, clients)
        self._last_change = None if state.before is None else state.model - state.before
        self.ledger = Ledger(clients, engine.model_bytes, state.holders)
        self.refused = 0
        self._asked = np.zeros(clients, dtype=bool)
        limits = (Defence() if defence is None else defence).norm_limits
        # All local steps count: the fewer a slow client takes, the longer they are on average.
        step_size = learning_rate * engine.local_training.local_steps
        self.results = UpdateFilter(
            limits, state.norms, state.model, engine.vector.trained, step_size
        )
        self.rolled_back = False
        self._unusable: set[int] = set()  # clients whose loss of w^t, asked for, was unusable
        self._asked_to_train: set[int] = set()
        self._candidates: dict[tuple[bytes, bytes], _Candidate] = {}  # by participants and weights

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; see `Federation.losses`."""
        clients = check_clients(clients, self.available, self.round)
        unasked = np.unique(clients[np.isnan(self._known[clients]) & ~self._asked[clients]])
        self._known[unasked] = self._ask(CURRENT, self._model, unasked)
        self._asked[unasked] = True  # clients that do not answer are not asked again this round
        return self._known[clients]

    def known_losses(self) -> FloatArray:
        """(N,) l_k(w^t) of all clients that have reported it, else NaN. Asks nothing."""
        return self._known.copy()

    def loss_changes(self, selection: IntArray, clients: IntArray | None = None) -> FloatArray:
        """(N,) change of each loss if `selection` trained; see `Federation.loss_changes`."""
        changes = np.full(len(self.weights), np.nan)
        wanted = self.available if clients is None else np.unique(clients)
        before = self.losses(wanted)
        participants, weights = self._train(selection)
        if len(participants):
            key = (participants.tobytes(), weights.tobytes())
            if key not in self._candidates:
                model, memory = self._aggregate(participants, weights)
                version = self.ledger.new_version()
                self._candidates[key] = self._candidate(model, memory, version)
            candidate = self._candidates[key]
            new = wanted[~candidate.asked[wanted]]
            if len(new) and candidate.version is not None:
                candidate.losses[new] = self._ask(candidate.version, candidate.model, new)
                candidate.asked[new] = True
            changes[wanted] = candidate.losses[wanted] - before
        return changes

    def _candidate(self, model: Tensor, memory: State, version: int | None) -> _Candidate:
        """A model of which no loss is known."""
        clients = len(self.weights)
        unknown, nobody = np.full(clients, np.nan), np.zeros(clients, dtype=bool)
        return _Candidate(model, memory, version, unknown, nobody)

    def close(self, chosen: IntArray, state: State) -> tuple[SimulationState, Outcome]:
        """Train the chosen clients, aggregate, and end the round.

        A training that was done to answer a question is not repeated.

        Args:
            chosen: (C,) Clients that train, as the selector named them.
            state: The selector's state.

        Returns:
            What the next round starts from, and what the selector observes.
        """
        chosen = check_clients(chosen, self.available, self.round)
        participants, weights = self._train(chosen)
        condition, health = examine(self._before.health, self._signs(participants))
        good = self._model if condition is Condition.GOOD else self._before.good
        if condition is Condition.BAD and good is not None and not good.equal(self._model):
            # What was trained from a bad model is no use.
            self.rolled_back, participants, weights = True, participants[:0], weights[:0]
        # Nobody delivered anything usable, and there is no model to blame: perhaps the lengths that
        # are thought to be usual are wrong.
        nothing = not self.rolled_back and not len(participants)
        norms = self.results.past(self.round, wrong=nothing and condition is Condition.BAD)
        adopted = self._adopt(participants, weights)
        outcome = self._outcome(chosen, participants)
        self.ledger.close_round(adopted.version)
        after = SimulationState(
            round=self.round + 1,
            model=adopted.model,
            known=adopted.losses,
            holders=self.ledger.holders(),
            selector=state,
            optimiser=adopted.memory,
            norms=norms,
            good=good,
            health=health,
            turns=self._before.turns,
            before=self._model if self._byzantine.copies else None,
            clock=self._before.clock + (self.attendance.seconds or 0.0),
        )
        return after, outcome

    def _adopt(self, participants: IntArray, weights: FloatArray) -> _Candidate:
        """The model of the next round."""
        if self.rolled_back:
            return self._last_good()
        if not len(participants):
            # Nobody delivered: the model stays, and so does what is known of it.
            return _Candidate(self._model, self._memory, CURRENT, self._known, self._asked)
        key = (participants.tobytes(), weights.tobytes())
        if key in self._candidates:
            return self._candidates[key]
        model, memory = self._aggregate(participants, weights)
        return self._candidate(model, memory, None)

    def _outcome(self, chosen: IntArray, participants: IntArray) -> Outcome:
        """What the selector observes."""
        sizes = self._engine.population.sizes[participants].astype(np.float64)
        return Outcome(
            self.round,
            chosen,
            participants,
            step_sizes=self.learning_rate * self._steps[participants].astype(np.float64),
            aggregation_weights=sizes if self._traits.weighted else np.ones(len(participants)),
            read_losses=lambda: self._reported(CURRENT, self._model, participants),
            read_updates=lambda: self._updates(participants),
            head=self._engine.vector.head,
            durations=self.attendance.durations(participants),
            # One noisy number each: noise is sized for that.
            read_rms_losses=None if self._noise.sigma else lambda: self._reported_rms(participants),
        )

    def _signs(self, participants: IntArray) -> Signs:
        """How the clients fared with the model of this round."""
        refused = [client for clients in self.results.refused.values() for client in clients]
        usable = np.flatnonzero(~np.isnan(self._known)).tolist()
        reachable = len(self.available)
        return Signs(participants.tolist(), refused, usable, self._unusable, reachable)

    def _last_good(self) -> _Candidate:
        """The model to return to. The optimiser's memory may be bad too, so it starts over."""
        good, engine = self._before.good, self._engine
        assert good is not None
        model = parameters_of(good, engine.vector.trained)
        memory = init_optimiser(self._optimiser, self._members, model)
        return self._candidate(good, memory, None)

    def _ask(self, version: int, model: Tensor, clients: IntArray) -> FloatArray:
        """Each client's loss of `model`; NaN for unusable answers, and where none came in time."""
        answers = np.full(len(clients), np.nan)
        sent = self.ledger.send(version, clients, self.attendance.receives)
        batches = self._engine.evaluation_batches[clients]
        answered = self.attendance.answered(clients, sent, batches, ANSWER_BYTES)
        answers[answered] = self._reported(version, model, clients[answered])
        if version == CURRENT:
            self._unusable.update(clients[answered & np.isnan(answers)].tolist())
        self.ledger.question(asked=len(clients), answered=self.attendance.replied(clients))
        return answers

    def _reported(self, version: int, model: Tensor, clients: IntArray) -> FloatArray:
        """The losses that clients report of `model`; NaN for unusable numbers.

        One answer each per model, however often it is read.
        """
        losses = self._engine.losses(model, clients)
        if self._noise.sigma:
            everyone = np.zeros(len(self.weights))
            everyone[clients] = np.where(np.isfinite(losses), losses, np.nan)
            rng = stream(self._seed, "loss noise", self.round, version)
            losses = self._noise.add(everyone, rng)[clients]
        return self._received(losses, clients)

    def _reported_rms(self, clients: IntArray) -> FloatArray:
        """The root mean square losses that clients report of the current model."""
        return self._received(self._engine.rms_losses(self._model, clients), clients)

    def _received(self, losses: FloatArray, clients: IntArray) -> FloatArray:
        """The losses as the server receives them: NaN for unusable numbers, which are counted."""
        clean, refused = screen_losses(
            self._byzantine.reported_losses(losses, self._is_byzantine[clients])
        )
        self.refused += refused
        return clean

    def _train(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """The clients whose result was accepted, sorted, and their weights in the mean."""
        selection = check_clients(selection, self.available, self.round)
        clients, times = np.unique(selection, return_counts=True)
        new = [k for k in clients.tolist() if k not in self._asked_to_train]
        asked = np.array(new, dtype=np.int64)
        self._asked_to_train.update(asked.tolist())
        model_bytes = self.ledger.send(CURRENT, clients, self.attendance.receives)
        returned = int(self.attendance.trains[asked].sum())
        vector_bytes = 4 * self._engine.vector.trained
        self.ledger.vectors(
            sent=len(asked) * self._traits.extra_down,
            received=returned * self._traits.extra_up,
            vector_bytes=vector_bytes,
        )
        self.ledger.training(returned)  # late ones included
        back = self.attendance.trained(
            clients,
            times,
            model_bytes + self._traits.extra_down * vector_bytes,
            self._engine.model_bytes + self._traits.extra_up * vector_bytes,
        )
        asked = np.intersect1d(asked, clients[back])
        if len(asked):
            ids = asked.tolist()
            results = self._engine.train(
                self._model,
                ids,
                self.round,
                self.learning_rate,
                steps=self._steps[asked].tolist(),
                corrections=self._corrections(asked),
            )
            self._falsify(asked, results)
            self.results.add(ids, results)
            self.refused += sum(k not in self.results for k in ids)
        accepted = [k in self.results for k in clients.tolist()]
        delivered = back & np.array(accepted, dtype=bool)
        weights = times[delivered].astype(np.float64)
        if self._traits.weighted:
            weights *= self._engine.population.sizes[clients[delivered]]
        return clients[delivered], weights / weights.sum() if len(weights) else weights

    def _falsify(self, clients: IntArray, results: Tensor) -> None:
        """Replace the updates of Byzantine clients in place. Float buffers stay as trained."""
        trained = self._engine.vector.trained
        model = self._model[:trained]
        last = None if self._last_change is None else self._last_change[:trained]
        for row in np.flatnonzero(self._is_byzantine[clients]).tolist():
            sent = self._byzantine.sent_update(results[row, :trained] - model, last)
            results[row, :trained] = model + sent

    def _corrections(self, clients: IntArray) -> Tensor | None:
        """What each client adds to its gradients, if the optimiser says so."""
        size = self._engine.vector.trained
        corrections = find_corrections(self._optimiser, self._memory, clients, size, self.round)
        return None if corrections is None else as_tensor(corrections).to(self._model.device)

    def _updates(self, participants: IntArray) -> Array:  # (m, P), without buffers
        trained = self._engine.vector.trained
        changes = self.results.of(participants)[:, :trained] - self._model[:trained]
        updates: Array = changes.cpu().numpy()
        return updates

    def _aggregate(self, participants: IntArray, weights: FloatArray) -> tuple[Tensor, State]:
        """The optimiser's next model, and its state after this round."""
        return next_model(
            self._optimiser,
            self._memory,
            self._model,
            self.results.of(participants),
            self._engine.vector.trained,
            round=self.round,
            clients=participants,
            weights=weights,
            steps=self._steps[participants],
            learning_rate=self.learning_rate,
        )
