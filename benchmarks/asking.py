"""A selector with FedCor's questions and without its process, for engines that are compared.

FedCor itself chooses by a fit that amplifies the last bits of losses. Two engines that agree to six
digits would soon choose other clients, and their rounds could not be held against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedcor.core.types import Federation, IntArray, State
from fedcor.selectors.base import StatelessSelector, uniform


@dataclass(frozen=True)
class EveryTenth(StatelessSelector):
    """Uniform choice; every tenth round, all are asked for their losses before and after a trial.

    Args:
        clients_per_round: C, the number of clients that train in a round.
    """

    clients_per_round: int

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients drawn uniformly, and the unchanged state."""
        rng, available = federation.rng, federation.available
        if federation.round % 10 == 0:
            federation.loss_changes(uniform(rng, available, self.clients_per_round))
        return uniform(rng, available, self.clients_per_round), state
