"""Any Flower strategy with client selection: it aggregates as before, a selector says who trains.

Flower's own loop runs (`Strategy.start`). This module adapts its verbs to a round
(`server_round.py`) and its record (`run_record.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedcor import selectors
from fedcor.core.config import suggests
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.types import Selector, selector_traits
from fedcor.flower.exchange import EnoughGrid
from fedcor.flower.federation_state import FederationState, first_state
from fedcor.flower.logs import counted, log_round
from fedcor.flower.optimiser_strategy import OptimiserStrategy
from fedcor.flower.preflight import check_setup
from fedcor.flower.protocol import LOG, flower_round, own_round, renumber
from fedcor.flower.run_record import Recorder, describe_run, with_earlier
from fedcor.flower.server_round import ServerRound, open_round
from fedcor.flower.settings import RunSettings, SelectionKeywords, SelectionSettings
from fedcor.flower.strategy_memory import snapshot
from fedcor.rounds.rules.declaration import ClientsPerRound, Rules
from fedcor.selectors import build_selector, selector_class
from fedcor.selectors.fedcor import FedCor

_VERBS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_Function = TypeVar("_Function", bound=Callable[..., Any])


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
        check_setup(strategy, selector, settings)
        self.strategy, self.selector, self.settings = strategy, selector, settings
        self._run = RunSettings(strategy, selector, settings)
        self._recorder = Recorder(self._run)
        self._state = FederationState(first_state(ArrayRecord()))
        self._round: ServerRound | None = None  # the one under way

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
        self._run = RunSettings(
            self.strategy,
            self.selector,
            self.settings,
            num_rounds,
            timeout,
            evaluate_config,
            server_evaluates=evaluate_fn is not None,
            fresh=snapshot(self.strategy),
            counters=frozenset(
                name for name, array in initial_arrays.items() if array.dtype[:1] in ("i", "u", "b")
            ),
        )
        self._round = None
        grid = grid if self.settings.over_selection == 1.0 else EnoughGrid(grid)
        with self._recorder.opened(self.header(num_rounds)):
            self._state, arrays = self._recorder.resume(initial_arrays, train_config)
            finished, before = self._state.finished, self._recorder.before
            self._recorder.tell_start()
            if finished >= num_rounds:
                self._log_nothing_to_do(num_rounds)
                self._recorder.tell_end()
                return with_earlier(Result(arrays=arrays), before)
            result = super().start(
                grid,
                arrays,
                num_rounds=num_rounds - finished,
                timeout=timeout,
                train_config=train_config,
                evaluate_config=evaluate_config,
                evaluate_fn=None if evaluate_fn is None else self._recorded(evaluate_fn),
            )
            self._recorder.tell_end()
        if finished and not result.arrays:  # all these rounds left the model as it was
            result.arrays = arrays
        return with_earlier(renumber(result, finished), before)

    def header(self, num_rounds: int) -> dict[str, Any]:
        """The first line of the record; a start with the same folder must have an equal one."""
        return describe_run(self._run, num_rounds)

    def summary(self) -> None:
        """Log who selects, who aggregates, and the settings, ours and the strategy's."""
        self._check_started()
        LOG.info("\t├──> Selection: %s", self.selector)
        if self.settings.rules:
            LOG.info("\t├──> Rules: %s", self.settings.rules.describe())
        unused = "its own sampling for training is not used"
        LOG.info("\t├──> Aggregation: %s (%s)", type(self.strategy).__name__, unused)
        timeout = self._run.probe_timeout
        LOG.info(
            "\t├──> Waits for %s; probe timeout %g s",
            counted(self._run.wait_for, "node"),
            timeout,
        )
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Select clients: the messages that have them train."""
        self._check_started()
        assert self._state.current.round == own_round(server_round, self._state.finished)
        self._round = open_round(self._run, self._state, grid, arrays, config)
        return list(self._round.select().values())

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's aggregate of the usable replies."""
        return self._current().aggregate(replies)

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """The strategy's evaluation, among the nodes that can be reached."""
        return self._current().evaluate(arrays, config, grid)

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """The strategy's aggregate of the usable evaluations."""
        round = self._current()
        metrics = round.evaluation.aggregate(replies)
        round.note("evaluate", metrics)
        if not self._run.server_evaluates:
            self._finish(round, round.arrays, metrics)
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
                current = self._current()
                current.note("server", metrics)
                self._finish(current, arrays, metrics)
            return metrics

        return evaluate

    def _finish(self, round: ServerRound, arrays: ArrayRecord, scores: MetricRecord | None) -> None:
        """Write the round, which ended with the model `arrays`, and log it."""
        finished = round.finish(arrays, scores)
        self._recorder.write(finished, self._state)
        log_round(finished.record, self._run.num_rounds, self._run.selector_name)

    def _log_nothing_to_do(self, num_rounds: int) -> None:
        """Log why no round is left."""
        if num_rounds < 1:
            LOG.info("nothing to do: num_rounds is %d", num_rounds)
            return
        LOG.warning(
            f"nothing to do: the run in {self.settings.folder} already has "
            f"{counted(self._state.finished, 'round')}. Its model is returned, and the given model "
            "is ignored: choose another folder to train from it"
        )

    def _current(self) -> ServerRound:
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


