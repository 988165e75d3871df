"""What a round's replies tell a federated optimiser: who delivered, with which weight and model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Message, MetricRecord

from fedcor.aggregation import read_only
from fedcor.flower.layout import Layout
from fedcor.flower.numbering import own_round
from fedcor.flower.screen import metrics_of, number
from fedcor.flower.wire import LOG
from fedcor.types import Array, Delivery, FloatArray, IntArray, Population

__all__ = ["RATE", "STEPS", "Company", "Delivered", "read_delivered"]

# How far a client trained: metrics of its reply, if it sends them.
STEPS, RATE = "local-steps", "learning-rate"
_MOST_STEPS = 1e9  # beyond this it is not a number of steps


@dataclass(frozen=True)
class Company:
    """Who is who in a round.

    Attributes:
        clients: Node -> the client on it.
        population: All clients that are known.
    """

    clients: Mapping[int, int]
    population: Population


@dataclass(frozen=True)
class Delivered:
    """What came back from a round.

    Attributes:
        round: Its number, from 0.
        clients: (m,) Sorted, each once.
        weights: (m,) Of each in the mean; they sum to 1.
        steps: (m,) Local steps of each.
        learning_rate: Of the local steps.
        replies: (m) The reply of each.
    """

    round: int
    clients: IntArray
    weights: FloatArray
    steps: IntArray
    learning_rate: float
    replies: Sequence[Message]

    def models(self) -> list[Mapping[str, Array]]:
        """The arrays that each client sent, by name."""
        records = [next(iter(one.content.array_records.values())) for one in self.replies]
        return [{name: array.numpy() for name, array in record.items()} for record in records]

    def as_delivery(self, layout: Layout, model: Mapping[str, Array]) -> Delivery:
        """For an optimiser that works on the arrays of `layout`. `model` is w^t."""
        start = read_only(layout.flatten(model))

        @functools.cache
        def updates() -> Array:  # (m, P)
            rows = np.stack([layout.flatten(one) for one in self.models()])
            rows -= start
            return read_only(rows)

        return Delivery(
            self.round,
            start,
            read_only(self.clients),
            read_only(self.weights),
            read_only(self.steps),
            self.learning_rate,
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
        given = number(metrics_of(reply.content), weight_key)
        weight[client] = weight.get(client, 0.0) + given
    clients = sorted(first)
    weights = np.array([weight[client] for client in clients])
    metrics = [metrics_of(first[client].content) for client in clients]
    return Delivered(
        own_round(server_round, finished=0),
        np.array(clients, dtype=np.int64),
        weights / weights.sum(),
        _steps(metrics),
        _learning_rate(metrics),
        [first[client] for client in clients],
    )


def _steps(metrics: Sequence[MetricRecord]) -> IntArray:
    """(m,) the clients' local steps; all 1 unless each of them says a possible number."""
    steps = np.array([number(one, STEPS) for one in metrics])
    if ((steps >= 1) & (steps <= _MOST_STEPS)).all():
        whole: IntArray = np.rint(steps).astype(np.int64)
        return whole
    if not np.isnan(steps).all():
        LOG.warning("%s of the replies is %s: all are taken to be 1", STEPS, steps.tolist())
    return np.ones(len(steps), dtype=np.int64)


def _learning_rate(metrics: Sequence[MetricRecord]) -> float:
    """The clients' learning rate, the mean where they differ; 1 unless each says a possible one."""
    rates = [number(one, RATE) for one in metrics]
    if not all(0 < rate < float("inf") for rate in rates):
        return 1.0
    return rates[0] if len(set(rates)) == 1 else float(np.mean(rates))
