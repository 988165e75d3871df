"""Any Flower strategy with active client selection: it configures, aggregates and evaluates as before; we say who trains.

Flower's own loop runs (`Strategy.start`). Selection happens in configure_train, which may ask the nodes before it answers;
everything that a round needs to be repeated after a crash is written when the round is over.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedcor.errors import ConfigError, FedcorError, RecordError
from fedcor.flower.checkpoint import Standing, StrategyMemory
from fedcor.flower.exchange import Exchange
from fedcor.flower.introduce import introduce
from fedcor.flower.memory import snapshot, wrapped
from fedcor.flower.roster import Roster
from fedcor.flower.round import (
    FlowerRound,
    Knowledge,
    SomeNodes,
    Terms,
    limited,
    renewed,
    says_missing,
    slim,
)
from fedcor.flower.screen import Unusable, clean_evaluation, metrics_of, number, odd_ones_out
from fedcor.flower.wire import LOG, version_of
from fedcor.guard import screen_losses
from fedcor.header import run_header
from fedcor.record import RoundRecord
from fedcor.run_folder import RunWriter, open_run, write_client_names
from fedcor.selection import decide, init_state, join_clients, observe
from fedcor.selectors import FedCor, build_selector, selector_name
from fedcor.types import Array, IntArray, Outcome, Population, Selector, State

__all__ = ["FedCorStrategy", "SelectingStrategy", "select_with"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_LOSSES = (
    "loss",
    "eval_loss",
    "eval-loss",
    "val_loss",
    "val-loss",
    "test_loss",
    "train_loss",
    "train-loss",
)
_ACCURACIES = (
    "accuracy",
    "test_accuracy",
    "eval_accuracy",
    "eval_acc",
    "eval-acc",
    "val_acc",
    "acc",
)
_RATES = ("lr", "learning-rate", "learning_rate")


class SelectingStrategy(Strategy):
    """`strategy` with its clients chosen by `selector`. Made by `select_with`, which says what the arguments mean."""

    def __init__(
        self,
        strategy: Strategy,
        selector: Selector,
        *,
        checkpoint: str | Path | None = None,
        seed: int = 0,
        wait_for: int | None = None,
        probe_timeout: float = 60.0,
        attempts: int = 5,
        loss_key: str | None = None,
        name: str = "flower",
        identity: Literal["name", "key"] = "name",
        secure_aggregation: bool = False,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise ConfigError("strategy", strategy, "must be a flwr.serverapp.strategy.Strategy")
        for _, one in wrapped(strategy):
            if type(one).start is not Strategy.start:
                raise ConfigError(
                    "strategy",
                    type(one).__name__,
                    "has a loop of its own (start), which would not be run",
                )
        if getattr(strategy, "fraction_train", 1.0) == 0.0:
            raise ConfigError(
                "fraction_train", 0.0, "switches training off, so there is nobody to select"
            )
        if not isinstance(selector, Selector):
            raise ConfigError("selector", selector, "must have the verbs init, select and observe")
        if identity not in ("name", "key"):
            raise ConfigError("identity", identity, "must be name or key")
        if secure_aggregation and getattr(selector, "needs_updates", False):
            hint = "choose one that does not, such as random, power_of_choice or fedcor"
            raise ConfigError(
                "selector", selector, "reads single updates, which secure aggregation hides", hint
            )
        for key, value in (("probe_timeout", probe_timeout), ("attempts", attempts)):
            if not value > 0:
                raise ConfigError(key, value, "must be above 0")
        self.strategy, self.selector = strategy, selector
        self._folder = None if checkpoint is None else Path(checkpoint).expanduser()
        self._seed, self._attempts, self._name, self._on_round = seed, attempts, name, on_round
        least = int(getattr(strategy, "min_available_nodes", 1))
        self._wait_for = wait_for or max(least, int(getattr(selector, "clients_per_round", 1)))
        self._terms = Terms(
            strategy,
            seed,
            train_timeout=3600.0,
            probe_timeout=probe_timeout,
            evaluate_config=ConfigRecord(),
            loss_keys=_LOSSES if loss_key is None else (loss_key,),
            arrays_key=str(getattr(strategy, "arrayrecord_key", "arrays")),
            config_key=str(getattr(strategy, "configrecord_key", "config")),
            weight_key=str(getattr(strategy, "weighted_by_key", "num-examples")),
            secure_aggregation=secure_aggregation,
        )
        self._memory = StrategyMemory(strategy)
        self._writer: RunWriter | None = None
        self._evaluated = False  # the round's evaluation comes from the server
        self._by_key = identity == "key"
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of any client yet."""
        self._roster, self._knowledge = Roster(), Knowledge()
        self._state: State | None = None
        self._population: Population | None = None  # that the state was made for
        self._before = 0  # rounds done before this start
        self._awaited = False
        self._evaluation: dict[int, Message] = {}

    # --- the loop

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
        """As Flower's `Strategy.start`, from the last finished round on where there is a checkpoint."""
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        self._terms = dataclasses.replace(
            self._terms, train_timeout=timeout, evaluate_config=evaluate_config
        )
        self._evaluated, self._rounds = evaluate_fn is not None, num_rounds
        self._first_config = dict(train_config.items())
        self._forget()
        with ExitStack() as stack:
            arrays = initial_arrays
            if self._folder is not None:
                self._writer = stack.enter_context(
                    open_run(self._folder, self._header(num_rounds), resume=True)
                )
                stack.callback(self._forget_writer)
                if self._writer.checkpoint is not None:
                    arrays = self._resume(self._writer.checkpoint, initial_arrays, train_config)
                self._writer.begin()
            if self._before >= num_rounds:
                LOG.info("all %d rounds were done before: %s", num_rounds, self._folder)
                return Result(arrays=arrays)
            result = super().start(
                grid,
                arrays,
                num_rounds - self._before,
                timeout,
                train_config,
                evaluate_config,
                None if evaluate_fn is None else self._recorded(evaluate_fn),
            )
        return _shifted(result, self._before)

    def _recorded(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if server_round == 0 and self._before:
                return None  # this model was evaluated when its round ended
            metrics = evaluate_fn(server_round + self._before, arrays)
            if server_round:
                self._finish(arrays, metrics)
            return metrics

        return evaluate

    def summary(self) -> None:
        LOG.info("\t├──> Selection: %s", self.selector)
        LOG.info(
            "\t├──> Waits for %d nodes; probes answer within %g s",
            self._wait_for,
            self._terms.probe_timeout,
        )
        self.strategy.summary()

    # --- one round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._started = time.perf_counter()
        self._grid, self._arrays, self._config = grid, arrays, config
        self._outcome: Outcome | None = None
        self._exchange = Exchange(grid, self._roster, server_round + self._before - 1)
        self._refused = self._probed = 0
        self._unconfigured = snapshot(self.strategy)
        version = version_of(arrays)
        if (
            self._knowledge.version != version
        ):  # the first model, or one that was changed by someone else
            self._knowledge = Knowledge(version, signature=self._knowledge.signature)
        return self._select(attempt=0)

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        for attempt in range(1, self._attempts + 1):
            self._round.collect(replies)
            arrays, metrics, outcome, self._knowledge = self._round.close()
            self._refused += self._round.refused
            self._probed += self._round.probed
            if len(outcome.participated):  # a strategy may still decide to leave the model as it is
                self._arrays = self._arrays if arrays is None else arrays
                break
            told = dict(self._exchange.faults)
            LOG.error(
                "round %d: NOBODY delivered a usable update: %s", self._exchange.round + 1, told
            )
            if attempt == self._attempts:
                raise FedcorError(
                    f"round {self._exchange.round + 1}: {attempt} attempts, and nobody delivered a usable update ({told}); "
                    "look at the nodes' logs. What was finished is kept: with a checkpoint, the same start goes on from it"
                )
            pause = min(2.0 ** (attempt - 1), self._terms.probe_timeout)  # an outage may pass
            LOG.error(
                "round %d: attempt %d of %d, in %g s",
                self._exchange.round + 1,
                attempt + 1,
                self._attempts,
                pause,
            )
            time.sleep(pause)
            self._exchange.gone.clear()
            replies = self._grid.send_and_receive(
                self._select(attempt), timeout=self._terms.train_timeout
            )
        for key, value in self._round.configured.items():  # a strategy's changes, of one call
            self._config[key] = value
        self._state = observe(self.selector, self._next_state, outcome, outcome.round + 1)
        self._outcome = outcome
        return arrays, metrics

    def _select(self, attempt: int) -> list[Message]:
        """Who trains now: the messages that have not gone out for a question yet."""
        available = self._reachable(again=attempt > 0)
        state = self._grown()
        self._round = FlowerRound(
            self._terms,
            self._exchange,
            self._arrays,
            self._config,
            self._knowledge,
            self._unconfigured,
            available,
            attempt,
        )
        decision = decide(self.selector, state, self._round, self._exchange.round + 1)
        chosen, self._next_state, self._why = decision.chosen, decision.state, decision.why
        messages = self._round.pending(chosen)
        LOG.info(
            "configure_train: selected clients %s (of %d reachable, %d asked)",
            chosen.tolist(),
            len(available),
            self._round.probed,
        )
        return messages

    def _grown(self) -> State:
        """The selector's memory, for the clients that there are by now."""
        population = self._roster.population()
        if self._state is None or self._population is None:
            self._state = init_state(self.selector, population)
        elif not np.array_equal(self._population.sizes, population.sizes):
            joined = join_clients(self.selector, self._state, population)
            if joined is not None:
                self._state = joined
            elif self._population.count < population.count:
                LOG.warning(
                    "%s cannot take in new clients: its memory begins afresh",
                    type(self.selector).__name__,
                )
                self._state = init_state(self.selector, population)
        self._population = population
        return self._state

    # --- who is there

    def _reachable(self, *, again: bool = False) -> IntArray:
        """Clients that may be asked or chosen. At first the wanted number of nodes is waited for, later only for anyone."""
        wanted = 1 if self._awaited else max(self._wait_for, len(self._roster))
        end = time.monotonic() + (self._terms.probe_timeout if len(self._roster) else float("inf"))
        told = -1
        while True:
            nodes = list(self._grid.get_node_ids())
            if len(nodes) >= wanted or (nodes and time.monotonic() > end):
                self._enrol(nodes)
                available = self._roster.reachable(nodes, self._exchange.round)
                if len(available):
                    self._awaited = True
                    return available
                LOG.error(
                    "round %d: %d nodes, but none says who it is",
                    self._exchange.round + 1,
                    len(nodes),
                )
                self._roster.ask_all_again()
            elif told != len(nodes):
                told = len(nodes)
                LOG.info(
                    "Waiting for nodes to connect: %d connected (minimum required: %d).",
                    told,
                    wanted,
                )
            time.sleep(1.0 if again or self._awaited else 0.2)

    def _enrol(self, nodes: list[int]) -> None:
        strangers = self._roster.strangers(nodes, self._exchange.round)
        if not strangers:
            return
        if self._roster.names and self._awaited:
            LOG.info("round %d: %d new nodes", self._exchange.round + 1, len(strangers))
        claims = introduce(
            self._exchange, strangers, self._terms.probe_timeout, by_key=self._by_key
        )
        self._roster.enrol(claims)
        for node in set(strangers) - claims.keys():
            LOG.warning("round %d: node %d does not say who it is", self._exchange.round + 1, node)
            self._roster.mute(node, self._exchange.round)

    # --- evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        nodes = list(grid.get_node_ids())
        clients = self._roster.reachable(nodes, server_round + self._before - 1)
        some = [self._roster.node(client) for client in clients.tolist()] or nodes
        with limited(self.strategy, len(some)):
            messages = list(
                self.strategy.configure_evaluate(
                    server_round + self._before, arrays, config, SomeNodes(grid, some)
                )
            )
        known = {
            client: m
            for m in messages
            if (client := self._roster.client(m.metadata.dst_node_id)) >= 0
        }
        self._full, self._sent_at = known, time.monotonic()
        about = self._knowledge
        self._evaluation = {
            client: slim(
                m, arrays, about.version, [about.version], client in about.holders, remember=True
            )
            if self._roster.understands(client)
            else m
            for client, m in known.items()
        }
        self._exchange.sent(self._evaluation.values())
        return list(self._evaluation.values())

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        received = self._exchange.received(self._evaluation, replies)
        lost = {
            k: renewed(self._full[k])
            for k, reply in received.items()
            if says_missing(self._evaluation[k], reply)
        }
        if lost:
            left = self._sent_at + self._terms.train_timeout - time.monotonic()
            received |= self._exchange.ask(lost, max(0.0, left))
        usable = self._usable_evaluations(received)
        about = self._knowledge
        answered = {k for k in usable if self._roster.understands(k) and k not in lost}
        losses = dict(about.losses)
        for (
            client,
            reply,
        ) in usable.items():  # they came anyway: nobody need ask for them in the next round
            loss, _ = screen_losses(
                np.array([number(metrics_of(reply.content), *self._terms.loss_keys)])
            )
            if np.isfinite(loss[0]):
                losses[client] = float(loss[0])
        holders = (about.holders | answered) - lost.keys()
        self._knowledge = dataclasses.replace(about, losses=losses, holders=holders)
        metrics = self.strategy.aggregate_evaluate(
            server_round + self._before, list(usable.values())
        )
        if not self._evaluated:
            self._finish(self._arrays, metrics)
        return metrics

    def _usable_evaluations(self, received: dict[int, Message]) -> dict[int, Message]:
        usable: dict[int, Message] = {}
        for client, reply in sorted(received.items()):
            try:
                reply.content = clean_evaluation(
                    reply.content, self._terms.weight_key, self._terms.loss_keys
                )
                usable[client] = reply
            except Unusable as wrong:
                self._exchange.refuse(client, wrong.kind, wrong.why)
        for client in odd_ones_out(usable, None)[0]:
            self._exchange.refuse(
                client, "malformed", "its evaluation is built otherwise than the others'"
            )
            del usable[client]
        return usable

    # --- the record

    def _finish(self, arrays: ArrayRecord, metrics: MetricRecord | None) -> None:
        """The round is over: write its line, and what the next one needs."""
        if self._outcome is None:
            return
        scores = MetricRecord() if metrics is None else metrics
        rates = [
            self._config[key] for key in _RATES if isinstance(self._config.get(key), int | float)
        ]
        record = RoundRecord(
            round=self._outcome.round,
            selected=self._outcome.selected.tolist(),
            participated=self._outcome.participated.tolist(),
            test_accuracy=number(scores, *_ACCURACIES),
            test_loss=number(scores, *self._terms.loss_keys),
            learning_rate=float(rates[0]) if rates else float("nan"),  # type: ignore[arg-type]
            probed=self._probed,
            refused=self._refused,
            bytes_down=self._exchange.bytes_down,
            bytes_up=self._exchange.bytes_up,
            seconds=round(time.perf_counter() - self._started, 6),
            why=self._why,
        )
        if self._writer is not None:
            self._writer.append(
                {**dataclasses.asdict(record), "faults": dict(self._exchange.faults)}
            )
            write_client_names(self._writer.folder, self._roster.names)
            self._writer.save(self._standing(record.round + 1, arrays).to_arrays())
        if self._on_round is not None:
            self._on_round(record)

    def _standing(self, done: int, arrays: ArrayRecord) -> Standing:
        assert self._state is not None
        assert self._population is not None
        config = {
            key: value
            for key, value in self._config.items()
            if value != self._first_config.get(key)
        }
        memory = self._memory.read()
        return Standing(
            done,
            arrays,
            self._knowledge,
            self._roster,
            self._population,
            self._state,
            memory,
            config,
        )

    def _resume(
        self, checkpoint: Mapping[str, Array], initial: ArrayRecord, train_config: ConfigRecord
    ) -> ArrayRecord:
        """Stand where the last finished round left off."""
        try:
            standing = Standing.from_arrays(checkpoint)
        except RecordError as error:
            raise RecordError(
                f"{self._folder}: {error}; choose another folder, or delete it to begin again"
            ) from error
        arrays = standing.arrays
        if [(n, a.shape) for n, a in arrays.items()] != [(n, a.shape) for n, a in initial.items()]:
            raise RecordError(
                f"the model in {self._folder} has other arrays than the one that this run begins with"
            )
        self._before, self._knowledge, self._roster = (
            standing.done,
            standing.knowledge,
            standing.roster,
        )
        self._population, self._state = standing.population, standing.state
        self._memory.write(standing.strategy)
        for key, value in standing.config.items():
            train_config[key] = value
        LOG.info("going on after round %d of %d, from %s", self._before, self._rounds, self._folder)
        return arrays

    def _forget_writer(self) -> None:
        self._writer = None

    def _header(self, rounds: int) -> dict[str, Any]:
        """What the record says of the run, and what a later start is held against."""
        described = dataclasses.asdict(self.selector)  # type: ignore[call-overload]
        selector = selector_name(self.selector)
        config = {
            "strategy": type(self.strategy).__name__,
            "selectors": {selector: described},
            "training": {
                "rounds": rounds,
                "clients_per_round": described.get("clients_per_round"),
            },
        }
        return run_header(self._name, selector, self._seed, config, {"flwr": installed("flwr")})


class FedCorStrategy(SelectingStrategy):
    """FedCor's selection around a Flower strategy (FedAvg unless another is given).

    `settings` are those of `select_with` (checkpoint, seed, ...) and the selector's own (warmup, interval, beta, ...).
    """

    selector: FedCor

    def __init__(
        self, clients_per_round: int, strategy: Strategy | None = None, **settings: Any
    ) -> None:
        ours = {key: settings.pop(key) for key in _SETTINGS & settings.keys()}
        selector = build_selector("fedcor", clients_per_round, settings)
        super().__init__(FedAvg() if strategy is None else strategy, selector, **ours)


_SETTINGS = inspect.signature(SelectingStrategy.__init__).parameters.keys() - {
    "self",
    "strategy",
    "selector",
}


def select_with(
    strategy: Strategy,
    selector: Selector | str,
    *,
    clients_per_round: int | None = None,
    **settings: Any,
) -> SelectingStrategy:
    """`strategy` as it is, with its clients chosen by `selector`: an object, or a name with `clients_per_round`.

    checkpoint     folder for the record and the state; a start with the same folder goes on where it was left
    seed           of the selector's draws
    wait_for       nodes that must be connected before the first round (default: clients_per_round)
    probe_timeout  seconds within which a node answers a question; the deadline of training is `timeout` of `start`
    attempts       how often a round in which nobody delivered is tried before the run ends with an error
    loss_key       metric that holds a client's loss (default: the first of loss, eval_loss, val_loss, train_loss ...)
    name           of the experiment, in the record
    identity       clients are known by what they say (name), or by their nodes' keys, which the SuperLink vouches for (key)
    secure_aggregation  single updates are hidden from the server: a selector that reads them is refused
    on_round       called with the record of every finished round
    """
    if isinstance(selector, str):
        if clients_per_round is None:
            raise ConfigError("clients_per_round", None, "must be given with a selector's name")
        selector = build_selector(selector, clients_per_round)
    elif clients_per_round is not None:
        raise ConfigError(
            "clients_per_round", clients_per_round, "is set by the selector that you gave"
        )
    return SelectingStrategy(strategy, selector, **settings)


def _shifted(result: Result, by: int) -> Result:
    """The result with the rounds' true numbers."""
    for name, value in vars(result).items():
        if isinstance(value, dict):
            setattr(result, name, {key + by if key else key: item for key, item in value.items()})
    return result
