"""`random` and `full`: the two selectors that ask nothing and remember nothing."""

from __future__ import annotations

from dataclasses import dataclass

from fedcor.checks import check_at_least
from fedcor.selectors.base import Memoryless, uniform
from fedcor.types import Federation, IntArray, State

__all__ = ["Full", "Random"]


@dataclass(frozen=True)
class Random(Memoryless):
    """Uniform choice: without replacement as in McMahan et al. (2017), or with it as in Cho et al. (2020)."""

    clients_per_round: int
    replacement: bool = False  # a client drawn twice trains once and counts twice

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        if self.replacement:
            return federation.rng.choice(
                federation.available, size=self.clients_per_round, replace=True
            ), state
        return uniform(federation.rng, federation.available, self.clients_per_round), state


@dataclass(frozen=True)
class Full(Memoryless):
    """Everyone who can be reached: the bound that partial participation is measured against."""

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        return federation.available.copy(), state
