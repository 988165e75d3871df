"""The step of a federated optimiser on torch tensors: from the clients' models to the next one.

Float buffers of a model, such as the running variance of batch normalisation, are not parameters:
a step beyond the mean could make a variance negative. So an optimiser never sees them; they become
the weighted mean of the clients' buffers.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from fedcor.core.types import Array, Delivery, FloatArray, IntArray, Optimiser, State
from fedcor.rounds.aggregation import read_only, take_step


def next_model(
    optimiser: Optimiser,
    state: State,
    model: Tensor,
    results: Tensor,
    trained: int,
    *,
    round: int,
    clients: IntArray,
    weights: FloatArray,
    steps: IntArray,
    learning_rate: float,
    number: int | None = None,
) -> tuple[Tensor, State]:
    """The next model and the optimiser's next state.

    Args:
        optimiser: Takes the step.
        state: Its state.
        model: (P + B,) w^t: its parameters, then its float buffers.
        results: (m, P + B) the clients' models after local training.
        trained: P, the number of parameters.
        round, clients, weights, steps, learning_rate: As in `Delivery`.
        number: What error messages call the round, where that is not `round`.
    """

    @functools.cache
    def mean() -> Tensor:  # (P + B,)
        # The mean of changes, not of models: it loses less in float32, and a client that did not
        # move leaves w^t exactly as it is.
        a = torch.as_tensor(weights, dtype=results.dtype, device=results.device)  # (m,)
        return a @ (results - model)

    def updates() -> Array:  # (m, P)
        return read_only((results[:, :trained] - model[:trained]).cpu().numpy())

    delivery = Delivery(
        round,
        parameters_of(model, trained),
        read_only(clients),
        read_only(weights),
        read_only(steps.astype(np.int64)),
        learning_rate,
        read_updates=updates,
        read_mean=lambda: parameters_of(mean(), trained),
    )
    stepped, state = take_step(optimiser, state, delivery, number)
    parameters = torch.from_numpy(stepped).to(model.device)
    if trained == len(model):
        return parameters, state
    return torch.cat([parameters, model[trained:] + mean()[trained:]]), state


def parameters_of(model: Tensor, trained: int) -> Array:
    """(P,) the parameters of a flat model, as an optimiser sees them: NumPy, read-only."""
    return read_only(model[:trained].cpu().numpy())
