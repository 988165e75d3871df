"""The clients of a run: their names, nodes and sizes, and how nodes say who they are.

A node's id may change with every run and every restart; a client's name does not. Clients of the
first round are numbered in the order of their names, later ones as they come. A number is never
reused.

A node is asked for its identity by a train message without a model, which our mod answers before
the app sees it. A node that does not understand it is known by its node's name or key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedcor.core.text import one_line
from fedcor.core.types import Array, IntArray, Population
from fedcor.flower.exchange import Exchange, cap_sizes, send_and_receive
from fedcor.flower.logs import counted, log_once
from fedcor.flower.protocol import (
    LOG,
    NOTE,
    PROTOCOL,
    SAYS_KEYS,
    ErrorCode,
    Tag,
    identity_note,
    payload_bytes,
    read_tags,
)
from fedcor.flower.replies import UNREACHABLE, reply_fault
from fedcor.rounds.backoff import rounds_alone

_MOST_EXAMPLES = 1e9  # beyond this it is not a number of samples
_LONGEST_REASON = 200  # characters in the log


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
        self.sizes: list[float] = []  # (N,) n_k, NaN where it is unknown
        self._introduced: set[int] = set()  # clients that said their size with their name
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
                self.sizes.append(np.nan)
            client = self.names.index(claim.name)
            rivals = [other for other in self._nodes.get(client, []) if other in self._here]
            if rivals:
                message = "nodes %s and %d both claim to be %s: the first is trusted"
                LOG.warning(message, rivals, node, one_line(claim.name))
            self._nodes.setdefault(client, []).append(node)
            self._client[node] = client
            self._here.add(node)
            self._tags[node] = claim.tags
            if _plausible(claim.examples) and client not in self._introduced:
                self._introduced.add(client)
                self.sizes[client] = float(int(claim.examples or 1))
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
        """Follow the number of samples that a client trained with, unless it introduced itself."""
        if client not in self._introduced and _plausible(examples):
            self.sizes[client] = float(int(examples))

    def population(self) -> Population:
        """The clients' sizes, as believed; the mean size for clients whose own is unknown."""
        return population_of(cap_sizes(np.array(self.sizes)))

    def connect(
        self, nodes: Iterable[int], eligible: Callable[[int], bool] | None = None
    ) -> IntArray:
        """Sorted clients on the connected `nodes`, of the `eligible` ones."""
        self._here = set(nodes)
        clients = {client for node in self._here if (client := self.client(node)) >= 0}
        kept = [client for client in clients if eligible is None or eligible(client)]
        return np.array(sorted(kept), dtype=np.int64)

    def look_elsewhere(self, client: int) -> None:
        """A client could not be reached: its other nodes, if there are any, come first."""
        here = self.node(client)
        self._nodes[client].remove(here)
        self._nodes[client].append(here)

    def to_arrays(self) -> dict[str, Array]:
        """What a checkpoint keeps: everything but the nodes."""
        tags = {k: of for k in range(len(self)) if (of := self.tags(k)) is not None}
        return {
            **({"tags": np.array(json.dumps(tags), dtype=np.str_)} if tags else {}),
            "names": np.array(self.names, dtype=np.str_),
            "sizes": np.array(self.sizes, dtype=np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Roster:
        """The clients of an earlier start; their nodes have to say who they are."""
        roster = cls()
        roster.names = [str(name) for name in arrays["names"]]
        roster.sizes = arrays["sizes"].tolist()
        if len(roster.sizes) != len(roster.names):
            raise ValueError("not as many sizes as names of clients")
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


@dataclass
class Introductions:
    """What unknown nodes answered.

    Attributes:
        claims: Node -> who it is. A node that does not answer at all is left out.
        rejected: Node -> why a mod of its app rejected the question.
        not_understood: Node without our mod, or with another one before it -> what it replied.
        foreign: Node -> the version of fedcor on it, where it speaks another protocol.
    """

    claims: dict[int, Claim] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    not_understood: dict[int, str] = field(default_factory=dict)
    foreign: dict[int, str] = field(default_factory=dict)

    def log_doubts(self, said: MutableSet[str], *, by_key: bool) -> None:
        """Log what should be changed in the ClientApp; each kind of doubt is in `said` after it."""
        met = len(self.claims)
        loss = "Every message to them carries the model"
        if not by_key:
            loss += ", and they are known by their nodes' names or keys, which a restart may change"
        advice = "ClientApp(mods=[answers_probes(), ...])"
        if self.rejected:
            log_once(
                said,
                "rejected",
                f"{len(self.rejected)} of {counted(met, 'node')}: a mod rejects the question for "
                f"the client's identity ({_any_of(self.rejected)}), as the mods of secure "
                f"aggregation do. {loss}. Put answers_probes() first: {advice}",
            )
        if self.not_understood:
            log_once(
                said,
                "not understood",
                f"{len(self.not_understood)} of {counted(met, 'node')}: the app does not answer "
                f"the question for the client's identity ({_any_of(self.not_understood)}): it has "
                f"no mod answers_probes(), another mod comes before it, or it is not called "
                f"(mods=[answers_probes]). {loss}. Put it first: {advice}",
            )
        if self.foreign:
            log_once(
                said,
                "foreign",
                f"{len(self.foreign)} of {counted(met, 'node')} "
                f"({self.claims[next(iter(self.foreign))].name}): fedcor "
                f"{_any_of(self.foreign)} is installed, whose messages differ from those of fedcor "
                f"{version('fedcor')} on this server: install the same version on both sides",
            )


def introduce(
    exchange: Exchange,
    nodes: list[int],
    timeout: float,
    *,
    by_key: bool = False,
    tags: Sequence[str] = (),
) -> Introductions:
    """Who `nodes` are: as they say, or `by_key` as their SuperLink knows them.

    The question is a train message without a model. Our mod answers it before the app sees it. A
    node that does not understand it is known by its node's name or key. One that does not answer at
    all is left out. `tags` are those that they are asked for.
    """
    content = RecordDict({NOTE: identity_note(tags)})
    messages = [Message(content, node, MessageType.TRAIN, ttl=timeout) for node in nodes]
    exchange.count_sent(messages)
    replies = send_and_receive(exchange.grid, messages, timeout)
    asked = {
        message.metadata.message_id: node for message, node in zip(messages, nodes, strict=True)
    }
    answers = Introductions()
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        fault = reply_fault(reply)
        if node is None or (fault is not None and fault[0] in UNREACHABLE):
            continue
        note = None if fault is not None else reply.content.config_records.get(NOTE)
        if fault is None:
            exchange.bytes_up += payload_bytes(reply.content)
        vouched = _vouched_name(exchange, node) if by_key or _nameless(note) else ""
        if note is not None:
            answers.claims[node] = _claim(note, vouched)
            if str(note.get("protocol", PROTOCOL)).split(".")[0] != PROTOCOL.split(".")[0]:
                answers.foreign[node] = _readable(str(note.get("fedcor", "of another version")))
            continue
        answers.claims[node] = Claim(vouched, mod=False)
        rejected = reply.has_error() and reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
        kind = answers.rejected if rejected else answers.not_understood
        kind[node] = _last_line("a reply without a note" if fault is None else fault[1])
    return answers


def _nameless(note: ConfigRecord | None) -> bool:
    """Whether the node does not say who it is. An id alone would be new after a restart."""
    return note is None or not (_own_name(note) or isinstance(note.get("partition"), int))


def _own_name(note: ConfigRecord) -> str:
    name = note.get("name")
    return _readable(name) if isinstance(name, str) else ""


def _claim(note: ConfigRecord, vouched: str) -> Claim:
    """What a node's note says, under its vouched name where that is to be used."""
    name, examples = vouched or _own_name(note), note.get("examples")
    name = name or f"partition-{note.get('partition')!r}"
    if not isinstance(examples, int) or isinstance(examples, bool):
        examples = None
    return Claim(name, examples, tags=read_tags(note))


def _vouched_name(exchange: Exchange, node: int) -> str:
    """The node's name or its key's fingerprint, which the SuperLink vouches for; else its id."""
    known = exchange.grid.get_nodes() if SAYS_KEYS else []
    info = next((info for info in known if info.node_id == node), None)
    name, key = getattr(info, "name", ""), bytes(getattr(info, "public_key", b""))
    fingerprint = f"key-{hashlib.sha256(key).hexdigest()[:32]}" if key else f"node-{node}"
    return _readable(name) or fingerprint


def _readable(name: str) -> str:
    """On one line, and not too long for a table. Names that differ in what is not seen still do."""
    return one_line(name.strip()[:200], None)[:200].strip()


def _any_of(said: Mapping[int, str]) -> str:
    """What one of several nodes said."""
    return next(iter(said.values()))


def _last_line(reason: str) -> str:
    """Of a traceback, what was raised."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return one_line(lines[-1], _LONGEST_REASON) if lines else "no reason given"
