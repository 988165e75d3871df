"""Ask unknown nodes who they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableSet, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedcor.flower.exchange import Exchange, send_and_receive
from fedcor.flower.private import SAYS_KEYS, ErrorCode
from fedcor.flower.roster import Claim
from fedcor.flower.screen import UNREACHABLE, reply_fault
from fedcor.flower.tags import read_tags
from fedcor.flower.wire import LOG, NOTE, PROTOCOL, identity_note, payload_bytes
from fedcor.foreign import one_line

__all__ = ["Introductions", "introduce"]

_LONGEST_REASON = 200  # characters in the log


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
        if self.rejected and "rejected" not in said:
            said.add("rejected")
            LOG.warning(
                "%d of %d nodes: a mod rejects the question who they are (%s). %s. "
                "Put answers_probes() first: ClientApp(mods=[answers_probes(), ...])",
                *(len(self.rejected), met, _any_of(self.rejected), loss),
            )
        if self.not_understood and "not understood" not in said:
            said.add("not understood")
            LOG.warning(
                "%d of %d nodes do not understand the question who they are (%s): their app has no "
                "mod answers_probes(), or another mod stands before it. %s. "
                "Put it first: ClientApp(mods=[answers_probes(), ...])",
                *(len(self.not_understood), met, _any_of(self.not_understood), loss),
            )
        if self.foreign and "foreign" not in said:
            said.add("foreign")
            name = self.claims[next(iter(self.foreign))].name
            LOG.warning(
                "%d of %d nodes (%s) run fedcor %s, whose messages differ from those of fedcor %s "
                "on this server: install the same version on both sides",
                *(len(self.foreign), met, name, _any_of(self.foreign), version("fedcor")),
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
