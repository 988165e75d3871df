"""Check every reply: errors, wrong keys and shapes, and bad numbers reach no aggregation.

A usable reply begins with the records that are checked and read here: of a trained model the
ArrayRecord with its arrays, and the MetricRecord with the weight. What else the client sent follows
them, for a strategy that knows what it is.

XGBoost's models are one array of bytes that grows with every round. They have no shape to compare
and cannot be subtracted: a reply is checked to be a model in XGBoost's JSON format, as Flower's
FedXgbBagging reads it.

A client may say how far it trained, by local steps and learning rate. What one reply says must not
change what the others mean: an impossible number is replaced by the median of the round.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcor.core import types
from fedcor.core.text import one_line
from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.flower.protocol import LOG, ErrorCode
from fedcor.rounds.loss_screening import LARGEST_LOSS, screen_losses

Record: TypeAlias = ArrayRecord | MetricRecord | ConfigRecord
UNREACHABLE = ("unreachable", "late")  # faults of the connection, not of the answer
# A parameter or a sample count beyond these is no result of training; it would dominate the mean.
ABSURD_WEIGHT, ABSURD_EXAMPLES = 1e10, 1e9
_ABSURD_METRIC = 1e15  # one such number would be the mean of a metric
# A reply that is so many times larger than the others', and larger by so many bytes, is no tree.
_ABSURD_RATIO, _ABSURD_BYTES = 64, 2**20
_GONE = {
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}
# How far a client trained: metrics of its reply, if it sends them.
STEPS, RATE = "local-steps", "learning-rate"
_MOST_STEPS = 1e9  # beyond this it is not a number of steps
_MOST_MEDIANS = 10  # a client's steps are at most so many times the round's median


class Unusable(Exception):
    """A reply that is refused: of what kind, and why.

    Attributes:
        doubts_model: Whether the model that the client was sent may be the reason.
    """

    def __init__(self, kind: str, why: str, *, doubts_model: bool = False) -> None:
        self.kind, self.why, self.doubts_model = kind, why, doubts_model
        super().__init__(f"{kind}: {why}")


@dataclass(frozen=True)
class Terms:
    """What a reply must be like, beside its arrays.

    Attributes:
        weight_key: The metric by which replies are weighted. Every reply must have it.
        loss_keys: Metrics that may hold a loss, of which less is believed than of others.
        required: Metrics that somebody reads one by one. A reply in which one is missing or no
            usable number is refused; any other metric is only left out.
        arrays_key: What the record with the model's arrays is called, if there are several.
        several: Whether there may be more ArrayRecords and MetricRecords than one. Flower's own
            aggregation cannot use them.
    """

    weight_key: str
    loss_keys: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    arrays_key: str = "arrays"
    several: bool = False


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


def main_metrics(content: RecordDict) -> MetricRecord:
    """Of a usable reply, the MetricRecord with the weight; an empty one where there is none."""
    return next(iter(content.metric_records.values()), MetricRecord())


def main_arrays(content: RecordDict) -> ArrayRecord:
    """Of a usable reply to a train message, the trained model."""
    return next(iter(content.array_records.values()))


def number(metrics: MetricRecord, *keys: str) -> float:
    """The first of `keys` that is there, as a number; else NaN."""
    for key in keys:
        value = metrics.get(key)
        if isinstance(value, int | float):
            return float(value)
    return float("nan")


def usable_metric(name: str, value: object, loss_keys: tuple[str, ...]) -> bool:
    """Whether all numbers of a metric are finite, and of a size that can be averaged."""
    largest = float(np.max(np.abs(np.asarray(value, dtype=np.float64)), initial=0.0))
    return largest <= (LARGEST_LOSS if name in loss_keys else _ABSURD_METRIC)


def loss_fault(metrics: MetricRecord, keys: Sequence[str]) -> str:
    """Why the metrics of a reply have no usable loss; empty where they have one."""
    loss = number(metrics, *keys)
    if np.isfinite(screen_losses(np.array([loss]))[0][0]):
        return ""
    present = [key for key in keys if key in metrics]
    if present:
        return f"its loss is {shown_loss(metrics, present)}"
    return f"no loss among its metrics ({', '.join(sorted(metrics)) or 'none'})"


def unusable_loss(metrics: MetricRecord, keys: Sequence[str]) -> bool:
    """Whether there is a loss among the metrics of a reply, and it cannot be used."""
    return any(key in metrics for key in keys) and bool(loss_fault(metrics, keys))


def shown_loss(metrics: MetricRecord, keys: Sequence[str]) -> str:
    """The loss that a reply reports, as text of at most 80 characters."""
    return str(next(metrics[key] for key in keys if key in metrics))[:80]


def clean_evaluation(content: RecordDict, terms: Terms) -> RecordDict:
    """The reply, its MetricRecord with the weight first, or Unusable.

    Metrics that are no usable numbers stay in it: whoever averages metrics leaves them out. Where
    nobody could use several records, ArrayRecords are taken out.
    """
    key, metrics = _weighted_record(content, terms)
    others = _others(content, {key})
    if not terms.several:
        others = {name: one for name, one in others.items() if not isinstance(one, ArrayRecord)}
    _check_others(others)
    return RecordDict({key: metrics, **others})


def clean_model(content: RecordDict, model: Mapping[str, types.Array], terms: Terms) -> RecordDict:
    """A trained model with its metrics, or Unusable; names, shapes and types are `model`'s."""
    key, record, others = split_model(content, model, terms)
    arrays = ArrayRecord(
        {name: _clean_array(name, record[name], like) for name, like in model.items()}
    )
    return RecordDict({key: arrays, **others})


