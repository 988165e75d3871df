"""Asking nodes that we have not met who they are."""

from __future__ import annotations

import hashlib

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedcor.flower.exchange import Exchange, send_and_receive
from fedcor.flower.roster import Claim
from fedcor.flower.screen import UNREACHABLE, fault
from fedcor.flower.wire import NOTE, identity_note, payload_bytes

__all__ = ["introduce"]


def introduce(
    exchange: Exchange, nodes: list[int], timeout: float, *, by_key: bool = False
) -> dict[int, Claim]:
    """Node -> who it is: as it says, or `by_key` as its SuperLink knows it. A node that does not understand the question goes
    by its node's name or key; one that does not answer at all is not there yet."""
    content = RecordDict({NOTE: identity_note()})
    messages = [Message(content, node, MessageType.EVALUATE, ttl=timeout) for node in nodes]
    exchange.sent(messages)
    replies = send_and_receive(exchange.grid, messages, timeout)
    asked = {
        message.metadata.message_id: node for message, node in zip(messages, nodes, strict=True)
    }
    claims: dict[int, Claim] = {}
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        wrong = fault(reply)
        if node is None or (wrong is not None and wrong[0] in UNREACHABLE):
            continue
        note = None if wrong is not None else reply.content.config_records.get(NOTE)
        if wrong is None:
            exchange.bytes_up += payload_bytes(reply.content)
        known = _known(exchange, node) if by_key or note is None else ""
        claims[node] = Claim(known, mod=False) if note is None else _told(note, node, known)
    return claims


def _told(note: ConfigRecord, node: int, known: str) -> Claim:
    name, partition, examples = note.get("name"), note.get("partition"), note.get("examples")
    name = known or (_readable(name) if isinstance(name, str) else "")
    if not name:
        name = f"partition-{partition}" if isinstance(partition, int) else f"node-{node}"
    return Claim(
        name, examples if isinstance(examples, int) and not isinstance(examples, bool) else None
    )


def _known(exchange: Exchange, node: int) -> str:
    """The node's name or the fingerprint of its key, which the SuperLink vouches for; else its id."""
    info = next((info for info in exchange.grid.get_nodes() if info.node_id == node), None)
    name, key = getattr(info, "name", ""), bytes(getattr(info, "public_key", b""))
    return _readable(name) or (
        f"key-{hashlib.sha256(key).hexdigest()[:32]}" if key else f"node-{node}"
    )


def _readable(name: str) -> str:
    return "".join(letter for letter in name if letter.isprintable())[:200].strip()
