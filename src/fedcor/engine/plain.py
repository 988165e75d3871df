"""The reference implementation of local training: one client after another, torch.optim.SGD.

It is written to be obviously right, not fast, and the package never runs it. Tests compare the fast
trainers with it, and benchmarks measure them against it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcor.engine.batch import Batch, outputs_of, rows_of
from fedcor.engine.models import ClientDropout, ModelVector
from fedcor.engine.train import Assignment, LocalTraining
from fedcor.tasks import Task

__all__ = ["train_plainly"]


def train_plainly(
    module: nn.Module,
    model: Tensor,
    work: list[Assignment],
    x: Batch,
    y: Tensor,
    training: LocalTraining,
    task: Task | None = None,
    corrections: Tensor | None = None,
) -> Tensor:
    """(len(work), P) the flat model of each client; parameters as for `Trainer`.

    Without a task, the loss is cross entropy.
    """
    vector = ModelVector(module)
    results = []
    for client, assignment in enumerate(work):
        local = copy.deepcopy(module).train()
        vector.write(local, model)
        anchors = [p.detach().clone() for p in local.parameters()]
        optimiser = torch.optim.SGD(
            local.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay
        )
        masks = assignment.dropout_stream()
        for layer in local.modules():
            if isinstance(layer, ClientDropout):
                layer.stream = masks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(assignment.torch_seed())
            for rows in map(torch.from_numpy, assignment.batches(training.batch_size)):
                optimiser.zero_grad()
                outputs, targets = outputs_of(local(rows_of(x, rows))), y[rows]
                if task is None:
                    loss = F.cross_entropy(outputs, targets)
                else:
                    loss = task.losses(outputs, targets).mean()
                loss.backward()  # type: ignore[no-untyped-call]
                if training.proximal:  # FedProx: the gradient of mu/2 |w - w^t|^2
                    for p, anchor in zip(local.parameters(), anchors, strict=True):
                        if p.grad is not None:
                            distance = 0.5 * training.proximal * ((p - anchor) ** 2).sum()
                            p.grad += torch.autograd.grad(distance, p)[0]
                if corrections is not None:
                    start = 0
                    for p in local.parameters():
                        added = corrections[client, start : start + p.numel()].view(p.shape)
                        start += p.numel()
                        if p.grad is not None:
                            p.grad += added
                optimiser.step()
        results.append(vector.read(local))
    return torch.stack(results)
