"""Any Flower strategy with client selection: it aggregates as before, a selector says who trains.

Flower's own loop runs (`Strategy.start`). This module adapts its verbs to a round (`round.py`,
`evaluation.py`) and its record (`record.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcor.errors import FedcorError
from fedcor.flower.evaluation import configure_evaluation
from fedcor.flower.numbering import flower_round, own_round, renumber
from fedcor.flower.record import Recorder, describe_run
from fedcor.flower.round import Round, open_round
from fedcor.flower.settings import (
    RoundSettings,
    SelectionSettings,
    check_optimiser,
    check_selector,
    check_strategy,
)
from fedcor.flower.state import FederationState
from fedcor.flower.wire import LOG
from fedcor.types import Selector

__all__ = ["SelectingStrategy"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class SelectingStrategy(Strategy):
    """A Flower strategy whose clients are chosen by a selector. Usually made by `select_with`.

    Args:
        strategy: Configures, aggregates and evaluates as it does alone.
        selector: Chooses who trains.
        settings: Everything else.
    """

    def __init__(
        self, strategy: Strategy, selector: Selector, settings: SelectionSettings | None = None
    ) -> None:
        settings = SelectionSettings() if settings is None else settings
        check_strategy(strategy)
        check_selector(selector, settings)
        check_optimiser(strategy, settings)
        self.strategy, self.selector, self.settings = strategy, selector, settings
        self._round_settings = RoundSettings(strategy, selector, settings)
        self._recorder = Recorder(self._round_settings)
        self._state = FederationState()
        self._round: Round | None = None  # the one under way

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """As Flower's `Strategy.start`; with a checkpoint, it resumes after the last full round."""
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        self._round_settings = dataclasses.replace(
            self._round_settings,
            train_timeout=timeout,
            evaluate_config=evaluate_config,
            server_evaluates=evaluate_fn is not None,
        )
        self._round = None
        with self._recorder.opened(self.header(num_rounds)):
            self._state, arrays = self._recorder.resume(initial_arrays, train_config)
            finished = self._state.finished
            if finished >= num_rounds:
                LOG.info("all %d rounds were finished before: %s", num_rounds, self.settings.folder)
                return Result(arrays=arrays)
            result = super().start(
                grid,
                arrays,
                num_rounds - finished,
                timeout,
                train_config,
                evaluate_config,
                None if evaluate_fn is None else self._recorded(evaluate_fn),
            )
        return renumber(result, finished)

    def header(self, num_rounds: int) -> dict[str, Any]:
        """The first line of the record; a start with the same folder must have an equal one."""
        return describe_run(self._round_settings, num_rounds)

    def summary(self) -> None:
        """Log who selects, who aggregates, and the settings, ours and the strategy's."""
        LOG.info("\t├──> Selection: %s", self.selector)
        LOG.info("\t├──> Aggregation: %s", type(self.strategy).__name__)
        timeout = self._round_settings.probe_timeout
        LOG.info(
            "\t├──> Waits for %d nodes; probe timeout %g s",
            self._round_settings.wait_for,
            timeout,
        )
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Select clients: the messages that have them train."""
        round = own_round(server_round, self._state.finished)
        self._round = open_round(self._round_settings, self._state, round, arrays, config, grid)
        return self._round.select(self._round_settings, self._state)

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's aggregate of the usable replies."""
        return self._current().aggregate(self._round_settings, self._state, replies)

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """The strategy's evaluation, among the nodes that can be reached."""
        round, model = self._current(), self._state.model
        round.evaluation = configure_evaluation(
            self._round_settings, round.exchange, model, arrays, config, grid
        )
        return list(round.evaluation.sent.values())

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """The strategy's aggregate of the usable evaluations."""
        round = self._current()
        assert round.evaluation is not None, "configure_evaluate() comes first"
        metrics, self._state.model = round.evaluation.aggregate(replies, self._state.model)
        if not self._round_settings.server_evaluates:
            self._recorder.write(round, self._state, round.arrays, metrics)
        return metrics

    def _recorded(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        """`evaluate_fn`, numbered over the whole run, and with the round written after it."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            round = own_round(server_round, self._state.finished)
            if server_round == 0 and self._state.finished:
                return None  # this model was evaluated when its round ended
            metrics = evaluate_fn(flower_round(round), arrays)
            if server_round:
                self._recorder.write(self._current(), self._state, arrays, metrics)
            return metrics

        return evaluate

    def _current(self) -> Round:
        if self._round is None:
            raise FedcorError("no round is under way: call start, which calls the other verbs")
        return self._round
