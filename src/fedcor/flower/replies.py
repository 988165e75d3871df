"""Replies of clients: each is opened and checked once, and becomes a `Reply`.

Errors, wrong names and shapes, and bad numbers reach no aggregation. A reply to a train message has
an ArrayRecord with the trained model and a MetricRecord with the weight; one to an evaluate message
the MetricRecord alone. XGBoost's models are one array of bytes, in XGBoost's JSON format.

Flower's strategies need replies with equal names. Each round stands for itself:

    needed   a metric that the strategy names: if any reply has it, a reply without it is refused
    records  an ArrayRecord or MetricRecord beside the two that everyone reads, which only a
             strategy of one's own can use: if most replies have it, a reply without it is refused
    others   metrics and records that only some replies have, or that are no usable numbers in some,
             are left out of what the strategy is given; nobody is refused for them

What a reply calls the two records that everyone reads does not matter: the strategy is given them
under one name. ConfigRecords go to it as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcor.core import types
from fedcor.core.text import listed, one_line
from fedcor.flower.protocol import RMS_LOSS, SECONDS, ErrorCode
from fedcor.rounds.loss_screening import LARGEST_LOSS, screen_losses
from fedcor.rounds.model_arrays import numbers_fault, shape_fault

Record: TypeAlias = ArrayRecord | MetricRecord | ConfigRecord
Task: TypeAlias = Literal["train", "probe", "evaluate"]
SIZE = "num-examples"  # the metric that Flower's strategies weight replies by
UNREACHABLE = ("unreachable", "late")  # faults of the connection, not of the answer
_MOST_EXAMPLES = 1e9  # beyond this it is not a number of samples
_ABSURD_METRIC = 1e15  # one such number would be the mean of a metric
_ABSURD_RATIO, _ABSURD_BYTES = 64, 2**20  # trees so many times larger than others', and by so many
_LOSS_IS = "its loss is "
_GONE = {
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}


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
        counters: Arrays of whole numbers in the first model; a mean may have made floats of them.
    """

    weight_key: str
    loss_keys: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    arrays_key: str = "arrays"
    several: bool = False
    counters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reply:
    """A usable reply.

    Attributes:
        message: As it came, for a strategy that reads its metadata.
        names: What the client calls its model and its metrics; its metrics alone, if it sends no
            model.
        metrics: The MetricRecord with the weight.
        arrays: The trained model, in the types of the server's.
        others: Further records.
        weight: Its weight in the mean, as it is used.
        loss: NaN where there is no usable one.
        loss_fault: Why there is none; empty where there is one.
        rms_loss: The root mean square loss of its samples, else its loss.
        seconds: How long it trained; NaN where it does not say it.
        parts: Its usable metrics, and its further records.
    """

    message: Message
    names: tuple[str, ...]
    metrics: MetricRecord
    arrays: ArrayRecord | None = None
    others: Mapping[str, Record] = field(default_factory=dict)
    weight: float = np.nan
    loss: float = np.nan
    loss_fault: str = ""
    rms_loss: float = np.nan
    seconds: float = np.nan
    parts: frozenset[_Part] = frozenset()

    @property
    def content(self) -> RecordDict:
        """Its records: the model and the metrics first."""
        return RecordDict({**dict(zip(self.names, self.main, strict=True)), **self.others})

    @property
    def main(self) -> list[Record]:
        """The model, if it brings one, and the metrics."""
        return [self.metrics] if self.arrays is None else [self.arrays, self.metrics]

    def named(self) -> dict[str, types.Array]:
        """The arrays of its model, by name."""
        return {name: array.numpy() for name, array in (self.arrays or {}).items()}

    @property
    def says_unusable_loss(self) -> bool:
        """Whether there is a loss among its metrics, and it cannot be used."""
        return self.loss_fault.startswith(_LOSS_IS)

    def weighing(self, weight: float, key: str) -> Reply:
        """The same reply with another weight, also in its metric `key`."""
        whole = isinstance(self.metrics[key], int)
        used = max(1, int(weight)) if whole else weight
        return replace(self, metrics=MetricRecord({**self.metrics, key: used}), weight=float(used))


class _Part(NamedTuple):
    """A metric or a record of a reply."""

    kind: str  # "metric", or the type of the record
    name: str
    length: int = -1  # of a list of numbers; -1 for a single number and for a record

    def __str__(self) -> str:
        return f"{self.kind} {one_line(self.name)}"


def reply_fault(message: Message) -> tuple[str, str] | None:
    """(kind, what happened) of a reply that carries an error or nothing; None if it has content."""
    if message.has_error():
        kind = "unreachable" if message.error.code in _GONE else "error"
        return kind, str(message.error.reason or "no reason given")
    return None if message.has_content() else ("malformed", "an empty reply")


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


