"""Noise on the losses in a client's reply, added before the reply leaves the client."""

from __future__ import annotations

import numpy as np
from flwr.app import Message, MetricRecord

from fedcor.flower.wire import RMS_LOSS
from fedcor.privacy import LossNoise

__all__ = ["with_noise"]


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
