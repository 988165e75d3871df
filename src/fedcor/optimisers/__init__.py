"""Federated optimisers: how clients' updates become the next model, whoever selected the clients.

Each is a frozen dataclass that keeps `fedcor.types.Optimiser`: pure methods, state as named arrays.
They import NumPy alone, and know nothing of any engine.
"""

from fedcor.optimisers.adaptive import FedAdagrad, FedAdam, FedYogi
from fedcor.optimisers.averaging import FedAvg, FedProx
from fedcor.optimisers.extrapolation import FedExP
from fedcor.optimisers.feddyn import FedDyn
from fedcor.optimisers.last_updates import MIFA, FedStale, FedVARP
from fedcor.optimisers.momentum import FedAvgM
from fedcor.optimisers.normalised import FedNova
from fedcor.optimisers.recall import FedRecall
from fedcor.optimisers.registry import (
    OPTIMISERS,
    as_optimiser,
    build_optimiser,
    optimiser_names,
)
from fedcor.optimisers.robust import GeometricMedian, MultiKrum, TrimmedMean
from fedcor.optimisers.scaffold import Scaffold
from fedcor.optimisers.short import ShortForm
from fedcor.types import Optimiser

__all__ = [
    "MIFA",
    "OPTIMISERS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedExP",
    "FedNova",
    "FedProx",
    "FedRecall",
    "FedStale",
    "FedVARP",
    "FedYogi",
    "GeometricMedian",
    "MultiKrum",
    "Optimiser",
    "Scaffold",
    "ShortForm",
    "TrimmedMean",
    "as_optimiser",
    "build_optimiser",
    "optimiser_names",
]
