"""Local training of several clients from one model: settings, mini-batches, the general trainer.

    w <- w - eta (gradient + lambda w + mu (w - w^t) + e_k)     a step of client k

    LocalTraining   what every client does: batch size, steps, learning rate, ...
    Assignment      the work of one client in one round: its data and its random streams
    Trainer         trains clients from one flat model; there are two, chosen once by the structure
                    of the model, the loss and the batch (`trainer_for` in engine.py):

    StackedTrainer  (stacked.py) a Sequential of Linear, Dropout and ReLU, cross entropy, and a
                    batch that is a tensor: all clients at once, with gradients derived by hand
    LoopTrainer     (here) anything else, client by client. Convolutions are in channels-last
                    layout, which is faster on a CPU than the default layout and than vmap
                    (docs/results/speed.md)

Tests compare both with a reference implementation, `benchmarks/plain_training.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedcor.core.errors import blame
from fedcor.core.rng import stream, stream_seed
from fedcor.core.types import IntArray
from fedcor.simulation.engine.models import Batch, ClientDropout, ModelVector, outputs_of, rows_of
from fedcor.simulation.tasks import Task


@dataclass(frozen=True)
class LocalTraining:
    """What a client does with the model that it receives: mini-batch SGD on its own data.

    Args:
        batch_size: B, samples per mini-batch. The last batch of a pass may be smaller.
        local_steps: E, mini-batches per round.
        learning_rate: eta.
        weight_decay: lambda, the coefficient of L2 regularisation.
        proximal: mu, the coefficient of FedProx's proximal term; 0 for none.
    """

    batch_size: int
    local_steps: int
    learning_rate: float
    weight_decay: float = 0.0
    proximal: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """The work of one client in one round.

    Args:
        client: The client's id.
        round: The number of the round, from 0.
        seed: The seed of the run. With round and client it names the client's random streams.
        rows: (n_k,) the client's rows of the training data.
        steps: Mini-batches to train; fewer than `LocalTraining.local_steps` for a straggler.
    """

    client: int
    round: int
    seed: int
    rows: IntArray
    steps: int

    def batches(self, size: int) -> list[IntArray]:
        """The row numbers of each mini-batch, `steps` of them."""
        rng = stream(self.seed, "shuffle", self.round, self.client)
        return [self.rows[batch] for batch in schedule(rng, len(self.rows), size, self.steps)]

    def dropout_stream(self) -> np.random.Generator:
        """The random stream of this client's dropout masks in this round."""
        return stream(self.seed, "dropout", self.round, self.client)

    def torch_seed(self) -> int:
        """A seed for torch's global stream, for modules that draw from it."""
        return stream_seed(self.seed, "torch", self.round, self.client)


def schedule(rng: np.random.Generator, n: int, size: int, steps: int) -> list[IntArray]:
    """`steps` mini-batches of positions 0 .. n - 1, in passes over all n.

    Each pass is reshuffled and cut into batches of `size`, the last of which may be smaller.
    """
    batches: list[IntArray] = []
    while len(batches) < steps:
        order = rng.permutation(n)
        batches += [order[start : start + size] for start in range(0, n, size)]
    return batches[:steps]


class Trainer(Protocol):
    """Trains clients, all from the same model."""

    def __call__(
        self,
        model: Tensor,
        work: list[Assignment],
        x: Batch,
        y: Tensor,
        training: LocalTraining,
        *,
        corrections: Tensor | None = None,
    ) -> Tensor:
        """Train each client from `model` on its rows of x and y.

        Args:
            model: (P,) the flat model that all start from.
            work: One assignment per client, all with the same number of steps.
            x: The samples of all clients.
            y: Their labels or targets.
            training: Settings of the local training.
            corrections: (len(work), trained parameters) e_k, what each client adds to its gradient
                in every step; None for nothing.

        Returns:
            (len(work), P) the flat model of each client.
        """
        ...


class LoopTrainer:
    """Trains one client after another, for any module, loss and batch: autograd, fused updates.

    Args:
        module: The model.
        vector: Where its parameters are in a flat model.
        task: Has the loss.
    """

    def __init__(self, module: nn.Module, vector: ModelVector, task: Task) -> None:
        self.module, self.vector, self.task = module, vector, task
        # Buffers of whole numbers (the counter of a batch normalisation) are not in the vector.
        # Every training starts with their first values.
        self.counters = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
        self.dropouts = [layer for layer in module.modules() if isinstance(layer, ClientDropout)]

    def __call__(
        self,
        model: Tensor,
        work: list[Assignment],
        x: Batch,
        y: Tensor,
        training: LocalTraining,
        *,
        corrections: Tensor | None = None,
    ) -> Tensor:
        """(len(work), P), as for every `Trainer`."""
        self.module.train()
        results = []
        for i, assignment in enumerate(work):
            correction = None if corrections is None else corrections[i]
            where = f"round {assignment.round}, client {assignment.client}"
            with blame(f"{where}: local training failed"):
                trained = self._train(model, assignment, x, y, training, correction=correction)
                results.append(trained)
        return torch.stack(results)

    def _train(
        self,
        model: Tensor,
        assignment: Assignment,
        x: Batch,
        y: Tensor,
        training: LocalTraining,
        *,
        correction: Tensor | None,
    ) -> Tensor:
        """(P,) the model after the training of one client."""
        self.vector.write(self.module, model)
        for buffer, start in self.counters:
            buffer.copy_(start)
        dropout = assignment.dropout_stream()
        for layer in self.dropouts:
            layer.stream = dropout
        every = list(self.module.parameters())
        parameters: list[Tensor] = [p for p in every if p.requires_grad]
        split = [] if correction is None else self.vector.split(correction)
        corrections = [e for e, p in zip(split, every, strict=False) if p.requires_grad]
        anchors = [p.detach().clone() for p in parameters] if training.proximal else []
        # A user's functional dropout draws from torch's global stream, which is restored after it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(assignment.torch_seed())
            for batch in assignment.batches(training.batch_size):
                rows = torch.from_numpy(batch).to(y.device)
                outputs = outputs_of(self.module(rows_of(x, rows)))
                loss = self.task.mean_loss(outputs, y[rows])
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                _sgd_step(parameters, list(gradients), anchors, corrections, training)
        return self.vector.read(self.module)


@torch.no_grad()
def _sgd_step(
    parameters: list[Tensor],
    gradients: list[Tensor | None],
    anchors: list[Tensor],
    corrections: list[Tensor],
    training: LocalTraining,
) -> None:
    """w <- (1 - eta (lambda + mu)) w - eta gradient + eta mu w^t - eta e, in place.

    As in torch.optim, a parameter that the loss does not depend on is left alone, decay included.
    `anchors` are the parameters of w^t, empty without a proximal term; `corrections` are those of
    e, empty without one.
    """
    eta, mu = training.learning_rate, training.proximal
    used = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
    updated = [parameters[i] for i, _ in used]
    torch._foreach_mul_(updated, 1.0 - eta * (training.weight_decay + mu))
    torch._foreach_add_(updated, [gradient for _, gradient in used], alpha=-eta)
    if anchors:
        torch._foreach_add_(updated, [anchors[i] for i, _ in used], alpha=eta * mu)
    if corrections:
        torch._foreach_add_(updated, [corrections[i] for i, _ in used], alpha=-eta)
