"""Local training of all chosen clients at once, for models made of dense layers, with the gradient derived by hand.

Notation (layer i of L, client c, mini-batch of B rows)
    W_i, b_i  weights and bias, one copy a client                (C, out, in), (C, 1, out)
    a_i       input of layer i; a_1 is the data                  (C, B, in)
    h_i       a_i W_i' + b_i                                     (C, B, out)
    g_i       mask_i * [h_i > 0]: dropout and ReLU in one factor (C, B, out)
    d_i       d loss / d h_i                                     (C, B, out)

    a_{i+1} = h_i g_i,   d_L = (softmax(h_L) - onehot) / batch size,   d_i = (d_{i+1} W_{i+1}) g_i
    W_i <- (1 - eta (lambda + mu)) W_i + eta mu W_i^0 - eta d_i' a_i          one fused product a layer

Dropout before or after the ReLU is the same thing: relu(h m) = relu(h) m for a mask m >= 0. A short batch is filled up to B
rows that weigh nothing, so all shapes are the same whoever trains together, and so is every client's result, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedcor.engine.models import ClientDropout, ModelVector, mask_scale
from fedcor.engine.train import Assignment, LocalTraining

__all__ = ["DenseLayer", "StackedTrainer", "dense_stack"]


@dataclass(frozen=True)
class DenseLayer:
    dropout: float
    relu: bool
    width: int


def dense_stack(module: nn.Module) -> list[DenseLayer] | None:
    """The layers of a Sequential of Linear, each but the last followed by a ReLU and perhaps dropout; None if it is not one."""
    if type(module) is not nn.Sequential or any(_touched(layer) for layer in module.modules()):
        return None
    layers: list[DenseLayer] = []
    for child in module:
        if isinstance(child, nn.Flatten) and not layers:
            continue
        last = layers[-1] if layers else None
        if type(child) is nn.Linear and child.bias is not None and (last is None or last.relu):
            layers.append(DenseLayer(0.0, False, child.out_features))
        elif type(child) is ClientDropout and last is not None and not last.dropout:
            layers[-1] = DenseLayer(child.p, last.relu, last.width)
        elif type(child) is nn.ReLU and last is not None and not last.relu:
            layers[-1] = DenseLayer(last.dropout, True, last.width)
        else:
            return None
    if 2 * len(layers) != len(list(module.parameters())):  # a layer that is used twice
        return None
    if (
        not layers
        or layers[-1].relu
        or layers[-1].dropout
        or any(layer.dropout >= 1 for layer in layers)
    ):
        return None
    return layers


def _touched(layer: nn.Module) -> bool:
    """Frozen parameters and hooks are a user's own business: the general path honours them."""
    frozen = any(not parameter.requires_grad for parameter in layer.parameters())
    return frozen or bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


class StackedTrainer:
    """See the module's text."""

    def __init__(self, layers: list[DenseLayer], vector: ModelVector, largest: int) -> None:
        self.layers, self.vector = layers, vector
        self.largest = largest  # samples of the largest client: no batch has more rows than that

    @torch.no_grad()
    def __call__(
        self, model: Tensor, work: list[Assignment], x: Tensor, y: Tensor, how: LocalTraining
    ) -> Tensor:
        x = x.flatten(1)
        C, B, steps = len(work), min(how.batch_size, self.largest), work[0].steps
        rows, share = self._batches(work, how.batch_size, B)  # (steps, C * B), (steps, C, B, 1)
        masks = [
            mask.to(x.device) for mask in self._masks(work, share)
        ]  # (steps, C, B, width), of layers with dropout
        rows, share = rows.to(x.device), share.to(x.device)
        tensors = [t.expand(C, *t.shape).clone() for t in self.vector.split(model)]
        W, b = tensors[0::2], [bias.unsqueeze(1) for bias in tensors[1::2]]
        anchors = (
            [(Wi.clone(), bi.clone()) for Wi, bi in zip(W, b, strict=True)] if how.proximal else []
        )
        eta = how.learning_rate
        decay = 1.0 - eta * (how.weight_decay + how.proximal)
        classes = self.layers[-1].width
        onehot = (
            torch.nn.functional.one_hot(y[rows], classes).to(x.dtype).view(steps, C, B, classes)
        )
        for step in range(steps):
            a = [x.index_select(0, rows[step]).view(C, B, -1)]
            g = []
            for i, layer in enumerate(self.layers):
                h = torch.baddbmm(b[i], a[i], W[i].transpose(1, 2))
                if not layer.relu:
                    break
                factor = (h > 0).to(h.dtype)
                if layer.dropout:
                    factor *= masks[i][step]
                g.append(factor)
                a.append(h.mul_(factor))
            d = torch.softmax(h, dim=-1).sub_(onehot[step]).mul_(share[step])
            for i in reversed(range(len(self.layers))):
                d_before = torch.bmm(d, W[i]).mul_(g[i - 1]) if i else d
                W[i].baddbmm_(d.transpose(1, 2), a[i], beta=decay, alpha=-eta)
                b[i].mul_(decay).sub_(d.sum(dim=1, keepdim=True), alpha=eta)
                if anchors:
                    W[i].add_(anchors[i][0], alpha=eta * how.proximal)
                    b[i].add_(anchors[i][1], alpha=eta * how.proximal)
                d = d_before
        parts = [t.reshape(C, -1) for pair in zip(W, b, strict=True) for t in pair]
        return torch.cat(parts, dim=1)

    @staticmethod
    def _batches(work: list[Assignment], batch_size: int, B: int) -> tuple[Tensor, Tensor]:
        """Every step's rows, short batches filled up with a row of theirs, and each row's share of its batch."""
        steps = work[0].steps
        rows = np.empty((steps, len(work), B), dtype=np.int64)
        share = np.zeros((steps, len(work), B, 1), dtype=np.float32)
        for c, assignment in enumerate(work):
            for step, batch in enumerate(assignment.batches(batch_size)):
                n = len(batch)
                rows[step, c, :n] = batch
                rows[step, c, n:] = batch[0]
                share[step, c, :n] = 1.0 / n
        return torch.from_numpy(rows.reshape(steps, -1)), torch.from_numpy(share)

    def _masks(self, work: list[Assignment], share: Tensor) -> list[Tensor]:
        """A layer's masks for every step, (steps, C, B, width), empty without dropout.

        Each client draws from its own stream, for its true rows alone, step by step and layer by layer as the plain loop does;
        the draws of a round come in one call, which gives the same numbers.
        """
        steps, C, B, _ = share.shape
        masks = [
            np.zeros((steps, C, B, layer.width if layer.dropout else 0), dtype=np.float32)
            for layer in self.layers
        ]
        dropped = [
            (i, layer.width, layer.dropout) for i, layer in enumerate(self.layers) if layer.dropout
        ]
        true_rows = np.count_nonzero(share.numpy()[..., 0], axis=2)  # (steps, C)
        for c, assignment in enumerate(work):
            draws = assignment.dropout_stream().random(
                int(true_rows[:, c].sum()) * sum(width for _, width, _ in dropped), dtype=np.float32
            )
            start = 0
            for step, n in enumerate(true_rows[:, c].tolist()):
                for i, width, p in dropped:
                    stop = start + n * width
                    np.greater_equal(
                        draws[start:stop].reshape(n, width),
                        p,
                        out=masks[i][step, c, :n],
                        casting="unsafe",
                    )
                    start = stop
        for i, _, p in dropped:
            masks[i] *= mask_scale(p)
        return [torch.from_numpy(mask) for mask in masks]
