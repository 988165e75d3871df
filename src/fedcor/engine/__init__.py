"""Who trains: models, local training, evaluation, aggregation and faults. Needs torch; knows nothing of selectors."""

import os

from fedcor.errors import MissingExtraError

# MKL's products may differ in the last bit with the alignment of their operands, so with who trains beside whom; this mode
# forbids it, at no measurable cost. It must be set before torch computes anything.
os.environ.setdefault("MKL_CBWR", "AUTO")

try:
    import torch
except ImportError as error:  # pragma: no cover - held by a test in an interpreter without torch
    raise MissingExtraError("PyTorch", "sim") from error

from fedcor.engine.engine import Engine
from fedcor.engine.models import build_model
from fedcor.engine.train import LocalTraining
from fedcor.faults import Faults
from fedcor.optimisers import FedAvg, FedProx

del torch
__all__ = ["Engine", "Faults", "FedAvg", "FedProx", "LocalTraining", "build_model"]
