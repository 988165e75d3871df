"""Messages without the model for a client that holds it, and with it for one that lost it."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedcor.flower.numbering import flower_round
from fedcor.flower.settings import RoundSettings
from fedcor.flower.wire import MISSING, NOTE, model_note

__all__ = ["Holders", "probe_message", "renewed", "says_missing", "slim"]


class Holders:
    """Which clients hold which version of the model. Clients are asked to keep these versions."""

    def __init__(self, current: str, clients: Iterable[int]) -> None:
        self.current = current
        self._clients = {current: set(clients)}

    def __getitem__(self, version: str) -> set[int]:
        return self._clients[version]

    @property
    def versions(self) -> list[str]:
        """The versions that clients keep, sorted."""
        return sorted(self._clients)

    def try_candidate(self, version: str) -> None:
        """Keep the current model and this candidate, which nobody holds yet; forget others."""
        self._clients = {self.current: self._clients[self.current], version: set()}

    def of(self, version: str) -> frozenset[int]:
        """Who holds `version`."""
        return frozenset(self._clients.get(version, ()))


def slim(
    message: Message,
    model: ArrayRecord,
    version: str,
    client: int,
    holders: Holders,
    *,
    remember: bool = False,
) -> Message:
    """The message without `model` for a client that holds it.

    With `remember`, a client that does not hold it is asked to keep it.
    """
    held = client in holders[version]
    keys = [key for key, record in message.content.array_records.items() if record is model]
    if len(keys) != 1 or not (held or remember):
        return message
    content = {key: record for key, record in message.content.items() if key != keys[0] or not held}
    note = model_note(keys[0], version, holders.versions)
    return renewed(message, RecordDict({**content, NOTE: note}))


def renewed(message: Message, content: RecordDict | None = None) -> Message:
    """A new message to the same node, with the same content unless another is given."""
    about = message.metadata
    content = RecordDict(dict(message.content.items())) if content is None else content
    return Message(
        content, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id
    )


def says_missing(sent: Message, reply: Message) -> bool:
    """Whether the client has lost a model that was left out; the note is removed from its reply.

    A client that was sent the model and still says so has not replied with what was asked for.
    """
    note = reply.content.config_records.get(NOTE)
    if note is None:
        return False
    del reply.content[NOTE]
    return note.get(MISSING) is True and NOTE in sent.content and not sent.content.array_records


def probe_message(settings: RoundSettings, round: int, node: int, model: ArrayRecord) -> Message:
    """The question for a loss, as an evaluate message that any ClientApp understands."""
    number = flower_round(round)
    config = ConfigRecord({**settings.evaluate_config, "server-round": number})
    return Message(
        RecordDict({settings.arrays_key: model, settings.config_key: config}),
        dst_node_id=node,
        message_type=MessageType.EVALUATE,
        ttl=settings.probe_timeout,
        group_id=str(number),
    )