def split_model(
    content: RecordDict, names: Collection[str], terms: Terms
) -> tuple[str, ArrayRecord, dict[str, Record]]:
    """A trained model, what its record is called, and the other records; or Unusable.

    The arrays of the model have the right names, and are not checked otherwise. Of the other
    records, the one with the weight is the first.

    Args:
        content: Of the reply.
        names: Of the model's arrays.
        terms: What the reply must be like.
    """
    key, metrics = _weighted_record(content, terms)
    records = content.array_records
    if not records or (len(records) > 1 and not terms.several):
        raise Unusable("malformed", "not exactly one ArrayRecord")
    fitting = [name for name, one in records.items() if set(one) == set(names)]
    if not fitting:
        raise Unusable("malformed", "other array names than the model's")
    if len(fitting) > 1 and terms.arrays_key not in fitting:
        raise Unusable("malformed", f"several models, and none is called {terms.arrays_key!r}")
    chosen = terms.arrays_key if terms.arrays_key in fitting else fitting[0]
    others = _others(content, {key, chosen})
    _check_others(others)
    return chosen, records[chosen], {key: metrics, **others}


def _weighted_record(content: RecordDict, terms: Terms) -> tuple[str, MetricRecord]:
    """The MetricRecord with the weight, and what it is called, or Unusable."""
    records = content.metric_records
    if not records or (len(records) > 1 and not terms.several):
        raise Unusable("malformed", "not exactly one MetricRecord")
    with_weight = [name for name, one in records.items() if terms.weight_key in one]
    key = (with_weight or list(records))[0]
    metrics = records[key]
    weight = metrics.get(terms.weight_key)
    if not isinstance(weight, int | float):
        raise Unusable("malformed", f"no number {terms.weight_key!r} in its metrics")
    if not 0 < weight <= ABSURD_EXAMPLES:
        raise Unusable("unusable", f"{terms.weight_key} = {weight}")
    for name in sorted(terms.required):
        value = metrics.get(name)
        if not isinstance(value, int | float):
            raise Unusable("malformed", f"no number {name!r} in its metrics")
        if not usable_metric(name, value, terms.loss_keys):
            raise Unusable("unusable", f"the metric {name} is {value}")
    return key, metrics


def _others(content: RecordDict, but: Collection[str]) -> dict[str, Record]:
    return {name: one for name, one in content.items() if name not in but}


