"""One round of a Flower federation: answers a selector's questions over the wire, and has the chosen clients train.

Selectors count rounds from 0, Flower from 1. The strategy's own configure_train and aggregate_train do all the training and
averaging; a candidate is what they would make of a selection, after which they forget that it was tried.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run

from fedcor.errors import FedcorError
from fedcor.flower.exchange import Exchange
from fedcor.flower.memory import Memory, restore, snapshot, wrapped
from fedcor.flower.screen import (
    Signature,
    Unusable,
    clean_model,
    metrics_of,
    number,
    numbers_fault,
    odd_ones_out,
)
from fedcor.flower.wire import MISSING, NOTE, model_note, version_of
from fedcor.guard import check_clients, screen_losses
from fedcor.rng import stream
from fedcor.types import Array, FloatArray, IntArray, Outcome

__all__ = [
    "FlowerRound",
    "Knowledge",
    "SomeNodes",
    "Terms",
    "limited",
    "renewed",
    "says_missing",
    "slim",
]


@dataclass(frozen=True)
class Terms:
    """What stays the same for all rounds."""

    strategy: Strategy
    seed: int
    train_timeout: float
    probe_timeout: float
    evaluate_config: ConfigRecord
    loss_keys: tuple[str, ...]
    arrays_key: str
    config_key: str
    weight_key: str
    secure_aggregation: bool = False


@dataclass
class Knowledge:
    """What one round leaves to the next about the current model, beside the model itself."""

    version: str = ""  # of w^t, the model that the round begins with
    losses: dict[int, float] = field(default_factory=dict)  # client -> l_k(w^t), where it told
    holders: frozenset[int] = frozenset()  # clients that hold w^t
    signature: Signature | None = None  # how replies are usually built


class FlowerRound:
    """The federation that a selector sees for one round, or for one more attempt at it."""

    def __init__(
        self,
        terms: Terms,
        exchange: Exchange,
        arrays: ArrayRecord,
        config: ConfigRecord,
        knowledge: Knowledge,
        unconfigured: Memory,  # the strategy as it was before this round
        available: IntArray,
        attempt: int,
    ) -> None:
        self._terms, self.exchange, self._arrays, self._config = terms, exchange, arrays, config
        self._unconfigured, self._signature = unconfigured, knowledge.signature
        self.roster, self.round = exchange.roster, exchange.round
        self.weights = self.roster.population().weights
        self.available = available
        self.available.flags.writeable = self.weights.flags.writeable = False
        self.rng = stream(terms.seed, "select", self.round, *([attempt] if attempt else []))
        self.probed = self.refused = 0
        self.configured = config  # the train configuration as the strategy left it
        self._model = {name: array.numpy() for name, array in arrays.items()}
        self._version = knowledge.version
        self._losses = {self._version: dict(knowledge.losses)}  # version -> client -> loss
        self._holders = {self._version: set(knowledge.holders)}
        self._silent: set[int] = set()  # asked for l_k(w^t) in this round, without an answer
        self._trained: dict[int, Message] = {}
        self._asked_to_train: dict[int, Message] = {}  # as the strategy made them, with the model

    # --- a selector's questions

    def losses(self, clients: IntArray) -> FloatArray:
        clients = check_clients(clients, self.available, self.round)
        known = self._losses[self._version]
        unasked = sorted(set(clients.tolist()) - known.keys() - self._silent)
        known |= self._probe(self._version, self._arrays, unasked)
        self._silent |= set(unasked) - known.keys()
        return np.array([known.get(client, np.nan) for client in clients.tolist()])

    def loss_changes(self, selection: IntArray) -> FloatArray:
        changes = np.full(len(self.weights), np.nan)
        before = self.losses(self.available)
        self._train(selection)
        candidate = self._candidate(selection)
        if candidate is None:
            return changes
        version = version_of(candidate)
        if version not in self._losses:
            current = (
                self._version
            )  # the clients are told to keep these two; of other candidates nothing remains
            self._holders = {current: self._holders[current], version: set()}
            self._losses = {current: self._losses[current], version: {}}
            comparable = self.available[
                np.isfinite(before)
            ].tolist()  # who was silent before says nothing about a change
            self._losses[version] = self._probe(version, candidate, comparable)
        after = self._losses[version]
        changes[self.available] = [
            after.get(client, np.nan) for client in self.available.tolist()
        ] - before
        return changes

    def _candidate(self, selection: IntArray) -> ArrayRecord | None:
        """The model that `selection` would make; the strategy forgets that it was asked."""
        if not len(self._delivered(selection)):
            return None
        memory = snapshot(self._terms.strategy)
        arrays, _ = self._aggregate(selection)
        restore(self._terms.strategy, memory)
        return arrays

    # --- training

    def pending(self, chosen: IntArray) -> list[Message]:
        """Messages for the chosen who have not trained for a question already; the caller sends them."""
        self.selected = chosen
        messages = self._train_messages(chosen).items()
        self._sent = {
            client: message for client, message in messages if client not in self.exchange.gone
        }
        self._sent_at = time.monotonic()
        self.exchange.sent(self._sent.values())
        return list(self._sent.values())

    def collect(self, replies: Iterable[Message]) -> None:
        """Take the replies to `pending`."""
        self._take(
            self._sent,
            self.exchange.received(self._sent, replies),
            self._sent_at + self._terms.train_timeout,
        )

    def close(self) -> tuple[ArrayRecord | None, MetricRecord | None, Outcome, Knowledge]:
        """Aggregate what was delivered; without any of it, the model stays and so does what is known of it."""
        participated = self._delivered(self.selected)
        arrays, metrics, version = None, None, self._version
        if len(participated):
            arrays, metrics = self._aggregate(self.selected)
        if arrays is not None:
            version = version_of(arrays)
        outcome = Outcome(
            self.round,
            self.selected,
            participated,
            step_sizes=np.ones(len(participated)),
            aggregation_weights=self._aggregation_weights(participated),
            read_losses=lambda: screen_losses(
                np.array([self._reported(k) for k in participated.tolist()])
            )[0],
            read_updates=lambda: self._updates(participated),
            head=_head(self._model),
        )
        holders = frozenset(self._holders.get(version, ()))
        return (
            arrays,
            metrics,
            outcome,
            Knowledge(version, self._losses.get(version, {}), holders, self._signature),
        )

    def _aggregation_weights(self, participated: IntArray) -> FloatArray:
        """(m,) weight of each reply in the strategy's mean; 1 where it is not known to weight them."""
        if not hasattr(self._terms.strategy, "weighted_by_key"):
            return np.ones(len(participated))
        contents = (self._trained[client].content for client in participated.tolist())
        return np.array(
            [number(metrics_of(content), self._terms.weight_key) for content in contents],
            dtype=np.float64,
        )

    def _train(self, selection: IntArray) -> None:
        messages = self._train_messages(check_clients(selection, self.available, self.round))
        end = time.monotonic() + self._terms.train_timeout
        self._take(messages, self.exchange.ask(messages, self._terms.train_timeout), end)

    def _train_messages(self, selection: IntArray) -> dict[int, Message]:
        """The strategy's messages to those of the selection who were not asked yet; it is configured for all of them.

        However often it is asked to configure this round, for the strategy it is the first time.
        """
        if not len(selection):
            return {}
        nodes = {self.roster.node(client): client for client in sorted(set(selection.tolist()))}
        strategy, grid = self._terms.strategy, SomeNodes(self.exchange.grid, list(nodes))
        restore(strategy, self._unconfigured)
        self.configured = ConfigRecord(dict(self._config.items()))
        with limited(strategy, len(nodes), everyone=True):
            messages = list(
                strategy.configure_train(self.round + 1, self._arrays, self.configured, grid)
            )
        found = {
            nodes[m.metadata.dst_node_id]: m for m in messages if m.metadata.dst_node_id in nodes
        }
        fresh = {
            client: found[client] for client in sorted(found.keys() - self._asked_to_train.keys())
        }
        self._asked_to_train |= fresh
        versions = sorted(self._holders)
        holders = self._holders[self._version]
        return {
            k: slim(m, self._arrays, self._version, versions, k in holders)
            for k, m in fresh.items()
        }

    def _take(
        self, sent: Mapping[int, Message], replies: Mapping[int, Message], end: float
    ) -> None:
        """Keep the usable results; who has lost the model in the meantime gets it again, within the same deadline."""
        lost: dict[int, Message] = {}
        for client, reply in replies.items():
            if says_missing(sent[client], reply):
                lost[client] = renewed(self._asked_to_train[client])
                continue
            terms = self._terms
            try:
                content = clean_model(reply.content, self._model, terms.weight_key, terms.loss_keys)
            except Unusable as wrong:
                self._refuse(client, wrong.kind, wrong.why)
                continue
            reply.content = content
            self._trained[client] = reply
            self.roster.learn_size(client, number(metrics_of(content), terms.weight_key))
        if lost:
            self._holders[self._version] -= lost.keys()
            self._take(lost, self.exchange.ask(lost, max(0.0, end - time.monotonic())), end)

    def _refuse(self, client: int, kind: str, why: str) -> None:
        self.refused += 1
        self.exchange.refuse(client, kind, why)

    def _delivered(self, selection: IntArray) -> IntArray:
        """Sorted clients of the selection whose results can be averaged together."""
        results = {
            k: self._trained[k] for k in sorted(set(selection.tolist())) if k in self._trained
        }
        odd, self._signature = odd_ones_out(results, self._signature)
        for client in odd:
            self._refuse(client, "malformed", "its reply is built otherwise than the others'")
            del self._trained[client], results[client]
        return np.array(list(results), dtype=np.int64)

    def _aggregate(self, selection: IntArray) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's own mean, in the order of the clients: sums are then equal bit for bit in every run."""
        drawn = [client for client in np.sort(selection).tolist() if client in self._trained]
        replies = []
        for client in (
            drawn
        ):  # a client drawn twice counts twice; a strategy may change the messages that it is given
            reply = copy.copy(self._trained[client])
            reply.content = RecordDict(
                {key: record.copy() for key, record in reply.content.items()}
            )
            replies.append(reply)
        arrays, metrics = self._terms.strategy.aggregate_train(self.round + 1, replies)
        if arrays is not None:
            self._check_aggregate(arrays)
        return arrays, metrics

    def _check_aggregate(self, arrays: ArrayRecord) -> None:
        """Every number that went in was sane; a strategy that makes others of them must not go on with them."""
        for name, like in self._model.items():
            values = arrays[name].numpy() if name in arrays else None
            wrong = "is missing" if values is None else ""
            wrong = wrong or (
                "has another shape" if values.shape != like.shape else numbers_fault(values, like)
            )  # type: ignore[union-attr, arg-type]
            if wrong:
                strategy = type(self._terms.strategy).__name__
                raise FedcorError(
                    f"round {self.round + 1}: the model that {strategy} made is unusable: {name} {wrong}"
                )

    def _reported(self, client: int) -> float:
        return number(metrics_of(self._trained[client].content), *self._terms.loss_keys)

    def _updates(self, participated: IntArray) -> FloatArray:  # (m, P)
        if self._terms.secure_aggregation:
            raise FedcorError(
                "single updates are hidden by secure aggregation: this selector cannot be used with it"
            )
        start = _flat(self._arrays)
        rows = [
            _flat(next(iter(self._trained[k].content.array_records.values())))
            for k in participated.tolist()
        ]
        return np.array(rows).reshape(len(rows), len(start)) - start

    # --- probes

    def _probe(self, version: str, model: ArrayRecord, clients: list[int]) -> dict[int, float]:
        """Client -> its loss of `model`, of all who gave a usable answer: one exchange, in parallel, with its own deadline."""
        end, self.probed = time.monotonic() + self._terms.probe_timeout, self.probed + len(clients)
        sent = {client: self._probe_message(version, model, client) for client in clients}
        answers: dict[int, float] = {}
        while sent:
            lost: dict[int, Message] = {}
            for client, reply in self.exchange.ask(sent, max(0.0, end - time.monotonic())).items():
                if says_missing(sent[client], reply):
                    self._holders[version].discard(client)
                    lost[client] = self._probe_message(version, model, client)
                    continue
                if self.roster.understands(client):
                    self._holders[version].add(client)
                answer = number(metrics_of(reply.content), *self._terms.loss_keys)
                if np.isnan(screen_losses(np.array([answer]))[0][0]):
                    self._refuse(client, "unusable", f"its loss is {answer}")
                else:
                    answers[client] = answer
            sent = lost
        return answers

    def _probe_message(self, version: str, model: ArrayRecord, client: int) -> Message:
        config = ConfigRecord({**self._terms.evaluate_config, "server-round": self.round + 1})
        message = Message(
            RecordDict({self._terms.arrays_key: model, self._terms.config_key: config}),
            dst_node_id=self.roster.node(client),
            message_type=MessageType.EVALUATE,
            ttl=self._terms.probe_timeout,
            group_id=str(self.round + 1),
        )
        if not self.roster.understands(client):
            return message
        return slim(
            message,
            model,
            version,
            sorted(self._holders),
            client in self._holders[version],
            remember=True,
        )


