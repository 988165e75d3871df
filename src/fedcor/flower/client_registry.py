"""The clients of a run: their names, nodes and sizes, and the back-off of those that fail.

A node's id may change with every run and every restart; a client's name does not. Clients of the
first round are numbered in the order of their names, later ones as they come. A number is never
reused.

A client's `num-examples` is its weight in the mean, so a client that exaggerates would dominate it.
Two bounds limit the number that is used:

    most times the population   1000 times the lower median of what all clients say
    most times its own past     twice the largest number that was used before

Where the largest client has up to 1000 times the data of the smallest, the first bound changes
nothing. A client whose data grows may double its number each time it trains. A smaller number is
used at once, and does not lower the bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from fedcor.core.text import one_line
from fedcor.core.types import Array, FloatArray, IntArray, Population
from fedcor.flower.protocol import LOG, Tag

SIZE = "num-examples"  # the metric that Flower's strategies weight replies by
_MOST_MEDIANS = 1000.0
_MOST_GROWTH = 2.0
_MOST_EXAMPLES = 1e9  # beyond this it is not a number of samples
Task: TypeAlias = Literal["train", "probe", "evaluate"]
TASKS: tuple[Task, ...] = get_args(Task)
# Rounds for which a client that does not reply, or replies uselessly, is left alone at most.
LONGEST_SILENT, LONGEST_USELESS = 8, 64


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
        """The plausible weight of each client's reply, given what the replies claim.

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
        clients = [client for client in self._connected(eligible) if client not in alone]
        return np.array(clients, dtype=np.int64)

    def left_alone(
        self,
        round: int,
        eligible: Callable[[int], bool] | None = None,
        task: Task = "train",
    ) -> list[int]:
        """Sorted clients on connected nodes that may not do `task` in `round`, after faults.

        Nobody is left alone where that would leave no one of the `eligible` ones.
        """
        connected = self._connected(eligible)
        alone = [client for client in connected if self.quarantine.until(client, task) > round]
        return [] if len(alone) == len(connected) else alone

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
        clients = {client for node in self._here if (client := self.client(node)) >= 0}
        return sorted(client for client in clients if eligible is None or eligible(client))

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
        roster._sizes = arrays["sizes"].tolist()
        roster._believed = arrays["believed"].tolist()
        roster._trained_with = arrays["trained_with"].tolist()
        roster.quarantine = Quarantine.from_arrays(arrays)
        tags = json.loads(str(arrays["tags"])) if "tags" in arrays else {}
        roster._earlier_tags = {int(client): of for client, of in tags.items()}
        return roster


def population_of(given: Iterable[float]) -> Population:
    """Clients of these sizes; the mean size for those whose own is NaN."""
    sizes = np.array(list(given))
    known = np.isfinite(sizes)
    mean = max(1, round(float(sizes[known].mean()))) if known.any() else 1
    return Population(np.rint(np.where(known, sizes, mean)).astype(np.int64))