def _check_others(records: Mapping[str, Record]) -> None:
    """Raise Unusable where arrays that are not the model's are not finite numbers, too."""
    for key, record in records.items():
        for name, array in record.items() if isinstance(record, ArrayRecord) else ():
            values = _read(f"{key}/{name}", array)
            if values.dtype.kind not in "fiubc":
                raise Unusable("malformed", f"{key}/{name} is {values.dtype}, and no numbers")
            if not np.isfinite(values).all():
                why = f"{key}/{name} has numbers that are not finite"
                raise Unusable("unusable", why, doubts_model=True)


def _clean_array(name: str, array: Array, like: types.Array) -> Array:
    values = _read(name, array)
    if values.shape != like.shape or values.dtype.kind not in "fiub":
        raise Unusable(
            "malformed",
            f"{name} is {values.dtype}{list(values.shape)}, not {like.dtype}{list(like.shape)}",
        )
    wrong = numbers_fault(values, like)
    if wrong:
        raise Unusable("unusable", f"{name} {wrong}", doubts_model=True)
    if values.dtype == like.dtype:
        return array
    # Another type of number would become the type of the whole model.
    with np.errstate(over="ignore"):
        cast = values.astype(like.dtype)
    if numbers_fault(cast, like):
        why = f"{name} has numbers that do not fit {like.dtype}"
        raise Unusable("unusable", why, doubts_model=True)
    return Array(cast)


def _read(name: str, array: Array) -> types.Array:
    try:
        values = array.numpy()
        readable = isinstance(values, np.ndarray)
    except Exception:  # bytes from outside may fail to be read in any way
        readable = False
    if not readable:
        raise Unusable("malformed", f"{name} cannot be read")
    return values


def numbers_fault(values: types.Array, like: types.Array) -> str:
    """What is wrong with a model's numbers; empty where nothing is.

    Where the model `like` itself is not finite (a mask of -inf), equal numbers are right.
    """
    bad = _out_of_bounds(values)
    if not bad.any() or np.array_equal(values[bad], like[bad], equal_nan=like.dtype.kind == "f"):
        return ""
    return "has numbers that are not finite or absurdly large"


def _out_of_bounds(values: types.Array) -> types.BoolArray:
    with np.errstate(invalid="ignore"):
        return ~(np.abs(values.astype(np.float64, copy=False)) <= ABSURD_WEIGHT)


def trusted_model(
    model: Mapping[str, types.Array], good: Mapping[str, Array] | None
) -> dict[str, types.Array]:
    """What replies are compared with: the model, but not where it may have gone bad.

    Args:
        model: As it was sent.
        good: The last one that somebody has trained usably from, if there is one. What is not
            finite in it was meant so.
    """
    trusted = dict(model)
    for name, values in model.items():
        if good is not None and name in good and _out_of_bounds(values).any():
            before = good[name].numpy()
            if before.shape == values.shape and before.dtype == values.dtype:
                trusted[name] = before
    return trusted


def usual_bytes(contents: Mapping[int, RecordDict]) -> dict[int, float]:
    """Client -> the median size of the other clients' replies; infinite for one that is alone."""
    sizes = {
        client: sum(
            len(array.data) for one in content.array_records.values() for array in one.values()
        )
        for client, content in contents.items()
    }
    others = {
        client: [size for other, size in sizes.items() if other != client] for client in sizes
    }
    return {client: float(np.median(of)) if of else np.inf for client, of in others.items()}


def clean_trees(
    content: RecordDict, model: Mapping[str, types.Array], terms: Terms, usual: float
) -> RecordDict:
    """A reply's trees with their metrics, or Unusable. Others' replies have `usual` bytes."""
    key, record, others = split_model(content, model, terms)
    for name, array in record.items():
        size = len(array.data)
        if size > _ABSURD_RATIO * usual and size - usual > _ABSURD_BYTES:
            why = f"{name} has {size} bytes, the others' {usual:.0f}"
            raise Unusable("unusable", why, doubts_model=True)
        wrong = trees_fault(array)
        if wrong:
            raise Unusable("malformed", f"{name} {wrong}")
    return RecordDict({key: record, **others})


