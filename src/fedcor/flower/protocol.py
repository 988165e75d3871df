"""The protocol between the strategy and the client's mod, and the numbering of rounds.

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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

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
# samples' losses, and how long it took.
RMS_LOSS, SECONDS = "rms-loss", "train-seconds"
SAYS_KEYS = hasattr(Grid, "get_nodes")  # whether a grid knows the nodes' keys: since flwr 1.38
Tag: TypeAlias = bool | int | float | str
EVERY_TAG = "*"
_ASKED, _SAID, _PREFIX = "tags", "tags", "tag."
_MOST, _LONGEST = 32, 200  # tags of a client; characters of a name or a value


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
