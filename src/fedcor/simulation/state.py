"""What one round of a simulation hands to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedcor.health import Health
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
        norms: The lengths of updates that the last rounds accepted; see `fedcor.outliers`.
        good: (P,) The last model that somebody has trained usably from; None before.
        health: What is known of the condition of w^t.
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

    def to_arrays(self) -> dict[str, Array]:
        """The state as named arrays, for a checkpoint."""
        states = {
            "selector": self.selector,
            "optimiser": self.optimiser,
            "norms": self.norms,
            "health": self.health.to_arrays(),
        }
        return {
            "round": np.array(self.round),
            "model": self.model.cpu().numpy(),
            "known": self.known,
            "holders": self.holders,
            **({} if self.good is None else {"good": self.good.cpu().numpy()}),
            **{
                f"{whose}/{name}": np.asarray(value)
                for whose, state in states.items()
                for name, value in state.items()
            },
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], device: torch.device) -> SimulationState:
        """The state that `to_arrays` gave; KeyError, TypeError or ValueError for other arrays."""
        selector, optimiser, norms, health = (
            {
                name.removeprefix(whose): array
                for name, array in arrays.items()
                if name.startswith(whose)
            }
            for whose in ("selector/", "optimiser/", "norms/", "health/")
        )
        return cls(
            int(arrays["round"]),
            torch.from_numpy(arrays["model"]).to(device),
            arrays["known"],
            arrays["holders"],
            selector,
            optimiser,
            norms,
            torch.from_numpy(arrays["good"]).to(device) if "good" in arrays else None,
            Health.from_arrays(health),
        )
