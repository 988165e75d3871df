"""What one round on Flower leaves to the next, as named arrays for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedcor.errors import RecordError
from fedcor.flower.memory import pack, snapshot, unpack, wrapped, writable
from fedcor.flower.roster import Roster
from fedcor.flower.round import Knowledge
from fedcor.flower.wire import LOG
from fedcor.types import Array, Population, State

__all__ = ["Standing", "StrategyMemory"]


@dataclass(frozen=True)
class Standing:
    """All of a run that is ours, after a finished round."""

    done: int  # rounds
    arrays: ArrayRecord  # the model
    knowledge: Knowledge
    roster: Roster
    population: Population  # that the selector's state was made for
    state: State  # the selector's
    strategy: Mapping[str, Any]  # what the strategy remembers
    config: Mapping[str, Any]  # what it changed in the train configuration

    def to_arrays(self) -> dict[str, Array]:
        known = sorted(self.knowledge.losses)
        return {
            "round": np.array(self.done),
            "sizes": self.population.sizes,
            "version": np.array(self.knowledge.version, dtype=np.str_),
            "known_clients": np.array(known, dtype=np.int64),
            "known_losses": np.array([self.knowledge.losses[client] for client in known]),
            **{f"roster/{name}": array for name, array in self.roster.to_arrays().items()},
            **{f"selector/{name}": array for name, array in self.state.items()},
            **pack({"arrays": self.arrays}, "model"),
            **pack(self.strategy, "strategy"),
            **pack(self.config, "config"),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Standing:
        """Raises RecordError where they are not a standing. Who holds the model is forgotten: the nodes are met anew."""
        try:
            losses = dict(
                zip(arrays["known_clients"].tolist(), arrays["known_losses"].tolist(), strict=True)
            )
            return cls(
                done=int(arrays["round"]),
                arrays=unpack(arrays, "model")["arrays"],
                knowledge=Knowledge(str(arrays["version"]), losses),
                roster=Roster.from_arrays(_below(arrays, "roster/")),
                population=Population(arrays["sizes"]),
                state=_below(arrays, "selector/"),
                strategy=unpack(arrays, "strategy"),
                config=unpack(arrays, "config"),
            )
        except (KeyError, ValueError, AttributeError) as error:
            raise RecordError(f"the checkpoint does not fit this run: {error!r}") from error


def _below(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


class StrategyMemory:
    """What the rounds change in a strategy. Its settings stay the user's to change between two starts."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._begun = snapshot(strategy).values
        self._told: set[str] = set()

    def read(self) -> dict[str, Any]:
        """By dotted attribute, all that changed and can be written; of what cannot, the log tells once."""
        changed = {
            key: value
            for key, value in snapshot(self._strategy).values.items()
            if key not in self._begun or not _same(value, self._begun[key])
        }
        lost = {key for key, value in changed.items() if not writable(value)}
        for key in sorted(lost - self._told):
            LOG.warning(
                "the strategy's attribute %s (a %s) cannot be written to the checkpoint: if it is memory, it is lost in a crash",
                key,
                type(changed[key]).__name__,
            )
        self._told |= lost
        return {key: value for key, value in changed.items() if key not in lost}

    def write(self, memory: Mapping[str, Any]) -> None:
        owners = dict(wrapped(self._strategy))
        for key, value in memory.items():
            path, dot, name = key.rpartition(".")
            setattr(owners[path + dot], name, value)


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # arrays, say, which compare number by number
        return False
