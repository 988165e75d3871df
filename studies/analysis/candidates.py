"""The loss changes of many selections at once: the paper measures a thousand of them per round.

A selection's candidate model is the mean of its clients' trained models, so every client trains
only once. For a model of dense layers, the first layer of a candidate, applied to the data, is the
mean of its clients' first layers applied to the data.

Notation
    W_k, b_k  first layer of client k's trained model   (h, in), (h,)
    H_k       X W_k' + b_k, for rows X of the data      (rows, h)
    S         selections                                (m, C)
    H(S)      mean of H_k over k in S                   (rows, h)

So the large product with the data is computed once per client and not once per selection; a
selection costs C additions and its small later layers. Any other model is evaluated candidate by
candidate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcor.core.types import FloatArray, IntArray
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.stacked import dense_stack

# Rows of data at a time: few enough that H_k of all clients stays in the processor's cache.
_ROWS = 64


def loss_changes(
    engine: Engine,
    model: Tensor,
    round: int,
    learning_rate: float,
    selections: IntArray,
    on_progress: Callable[[int], None] | None = None,
) -> FloatArray:
    """The change of every client's loss for each of many selections.

    Args:
        engine: Holds the clients' data and trains them.
        model: `(P,)` the flat model from which the selections train, w^t.
        round: The round whose random streams the training uses.
        learning_rate: Of the local training in this round.
        selections: `(m, C)` ids of the clients of each selection.
        on_progress: Called with the number of selections done, where they are evaluated one by one.

    Returns:
        `(m, N)` loss of each client under each selection's candidate, less its loss under `model`.
    """
    clients = np.arange(engine.population.count)
    results = engine.train(model, clients.tolist(), round, learning_rate)  # (N, P)
    before = engine.losses(model, clients)
    layers = dense_stack(engine.module)
    if engine.trains_stacked and layers is not None and len(layers) > 1:
        return _candidate_losses(engine, results, selections) - before
    after = []
    for selection in selections:
        after.append(engine.losses(results[selection].mean(dim=0), clients))
        if on_progress is not None:
            on_progress(len(after))
    return np.array(after) - before


@torch.inference_mode()
def _candidate_losses(engine: Engine, results: Tensor, selections: IntArray) -> FloatArray:
    """(m, N) every client's loss under each candidate, for a model of dense layers."""
    S = torch.from_numpy(selections).to(results.device)  # (m, C)
    first, bias, *rest = engine.vector.split(results)  # (N, h, in), (N, h)
    W = first.reshape(-1, first.shape[-1])  # (N h, in)
    # The later layers are small: their mean is taken per candidate.
    later = [F.embedding_bag(S, part.reshape(len(part), -1), mode="mean") for part in rest]
    shapes = [part.shape[1:] for part in rest]
    layers = [
        (w.view(len(S), *shape), b.unsqueeze(-1))  # (m, out, in), (m, out, 1)
        for w, b, shape in zip(later[0::2], later[1::2], shapes[0::2], strict=True)
    ]
    sums = torch.zeros(len(S), engine.population.count, dtype=torch.float64, device=results.device)
    counts = np.zeros(engine.population.count)
    for client, x, y in engine.measured_rows(_ROWS):
        assert isinstance(x, Tensor), "dense layers take a tensor"
        H = torch.addmm(bias.reshape(-1, 1), W, x.flatten(1).T).view(len(first), -1)  # (N, h rows)
        # (m, h, rows)
        a = F.embedding_bag(S, H, mode="mean").view(len(S), first.shape[1], len(x)).relu_()
        for i, (w, b) in enumerate(layers):
            a = torch.baddbmm(b, w, a)  # (m, out, rows)
            if i < len(layers) - 1:
                a.relu_()
        right = a.gather(1, y.expand(len(S), 1, len(y))).squeeze(1)
        sums[:, client] += (torch.logsumexp(a, dim=1) - right).sum(dim=1, dtype=torch.float64)
        counts[client] += len(x)
    means: FloatArray = sums.cpu().numpy() / counts
    return means