def read_answer(message: Message, loss_keys: tuple[str, ...]) -> Reply:
    """The reply to a question for a loss, or Unusable where it has no usable one."""
    records = message.content.metric_records
    if len(records) != 1:
        raise Unusable("unusable", f"{len(records)} MetricRecords, not 1")
    ((name, metrics),) = records.items()
    loss, fault = _read_loss(metrics, loss_keys)
    if fault:
        raise Unusable("unusable", fault)
    return Reply(message, (name,), metrics, loss=loss)


def read_evaluation(message: Message, terms: Terms) -> Reply:
    """The reply to an evaluate message of the strategy, or Unusable.

    Metrics that are no usable numbers stay in it: whoever averages metrics leaves them out. Where
    nobody could use several records, ArrayRecords are taken out.
    """
    content = message.content
    name, metrics = _weighted_record(content, terms)
    others = {
        key: one
        for key, one in content.items()
        if key != name and (terms.several or not isinstance(one, ArrayRecord))
    }
    _check_others(others)
    return _reply(message, terms, names=(name,), metrics=metrics, others=others)


def read_model(message: Message, model: Mapping[str, types.Array], terms: Terms) -> Reply:
    """A trained model with its metrics, or Unusable; names, shapes and types are `model`'s."""
    record, parts = _split(message.content, model, terms)
    arrays = ArrayRecord(
        {
            name: _clean_array(name, record[name], like, counts=name in terms.counters)
            for name, like in model.items()
        }
    )
    return _reply(message, terms, arrays=arrays, **parts)


def read_trees(
    message: Message, names: Collection[str], terms: Terms, usual: float = np.inf
) -> Reply:
    """A reply's trees with their metrics, or Unusable. Others' replies have `usual` bytes."""
    record, parts = _split(message.content, names, terms)
    for array_name, array in record.items():
        size = len(array.data)
        if size > _ABSURD_RATIO * usual and size - usual > _ABSURD_BYTES:
            why = f"{array_name} has {size} bytes, the others' {usual:.0f}"
            raise Unusable("unusable", why, doubts_model=True)
        wrong = trees_fault(array)
        if wrong:
            raise Unusable("malformed", f"{array_name} {wrong}")
    return _reply(message, terms, arrays=record, **parts)


def _reply(
    message: Message,
    terms: Terms,
    *,
    names: tuple[str, ...],
    metrics: MetricRecord,
    others: Mapping[str, Record],
    arrays: ArrayRecord | None = None,
) -> Reply:
    loss, fault = _read_loss(metrics, terms.loss_keys)
    rms = number(metrics, RMS_LOSS, *terms.loss_keys)
    return Reply(
        message,
        names,
        metrics,
        arrays,
        others,
        weight=number(metrics, terms.weight_key),
        loss=loss,
        loss_fault=fault,
        rms_loss=float(screen_losses(np.array([rms]))[0][0]),
        seconds=number(metrics, SECONDS),
        parts=_parts(metrics, others, terms.loss_keys, trained=arrays is not None),
    )


def _read_loss(metrics: MetricRecord, keys: Sequence[str]) -> tuple[float, str]:
    """The loss, NaN if there is no usable one, and why not."""
    loss = float(screen_losses(np.array([number(metrics, *keys)]))[0][0])
    if np.isfinite(loss):
        return loss, ""
    present = [key for key in keys if key in metrics]
    if present:
        return np.nan, f"{_LOSS_IS}{str(metrics[present[0]])[:80]}"
    return np.nan, f"no loss among its metrics ({', '.join(sorted(metrics)) or 'none'})"


def _split(
    content: RecordDict, names: Collection[str], terms: Terms
) -> tuple[ArrayRecord, dict[str, Any]]:
    """A reply's model, and the other parts of it as `_reply` takes them; or Unusable.

    The arrays of the model have the right `names`, and are not checked otherwise.
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
    others = {name: one for name, one in content.items() if name not in (key, chosen)}
    _check_others(others)
    return records[chosen], {"names": (chosen, key), "metrics": metrics, "others": others}


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
    if not 0 < weight <= _MOST_EXAMPLES:
        raise Unusable("unusable", f"{terms.weight_key} = {weight}")
    for name in sorted(terms.required):
        value = metrics.get(name)
        if not isinstance(value, int | float):
            raise Unusable("malformed", f"no number {name!r} in its metrics")
        if not usable_metric(name, value, terms.loss_keys):
            raise Unusable("unusable", f"the metric {name} is {value}")
    return key, metrics


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


def _clean_array(name: str, array: Array, like: types.Array, *, counts: bool) -> Array:
    """The array in the type of the model's: another one would become that of the whole model."""
    values, floats = _read(name, array), like.dtype.kind == "f"
    if counts and floats and values.dtype.kind in "iub":
        values = values.astype(np.float64)
    wrong = shape_fault(values, like)
    if wrong:
        raise Unusable("malformed", f"{name} {wrong}")
    wrong = numbers_fault(values, like)
    if wrong:
        kind = "unusable" if floats else "malformed"
        raise Unusable(kind, f"{name} {wrong}", doubts_model=floats)
    if values.dtype == like.dtype and not (counts and floats):
        return array
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


