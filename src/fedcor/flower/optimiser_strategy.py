"""A federated optimiser of fedcor as a Flower strategy.

It samples, configures and evaluates as Flower's FedAvg. Only the aggregation differs: the trained
models go through `Optimiser.step`, and the optimiser's state is kept here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from fedcor.core import types
from fedcor.core.config import check_keys
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.text import one_line
from fedcor.core.types import (
    BoolArray,
    Delivery,
    FloatArray,
    IntArray,
    Optimiser,
    Population,
    State,
    optimiser_traits,
)
from fedcor.flower.client_registry import population_of
from fedcor.flower.protocol import LOG, RATE, STEPS, flower_round, own_round
from fedcor.flower.replies import Terms, Unusable, number, read_model
from fedcor.flower.strategy_memory import Frozen, wrapped
from fedcor.optimisers import as_optimiser, build_optimiser
from fedcor.rounds.aggregation import init_optimiser, join_optimiser, read_only, take_step
from fedcor.rounds.model_arrays import PLAIN, Arrays, Layout, layout_of

_MOST_STEPS = 1e9  # beyond this it is not a number of steps
_MOST_MEDIANS = 10  # a client's steps are at most so many times the round's median


@dataclass(frozen=True)
class LocalTraining:
    """How far the clients of a round trained.

    Attributes:
        steps: (m,) Local steps of each; all 1 if nobody says it.
        learning_rate: Of the local steps: the median of the clients'; 1 if nobody says it.
        doubts: (row of the client, what it said and what is used) where a number is not used as it
            was said.
    """

    steps: IntArray
    learning_rate: float
    doubts: Sequence[tuple[int, str]]

    @property
    def step_sizes(self) -> FloatArray:
        """(m,) Learning rate x local steps of each."""
        return self.learning_rate * self.steps.astype(np.float64)

    def log_doubts(self, names: Sequence[str]) -> bool:
        """Log them in one warning, if there are any; returns whether there are.

        Args:
            names: (m) What the clients are called.
        """
        if self.doubts:
            sentences = "; ".join(f"{one_line(names[row])}: {what}" for row, what in self.doubts)
            LOG.warning("in the metrics of replies, %s (this is said once per run)", sentences)
        return bool(self.doubts)


def read_local_training(metrics: Sequence[MetricRecord]) -> LocalTraining:
    """What the metrics of a round's replies say, one record per client.

    A number that is missing or impossible is taken to be the median of the others'; 1 if nobody
    says a possible one. Steps are at most ten times the median.
    """
    steps, rates = (np.array([number(one, key) for one in metrics]) for key in (STEPS, RATE))
    possible = (steps >= 1) & (steps <= _MOST_STEPS)
    usual = _median(steps[possible])
    used = np.rint(np.where(possible, np.minimum(steps, _MOST_MEDIANS * usual), usual))
    possible_rate = (rates > 0) & np.isfinite(rates)
    rate = _median(rates[possible_rate])
    doubts = [
        *_doubts(STEPS, steps, possible & (steps <= _MOST_MEDIANS * usual), used),
        *_doubts(RATE, rates, possible_rate, np.full(len(rates), rate)),
    ]
    return LocalTraining(used.astype(np.int64), rate, doubts)


def _median(values: FloatArray) -> float:
    """1 if there are none."""
    return float(np.median(values)) if len(values) else 1.0


def _doubts(
    key: str, said: FloatArray, believed: BoolArray, used: FloatArray
) -> list[tuple[int, str]]:
    """What is not used as it was said. That nobody says anything is usual."""
    if np.isnan(said).all():
        return []
    rows = np.flatnonzero(~believed).tolist()
    what = {row: "missing" if np.isnan(said[row]) else f"{said[row]:g}" for row in rows}
    return [(row, f"{key} is {what[row]}, {used[row]:g} is used") for row in rows]


@dataclass(frozen=True)
class Company:
    """Who is who in a round.

    Attributes:
        clients: Node -> the client on it.
        population: All clients that are known; of size 0 if the rules exclude them.
        metrics: Client -> all metrics of its reply, where a part of them was left out.
    """

    clients: Mapping[int, int]
    population: Population
    metrics: Mapping[int, MetricRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Delivered:
    """What came back from a round.

    Attributes:
        round: Its number, from 0.
        clients: (m,) Sorted, each once.
        weights: (m,) Of each in the mean; they sum to 1.
        training: How far each trained.
        replies: (m) The reply of each.
    """

    round: int
    clients: IntArray
    weights: FloatArray
    training: LocalTraining
    replies: Sequence[Message]

    def models(self) -> list[Mapping[str, types.Array]]:
        """The arrays that each client sent, by name."""
        records = [next(iter(one.content.array_records.values())) for one in self.replies]
        return [{name: array.numpy() for name, array in record.items()} for record in records]

    def as_delivery(self, layout: Layout, model: Mapping[str, types.Array]) -> Delivery:
        """For an optimiser that works on the arrays of `layout`. `model` is w^t."""
        start = read_only(layout.flatten(model))

        @functools.cache
        def updates() -> types.Array:  # (m, P)
            rows = np.stack([layout.flatten(one) for one in self.models()])
            rows -= start
            return read_only(rows)

        return Delivery(
            self.round,
            start,
            clients=read_only(self.clients),
            weights=read_only(self.weights),
            steps=read_only(self.training.steps),
            learning_rate=self.training.learning_rate,
            read_updates=updates,
        )


def read_delivered(
    server_round: int, replies: Sequence[Message], company: Company, weight_key: str
) -> Delivered:
    """What usable replies say. A client that is in them twice counts twice in the mean."""
    first: dict[int, Message] = {}
    weight: dict[int, float] = {}
    for reply in replies:
        client = company.clients[reply.metadata.src_node_id]
        first.setdefault(client, reply)
        given = number(_metrics(reply), weight_key)
        weight[client] = weight.get(client, 0.0) + given
    clients = sorted(first)
    weights = np.array([weight[client] for client in clients])
    read = {client: _metrics(first[client]) for client in clients}
    metrics = {**read, **company.metrics}
    return Delivered(
        own_round(server_round, finished=0),
        np.array(clients, dtype=np.int64),
        weights / weights.sum(),
        read_local_training([metrics[client] for client in clients]),
        [first[client] for client in clients],
    )


@dataclass(frozen=True)
class _Begun:
    """What a round starts from. Nobody changes it, so a copy is the same object."""

    model: Arrays
    nodes: frozenset[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Begun:
        return self


class OptimiserStrategy(FedAvg):
    """A Flower strategy that aggregates with a federated optimiser of fedcor.

    A client's weight in the mean is its `num-examples` (`weighted_by_key`), as in Flower's FedAvg.
    So an optimiser with a field `weighted` runs with `weighted=True`, whatever it was given: what
    it remembers of clients must be averaged with the weights of their replies.

    Arrays that are not of floats, those that are not finite (a mask of -inf), and those that
    `plain` names do not go through the optimiser: they are averaged, and keep their type.

    Some optimisers use how far a client trained. A client says it with the metrics `local-steps`
    and `learning-rate` of its reply to a train message. One that is missing or impossible is taken
    to be the median of the round's others, or 1 if there is none; steps are at most ten times their
    median. The learning rate of a round is the median of its replies'.

    Used alone, a client is a node: one that comes back with another id is a new client, and every
    `start` begins with the optimiser's initial state. Within `select_with`, a client is known by
    its name, and the state is written to the checkpoint.

    An optimiser that changes local training is refused, since the ClientApp would have to do it.

    Args:
        optimiser: An optimiser, or the name of one.
        plain: Patterns of the names of arrays that are averaged, as `*running_mean`. The default
            names the statistics of batch normalisation in torch.
        settings: The keywords of Flower's `FedAvg`.

    Example:
        strategy = OptimiserStrategy(FedVARP(), fraction_train=0.1)
        strategy.start(grid, initial_arrays, num_rounds=100)
    """

    def __init__(
        self, optimiser: Optimiser | str, *, plain: Sequence[str] = PLAIN, **settings: Any
    ) -> None:
        check_keys(settings, [*list(inspect.signature(FedAvg).parameters), "plain"])
        if isinstance(plain, str) or not all(isinstance(pattern, str) for pattern in plain):
            raise ConfigError("plain", plain, "must be a list of patterns of names")
        super().__init__(**settings)
        self.optimiser = self._accept(optimiser)
        self.plain = tuple(plain)
        self._begun: _Begun | None = None  # the round under way
        self._memory: Frozen | None = None  # the optimiser's state; None before its first round
        self._sizes: IntArray | None = None  # of the clients that the state was made for
        # Used alone: node -> number of samples, NaN where it is unknown. A node's place in it is
        # the number of its client.
        self._met: dict[int, float] = {}
        self._doubted = False  # used alone: whether this run has logged a doubt about metrics
        self._company: Company | None = None  # within `introduced`

    @property
    def memory(self) -> State:
        """What the optimiser remembers: its state after the last round."""
        return {} if self._memory is None else self._memory

    def _accept(self, given: Optimiser | str) -> Optimiser:
        """The optimiser, if it leaves local training alone."""
        try:
            optimiser = build_optimiser(given) if isinstance(given, str) else as_optimiser(given)
        except ConfigError as error:
            about = error.renamed if error.key == "name" else error.under
            raise about("optimiser") from None
        if callable(getattr(optimiser, "corrections", None)):
            allowed = "corrects the local steps of clients, which your ClientApp would have to do"
            hint = "the simulator runs it; on Flower, choose one that works on the server alone"
            raise ConfigError("optimiser", given, allowed, hint)
        if optimiser_traits(optimiser).proximal:
            allowed = "needs a proximal term in local training, which your ClientApp has to add"
            hint = "use flwr.serverapp.strategy.FedProx, which sends it proximal-mu"
            raise ConfigError("optimiser", given, allowed, hint)
        return _weighted(optimiser)

    def summary(self) -> None:
        """Log the settings, the optimiser first."""
        LOG.info("\t├──> Optimiser: %s", self.optimiser)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As FedAvg. The first round of a run begins without a memory."""
        messages = super().configure_train(server_round, arrays, config, grid)
        if server_round == 1:
            self._memory, self._sizes, self._met, self._doubted = None, None, {}, False
        model = {name: array.numpy() for name, array in arrays.items()}
        self._begun = _Begun(model, frozenset(grid.get_node_ids()))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The optimiser's step with the models in `replies`; metrics as FedAvg aggregates them."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise FedcorError("aggregate_train was called without configure_train before it")
        replies = list(replies)
        if self._company is None:  # nobody has checked them
            replies = [one for one in replies if one.has_error() or _usable(one, begun.model, self)]
        # FedAvg logs errors, and averages the metrics and the arrays that no optimiser sees.
        averages, metrics = super().aggregate_train(server_round, replies)
        if averages is None:
            return None, metrics
        replies = [reply for reply in replies if not reply.has_error()]
        company = self._company or self._meet(begun.nodes, replies)
        delivered = read_delivered(server_round, replies, company, self.weighted_by_key)
        if self._company is None and not self._doubted:
            names = [f"node {reply.metadata.src_node_id}" for reply in delivered.replies]
            self._doubted = delivered.training.log_doubts(names)
        state = self._state_for(company.population, begun.model)
        stepped, state = self.next_model(state, begun.model, delivered)
        self._memory = Frozen(state)
        arrays = {
            name: stepped[name] if name in stepped else _cast(averages[name].numpy(), like.dtype)
            for name, like in begun.model.items()
        }
        return ArrayRecord({name: Array(values) for name, values in arrays.items()}), metrics

    def first_state(self, population: Population, model: Arrays) -> State:
        """The optimiser's state before the first round."""
        flat = layout_of(model, self.plain).flatten(model)
        return init_optimiser(self.optimiser, population, flat)

    def next_model(
        self, state: State, model: Arrays, delivered: Delivered
    ) -> tuple[dict[str, types.Array], State]:
        """The arrays that the optimiser works on after its step, and its state after it."""
        layout = layout_of(model, self.plain)
        delivery = delivered.as_delivery(layout, model)
        vector, state = take_step(self.optimiser, state, delivery, flower_round(delivery.round))
        return layout.unflatten(vector), state

    def _state_for(self, population: Population, model: Arrays) -> State:
        """What the optimiser remembers, for the clients that there are by now, and their sizes."""
        before, self._sizes = self._sizes, population.sizes
        if self._memory is None:
            return self.first_state(population, model)
        state = dict(self._memory)
        if before is not None and np.array_equal(before, population.sizes):
            return state
        return join_optimiser(self.optimiser, state, population)

    def _meet(self, nodes: Iterable[int], replies: Iterable[Message]) -> Company:
        """Who is who where nobody says it: each node is a client, numbered as they come."""
        met = dict(self._met)
        for node in sorted(nodes):
            met.setdefault(node, float("nan"))
        for reply in replies:
            examples = number(_metrics(reply), self.weighted_by_key)
            met[reply.metadata.src_node_id] = max(1.0, examples)
        self._met = met
        numbers = {node: client for client, node in enumerate(met)}
        return Company(numbers, population_of(met.values()))


