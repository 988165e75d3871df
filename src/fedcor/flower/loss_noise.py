"""Noise on the losses in a client's reply, added before the reply leaves the client."""

from __future__ import annotations

import numpy as np
from flwr.app import Message, MetricRecord

from fedcor.privacy import LossNoise

__all__ = ["with_noise"]


def with_noise(reply: Message, noise: LossNoise) -> Message:
    """The reply, with noise on each metric that is called a loss."""
    if not noise.sigma or reply.has_error():
        return reply
    # Not a named stream: whoever could draw the same numbers could take them off again.
    rng = np.random.default_rng()
    for record in reply.content.metric_records.values():
        _add(record, noise, rng)
    return reply


def _add(record: MetricRecord, noise: LossNoise, rng: np.random.Generator) -> None:
    for name in [name for name in record if "loss" in name.lower()]:
        values = np.asarray(record[name], dtype=np.float64)
        noisy = noise.add(values, rng).tolist()
        record[name] = noisy
