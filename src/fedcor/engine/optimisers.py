"""How the chosen clients' results become the next model. Each is combinable with every selector.

FedAvg    w^{t+1} = sum_k a_k w_k,  a_k equal (the paper's rule) or proportional to n_k (`weighted`)
FedProx   the same, after local training on  l_k(w) + mu/2 |w - w^t|^2   (Li et al., 2018)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedcor.errors import ConfigError
from fedcor.types import FloatArray

__all__ = ["OPTIMISERS", "FedAvg", "FedProx", "Optimiser"]


class Optimiser(Protocol):
    @property
    def weighted(self) -> bool:
        """Whether a client counts in proportion to its data."""
        ...

    @property
    def proximal(self) -> float:
        """mu of the proximal term in local training; 0 for none."""
        ...

    def aggregate(self, model: Tensor, results: Tensor, weights: FloatArray) -> Tensor:
        """(P,) the next model from w^t, (m, P) the clients' results and (m,) weights that sum to 1."""
        ...


@dataclass(frozen=True)
class FedAvg:
    weighted: bool = False

    @property
    def proximal(self) -> float:
        return 0.0

    def aggregate(self, model: Tensor, results: Tensor, weights: FloatArray) -> Tensor:
        # The mean of changes, not of models: in float32 it loses less, and a client that did not move leaves w^t as it is.
        return model + torch.as_tensor(weights, dtype=results.dtype, device=results.device) @ (
            results - model
        )


@dataclass(frozen=True)
class FedProx(FedAvg):
    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 <= self.mu <= 1e6:
            raise ConfigError("mu", self.mu, "must be a finite number from 0 to a million")

    @property
    def proximal(self) -> float:
        return self.mu


OPTIMISERS: dict[str, type[FedAvg]] = {"fedavg": FedAvg, "fedprox": FedProx}
