"""Replies that a strategy can take together: it needs records and metrics with equal names.

A usable reply has one record of a kind, so what it calls them says nothing: the strategy is given
them under one name. A metric that only some replies have gets nobody refused: it is left out of
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
from typing import TypeAlias

from flwr.app import MetricRecord, RecordDict

from fedcor.flower.screen import metrics_of, usable_metric
from fedcor.flower.wire import LOG
from fedcor.foreign import one_line

__all__ = ["Comparison", "Signature", "compare_replies", "log_left_out", "with_common_metrics"]

# A metric's name, and its length: -1 for a single number.
_Metric: TypeAlias = tuple[str, int]
_MOST_NAMES = 5  # clients in a line of the log


@dataclass(frozen=True)
class Signature:
    """How the replies of a run are built.

    Attributes:
        metrics: Name and length of each metric that every reply so far has had.
    """

    metrics: frozenset[_Metric]

    def to_text(self) -> str:
        """As a text, which a checkpoint takes."""
        return json.dumps([[], sorted(self.metrics)])

    @classmethod
    def from_text(cls, text: str) -> Signature | None:
        """Of what `to_text` returned; None for an empty text."""
        if not text:
            return None
        _, metrics = json.loads(text)  # earlier versions kept the names of records, too
        return cls(frozenset((str(name), int(length)) for name, length in metrics))


@dataclass(frozen=True)
class Comparison:
    """How the replies of a round differ.

    Attributes:
        refused: Client -> why its reply cannot go with the others.
        left_out: Metric that only some of the other replies have -> the clients that have it.
        unusable: Metric that is no usable number in some of them -> (client, what it is), ...
        usual: How the replies of the run are built, this round included.
    """

    refused: Mapping[int, str] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[int]] = field(default_factory=dict)
    unusable: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    usual: Signature | None = None


def compare_replies(
    replies: Mapping[int, RecordDict],
    usual: Signature | None,
    *,
    needed: Collection[str] = (),
    wanted: Collection[str] = (),
    loss_keys: tuple[str, ...] = (),
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
    """
    metrics = {client: _metrics(replies[client], loss_keys) for client in sorted(replies)}
    before = frozenset() if usual is None else usual.metrics
    refused = _without_needed(metrics, before, needed)
    rest = {client: one for client, one in metrics.items() if client not in refused}
    # What is left out because it is unusable in one reply gets nobody refused.
    unusable = _unusable({client: replies[client] for client in rest}, loss_keys)
    usable = frozenset(one for one in before if one[0] not in unusable)
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
    lasting = shared if usual is None else shared & usual.metrics
    return Comparison(refused, left_out, unusable, Signature(lasting))


def with_common_metrics(
    replies: Sequence[RecordDict], loss_keys: tuple[str, ...] = ()
) -> list[RecordDict]:
    """The replies with those metrics that are usable in all of them, and records of equal names."""
    if not replies:
        return []
    shared = frozenset.intersection(*(_metrics(content, loss_keys) for content in replies))
    names = {name for name, _ in shared}
    # As most call them; where as many call them otherwise, nobody is the worse for it.
    counts = Counter(tuple(sorted(map(_kind_and_name, content.items()))) for content in replies)
    usual = dict(sorted((-count, one) for one, count in counts.items())[0][1])

    def common(content: RecordDict) -> RecordDict:
        return RecordDict(
            {
                usual[type(record).__name__]: MetricRecord(
                    {n: record[n] for n in record if n in names}
                )
                if isinstance(record, MetricRecord)
                else record
                for record in content.values()
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
    left_out = "it is left out of what the strategy aggregates (this is said once per run)"
    for metric, clients in found.left_out.items():
        if f"{what} {metric}" in said:
            continue
        message = "round %d: the metric %s is not alike in all %s replies (those of %s have it): %s"
        have = _some_of(clients, names)
        LOG.warning(message, round, one_line(metric), what, have, left_out)
    for metric, given in found.unusable.items():
        if f"{what} {metric}" in said:
            continue
        message = "round %d: the metric %s is no usable number (%s) in the %s replies of %s: %s"
        whose, value = _some_of([client for client, _ in given], names), given[0][1]
        LOG.warning(message, round, one_line(metric), value, what, whose, left_out)
    return said | {f"{what} {metric}" for metric in [*found.left_out, *found.unusable]}


def _some_of(clients: Sequence[int], names: Sequence[str]) -> str:
    some = ", ".join(f"{client} ({names[client]})" for client in clients[:_MOST_NAMES])
    more = f" and {len(clients) - _MOST_NAMES} more" if len(clients) > _MOST_NAMES else ""
    return f"clients {some}{more}"


def _kind_and_name(item: tuple[str, object]) -> tuple[str, str]:
    return type(item[1]).__name__, item[0]


def _metrics(content: RecordDict, loss_keys: tuple[str, ...]) -> frozenset[_Metric]:
    """Those that are usable numbers."""
    return frozenset(
        (name, len(value) if isinstance(value, list) else -1)
        for name, value in metrics_of(content).items()
        if usable_metric(name, value, loss_keys)
    )


def _unusable(
    replies: Mapping[int, RecordDict], loss_keys: tuple[str, ...]
) -> dict[str, list[tuple[int, str]]]:
    """Metric -> (client, what it is) of those whose it is no usable number."""
    found: dict[str, list[tuple[int, str]]] = {}
    for client, content in sorted(replies.items()):
        for name, value in metrics_of(content).items():
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


def _lacking(
    metrics: Mapping[int, frozenset[_Metric]], usual: frozenset[_Metric], wanted: Collection[str]
) -> dict[int, str]:
    """Client -> which metrics it lacks that are usual or wanted, and that most replies have."""
    counts = Counter(one for has in metrics.values() for one in has)
    asked = [one for one in counts if one in usual or one[0] in wanted]
    whole, required = set(metrics), []
    # Where each lacks another one, the rarest ones are left out: most replies are always kept.
    for one in sorted(asked, key=lambda one: (-counts[one], one)):
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
