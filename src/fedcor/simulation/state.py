"""The state of a simulation between two rounds, which is also its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcor.core.types import Array
from fedcor.rounds.state import RoundState, unpack_state


@dataclass(frozen=True, kw_only=True)
class SimulationState(RoundState[Tensor]):
    """Everything that one round hands to the next, and what only a simulation knows.

    Attributes:
        before: (P,) The previous global model, w^(t-1); None unless Byzantine clients copy its
            change.
        clock: Simulated seconds since the start; 0 without a clock.
    """

    before: Tensor | None = None
    clock: float = 0.0

    def to_arrays(self) -> dict[str, Array]:
        """The state as named arrays, for a checkpoint."""
        arrays = self.pack(lambda name, model: {name: model.cpu().numpy()})
        before = {} if self.before is None else {"before": self.before.cpu().numpy()}
        return {**arrays, "clock": np.array(self.clock), **before}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], device: torch.device) -> SimulationState:
        """The state that `to_arrays` gave; KeyError, TypeError or ValueError for other arrays."""

        def model(name: str) -> Tensor | None:
            return torch.from_numpy(arrays[name]).to(device) if name in arrays else None

        fields = unpack_state(arrays, model)
        if fields["model"] is None:
            raise KeyError("model")
        return cls(**fields, before=model("before"), clock=float(arrays["clock"]))
