"""The federation's machinery in one process: every client's data, the model, training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcor.data import Dataset
from fedcor.engine.models import ModelVector
from fedcor.engine.stacked import StackedTrainer, dense_stack
from fedcor.engine.train import Assignment, LocalTraining, LoopTrainer, Trainer
from fedcor.errors import FedcorError
from fedcor.rng import stream
from fedcor.types import FloatArray, IntArray, Population

__all__ = ["Engine", "Scores", "trainer_for"]

# Rows a forward pass takes at once: large enough to run at matrix-product speed, small enough to stay in the cache,
# where a row's feature maps weigh far more than a row of a dense layer.
_DENSE_ROWS, _CONVOLUTION_ROWS = 1000, 100
_TOGETHER = 8  # clients trained at once, at most: the weights of more leave the cache (a result does not depend on it)


def trainer_for(module: nn.Module, vector: ModelVector, largest: int) -> Trainer:
    """The faster of the two paths for this module's structure (see train.py); `largest` is the size of the largest client."""
    layers = dense_stack(module)
    return (
        LoopTrainer(module, vector) if layers is None else StackedTrainer(layers, vector, largest)
    )


@dataclass(frozen=True)
class Scores:
    accuracy: float
    loss: float


class Engine:
    """Trains and evaluates models given as flat vectors; holds no round, no choice and no model of its own.

    The training data is laid out client by client, so a client's rows are contiguous and all clients' losses are one pass.
    """

    def __init__(
        self,
        data: Dataset,
        parts: Sequence[IntArray],
        module: nn.Module,
        how: LocalTraining,
        seed: int,
        *,
        holdout: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self.how, self.seed, self.device = how, seed, torch.device(device)
        self.module = module.to(self.device)
        self.vector = ModelVector(module)
        self.initial_model = self.vector.read(module)  # (P,)
        self._convolutional = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
        if self._convolutional:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parts = [self._held_out_last(k, part) for k, part in enumerate(parts)]
        sizes = np.array([len(part) for part in parts])
        held = np.floor(holdout * sizes).astype(np.int64)
        ends = np.cumsum(sizes)
        self._rows = [
            np.arange(end - size, end - h) for end, size, h in zip(ends, sizes, held, strict=True)
        ]
        # The loss of a client is taken over all of its data, or over the held-out part where there is one.
        self._measured = [
            torch.arange(end - (h or size), end)
            for end, size, h in zip(ends, sizes, held, strict=True)
        ]
        self._train = trainer_for(self.module, self.vector, int(sizes.max()))
        self.population = Population(np.array([len(rows) for rows in self._rows]))
        order = torch.from_numpy(np.concatenate(parts))
        self._x, self._y = (
            self._images(torch.from_numpy(data.train_x)[order]),
            self._labels(data.train_y)[order],
        )
        self._test_x, self._test_y = (
            self._images(torch.from_numpy(data.test_x)),
            self._labels(data.test_y),
        )

    def _held_out_last(self, client: int, part: IntArray) -> IntArray:
        return stream(self.seed, "holdout", client).permutation(part)

    def _images(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        return (
            x.contiguous(memory_format=torch.channels_last)
            if self._convolutional and x.dim() == 4
            else x
        )

    def _labels(self, y: IntArray) -> Tensor:
        return torch.from_numpy(y).to(self.device)

    @property
    def model_bytes(self) -> int:
        """What one model weighs on the wire."""
        return 4 * self.vector.size

    def train(
        self,
        model: Tensor,
        clients: Sequence[int],
        round: int,
        learning_rate: float,
        steps: Sequence[int] | None = None,
    ) -> Tensor:
        """(len(clients), P): each client's model after its local training from `model`."""
        how = replace(self.how, learning_rate=learning_rate)
        steps = [how.local_steps] * len(clients) if steps is None else steps
        results = torch.empty(len(clients), self.vector.size, device=self.device)
        for count in sorted(set(steps)):  # those with equally many steps train together
            same = [i for i, s in enumerate(steps) if s == count]
            together = _TOGETHER if self.device.type == "cpu" else len(same)
            for group in (same[i : i + together] for i in range(0, len(same), together)):
                work = [
                    Assignment(clients[i], round, self.seed, self._rows[clients[i]], count)
                    for i in group
                ]
                results[group] = self._train(model, work, self._x, self._y, how)
        return results

    def losses(self, model: Tensor, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k of each client: one pass over the data of all of them in large batches."""
        return self._by_client(model, clients)[0]

    def accuracies(self, model: Tensor, clients: IntArray) -> FloatArray:
        """(len(clients),) share of each client's own data that `model` gets right."""
        return self._by_client(model, clients)[1]

    def _by_client(self, model: Tensor, clients: IntArray) -> tuple[FloatArray, FloatArray]:
        """Mean loss and mean correctness over each client's data."""
        if not len(clients):
            return np.empty(0), np.empty(0)
        measured = [self._measured[k] for k in clients]
        sizes = np.array([len(rows) for rows in measured])
        starts = np.cumsum(sizes) - sizes
        whole = len(clients) == len(self._measured) and int(sizes.sum()) == len(self._x)
        if whole and np.array_equal(clients, np.arange(len(clients))):
            x, y = self._x, self._y
        else:
            rows = torch.cat(measured).to(self.device)
            x, y = self._x[rows], self._y[rows]
        losses, correct = (
            np.add.reduceat(per_sample.double().cpu().numpy(), starts) / sizes
            for per_sample in self._forward(model, x, y)
        )
        return losses, correct

    def majority_labels(self) -> IntArray:
        """(N,) the label that each client holds most of."""
        return np.array(
            [
                int(torch.bincount(self._y[rows]).argmax())
                for rows in map(torch.from_numpy, self._rows)
            ]
        )

    def measured_rows(self, size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(client, samples, labels): all data that losses are measured on, client by client, at most `size` rows at once."""
        for client, rows in enumerate(self._measured):
            start, stop = int(rows[0]), int(rows[-1]) + 1  # contiguous: these are views
            for low in range(start, stop, size):
                high = min(low + size, stop)
                yield client, self._x[low:high], self._y[low:high]

    def test(self, model: Tensor) -> Scores:
        """Accuracy and loss on the test data."""
        losses, correct = self._forward(model, self._test_x, self._test_y)
        return Scores(float(correct.double().mean()), float(losses.double().mean()))

    @torch.inference_mode()
    def _forward(self, model: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) loss and (n,) correctness of every sample."""
        self.vector.write(self.module, model)
        self.module.eval()
        losses, correct = [], []
        rows = _CONVOLUTION_ROWS if self._convolutional else _DENSE_ROWS
        for start in range(0, len(x), rows):
            labels = y[start : start + rows]
            try:
                scores = self.module(x[start : start + rows])
            except Exception as error:  # a user's module may fail on any batch
                raise FedcorError(
                    f"the model failed while it was evaluated: {type(error).__name__}: {error}"
                ) from error
            losses.append(F.cross_entropy(scores, labels, reduction="none"))
            correct.append(scores.argmax(dim=1) == labels)
        return torch.cat(losses), torch.cat(correct)
