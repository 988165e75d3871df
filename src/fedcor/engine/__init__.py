"""Who trains: models, local training, evaluation, aggregation and faults. Needs torch; knows nothing of selectors."""

from fedcor.errors import MissingExtraError

try:
    import torch
except ImportError as error:  # pragma: no cover - held by a test in an interpreter without torch
    raise MissingExtraError("PyTorch", "sim") from error

from fedcor.engine.engine import Engine
from fedcor.engine.faults import Faults
from fedcor.engine.models import build_model
from fedcor.engine.optimisers import FedAvg, FedProx
from fedcor.engine.train import LocalTraining

del torch
__all__ = ["Engine", "Faults", "FedAvg", "FedProx", "LocalTraining", "build_model"]