def optimiser_strategy_in(strategy: Strategy) -> OptimiserStrategy | None:
    """The strategy in `strategy` that aggregates with an optimiser; None if there is none."""
    aggregating = (
        candidate for _, candidate in wrapped(strategy) if isinstance(candidate, OptimiserStrategy)
    )
    return next(aggregating, None)


def plain_arrays(strategy: Strategy) -> tuple[str, ...]:
    """Patterns of the names of arrays that no optimiser works on."""
    aggregating = optimiser_strategy_in(strategy)
    return PLAIN if aggregating is None else aggregating.plain


@contextmanager
def introduced(strategy: Strategy, company: Company) -> Iterator[None]:
    """Within it, an optimiser in `strategy` knows clients by their numbers in `company`.

    The replies that it is given have been checked.
    """
    aggregating = optimiser_strategy_in(strategy)
    if aggregating is None:
        yield
        return
    aggregating._company = company
    try:
        yield
    finally:
        aggregating._company = None


def _weighted(optimiser: Any) -> Optimiser:
    """The same optimiser, with clients in proportion to their data if it has such a field."""
    fields = dataclasses.fields(optimiser) if dataclasses.is_dataclass(optimiser) else ()
    changeable = any(field.name == "weighted" and field.init for field in fields)
    if changeable and not optimiser.weighted:
        optimiser = dataclasses.replace(optimiser, weighted=True)
    return cast(Optimiser, optimiser)


def _usable(reply: Message, model: Arrays, strategy: FedAvg) -> bool:
    """Whether a reply has a model that fits; its arrays then have the model's types."""
    try:
        reply.content = read_model(reply, model, Terms(strategy.weighted_by_key)).content
    except Unusable as wrong:
        LOG.warning(
            "the reply of node %d is left out: %s", reply.metadata.src_node_id, one_line(wrong)
        )
        return False
    return True


def _metrics(reply: Message) -> MetricRecord:
    """Its only MetricRecord; an empty one where it has none, or several."""
    records = list(reply.content.metric_records.values())
    return records[0] if len(records) == 1 else MetricRecord()


def _cast(values: types.Array, dtype: np.dtype[Any]) -> types.Array:
    """A mean in the type of the model; whole numbers are rounded."""
    return np.asarray(values if dtype.kind == "f" else np.rint(values)).astype(dtype)
