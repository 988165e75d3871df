"""A round of a user's own module, a small recurrent network, which is trained client by client."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from benchmarks.measure import Result, best, check
from benchmarks.plain_training import train_plainly
from fedcor.data.datasets import Dataset
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import build_model
from fedcor.simulation.engine.train import Assignment, LocalTraining

LENGTH, FEATURES, CLASSES = 28, 28, 10


class Recurrent(nn.Module):
    """A GRU over the rows of an image, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 32, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


def results(quick: bool) -> list[Result]:
    """Rows of the table."""
    clients, samples, steps = 5, 100, 2 if quick else 10
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * samples, LENGTH, FEATURES)).astype(np.float32)
    y = rng.integers(CLASSES, size=len(x))
    data = Dataset(
        name="invented", train_x=x, train_y=y, test_x=x[:50], test_y=y[:50], classes=CLASSES
    )
    training = LocalTraining(50, steps, 0.1)
    module = build_model(Recurrent, x.shape[1:], CLASSES, 1)
    engine = Engine(data, np.split(np.arange(len(x)), clients), module, training, 1)
    xs, ys, rows = engine.store.training(range(clients))
    work = [Assignment(k, 0, 1, rows[k], steps) for k in range(clients)]
    start = engine.initial_model

    def ours() -> Tensor:
        return engine.train(start, range(clients), 0, 0.1)

    def plain() -> Tensor:
        return train_plainly(engine.module, start, work, xs, ys, training=training)

    check("GRU", ours(), plain(), 1e-4)
    fast, slow = best(1 if quick else 8, ours, plain)
    return [
        Result(
            "GRU of a user, plain PyTorch loop / ours",
            slow / fast,
            "about 1: client by client, too",
            f"{slow * 1e3:.0f} against {fast * 1e3:.0f} ms for {clients} clients x {steps} batches",
        )
    ]
