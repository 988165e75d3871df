"""Federated optimisers: how clients' updates become the next model, whoever selected the clients.

Each is a frozen dataclass that keeps `fedcor.types.Optimiser`: pure methods, state as named arrays.
They import NumPy alone, and know nothing of any engine.
"""

from fedcor.optimisers.averaging import FedAvg, FedProx
from fedcor.optimisers.registry import (
    OPTIMISERS,
    as_optimiser,
    build_optimiser,
    optimiser_names,
)
from fedcor.optimisers.short import ShortForm
from fedcor.types import Optimiser

__all__ = [
    "OPTIMISERS",
    "FedAvg",
    "FedProx",
    "Optimiser",
    "ShortForm",
    "as_optimiser",
    "build_optimiser",
    "optimiser_names",
]
