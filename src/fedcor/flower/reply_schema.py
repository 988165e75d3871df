"""Replies that a strategy can take together: it needs records and metrics with equal names.

What a reply calls the two records that everyone reads (`screen.py`) says nothing: the strategy is
given them under one name. Other ConfigRecords go to it as they are. Other ArrayRecords and
MetricRecords, which only a strategy of one's own can use, go to it if most replies have them: who
lacks one is refused, and one that few have is left out.

A metric that only some replies have gets nobody refused: it is left out of
what the strategy is given. So is one that is no usable number in some replies: the trained models
that come with it are good. Three kinds of metrics are not left out as soon as somebody lacks them;
whoever lacks one is refused:

    needed  the strategy fails without it: if any reply has it, or all earlier ones had it
    usual   every reply of this run so far has had it: if most replies have it
    wanted  the record takes it: likewise
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedcor.core.text import one_line
from fedcor.flower.logs import listed, log_once
from fedcor.flower.reply_validation import Record, main_metrics, usable_metric

# A metric's name, and its length: -1 for a single number.
_Metric: TypeAlias = tuple[str, int]
_Part = TypeVar("_Part", _Metric, str)


@dataclass(frozen=True)
class Signature:
    """How the replies of a run are built.

    Attributes:
        metrics: Name and length of each metric that every reply so far has had.
        records: Type and name of each ArrayRecord and MetricRecord that every reply so far has had
            beside the two that everyone reads.
    """

    metrics: frozenset[_Metric]
    records: frozenset[str] = frozenset()

    def to_text(self) -> str:
        """As a text, which a checkpoint takes."""
        return json.dumps([sorted(self.metrics), sorted(self.records)])

    @classmethod
    def from_text(cls, text: str) -> Signature | None:
        """Of what `to_text` returned; None for an empty text."""
        if not text:
            return None
        metrics, records = json.loads(text)
        return cls(
            frozenset((str(name), int(length)) for name, length in metrics),
            frozenset(map(str, records)),
        )


@dataclass(frozen=True)
class Comparison:
    """How the replies of a round differ.

    Attributes:
        refused: Client -> why its reply cannot go with the others.
        left_out: Metric that only some of the other replies have -> the clients that have it.
        left_records: Record, by type and name, likewise.
        unusable: Metric that is no usable number in some of them -> (client, what it is), ...
        usual: How the replies of the run are built, this round included.
    """

    refused: Mapping[int, str] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[int]] = field(default_factory=dict)
    left_records: Mapping[str, Sequence[int]] = field(default_factory=dict)
    unusable: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    usual: Signature | None = None


def compare_replies(
    replies: Mapping[int, RecordDict],
    usual: Signature | None,
    *,
    needed: Collection[str] = (),
    wanted: Collection[str] = (),
    loss_keys: tuple[str, ...] = (),
    trained: bool = True,
) -> Comparison:
    """Which of the usable `replies` of a round go together.

    All may be refused for a metric that is needed. Those that are refused for another one are
    always fewer than half of the rest, and a reply that has all usual and all wanted metrics is
    not among them.

    Args:
        replies: Client -> its reply.
        usual: How the replies of earlier rounds were built; None in the first.
        needed: Metrics without which the strategy fails.
        wanted: Metrics that somebody reads, who can do without.
        loss_keys: Metrics that may hold a loss.
        trained: Whether they bring trained models.
    """
    before = Signature(frozenset()) if usual is None else usual
    records = {client: _records(replies[client], trained) for client in sorted(replies)}
    refused = _without_records(records, before.records)
    metrics = {
        client: _metrics(replies[client], loss_keys) for client in records if client not in refused
    }
    refused |= _without_needed(metrics, before.metrics, needed)
    rest = {client: one for client, one in metrics.items() if client not in refused}
    # What is left out because it is unusable in one reply gets nobody refused.
    unusable = _unusable({client: replies[client] for client in rest}, loss_keys)
    usable = frozenset(one for one in before.metrics if one[0] not in unusable)
    refused |= _lacking(rest, usable, {*wanted} - unusable.keys())
    kept = {client: one for client, one in rest.items() if client not in refused}
    if not kept:
        return Comparison(refused, usual=usual)
    shared = frozenset.intersection(*kept.values())
    left_out: dict[str, list[int]] = {}
    for client, one in kept.items():
        for name, _ in sorted(one - shared):
            if name not in unusable:
                left_out.setdefault(name, []).append(client)
    shared_records = frozenset.intersection(*(records[client] for client in kept))
    left_records: dict[str, list[int]] = {}
    for client in kept:
        for record in sorted(records[client] - shared_records):
            left_records.setdefault(record, []).append(client)
    lasting = Signature(shared, shared_records)
    if usual is not None:
        lasting = Signature(shared & usual.metrics, shared_records & usual.records)
    return Comparison(refused, left_out, left_records, unusable, lasting)


def with_common_metrics(
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
    shared = frozenset.intersection(*(_metrics(content, loss_keys) for content in replies))
    metrics = {name for name, _ in shared}
    records = frozenset.intersection(*(_records(content, trained) for content in replies))
    # As most call them; where as many call them otherwise, nobody is the worse for it.
    counts = Counter(tuple(_main_names(content, trained)) for content in replies)
    usual = sorted((-count, names) for names, count in counts.items())[0][1]

    def common(content: RecordDict) -> RecordDict:
        names = _main_names(content, trained)
        records_of_reply: dict[str, Record] = {}
        for name, given in zip(usual, names, strict=True):
            one = content[given]
            if isinstance(one, MetricRecord):
                one = MetricRecord({n: one[n] for n in one if n in metrics})
            records_of_reply[name] = one
        for name, one in content.items():
            fits = not _is_compared(one, trained) or _shown(name, one) in records
            if name not in names and name not in records_of_reply and fits:
                records_of_reply[name] = one
        return RecordDict(records_of_reply)

    return [common(content) for content in replies]


def log_left_out(
    found: Comparison, said: frozenset[str], what: str, round: int, names: Sequence[str]
) -> frozenset[str]:
    """Log which metrics and records are left out, each once in a run.

    Args:
        found: What was found in this round.
        said: Keys of what was logged before.
        what: Which replies: `train` or `evaluate`.
        round: Flower's number of the round.
        names: Client -> its name.

    Returns:
        What has been logged by now.
    """
    left_out = "it is left out of what the strategy aggregates (this is said once per run)"
    differing = {f"metric {name}": clients for name, clients in found.left_out.items()}
    logged = set(said)

    def log(part: str, problem: str, clients: Sequence[int]) -> None:
        whose = listed([f"{client} ({names[client]})" for client in clients])
        message = f"round {round}: the {one_line(part)} {problem} of clients {whose}): {left_out}"
        log_once(logged, f"{what} {part}", message)

    for part, clients in {**differing, **found.left_records}.items():
        log(part, f"is not in all {what} replies (only in those", clients)
    for name, given in found.unusable.items():
        problem = f"is no usable number ({given[0][1]} in the {what} replies"
        log(f"metric {name}", problem, [client for client, _ in given])
    return frozenset(logged)


def _main_names(content: RecordDict, trained: bool) -> list[str]:
    """What a reply calls the records that everyone reads."""
    model = [next(iter(content.array_records))] if trained else []
    return [*model, next(iter(content.metric_records))]


def _is_compared(record: Record, trained: bool) -> bool:
    """Whether a strategy may fail where only some replies have such a record.

    Flower's strategies do not look at ConfigRecords, nor at the ArrayRecords of evaluations.
    """
    return isinstance(record, MetricRecord) or (trained and isinstance(record, ArrayRecord))


def _shown(name: str, record: Record) -> str:
    return f"{type(record).__name__} {name}"


def _records(content: RecordDict, trained: bool) -> frozenset[str]:
    """Type and name of the records beside those that everyone reads, as far as they matter."""
    main = _main_names(content, trained)
    return frozenset(
        _shown(name, one)
        for name, one in content.items()
        if name not in main and _is_compared(one, trained)
    )


def _metrics(content: RecordDict, loss_keys: tuple[str, ...]) -> frozenset[_Metric]:
    """Those that are usable numbers."""
    return frozenset(
        (name, len(value) if isinstance(value, list) else -1)
        for name, value in main_metrics(content).items()
        if usable_metric(name, value, loss_keys)
    )


def _unusable(
    replies: Mapping[int, RecordDict], loss_keys: tuple[str, ...]
) -> dict[str, list[tuple[int, str]]]:
    """Metric -> (client, what it is) of those whose it is no usable number."""
    found: dict[str, list[tuple[int, str]]] = {}
    for client, content in sorted(replies.items()):
        for name, value in main_metrics(content).items():
            if not usable_metric(name, value, loss_keys):
                found.setdefault(name, []).append((client, one_line(value, 40)))
    return found


def _without_needed(
    metrics: Mapping[int, frozenset[_Metric]], usual: frozenset[_Metric], needed: Collection[str]
) -> dict[int, str]:
    """Client -> which metrics it lacks that are needed, and that a reply has or all had so far."""
    counts = Counter(one for has in metrics.values() for one in has if one[0] in needed)
    required: dict[str, _Metric] = {}
    # Of several lengths the usual one is right, else the commonest, else a single number.
    known = {*counts, *(one for one in usual if one[0] in needed)}
    for one in sorted(known, key=lambda one: (one not in usual, -counts[one], one)):
        required.setdefault(one[0], one)
    return {
        client: _difference(list(required.values()), has)
        for client, has in metrics.items()
        if not has.issuperset(required.values())
    }


def _without_records(
    records: Mapping[int, frozenset[str]], usual: frozenset[str]
) -> dict[int, str]:
    """Client -> which records it lacks that most replies have; half of them, if it is usual."""
    whole, required = _most(records, frozenset().union(*records.values()), usual)
    return {
        client: f"its reply lacks the {', the '.join(sorted({*required} - has))}"
        for client, has in records.items()
        if client not in whole
    }


def _lacking(
    metrics: Mapping[int, frozenset[_Metric]], usual: frozenset[_Metric], wanted: Collection[str]
) -> dict[int, str]:
    """Client -> which metrics it lacks that are usual or wanted, and that most replies have."""
    present = frozenset().union(*metrics.values())
    whole, required = _most(metrics, [one for one in present if one in usual or one[0] in wanted])
    return {
        client: _difference(required, has) for client, has in metrics.items() if client not in whole
    }


def _most(
    parts: Mapping[int, frozenset[_Part]], asked: Collection[_Part], half: Collection[_Part] = ()
) -> tuple[set[int], list[_Part]]:
    """Who has all those of `asked` that most replies have, and which these are.

    Where each lacks another one, the rarest ones are left out: most replies are always kept. Of
    those in `half`, it is enough that half of the replies have them.
    """
    counts = Counter(one for has in parts.values() for one in has)
    whole, required = set(parts), []
    for one in sorted(asked, key=lambda one: (-counts[one], one)):
        having = {client for client in whole if one in parts[client]}
        if 2 * len(having) + (one in half) > len(parts):
            whole = having
            required.append(one)
    return whole, required


def _difference(required: Sequence[_Metric], has: frozenset[_Metric]) -> str:
    lengths = dict(has)
    lacks = sorted(name for name, _ in required if name not in lengths)
    if lacks:
        plural = "s" if len(lacks) > 1 else ""
        return f"its reply lacks the metric{plural} {', '.join(lacks)} that the others have"
    name, length = next(one for one in required if one not in has)
    return f"its metric {name} is {_size(lengths[name])}, the others' is {_size(length)}"


def _size(length: int) -> str:
    return "a single number" if length < 0 else f"a list of {length}"
