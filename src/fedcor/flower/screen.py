"""A reply is looked at before it counts: errors, wrong keys and shapes, and bad numbers never reach an aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

__all__ = ["UNREACHABLE", "fault", "metrics_of", "model_fault", "number", "odd_ones_out"]

UNREACHABLE = ("unreachable", "late")  # faults of the way, not of the answer
# A float parameter or a sample count beyond these is no result of training; it would own the mean.
ABSURD_WEIGHT, ABSURD_EXAMPLES = 1e10, 1e9
_GONE = {
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}


def fault(reply: Message) -> tuple[str, str] | None:
    """(kind, what happened) of a reply that carries an error or nothing; None for one that has content."""
    if reply.has_error():
        return ("unreachable" if reply.error.code in _GONE else "error"), str(reply.error.reason or "no reason given")
    return None if reply.has_content() else ("malformed", "an empty reply")


def metrics_of(content: RecordDict) -> MetricRecord | None:
    """Its only MetricRecord."""
    records = list(content.metric_records.values())
    return records[0] if len(records) == 1 else None


def number(metrics: MetricRecord, *keys: str) -> float:
    """The first of `keys` that is there, as a number; else NaN."""
    for key in keys:
        value = metrics.get(key)
        if isinstance(value, int | float):
            return float(value)
    return float("nan")


def model_fault(content: RecordDict, model: ArrayRecord, weight_key: str) -> tuple[str, str] | None:
    """What is wrong with a trained model's reply: it must look like `model`, with a sane weight and finite numbers."""
    records, metrics = list(content.array_records.values()), metrics_of(content)
    if len(records) != 1 or metrics is None:
        return "malformed", "not exactly one ArrayRecord and one MetricRecord"
    if list(records[0]) != list(model):
        return "malformed", "other array names than the model's"
    weight = metrics.get(weight_key)
    if not isinstance(weight, int | float):
        return "malformed", f"no number {weight_key!r} in its metrics"
    if not 0 < weight <= ABSURD_EXAMPLES:
        return "unusable", f"{weight_key} = {weight}"
    for name, array in records[0].items():
        try:
            values = array.numpy()
        except Exception as error:  # the bytes of a stranger: any failure to read them is one thing to us
            return "malformed", f"{name} cannot be read: {type(error).__name__}"
        if list(values.shape) != list(model[name].shape) or values.dtype.kind not in "fiub":
            return "malformed", f"{name} is {values.dtype}{list(values.shape)}, not {list(model[name].shape)}"
        if values.dtype.kind == "f" and values.size and not float(np.abs(values).max()) <= ABSURD_WEIGHT:
            return "unusable", f"{name} has numbers that are not finite or absurdly large"
    return metrics_fault(metrics)


def metrics_fault(metrics: MetricRecord) -> tuple[str, str] | None:
    for key, value in metrics.items():
        if not np.isfinite(np.asarray(value, dtype=np.float64)).all():
            return "unusable", f"the metric {key} is {value}"
    return None


def odd_ones_out(replies: Mapping[int, Message]) -> list[int]:
    """Clients whose metrics have other keys than most replies': a strategy takes only equal ones."""
    if not replies:
        return []
    keys = {client: frozenset(metrics_of(reply.content) or ()) for client, reply in sorted(replies.items())}
    usual = Counter(keys.values()).most_common(1)[0][0]
    return [client for client, found in keys.items() if found != usual]
