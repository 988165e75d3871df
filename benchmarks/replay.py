"""The rounds of a run once more, by other means of training and evaluation.

What a run did is who was chosen, the learning rate, and how often all clients' losses were asked
for. Whoever repeats that does the same work: on the same data, with the same batches and dropout
masks. That it really is the same shows in the test loss of every round.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import check
from benchmarks.plain_training import train_plainly
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import ModelVector
from fedcor.simulation.engine.train import Assignment
from fedcor.simulation.loop import Simulation


@dataclass(frozen=True)
class Round:
    """What a round of our run did.

    Attributes:
        number: Of the round, from 0.
        chosen: Clients that trained.
        evaluations: How many models all clients were asked the loss of.
        learning_rate: Of the round.
        test_loss: Of the model after it.
        seconds: Of the processor.
        clock: Seconds of the clock.
        model: (P,) what it started from.
    """

    number: int
    chosen: list[int]
    evaluations: int
    learning_rate: float
    test_loss: float
    seconds: float
    clock: float
    model: Tensor


def our_rounds(
    simulation: Simulation, rounds: int, each: Callable[[], object] | None = None
) -> list[Round]:
    """Run the simulation; `each` is called after every round, outside its time."""
    found, model = [], simulation.engine.initial_model
    clients = simulation.engine.population.count
    started = time.process_time()
    for record, state in simulation.run(rounds):
        seconds = time.process_time() - started
        found.append(
            Round(
                record.round,
                record.selected,
                round(record.probed / clients),
                record.learning_rate,
                record.test_loss,
                seconds,
                record.seconds,
                model,
            )
        )
        model = state.model
        if each is not None:
            each()
        started = time.process_time()
    return found


class Means(Protocol):
    """How a round is done."""

    def train(self, model: Tensor, round: Round) -> Tensor:
        """(P,) the mean of the models of the chosen clients."""
        ...

    def losses(self, model: Tensor) -> Sequence[float]:
        """The loss of each client."""
        ...

    def test(self, model: Tensor) -> float:
        """The loss of the test data."""
        ...


def replay(means: Means, rounds: Sequence[Round], tolerance: float = 1e-3) -> list[float]:
    """Processor seconds of each round by other means. Every test loss is held against ours."""
    seconds, model = [], rounds[0].model
    for round in rounds:
        started = time.process_time()
        model = means.train(model, round)
        for _ in range(round.evaluations):
            means.losses(model)
        loss = means.test(model)
        seconds.append(time.process_time() - started)
        check(f"round {round.number}", round.test_loss, loss, tolerance)
    return seconds


class PlainLoop:
    """A plain PyTorch loop over clients, as most would write it: autograd, torch.optim.

    Args:
        engine: Has the data. Images are laid out as they were loaded.
        module: The model, as it was built.
        seed: The seed of the run.
    """

    def __init__(self, engine: Engine, module: nn.Module, seed: int) -> None:
        self._engine, self._module, self._seed = engine, copy.deepcopy(module), seed
        self._vector = ModelVector(module)
        self.local_steps = engine.local_training.local_steps
        x, self._y, self._rows = engine.store.training(range(engine.population.count))
        self._x, self._test_x = x.contiguous(), engine._test_x.contiguous()

    def train(self, model: Tensor, round: Round) -> Tensor:
        """Client after client."""
        training = dataclasses.replace(
            self._engine.local_training, learning_rate=round.learning_rate
        )
        work = [
            Assignment(k, round.number, self._seed, self._rows[k], training.local_steps)
            for k in sorted(round.chosen)
        ]
        models = train_plainly(self._module, model, work, self._x, self._y, training=training)
        return models.mean(dim=0)

    def rows(self, client: int) -> Tensor:
        """(n_k,) the client's rows of the data."""
        return torch.from_numpy(self._rows[client])

    def loss_of(self, client: int, model: Tensor) -> float:
        """The loss of one client."""
        rows = self.rows(client)
        return self._loss(model, self._x[rows], self._y[rows])

    def losses(self, model: Tensor) -> list[float]:
        """Client after client."""
        return [self.loss_of(k, model) for k in range(self._engine.population.count)]

    def test(self, model: Tensor) -> float:
        """In batches of 500."""
        pairs = zip(self._test_x.split(500), self._engine._test_y.split(500), strict=True)
        return statistics.fmean(self._loss(model, x, y) for x, y in pairs)

    @torch.no_grad()
    def _loss(self, model: Tensor, x: Tensor, y: Tensor) -> float:
        self._vector.write(self._module, model)
        return float(F.cross_entropy(self._module.eval()(x), y))


def amortised(rounds: Sequence[Round]) -> float:
    """Mean seconds of the rounds."""
    return float(np.mean([round.seconds for round in rounds]))
