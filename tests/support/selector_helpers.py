"""What the tests of selectors share: playing rounds, and invented outcomes of a round."""

from __future__ import annotations

import numpy as np

from fedcor.core.types import Outcome
from fedcor.selectors.gp import greedy


def play(selector, federation, rounds):
    """Run `rounds` rounds from the initial state: the choice of each round, and the last state."""
    state, choices = selector.init(federation.population), []
    for _ in range(rounds):
        chosen, state = selector.select(state, federation)
        choices.append(chosen)
        state = selector.observe(state, federation.train(chosen))
    return choices, state


def outcome(round, clients, losses=(), updates=()):
    """The outcome of a round in which `clients` delivered; step sizes and weights are 1."""
    clients, ones = np.asarray(clients), np.ones(len(clients))
    return Outcome(
        round,
        selected=clients,
        participated=clients,
        step_sizes=ones,
        aggregation_weights=ones,
        read_losses=lambda: np.asarray(losses, dtype=float),
        read_updates=lambda: np.asarray(updates, dtype=float),
    )


def select(X, p, alpha, s2, count, candidates, earlier=None):
    """`greedy.select`, with the prior's parts one by one."""
    return greedy.select(greedy.Prior(X, p, alpha, s2), count, candidates, earlier)


def take_apart(X, p, alpha, s2, picks, candidates, placed=None):
    """`greedy.take_apart`, with the prior's parts one by one."""
    return greedy.take_apart(greedy.Prior(X, p, alpha, s2), picks, candidates, placed=placed)