def _spell_out(keywords: type, *defaults: type) -> Callable[[_Function], _Function]:
    """Show the keywords that a function takes as `Unpack[keywords]` in its signature, for `help`.

    Args:
        keywords: A TypedDict.
        defaults: Dataclasses that have these keywords as fields, with their defaults.
    """
    fields = {field.name: field for one in defaults for field in dataclasses.fields(one)}
    kind = inspect.Parameter.KEYWORD_ONLY
    spelled = [
        inspect.Parameter(name, kind, default=fields[name].default, annotation=fields[name].type)
        for name in inspect.get_annotations(keywords)
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = [*list(signature.parameters.values())[:-1], *spelled]
        vars(function)["__signature__"] = signature.replace(parameters=parameters)
        return function

    return decorate


class FedCorKeywords(SelectionKeywords, total=False):
    """The keywords of `FedCorStrategy`: settings of `fedcor.FedCor`, and `SelectionSettings`."""

    warmup: int
    interval: int
    samples_per_refit: int
    warmup_history: int
    history: int
    discount: float
    dimension: int
    noise: float
    warmup_steps: int
    refit_steps: int
    gp_learning_rate: float
    beta: float


class FedCorStrategy(SelectingStrategy):
    """A Flower strategy whose clients are chosen by FedCor.

    Args:
        clients_per_round: C, clients that train in each round; or round, from 1 -> C from then on;
            or a function of the round.
        strategy: Aggregates their updates; `FedAvg()` unless another is given.
        keywords: Any of `warmup`, `interval`, `samples_per_refit`, `warmup_history`, `history`,
            `discount`, `dimension`, `noise`, `warmup_steps`, `refit_steps`, `gp_learning_rate` and
            `beta`, as in `fedcor.FedCor`; and every field of `SelectionSettings`.

    Example:
        strategy = FedCorStrategy(5, warmup=10, checkpoint="runs/mine")
        strategy.start(grid, initial_arrays, num_rounds=100)
    """

    selector: FedCor

    @suggests
    @_spell_out(FedCorKeywords, FedCor, SelectionSettings)
    def __init__(
        self,
        clients_per_round: int | ClientsPerRound,
        strategy: Strategy | None = None,
        **keywords: Unpack[FedCorKeywords],
    ) -> None:
        first, schedule = _first_number(clients_per_round)
        settings: dict[str, Any] = {**keywords, "clients_per_round": schedule}
        options = {key: settings.pop(key) for key in keywords if hasattr(FedCor, key)}
        super().__init__(
            FedAvg() if strategy is None else strategy,
            build_selector("fedcor", first, options),
            SelectionSettings(**settings),
        )


@suggests
@_spell_out(SelectionKeywords, SelectionSettings)
def select_with(
    strategy: Strategy,
    selector: Selector | str | None = None,
    *,
    clients_per_round: int | ClientsPerRound | None = None,
    **keywords: Unpack[SelectionKeywords],
) -> SelectingStrategy:
    """`strategy` as it is, with its clients chosen by `selector`.

    Without a selector, the package's default one chooses. It goes with an optimiser of its own,
    which then aggregates in place of Flower's plain `FedAvg`. Any other strategy, and one that is
    given with a selector, keeps its own aggregation. The log of `start` says which selector and
    which aggregation are used.

    Args:
        strategy: Any strategy of `flwr.serverapp.strategy`, `OptimiserStrategy`, or your own.
        selector: A selector, or the name of one with `clients_per_round`. None: the default one,
            `fedcor.selectors.DEFAULT_SELECTOR`.
        clients_per_round: C, clients that train in each round; or round, from 1 -> C from then on;
            or a function of the round. Must be given unless `selector` is an object, which sets
            it itself.
        keywords: The other fields of `SelectionSettings`.

    Returns:
        A strategy to `start` as any other.

    Example:
        strategy = select_with(FedAvg(), clients_per_round=5)
        strategy = select_with(FedAdam(eta=0.05), PowerOfChoice(5), checkpoint="runs/mine")
        strategy.start(grid, initial_arrays, num_rounds=100)
    """
    first, schedule = (
        (None, None) if clients_per_round is None else _first_number(clients_per_round)
    )
    given: dict[str, Any] = {**keywords, "clients_per_round": schedule}
    settings = SelectionSettings(**given)
    if selector is None or isinstance(selector, str):
        name = selector or selectors.DEFAULT_SELECTOR
        counts = "clients_per_round" in {
            one.name for one in dataclasses.fields(selector_class(name))
        }
        if first is None and counts:
            where = "where no selector is" if selector is None else "with a selector's name"
            raise ConfigError("clients_per_round", None, f"must be given {where}")
        if first is not None and not counts:
            message = "the selector %s takes every client that it can reach: clients_per_round = %s"
            LOG.warning(f"{message} is not used", name, clients_per_round)
        chosen = build_selector(name, first or 1)
    elif clients_per_round is not None and schedule is None:
        allowed = "is set by the selector that you gave"
        raise ConfigError("clients_per_round", clients_per_round, allowed)
    else:
        chosen = selector
    if selector is None and type(strategy) is FedAvg:
        strategy = _with_optimiser(strategy, selector_traits(chosen).optimiser)
    return SelectingStrategy(strategy, chosen, settings)


def _first_number(given: int | ClientsPerRound) -> tuple[int, ClientsPerRound | None]:
    """Clients in the first round, and how they change if they do."""
    if not isinstance(given, Mapping) and not callable(given):
        return given, None
    if isinstance(given, Mapping) and any(round == 0 for round in given):
        allowed = "begins with round 0, and Flower counts rounds from 1"
        raise ConfigError("clients_per_round", given, allowed)
    first = Rules(clients_per_round=given).clients_at(1)
    if first is None:
        allowed = "must say how many clients there are in round 1, the first one"
        raise ConfigError("clients_per_round", given, allowed)
    return first, given


def _with_optimiser(strategy: FedAvg, optimiser: str) -> OptimiserStrategy:
    """`strategy` with all its settings, but aggregating with `optimiser`."""
    aggregating = OptimiserStrategy(optimiser)
    vars(aggregating).update(vars(strategy))
    return aggregating
