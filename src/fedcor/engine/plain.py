"""The plain twin: one client after another, autograd and torch.optim.SGD, nothing clever.

Nothing in the product runs it. The tests hold the fast paths equal to it, and the benchmarks measure them against it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcor.engine.models import ClientDropout, ModelVector
from fedcor.engine.train import Assignment, LocalTraining
from fedcor.rng import stream_seed

__all__ = ["train_plainly"]


def train_plainly(
    module: nn.Module,
    model: Tensor,
    work: list[Assignment],
    x: Tensor,
    y: Tensor,
    how: LocalTraining,
) -> Tensor:
    """(len(work), P), as every Trainer."""
    vector = ModelVector(module)
    results = []
    for assignment in work:
        local = copy.deepcopy(module).train()
        vector.write(local, model)
        anchor = [p.detach().clone() for p in local.parameters()]
        optimiser = torch.optim.SGD(
            local.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay
        )
        masks = assignment.dropout_stream()
        for layer in local.modules():
            if isinstance(layer, ClientDropout):
                layer.stream = masks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(
                stream_seed(assignment.seed, "torch", assignment.round, assignment.client)
            )
            for rows in map(torch.from_numpy, assignment.batches(how.batch_size)):
                optimiser.zero_grad()
                loss = F.cross_entropy(local(x[rows]), y[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                if how.proximal:  # FedProx: the gradient of mu/2 |w - w^t|^2, the norm squared
                    for p, a in zip(local.parameters(), anchor, strict=True):
                        if p.grad is not None:
                            distance = 0.5 * how.proximal * ((p - a) ** 2).sum()
                            p.grad += torch.autograd.grad(distance, p)[0]
                optimiser.step()
        results.append(vector.read(local))
    return torch.stack(results)
