"""What a round's replies tell a federated optimiser: who delivered, with which weight and model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message, MetricRecord

from fedcor.aggregation import read_only
from fedcor.flower.layout import Layout
from fedcor.flower.local_training import LocalTraining, read_local_training
from fedcor.flower.numbering import own_round
from fedcor.flower.screen import main_arrays, metrics_of, number
from fedcor.types import Array, Delivery, FloatArray, IntArray, Population

__all__ = ["Company", "Delivered", "read_delivered"]


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

    def models(self) -> list[Mapping[str, Array]]:
        """The arrays that each client sent, by name."""
        records = [main_arrays(one.content) for one in self.replies]
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
            read_only(self.training.steps),
            self.training.learning_rate,
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
    read = {client: metrics_of(first[client].content) for client in clients}
    said = {**read, **company.metrics}
    return Delivered(
        own_round(server_round, finished=0),
        np.array(clients, dtype=np.int64),
        weights / weights.sum(),
        read_local_training([said[client] for client in clients]),
        [first[client] for client in clients],
    )
