"""The round loop: the one place where who decides and who trains meet."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedcor.engine import Engine, Faults
from fedcor.guard import check_clients, screen_losses
from fedcor.ledger import CURRENT, Ledger
from fedcor.optimisers import Optimiser
from fedcor.record import RoundRecord
from fedcor.rng import stream
from fedcor.selection import Decision, decide, init_state, observe
from fedcor.types import Array, BoolArray, FloatArray, IntArray, Outcome, Selector, State

__all__ = ["LearningRate", "SimulatedRound", "Simulation", "SimulationState"]


@dataclass(frozen=True)
class LearningRate:
    """`initial`, multiplied by `factor` at each milestone."""

    initial: float
    milestones: tuple[int, ...] = ()
    factor: float = 0.5

    def at(self, round: int) -> float:
        return self.initial * math.pow(
            self.factor, sum(round >= milestone for milestone in self.milestones)
        )


@dataclass(frozen=True)
class SimulationState:
    """Everything that one round hands to the next: written whole, it is a checkpoint."""

    round: int  # the next round
    model: Tensor  # (P,) w^t
    known: FloatArray  # (N,) l_k(w^t) where the server was told, else NaN
    holders: BoolArray  # (N,) who has received w^t
    selector: State  # what the selector remembers

    def to_arrays(self) -> dict[str, Array]:
        arrays = {f"selector/{name}": np.asarray(value) for name, value in self.selector.items()}
        model = self.model.cpu().numpy()
        return {
            "round": np.array(self.round),
            "model": model,
            "known": self.known,
            "holders": self.holders,
        } | arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], device: torch.device) -> SimulationState:
        state = {
            name.removeprefix("selector/"): a
            for name, a in arrays.items()
            if name.startswith("selector/")
        }
        model = torch.from_numpy(arrays["model"]).to(device)
        return cls(int(arrays["round"]), model, arrays["known"], arrays["holders"], state)


class SimulatedRound:
    """One round of a simulated federation: answers a selector's questions, and bills them."""

    def __init__(self, simulation: Simulation, state: SimulationState) -> None:
        self._engine, self._optimiser = simulation.engine, simulation.optimiser
        self.round = state.round
        self.weights = self._engine.population.weights
        self.learning_rate = simulation.learning_rate.at(self.round)
        self.rng = stream(simulation.seed, "select", self.round)
        clients, seed, faults = self._engine.population.count, simulation.seed, simulation.faults
        self.available = faults.available(seed, self.round, clients)
        self.available.flags.writeable = self.weights.flags.writeable = (
            False  # a selector only reads them
        )
        self._alive = ~faults.dropped(seed, self.round, clients)
        self._steps = faults.steps(seed, self.round, clients, self._engine.local_training.local_steps)
        self._model, self._known = state.model, state.known.copy()
        self.ledger = Ledger(clients, self._engine.model_bytes, state.holders)
        self.refused = 0
        self._asked = np.zeros(clients, dtype=bool)
        self._trained: dict[int, Tensor] = {}  # client -> its usable result of this round
        self._asked_to_train: set[int] = set()
        # (participants, their weights) -> candidate model, its version, its losses
        self._candidates: dict[tuple[bytes, bytes], tuple[Tensor, int, FloatArray]] = {}

    def losses(self, clients: IntArray) -> FloatArray:
        clients = check_clients(clients, self.available, self.round)
        unasked = np.unique(clients[np.isnan(self._known[clients]) & ~self._asked[clients]])
        self._known[unasked] = self._ask(CURRENT, self._model, unasked)
        self._asked[unasked] = True  # who did not answer is not asked again in this round
        return self._known[clients]

    def loss_changes(self, selection: IntArray) -> FloatArray:
        changes = np.full(len(self.weights), np.nan)
        before = self.losses(self.available)
        participants, weights = self._train(selection)
        if len(participants):
            key = (participants.tobytes(), weights.tobytes())
            if key not in self._candidates:
                candidate, version = (
                    self._aggregate(participants, weights),
                    self.ledger.new_version(),
                )
                losses = np.full(len(self.weights), np.nan)
                losses[self.available] = self._ask(version, candidate, self.available)
                self._candidates[key] = candidate, version, losses
            changes[self.available] = self._candidates[key][2][self.available] - before
        return changes

    def close(self, chosen: IntArray, state: State) -> tuple[SimulationState, Outcome]:
        """Train the chosen, aggregate, and hand on to the next round; a training done for a question is not done again."""
        chosen = check_clients(chosen, self.available, self.round)
        participants, weights = self._train(chosen)
        model, known, version = self._model, self._known, None
        if not len(
            participants
        ):  # nobody delivered: the model stays, and so does what is known of it
            version = CURRENT
        else:
            key = (participants.tobytes(), weights.tobytes())
            if key in self._candidates:
                model, version, known = self._candidates[key]
            else:
                model, known = (
                    self._aggregate(participants, weights),
                    np.full(len(self.weights), np.nan),
                )
        sizes = self._engine.population.sizes[participants].astype(np.float64)
        outcome = Outcome(
            self.round,
            chosen,
            participants,
            step_sizes=self.learning_rate * self._steps[participants].astype(np.float64),
            aggregation_weights=sizes if self._optimiser.weighted else np.ones(len(participants)),
            read_losses=lambda: self._screened(self._engine.losses(self._model, participants)),
            read_updates=lambda: (self._results(participants) - self._model).cpu().numpy(),
            head=self._engine.vector.head,
        )
        self.ledger.close_round(version)
        after = SimulationState(self.round + 1, model, known, self.ledger.holders(), state)
        return after, outcome

    def _ask(self, version: int, model: Tensor, clients: IntArray) -> FloatArray:
        """Each client's loss of `model`; NaN from the dead and for unusable answers."""
        answers = np.full(len(clients), np.nan)
        self.ledger.send(version, clients, self._alive)
        alive = self._alive[clients]
        answers[alive] = self._screened(self._engine.losses(model, clients[alive]))
        self.ledger.question(asked=len(clients), answered=int(alive.sum()))
        return answers

    def _screened(self, losses: FloatArray) -> FloatArray:
        clean, refused = screen_losses(losses)
        self.refused += refused
        return clean

    def _train(self, selection: IntArray) -> tuple[IntArray, FloatArray]:
        """Who of the selection delivered a usable result (sorted), and each one's weight in the mean."""
        clients, times = np.unique(
            check_clients(selection, self.available, self.round), return_counts=True
        )
        asked = np.array(
            [k for k in clients.tolist() if k not in self._asked_to_train], dtype=np.int64
        )
        self._asked_to_train.update(asked.tolist())
        self.ledger.send(CURRENT, asked, self._alive)
        asked = asked[self._alive[asked]]
        if len(asked):
            steps = self._steps[asked].tolist()
            results = self._engine.train(
                self._model, asked.tolist(), self.round, self.learning_rate, steps
            )
            self.ledger.training(len(asked))
            usable = torch.isfinite(results).all(dim=1).tolist()
            self.refused += usable.count(False)
            self._trained |= {
                k: r for k, r, ok in zip(asked.tolist(), results, usable, strict=True) if ok
            }
        delivered = np.array([k in self._trained for k in clients.tolist()], dtype=bool)
        weights = times[delivered].astype(np.float64)
        if self._optimiser.weighted:
            weights *= self._engine.population.sizes[clients[delivered]]
        return clients[delivered], weights / weights.sum() if len(weights) else weights

    def _results(self, participants: IntArray) -> Tensor:  # (m, P)
        if not len(participants):
            return self._model.new_empty(0, len(self._model))
        return torch.stack([self._trained[k] for k in participants.tolist()])

    def _aggregate(self, participants: IntArray, weights: FloatArray) -> Tensor:
        return self._optimiser.aggregate(self._model, self._results(participants), weights)


