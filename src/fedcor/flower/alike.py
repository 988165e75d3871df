"""Replies that a strategy can take together: it needs records and metrics with equal names.

A metric that only some replies have gets nobody refused: it is left out of what the strategy is
given. Two kinds of metrics are not left out as soon as somebody lacks them, if most replies have
them; whoever lacks one is refused:

    usual   every reply of this run so far has had it
    needed  somebody reads it: the strategy's weight, say
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from flwr.app import MetricRecord, RecordDict

from fedcor.flower.screen import metrics_of
from fedcor.flower.wire import LOG

__all__ = ["Comparison", "Signature", "compare_replies", "log_left_out", "with_common_metrics"]

# A metric's name, and its length: -1 for a single number.
_Metric: TypeAlias = tuple[str, int]
# The kind and the name of each record.
_Records: TypeAlias = frozenset[tuple[str, str]]
_MOST_NAMES = 5  # clients in a line of the log


@dataclass(frozen=True)
class Signature:
    """How the replies of a run are built.

    Attributes:
        records: Kind and name of each record of most replies.
        metrics: Name and length of each metric that every reply so far has had.
    """

    records: _Records
    metrics: frozenset[_Metric]

    def to_text(self) -> str:
        """As a text, which a checkpoint takes."""
        return json.dumps([sorted(self.records), sorted(self.metrics)])

    @classmethod
    def from_text(cls, text: str) -> Signature | None:
        """Of what `to_text` returned; None for an empty text."""
        if not text:
            return None
        records, metrics = json.loads(text)
        return cls(
            frozenset((str(kind), str(name)) for kind, name in records),
            frozenset((str(name), int(length)) for name, length in metrics),
        )


@dataclass(frozen=True)
class Comparison:
    """How the replies of a round differ.

    Attributes:
        refused: Client -> why its reply cannot go with the others.
        left_out: Metric that only some of the other replies have -> the clients that have it.
        usual: How the replies of the run are built, this round included.
    """

    refused: Mapping[int, str] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[int]] = field(default_factory=dict)
    usual: Signature | None = None


def compare_replies(
    replies: Mapping[int, RecordDict],
    usual: Signature | None,
    *,
    names: Collection[str] = (),
    needed: Collection[str] = (),
) -> Comparison:
    """Which of the usable `replies` of a round go together.

    Those that are refused because of a metric are always fewer than half, and a reply that has all
    usual and all needed metrics is not among them.

    Args:
        replies: Client -> its reply.
        usual: How the replies of earlier rounds were built; None in the first.
        names: Names of records that are right where as many replies have others.
        needed: Metrics that somebody reads.
    """
    records = {client: _records(content) for client, content in sorted(replies.items())}
    if not records:
        return Comparison(usual=usual)
    common = _most_common(records.values(), usual, names)
    refused = {
        client: f"its reply has the records {_listed(one)}, the others have {_listed(common)}"
        for client, one in records.items()
        if one != common
    }
    metrics = {client: _metrics(replies[client]) for client in records if client not in refused}
    refused |= _lacking(metrics, frozenset() if usual is None else usual.metrics, needed)
    kept = {client: one for client, one in metrics.items() if client not in refused}
    shared = frozenset.intersection(*kept.values())
    left_out: dict[str, list[int]] = {}
    for client, one in kept.items():
        for name, _ in sorted(one - shared):
            left_out.setdefault(name, []).append(client)
    lasting = shared if usual is None else shared & usual.metrics
    return Comparison(refused, left_out, Signature(common, lasting))


def with_common_metrics(replies: Sequence[RecordDict]) -> list[RecordDict]:
    """The replies with those metrics that all of them have; other records as they are."""
    if not replies:
        return []
    shared = frozenset.intersection(*map(_metrics, replies))
    names = {name for name, _ in shared}

    def common(content: RecordDict) -> RecordDict:
        return RecordDict(
            {
                key: MetricRecord({name: record[name] for name in record if name in names})
                if isinstance(record, MetricRecord)
                else record
                for key, record in content.items()
            }
        )

    return [common(content) for content in replies]


def log_left_out(
    found: Comparison, said: frozenset[str], what: str, round: int, names: Sequence[str]
) -> frozenset[str]:
    """Log which metrics are left out, each once in a run.

    Args:
        found: What was found in this round.
        said: What was logged before.
        what: Which replies: `train` or `evaluate`.
        round: Flower's number of the round.
        names: Client -> its name.

    Returns:
        What has been logged by now.
    """
    for metric, clients in found.left_out.items():
        if f"{what} {metric}" in said:
            continue
        have = ", ".join(f"{client} ({names[client]})" for client in clients[:_MOST_NAMES])
        more = f" and {len(clients) - _MOST_NAMES} more" if len(clients) > _MOST_NAMES else ""
        LOG.warning(
            "round %d: the metric %s is not alike in all %s replies (those of clients %s%s have "
            "it): it is left out of what the strategy aggregates (this is said once per run)",
            round,
            metric,
            what,
            have,
            more,
        )
    return said | {f"{what} {metric}" for metric in found.left_out}


def _records(content: RecordDict) -> _Records:
    kinds = (("ArrayRecord", content.array_records), ("MetricRecord", content.metric_records))
    return frozenset((kind, name) for kind, named in kinds for name in named)


def _metrics(content: RecordDict) -> frozenset[_Metric]:
    metrics = metrics_of(content)
    return frozenset((name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items())


def _most_common(
    found: Collection[_Records], usual: Signature | None, names: Collection[str]
) -> _Records:
    """How most replies name their records.

    A tie goes to the usual names, then to the expected ones; never to a client for its number.
    """
    counts = Counter(found)

    def rank(one: _Records) -> tuple[int, bool, int, list[tuple[str, str]]]:
        expected = sum(name in names for _, name in one)
        return -counts[one], usual is None or one != usual.records, -expected, sorted(one)

    return min(counts, key=rank)


def _lacking(
    metrics: Mapping[int, frozenset[_Metric]], usual: frozenset[_Metric], needed: Collection[str]
) -> dict[int, str]:
    """Client -> which metrics it lacks that are usual or needed, and that most replies have."""
    counts = Counter(one for has in metrics.values() for one in has)
    wanted = [one for one in counts if one in usual or one[0] in needed]
    whole, required = set(metrics), []
    # Where each lacks another one, the rarest ones are left out: most replies are always kept.
    for one in sorted(wanted, key=lambda one: (-counts[one], one)):
        having = {client for client in whole if one in metrics[client]}
        if 2 * len(having) > len(metrics):
            whole = having
            required.append(one)
    return {
        client: _difference(required, has) for client, has in metrics.items() if client not in whole
    }


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


def _listed(records: _Records) -> str:
    return ", ".join(f"{name} ({kind})" for kind, name in sorted(records))