def trees_fault(array: Array) -> str:
    """What is wrong with bytes that should be trees; empty where nothing is."""
    try:
        values = array.numpy()
    except Exception:  # bytes from outside may fail to be read in any way
        return "cannot be read"
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim != 1:
        return "is not one row of bytes (uint8)"
    if _is_bag_of_trees(values.tobytes()):
        return ""
    return 'is not a model of trees in XGBoost\'s JSON format: send booster.save_raw("json")'


def _is_bag_of_trees(text: bytes) -> bool:
    """Whether FedXgbBagging can add these trees to others, and others to these."""
    try:
        model = json.loads(text)["learner"]["gradient_booster"]["model"]
        settings, trees = model["gbtree_model_param"], model["trees"]
        count, parallel = int(settings["num_trees"]), int(settings["num_parallel_tree"])
        lists = isinstance(trees, list) and isinstance(model["tree_info"], list)
        ends = model["iteration_indptr"]
        return (
            lists
            and len(trees) == len(model["tree_info"]) == count == int(ends[-1])
            and 1 <= parallel <= count
            and all(isinstance(tree, dict) for tree in trees)
        )
    except Exception:  # as above
        return False


@dataclass(frozen=True)
class LocalTraining:
    """How far the clients of a round trained.

    Attributes:
        steps: (m,) Local steps of each; all 1 if nobody says it.
        learning_rate: Of the local steps: the median of the clients'; 1 if nobody says it.
        doubts: (row of the client, what it said and what is used) where a number is not used as it
            was said.
    """

    steps: IntArray
    learning_rate: float
    doubts: Sequence[tuple[int, str]]

    @property
    def step_sizes(self) -> FloatArray:
        """(m,) Learning rate x local steps of each."""
        return self.learning_rate * self.steps.astype(np.float64)

    def log_doubts(self, names: Sequence[str]) -> bool:
        """Log them in one warning, if there are any; returns whether there are.

        Args:
            names: (m) What the clients are called.
        """
        if self.doubts:
            sentences = "; ".join(f"{one_line(names[row])}: {what}" for row, what in self.doubts)
            LOG.warning("in the metrics of replies, %s (this is said once per run)", sentences)
        return bool(self.doubts)


def read_local_training(metrics: Sequence[MetricRecord]) -> LocalTraining:
    """What the metrics of a round's replies say, one record per client.

    A number that is missing or impossible is taken to be the median of the others'; 1 if nobody
    says a possible one. Steps are at most ten times the median.
    """
    steps = np.array([number(one, STEPS) for one in metrics])
    rates = np.array([number(one, RATE) for one in metrics])
    possible = (steps >= 1) & (steps <= _MOST_STEPS)
    usual = _median(steps[possible])
    used = np.rint(np.where(possible, np.minimum(steps, _MOST_MEDIANS * usual), usual))
    possible_rate = (rates > 0) & np.isfinite(rates)
    rate = _median(rates[possible_rate])
    doubts = [
        *_doubts(STEPS, steps, possible & (steps <= _MOST_MEDIANS * usual), used),
        *_doubts(RATE, rates, possible_rate, np.full(len(rates), rate)),
    ]
    return LocalTraining(used.astype(np.int64), rate, doubts)


def _median(values: FloatArray) -> float:
    """1 if there are none."""
    return float(np.median(values)) if len(values) else 1.0


def _doubts(
    key: str, said: FloatArray, believed: BoolArray, used: FloatArray
) -> list[tuple[int, str]]:
    """What is not used as it was said. That nobody says anything is usual."""
    if np.isnan(said).all():
        return []
    rows = np.flatnonzero(~believed).tolist()
    what = {row: "missing" if np.isnan(said[row]) else f"{said[row]:g}" for row in rows}
    return [(row, f"{key} is {what[row]}, {used[row]:g} is used") for row in rows]