@dataclass(frozen=True)
class Simulation:
    """A federation in one process, a selector, and the streams of one seed."""

    engine: Engine
    selector: Selector
    optimiser: Optimiser
    faults: Faults
    learning_rate: LearningRate
    seed: int

    @cached_property
    def start(self) -> SimulationState:
        """The federation before its first round."""
        clients = self.engine.population.count
        unknown, nobody = np.full(clients, np.nan), np.zeros(clients, dtype=bool)
        state = init_state(self.selector, self.engine.population)
        return SimulationState(0, self.engine.initial_model, unknown, nobody, state)

    def run(
        self, rounds: int, state: SimulationState | None = None
    ) -> Iterator[tuple[RoundRecord, SimulationState]]:
        """The record of each round and the state after it, from `state` up to round `rounds`."""
        state = state or self.start
        for _ in range(state.round, rounds):
            started = time.perf_counter()
            federation = SimulatedRound(self, state)
            decision = decide(self.selector, state.selector, federation)
            state, outcome = federation.close(decision.chosen, decision.state)
            observed = observe(self.selector, decision.state, outcome)
            state = dataclasses.replace(state, selector=observed)
            yield self._record(federation, decision, outcome, state.model, started), state

    def _record(
        self,
        federation: SimulatedRound,
        decision: Decision,
        outcome: Outcome,
        model: Tensor,
        started: float,
    ) -> RoundRecord:
        scores = self.engine.test(model)
        return RoundRecord(
            round=federation.round,
            selected=outcome.selected.tolist(),
            participated=outcome.participated.tolist(),
            test_accuracy=scores.accuracy,
            test_loss=scores.loss,
            learning_rate=federation.learning_rate,
            probed=federation.ledger.questions,
            refused=federation.refused,
            bytes_down=federation.ledger.bytes_down,
            bytes_up=federation.ledger.bytes_up,
            seconds=round(time.perf_counter() - started, 6),
            why=decision.why,
        )