def slim(
    message: Message,
    model: ArrayRecord,
    version: str,
    keep: list[str],
    held: bool,
    *,
    remember: bool = False,
) -> Message:
    """The message without `model` for a client that holds it; with `remember`, one that does not is told to keep it."""
    keys = [key for key, record in message.content.array_records.items() if record is model]
    if len(keys) != 1 or not (held or remember):
        return message
    content = {key: record for key, record in message.content.items() if key != keys[0] or not held}
    return renewed(message, RecordDict({**content, NOTE: model_note(keys[0], version, keep)}))


def renewed(message: Message, content: RecordDict | None = None) -> Message:
    """A new message to the same node."""
    about = message.metadata
    content = RecordDict(dict(message.content.items())) if content is None else content
    return Message(
        content, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id
    )


def says_missing(sent: Message, reply: Message) -> bool:
    """Whether the client has lost a model that was left out; the note is taken off its reply.

    Who was sent the model and says so all the same has simply not replied with what was asked for.
    """
    note = reply.content.config_records.get(NOTE)
    if note is None:
        return False
    del reply.content[NOTE]
    return note.get(MISSING) is True and NOTE in sent.content and not sent.content.array_records


def _head(model: Mapping[str, Array]) -> slice:
    """Where the output layer is in a flat model: its last matrix, and the vector after it if that can be its bias."""
    shapes = [values.shape for values in model.values()]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    matrices = [i for i, shape in enumerate(shapes) if len(shape) >= 2]
    if not matrices:
        return slice(None)
    last = matrices[-1]
    follows = last + 1 < len(shapes) and shapes[last + 1] in (
        (shapes[last][0],),
        (shapes[last][-1],),
    )
    return slice(int(ends[last]) - math.prod(shapes[last]), int(ends[last + follows]))


def _flat(arrays: ArrayRecord) -> FloatArray:
    return np.concatenate(
        [array.numpy().astype(np.float64).ravel() for array in arrays.values()] or [np.empty(0)]
    )


class SomeNodes(Grid):
    """A grid on which only some nodes can be seen."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [node for node in self._grid.get_nodes() if node.node_id in self._nodes]

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)


@contextmanager
def limited(strategy: Strategy, nodes: int, *, everyone: bool = False) -> Iterator[None]:
    """Flower's strategies wait, for ever, for as many nodes as they were told; here they make do with those who are there.

    With `everyone`, they also take each of them, whatever share they would sample.
    """
    changed = []
    for _, one in wrapped(strategy):
        for name in (
            "min_train_nodes",
            "min_evaluate_nodes",
            "min_available_nodes",
            "fraction_train",
        ):
            if not hasattr(one, name):
                continue
            value = getattr(one, name)
            changed.append((one, name, value))
            everybody = 1.0 if name == "fraction_train" else nodes
            setattr(
                one,
                name,
                everybody if everyone else value if name == "fraction_train" else min(value, nodes),
            )
    try:
        yield
    finally:
        for one, name, value in changed:
            setattr(one, name, value)
