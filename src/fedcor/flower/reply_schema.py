"""Replies that a strategy can take together: it needs records and metrics with equal names.

Each round stands for itself:

    needed   a metric that the strategy names: if any reply has it, a reply without it is refused
    records  an ArrayRecord or MetricRecord beside the two that everyone reads, which only a
             strategy of one's own can use: if most replies have it, a reply without it is refused
    others   metrics and records that only some replies have, or that are no usable numbers in some,
             are left out of what the strategy is given; nobody is refused for them

What a reply calls the two records that everyone reads does not matter: the strategy is given them
under one name. ConfigRecords go to it as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedcor.core.text import listed, one_line
from fedcor.flower.exchange import Exchange
from fedcor.flower.protocol import flower_round
from fedcor.flower.reply_validation import Record, main_metrics, usable_metric


class _Part(NamedTuple):
    """A metric or a record of a reply."""

    kind: str  # "metric", or the type of the record
    name: str
    length: int = -1  # of a list of numbers; -1 for a single number and for a record

    def __str__(self) -> str:
        return f"{self.kind} {one_line(self.name)}"


def refused_replies(
    replies: Mapping[int, RecordDict],
    *,
    needed: Collection[str] = (),
    loss_keys: tuple[str, ...] = (),
    trained: bool = True,
) -> dict[int, str]:
    """Client -> why its reply cannot go with the others.

    Args:
        replies: The usable replies of a round, by client.
        needed: Metrics that the strategy names.
        loss_keys: Metrics that may hold a loss.
        trained: Whether they bring trained models.
    """
    parts = {client: _parts(content, loss_keys, trained) for client, content in replies.items()}
    counts = Counter(part for has in parts.values() for part in has)
    required = {part for part in counts if part.kind != "metric" and 2 * counts[part] > len(parts)}
    metrics = [part for part in counts if part.kind == "metric" and part.name in needed]
    by_name: dict[str, _Part] = {}
    # Of several lengths the commonest one is right, else a single number.
    for part in sorted(metrics, key=lambda part: (-counts[part], part)):
        by_name.setdefault(part.name, part)
    required |= {*by_name.values()}
    return {
        client: f"its reply lacks the {listed(sorted(map(str, required - has)))}"
        for client, has in parts.items()
        if required - has
    }


def with_common_parts(
    replies: Sequence[RecordDict], loss_keys: tuple[str, ...] = (), *, trained: bool = True
) -> list[RecordDict]:
    """The replies with those metrics that are usable in all of them, and records of equal names.

    Args:
        replies: Usable ones.
        loss_keys: Metrics that may hold a loss.
        trained: Whether they bring trained models.
    """
    if not replies:
        return []
    shared = frozenset.intersection(*(_parts(one, loss_keys, trained) for one in replies))
    metrics = {part.name for part in shared if part.kind == "metric"}
    # As most call them; where as many call them otherwise, nobody is the worse for it.
    counts = Counter(tuple(_main_names(content, trained)) for content in replies)
    usual = sorted((-count, names) for names, count in counts.items())[0][1]

    def common(content: RecordDict) -> RecordDict:
        names = _main_names(content, trained)
        records: dict[str, Record] = {}
        for name, given in zip(usual, names, strict=True):
            record = content[given]
            if isinstance(record, MetricRecord):
                record = MetricRecord({n: record[n] for n in record if n in metrics})
            records[name] = record
        for name, record in content.items():
            fits = not _is_compared(record, trained) or _record_part(name, record) in shared
            if name not in names and name not in records and fits:
                records[name] = record
        return RecordDict(records)

    return [common(content) for content in replies]


def log_left_out(
    exchange: Exchange,
    replies: Mapping[int, RecordDict],
    loss_keys: tuple[str, ...] = (),
    *,
    trained: bool = True,
) -> None:
    """Log what `with_common_parts` leaves out of these replies, each metric and record once."""
    parts = {client: _parts(content, loss_keys, trained) for client, content in replies.items()}
    shared = frozenset.intersection(*parts.values()) if parts else frozenset()
    usable: dict[str, list[int]] = {}  # metric or record -> the clients whose reply has it
    unusable: dict[str, list[int]] = {}  # metric -> those with a value that cannot be averaged
    for client, content in replies.items():
        for part in parts[client]:
            usable.setdefault(str(part), []).append(client)
        for name, value in main_metrics(content).items():
            if not usable_metric(name, value, loss_keys):
                unusable.setdefault(str(_Part("metric", name)), []).append(client)
    names, task = exchange.roster.names, "train" if trained else "evaluate"
    for part_name in sorted({*usable, *unusable} - {*map(str, shared)}):
        clients = unusable.get(part_name) or usable[part_name]
        who = listed([f"{client} ({one_line(names[client], 40)})" for client in clients])
        where = "unusable" if part_name in unusable else "only"
        exchange.log_once(
            f"{task} {part_name}",
            f"round {flower_round(exchange.round)}: the {part_name} is not in all {task} replies "
            f"({where} in those of clients {who}): it is left out of what the strategy aggregates "
            "(this is logged once)",
        )


def _main_names(content: RecordDict, trained: bool) -> list[str]:
    """What a reply calls the records that everyone reads."""
    model = [next(iter(content.array_records))] if trained else []
    return [*model, next(iter(content.metric_records))]


def _is_compared(record: Record, trained: bool) -> bool:
    """Whether a strategy may fail where only some replies have such a record.

    Flower's strategies do not look at ConfigRecords, nor at the ArrayRecords of evaluations.
    """
    return isinstance(record, MetricRecord) or (trained and isinstance(record, ArrayRecord))


def _record_part(name: str, record: Record) -> _Part:
    return _Part(type(record).__name__, name)


def _parts(content: RecordDict, loss_keys: tuple[str, ...], trained: bool) -> frozenset[_Part]:
    """The usable metrics of a reply, and its records beside those that everyone reads."""
    main = _main_names(content, trained)
    metrics = [
        _Part("metric", name, len(value) if isinstance(value, list) else -1)
        for name, value in main_metrics(content).items()
        if usable_metric(name, value, loss_keys)
    ]
    records = [
        _record_part(name, record)
        for name, record in content.items()
        if name not in main and _is_compared(record, trained)
    ]
    return frozenset([*metrics, *records])
