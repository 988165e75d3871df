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

from fedcor.core.errors import FedcorError
from fedcor.core.types import Selector
from fedcor.flower.checkpoint import with_earlier
from fedcor.flower.compatibility import check_compatibility
from fedcor.flower.evaluation import configure_evaluation
from fedcor.flower.federation_state import FederationState
from fedcor.flower.logs import true_rounds
from fedcor.flower.protocol import LOG, flower_round, own_round, renumber
from fedcor.flower.run_record import Recorder, describe_run
from fedcor.flower.server_round import Round, open_round
from fedcor.flower.settings import (
    RoundSettings,
    SelectionSettings,
    check_optimiser,
    check_selector,
    check_strategy,
)
from fedcor.flower.strategy_memory import snapshot

_VERBS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class SelectingStrategy(Strategy):
    """A Flower strategy whose clients are chosen by a selector. Usually made by `select_with`.

    It runs its own loop, so it cannot be wrapped: a wrapper goes around `strategy`. A subclass may
    add to `start` and `summary`. It cannot override the other verbs, which are not given every
    reply: override them in `strategy`.

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
        check_compatibility(strategy, selector)
        self.strategy, self.selector, self.settings = strategy, selector, settings
        self._round_settings = RoundSettings(strategy, selector, settings)
        self._recorder = Recorder(self._round_settings)
        self._state = FederationState()
        self._round: Round | None = None  # the one under way

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that overrides a verb: it would miss the replies to questions."""
        super().__init_subclass__(**options)
        for verb in _VERBS:
            if getattr(cls, verb) is not getattr(SelectingStrategy, verb):
                raise FedcorError(
                    f"{cls.__name__} overrides {verb}, which is not given every reply: clients "
                    "that trained for a question of the selector have replied before. Override it "
                    "in the strategy that aggregates, and wrap that: select_with(MyFedAvg(), "
                    "selector)"
                )

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
        """As Flower's `Strategy.start`; with a checkpoint, it resumes after the last full round.

        The result has the metrics of all rounds, those from before this start included.
        """
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        self._round_settings = dataclasses.replace(
            self._round_settings,
            num_rounds=num_rounds,
            train_timeout=timeout,
            evaluate_config=evaluate_config,
            server_evaluates=evaluate_fn is not None,
            fresh=snapshot(self.strategy),
        )
        self._round = None
        with self._recorder.opened(self.header(num_rounds)):
            self._state, arrays = self._recorder.resume(initial_arrays, train_config)
            finished, before = self._state.finished, self._recorder.before
            self._recorder.tell_start()
            if finished >= num_rounds:
                LOG.info("all %d rounds were finished before: %s", num_rounds, self.settings.folder)
                self._recorder.tell_end()
                return with_earlier(Result(arrays=arrays), before)
            with true_rounds(finished, num_rounds):
                result = super().start(
                    grid,
                    arrays,
                    num_rounds - finished,
                    timeout,
                    train_config,
                    evaluate_config,
                    None if evaluate_fn is None else self._recorded(evaluate_fn),
                )
            self._recorder.tell_end()
        if finished and not result.arrays:  # all these rounds left the model as it was
            result.arrays = arrays
        return with_earlier(renumber(result, finished), before)

    def header(self, num_rounds: int) -> dict[str, Any]:
        """The first line of the record; a start with the same folder must have an equal one."""
        return describe_run(self._round_settings, num_rounds)

    def summary(self) -> None:
        """Log who selects, who aggregates, and the settings, ours and the strategy's."""
        self._check_started()
        LOG.info("\t├──> Selection: %s", self.selector)
        if self.settings.rules:
            LOG.info("\t├──> Rules: %s", self.settings.rules.describe())
        unused = "its own sampling for training is not used"
        LOG.info("\t├──> Aggregation: %s (%s)", type(self.strategy).__name__, unused)
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
        self._check_started()
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
        round.note("evaluate", metrics)
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
            if server_round == 0:
                self._recorder.initial_metrics = metrics
            else:
                self._current().note("server", metrics)
                self._recorder.write(self._current(), self._state, arrays, metrics)
            return metrics

        return evaluate

    def _current(self) -> Round:
        self._check_started()
        assert self._round is not None, "configure_train() comes first"
        return self._round

    def _check_started(self) -> None:
        """Refuse somebody else's loop: it knows of no questions, and of no replies to them."""
        if not self._recorder.is_open:
            name = type(self).__name__
            raise FedcorError(
                f"{name} was used outside its own start, as by a strategy that wraps it. Call "
                f"start of the {name} itself. A wrapper goes inside, around the strategy that "
                "aggregates: select_with(Wrapper(FedAvg(), ...), selector)"
            )
