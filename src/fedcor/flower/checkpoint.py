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
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result, Strategy

from fedcor.core.errors import RecordError
from fedcor.core.types import Array, Population
from fedcor.flower.client_registry import Roster
from fedcor.flower.compatibility import read_spent, restore_spent
from fedcor.flower.federation_state import CurrentModel, FederationState, SeenReplies
from fedcor.flower.logs import log_once
from fedcor.flower.protocol import flower_round
from fedcor.flower.reply_schema import Signature
from fedcor.flower.strategy_memory import pack, same, snapshot, unpack, wrapped, writable
from fedcor.rounds.defence.guarded_federation import read_turns
from fedcor.rounds.defence.model_health import Health
from fedcor.rounds.defence.update_norms import PARTS, read_norms

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


# What a finished round leaves to the next, as named arrays for a checkpoint, and back.


@dataclass(frozen=True)
class Checkpoint:
    """A run after a finished round."""

    done: int  # rounds
    arrays: ArrayRecord  # the model
    state: FederationState
    strategy: Mapping[str, Any]  # what the strategy remembers
    config: Mapping[str, Any]  # what it changed in the train configuration

    def to_arrays(self) -> dict[str, Array]:
        """As named arrays, which a file takes without pickle."""
        state = self.state
        assert state.population is not None
        assert state.selector is not None
        known, replies = sorted(state.model.losses), state.model.replies
        built = {"trained": replies.trained, "evaluated": replies.evaluated}
        return {
            "round": np.array(self.done),
            "sizes": state.population.sizes,
            "version": np.array(state.model.version, dtype=np.str_),
            "known_clients": np.array(known, dtype=np.int64),
            "known_losses": np.array([state.model.losses[client] for client in known]),
            "replies/answered": np.array(replies.answered),
            "replies/reported": np.array(replies.reported),
            **{
                f"replies/{name}": np.array("" if one is None else one.to_text(), dtype=np.str_)
                for name, one in built.items()
            },
            **{f"roster/{name}": array for name, array in state.roster.to_arrays().items()},
            **{f"selector/{name}": array for name, array in state.selector.items()},
            **{f"norms/{name}": array for name, array in state.norms.items()},
            **{f"health/{name}": array for name, array in state.health.to_arrays().items()},
            **({} if state.good is None else pack({"arrays": state.good}, "good")),
            **{f"turns/{name}": array for name, array in state.turns.items() if len(array)},
            **pack({"arrays": self.arrays}, "model"),
            **pack(self.strategy, "strategy"),
            **pack(self.config, "config"),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Checkpoint:
        """The checkpoint in `arrays`. Nobody is taken to hold the model: nodes may have restarted.

        Raises RecordError where the arrays are not a checkpoint of this room.
        """
        try:
            clients, known = arrays["known_clients"].tolist(), arrays["known_losses"].tolist()
            losses = dict(zip(clients, known, strict=True))
            state = FederationState(
                finished=int(arrays["round"]),
                roster=Roster.from_arrays(_below(arrays, "roster/")),
                model=CurrentModel(str(arrays["version"]), losses, replies=_replies(arrays)),
                selector=_below(arrays, "selector/"),
                population=Population(arrays["sizes"]),
                norms=read_norms(_below(arrays, "norms/"), PARTS),
                health=Health.from_arrays(_below(arrays, "health/")),
                good=unpack(arrays, "good")["arrays"] if "good" in arrays else None,
                turns=read_turns(_below(arrays, "turns/")),
            )
            return cls(
                done=state.finished,
                arrays=unpack(arrays, "model")["arrays"],
                state=state,
                strategy=unpack(arrays, "strategy"),
                config=unpack(arrays, "config"),
            )
        except (LookupError, ValueError, AttributeError) as error:
            raise RecordError(f"the checkpoint does not fit this run: {error!r}") from error


def _replies(arrays: Mapping[str, Array]) -> SeenReplies:
    """What the replies have been like."""
    return SeenReplies(
        Signature.from_text(str(arrays["replies/trained"])),
        Signature.from_text(str(arrays["replies/evaluated"])),
        answered=bool(arrays["replies/answered"]),
        reported=bool(arrays["replies/reported"]),
    )


def _below(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


class StrategyMemory:
    """What the rounds change in a strategy. Its settings may be changed between two starts."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._initial = snapshot(strategy).values
        self._reported: set[str] = set()

    def read(self) -> dict[str, Any]:
        """By dotted attribute, all that changed and can be written; what cannot is logged once."""
        changed = {
            key: value
            for key, value in snapshot(self._strategy).values.items()
            if key not in self._initial or not same(value, self._initial[key])
        }
        lost = {key for key, value in changed.items() if not writable(value)}
        for key in sorted(lost):
            log_once(
                self._reported,
                key,
                "the strategy's attribute %s (a %s) cannot be written to the checkpoint: "
                "if rounds depend on it, a resumed run will differ",
                key,
                type(changed[key]).__name__,
            )
        kept = {key: value for key, value in changed.items() if key not in lost}
        return {**kept, **read_spent(self._strategy)}

    def write(self, memory: Mapping[str, Any]) -> None:
        """Put back what `read` returned."""
        owners = dict(wrapped(self._strategy))
        for key, value in restore_spent(self._strategy, memory).items():
            path, dot, name = key.rpartition(".")
            setattr(owners[path + dot], name, value)
