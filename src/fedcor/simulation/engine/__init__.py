"""The simulated clients: models, local training and evaluation.

Needs torch, and knows nothing of selectors. `Engine` is the entry point:

    models.py       batches; built-in and users' models; a model as one flat vector
    train.py        local training: settings, mini-batches, the trainer for any module
    stacked.py      the fast trainer for models of dense layers
    stores.py       the clients' data, held in memory or loaded when needed
    engine.py       training and evaluation on the data of all clients
"""

import os

from fedcor.core.errors import MissingExtraError

# MKL's products may differ in the last bit with the alignment of their operands, and so with which
# clients train together. This mode forbids it, at no measurable cost. It must be set before torch
# computes anything.
os.environ.setdefault("MKL_CBWR", "AUTO")

try:
    import torch
except ImportError as error:  # pragma: no cover - held by a test in an interpreter without torch
    raise MissingExtraError("PyTorch", "sim") from error

del torch
