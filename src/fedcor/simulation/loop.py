"""The round loop of a simulation. Every round has three steps:

    decide      the selector chooses clients; its questions are answered and billed
    train       the chosen clients train, and their updates are aggregated
    observe     the selector sees the outcome

All random numbers come from streams named by the seed and the round, so a round is a function of
the state before it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedcor.core.errors import FedcorError
from fedcor.core.types import BoolArray, Optimiser, Outcome, Selector, State, selector_traits
from fedcor.rounds.aggregation import init_optimiser, members, state_bytes
from fedcor.rounds.defence.guarded_federation import after_round, guard_federation, guard_outcome
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.loss_screening import LARGEST_LOSS, LossNoise
from fedcor.rounds.record_line import RoundRecord
from fedcor.rounds.rules.declaration import with_clients
from fedcor.rounds.rules.resolved import FixedRules
from fedcor.rounds.selection import Decision, decide, init_state, observe, told_losses
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.clock import Devices, Speeds, device_speeds
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.faults import Faults
from fedcor.simulation.round import HONEST, SimulatedRound
from fedcor.simulation.schedules import LearningRate, Schedule, as_schedule
from fedcor.simulation.server_step import parameters_of
from fedcor.simulation.state import SimulationState


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A federation in one process, and the selector that chooses in it.

    `fedcor.simulation.build.build_simulation` makes one from an experiment.

    Attributes:
        engine: The clients' data and the model; trains and evaluates.
        selector: Chooses the clients.
        optimiser: Aggregates their updates.
        faults: Which clients are unavailable, drop out, or are slow.
        learning_rate: The clients' learning rate over the rounds. A number, or a function of the
            round, becomes a schedule; a user's own is checked in every round.
        seed: Random seed for everything.
        rules: Who may be chosen; None for everyone.
        byzantine: Which clients send false updates or losses, and how.
        defence: How the server defends itself against faulty and Byzantine clients.
        noise: On the losses that clients report.
    """

    engine: Engine
    selector: Selector
    optimiser: Optimiser
    faults: Faults
    learning_rate: Schedule
    seed: int
    rules: FixedRules | None = None
    byzantine: Byzantine = HONEST
    defence: Defence = field(default_factory=Defence)
    noise: LossNoise = field(default_factory=LossNoise)

    def __post_init__(self) -> None:
        rate: Any = self.learning_rate
        if not isinstance(rate, LearningRate):
            number = isinstance(rate, int | float)
            schedule = LearningRate(float(rate)) if number else as_schedule(rate)
            object.__setattr__(self, "learning_rate", schedule)

    @cached_property
    def start(self) -> SimulationState:
        """The state before the first round. Raises FedcorError for losses that are out of scale."""
        self._check_scale()
        clients = self.engine.population.count
        return SimulationState(
            round=0,
            model=self.engine.initial_model,
            known=np.full(clients, np.nan),
            holders=np.zeros(clients, dtype=bool),
            selector=init_state(self.selector, self.engine.population),
            optimiser=self.optimiser_start,
        )

    @cached_property
    def optimiser_start(self) -> State:
        """The optimiser's state before the first round."""
        model = parameters_of(self.engine.initial_model, self.engine.vector.trained)
        return init_optimiser(self.optimiser, members(self.engine.population, self.eligible), model)

    @property
    def eligible(self) -> BoolArray | None:
        """(N,) Which clients may be chosen; None for everyone."""
        return None if self.rules is None else self.rules.eligible

    def _check_scale(self) -> None:
        """Refuse targets of a regression that make all losses too large to be accepted."""
        if self.engine.task.classes is not None:
            return
        loss = self.engine.test(self.engine.initial_model).loss
        if not loss <= LARGEST_LOSS:
            raise FedcorError(
                f"the first model has a test loss of {loss:.3g}, but losses above {LARGEST_LOSS:g} "
                "count as unusable numbers: scale the targets, for example with scikit-learn's "
                "StandardScaler"
            )

    def open_round(self, state: SimulationState) -> SimulatedRound:
        """The round that follows from `state`."""
        return SimulatedRound(
            engine=self.engine,
            optimiser=self.optimiser,
            faults=self.faults,
            learning_rate=self.learning_rate.at(state.round),
            seed=self.seed,
            state=state,
            eligible=self.eligible,
            defence=self.defence,
            byzantine=self.byzantine,
            noise=self.noise,
            speeds=self.speeds,
            goal=self.needed_at(state.round),
        )

    @cached_property
    def speeds(self) -> Speeds | None:
        """How fast clients are; None without a clock."""
        devices = self.faults.fixed_devices
        count = self.engine.population.count
        if devices is None:
            return None
        tied = isinstance(devices, Devices) and devices.tied_to == "labels"
        labels = self.engine.majority_labels() if tied else None
        return device_speeds(devices, self.seed, count, labels)

    def needed_at(self, round: int) -> int | None:
        """C, how many clients a round waits for where more are chosen; None for all of them."""
        if self.faults.over_selection == 1.0:
            return None
        return selector_traits(self._selector_by_rules(round)).clients_per_round

    def selector_at(self, round: int) -> Selector:
        """The selector with the number of clients that it chooses in this round."""
        selector, needed = self._selector_by_rules(round), self.needed_at(round)
        if needed is None:
            return selector
        return with_clients(selector, self.faults.choose(needed, self.engine.population.count))

    def _selector_by_rules(self, round: int) -> Selector:
        return self.selector if self.rules is None else self.rules.selector_at(self.selector, round)

    def run(
        self, rounds: int, state: SimulationState | None = None
    ) -> Iterator[tuple[RoundRecord, SimulationState]]:
        """Run round after round.

        Args:
            rounds: The round before which to stop: `run(30)` ends after round 29.
            state: Where to start; before the first round if it is not given.

        Yields:
            The record of each round, and the state after it.
        """
        state = state or self.start
        groups = None if self.rules is None else self.rules.groups
        eligible = self.eligible
        clients = self.engine.population.count if eligible is None else int(eligible.sum())
        for number in range(state.round, rounds):
            started = time.perf_counter()
            federation = self.open_round(state)
            selector = self.selector_at(number)
            shown = guard_federation(self.defence, state.turns, selector, federation, clients)
            decision = decide(selector, state.selector, shown, groups=groups)
            state, outcome = federation.finish(decision.chosen, decision.state)
            observed = observe(selector, decision.state, guard_outcome(self.defence, outcome))
            turns = after_round(self.defence, state.turns, selector, outcome, clients)
            state = dataclasses.replace(state, selector=observed, turns=turns)
            yield self._record(federation, decision, outcome, state, started), state

    def _record(
        self,
        federation: SimulatedRound,
        decision: Decision,
        outcome: Outcome,
        after: SimulationState,
        started: float,
    ) -> RoundRecord:
        """The record's line for a finished round."""
        scores, attendance = self.engine.test(after.model), federation.attendance
        return RoundRecord(
            round=federation.round,
            selected=outcome.selected.tolist(),
            participated=outcome.participated.tolist(),
            test_accuracy=scores.accuracy,
            test_loss=scores.loss,
            learning_rate=federation.learning_rate,
            probed=federation.ledger.questions,
            refused=federation.refused,
            clipped=sorted(federation.results.clipped),
            refused_updates=federation.results.refused,
            rolled_back=int(federation.rolled_back),
            bytes_down=federation.ledger.bytes_down,
            bytes_up=federation.ledger.bytes_up,
            seconds=round(time.perf_counter() - started, 6),
            why=decision.why,
            metrics=scores.metrics,
            memory_bytes=state_bytes(after.optimiser),
            unmet=decision.unmet,
            missing=attendance.missing(outcome.selected, outcome.participated),
            unreachable=attendance.unreachable,
            duration=attendance.seconds,
            clock=None if attendance.seconds is None else after.clock,
            details={**decision.details, **told_losses(outcome)},
        )
