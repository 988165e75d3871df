"""Check every reply: errors, wrong keys and shapes, and bad numbers reach no aggregation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedcor import types
from fedcor.flower.private import ErrorCode
from fedcor.guard import LARGEST_LOSS

__all__ = [
    "ABSURD_EXAMPLES",
    "UNREACHABLE",
    "Unusable",
    "clean_evaluation",
    "clean_model",
    "metrics_of",
    "number",
    "numbers_fault",
    "reply_fault",
]

UNREACHABLE = ("unreachable", "late")  # faults of the connection, not of the answer
# A parameter or a sample count beyond these is no result of training; it would dominate the mean.
ABSURD_WEIGHT, ABSURD_EXAMPLES = 1e10, 1e9
_GONE = {
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}


class Unusable(Exception):
    """A reply that is refused: of what kind, and why."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind, self.why = kind, why
        super().__init__(f"{kind}: {why}")


def reply_fault(reply: Message) -> tuple[str, str] | None:
    """(kind, what happened) of a reply that carries an error or nothing; None if it has content."""
    if reply.has_error():
        kind = "unreachable" if reply.error.code in _GONE else "error"
        return kind, str(reply.error.reason or "no reason given")
    return None if reply.has_content() else ("malformed", "an empty reply")


def metrics_of(content: RecordDict) -> MetricRecord:
    """Its only MetricRecord; an empty one where it has none, or several."""
    records = list(content.metric_records.values())
    return records[0] if len(records) == 1 else MetricRecord()


def number(metrics: MetricRecord, *keys: str) -> float:
    """The first of `keys` that is there, as a number; else NaN."""
    for key in keys:
        value = metrics.get(key)
        if isinstance(value, int | float):
            return float(value)
    return float("nan")


def clean_evaluation(
    content: RecordDict, weight_key: str, loss_keys: tuple[str, ...]
) -> RecordDict:
    """The reply's only MetricRecord, and nothing else, or Unusable."""
    if len(content.metric_records) != 1:
        raise Unusable("malformed", "not exactly one MetricRecord")
    ((key, metrics),) = content.metric_records.items()
    weight = metrics.get(weight_key)
    if not isinstance(weight, int | float):
        raise Unusable("malformed", f"no number {weight_key!r} in its metrics")
    if not 0 < weight <= ABSURD_EXAMPLES:
        raise Unusable("unusable", f"{weight_key} = {weight}")
    for name, value in metrics.items():
        largest = float(np.max(np.abs(np.asarray(value, dtype=np.float64)), initial=0.0))
        if not largest <= (LARGEST_LOSS if name in loss_keys else 1e15):
            raise Unusable("unusable", f"the metric {name} is {str(value)[:80]}")
    return RecordDict({key: metrics})


def clean_model(
    content: RecordDict,
    model: Mapping[str, types.Array],
    weight_key: str,
    loss_keys: tuple[str, ...],
) -> RecordDict:
    """A trained model with its metrics, or Unusable; names, shapes and types are `model`'s."""
    metrics = clean_evaluation(content, weight_key, loss_keys)
    if len(content.array_records) != 1:
        raise Unusable("malformed", "not exactly one ArrayRecord")
    ((key, record),) = content.array_records.items()
    if set(record) != set(model):
        raise Unusable("malformed", "other array names than the model's")
    arrays = ArrayRecord(
        {name: _clean_array(name, record[name], like) for name, like in model.items()}
    )
    return RecordDict({key: arrays, **metrics})


def _clean_array(name: str, array: Array, like: types.Array) -> Array:
    try:
        values = array.numpy()
        readable = isinstance(values, np.ndarray)
    except Exception:  # bytes from outside may fail to be read in any way
        readable = False
    if not readable:
        raise Unusable("malformed", f"{name} cannot be read")
    if values.shape != like.shape or values.dtype.kind not in "fiub":
        raise Unusable(
            "malformed",
            f"{name} is {values.dtype}{list(values.shape)}, not {like.dtype}{list(like.shape)}",
        )
    wrong = numbers_fault(values, like)
    if wrong:
        raise Unusable("unusable", f"{name} {wrong}")
    if values.dtype == like.dtype:
        return array
    # Another type of number would become the type of the whole model.
    with np.errstate(over="ignore"):
        cast = values.astype(like.dtype)
    if numbers_fault(cast, like):
        raise Unusable("unusable", f"{name} has numbers that do not fit {like.dtype}")
    return Array(cast)


def numbers_fault(values: types.Array, like: types.Array) -> str:
    """What is wrong with a model's numbers; empty where nothing is.

    Where the model `like` itself is not finite (a mask of -inf), equal numbers are right.
    """
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(values.astype(np.float64, copy=False)) <= ABSURD_WEIGHT)
    if not bad.any() or np.array_equal(values[bad], like[bad], equal_nan=like.dtype.kind == "f"):
        return ""
    return "has numbers that are not finite or absurdly large"
