"""The loss changes of many selections at once: what the paper measures a thousand times in a round.

A selection's candidate model is the mean of its clients' results, so all clients train once. For a model of dense layers, the
first layer of a candidate, applied to the data, is the mean of its clients' first layers applied to the data:

    notation   W_k  first-layer weights of client k's result           H_k = X W_k' + b_k   (rows, h)
               S    selections (m, C)                                  H(S) = mean_{k in S} H_k

so the large product with the data is made once a client and not once a selection, and a selection costs C additions there and
the small layers behind it. Any other model is evaluated candidate by candidate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcor.engine import Engine
from fedcor.engine.stacked import dense_stack
from fedcor.types import FloatArray, IntArray

__all__ = ["loss_changes"]

_ROWS = 64  # of the data at once: what all clients' first layers make of them stays in the cache


def loss_changes(
    engine: Engine,
    model: Tensor,
    round: int,
    learning_rate: float,
    selections: IntArray,  # (m, C)
    on_progress: Callable[[int], None] | None = None,
) -> FloatArray:
    """(m, N) change of every client's loss under each selection, if it trained from `model` in `round`."""
    clients = np.arange(engine.population.count)
    results = engine.train(model, clients.tolist(), round, learning_rate)  # (N, P)
    before = engine.losses(model, clients)
    layers = dense_stack(engine.module)
    if layers is not None and len(layers) > 1:
        return _of_dense_layers(engine, results, selections) - before
    after = []
    for selection in selections:
        after.append(engine.losses(results[selection].mean(dim=0), clients))
        if on_progress is not None:
            on_progress(len(after))
    return np.array(after) - before


@torch.inference_mode()
def _of_dense_layers(engine: Engine, results: Tensor, selections: IntArray) -> FloatArray:
    """(m, N) every client's loss under each candidate."""
    S = torch.from_numpy(selections).to(results.device)  # (m, C)
    first, bias, *rest = engine.vector.split(results)  # (N, h, in), (N, h)
    W = first.reshape(-1, first.shape[-1])  # (N h, in)
    # The layers behind the first are small: their mean is taken per candidate.
    later = [F.embedding_bag(S, part.reshape(len(part), -1), mode="mean") for part in rest]
    shapes = [part.shape[1:] for part in rest]
    layers = [
        (w.view(len(S), *shape), b.unsqueeze(-1))  # (m, out, in), (m, out, 1)
        for w, b, shape in zip(later[0::2], later[1::2], shapes[0::2], strict=True)
    ]
    sums = torch.zeros(len(S), engine.population.count, dtype=torch.float64, device=results.device)
    counts = np.zeros(engine.population.count)
    for client, x, y in engine.measured_rows(_ROWS):
        H = torch.addmm(bias.reshape(-1, 1), W, x.flatten(1).T).view(len(first), -1)  # (N, h rows)
        a = (
            F.embedding_bag(S, H, mode="mean").view(len(S), first.shape[1], len(x)).relu_()
        )  # (m, h, rows)
        for i, (w, b) in enumerate(layers):
            a = torch.baddbmm(b, w, a)  # (m, out, rows)
            if i < len(layers) - 1:
                a.relu_()
        right = a.gather(1, y.expand(len(S), 1, len(y))).squeeze(1)
        sums[:, client] += (torch.logsumexp(a, dim=1) - right).sum(dim=1, dtype=torch.float64)
        counts[client] += len(x)
    means: FloatArray = sums.cpu().numpy() / counts
    return means
