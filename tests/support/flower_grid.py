"""A grid in memory that behaves as Flower's do: its nodes run a ClientApp here, and can fail."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedcor.flower import answers_probes, select_with
from fedcor.flower.protocol import NOTE, SAYS_KEYS
from fedcor.runs.record import read_run

with suppress(ImportError):  # releases before 1.38 do not ask who builds a message
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class MemoryGrid(Grid):
    """Nodes with random ids; each runs `app` with its own context.

    `trouble[partition]` changes what it would reply.
    """

    def __init__(self, app: ClientApp, nodes: int, seed: int = 0, shuffle: bool = True) -> None:
        self.app, self._rng, self._shuffle = app, np.random.default_rng(seed), shuffle
        self.contexts: dict[int, Context] = {}
        self.trouble: dict[int, Callable[[Message, Message], Message | None]] = {}
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}
        self._partitions = itertools.count()
        for _ in range(nodes):
            self.join()

    def join(self, partition: int | None = None) -> int:
        """A node connects, or restarts: its id is new, its memory is empty."""
        node = int(self._rng.integers(2**40))
        partition = next(self._partitions) if partition is None else partition
        config = {"partition-id": partition, "num-partitions": 0}
        self.contexts[node] = Context(1, node, config, RecordDict(), {})
        return node

    def leave(self, partition: int) -> None:
        del self.contexts[self.node_of(partition)]

    def node_of(self, partition: int) -> int:
        return next(
            node for node, c in self.contexts.items() if c.node_config["partition-id"] == partition
        )

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self):
        assert SAYS_KEYS, "this release of Flower cannot say nodes' keys"
        return [
            SimpleNamespace(node_id=node, public_key=node.to_bytes(8, "big"))
            for node in self.contexts
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identifiers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self.sent.append(message)
            identifiers.append(message.metadata.message_id)
            context = self.contexts.get(message.metadata.dst_node_id)
            if context is None:  # the SuperLink answers for a node that is gone
                reply: Message | None = error(
                    message, ErrorCode.NODE_UNAVAILABLE, "node unavailable"
                )
                assert reply is not None
                reply.metadata.__dict__["_src_node_id"] = 1
            else:
                reply = self._run(message, context)
            if reply is not None:
                self._replies[message.metadata.message_id] = reply
        return identifiers

    def _run(self, message: Message, context: Context) -> Message | None:
        about = message.metadata
        copied = Message(
            RecordDict(dict(message.content.items())), about.dst_node_id, about.message_type
        )
        copied.metadata.__dict__["_message_id"] = about.message_id
        try:
            reply: Message | None = self.app(copied, context)
        except Exception as failure:
            reply = error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(failure))
        spoil = self.trouble.get(int(context.node_config["partition-id"]))
        return spoil(message, reply) if spoil is not None and reply is not None else reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [
            self._replies.pop(identifier)
            for identifier in message_ids
            if identifier in self._replies
        ]
        return [found[i] for i in self._rng.permutation(len(found))] if self._shuffle else found

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        pending = set(self.push_messages(messages))
        replies = list(self.pull_messages(pending))
        if len(replies) < len(pending):
            time.sleep(timeout or 0.0)
        return replies

    def set_run(self, run): ...

    def create_message(self, *_args, **_options):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError


def error(message: Message, code: int, reason: str) -> Message:
    return Message(Error(code=code, reason=reason), reply_to=message)


# --- a NumPy client: quadratic losses, known in closed form ---------------------------------------

CENTRES = np.random.default_rng(5).standard_normal((40, 3)).astype(np.float32)
RATE, STEPS = 0.1, 3


def sizes(partition: int) -> int:
    return 10 + partition


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, np.float32)), "b": Array(np.zeros(1, np.float32))})


def vector(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy() for array in arrays.values()])


def record(values: np.ndarray) -> ArrayRecord:
    return ArrayRecord({"w": Array(values[:2]), "b": Array(values[2:])})


def loss(partition: int, values: np.ndarray) -> float:
    return float(0.5 * ((values - CENTRES[partition]) ** 2).sum())


def numpy_app(mods=None, loss_name: str = "loss", train_mods=()) -> ClientApp:
    mods = (
        [answers_probes(examples=lambda c: sizes(int(c.node_config["partition-id"])))]
        if mods is None
        else mods
    )
    app = ClientApp(mods=mods)

    @app.train(mods=list(train_mods))
    def train(message: Message, context: Context) -> Message:
        k, w = int(context.node_config["partition-id"]), vector(message.content["arrays"])
        before = loss(k, w)
        mu = float(message.content["config"].get("proximal-mu", 0.0))
        start = w.copy()
        for _ in range(STEPS):
            w = w - np.float32(RATE) * ((w - CENTRES[k]) + np.float32(mu) * (w - start))
        metrics = MetricRecord({loss_name: before, "num-examples": sizes(k)})
        return Message(RecordDict({"arrays": record(w), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        k = int(context.node_config["partition-id"])
        value = loss(k, vector(message.content["arrays"]))
        metrics = MetricRecord(
            {loss_name: value, "accuracy": 1 / (1 + value), "num-examples": sizes(k)}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def server_score(_round: int, arrays: ArrayRecord) -> MetricRecord:
    mean = float(np.mean([loss(k, vector(arrays)) for k in range(12)]))
    return MetricRecord({"accuracy": 1 / (1 + mean), "loss": mean})


def config(**values) -> ConfigRecord:
    return ConfigRecord(values)


# --- optimisers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Momentum:
    """Keeps a velocity."""

    keep: float = 0.5
    weighted: bool = False

    def init(self, population, model):
        return {"velocity": np.zeros_like(model)}

    def step(self, state, delivery):
        velocity = np.float32(self.keep) * state["velocity"] + delivery.mean
        return delivery.model + velocity, {"velocity": velocity}


@dataclass(frozen=True)
class Remembering:
    """Moves by the mean of everyone's last update, zero for a client that never came."""

    needs_updates = True

    def init(self, population, model):
        return {"count": np.array(population.count), "total": np.zeros(len(model))}

    def join(self, state, population):
        return {**state, "count": np.array(population.count)}

    def step(self, state, delivery):
        after, total = dict(state), state["total"].copy()
        for client, update in zip(delivery.clients.tolist(), delivery.updates, strict=True):
            total += update - state.get(f"update/{client}", 0.0)
            after[f"update/{client}"] = update.copy()
        model = delivery.model + (total / int(state["count"])).astype(np.float32)
        return model, {**after, "total": total}


