"""From the clients' models to the next model: accept or refuse each update, then aggregate.

`TrainedModels` judges each update once, when it arrives. `next_model` is the step of a federated
optimiser on torch tensors.

Float buffers of a model, such as the running variance of batch normalisation, are not parameters:
a step beyond the mean could make a variance negative. So an optimiser never sees them; they become
the weighted mean of the clients' buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedcor.core.types import Array, Delivery, FloatArray, IntArray, Optimiser, State
from fedcor.rounds.aggregation import read_only, take_step
from fedcor.rounds.defence.update_norms import NormLimits
from fedcor.rounds.update_filter import UpdateFilter


class TrainedModels(UpdateFilter):
    """The models that clients sent in a round, as far as they were accepted.

    The optimiser, the selector and every candidate model are given the same models.

    Args:
        limits: How long an update may be.
        past: The lengths of updates that earlier rounds accepted; empty before the first.
        model: (P + B,) The model that the clients trained from.
        trained: P, the number of parameters.
        step_size: Learning rate x local steps of the round.
    """

    def __init__(
        self, limits: NormLimits, past: State, model: Tensor, trained: int, step_size: float
    ) -> None:
        super().__init__(limits, past, step_size)
        self._model, self._trained = model, trained
        self._results: dict[int, Tensor] = {}

    def of(self, clients: IntArray) -> Tensor:
        """(m, P + B) the models of these clients, which must have been accepted."""
        if not len(clients):
            return self._model.new_empty(0, len(self._model))
        return torch.stack([self._results[k] for k in clients.tolist()])

    def add(self, clients: Sequence[int], results: Tensor) -> None:
        """Judge the models that these clients sent, and keep the accepted ones.

        Args:
            clients: (m) Their ids.
            results: (m, P + B) Their models.
        """
        # The changes are checked, not the models: two finite numbers can be too far apart for their
        # type.
        changes = results - self._model
        rows = {client: row for row, client in enumerate(clients)}
        for client, factors in self.judge(clients, self._lengths(changes)).items():
            row = rows[client]
            clipped = client in self.clipped
            self._results[client] = (
                self._model + self._scaled(changes[row], factors) if clipped else results[row]
            )

    def _lengths(self, changes: Tensor) -> FloatArray:
        """(m, PARTS) in float64: in float32, the square of a large number is infinite."""
        changes = changes.cpu() if changes.device.type == "mps" else changes
        parts = (changes[:, : self._trained], changes[:, self._trained :])
        lengths = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
        return torch.stack(lengths, dim=1).cpu().numpy()

    def _scaled(self, change: Tensor, factors: FloatArray) -> Tensor:
        parameters, buffers = change[: self._trained], change[self._trained :]
        return torch.cat([parameters * float(factors[0]), buffers * float(factors[1])])


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
