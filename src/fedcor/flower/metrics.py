"""The metrics of a round, as a line of the record keeps them, and back as Flower's records.

A line has two keys for them:

    metrics         `train/NAME`, `evaluate/NAME`, `server/NAME` -> a number or a list of numbers
    metric_records  whole records that `metrics` cannot hold as they are: one without any metric,
                    one with numbers that JSON does not have, and `initial`, the evaluation of the
                    initial model, which stands in the line of the first round
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedcor.flower.numbering import flower_round

__all__ = ["flat_metrics", "other_records", "read_metrics", "with_earlier"]

INITIAL = "initial"
# What metrics are of -> where Flower's result has them.
RESULTS = {
    "train": "train_metrics_clientapp",
    "evaluate": "evaluate_metrics_clientapp",
    "server": "evaluate_metrics_serverapp",
}


def flat_metrics(parts: Mapping[str, MetricRecord]) -> dict[str, Any]:
    """All metrics of a round, by what they are of and their name.

    Args:
        parts: The aggregated records: `train`, `evaluate` and `server`, those that there are.
    """
    return {
        f"{part}/{name}": value
        for part in RESULTS
        for name, value in parts.get(part, MetricRecord()).items()
    }


def other_records(
    parts: Mapping[str, MetricRecord], initial: MetricRecord | None = None
) -> dict[str, dict[str, Any]]:
    """The records of which `flat_metrics` does not tell all, in numbers and texts for JSON.

    Args:
        parts: As in `flat_metrics`.
        initial: The evaluation of the initial model, if this is the first round and there is one.
    """
    others = {} if initial is None else {INITIAL: initial}
    others |= {part: record for part, record in parts.items() if not _is_plain(record)}
    return {
        part: {name: _each(_text_if_odd, value) for name, value in record.items()}
        for part, record in others.items()
    }


def read_metrics(line: Mapping[str, Any]) -> dict[str, MetricRecord]:
    """The records of a round's line, exactly as they were put into it; by part, and `initial`."""
    flat: dict[str, dict[str, Any]] = {}
    for key, value in (line.get("metrics") or {}).items():
        part, slash, name = key.partition("/")
        if slash and part in RESULTS:
            flat.setdefault(part, {})[name] = value
    found = {**flat, **(line.get("metric_records") or {})}
    return {
        part: MetricRecord({name: _each(_number, value) for name, value in values.items()})
        for part, values in found.items()
    }


def with_earlier(result: Result, lines: Iterable[Mapping[str, Any]]) -> Result:
    """`result` with the metrics of earlier rounds before its own.

    Args:
        result: Of the rounds after them, in Flower's numbers over the whole run.
        lines: Of the earlier rounds, as the record has them.
    """
    earlier: dict[str, dict[int, MetricRecord]] = {name: {} for name in RESULTS.values()}
    for line in lines:
        records = read_metrics(line)
        if INITIAL in records:
            earlier[RESULTS["server"]][0] = records[INITIAL]
        for part, name in RESULTS.items():
            if part in records:
                earlier[name][flower_round(line["round"])] = records[part]
    for name, records_of in earlier.items():
        setattr(result, name, {**records_of, **getattr(result, name)})
    return result


def _is_plain(record: MetricRecord) -> bool:
    """Whether JSON has all its numbers, and there are any."""
    numbers = [
        one for value in record.values() for one in (value if isinstance(value, list) else [value])
    ]
    return bool(len(record)) and all(math.isfinite(one) for one in numbers)


def _each(change: Any, value: Any) -> Any:
    return [change(one) for one in value] if isinstance(value, list) else change(value)


def _text_if_odd(value: float) -> float | str:
    """`nan`, `inf` and `-inf` as texts, which JSON has."""
    return value if math.isfinite(value) else str(float(value))


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value) if isinstance(value, str) else value
