"""What one round of a simulation hands to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedcor.turns import no_turns
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
        turns: Who was chosen in the last rounds, where a defence caps that (`fedcor.turns`).
        before: (P,) The global model of the round before, w^(t-1); None unless somebody copies its
            change.
    """

    round: int
    model: Tensor
    known: FloatArray
    holders: BoolArray
    selector: State
    optimiser: State = field(default_factory=dict)
    turns: State = field(default_factory=no_turns)
    before: Tensor | None = None

    def to_arrays(self) -> dict[str, Array]:
        """The state as named arrays, for a checkpoint."""
        states = {"selector": self.selector, "optimiser": self.optimiser}
        if len(self.turns["rounds"]):
            states["turns"] = self.turns
        before = {} if self.before is None else {"before": self.before.cpu().numpy()}
        return {
            "round": np.array(self.round),
            "model": self.model.cpu().numpy(),
            "known": self.known,
            "holders": self.holders,
            **before,
            **{
                f"{whose}/{name}": np.asarray(value)
                for whose, state in states.items()
                for name, value in state.items()
            },
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], device: torch.device) -> SimulationState:
        """The state that `to_arrays` gave; KeyError, TypeError or ValueError for other arrays."""
        selector, optimiser, turns = (
            {
                name.removeprefix(whose): array
                for name, array in arrays.items()
                if name.startswith(whose)
            }
            for whose in ("selector/", "optimiser/", "turns/")
        )
        model, before = (
            torch.from_numpy(arrays[name]).to(device) if name in arrays else None
            for name in ("model", "before")
        )
        if model is None:
            raise KeyError("model")
        known, holders = arrays["known"], arrays["holders"]
        return cls(
            int(arrays["round"]),
            model,
            known,
            holders,
            selector,
            optimiser,
            turns or no_turns(),
            before,
        )
