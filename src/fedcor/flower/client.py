"""The client's side: one line in the ClientApp, `ClientApp(mods=[answers_probes()])`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedcor.flower.protocol import LOG, MISSING, NOTE, PROTOCOL, RMS_LOSS, Tag, write_tags
from fedcor.rounds.loss_screening import LossNoise

# Prefix, in the node's own state, of the models that the server may refer to later.
_STORED = "fedcor."
_ClientCall = Callable[[Message, Context], Message]
# As flwr.clientapp.typing.Mod, which is not public.
_Mod = Callable[[Message, Context, _ClientCall], Message]


def answers_probes(
    *,
    name: str | None = None,
    examples: Callable[[Context], int] | None = None,
    tags: Callable[[Context], Mapping[str, Tag]] | None = None,
    loss_noise: float = 0.0,
    loss_clip: float = 10.0,
) -> _Mod:
    """A mod with which an app's own evaluate function answers the server's questions. Put it first.

    It says who the client is, and keeps the models that the server will refer to later, so that
    none is sent twice. It belongs to the whole app, `ClientApp(mods=[...])`, not to a single
    function of it.

    Args:
        name: The client's name, the same in every run. None: the node's configuration
            `client-name`, else its `partition-id`.
        examples: Returns the client's number of training samples. None: the server learns it from
            the client's first reply.
        tags: Returns further tags of the client, for rules about who may be chosen; a node's own
            configuration counts without it. The server asks when it first meets the node, and only
            for the tags that its rules need.
        loss_noise: Standard deviation of Gaussian noise on every loss that leaves the client, in
            replies to training and to evaluation; 0 for none. A loss is a metric with "loss" in its
            name. Other metrics, such as an accuracy, leave as they are. With noise, the metric
            `rms-loss` is taken out: noise that fits a mean is too small for it.
        loss_clip: A loss is cut to [0, loss_clip] before there is noise on it.

    Returns:
        A mod for `ClientApp(mods=[...])`.

    Example:
        app = ClientApp(mods=[answers_probes(name="site-3", examples=lambda context: len(data))])
    """

    noise = LossNoise(loss_noise, loss_clip)

    def mod(message: Message, context: Context, call_next: _ClientCall) -> Message:
        note = message.content.config_records.get(NOTE)
        if note is None:
            return with_noise(call_next(message, context), noise)
        del message.content[NOTE]  # the app sees the message as it is without us
        if note["ask"] == "identity":
            answer = _identity(context, note, name=name, examples=examples, tags=tags)
            return Message(RecordDict({NOTE: answer}), reply_to=message)
        if not _recall(message.content, context.state, note):
            return Message(RecordDict({NOTE: ConfigRecord({MISSING: True})}), reply_to=message)
        return with_noise(call_next(message, context), noise)

    return mod


def _identity(
    context: Context,
    question: ConfigRecord,
    *,
    name: str | None,
    examples: Callable[[Context], int] | None,
    tags: Callable[[Context], Mapping[str, Tag]] | None,
) -> ConfigRecord:
    """The answer to the identity question."""
    config = context.node_config
    answer = ConfigRecord(
        {"protocol": PROTOCOL, "fedcor": version("fedcor"), "flwr": version("flwr")}
    )
    client_name = name if name is not None else config.get("client-name")
    if client_name is not None:
        answer["name"] = str(client_name)
    if "partition-id" in config:
        answer["partition"] = int(config["partition-id"])
    if examples is not None:
        try:
            answer["examples"] = int(examples(context))
        except Exception:  # the name matters more
            LOG.exception(
                "answers_probes: examples() failed; the server will use the number in a reply"
            )
    more: Mapping[str, Tag] = {}
    if tags is not None and "tags" in question:
        try:
            more = dict(tags(context))
        except Exception:
            LOG.exception("answers_probes: tags() failed; the server is not told its tags")
    write_tags(answer, question, {**config, **more})
    return answer


def _recall(content: RecordDict, state: RecordDict, note: ConfigRecord) -> bool:
    """Put a model that was left out back into the message; False if the node has lost it."""
    keep = {f"{_STORED}{version}" for version in cast(list[str], note["keep"])}
    key, stored = str(note["key"]), _STORED + str(note["version"])
    if key not in content:
        if stored not in state.array_records:
            return False
        content[key] = _copy(state.array_records[stored])
    stored_now = [name for name in state.array_records if name.startswith(_STORED)]
    for name in stored_now:
        if name not in keep:
            del state[name]
    if stored in keep:
        state[stored] = _copy(content.array_records[key])
    return True


def _copy(record: ArrayRecord) -> ArrayRecord:
    """Another record with the same arrays: an app may empty the one that it is given."""
    return ArrayRecord(dict(record.items()))


def with_noise(reply: Message, noise: LossNoise) -> Message:
    """The reply, with noise on each metric that is called a loss, and without root mean squares.

    One of n samples changes a mean of losses in [0, c] by c / n at most, but a root mean square by
    up to c / sqrt(n): noise that hides it in the one does not in the other.
    """
    if not noise.sigma or reply.has_error():
        return reply
    # Not a named stream: whoever could draw the same numbers could take them off again.
    rng = np.random.default_rng()
    for record in reply.content.metric_records.values():
        record.pop(RMS_LOSS, None)  # the server takes the mean loss instead
        _add(record, noise, rng)
    return reply


def _add(record: MetricRecord, noise: LossNoise, rng: np.random.Generator) -> None:
    for name in [name for name in record if "loss" in name.lower()]:
        values = np.asarray(record[name], dtype=np.float64)
        noisy = noise.add(values, rng).tolist()
        record[name] = noisy
