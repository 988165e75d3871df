"""The protocol between the strategy and the client's mod, the mod, and the numbering of rounds.

The client's side is one line in the ClientApp: `ClientApp(mods=[answers_probes()])`.

One small record beside Flower's own holds a question and its answer:

    ask = "identity"    who are you?                    -> name, partition, examples, those of its
                        tags that the question names, and the versions of protocol and packages
    ask = "model"       a train or evaluate message as the app knows it; the model may be left out
                        if the client already holds it  -> the app's own reply, or missing = True

A client without the mod is sent plain train and evaluate messages only, with the model in each.
The identity question is a train message, since every ClientApp has a train function: one that the
app has no function for would not reach the mod.

Tags are entries of a node's configuration. The server asks for those that its rules name, or for
all where a function decides who is eligible; without rules it asks for none. They are what a node
claims about itself.

Rounds are counted from 0 over the whole run, as selectors and records do. Flower counts from 1, and
its loop starts at 1 again when a run is resumed:

    round           0, 1, 2, ...           in this package, in the record, in `federation.round`
    Flower's round  round + 1              what strategies, clients (`server-round`), `evaluate_fn`
                                           and the result are given, and what messages say
    server_round    Flower's - `finished`  what Flower's loop passes to us; `finished` rounds were
                                           done before this start

This is also the only module that imports non-public modules of Flower, which may change with any
release: `ErrorCode` tells a node that cannot be reached from an app that raised; `NodeInfo` and
`Run` are types in the signatures of `Grid`.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedcor.core.errors import ConfigError
from fedcor.rounds.loss_screening import LossNoise

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo as NodeInfo
    from flwr.supercore.run import Run as Run

# Below Flower's own logger, so its level and its handlers apply.
LOG = logging.getLogger("flwr.fedcor")
NOTE = "fedcor"  # the record's key in a message's content
MISSING = "missing"
# Version of these notes. With another first number, the two sides do not understand each other;
# with another second number, one side says more than the other reads.
PROTOCOL = "1.1"
# What a client may say in the metrics of its reply, beside its loss: the root mean square of its
# samples' losses, how long it took, its local steps and their learning rate.
RMS_LOSS, SECONDS, STEPS, RATE = "rms-loss", "train-seconds", "local-steps", "learning-rate"
SAYS_KEYS = hasattr(Grid, "get_nodes")  # whether a grid knows the nodes' keys: since flwr 1.38
Tag: TypeAlias = bool | int | float | str
EVERY_TAG = "*"
_ASKED, _SAID, _PREFIX = "tags", "tags", "tag."
_MOST, _LONGEST = 32, 200  # tags of a client; characters of a name or a value
# Prefix, in the node's own state, of the models that the server may refer to later.
_STORED = "fedcor."
_ClientCall = Callable[[Message, Context], Message]
# As flwr.clientapp.typing.Mod, which is not public.
_Mod = Callable[[Message, Context, _ClientCall], Message]


def identity_note(tags: Sequence[str] = ()) -> ConfigRecord:
    """Who are you, and which of these tags do you have?"""
    return ConfigRecord({"ask": "identity", **({"tags": list(tags)} if tags else {})})


def model_note(key: str, version: str, keep: list[str]) -> ConfigRecord:
    """The model under `key` is `version`; keep these versions, and no other."""
    return ConfigRecord({"ask": "model", "key": key, "version": version, "keep": keep})


def version_of(arrays: ArrayRecord) -> str:
    """A hash of the model's content: equal models have equal versions, also after a restart."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name}|{array.dtype}|{array.shape}|{len(array.data)}|".encode())
        digest.update(array.data)
    return digest.hexdigest()


def is_empty(arrays: ArrayRecord) -> bool:
    """Whether a model has no numbers, as one of trees before its first: nobody evaluates it."""
    return not any(math.prod(array.shape) for array in arrays.values())


def payload_bytes(content: RecordDict) -> int:
    """The size of a message's content, without the transport's overhead."""
    arrays = sum(record.count_bytes() for record in content.array_records.values())
    rest = [*content.metric_records.values(), *content.config_records.values()]
    return arrays + sum(len(record.deflate()) for record in rest)


def write_tags(answer: ConfigRecord, question: ConfigRecord, tags: Mapping[str, Any]) -> None:
    """Put those of `tags` into the answer that the question asks for."""
    given = question.get(_ASKED)
    if not isinstance(given, list):
        return
    answer[_SAID] = True  # a client that has none of them also says so
    asked = [str(name) for name in given]
    wanted = list(tags) if EVERY_TAG in asked else [name for name in asked if name in tags]
    for name in wanted[:_MOST]:
        if _fits(name, tags[name]):
            answer[f"{_PREFIX}{name}"] = tags[name]


def read_tags(note: ConfigRecord) -> dict[str, Tag] | None:
    """The tags in a client's answer; None if its mod is too old to say any."""
    if note.get(_SAID) is not True:
        return None
    found: dict[str, Tag] = {}
    for key in sorted(key for key in note if key.startswith(_PREFIX))[:_MOST]:
        name, value = key.removeprefix(_PREFIX), note[key]
        if _fits(name, value):
            found[name] = cast(Tag, value)
    return found


def _fits(name: Any, value: Any) -> bool:
    """Whether it is a short name with a short or finite value."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        return False
    if isinstance(value, str):
        return len(value) <= _LONGEST
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value))


def own_round(server_round: int, finished: int) -> int:
    """Our number of the round that Flower's loop calls `server_round`; -1 is before the first."""
    return server_round - 1 + finished


def flower_round(round: int) -> int:
    """Flower's number of our `round`, over the whole run."""
    return round + 1


def renumber(result: Result, finished: int) -> Result:
    """The result of Flower's loop, numbered over the whole run; 0 is the initial model."""
    for name, value in vars(result).items():
        if isinstance(value, dict):
            renumbered = {
                flower_round(own_round(key, finished)) if key else key: item
                for key, item in value.items()
            }
            setattr(result, name, renumbered)
    return result


# --- the client's side ----------------------------------------------------------------------------


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
    given: object = name
    if given is not None and not isinstance(given, str):
        allowed = "must be a string, the same in every run"
        raise ConfigError("name", given, allowed, "give the name itself, not a function")
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
