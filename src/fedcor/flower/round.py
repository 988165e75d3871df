"""One round: select clients, have them train, and try it with others if nobody delivers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcor.errors import FedcorError
from fedcor.flower.attendance import reachable_clients
from fedcor.flower.evaluation import Evaluation
from fedcor.flower.exchange import Exchange
from fedcor.flower.federation import FlowerFederation
from fedcor.flower.local_training import read_local_training
from fedcor.flower.memory import snapshot
from fedcor.flower.numbering import flower_round
from fedcor.flower.outcome import read_outcome
from fedcor.flower.settings import RoundSettings
from fedcor.flower.state import FederationState
from fedcor.flower.training import RoundStart, Training
from fedcor.flower.wire import LOG, version_of
from fedcor.selection import Decision, decide, observe
from fedcor.types import IntArray, Outcome

__all__ = ["Round", "open_round"]


@dataclass
class Attempt:
    """One choice of clients, and their training."""

    training: Training
    federation: FlowerFederation
    decision: Decision


@dataclass
class Round:
    """Everything that belongs to one round, and lives as long as it."""

    exchange: Exchange
    start: RoundStart
    arrays: ArrayRecord  # the model: w^t, and what the round has made of it
    started: float  # by time.perf_counter
    attempt: Attempt | None = None  # the last one
    outcome: Outcome | None = None  # once somebody has delivered
    evaluation: Evaluation | None = None  # federated, once it is configured

    @property
    def number(self) -> int:
        """Of this round, from 0."""
        return self.exchange.round

    def select(
        self, settings: RoundSettings, state: FederationState, retries: int = 0
    ) -> list[Message]:
        """Choose who trains now.

        Returns messages for the caller to send: to the chosen who have not trained for a question.
        """
        number, selector = flower_round(self.number), settings.selector
        available = reachable_clients(settings, state, self.exchange, retry=retries > 0)
        selector_state = state.adapt_selector(selector)
        training = Training(settings, self.exchange, self.start, state.model)
        federation = FlowerFederation(training, state.model, available, retries)
        decision = decide(selector, selector_state, federation, number)
        messages = training.request(decision.chosen)
        self.attempt = Attempt(training, federation, decision)
        LOG.info(
            "round %d: selected clients %s (%d reachable, %d asked for a loss)",
            number,
            decision.chosen.tolist(),
            len(available),
            self.exchange.probed,
        )
        return messages

    def aggregate(
        self, settings: RoundSettings, state: FederationState, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies of the selected clients; `state` is then the next round's."""
        attempt, participated = self._deliver(settings, state, replies)
        training, chosen = attempt.training, attempt.decision.chosen
        # A strategy may decide to leave the model as it is.
        arrays, metrics = training.aggregate(chosen)
        self.arrays = self.arrays if arrays is None else arrays
        version = state.model.version if arrays is None else version_of(arrays)
        trained = read_local_training(training.metrics(participated))
        if not state.doubted:
            names = [f"client {k} ({state.roster.names[k]})" for k in participated.tolist()]
            state.doubted = trained.log_doubts(names)
        outcome = read_outcome(training, chosen, participated, trained)
        state.model = attempt.federation.facts(version)
        # What the strategy changed in the configuration lasts, as it does without us.
        for key, value in training.config.items():
            self.start.config[key] = value
        decided, number = attempt.decision.state, flower_round(self.number)
        state.selector = observe(settings.selector, decided, outcome, number)
        self.outcome = outcome
        return arrays, metrics

    def _deliver(
        self, settings: RoundSettings, state: FederationState, replies: Iterable[Message]
    ) -> tuple[Attempt, IntArray]:
        """The first attempt in which somebody delivers, and who they are."""
        tried = 0
        while True:
            attempt = self.attempt
            assert attempt is not None, "select() comes first"
            attempt.training.receive(replies)
            participated = attempt.training.delivered(attempt.decision.chosen)
            if len(participated):
                return attempt, participated
            tried += 1
            state.model = attempt.federation.facts(state.model.version)
            self._give_up_or_pause(settings, tried)
            messages = self.select(settings, state, tried)
            replies = self.exchange.grid.send_and_receive(messages, timeout=settings.train_timeout)

    def _give_up_or_pause(self, settings: RoundSettings, tried: int) -> None:
        """Nobody delivered: wait a little, since an outage may pass, or end the run."""
        number, faults = flower_round(self.number), dict(self.exchange.faults)
        LOG.error("round %d: NOBODY delivered a usable update: %s", number, faults)
        attempts = settings.selection.attempts
        if tried == attempts:
            raise FedcorError(
                f"round {number}: nobody delivered a usable update in {tried} attempts ({faults}); "
                "look at the nodes' logs. Finished rounds are kept: with a checkpoint, the same "
                "start resumes after them"
            )
        pause = min(2.0 ** (tried - 1), settings.probe_timeout)
        LOG.error("round %d: attempt %d of %d in %g s", number, tried + 1, attempts, pause)
        time.sleep(pause)
        self.exchange.gone.clear()


def open_round(
    settings: RoundSettings,
    state: FederationState,
    round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> Round:
    """A round that starts from the model `arrays`."""
    started = time.perf_counter()
    state.meet_model(version_of(arrays))
    start = RoundStart(arrays, config, snapshot(settings.strategy))
    return Round(Exchange(grid, state.roster, round), start, arrays, started)
