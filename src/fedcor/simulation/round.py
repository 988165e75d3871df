"""One round of a simulated federation: clients that answer, train, fail, lie and are slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

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
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.ledger import ANSWER_BYTES, CURRENT, Ledger
from fedcor.rounds.loss_screening import LossNoise, screen_losses
from fedcor.rounds.round import Round, Step, mean_weights, next_step
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.clock import Speeds
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import as_tensor
from fedcor.simulation.faults import Attendance, Faults
from fedcor.simulation.server_step import TrainedModels, next_model, parameters_of
from fedcor.simulation.state import SimulationState

HONEST = Byzantine()


class SimulatedRound(Round[Tensor]):
    """One round of a simulated federation: answers questions, bills them, and trains.

    It is the `Federation` that the selector sees in this round; `finish` ends it.

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
        results: The accepted models of the clients.
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
        clients = engine.population.count
        self.attendance = Attendance(
            faults,
            seed,
            state.round,
            clients=clients,
            local_steps=engine.local_training.local_steps,
            eligible=eligible,
            speeds=speeds,
            goal=goal,
        )
        super().__init__(
            state,
            weights=engine.population.weights,
            available=self.attendance.available,
            rng=stream(seed, "select", state.round),
        )
        self._state, self._noise, self._seed = state, noise or LossNoise(), seed
        self._engine, self._optimiser = engine, optimiser
        self._members = members(engine.population, eligible)
        self._traits = optimiser_traits(optimiser)
        self.learning_rate, self._steps = learning_rate, self.attendance.steps
        self._byzantine, self._is_byzantine = byzantine, byzantine.who(seed, clients)
        self._last_change = None if state.before is None else state.model - state.before
        self.ledger = Ledger(clients, engine.model_bytes, state.holders)
        self.refused = 0
        limits = (Defence() if defence is None else defence).norm_limits
        # All local steps count: the fewer a slow client takes, the longer they are on average.
        step_size = learning_rate * engine.local_training.local_steps
        self.results = TrainedModels(
            limits, state.norms, state.model, engine.vector.trained, step_size
        )
        self.rolled_back = False
        self._asked_to_train: set[int] = set()

    def finish(self, chosen: IntArray, state: State) -> tuple[SimulationState, Outcome]:
        """Train the chosen clients, aggregate, and end the round.

        Args:
            chosen: (C,) Clients that train, as the selector named them.
            state: The selector's state.

        Returns:
            What the next round starts from, and what the selector observes.
        """
        delivered = self.deliver(chosen)
        step = next_step(delivered, can_return=self.can_return, attempt=0, attempts=1, others=False)
        self.rolled_back = step is Step.ROLL_BACK
        after = self.close(delivered, step, state)
        # What was trained from a bad model is no use.
        participants = delivered.participants[: 0 if self.rolled_back else None]
        outcome = self._outcome(delivered.chosen, participants)
        self.ledger.close_round(self.adopted_version)
        assert isinstance(after, SimulationState)
        after = dataclasses.replace(
            after,
            holders=self.ledger.holders(),
            before=self.model if self._byzantine.copies else None,
            clock=self._state.clock + (self.attendance.seconds or 0.0),
        )
        return after, outcome

    def same_model(self, first: Tensor, second: Tensor) -> bool:
        """Whether two models are equal."""
        return first.equal(second)

    def start_over(self, model: Tensor) -> State:
        """The optimiser's state before the first round."""
        parameters = parameters_of(model, self._engine.vector.trained)
        return init_optimiser(self._optimiser, self._members, parameters)

    def past_norms(self, *, wrong: bool, alone: bool) -> State:
        """The lengths of updates for the next round."""
        return self.results.past(self.round, wrong=wrong, alone=alone)

    @property
    def refused_clients(self) -> Collection[int]:
        """Clients whose update was refused."""
        return self.results.refused_clients

    def _outcome(self, chosen: IntArray, participants: IntArray) -> Outcome:
        """What the selector observes."""
        sizes = self._engine.population.sizes[participants].astype(np.float64)
        return Outcome(
            self.round,
            chosen,
            participants,
            step_sizes=self.learning_rate * self._steps[participants].astype(np.float64),
            aggregation_weights=sizes if self._traits.weighted else np.ones(len(participants)),
            read_losses=lambda: self._reported(CURRENT, self.model, participants),
            read_updates=lambda: self._updates(participants),
            head=self._engine.vector.head,
            durations=self.attendance.durations(participants),
            # One noisy number each: noise is sized for that.
            read_rms_losses=None if self._noise.sigma else lambda: self._reported_rms(participants),
        )

    def ask(self, version: int, model: Tensor, clients: IntArray) -> FloatArray:
        """Each client's loss of `model`; NaN for unusable answers, and where none came in time."""
        answers = np.full(len(clients), np.nan)
        sent = self.ledger.send(version, clients, self.attendance.receives)
        batches = self._engine.evaluation_batches[clients]
        answered = self.attendance.answered(clients, sent, batches, ANSWER_BYTES)
        answers[answered] = self._reported(version, model, clients[answered])
        if version == CURRENT:
            self.unusable.update(clients[answered & np.isnan(answers)].tolist())
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
        return self._received(self._engine.rms_losses(self.model, clients), clients)

    def _received(self, losses: FloatArray, clients: IntArray) -> FloatArray:
        """The losses as the server receives them: NaN for unusable numbers, which are counted."""
        clean, refused = screen_losses(
            self._byzantine.reported_losses(losses, self._is_byzantine[clients])
        )
        self.refused += refused
        return clean

    def train(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """The clients whose model was accepted, sorted, and their weights in the mean."""
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
                self.model,
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
        participants = clients[delivered]
        sizes = self._engine.population.sizes[participants] if self._traits.weighted else None
        return participants, mean_weights(times[delivered], sizes)

    def _falsify(self, clients: IntArray, results: Tensor) -> None:
        """Replace the updates of Byzantine clients in place. Float buffers stay as trained."""
        trained = self._engine.vector.trained
        model = self.model[:trained]
        last = None if self._last_change is None else self._last_change[:trained]
        for row in np.flatnonzero(self._is_byzantine[clients]).tolist():
            sent = self._byzantine.sent_update(results[row, :trained] - model, last)
            results[row, :trained] = model + sent

    def _corrections(self, clients: IntArray) -> Tensor | None:
        """What each client adds to its gradients, if the optimiser says so."""
        size = self._engine.vector.trained
        corrections = find_corrections(
            self._optimiser, self._state.optimiser, clients, size, self.round
        )
        return None if corrections is None else as_tensor(corrections).to(self.model.device)

    def _updates(self, participants: IntArray) -> Array:  # (m, P), without buffers
        trained = self._engine.vector.trained
        changes = self.results.of(participants)[:, :trained] - self.model[:trained]
        updates: Array = changes.cpu().numpy()
        return updates

    def aggregate(self, participants: IntArray, weights: FloatArray) -> tuple[Tensor, State]:
        """The optimiser's next model, and its state after this round."""
        return next_model(
            self._optimiser,
            self._state.optimiser,
            self.model,
            self.results.of(participants),
            self._engine.vector.trained,
            round=self.round,
            clients=participants,
            weights=weights,
            steps=self._steps[participants],
            learning_rate=self.learning_rate,
        )
