"""What the tests of federated optimisers share: invented deliveries, and quadratic clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from fedcor.core.types import Delivery, Optimiser, Population, optimiser_traits


@dataclass(frozen=True)
class Round:
    """What came back in one round of a play."""

    clients: np.ndarray
    weights: np.ndarray
    steps: np.ndarray
    rate: float
    updates: np.ndarray

    def delivery(self, number: int, model: np.ndarray) -> Delivery:
        return Delivery(
            number, model, self.clients, self.weights, self.steps, self.rate, lambda: self.updates
        )


@dataclass(frozen=True)
class Play:
    """A federation and what its clients send, whatever the optimiser makes of it."""

    population: Population
    model: np.ndarray
    rounds: list[Round]

    @property
    def count(self) -> int:
        return self.population.count

    def shares(self, weighted: bool) -> np.ndarray:
        """(N,) How much each client counts in a mean over all."""
        return self.population.weights if weighted else np.full(self.count, 1.0 / self.count)


@st.composite
def plays(
    draw,
    everyone=False,
    everyone_first=False,
    same_number=False,
    equal_steps=False,
    equal_weights=False,
    equal_sizes=False,
    equal_rates=False,
    by_data=False,
):
    """Federations of up to 6 clients over up to 8 rounds.

    Args:
        draw: Given by hypothesis.
        everyone: All take part in every round.
        everyone_first: All take part in the first round.
        same_number: As many take part in each round, but for the first.
        equal_steps: All do 3 local steps.
        equal_weights: All weigh the same in the mean of a round.
        equal_sizes: All have as much data.
        equal_rates: The learning rate is the same in all rounds.
        by_data: All weigh in proportion to their data in the mean of a round.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    sizes = np.full(count, 7) if equal_sizes else rng.integers(1, 50, size=count)
    usual, rates = draw(st.integers(1, count)), rng.uniform(0.01, 0.5, size=8)
    rounds = []
    for number in range(draw(st.integers(1, 8))):
        taking_part = usual if same_number else draw(st.integers(1, count))
        if everyone or (everyone_first and number == 0):
            taking_part = count
        clients = np.sort(rng.choice(count, size=taking_part, replace=False))
        weights = rng.uniform(0.1, 1.0, size=taking_part)
        if equal_weights:
            weights = np.ones(taking_part)
        if by_data:
            weights = sizes[clients].astype(float)
        steps = rng.integers(1, 6, size=taking_part)
        if equal_steps:
            steps = np.full(taking_part, 3)
        updates = (0.1 * rng.normal(size=(taking_part, size))).astype(np.float32)
        rate = float(rates[0 if equal_rates else number])
        rounds.append(Round(clients, weights / weights.sum(), steps, rate, updates))
    return Play(Population(sizes), rng.normal(size=size).astype(np.float32), rounds)


def models(optimiser: Optimiser, play: Play) -> Iterator[np.ndarray]:
    """The model after each round."""
    model, state = play.model, optimiser.init(play.population, play.model)
    for number, came in enumerate(play.rounds):
        model, state = optimiser.step(state, came.delivery(number, model))
        assert model.dtype == np.float32
        yield model


@dataclass(frozen=True)
class Quadratics:
    """Clients of which each wants to go elsewhere, in closed form."""

    curvatures: np.ndarray
    optima: np.ndarray
    sizes: np.ndarray
    steps: int = 10
    rate: float = 0.1

    @classmethod
    def example(cls, clients: int) -> Quadratics:
        rng = np.random.default_rng(5)
        return cls(
            rng.uniform(0.2, 2.0, size=(clients, 3)),
            rng.normal(size=(clients, 3)),
            rng.integers(1, 5, size=clients),
        )

    def shares(self, weighted: bool) -> np.ndarray:
        return (
            self.sizes / self.sizes.sum()
            if weighted
            else np.full(len(self.sizes), 1.0 / len(self.sizes))
        )

    def best(self, weighted: bool = False) -> np.ndarray:
        """The minimum of the mean loss."""
        shares = self.shares(weighted)
        return (shares @ (self.curvatures * self.optima)) / (shares @ self.curvatures)

    def fedavg_limit(self, weighted: bool = False) -> np.ndarray:
        """Where the mean update of everyone is zero: Delta_k = (1 - (1 - eta A_k)^K) (o_k - w)."""
        shares = self.shares(weighted)
        pull = 1.0 - (1.0 - self.rate * self.curvatures) ** self.steps
        return (shares @ (pull * self.optima)) / (shares @ pull)

    def train(self, optimiser: Optimiser, rounds: int, chosen: int) -> np.ndarray:
        """The model after some rounds of `chosen` clients drawn at random."""
        rng = np.random.default_rng(1)
        traits = optimiser_traits(optimiser)
        correct = getattr(optimiser, "corrections", lambda _, clients: np.zeros((len(clients), 3)))
        w = np.zeros(3, dtype=np.float32)
        state = optimiser.init(Population(self.sizes), w)
        for number in range(rounds):
            clients = np.sort(rng.choice(len(self.sizes), size=chosen, replace=False))
            local, added = np.tile(w, (chosen, 1)).astype(float), correct(state, clients)
            for _ in range(self.steps):
                gradient = self.curvatures[clients] * (local - self.optima[clients])
                local -= self.rate * (gradient + traits.proximal * (local - w) + added)
            weights = self.shares(traits.weighted)[clients]
            steps = np.full(chosen, self.steps)
            updates = (local - w).astype(np.float32)
            came = Round(clients, weights / weights.sum(), steps, self.rate, updates)
            w, state = optimiser.step(state, came.delivery(number, w))
        return w
