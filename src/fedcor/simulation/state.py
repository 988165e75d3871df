"""What one round of a simulation hands to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedcor.types import Array, BoolArray, FloatArray, State

__all__ = ["SimulationState"]


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
        clock: Simulated seconds since the start; 0 without a clock.
    """

    round: int
    model: Tensor
    known: FloatArray
    holders: BoolArray
    selector: State
    optimiser: State = field(default_factory=dict)
    clock: float = 0.0

    def to_arrays(self) -> dict[str, Array]:
        """The state as named arrays, for a checkpoint."""
        states = {"selector": self.selector, "optimiser": self.optimiser}
        return {
            "round": np.array(self.round),
            "model": self.model.cpu().numpy(),
            "known": self.known,
            "holders": self.holders,
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
        selector, optimiser = (
            {
                name.removeprefix(whose): array
                for name, array in arrays.items()
                if name.startswith(whose)
            }
            for whose in ("selector/", "optimiser/")
        )
        model, round = torch.from_numpy(arrays["model"]).to(device), int(arrays["round"])
        clock = float(arrays.get("clock", 0.0))
        return cls(round, model, arrays["known"], arrays["holders"], selector, optimiser, clock)
