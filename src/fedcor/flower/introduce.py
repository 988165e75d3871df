"""Ask unknown nodes who they are."""

from __future__ import annotations

import hashlib

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedcor.flower.exchange import Exchange, send_and_receive
from fedcor.flower.roster import Claim
from fedcor.flower.screen import UNREACHABLE, reply_fault
from fedcor.flower.wire import NOTE, identity_note, payload_bytes

__all__ = ["introduce"]


def introduce(
    exchange: Exchange, nodes: list[int], timeout: float, *, by_key: bool = False
) -> dict[int, Claim]:
    """Node -> who it is: as it says, or `by_key` as its SuperLink knows it.

    A node that does not understand the question is known by its node's name or key. One that does
    not answer at all is left out.
    """
    content = RecordDict({NOTE: identity_note()})
    messages = [Message(content, node, MessageType.EVALUATE, ttl=timeout) for node in nodes]
    exchange.count_sent(messages)
    replies = send_and_receive(exchange.grid, messages, timeout)
    asked = {
        message.metadata.message_id: node for message, node in zip(messages, nodes, strict=True)
    }
    claims: dict[int, Claim] = {}
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        fault = reply_fault(reply)
        if node is None or (fault is not None and fault[0] in UNREACHABLE):
            continue
        note = None if fault is not None else reply.content.config_records.get(NOTE)
        if fault is None:
            exchange.bytes_up += payload_bytes(reply.content)
        vouched = _vouched_name(exchange, node) if by_key or note is None else ""
        claims[node] = Claim(vouched, mod=False) if note is None else _claim(note, node, vouched)
    return claims


def _claim(note: ConfigRecord, node: int, vouched: str) -> Claim:
    """What a node's note says, under its vouched name where that is to be used."""
    name, partition, examples = note.get("name"), note.get("partition"), note.get("examples")
    name = vouched or (_readable(name) if isinstance(name, str) else "")
    if not name:
        name = f"partition-{partition}" if isinstance(partition, int) else f"node-{node}"
    if not isinstance(examples, int) or isinstance(examples, bool):
        examples = None
    return Claim(name, examples)


def _vouched_name(exchange: Exchange, node: int) -> str:
    """The node's name or its key's fingerprint, which the SuperLink vouches for; else its id."""
    info = next((info for info in exchange.grid.get_nodes() if info.node_id == node), None)
    name, key = getattr(info, "name", ""), bytes(getattr(info, "public_key", b""))
    fingerprint = f"key-{hashlib.sha256(key).hexdigest()[:32]}" if key else f"node-{node}"
    return _readable(name) or fingerprint


def _readable(name: str) -> str:
    """On one line, and not too long for a table."""
    return "".join(letter for letter in name if letter.isprintable())[:200].strip()
