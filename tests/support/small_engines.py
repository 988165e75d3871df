"""Small engines on invented data: every built-in kind of model, and a user's."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedcor.data.datasets import Dataset
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import build_model
from fedcor.simulation.engine.stacked import StackedTrainer
from fedcor.simulation.engine.train import LoopTrainer


class Residual(nn.Module):
    """A user's module: not a Sequential, with buffers, nn.Dropout and functional dropout."""

    def __init__(self, shape, classes, width=8):
        super().__init__()
        self.first = nn.Linear(shape[0], width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(2))
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        h = self.first(x)
        return self.last(F.dropout(h + torch.relu(self.drop(self.norm(h))), 0.2, self.training))


def users_stack(shape, classes):
    """A user's Sequential: ReLU before dropout, and no dropout in the second layer."""
    return nn.Sequential(
        nn.Linear(shape[0], 9),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(9, 5),
        nn.ReLU(),
        nn.Linear(5, classes),
    )


def dataset(shape=(12,), n=120, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n + 40, *shape)).astype(np.float32)
    y = rng.integers(classes, size=n + 40)
    return Dataset(
        name="invented", train_x=x[:n], train_y=y[:n], test_x=x[n:], test_y=y[n:], classes=classes
    )


MODELS = {
    "logistic": ("logistic", (12,), {}, StackedTrainer),
    "mlp": ("mlp", (12,), {"hidden": [7, 5], "dropout": 0.0}, StackedTrainer),
    "mlp with dropout": ("mlp", (12,), {"hidden": [7, 5], "dropout": 0.5}, StackedTrainer),
    "mlp of images": ("mlp", (3, 2, 2), {"hidden": [6], "dropout": 0.2}, StackedTrainer),
    "cnn": ("cnn", (3, 20, 20), {"channels": [4, 5, 6], "dense": 7}, LoopTrainer),
    "a user's stack": (f"{__name__}:users_stack", (12,), {}, StackedTrainer),
    "a user's module": (f"{__name__}:Residual", (12,), {"width": 6}, LoopTrainer),
}


# Clients of unequal size, the first two smaller than a batch.
PARTS = [np.arange(0, 2), np.arange(2, 9), np.arange(9, 51), np.arange(51, 82), np.arange(82, 120)]


def engine_of(model, training, seed=3, **options):
    """An engine for one of MODELS, on invented data."""
    name, shape, settings, _ = MODELS[model]
    module = build_model(name, shape, 3, seed, settings)
    return Engine(dataset(shape), PARTS, module, training, seed, **options)
