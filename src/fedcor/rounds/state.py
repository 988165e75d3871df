"""What one round hands to the next, the same on every engine. Saved, it is the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from fedcor.core.types import Array, BoolArray, FloatArray, State
from fedcor.rounds.backoff import read_faults
from fedcor.rounds.defence.guarded_federation import no_turns, read_turns
from fedcor.rounds.defence.model_health import Health
from fedcor.rounds.defence.update_norms import PARTS, read_norms

Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class RoundState(Generic[Model]):
    """Everything that one round hands to the next.

    Attributes:
        round: The number of the next round, t.
        model: The global model w^t.
        known: (N,) The losses l_k(w^t) that clients have reported; NaN where unknown.
        holders: (N,) Which clients have received w^t.
        selector: The selector's state.
        optimiser: The federated optimiser's state.
        norms: The lengths of the updates that the last rounds accepted
            (`fedcor.rounds.defence.update_norms`).
        good: The last model from which clients trained usable updates; None before.
        health: The condition of w^t, as far as it is known.
        turns: The clients chosen in the last rounds, where a defence limits that
            (`fedcor.rounds.defence.guarded_federation`).
        backoff: Clients that fail again and again (`fedcor.rounds.backoff`); empty where an engine
            leaves nobody alone.
    """

    round: int
    model: Model
    known: FloatArray
    holders: BoolArray
    selector: State
    optimiser: State = field(default_factory=dict)
    norms: State = field(default_factory=dict)
    good: Model | None = None
    health: Health = field(default_factory=Health)
    turns: State = field(default_factory=no_turns)
    backoff: State = field(default_factory=dict)

    def pack(self, pack_model: Callable[[str, Model], Mapping[str, Array]]) -> dict[str, Array]:
        """The state as named arrays.

        Args:
            pack_model: Gives the named arrays of a model, each name beginning with the given one.
        """
        states = {
            "selector": self.selector,
            "optimiser": self.optimiser,
            "norms": self.norms,
            "health": self.health.to_arrays(),
            "turns": self.turns if len(self.turns["rounds"]) else {},
            "backoff": self.backoff,
        }
        arrays: dict[str, Array] = {
            "round": np.array(self.round),
            "known": self.known,
            "holders": self.holders,
            **pack_model("model", self.model),
            **({} if self.good is None else pack_model("good", self.good)),
        }
        for name, state in states.items():
            arrays |= {f"{name}/{key}": np.asarray(value) for key, value in state.items()}
        return arrays


def unpack_state(
    arrays: Mapping[str, Array], unpack_model: Callable[[str], Model | None]
) -> dict[str, Any]:
    """The fields of the state that `RoundState.pack` gave.

    Args:
        arrays: The named arrays.
        unpack_model: Gives the model whose arrays have names that begin with the given one; None
            if there is none.

    Raises:
        KeyError, TypeError, ValueError: They are other arrays.
    """
    known, backoff = arrays["known"], arrays_below(arrays, "backoff/")
    return {
        "round": int(arrays["round"]),
        "model": unpack_model("model"),
        "known": known,
        "holders": arrays["holders"],
        "selector": arrays_below(arrays, "selector/"),
        "optimiser": arrays_below(arrays, "optimiser/"),
        "norms": read_norms(arrays_below(arrays, "norms/"), PARTS),
        "good": unpack_model("good"),
        "health": Health.from_arrays(arrays_below(arrays, "health/")),
        "turns": read_turns(arrays_below(arrays, "turns/")),
        "backoff": read_faults(backoff, len(known)) if backoff else {},
    }


def arrays_below(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