def usual_bytes(messages: Mapping[int, Message]) -> dict[int, float]:
    """Client -> the median size of the other clients' replies; infinite for one that is alone."""
    records = {client: one.content.array_records.values() for client, one in messages.items()}
    sizes = {client: sum(one.count_bytes() for one in of) for client, of in records.items()}
    others = {client: [sizes[other] for other in sizes if other != client] for client in sizes}
    return {client: float(np.median(of)) if of else np.inf for client, of in others.items()}


def trees_fault(array: Array) -> str:
    """What is wrong with bytes that should be trees; empty where nothing is."""
    try:
        values = _read("", array)
    except Unusable:
        return "cannot be read"
    if values.dtype != np.uint8 or values.ndim != 1:
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
    except Exception:  # bytes from outside may fail to be read in any way
        return False


def refused_replies(replies: Mapping[int, Reply], needed: Collection[str] = ()) -> dict[int, str]:
    """Client -> why its reply cannot go with the others.

    Args:
        replies: The usable replies of a round, by client.
        needed: Metrics that the strategy names.
    """
    counts = Counter(part for reply in replies.values() for part in reply.parts)
    required = {
        part for part in counts if part.kind != "metric" and 2 * counts[part] > len(replies)
    }
    metrics = [part for part in counts if part.kind == "metric" and part.name in needed]
    by_name: dict[str, _Part] = {}
    # Of several lengths the commonest one is right, else a single number.
    for part in sorted(metrics, key=lambda part: (-counts[part], part)):
        by_name.setdefault(part.name, part)
    required |= {*by_name.values()}
    return {
        client: f"its reply lacks the {listed(sorted(map(str, required - reply.parts)))}"
        for client, reply in replies.items()
        if required - reply.parts
    }


def common_contents(replies: Sequence[Reply]) -> list[RecordDict]:
    """The replies with those metrics that are usable in all of them, and records of equal names."""
    if not replies:
        return []
    shared = frozenset.intersection(*(reply.parts for reply in replies))
    metrics = {part.name for part in shared if part.kind == "metric"}
    # As most call them; where as many call them otherwise, nobody is the worse for it.
    counts = Counter(reply.names for reply in replies)
    usual = sorted((-count, names) for names, count in counts.items())[0][1]

    def common(reply: Reply) -> RecordDict:
        records: dict[str, Record] = {}
        for name, record in zip(usual, reply.main, strict=True):
            if isinstance(record, MetricRecord):
                record = MetricRecord({n: record[n] for n in record if n in metrics})
            records[name] = record
        for name, record in reply.others.items():
            compared = _is_compared(record, trained=reply.arrays is not None)
            if name not in records and (not compared or _record_part(name, record) in shared):
                records[name] = record
        return RecordDict(records)

    return [common(reply) for reply in replies]


def left_out(
    replies: Mapping[int, Reply], loss_keys: tuple[str, ...]
) -> dict[str, tuple[str, list[int]]]:
    """What `common_contents` leaves out -> how it is there, and in whose replies."""
    every = [reply.parts for reply in replies.values()]
    shared = frozenset.intersection(*every) if every else frozenset()
    usable: dict[str, list[int]] = {}  # metric or record -> the clients whose reply has it
    unusable: dict[str, list[int]] = {}  # metric -> those with a value that cannot be averaged
    for client, reply in replies.items():
        for part in reply.parts:
            usable.setdefault(str(part), []).append(client)
        for name, value in reply.metrics.items():
            if not usable_metric(name, value, loss_keys):
                unusable.setdefault(str(_Part("metric", name)), []).append(client)
    return {
        part: ("unusable" if part in unusable else "only", unusable.get(part) or usable[part])
        for part in sorted({*usable, *unusable} - {*map(str, shared)})
    }


def _is_compared(record: Record, *, trained: bool) -> bool:
    """Whether a strategy may fail where only some replies have such a record.

    Flower's strategies do not look at ConfigRecords, nor at the ArrayRecords of evaluations.
    """
    return isinstance(record, MetricRecord) or (trained and isinstance(record, ArrayRecord))


def _record_part(name: str, record: Record) -> _Part:
    return _Part(type(record).__name__, name)


def _parts(
    metrics: MetricRecord,
    others: Mapping[str, Record],
    loss_keys: tuple[str, ...],
    *,
    trained: bool,
) -> frozenset[_Part]:
    """The usable metrics of a reply, and its records beside those that everyone reads."""
    usable = [
        _Part("metric", name, len(value) if isinstance(value, list) else -1)
        for name, value in metrics.items()
        if usable_metric(name, value, loss_keys)
    ]
    records = [
        _record_part(name, record)
        for name, record in others.items()
        if _is_compared(record, trained=trained)
    ]
    return frozenset([*usable, *records])
