"""A fake federation of clients with quadratic losses.

Each answer is known in closed form:

    l_k(w) = h_k/2 |w - c_k|^2
    w_k = c_k + (1 - eta h_k)^E (w - c_k)       after E steps of size eta from w
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedcor.core.rng import stream
from fedcor.core.types import FloatArray, IntArray, Outcome, Population


class FakeFederation:
    """A `Federation` of invented clients that answer at once. `train` moves on to the next round.

    Args:
        centres: (N, dim) c_k, each client's optimum.
        curvature: (N,) h_k, or one number for all.
        sizes: (N,) n_k, numbers of samples; 10 each if they are not given.
        learning_rate: eta, the step size of local training.
        local_steps: E, the local steps per round.
        seed: Fixes what `rng` draws.
        available: Ids that can be asked and chosen; everyone if they are not given.
        silent: Ids that can be chosen, but never answer and never deliver.
        durations: (N,) seconds that each takes to train; without them, no time is measured.

    Attributes:
        model: (dim,) w^t, zero before the first round.
        round: t, the number of the round.
        rng: The random stream of the round.
        population: Who is in the federation.
        asked: The clients of each call of `losses`, in order.
        tried: The selection of each call of `loss_changes`, in order.
        probed: The clients that each of these calls asked, in order.

    Example:
        >>> federation = FakeFederation(np.array([[0.0], [2.0]]))
        >>> federation.losses(np.array([0, 1]))
        array([0., 2.])
        >>> outcome = federation.train(np.array([1]))
        >>> federation.model
        array([0.2])
    """

    def __init__(
        self,
        centres: FloatArray,
        *,
        curvature: FloatArray | float = 1.0,
        sizes: IntArray | None = None,
        learning_rate: float = 0.1,
        local_steps: int = 1,
        seed: int = 0,
        available: Iterable[int] | None = None,
        silent: Iterable[int] = (),
        durations: FloatArray | None = None,
    ) -> None:
        everyone = np.arange(len(centres))
        self.centres = centres
        self.curvature = np.broadcast_to(np.asarray(curvature, float), len(centres))
        self.population = Population(np.full(len(centres), 10) if sizes is None else sizes)
        self.learning_rate, self.local_steps, self.seed = learning_rate, local_steps, seed
        self.available = (
            everyone.copy() if available is None else np.sort(np.fromiter(available, np.int64))
        )
        self.answering = ~np.isin(everyone, np.fromiter(silent, np.int64))
        self.available.flags.writeable = self.weights.flags.writeable = False
        self.durations = durations
        self.model = np.zeros(centres.shape[1])
        self.round = 0
        self.rng = stream(seed, "select", 0)
        self.asked: list[IntArray] = []
        self.tried: list[IntArray] = []
        self.probed: list[IntArray] = []

    @classmethod
    def example(cls, clients: int = 12, **options: Any) -> FakeFederation:
        """Clients of unequal sizes around three centres.

        Args:
            clients: N, the number of clients.
            options: Any other arguments of `FakeFederation`.
        """
        rng = stream(clients, "example")
        groups = rng.standard_normal((3, 4))[np.arange(clients) % 3]
        centres = groups + 0.1 * rng.standard_normal((clients, 4))
        return cls(centres, sizes=rng.integers(5, 50, size=clients), **options)

    @property
    def weights(self) -> FloatArray:
        """(N,) p_k, proportional to the sizes."""
        return self.population.weights

    def loss_of(self, model: FloatArray) -> FloatArray:
        """(N,) l_k(model) of every client."""
        losses: FloatArray = 0.5 * self.curvature * np.sum((model - self.centres) ** 2, axis=1)
        return losses

    def trained(self, clients: IntArray) -> FloatArray:
        """(len(clients), dim) w_k, the model of each client after local training."""
        shrink = (1.0 - self.learning_rate * self.curvature[clients]) ** self.local_steps
        return self.centres[clients] + shrink[:, None] * (self.model - self.centres[clients])

    def losses(self, clients: IntArray) -> FloatArray:
        """(len(clients),) l_k(w^t) of each; NaN from silent clients."""
        self._check(clients)
        self.asked.append(np.asarray(clients))
        return np.where(self.answering[clients], self.loss_of(self.model)[clients], np.nan)

    def loss_changes(self, selection: IntArray, clients: IntArray | None = None) -> FloatArray:
        """(N,) change of each client's loss if `selection` trained now; NaN where unknown."""
        asked = self.available if clients is None else np.asarray(clients)
        self._check(selection)
        self._check(asked)
        self.tried.append(np.asarray(selection))
        self.probed.append(asked)
        delivered = selection[self.answering[selection]]
        changes = np.full(len(self.centres), np.nan)
        if len(delivered):
            known = asked[self.answering[asked]]
            candidate = self.trained(delivered).mean(axis=0)
            changes[known] = (self.loss_of(candidate) - self.loss_of(self.model))[known]
        return changes

    def _check(self, clients: IntArray) -> None:
        unavailable = np.setdiff1d(clients, self.available)
        assert not len(unavailable), (
            f"round {self.round}: asked clients that are not available: {unavailable}"
        )

    def train(self, chosen: IntArray) -> Outcome:
        """Train the chosen clients, replace the model by the mean, and start the next round."""
        delivered = chosen[self.answering[chosen]]  # a client that was drawn twice counts twice
        participated = np.unique(delivered)
        updates = self.trained(participated) - self.model
        losses = self.loss_of(self.model)[participated]
        outcome = Outcome(
            self.round,
            chosen,
            participated,
            step_sizes=np.full(len(participated), self.learning_rate * self.local_steps),
            aggregation_weights=np.ones(len(participated)),
            read_losses=lambda: losses,
            read_updates=lambda: updates,
            durations=None if self.durations is None else self.durations[participated],
        )
        if len(delivered):
            self.model = self.trained(delivered).mean(axis=0)
        self.round += 1
        self.rng = stream(self.seed, "select", self.round)
        return outcome
