"""One round of a Flower federation: answers a selector's questions over the wire, and has the chosen clients train.

Selectors count rounds from 0, Flower from 1. The strategy's own configure_train and aggregate_train do all the training and
averaging; a candidate is what they would make of a selection, after which they forget that it was tried.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run

from fedcor.flower.exchange import Exchange
from fedcor.flower.memory import Memory, restore, snapshot, wrapped
from fedcor.flower.screen import metrics_of, model_fault, number, odd_ones_out
from fedcor.flower.wire import MISSING, NOTE, model_note, version_of
from fedcor.guard import check_clients, screen_losses
from fedcor.rng import stream
from fedcor.types import FloatArray, IntArray, Outcome

__all__ = ["FlowerRound", "Knowledge", "SomeNodes", "Terms", "limited"]


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


@dataclass
class Knowledge:
    """What one round leaves to the next about the current model, beside the model itself."""

    losses: dict[int, float] = field(default_factory=dict)  # client -> l_k(w^t), where it told
    holders: frozenset[int] = frozenset()  # clients that hold w^t


class FlowerRound:
    """The federation that a selector sees for one round, or for one more attempt at it."""

    def __init__(
        self,
        terms: Terms,
        exchange: Exchange,
        arrays: ArrayRecord,
        config: ConfigRecord,
        knowledge: Knowledge,
        available: IntArray,
        attempt: int,
    ) -> None:
        self._terms, self.exchange, self._arrays, self._config = terms, exchange, arrays, config
        self.roster, self.round = exchange.roster, exchange.round
        self.weights = self.roster.population().weights
        self.available = available
        self.available.flags.writeable = self.weights.flags.writeable = False
        self.rng = stream(terms.seed, "select", self.round, *([attempt] if attempt else []))
        self.probed = self.refused = 0
        self._version = version_of(arrays)
        self._losses = {self._version: dict(knowledge.losses)}  # version -> client -> loss
        self._holders = {self._version: set(knowledge.holders)}
        self._silent: set[int] = set()  # asked for l_k(w^t) in this round, without an answer
        self._trained: dict[int, Message] = {}
        self._asked_to_train: dict[int, Message] = {}
        self._unconfigured: Memory | None = None  # the strategy as it was before configure_train
        self._configured: ConfigRecord = config

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
            current = self._version  # the clients are told to keep these two; of other candidates nothing remains
            self._holders = {current: self._holders[current], version: self._holders.get(version, set())}
            self._losses = {current: self._losses[current], version: {}}
            self._losses[version] = self._probe(version, candidate, self.available.tolist())
        after = self._losses[version]
        changes[self.available] = [after.get(client, np.nan) for client in self.available.tolist()] - before
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
        self.selected = check_clients(chosen, self.available, self.round)
        messages = self._train_messages(self.selected)
        self.exchange.sent(messages.values())
        self._sent = messages
        return list(messages.values())

    def collect(self, replies: Iterable[Message]) -> None:
        """Take the replies to `pending`."""
        self._take(self.exchange.received(self._sent, replies))

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
            read_losses=lambda: screen_losses(np.array([self._reported(k) for k in participated.tolist()]))[0],
            read_updates=lambda: self._updates(participated),
        )
        knowledge = Knowledge(self._losses.get(version, {}), frozenset(self._holders.get(version, ())))
        return arrays, metrics, outcome, knowledge

    @property
    def configured(self) -> ConfigRecord:
        """The train configuration as the strategy left it."""
        return self._configured

    def _train(self, selection: IntArray) -> None:
        messages = self._train_messages(check_clients(selection, self.available, self.round))
        self._take(self.exchange.ask(messages, self._terms.train_timeout))

    def _train_messages(self, selection: IntArray) -> dict[int, Message]:
        clients = sorted(set(selection.tolist()) - self._asked_to_train.keys())
        if not clients:
            return {}
        nodes = {self.roster.node(client): client for client in clients}
        strategy, grid = self._terms.strategy, SomeNodes(self.exchange.grid, list(nodes))
        # However often the strategy is asked to configure this round, it is for the first time.
        if self._unconfigured is None:
            self._unconfigured = snapshot(strategy)
        else:
            restore(strategy, self._unconfigured)
        self._configured = ConfigRecord(dict(self._config.items()))
        with limited(strategy, len(nodes), everyone=True):
            messages = list(strategy.configure_train(self.round + 1, self._arrays, self._configured, grid))
        found = {nodes[m.metadata.dst_node_id]: m for m in messages if m.metadata.dst_node_id in nodes}
        self._asked_to_train |= found
        return {client: self._slim(client, message) for client, message in sorted(found.items())}

    def _slim(self, client: int, message: Message) -> Message:
        """The message without its model where the client holds it."""
        keys = [key for key, record in message.content.array_records.items() if record is self._arrays]
        if client not in self._holders[self._version] or len(keys) != 1:
            return message
        content = {key: record for key, record in message.content.items() if key != keys[0]}
        note = model_note(keys[0], self._version, sorted(self._holders))
        return _message(RecordDict({**content, NOTE: note}), message)

    def _take(self, replies: Mapping[int, Message], *, again: bool = True) -> None:
        """Keep the usable results; who has lost the model in the meantime gets it again."""
        lost: dict[int, Message] = {}
        for client, reply in replies.items():
            if _pop_note(reply.content).get(MISSING):
                lost[client] = _message(self._asked_to_train[client].content, self._asked_to_train[client])
                continue
            wrong = model_fault(reply.content, self._arrays, self._terms.weight_key)
            if wrong is not None:
                self._refuse(client, *wrong)
                continue
            self._trained[client] = reply
            metrics = metrics_of(reply.content)
            assert metrics is not None
            self.roster.learn_size(client, number(metrics, self._terms.weight_key))
        if lost and again:
            self._holders[self._version] -= lost.keys()
            self._take(self.exchange.ask(lost, self._terms.train_timeout), again=False)

    def _refuse(self, client: int, kind: str, why: str) -> None:
        self.refused += 1
        self.exchange.refuse(client, kind, why)

    def _delivered(self, selection: IntArray) -> IntArray:
        """Sorted clients of the selection whose results can be averaged together."""
        results = {k: self._trained[k] for k in sorted(set(selection.tolist())) if k in self._trained}
        for client in odd_ones_out(results):
            self._refuse(client, "malformed", "its metrics have other keys than the others'")
            del self._trained[client], results[client]
        return np.array(list(results), dtype=np.int64)

    def _aggregate(self, selection: IntArray) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's own mean, in the order of the clients: sums are then equal bit for bit in every run."""
        drawn = [client for client in np.sort(selection).tolist() if client in self._trained]
        replies = []
        for client in drawn:  # a client drawn twice counts twice; a strategy may change the messages that it is given
            reply = copy.copy(self._trained[client])
            reply.content = RecordDict({key: record.copy() for key, record in reply.content.items()})
            replies.append(reply)
        return self._terms.strategy.aggregate_train(self.round + 1, replies)

    def _reported(self, client: int) -> float:
        metrics = metrics_of(self._trained[client].content)
        assert metrics is not None
        return number(metrics, *self._terms.loss_keys)

    def _updates(self, participated: IntArray) -> FloatArray:  # (m, P)
        start = _flat(self._arrays)
        rows = [_flat(next(iter(self._trained[k].content.array_records.values()))) for k in participated.tolist()]
        return np.array(rows).reshape(len(rows), len(start)) - start

    # --- probes

    def _probe(self, version: str, model: ArrayRecord, clients: list[int], *, again: bool = True) -> dict[int, float]:
        """Client -> its loss of `model`, of all who gave a usable answer: one exchange, in parallel, with its own deadline."""
        holders = self._holders[version]
        replies = self.exchange.ask(
            {client: self._probe_message(version, model, client) for client in clients}, self._terms.probe_timeout
        )
        self.probed += len(clients) if again else 0
        answers: dict[int, float] = {}
        lost = []
        for client, reply in replies.items():
            if _pop_note(reply.content).get(MISSING):
                lost.append(client)
                continue
            if self.roster.understands(client):
                holders.add(client)
            metrics = metrics_of(reply.content)
            answer = float("nan") if metrics is None else number(metrics, *self._terms.loss_keys)
            if np.isnan(screen_losses(np.array([answer]))[0][0]):
                self._refuse(client, "unusable", f"its loss is {answer}" if metrics else "no metrics in its answer")
            else:
                answers[client] = answer
        holders -= set(lost)
        if lost and again:
            answers |= self._probe(version, model, lost, again=False)
        return answers

    def _probe_message(self, version: str, model: ArrayRecord, client: int) -> Message:
        config = ConfigRecord({**self._terms.evaluate_config, "server-round": self.round + 1})
        content = RecordDict({self._terms.config_key: config})
        if client not in self._holders[version]:
            content[self._terms.arrays_key] = model
        if self.roster.understands(client):
            content[NOTE] = model_note(self._terms.arrays_key, version, sorted(self._holders))
        return Message(
            content,
            dst_node_id=self.roster.node(client),
            message_type=MessageType.EVALUATE,
            ttl=self._terms.probe_timeout,
            group_id=str(self.round + 1),
        )


def _message(content: RecordDict, like: Message) -> Message:
    """A new message with other content to the same node."""
    about = like.metadata
    return Message(content, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id)


def _pop_note(content: RecordDict) -> ConfigRecord:
    note = content.config_records.get(NOTE)
    if note is None:
        return ConfigRecord()
    del content[NOTE]
    return note


def _flat(arrays: ArrayRecord) -> FloatArray:
    return np.concatenate([array.numpy().astype(np.float64).ravel() for array in arrays.values()] or [np.empty(0)])


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
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)


@contextmanager
def limited(strategy: Strategy, nodes: int, *, everyone: bool = False) -> Iterator[None]:
    """Flower's strategies wait, for ever, for as many nodes as they were told; here they make do with those who are there.

    With `everyone`, they also take each of them, whatever share they would sample.
    """
    changed = []
    for _, one in wrapped(strategy):
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes", "fraction_train"):
            if not hasattr(one, name):
                continue
            value = getattr(one, name)
            changed.append((one, name, value))
            everybody = 1.0 if name == "fraction_train" else nodes
            setattr(one, name, everybody if everyone else value if name == "fraction_train" else min(value, nodes))
    try:
        yield
    finally:
        for one, name, value in changed:
            setattr(one, name, value)
