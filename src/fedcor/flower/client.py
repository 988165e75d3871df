"""The client's side: one line in the ClientApp, `ClientApp(mods=[answers_probes()])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import Mod

from fedcor.flower.wire import LOG, MISSING, NOTE

__all__ = ["answers_probes"]

_STORED = (
    "fedcor."  # prefix, in the node's own state, of the models that the server may refer to again
)
_ClientCall = Callable[[Message, Context], Message]


def answers_probes(
    *, name: str | None = None, examples: Callable[[Context], int] | None = None
) -> Mod:
    """A mod that lets the app's own evaluate function answer the server's questions. Put it first in the list.

    It says who this client is: `name` where given, or the node's configuration `client-name` or `partition-id`. `examples`
    tells how many training samples it has; without it the server learns that from the first reply. And it remembers the
    models that the server says it will refer to again, so that none is sent twice.
    """

    def mod(message: Message, context: Context, call_next: _ClientCall) -> Message:
        note = message.content.config_records.get(NOTE)
        if note is None:
            return call_next(message, context)
        del message.content[NOTE]  # the app sees the message that it would have seen without us
        if note["ask"] == "identity":
            return Message(RecordDict({NOTE: _identity(context)}), reply_to=message)
        if not _recall(message.content, context.state, note):
            return Message(RecordDict({NOTE: ConfigRecord({MISSING: True})}), reply_to=message)
        return call_next(message, context)

    def _identity(context: Context) -> ConfigRecord:
        config = context.node_config
        answer = ConfigRecord()
        own = name if name is not None else config.get("client-name")
        if own is not None:
            answer["name"] = str(own)
        if "partition-id" in config:
            answer["partition"] = int(config["partition-id"])
        if examples is not None:
            try:
                answer["examples"] = int(examples(context))
            except Exception:  # who this is matters more than how much it has
                LOG.exception(
                    "answers_probes: examples() failed; the server will learn the number from a reply"
                )
        return answer

    return mod


def _recall(content: RecordDict, state: RecordDict, note: ConfigRecord) -> bool:
    """Put the model in its place in the message, from the node's state where it was left out; False when it is not there."""
    keep = {f"{_STORED}{version}" for version in cast(list[str], note["keep"])}
    key, stored = str(note["key"]), _STORED + str(note["version"])
    if key not in content:
        if stored not in state.array_records:
            return False
        content[key] = _copy(state.array_records[stored])
    for old in [
        name for name in state.array_records if name.startswith(_STORED) and name not in keep
    ]:
        del state[old]
    if stored in keep:
        state[stored] = _copy(content.array_records[key])
    return True


def _copy(record: ArrayRecord) -> ArrayRecord:
    """Another record of the same arrays: an app may empty the one that it is given."""
    return ArrayRecord(dict(record.items()))
