"""The state of a simulation between two rounds, which is also its checkpoint."""

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


@dataclass(frozen=True, kw_only=True)
class SimulationState:
    """Everything that one round hands to the next. Saved, it is a checkpoint.

    Attributes:
        round: The number of the next round, t.
        model: (P,) The global model w^t.
        known: (N,) The losses l_k(w^t) that clients have reported; NaN where unknown.
        holders: (N,) Which clients have received w^t.
        selector: The selector's state.
        optimiser: The federated optimiser's state.
        norms: The lengths of the updates that the last rounds accepted
            (`fedcor.rounds.defence.update_norms`).
        good: (P,) The last model from which clients trained usable updates; None before.
        health: The condition of w^t, as far as it is known.
        turns: The clients chosen in the last rounds, where a defence limits that
            (`fedcor.rounds.defence.guarded_federation`).
        before: (P,) The previous global model, w^(t-1); None unless Byzantine clients copy its
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
        arrays = {
            "round": np.array(self.round),
            "model": self.model.cpu().numpy(),
            "known": self.known,
            "holders": self.holders,
            "clock": np.array(self.clock),
        }
        for name, model in (("good", self.good), ("before", self.before)):
            if model is not None:
                arrays[name] = model.cpu().numpy()
        for part, state in states.items():
            arrays |= {f"{part}/{name}": np.asarray(value) for name, value in state.items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], device: torch.device) -> SimulationState:
        """The state that `to_arrays` gave; KeyError, TypeError or ValueError for other arrays."""

        def part(prefix: str) -> dict[str, Array]:
            return {
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            }

        def model(name: str) -> Tensor | None:
            return torch.from_numpy(arrays[name]).to(device) if name in arrays else None

        return cls(
            round=int(arrays["round"]),
            model=torch.from_numpy(arrays["model"]).to(device),
            known=arrays["known"],
            holders=arrays["holders"],
            selector=part("selector/"),
            optimiser=part("optimiser/"),
            norms=read_norms(part("norms/"), PARTS),
            good=model("good"),
            health=Health.from_arrays(part("health/")),
            turns=read_turns(part("turns/")),
            before=model("before"),
            clock=float(arrays["clock"]),
        )
