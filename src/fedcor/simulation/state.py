"""What one round of a simulation hands to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedcor.core.types import Array, BoolArray, FloatArray, State
from fedcor.rounds.defence.guarded_federation import no_turns, read_turns
from fedcor.rounds.defence.model_health import Health
from fedcor.rounds.defence.update_norms import PARTS, read_norms


@dataclass(frozen=True)
class SimulationState:
    """Everything that one round hands to the next. Saved, it is a checkpoint.

    Attributes:
        round: The number of the next round, t.
        model: (P,) The global model w^t.
        known: (N,) The losses l_k(w^t) that clients have reported; NaN where unknown.
        holders: (N,) Which clients have received w^t.
        selector: The selector's state.
        optimiser: The federated optimiser's state.
        norms: The lengths of updates that the last rounds accepted; see `fedcor.rounds.defence.update_norms`.
        good: (P,) The last model that somebody has trained usably from; None before.
        health: What is known of the condition of w^t.
        turns: Who was chosen in the last rounds, where a defence caps that (`fedcor.rounds.defence.guarded_federation`).
        before: (P,) The global model of the round before, w^(t-1); None unless somebody copies its
            change.
        clock: Simulated seconds since the start; 0 without a clock.
    """

    round: int
    model: Tensor
    known: FloatArray
    holders: BoolArray
    selector: State
    optimiser: State = field(default_factory=dict)
    norms: State = field(default_factory=dict)
    good: Tensor | None = None
    health: Health = field(default_factory=Health)
    turns: State = field(default_factory=no_turns)
    before: Tensor | None = None
    clock: float = 0.0

    def to_arrays(self) -> dict[str, Array]:
        """The state as named arrays, for a checkpoint."""
        states = {
            "selector": self.selector,
            "optimiser": self.optimiser,
            "norms": self.norms,
            "health": self.health.to_arrays(),
            "turns": self.turns if len(self.turns["rounds"]) else {},
        }
        models = {"good": self.good, "before": self.before}
        return {
            "round": np.array(self.round),
            "model": self.model.cpu().numpy(),
            "known": self.known,
            "holders": self.holders,
            **{name: one.cpu().numpy() for name, one in models.items() if one is not None},
            **({"clock": np.array(self.clock)} if self.clock else {}),
            **{
                f"{whose}/{name}": np.asarray(value)
                for whose, state in states.items()
                for name, value in state.items()
            },
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], device: torch.device) -> SimulationState:
        """The state that `to_arrays` gave; KeyError, TypeError or ValueError for other arrays."""
        selector, optimiser, norms, health, turns = (
            {
                name.removeprefix(whose): array
                for name, array in arrays.items()
                if name.startswith(whose)
            }
            for whose in ("selector/", "optimiser/", "norms/", "health/", "turns/")
        )
        good, before = (
            torch.from_numpy(arrays[name]).to(device) if name in arrays else None
            for name in ("good", "before")
        )
        return cls(
            int(arrays["round"]),
            torch.from_numpy(arrays["model"]).to(device),
            arrays["known"],
            arrays["holders"],
            selector,
            optimiser,
            read_norms(norms, PARTS),
            good,
            Health.from_arrays(health),
            read_turns(turns),
            before,
            float(arrays.get("clock", 0.0)),
        )
