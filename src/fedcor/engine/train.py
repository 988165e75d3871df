"""Local training of many clients from one model: the schedule of mini-batches, and the loop that suits any module.

Which path trains a model is decided by its structure, once (`trainer_for` in engine.py):
    stacked   a Sequential of Linear, Dropout and ReLU: all clients at once, gradients by hand (see stacked.py)
    loop      anything else, client by client; with convolutions in channels-last layout, which is faster
              on a CPU than the default layout and than vmap (docs/speed.md)
Both are held equal to the plain loop in plain.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcor.engine.models import ClientDropout, ModelVector
from fedcor.errors import FedcorError
from fedcor.rng import stream, stream_seed
from fedcor.types import IntArray

__all__ = ["Assignment", "LocalTraining", "LoopTrainer", "Trainer", "schedule"]


@dataclass(frozen=True)
class LocalTraining:
    """What a client does with the model it receives: `local_steps` mini-batches of SGD."""

    batch_size: int
    local_steps: int
    learning_rate: float
    weight_decay: float = 0.0
    proximal: float = 0.0  # FedProx's mu


@dataclass(frozen=True)
class Assignment:
    """One client's work in one round: its rows of the training data, and the streams that are its own."""

    client: int
    round: int
    seed: int
    rows: IntArray  # (n_k,) rows of the training data
    steps: int

    def batches(self, size: int) -> list[IntArray]:
        """`steps` mini-batches of rows."""
        positions = schedule(
            stream(self.seed, "shuffle", self.round, self.client), len(self.rows), size, self.steps
        )
        return [self.rows[batch] for batch in positions]

    def dropout_stream(self) -> np.random.Generator:
        return stream(self.seed, "dropout", self.round, self.client)


def schedule(rng: np.random.Generator, n: int, size: int, steps: int) -> list[IntArray]:
    """Pass over n shuffled samples in batches of `size` (the last of a pass may be smaller), reshuffle when it ends."""
    batches: list[IntArray] = []
    while len(batches) < steps:
        order = rng.permutation(n)
        batches += [order[start : start + size] for start in range(0, n, size)]
    return batches[:steps]


class Trainer(Protocol):
    def __call__(
        self, model: Tensor, work: list[Assignment], x: Tensor, y: Tensor, how: LocalTraining
    ) -> Tensor:
        """(len(work), P): each client's model after training from `model` on its rows of x and y."""
        ...


class LoopTrainer:
    """Client by client, for any module: autograd, and the update of all parameters in two fused calls."""

    def __init__(self, module: nn.Module, vector: ModelVector) -> None:
        self.module, self.vector = module, vector
        # Whole-number buffers (a batch normalisation's count) are not in the vector: each training begins with the first ones.
        self.counters = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
        self.dropouts = [layer for layer in module.modules() if isinstance(layer, ClientDropout)]

    def __call__(
        self, model: Tensor, work: list[Assignment], x: Tensor, y: Tensor, how: LocalTraining
    ) -> Tensor:
        self.module.train()
        results = []
        for assignment in work:
            try:
                results.append(self._train(model, assignment, x, y, how))
            except (
                RuntimeError,
                ValueError,
                TypeError,
            ) as error:  # a user's module may fail on any batch
                where = f"round {assignment.round}, client {assignment.client}"
                raise FedcorError(f"{where}: local training failed: {error}") from error
        return torch.stack(results)

    def _train(
        self, model: Tensor, assignment: Assignment, x: Tensor, y: Tensor, how: LocalTraining
    ) -> Tensor:
        self.vector.write(self.module, model)
        parameters: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        for buffer, start in self.counters:
            buffer.copy_(start)
        anchors = [p.detach().clone() for p in parameters] if how.proximal else []
        dropout = assignment.dropout_stream()
        for layer in self.dropouts:
            layer.stream = dropout
        decay = 1.0 - how.learning_rate * (how.weight_decay + how.proximal)
        with torch.random.fork_rng(
            devices=[]
        ):  # a user's functional dropout draws from torch's global stream
            torch.manual_seed(
                stream_seed(assignment.seed, "torch", assignment.round, assignment.client)
            )
            for batch in assignment.batches(how.batch_size):
                rows = torch.from_numpy(batch).to(x.device)
                loss = F.cross_entropy(self.module(x[rows]), y[rows])
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                # As in torch.optim, a parameter that the loss does not touch is left alone, decay included.
                used = [i for i, g in enumerate(gradients) if g is not None]
                touched = [parameters[i] for i in used]
                with torch.no_grad():
                    torch._foreach_mul_(touched, decay)
                    torch._foreach_add_(
                        touched, [gradients[i] for i in used], alpha=-how.learning_rate
                    )
                    if anchors:
                        pull = [anchors[i] for i in used]
                        torch._foreach_add_(touched, pull, alpha=how.learning_rate * how.proximal)
        return self.vector.read(self.module)