class Correcting(Momentum):
    """Corrects local steps, by nothing."""

    def corrections(self, state, clients):
        return np.zeros((len(clients), 3), np.float32)


# --- runs -----------------------------------------------------------------------------------------

QUICK = {"warmup": 3, "interval": 3, "warmup_steps": 20, "refit_steps": 20}


def quiet(strategy=None):
    return FedAvg(fraction_evaluate=0.0) if strategy is None else strategy


def run(selector, grid, rounds=6, *, strategy=None, folder=None, timeout=0.05, **settings):
    """(the wrapped strategy, Flower's result) of a whole run."""
    settings = {"probe_timeout": 0.05, "wait_for": len(grid.contexts), **settings}
    selecting = select_with(quiet(strategy), selector, checkpoint=folder, **settings)
    return selecting, selecting.start(
        grid, initial(), num_rounds=rounds, timeout=timeout, evaluate_fn=server_score
    )


def lines(folder):
    return read_run(folder).rounds


def train_messages(grid):
    return [message for message in grid.sent if is_training(message)]


def is_training(message):
    """Whether it is a train message that carries a task, not the question who a node is."""
    return message.metadata.message_type == "train" and not is_introduction(message)


def is_introduction(message):
    note = message.content.config_records.get(NOTE)
    return note is not None and note["ask"] == "identity"


@contextmanager
def logged(caplog, level=logging.WARNING):
    """Within it, `caplog` has our messages, once each, however Flower has set its logger up."""
    logger = logging.getLogger("flwr")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(level, "flwr.fedcor"):
            yield
    finally:
        logger.removeHandler(caplog.handler)
        logger.propagate = propagates


def our_lines(caplog):
    """What we logged, without what Flower did."""
    return [record.getMessage() for record in caplog.records if record.name == "flwr.fedcor"]
