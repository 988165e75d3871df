"""Who is who: each client's stable name and number, the node that it is on now, its size, and whether it answers.

A node's id may change with every run and every restart, a client's name does not. Numbers are given in the order of the names
to those who are there at first, and to later ones as they come; a number is never given twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedcor.types import Array, FloatArray, IntArray, Population

__all__ = ["Claim", "Roster"]

_LONGEST_BAR = 8  # rounds that a client which keeps failing is left alone, at most


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
        self._node: dict[int, int] = {}  # client -> the node that it is on
        self._client: dict[int, int] = {}  # node -> the client that it is
        self._plain: set[int] = set()  # nodes without our mod

    def __len__(self) -> int:
        return len(self.names)

    def strangers(self, nodes: Iterable[int]) -> list[int]:
        return [node for node in nodes if node not in self._client]

    def enrol(self, claims: Mapping[int, Claim]) -> None:
        """Take in nodes: new names become new clients, a known name has moved to another node."""
        for node, claim in sorted(claims.items(), key=lambda item: (_natural(item[1].name), item[0])):
            if claim.name not in self.names:
                self.names.append(claim.name)
                self._sizes.append(np.nan)
                self._failures.append(0)
                self._barred.append(0)
            client = self.names.index(claim.name)
            self._node[client], self._client[node] = node, client
            self.learn_size(client, claim.examples)
            if not claim.mod:
                self._plain.add(node)

    def node(self, client: int) -> int:
        return self._node[client]

    def client(self, node: int) -> int:
        """The client on `node`; -1 where the node is a stranger, or the client has moved on."""
        client = self._client.get(node, -1)
        return client if self._node.get(client) == node else -1

    def understands(self, client: int) -> bool:
        return self._node[client] not in self._plain

    def learn_size(self, client: int, examples: float | None) -> None:
        """The first word counts: what a client says of itself comes before the weights of its replies."""
        if np.isnan(self._sizes[client]) and examples is not None and np.isfinite(examples) and examples >= 1:
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
        there = sorted({client for node in nodes if (client := self.client(node)) >= 0})
        ready = [client for client in there if self._barred[client] <= round]
        return np.array(ready or there, dtype=np.int64)

    def failed(self, client: int, round: int) -> None:
        """It could not be reached: leave it alone for 1, 2, 4, then 8 rounds."""
        self._failures[client] += 1
        self._barred[client] = round + 1 + min(_LONGEST_BAR, 2 ** min(self._failures[client] - 1, 10))

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
