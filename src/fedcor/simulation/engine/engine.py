"""The engine: training and evaluation of models on the data of every client, in one process.

A model is a flat vector (`ModelVector` in models.py). The engine has no rounds and makes no
choices: `fedcor.simulation` tells it which clients train from which model, and aggregates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedcor.core.errors import FedcorError, blame
from fedcor.core.types import FloatArray, IntArray, Population
from fedcor.data.client_data import ClientData
from fedcor.data.datasets import Dataset
from fedcor.simulation.engine.models import (
    Batch,
    ModelVector,
    as_batch,
    as_tensor,
    outputs_of,
    rows_of,
    size_of,
    transformed,
)
from fedcor.simulation.engine.stacked import StackedTrainer, dense_stack
from fedcor.simulation.engine.stores import HeldData, LoadedData, Store
from fedcor.simulation.engine.train import Assignment, LocalTraining, LoopTrainer, Trainer
from fedcor.simulation.tasks import Task, build_task

# Rows per forward pass in evaluation: enough to run at the speed of matrix products, few enough to
# stay in the cache. The feature maps of a convolution, and what a model makes of a text, are far
# larger than a row of a dense layer.
_DENSE_ROWS, _LARGE_ROWS = 1000, 100
# Clients trained at once on a CPU, at most: the weights of more would leave the cache. A client's
# result does not depend on it.
_CLIENTS_AT_ONCE = 8


def trainer_for(
    module: nn.Module, vector: ModelVector, largest_client: int, x: Batch, task: Task
) -> Trainer:
    """The fastest trainer for the structure of `module`, the batch and the loss (see train.py).

    Args:
        module: The model.
        vector: Where its parameters are in a flat model.
        largest_client: Samples of the largest client.
        x: The samples, or some of them.
        task: Has the loss.
    """
    layers = dense_stack(module)
    plain_batch = isinstance(x, Tensor) and x.is_floating_point()
    if layers is None or not plain_batch or not task.is_cross_entropy:
        return LoopTrainer(module, vector, task)
    return StackedTrainer(layers, vector, largest_client)


@dataclass(frozen=True)
class Scores:
    """Result of a test.

    Attributes:
        accuracy: Fraction of samples that are classified correctly; NaN where there are no classes.
        loss: Mean loss.
        metrics: The task's further metrics by name.
    """

    accuracy: float
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Engine:
    """Trains and evaluates models, given as flat vectors, on the data of the clients.

    `stores.py` holds or loads the clients' data.

    Args:
        data: Training and test data.
        clients: For each client, its rows of the training data; or clients whose data is loaded
            when it is needed, of which `data` has the test data alone.
        module: The model. Its weights are the initial model.
        local_training: Settings of the clients' training.
        seed: The seed of the run.
        holdout: Fraction of each client's data that is kept out of training. Losses are then
            measured on it, else on all of the client's data.
        device: A torch device.
        task: The loss and metrics; by default cross entropy for labels, mean squared error for
            other numbers.

    Attributes:
        population: The clients and the number of samples that each trains on.
        initial_model: (P,) the model before the first round.
        vector: Where the module's parameters are in a flat model.
        store: The clients' data.
    """

    def __init__(
        self,
        data: Dataset,
        clients: Sequence[IntArray] | ClientData,
        module: nn.Module,
        local_training: LocalTraining,
        seed: int,
        *,
        holdout: float = 0.0,
        device: str = "cpu",
        task: Task | None = None,
    ) -> None:
        self.task = build_task(classes=data.classes) if task is None else task
        self.local_training, self.seed = local_training, seed
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.vector = ModelVector(module)
        self.initial_model = self.vector.read(module)
        self._convolutional = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
        if self._convolutional:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        make = HeldData if isinstance(clients, Sequence) else LoadedData
        self.store: Store = make(data, clients, seed, holdout, self._placed)  # type: ignore[arg-type]
        self.population = Population(self.store.sizes)
        self._test_x = self._placed(as_batch(data.test_x))
        self._test_y = as_tensor(data.test_y).to(self.device)
        # Samples that are loaded later are of the type of the test data, as is the empty train_x.
        samples = as_batch(data.train_x)
        self._trainer = trainer_for(
            self.module, self.vector, self.store.largest, samples, self.task
        )
        large = self._convolutional or not isinstance(self._test_x, Tensor)
        self._rows_at_once = _LARGE_ROWS if large else _DENSE_ROWS

    def _placed(self, batch: Batch) -> Batch:
        """The samples on the device, images in the layout that is fastest there."""

        def place(x: Tensor) -> Tensor:
            x = x.to(self.device)
            if self._convolutional and x.dim() == 4:
                return x.contiguous(memory_format=torch.channels_last)
            return x

        return transformed(batch, place)

    @property
    def trains_stacked(self) -> bool:
        """Whether the model is of dense layers, for cross entropy: see stacked.py."""
        return isinstance(self._trainer, StackedTrainer)

    @property
    def model_bytes(self) -> int:
        """Size of a model in a message, in bytes."""
        return 4 * self.vector.size

    @cached_property
    def evaluation_batches(self) -> IntArray:
        """(N,) mini-batches of the data that each client's loss is measured on."""
        return -(-self.store.measured_sizes // self.local_training.batch_size)

    def train(
        self,
        model: Tensor,
        clients: Sequence[int],
        round: int,
        learning_rate: float,
        *,
        steps: Sequence[int] | None = None,
        corrections: Tensor | None = None,
    ) -> Tensor:
        """Train each of `clients` from `model` on its own data.

        Args:
            model: (P,) the flat model that all start from.
            clients: Ids of the clients.
            round: The number of the round; it names the clients' random streams.
            learning_rate: The learning rate of this round.
            steps: Mini-batches of each client; None for `local_training.local_steps` for all.
            corrections: (len(clients), trained parameters) what each client adds to its gradients;
                None for nothing.

        Returns:
            (len(clients), P) the flat model of each client.
        """
        training = replace(self.local_training, learning_rate=learning_rate)
        steps = [training.local_steps] * len(clients) if steps is None else steps
        groups = list(self._groups(steps))
        trained = []
        for group in groups:
            x, y, rows = self.store.training([clients[i] for i in group])
            work = [
                Assignment(clients[i], round, self.seed, own, steps[i])
                for i, own in zip(group, rows, strict=True)
            ]
            added = None if corrections is None else corrections[group]
            trained.append(self._trainer(model, work, x, y, training, corrections=added))
        if len(trained) == 1:
            return trained[0]  # in the order of the clients, without a copy
        results = torch.empty(len(clients), self.vector.size, device=self.device)
        for group, models in zip(groups, trained, strict=True):
            results[group] = models
        return results

    def _groups(self, steps: Sequence[int]) -> Iterator[list[int]]:
        """Which clients train at once, by position: clients with equally many steps."""
        for count in sorted(set(steps)):
            same = [i for i, s in enumerate(steps) if s == count]
            at_once = _CLIENTS_AT_ONCE if self.device.type == "cpu" else len(same)
            yield from (same[i : i + at_once] for i in range(0, len(same), at_once))

    def losses(self, model: Tensor, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(model), the mean loss over each client's data."""
        return self._by_client(model, clients)[0]

    def rms_losses(self, model: Tensor, clients: IntArray) -> FloatArray:
        """(len(clients),) root mean square of the losses of each client's samples."""
        return self._by_client(model, clients, power=2)[0] ** 0.5

    def accuracies(self, model: Tensor, clients: IntArray) -> FloatArray:
        """(len(clients),) accuracy of `model` on each client's data; NaN without classes."""
        return self._by_client(model, clients)[1]

    def _by_client(
        self, model: Tensor, clients: IntArray, power: int = 1
    ) -> tuple[FloatArray, FloatArray]:
        """Over each client's data, the mean of a power of the loss, and the accuracy.

        In one pass with large batches.
        """
        losses, accuracies = [np.empty(0)], [np.empty(0)]
        for x, y, sizes in self.store.measured(clients) if len(clients) else ():
            starts = np.cumsum(sizes) - sizes
            each, correct, _ = self._forward(model, x, y)
            for means, values in ((losses, each.double() ** power), (accuracies, correct.double())):
                means.append(np.add.reduceat(values.cpu().numpy(), starts) / sizes)
        return np.concatenate(losses), np.concatenate(accuracies)

    def majority_labels(self) -> IntArray:
        """(N,) the most frequent label of each client. Raises FedcorError without labels."""
        if self.task.classes is None:
            raise FedcorError("the targets are not labels, so no client has a most frequent one")
        found = [self.store.training([k]) for k in range(self.population.count)]
        return np.array([np.bincount(own.y[own.rows[0]].cpu()).argmax() for own in found])

    def measured_rows(self, size: int) -> Iterator[tuple[int, Batch, Tensor]]:
        """All data that losses are measured on, client by client, in blocks of at most `size` rows.

        Yields:
            The client's id, samples, and labels or targets.
        """
        for client in range(self.population.count):
            for x, y, _ in self.store.measured(np.array([client])):
                for low in range(0, len(y), size):
                    rows = slice(low, low + size)
                    yield client, rows_of(x, rows), y[rows]

    def test(self, model: Tensor) -> Scores:
        """Accuracy, loss and the task's metrics of `model` on the test data."""
        y = self._test_y
        keep = bool(self.task.metrics)
        losses, correct, outputs = self._forward(model, self._test_x, y, keep)
        metrics: dict[str, float] = {}
        if keep:
            whole = self.task.shaped(torch.cat(outputs), y)
            metrics = self.task.measure(y.cpu().numpy(), whole.cpu().numpy())
        return Scores(float(correct.double().mean()), float(losses.double().mean()), metrics)

    @torch.inference_mode()
    def _forward(
        self, model: Tensor, x: Batch, y: Tensor, keep: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(n,) loss of every sample, (n,) whether it is classified correctly, and the outputs.

        Without classes, "correct" is NaN. Outputs are returned only if asked to `keep` them.
        """
        self.vector.write(self.module, model)
        self.module.eval()
        losses, correct, kept = [], [], []
        for start in range(0, size_of(x), self._rows_at_once):
            rows = slice(start, start + self._rows_at_once)
            targets = y[rows]
            with blame("the model failed in evaluation"):
                outputs = outputs_of(self.module(rows_of(x, rows)))
                losses.append(self.task.losses(outputs, targets))
            predicted = self.task.predictions(outputs)
            correct.append(
                torch.full_like(losses[-1], torch.nan)
                if predicted is None
                else predicted == targets
            )
            if keep:
                kept.append(outputs)
        return torch.cat(losses), torch.cat(correct), kept
