"""Flower's strategies sample from a grid, and wait until it is full. Here they see some nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcor.flower.memory import wrapped

if TYPE_CHECKING:
    from fedcor.flower.private import NodeInfo, Run

__all__ = ["SomeNodes", "limited"]

_MINIMA = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")


class SomeNodes(Grid):
    """A grid on which only some nodes can be seen."""

    def __init__(self, grid: Grid, nodes: list[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> Iterable[int]:
        """The ids of these nodes."""
        return list(self._nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """What the grid knows of these nodes."""
        return [node for node in self._grid.get_nodes() if node.node_id in self._nodes]

    def set_run(self, run: Run) -> None:
        """As the whole grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """As the whole grid."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """As the whole grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the whole grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the whole grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As the whole grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


@contextmanager
def limited(strategy: Strategy, nodes: int, *, everyone: bool = False) -> Iterator[None]:
    """Within it, `strategy` waits for no more than `nodes` nodes: otherwise it would wait forever.

    With `everyone`, it also takes each node, whatever fraction it would sample.
    """
    changed = []
    for _, one in wrapped(strategy):
        for name in (*_MINIMA, "fraction_train"):
            if not hasattr(one, name) or (name == "fraction_train" and not everyone):
                continue
            value = getattr(one, name)
            changed.append((one, name, value))
            if name == "fraction_train":
                setattr(one, name, 1.0)
            else:
                setattr(one, name, nodes if everyone else min(value, nodes))
    try:
        yield
    finally:
        for one, name, value in changed:
            setattr(one, name, value)