def cap_sizes(said: FloatArray) -> FloatArray:
    """(N,) what clients say, NaN where nothing is known, within the bound of the population."""
    known = np.sort(said[np.isfinite(said)])
    if not len(known):
        return said
    capped: FloatArray = np.minimum(said, _MOST_MEDIANS * known[(len(known) - 1) // 2])
    return capped


def largest_believed(said: Mapping[int, float], before: FloatArray) -> dict[int, float]:
    """Client -> what is believed of what it says now.

    Args:
        said: Client -> what it says; above 0.
        before: (N,) The largest number that each was believed before, NaN for none.
    """
    now = before.copy()
    for client, given in said.items():
        now[client] = np.fmin(given, _MOST_GROWTH * before[client])
    # A client that says less than before stands in the population with its larger number.
    capped = cap_sizes(np.fmax(now, before))
    return {client: float(min(now[client], capped[client])) for client in said}


class Quarantine:
    """Back-off: a client that fails again and again is left alone, for longer each time.

    A *task* is what a client is asked to do: train, answer a question (`probe`), evaluate. Faults
    in a row are counted per task, at most one per round, since a client may answer every question
    and fail in every training. One usable reply to the task resets its count.

        no reply        The node is gone or late: left alone for 1, 2, 4, then 8 rounds. Connections
                        come back by themselves, and each try costs a deadline. A dead node fails at
                        every task, so such a fault continues the longest count of any task.
        a useless one   An error, or a reply that cannot be used. The first may be chance; from the
                        second in a row on, 1, 2, 4, ... up to 64 rounds. Most such clients stay
                        broken until somebody fixes them.

    A client that is left alone is neither chosen nor asked anything. A useless reply to the
    strategy's `evaluate` counts less, since a client may train well and have no test data: the
    client is not evaluated and not asked for losses, but it may be chosen.

    Clients are the numbers 0, 1, ... in the order of `add`.
    """

    def __init__(self) -> None:
        # task -> (N,) faults in a row; the round before which the client is left alone, and that
        # before which it is for a missing reply; the round of the last fault.
        self._faults: dict[Task, list[int]] = {task: [] for task in TASKS}
        self._until: dict[Task, list[int]] = {task: [] for task in TASKS}
        self._silent: dict[Task, list[int]] = {task: [] for task in TASKS}
        self._last: dict[Task, list[int]] = {task: [] for task in TASKS}

    def add(self) -> None:
        """One more client, who has not failed."""
        for task in TASKS:
            self._faults[task].append(0)
            self._until[task].append(0)
            self._silent[task].append(0)
            self._last[task].append(-1)

    def until(self, client: int, task: Task = "train") -> int:
        """The round from which on the client may be asked to do `task`: to train, if chosen."""
        evaluate = self._silent if task == "train" else self._until
        rows = (self._until["train"], self._until["probe"], evaluate["evaluate"])
        return max(row[client] for row in rows)

    def faults(self, client: int, task: Task) -> int:
        """How often in a row it failed at `task`."""
        return self._faults[task][client]

    def failed(self, client: int, task: Task, round: int, *, replied: bool) -> bool:
        """The client failed at `task` in `round`; returns whether it is left alone for longer now.

        A second fault in the same round does not count: the round is tried again at once, and one
        outage is one fault.
        """
        counted = [one for one in TASKS if self._last[one][client] == round]
        if replied:
            self._faults[task][client] += task not in counted
        else:
            # Useless evaluations do not say that a node is dead.
            gone = [one for one in TASKS if one != "evaluate" or self._silent[one][client]]
            longest = max(self._faults[one][client] for one in (task, *gone))
            self._faults[task][client] = longest + (not counted)
        self._last[task][client] = round
        alone = rounds_alone(self._faults[task][client], replied=replied)
        before = self.until(client, task)
        if alone:
            for until in (self._until,) if replied else (self._until, self._silent):
                until[task][client] = max(until[task][client], round + 1 + alone)
        return self.until(client, task) > before

    def succeeded(self, client: int, task: Task) -> None:
        """The client did `task` well: its faults there are forgotten."""
        self._faults[task][client] = self._until[task][client] = self._silent[task][client] = 0

    def forgive(self, client: int, task: Task, round: int) -> bool:
        """A fault of this `round` was not the client's, and another one in it counts anew.

        Returns whether there was one.
        """
        if self._last[task][client] != round:
            return False
        self._faults[task][client] = max(0, self._faults[task][client] - 1)
        # It was asked in this round, so it was not left alone before the fault.
        self._until[task][client], self._last[task][client] = 0, -1
        return True

    def to_arrays(self) -> dict[str, Array]:
        """What a checkpoint keeps, one row per task."""
        return {
            "failures": np.array([self._faults[task] for task in TASKS], dtype=np.int64),
            "barred": np.array([self._until[task] for task in TASKS], dtype=np.int64),
            "silent": np.array([self._silent[task] for task in TASKS], dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Quarantine:
        """As `to_arrays` gave it."""
        quarantine = cls()
        for _ in range(arrays["failures"].shape[1]):
            quarantine.add()
        for row, task in enumerate(TASKS):
            quarantine._faults[task] = arrays["failures"][row].tolist()
            quarantine._until[task] = arrays["barred"][row].tolist()
            quarantine._silent[task] = arrays["silent"][row].tolist()
        return quarantine


def rounds_alone(faults: int, *, replied: bool) -> int:
    """Rounds for which a client with so many faults in a row is left alone; 0 for not at all.

    Args:
        faults: In a row, of one task, the last one included; at least 1.
        replied: Whether the last one was a useless reply, and not a missing one.

    Example:
        >>> [rounds_alone(faults, replied=False) for faults in range(1, 7)]
        [1, 2, 4, 8, 8, 8]
        >>> [rounds_alone(faults, replied=True) for faults in range(1, 11)]
        [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    """
    doublings = faults - 2 if replied else faults - 1
    longest = LONGEST_USELESS if replied else LONGEST_SILENT
    return 0 if doublings < 0 else min(longest, 1 << min(doublings, 30))


def _plausible(examples: float | None) -> bool:
    """Whether a client may have so many samples."""
    return examples is not None and 1 <= examples <= _MOST_EXAMPLES


def _natural(name: str) -> tuple[int, int, str]:
    """Sorts partition-2 before partition-10."""
    head, _, tail = name.rpartition("-")
    return (0, int(tail), head) if tail.isdecimal() and len(tail) < 19 else (1, 0, name)
