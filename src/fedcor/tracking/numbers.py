"""What trackers write: a round as named numbers, who was chosen how often, a header's settings."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcor.record import RoundRecord, json_line
from fedcor.types import IntArray

__all__ = ["HISTOGRAM_EVERY", "Tally", "as_entry", "flat_settings", "known_clients", "scalars"]

HISTOGRAM_EVERY = 10  # rounds: a histogram has a number per client
_NAMES = {"test_accuracy": "accuracy", "test_loss": "loss"}
_PLAIN = (
    "test_accuracy", "test_loss", "learning_rate", "probed", "refused", "bytes_down", "bytes_up",
    "seconds", "memory_bytes",
)  # fmt: skip


def as_entry(record: RoundRecord) -> Mapping[str, Any]:
    """The round as its line of the record has it."""
    entry: Mapping[str, Any] = json.loads(json_line(dataclasses.asdict(record)))
    return entry


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers by name; those that are missing or not finite are left out.

    A selector's reasons are given as `why/NAME`, their mean over the chosen clients. Metrics with
    the name of another number are `metric/NAME`. Lists of numbers are left out.

    >>> line = {"selected": [3, 1], "participated": [3], "bytes_up": 8, "why": {"gain": [1, 2]}}
    >>> scalars(line)
    {'selected': 2.0, 'participants': 1.0, 'bytes_up': 8.0, 'why/gain': 1.5}
    """
    found: dict[str, Any] = {
        "selected": len(entry.get("selected") or ()),
        "participants": len(entry.get("participated") or ()),
    }
    found |= {_NAMES.get(key, key): entry.get(key) for key in _PLAIN}
    if entry.get("quarantined"):
        found["quarantined"] = len(entry["quarantined"])
    if entry.get("unmet"):
        found["unmet"] = sum(entry["unmet"].values())
    for name, values in (entry.get("why") or {}).items():
        if name == "runner_up":  # the numbers of clients have no mean
            continue
        known = [value for value in values if _is_number(value)]
        found[f"why/{name}"] = sum(known) / len(known) if known else None
    for name, value in (entry.get("metrics") or {}).items():
        taken = name in found or name in ("bytes", "clients_seen", "round")
        found[f"metric/{name}" if taken else name] = value
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclasses.dataclass
class Tally:
    """What adds up over the rounds: bytes, and how often each client was chosen."""

    bytes: int = 0
    selected: Counter[int] = dataclasses.field(default_factory=Counter)
    participated: Counter[int] = dataclasses.field(default_factory=Counter)

    def add(self, entry: Mapping[str, Any]) -> dict[str, float]:
        """The round's numbers, with `bytes` and `clients_seen`, which are of all rounds so far."""
        self.bytes += (entry.get("bytes_down") or 0) + (entry.get("bytes_up") or 0)
        self.selected.update(entry.get("selected") or ())
        self.participated.update(entry.get("participated") or ())
        both = {"bytes": float(self.bytes), "clients_seen": float(len(self.selected))}
        return {**scalars(entry), **both}

    def counts(self, clients: int = 0) -> IntArray:
        """How often each client was chosen, for as many clients as are known of."""
        counts = np.zeros(max(clients, *(client + 1 for client in (*self.selected, 0))), dtype=int)
        for client, times in self.selected.items():
            counts[client] = times
        return counts

    def table(self, clients: int = 0) -> str:
        """As CSV: each client, how often it was chosen, and how often it delivered."""
        rows: Iterable[tuple[int, int, int]] = (
            (client, int(times), self.participated[client])
            for client, times in enumerate(self.counts(clients))
        )
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("client", "selected", "participated"))
        writer.writerows(rows)
        return text.getvalue()


def known_clients(header: Mapping[str, Any]) -> int:
    """How many clients the settings say there are; 0 where they do not, as on Flower."""
    partition = (header.get("config") or {}).get("partition") or {}
    clients = partition.get("clients") if isinstance(partition, Mapping) else None
    return clients if isinstance(clients, int) else 0


def flat_settings(tree: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """A header's settings as texts under dotted names.

    >>> flat_settings({"seed": 1, "config": {"training": {"rounds": 5}}})
    {'seed': '1', 'config.training.rounds': '5'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{path}.{key}".removeprefix(".")
        if isinstance(value, Mapping):
            flat |= flat_settings(value, name)
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=repr)
    return flat
