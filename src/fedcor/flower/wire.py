"""What the strategy and the client's mod say to each other: one small record beside Flower's own.

    ask = "identity"    who are you?                    -> name, partition, examples, those of its
                        tags that the question names; protocol and versions, which older clients
                        do not say
    ask = "model"       a train or evaluate message as the app knows it; the model may be left out
                        if the client already holds it  -> the app's own reply, or missing = True

A client without the mod is sent plain train and evaluate messages only, with the model in each.
The question who it is goes out as a train message, since every ClientApp has a train function: one
that the app has no function for would not reach the mod.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

__all__ = [
    "LOG",
    "MISSING",
    "NOTE",
    "PROTOCOL",
    "RMS_LOSS",
    "SECONDS",
    "identity_note",
    "model_note",
    "payload_bytes",
    "version_of",
]

# Below Flower's own logger, so its level and its handlers apply.
LOG = logging.getLogger("flwr.fedcor")
NOTE = "fedcor"  # the record's key in a message's content
MISSING = "missing"
# Of these notes. Another first number: the two sides do not understand each other. Another second
# number: one side says more than the other reads. A client that names none has 1.0.
PROTOCOL = "1.1"
# What a client may say in the metrics of its reply, beside its loss: the root mean square of its
# samples' losses, and how long it took.
RMS_LOSS, SECONDS = "rms-loss", "train-seconds"


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
