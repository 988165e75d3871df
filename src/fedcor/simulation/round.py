"""One round of a simulated federation, as a selector sees it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcor.aggregation import find_corrections
from fedcor.engine import Engine, Faults
from fedcor.engine.batch import as_tensor
from fedcor.guard import check_clients, screen_losses
from fedcor.ledger import CURRENT, Ledger
from fedcor.privacy import LossNoise
from fedcor.rng import stream
from fedcor.simulation.aggregate import next_model
from fedcor.simulation.state import SimulationState
from fedcor.types import (
    Array,
    BoolArray,
    FloatArray,
    IntArray,
    Optimiser,
    Outcome,
    State,
    optimiser_traits,
)

__all__ = ["SimulatedRound"]


class _Candidate(NamedTuple):
    """A model that may become the next one."""

    model: Tensor
    memory: State  # the optimiser's, if this model is adopted
    version: int | None  # in the ledger; None if no client received it
    losses: FloatArray  # (N,) NaN where unknown


class SimulatedRound:
    """One round of a simulated federation: answers questions, bills them, and trains.

    It is the `Federation` that the selector sees in this round; `close` ends it.

    Args:
        engine: Trains and evaluates.
        optimiser: Aggregates the clients' updates.
        faults: Which clients are unavailable, drop out, or are slow.
        learning_rate: The clients' learning rate in this round.
        seed: Fixes everything that is drawn.
        state: What the round before has left.
        eligible: (N,) Who may be asked and chosen; None for everyone.
        noise: On the losses that clients report.

    Attributes:
        ledger: What this round has cost so far.
        refused: How many answers and updates were unusable numbers.
    """

    def __init__(
        self,
        engine: Engine,
        optimiser: Optimiser,
        faults: Faults,
        learning_rate: float,
        seed: int,
        state: SimulationState,
        eligible: BoolArray | None = None,
        noise: LossNoise | None = None,
    ) -> None:
        self._noise, self._seed = noise or LossNoise(), seed
        self._engine, self._optimiser = engine, optimiser
        self._traits = optimiser_traits(optimiser)
        self.round, self.learning_rate = state.round, learning_rate
        self.weights, clients = engine.population.weights, engine.population.count
        self.rng = stream(seed, "select", self.round)
        self.available = faults.available(seed, self.round, clients, eligible)
        # A selector only reads them.
        self.available.flags.writeable = self.weights.flags.writeable = False
        self._alive = ~faults.dropped(seed, self.round, clients)
        self._steps = faults.steps(seed, self.round, clients, engine.local_training.local_steps)
        self._model, self._known = state.model, state.known.copy()
        self._memory = state.optimiser
        self.ledger = Ledger(clients, engine.model_bytes, state.holders)
        self.refused = 0
        self._asked = np.zeros(clients, dtype=bool)
        self._trained: dict[int, Tensor] = {}  # client -> its usable result of this round
        self._asked_to_train: set[int] = set()
        self._candidates: dict[tuple[bytes, bytes], _Candidate] = {}  # by participants and weights

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; see `Federation.losses`."""
        clients = check_clients(clients, self.available, self.round)
        unasked = np.unique(clients[np.isnan(self._known[clients]) & ~self._asked[clients]])
        self._known[unasked] = self._ask(CURRENT, self._model, unasked)
        self._asked[unasked] = True  # who did not answer is not asked again in this round
        return self._known[clients]

    def loss_changes(self, selection: IntArray) -> FloatArray:
        """(N,) change of every loss if `selection` trained; see `Federation.loss_changes`."""
        changes = np.full(len(self.weights), np.nan)
        before = self.losses(self.available)
        participants, weights = self._train(selection)
        if len(participants):
            key = (participants.tobytes(), weights.tobytes())
            if key not in self._candidates:
                model, memory = self._aggregate(participants, weights)
                version = self.ledger.new_version()
                losses = np.full(len(self.weights), np.nan)
                losses[self.available] = self._ask(version, model, self.available)
                self._candidates[key] = _Candidate(model, memory, version, losses)
            changes[self.available] = self._candidates[key].losses[self.available] - before
        return changes

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
        key = (participants.tobytes(), weights.tobytes())
        if not len(participants):
            # Nobody delivered: the model stays, and so does what is known of it.
            adopted = _Candidate(self._model, self._memory, CURRENT, self._known)
        elif key in self._candidates:
            adopted = self._candidates[key]
        else:
            unknown = np.full(len(self.weights), np.nan)
            adopted = _Candidate(*self._aggregate(participants, weights), None, unknown)
        sizes = self._engine.population.sizes[participants].astype(np.float64)
        outcome = Outcome(
            self.round,
            chosen,
            participants,
            step_sizes=self.learning_rate * self._steps[participants].astype(np.float64),
            aggregation_weights=sizes if self._traits.weighted else np.ones(len(participants)),
            read_losses=lambda: self._report(CURRENT, self._model, participants),
            read_updates=lambda: self._updates(participants),
            head=self._engine.vector.head,
        )
        self.ledger.close_round(adopted.version)
        holders = self.ledger.holders()
        after = SimulationState(
            self.round + 1, adopted.model, adopted.losses, holders, state, adopted.memory
        )
        return after, outcome

    def _ask(self, version: int, model: Tensor, clients: IntArray) -> FloatArray:
        """Each client's loss of `model`; NaN for unusable answers and from dropped clients."""
        answers = np.full(len(clients), np.nan)
        self.ledger.send(version, clients, self._alive)
        alive = self._alive[clients]
        answers[alive] = self._report(version, model, clients[alive])
        self.ledger.question(asked=len(clients), answered=int(alive.sum()))
        return answers

    def _report(self, version: int, model: Tensor, clients: IntArray) -> FloatArray:
        """What clients say of their losses: one answer each per model, however often it is read."""
        losses = self._screened(self._engine.losses(model, clients))
        if not self._noise.sigma:
            return losses
        everyone = np.zeros(len(self.weights))
        everyone[clients] = losses
        rng = stream(self._seed, "loss noise", self.round, version)
        return self._noise.add(everyone, rng)[clients]

    def _screened(self, losses: FloatArray) -> FloatArray:
        clean, refused = screen_losses(losses)
        self.refused += refused
        return clean

    def _train(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """Who of the selection delivered a usable result, sorted, and their weights in the mean."""
        selection = check_clients(selection, self.available, self.round)
        clients, times = np.unique(selection, return_counts=True)
        new = [k for k in clients.tolist() if k not in self._asked_to_train]
        asked = np.array(new, dtype=np.int64)
        self._asked_to_train.update(asked.tolist())
        self.ledger.send(CURRENT, asked, self._alive)
        told, asked = asked, asked[self._alive[asked]]
        self.ledger.vectors(
            sent=len(told) * self._traits.extra_down,
            received=len(asked) * self._traits.extra_up,
            vector_bytes=4 * self._engine.vector.trained,
        )
        if len(asked):
            ids, steps = asked.tolist(), self._steps[asked].tolist()
            results = self._engine.train(
                self._model, ids, self.round, self.learning_rate, steps, self._corrections(asked)
            )
            self.ledger.training(len(asked))
            # Of the changes: two finite numbers can be too far apart for their type.
            usable = torch.isfinite(results - self._model).all(dim=1).tolist()
            self.refused += usable.count(False)
            self._trained |= {k: r for k, r, ok in zip(ids, results, usable, strict=True) if ok}
        delivered = np.array([k in self._trained for k in clients.tolist()], dtype=bool)
        weights = times[delivered].astype(np.float64)
        if self._traits.weighted:
            weights *= self._engine.population.sizes[clients[delivered]]
        return clients[delivered], weights / weights.sum() if len(weights) else weights

    def _corrections(self, clients: IntArray) -> Tensor | None:
        """What each client adds to its gradients, if the optimiser says so."""
        size = self._engine.vector.trained
        found = find_corrections(self._optimiser, self._memory, clients, size, self.round)
        return None if found is None else as_tensor(found).to(self._model.device)

    def _updates(self, participants: IntArray) -> Array:  # (m, P), without buffers
        trained = self._engine.vector.trained
        changes = self._results(participants)[:, :trained] - self._model[:trained]
        updates: Array = changes.cpu().numpy()
        return updates

    def _results(self, participants: IntArray) -> Tensor:  # (m, P)
        if not len(participants):
            return self._model.new_empty(0, len(self._model))
        return torch.stack([self._trained[k] for k in participants.tolist()])

    def _aggregate(self, participants: IntArray, weights: FloatArray) -> tuple[Tensor, State]:
        """The optimiser's next model, and its state after this round."""
        return next_model(
            self._optimiser,
            self._memory,
            self._model,
            self._results(participants),
            self._engine.vector.trained,
            round=self.round,
            clients=participants,
            weights=weights,
            steps=self._steps[participants],
            learning_rate=self.learning_rate,
        )
