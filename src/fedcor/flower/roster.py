"""Who is who: each client's stable name and number, its node, its size, and its faults.

A node's id may change with every run and every restart, a client's name does not. Clients of the
first round are numbered in the order of their names, later ones as they come; a number is never
reused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedcor.flower.quarantine import Quarantine, Task, rounds_alone
from fedcor.flower.sizes import cap_sizes, largest_believed
from fedcor.flower.tags import Tag
from fedcor.foreign import one_line
from fedcor.types import Array, FloatArray, IntArray, Population

__all__ = ["Claim", "Roster", "population_of"]

LOG = logging.getLogger("flwr.fedcor")
_MOST_EXAMPLES = 1e9  # beyond this it is not a number of samples


@dataclass(frozen=True)
class Claim:
    """What a node says of itself."""

    name: str
    examples: int | None = None
    mod: bool = True  # it understands our notes
    tags: Mapping[str, Tag] | None = None  # those that it was asked for; None if it cannot say


class Roster:
    """The clients of a run, and the nodes that they are on."""

    def __init__(self) -> None:
        self.names: list[str] = []  # (N,) client -> name
        self._sizes: list[float] = []  # (N,) n_k, NaN where it is unknown
        # (N,) the largest weight of its replies that each was believed, NaN before the first
        self._believed: list[float] = []
        self._trained_with: list[float] = []  # (N,) samples in its last training, NaN for none
        self.not_believed: set[int] = set()  # clients that this start has said so of
        self.quarantine = Quarantine()
        # Client -> the nodes that claim to be it, the trusted one first; node -> the client.
        self._nodes: dict[int, list[int]] = {}
        self._client: dict[int, int] = {}
        self._plain: set[int] = set()  # nodes without our mod
        self._tags: dict[int, Mapping[str, Tag] | None] = {}  # node -> what it says of itself
        self._earlier_tags: dict[int, Mapping[str, Tag]] = {}  # client -> in an earlier start
        self._here: set[int] = set()  # nodes that are connected
        # Node that did not say who it is -> (how often, not asked before this round).
        self._unidentified: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def unknown(self, nodes: Iterable[int], round: int = 0) -> list[int]:
        """Nodes to ask who they are: those not met yet, except those that lately did not answer."""
        return [
            node
            for node in nodes
            if node not in self._client and self._unidentified.get(node, (0, 0))[1] <= round
        ]

    def unidentified(self, node: int, round: int) -> None:
        """The node did not say who it is: do not ask it for a while."""
        times = self._unidentified.get(node, (0, 0))[0] + 1
        self._unidentified[node] = times, round + 1 + rounds_alone(times, replied=False)

    def forget_unidentified(self) -> None:
        """Ask every node once more that did not say who it is."""
        self._unidentified.clear()

    def enrol(self, claims: Mapping[int, Claim]) -> None:
        """Take in nodes. A new name is a new client; a known one may have moved here.

        Its earlier node comes first while it is connected and answers, so nobody takes a client's
        place by claiming its name.
        """
        for node, claim in sorted(
            claims.items(), key=lambda item: (_natural(item[1].name), item[0])
        ):
            if claim.name not in self.names:
                self.names.append(claim.name)
                self._sizes.append(np.nan)
                self._believed.append(np.nan)
                self._trained_with.append(np.nan)
                self.quarantine.add()
            client = self.names.index(claim.name)
            rivals = [other for other in self._nodes.get(client, []) if other in self._here]
            if rivals:
                message = "nodes %s and %d both claim to be %s: the first is trusted"
                LOG.warning(message, rivals, node, one_line(claim.name))
            self._nodes.setdefault(client, []).append(node)
            self._client[node] = client
            self._here.add(node)
            self._tags[node] = claim.tags
            if np.isnan(self._sizes[client]) and _plausible(claim.examples):
                self._sizes[client] = float(int(claim.examples or 1))
            if not claim.mod:
                self._plain.add(node)

    def node(self, client: int) -> int:
        """The node that `client` is on."""
        nodes = self._nodes[client]
        return next((node for node in nodes if node in self._here), nodes[0])

    def client(self, node: int) -> int:
        """The client on `node`; -1 where the node is unknown, or the client is on another."""
        client = self._client.get(node, -1)
        return client if client >= 0 and self.node(client) == node else -1

    def has_mod(self, client: int) -> bool:
        """Whether the client understands our notes."""
        return self.node(client) not in self._plain

    def tags(self, client: int) -> Mapping[str, Tag] | None:
        """The tags of a client, as its node says; None where the node cannot say."""
        if client not in self._nodes:  # not seen since a restart
            return self._earlier_tags.get(client)
        return self._tags[self.node(client)]

    def learn_size(self, client: int, examples: float) -> None:
        """Follow the number of samples that a client trained with, if it is plausible.

        A client may have said another number when it introduced itself: all of its data, say, or
        its data where all clients count alike in the mean. That one then changes in proportion.
        """
        if not _plausible(examples):
            return
        before, self._trained_with[client] = self._trained_with[client], float(examples)
        if np.isnan(self._sizes[client]):
            self._sizes[client] = float(int(examples))
        elif examples != before and not np.isnan(before):
            changed = self._sizes[client] * examples / before
            self._sizes[client] = float(np.clip(changed, 1, _MOST_EXAMPLES))

    def believe(self, said: Mapping[int, float], *, sizes: bool = True) -> dict[int, float]:
        """Client -> the weight that is believed of what its reply says; see `sizes.py`.

        Args:
            said: Client -> what its reply says.
            sizes: Whether weights are numbers of samples, which a client may have said before.
        """
        before = np.array(self._believed)
        if sizes:
            before = np.where(np.isnan(before), np.array(self._sizes), before)
        believed = largest_believed(said, before)
        for client, weight in believed.items():
            self._believed[client] = float(np.fmax(before[client], weight))
        return believed

    def population(self) -> Population:
        """The clients' sizes, as believed; the mean size for clients whose own is unknown."""
        return population_of(cap_sizes(np.array(self._sizes)))

    def reachable(
        self,
        nodes: Iterable[int],
        round: int,
        eligible: Callable[[int], bool] | None = None,
        task: Task = "train",
    ) -> IntArray:
        """Sorted clients that may be chosen: on a connected node, not left alone after faults.

        If all of them are left alone, all of them may be chosen. Only of the `eligible` ones. With
        another `task`, those who may be asked to do that.
        """
        self._here = set(nodes)
        alone = set(self.left_alone(round, eligible, task))
        there = [client for client in self._connected(eligible) if client not in alone]
        return np.array(there, dtype=np.int64)

    def left_alone(
        self,
        round: int,
        eligible: Callable[[int], bool] | None = None,
        task: Task = "train",
    ) -> list[int]:
        """Sorted clients on connected nodes that may not do `task` in `round`, after faults.

        Nobody is left alone where that would leave no one of the `eligible` ones.
        """
        there = self._connected(eligible)
        alone = [client for client in there if self.quarantine.until(client, task) > round]
        return [] if len(alone) == len(there) else alone

    def failed(
        self, client: int, round: int, task: Task = "train", *, replied: bool = False
    ) -> bool:
        """A client did not do what it was asked to; returns whether it is left alone for it.

        Args:
            client: Its number.
            round: In which it failed.
            task: What it was asked to do.
            replied: Whether it replied, uselessly. One that could not be reached is looked for on
                its other nodes first.
        """
        if not replied:
            here = self.node(client)
            self._nodes[client].remove(here)
            self._nodes[client].append(here)
        return self.quarantine.failed(client, task, round, replied=replied)

    def succeeded(self, client: int, task: Task) -> None:
        """A client did what it was asked to: its faults at this task are forgotten."""
        self.quarantine.succeeded(client, task)

    def forgive(self, client: int, task: Task, round: int) -> bool:
        """A fault of this round was not the client's; returns whether there was one."""
        return self.quarantine.forgive(client, task, round)

    def _connected(self, eligible: Callable[[int], bool] | None = None) -> list[int]:
        """Sorted clients on connected nodes, of the `eligible` ones."""
        there = {client for node in self._here if (client := self.client(node)) >= 0}
        return sorted(client for client in there if eligible is None or eligible(client))

    def to_arrays(self) -> dict[str, Array]:
        """What a checkpoint keeps: everything but the nodes."""
        tags = {k: of for k in range(len(self)) if (of := self.tags(k)) is not None}
        return {
            **({"tags": np.array(json.dumps(tags), dtype=np.str_)} if tags else {}),
            "names": np.array(self.names, dtype=np.str_),
            "sizes": np.array(self._sizes, dtype=np.float64),
            "believed": np.array(self._believed, dtype=np.float64),
            "trained_with": np.array(self._trained_with, dtype=np.float64),
            **self.quarantine.to_arrays(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Roster:
        """The clients of an earlier start; their nodes have to say who they are."""
        roster = cls()
        roster.names = [str(name) for name in arrays["names"]]
        sizes: FloatArray = arrays["sizes"]
        roster._sizes, roster.quarantine = sizes.tolist(), Quarantine.from_arrays(arrays)
        # A checkpoint of an earlier version does not have them.
        unknown = np.full(len(sizes), np.nan)
        roster._believed = arrays.get("believed", unknown).tolist()
        roster._trained_with = arrays.get("trained_with", unknown).tolist()
        tags = json.loads(str(arrays["tags"])) if "tags" in arrays else {}
        roster._earlier_tags = {int(client): of for client, of in tags.items()}
        return roster


def population_of(given: Iterable[float]) -> Population:
    """Clients of these sizes; the mean size for those whose own is NaN."""
    sizes = np.array(list(given))
    known = np.isfinite(sizes)
    mean = max(1, round(float(sizes[known].mean()))) if known.any() else 1
    return Population(np.rint(np.where(known, sizes, mean)).astype(np.int64))


def _plausible(examples: float | None) -> bool:
    """Whether a client may have so many samples."""
    return examples is not None and 1 <= examples <= _MOST_EXAMPLES


def _natural(name: str) -> tuple[int, int, str]:
    """Sorts partition-2 before partition-10."""
    head, _, tail = name.rpartition("-")
    return (0, int(tail), head) if tail.isdecimal() and len(tail) < 19 else (1, 0, name)
