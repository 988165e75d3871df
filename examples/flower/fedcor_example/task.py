"""The learning task: a small network, one client's data, training and evaluation.

Nothing here depends on how clients are selected."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcor.core.errors import ConfigError
from fedcor.core.rng import stream
from fedcor.data.datasets import load
from fedcor.data.partitioners import as_partition

torch.set_num_threads(1)


def network(dataset: str) -> nn.Module:
    """A network with one hidden layer."""
    data = load(dataset)
    width = int(torch.tensor(data.train_x.shape[1:]).prod())
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, data.classes))


@functools.lru_cache(maxsize=1)
def _parts(dataset: str, kind: str, shards: int, clients: int, seed: int) -> list[Any]:
    options = {"shards_per_client": shards} if kind == "shards" else {}
    partition = as_partition({"kind": kind, "clients": clients, **options})
    return list(partition.split(load(dataset).train_y, stream(seed, "partition")))


def client_data(config: Mapping[str, Any], client: int, clients: int) -> tuple[Tensor, Tensor]:
    """The samples of one client."""
    data = load(text(config, "dataset"))
    rows = _parts(
        text(config, "dataset"),
        text(config, "partition"),
        int(config["shards-per-client"]),
        clients,
        int(config["seed"]),
    )[client]
    return torch.from_numpy(data.train_x[rows]), torch.from_numpy(data.train_y[rows])


def test_data(dataset: str) -> tuple[Tensor, Tensor]:
    """The server's samples."""
    data = load(dataset)
    return torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)


def train(
    model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, batch_size: int, rate: float, seed: int
) -> None:
    """Local training by plain SGD."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    shuffles = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=shuffles).split(batch_size):
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()


@torch.inference_mode()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """(loss, accuracy)"""
    model.eval()
    scores = model(x)
    return float(F.cross_entropy(scores, y)), float((scores.argmax(dim=1) == y).float().mean())


def text(config: Mapping[str, Any], key: str) -> str:
    """A run-config value that must be a text; Flower itself accepts a wrong type."""
    value = config[key]
    if not isinstance(value, str):
        raise ConfigError(key, value, "must be a text")
    return value


def number(config: Mapping[str, Any], key: str, least: float) -> float:
    """A run-config value that must be a number of at least `least`."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise ConfigError(key, value, f"must be a number of at least {least}")
    return float(value)
