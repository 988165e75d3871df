"""Who is who: each client's stable name and number, the node that it is on now, its size, and whether it answers.

A node's id may change with every run and every restart, a client's name does not. Numbers are given in the order of the names
to those who are there at first, and to later ones as they come; a number is never given twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedcor.types import Array, FloatArray, IntArray, Population

__all__ = ["Claim", "Roster"]

LOG = logging.getLogger("flwr.fedcor")
_MOST_EXAMPLES = 1e9  # beyond this it is not a number of samples


def _patience(failures: int) -> int:
    """Rounds that one who failed so often in a row is left alone: 1, 2, 4, then 8."""
    return min(8, int(2 ** min(failures - 1, 10)))


@dataclass(frozen=True)
class Claim:
    """What a node says of itself."""

    name: str
    examples: int | None = None
    mod: bool = True  # it understands our notes


class Roster:
    def __init__(self) -> None:
        self.names: list[str] = []  # (N,) client -> name
        self._sizes: list[float] = []  # (N,) n_k, NaN where nobody told
        self._failures: list[int] = []  # (N,) in a row
        self._barred: list[int] = []  # (N,) not chosen before this round
        self._nodes: dict[
            int, list[int]
        ] = {}  # client -> the nodes that claim to be it, the trusted one first
        self._client: dict[int, int] = {}  # node -> the client that it claims to be
        self._plain: set[int] = set()  # nodes without our mod
        self._here: set[int] = set()  # nodes that are connected
        self._mute: dict[
            int, tuple[int, int]
        ] = {}  # node that would not say who it is -> times, not asked before this round

    def __len__(self) -> int:
        return len(self.names)

    def strangers(self, nodes: Iterable[int], round: int = 0) -> list[int]:
        """Nodes that we have not met, without those who lately would not say who they are."""
        return [
            node
            for node in nodes
            if node not in self._client and self._mute.get(node, (0, 0))[1] <= round
        ]

    def mute(self, node: int, round: int) -> None:
        times = self._mute.get(node, (0, 0))[0] + 1
        self._mute[node] = times, round + 1 + _patience(times)

    def ask_all_again(self) -> None:
        self._mute.clear()

    def enrol(self, claims: Mapping[int, Claim]) -> None:
        """Take in nodes: a new name is a new client; a known one may have moved here, but its node of before comes first
        while it is connected and answers: nobody takes another's place by saying its name."""
        for node, claim in sorted(
            claims.items(), key=lambda item: (_natural(item[1].name), item[0])
        ):
            if claim.name not in self.names:
                self.names.append(claim.name)
                self._sizes.append(np.nan)
                self._failures.append(0)
                self._barred.append(0)
            client = self.names.index(claim.name)
            rivals = [other for other in self._nodes.get(client, []) if other in self._here]
            if rivals:
                LOG.warning(
                    "nodes %s and %d both say that they are %s: the first is believed",
                    rivals,
                    node,
                    claim.name,
                )
            self._nodes.setdefault(client, []).append(node)
            self._client[node] = client
            self._here.add(node)
            self.learn_size(client, claim.examples)
            if not claim.mod:
                self._plain.add(node)

    def node(self, client: int) -> int:
        nodes = self._nodes[client]
        return next((node for node in nodes if node in self._here), nodes[0])

    def client(self, node: int) -> int:
        """The client on `node`; -1 where the node is a stranger, or the client is on another."""
        client = self._client.get(node, -1)
        return client if client >= 0 and self.node(client) == node else -1

    def understands(self, client: int) -> bool:
        return self.node(client) not in self._plain

    def learn_size(self, client: int, examples: float | None) -> None:
        """The first word counts: what a client says of itself comes before the weights of its replies."""
        if (
            np.isnan(self._sizes[client])
            and examples is not None
            and 1 <= examples <= _MOST_EXAMPLES
        ):
            self._sizes[client] = float(int(examples))

    def population(self) -> Population:
        """With the mean size for clients that have not told theirs."""
        sizes = np.array(self._sizes)
        known = np.isfinite(sizes)
        mean = max(1, round(float(sizes[known].mean()))) if known.any() else 1
        return Population(np.where(known, sizes, mean).astype(np.int64))

    def reachable(self, nodes: Iterable[int], round: int) -> IntArray:
        """Sorted clients that may be chosen: those on a node that is there, without those who lately did not answer.

        If all of them failed lately, they are all tried again.
        """
        self._here = set(nodes)
        there = sorted({client for node in self._here if (client := self.client(node)) >= 0})
        ready = [client for client in there if self._barred[client] <= round]
        return np.array(ready or there, dtype=np.int64)

    def failed(self, client: int, round: int) -> None:
        """It could not be reached: leave it alone for a while, and try another node that says it is this client."""
        self._failures[client] += 1
        self._barred[client] = round + 1 + _patience(self._failures[client])
        here = self.node(client)
        self._nodes[client].remove(here)
        self._nodes[client].append(here)

    def answered(self, client: int) -> None:
        self._failures[client] = self._barred[client] = 0

    def to_arrays(self) -> dict[str, Array]:
        return {
            "names": np.array(self.names, dtype=np.str_),
            "sizes": np.array(self._sizes, dtype=np.float64),
            "failures": np.array(self._failures, dtype=np.int64),
            "barred": np.array(self._barred, dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Roster:
        """The clients of an earlier run; their nodes will tell their names again."""
        roster = cls()
        roster.names = [str(name) for name in arrays["names"]]
        sizes: FloatArray = arrays["sizes"]
        roster._sizes, roster._failures = sizes.tolist(), arrays["failures"].tolist()
        roster._barred = arrays["barred"].tolist()
        return roster


def _natural(name: str) -> tuple[int, int, str]:
    """partition-2 before partition-10."""
    head, _, tail = name.rpartition("-")
    return (0, int(tail), head) if tail.isdecimal() and len(tail) < 19 else (1, 0, name)
