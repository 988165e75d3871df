"""Asking nodes that we have not met who they are."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedcor.flower.exchange import Exchange, send_and_receive
from fedcor.flower.roster import Claim
from fedcor.flower.screen import UNREACHABLE, fault
from fedcor.flower.wire import NOTE, identity_note, payload_bytes

__all__ = ["introduce"]


def introduce(exchange: Exchange, nodes: list[int], timeout: float) -> dict[int, Claim]:
    """Node -> who it says it is. A node that does not understand the question goes by its name or key; one that does not
    answer at all is not there yet."""
    content = RecordDict({NOTE: identity_note()})
    messages = [Message(content, node, MessageType.EVALUATE, ttl=timeout) for node in nodes]
    exchange.sent(messages)
    replies = send_and_receive(exchange.grid, messages, timeout)
    asked = {message.metadata.message_id: node for message, node in zip(messages, nodes, strict=True)}
    claims: dict[int, Claim] = {}
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        wrong = fault(reply)
        if node is None or (wrong is not None and wrong[0] in UNREACHABLE):
            continue
        note = None if wrong is not None else reply.content.config_records.get(NOTE)
        if wrong is None:
            exchange.bytes_up += payload_bytes(reply.content)
        claims[node] = _told(note, node) if note is not None else _untold(exchange, node)
    return claims


def _told(note: ConfigRecord, node: int) -> Claim:
    name, partition, examples = note.get("name"), note.get("partition"), note.get("examples")
    name = _readable(name) if isinstance(name, str) else ""
    if not name:
        name = f"partition-{partition}" if isinstance(partition, int) else f"node-{node}"
    return Claim(name, examples if isinstance(examples, int) and not isinstance(examples, bool) else None)


def _untold(exchange: Exchange, node: int) -> Claim:
    info = next((info for info in exchange.grid.get_nodes() if info.node_id == node), None)
    name, key = getattr(info, "name", ""), bytes(getattr(info, "public_key", b""))
    return Claim(_readable(name) or (f"key-{key.hex()[-32:]}" if key else f"node-{node}"), mod=False)


def _readable(name: str) -> str:
    return "".join(letter for letter in name if letter.isprintable())[:200].strip()
