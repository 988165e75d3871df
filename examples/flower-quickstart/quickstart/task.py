"""The model, the nodes' data, training and testing. Nothing here knows how clients are chosen."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SERVER = 297  # samples that the server keeps to test the model
LEAST = 10  # samples that every node has

torch.set_num_threads(1)


class Net(nn.Module):
    """A small convolutional network for pictures of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * 4 * 4, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.output(F.relu(self.hidden(x.flatten(1))))


@lru_cache(maxsize=1)
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All pictures and their labels, shuffled."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(pictures[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return x, torch.tensor(labels[order])


@lru_cache(maxsize=1)
def split(nodes: int, alpha: float) -> list[np.ndarray]:
    """Rows of each node: a Dirichlet share of every digit."""
    labels, rng = digits()[1][SERVER:].numpy(), np.random.default_rng(0)
    for _ in range(10_000):
        rows: list[list[int]] = [[] for _ in range(nodes)]
        for label in range(10):
            of_label = rng.permutation(np.flatnonzero(labels == label))
            ends = np.cumsum(rng.dirichlet([alpha] * nodes)) * len(of_label)
            for node, part in enumerate(np.split(of_label, ends[:-1].astype(int))):
                rows[node].extend(part)
        if min(map(len, rows)) >= LEAST:
            return [SERVER + np.array(sorted(part)) for part in rows]
    raise ValueError(f"no split among {nodes} nodes with alpha {alpha} gives each {LEAST} samples")


def load_data(
    node: int, nodes: int, alpha: float, batch_size: int
) -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    """(training, validation) samples of one node: 80 % and 20 %."""
    x, y = digits()
    rows = np.random.default_rng(node).permutation(split(nodes, alpha)[node])
    train, validation = np.split(rows, [int(0.8 * len(rows))])
    return (
        DataLoader(TensorDataset(x[train], y[train]), batch_size=batch_size, shuffle=True),
        DataLoader(TensorDataset(x[validation], y[validation]), batch_size=256),
    )


def load_test_data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """The server's samples."""
    x, y = digits()
    return DataLoader(TensorDataset(x[:SERVER], y[:SERVER]), batch_size=256)


def train(
    model: nn.Module, data: DataLoader[tuple[torch.Tensor, ...]], epochs: int, rate: float
) -> float:
    """Train by SGD; the mean loss on the way."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    model.train()
    total, batches = 0.0, 0
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total, batches = total + loss.item(), batches + 1
    return total / batches


@torch.inference_mode()
def test(model: nn.Module, data: DataLoader[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    """(loss, accuracy)"""
    model.eval()
    loss, correct, samples = 0.0, 0, 0
    for x, y in data:
        scores = model(x)
        loss += F.cross_entropy(scores, y, reduction="sum").item()
        correct += int((scores.argmax(1) == y).sum())
        samples += len(y)
    return loss / samples, correct / samples
