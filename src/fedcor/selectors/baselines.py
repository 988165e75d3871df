"""`random`, `round_robin` and `full`: the selectors that ask nothing and learn nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.core.config import check_at_least, plain_keywords
from fedcor.core.types import Federation, IntArray, Outcome, Population, State
from fedcor.selectors.base import (
    StatelessSelector,
    asks_nothing,
    extend_clients,
    longest_ago,
    uniform,
)


@plain_keywords
@dataclass(frozen=True)
class Random(StatelessSelector):
    """Uniform random selection, the paper's baseline `Rand`.

    Args:
        clients_per_round: C, the number of clients that train in a round. All train when fewer are
            available.
        replacement: Whether a client can be drawn more than once in a round. It then trains once
            and counts as often as it was drawn. False is the selection of McMahan et al. (2017),
            True that of Cho et al. (2020).

    Example:
        >>> from fedcor import Random
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> chosen, state = Random(clients_per_round=3).select({}, federation)
        >>> len(chosen)
        3
    """

    clients_per_round: int
    replacement: bool = False

    questions = asks_nothing

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients drawn uniformly from those available, and the unchanged state."""
        available, count = federation.available, self.clients_per_round
        if self.replacement:
            return federation.rng.choice(available, size=count, replace=True), state
        return uniform(federation.rng, available, count), state


@plain_keywords
@dataclass(frozen=True)
class RoundRobin:
    """Everyone in turn: the clients that were chosen longest ago, in random order among equals.

    Args:
        clients_per_round: C, the number of clients that train in a round. All train when fewer are
            available.

    Example:
        >>> from fedcor import RoundRobin
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> selector = RoundRobin(clients_per_round=6)
        >>> first, state = selector.select(selector.init(federation.population), federation)
        >>> second, state = selector.select(state, federation)
        >>> sorted([*first.tolist(), *second.tolist()]) == list(range(12))
        True
    """

    clients_per_round: int

    questions = asks_nothing

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)

    def init(self, population: Population) -> State:
        """The state in which nobody was chosen yet."""
        return {"round": np.array(0), "asked": np.full(population.count, -1)}

    def join(self, state: State, population: Population) -> State:
        """The state with new clients, who stand at the end of the queue."""
        last = int(state["round"]) - 1
        return {**state, "asked": extend_clients(state["asked"], population.count, last)}

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients that were chosen longest ago, and the state in which they were chosen."""
        available, asked = federation.available, state["asked"].copy()
        draws = federation.rng.random(len(available))
        chosen = available[longest_ago(asked[available], self.clients_per_round, draws)]
        asked[chosen] = int(state["round"])
        return chosen, {"round": np.array(int(state["round"]) + 1), "asked": asked}

    def observe(self, state: State, outcome: Outcome) -> State:
        """The same state: it does not matter who delivered."""
        return state


@plain_keywords
@dataclass(frozen=True)
class Full(StatelessSelector):
    """Full participation: every available client trains in every round.

    It is the bound that partial participation is measured against. It has no hyper-parameters.

    Example:
        >>> from fedcor import Full
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=4)
        >>> Full().select({}, federation)[0].tolist()
        [0, 1, 2, 3]
    """

    questions = asks_nothing

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """All available clients, and the unchanged state."""
        return federation.available.copy(), state
