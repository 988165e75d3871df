"""Local training of several clients at once, for models of dense layers, with gradients by hand.

Notation (layer i of L, C clients, mini-batches of B rows)
    W_i, b_i  weights and bias, one copy per client                 (C, out, in), (C, 1, out)
    a_i       input of layer i; a_1 is the data                     (C, B, in)
    h_i       a_i W_i' + b_i                                        (C, B, out)
    g_i       mask_i * [h_i > 0]: dropout and ReLU in one factor    (C, B, out)
    d_i       d loss / d h_i                                        (C, B, out)
    q         weight of each row in the loss: 1 / batch size        (C, B, 1)

    a_{i+1} = h_i g_i,   d_L = (softmax(h_L) - onehot) q,   d_i = (d_{i+1} W_{i+1}) g_i
    W_i <- (1 - eta (lambda + mu)) W_i + eta mu W_i^0 - eta d_i' a_i    one fused product per layer
           - eta e_i        where the client's correction e is given

Dropout before or after the ReLU is the same: relu(h m) = relu(h) m for a mask m >= 0. A short batch
is filled up to B rows with rows of weight 0. So neither the shapes nor a client's result depend on
which clients train together, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedcor.simulation.engine.models import Batch, ClientDropout, ModelVector, mask_scale
from fedcor.simulation.engine.train import Assignment, LocalTraining


@dataclass(frozen=True)
class DenseLayer:
    """A Linear layer with what follows it.

    Attributes:
        dropout: Probability of dropout after the Linear; 0 for none.
        relu: Whether a ReLU follows.
        width: Number of outputs.
    """

    dropout: float
    relu: bool
    width: int


def dense_stack(module: nn.Module) -> list[DenseLayer] | None:
    """The layers of `module` if it can be trained stacked, else None.

    It must be a Sequential of Linear layers with bias, each but the last followed by a ReLU and
    perhaps dropout, without hooks, frozen parameters or layers that are used twice.
    """
    if type(module) is not nn.Sequential or any(_is_customised(m) for m in module.modules()):
        return None
    layers: list[DenseLayer] = []
    for child in module:
        if isinstance(child, nn.Flatten) and not layers:
            continue
        last = layers[-1] if layers else None
        if type(child) is nn.Linear and child.bias is not None and (last is None or last.relu):
            layers.append(DenseLayer(0.0, False, child.out_features))
        elif type(child) is ClientDropout and last is not None and not last.dropout:
            layers[-1] = replace(last, dropout=child.p)
        elif type(child) is nn.ReLU and last is not None and not last.relu:
            layers[-1] = replace(last, relu=True)
        else:
            return None
    if not layers or layers[-1].relu or layers[-1].dropout:
        return None
    if any(layer.dropout >= 1 for layer in layers):
        return None
    if 2 * len(layers) != len(list(module.parameters())):  # a layer is used twice
        return None
    return layers


def _is_customised(layer: nn.Module) -> bool:
    """Whether a layer has frozen parameters or hooks, which only the general trainer respects."""
    frozen = any(not parameter.requires_grad for parameter in layer.parameters())
    return frozen or bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


class StackedTrainer:
    """Trains all clients at once (a `Trainer`), for the layers that `dense_stack` found.

    Args:
        layers: The layers of the model.
        vector: Where their parameters are in a flat model.
        largest_client: Samples of the largest client. No batch has more rows than that.
    """

    def __init__(self, layers: list[DenseLayer], vector: ModelVector, largest_client: int) -> None:
        self.layers, self.vector, self.largest_client = layers, vector, largest_client

    @torch.no_grad()
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
        assert isinstance(x, Tensor), "trainer_for sees to it"
        x = x.flatten(1)
        eta, mu = training.learning_rate, training.proximal
        decay = 1.0 - eta * (training.weight_decay + mu)
        C, B = len(work), min(training.batch_size, self.largest_client)
        rows, q = self._batches(work, training.batch_size, B)
        masks = [mask.to(x.device) for mask in self._masks(work, q)]
        rows, q = rows.to(x.device), q.to(x.device)
        steps, classes = len(rows), self.layers[-1].width
        onehot = torch.zeros(rows.numel(), classes, dtype=x.dtype, device=x.device)
        onehot = onehot.scatter_(1, y[rows].view(-1, 1), 1.0).view(steps, C, B, classes)
        tensors = [t.expand(C, *t.shape).clone() for t in self.vector.split(model)]
        W, b = tensors[0::2], [bias.unsqueeze(1) for bias in tensors[1::2]]
        W_T = [Wi.transpose(1, 2) for Wi in W]  # views: they follow every update
        anchors = [(Wi.clone(), bi.clone()) for Wi, bi in zip(W, b, strict=True)] if mu else []
        e = [] if corrections is None else self.vector.split(corrections)
        # Written anew in every step, since new memory costs more than the arithmetic of a layer.
        data = x.new_empty(C * B, x.shape[1])
        h = [x.new_empty(C, B, layer.width) for layer in self.layers]
        g = [torch.empty_like(hi) for hi in h[:-1]]
        a = [data.view(C, B, -1), *h[:-1]]
        per_step = zip(rows, zip(*masks, strict=True), onehot, q, strict=True)
        for step_rows, mask, labels, weights in per_step:
            # Forward
            torch.index_select(x, 0, step_rows, out=data)
            for i, layer in enumerate(self.layers):
                torch.baddbmm(b[i], a[i], W_T[i], out=h[i])
                if layer.relu:
                    torch.gt(h[i], 0.0, out=g[i])
                    if layer.dropout:
                        g[i].mul_(mask[i])
                    h[i].mul_(g[i])
            # Backward and update
            d = torch.softmax(h[-1], dim=-1).sub_(labels).mul_(weights)
            for i in reversed(range(len(self.layers))):
                d_before = torch.bmm(d, W[i]).mul_(g[i - 1]) if i else d
                W[i].baddbmm_(d.transpose(1, 2), a[i], beta=decay, alpha=-eta)
                b[i].mul_(decay).sub_(d.sum(dim=1, keepdim=True), alpha=eta)
                if anchors:
                    W[i].add_(anchors[i][0], alpha=eta * mu)
                    b[i].add_(anchors[i][1], alpha=eta * mu)
                if e:
                    W[i].add_(e[2 * i], alpha=-eta)
                    b[i].add_(e[2 * i + 1].unsqueeze(1), alpha=-eta)
                d = d_before
        parts = [t.reshape(C, -1) for pair in zip(W, b, strict=True) for t in pair]
        return torch.cat(parts, dim=1)

    @staticmethod
    def _batches(work: list[Assignment], batch_size: int, B: int) -> tuple[Tensor, Tensor]:
        """The row numbers of every step, (steps, C * B), and their weights q, (steps, C, B, 1)."""
        C, steps = len(work), work[0].steps
        rows = np.empty((steps, C, B), dtype=np.int64)
        q = np.zeros((steps, C, B, 1), dtype=np.float32)
        for c, assignment in enumerate(work):
            for step, batch in enumerate(assignment.batches(batch_size)):
                n = len(batch)
                rows[step, c, :n] = batch
                rows[step, c, n:] = batch[0]  # any row: its weight is 0
                q[step, c, :n] = 1.0 / n
        return torch.from_numpy(rows.reshape(steps, -1)), torch.from_numpy(q)

    def _masks(self, work: list[Assignment], q: Tensor) -> list[Tensor]:
        """The dropout masks of each layer, (steps, C, B, width); width 0 without dropout.

        Each client draws from its own stream, for its true rows alone, step by step and layer by
        layer, as the reference implementation does. One call draws all numbers of a client, which
        gives the same numbers as many calls.
        """
        steps, C, B, _ = q.shape
        widths = [layer.width if layer.dropout else 0 for layer in self.layers]
        masks = [np.zeros((steps, C, B, width), dtype=np.float32) for width in widths]
        dropping = [(i, layer) for i, layer in enumerate(self.layers) if layer.dropout]
        true_rows = np.count_nonzero(q.numpy()[..., 0], axis=2)  # (steps, C)
        for c, assignment in enumerate(work):
            total = int(true_rows[:, c].sum()) * sum(widths)
            draws = assignment.dropout_stream().random(total, dtype=np.float32)
            start = 0
            for step, n in enumerate(true_rows[:, c].tolist()):
                for i, layer in dropping:
                    stop = start + n * layer.width
                    masks[i][step, c, :n] = draws[start:stop].reshape(n, layer.width)
                    start = stop
        for i, layer in dropping:  # a draw below p, and the 0 of a row of weight 0, becomes 0
            np.greater_equal(masks[i], layer.dropout, out=masks[i], casting="unsafe")
            masks[i] *= mask_scale(layer.dropout)
        return [torch.from_numpy(mask) for mask in masks]
