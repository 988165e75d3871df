"""The reference implementation of local training, which is obviously right, but slow.

Benchmarks measure the trainers of `fedcor.simulation.engine` against it, and tests compare them.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcor.simulation.engine.models import Batch, ClientDropout, ModelVector, outputs_of, rows_of
from fedcor.simulation.engine.train import Assignment, LocalTraining
from fedcor.simulation.tasks import Task


def train_plainly(
    module: nn.Module,
    model: Tensor,
    work: list[Assignment],
    x: Batch,
    y: Tensor,
    *,
    training: LocalTraining,
    task: Task | None = None,
    corrections: Tensor | None = None,
) -> Tensor:
    """Train one client after another, with torch.optim.SGD.

    Parameters are as for `fedcor.simulation.engine.train.Trainer`; without a task, the loss is
    cross entropy.

    Returns:
        (len(work), P) the flat model of each client.
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
