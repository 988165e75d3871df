"""Who received which model version: the bytes of a round, down and up.

A model costs its bytes for every client that does not hold that version yet; a training that comes back costs a model; an
answer to a question costs one float. What rides along with an update (its loss) is free, and so is protocol overhead.
"""

from __future__ import annotations

import numpy as np

from fedcor.types import BoolArray, IntArray

__all__ = ["ANSWER_BYTES", "CURRENT", "Ledger"]

ANSWER_BYTES = 4
CURRENT = 0  # the version of the global model; candidates of a round are 1, 2, ...


class Ledger:
    """The account of one round. Of the models it saw, only the one that becomes current outlives it."""

    def __init__(self, clients: int, model_bytes: int, holders: BoolArray | None = None) -> None:
        self.model_bytes = model_bytes
        current = np.zeros(clients, dtype=bool) if holders is None else holders.copy()
        self._holders: dict[int, BoolArray] = {CURRENT: current}  # version -> (N,) who has it
        self._sent: dict[int, BoolArray] = {
            CURRENT: current.copy()
        }  # version -> (N,) who was sent it, the dead too
        self.bytes_down = self.bytes_up = self.questions = 0

    def holders(self, version: int = CURRENT) -> BoolArray:  # (N,)
        return self._holders[version]

    def new_version(self) -> int:
        version = max(self._holders) + 1
        self._holders[version] = np.zeros_like(self._holders[CURRENT])
        self._sent[version] = np.zeros_like(self._holders[CURRENT])
        return version

    def send(self, version: int, clients: IntArray, alive: BoolArray) -> None:
        """The model goes once to each of `clients` that lacks it; the dead do not receive it, but the bytes have gone."""
        missing = clients[~self._sent[version][clients]]
        self.bytes_down += len(missing) * self.model_bytes
        self._sent[version][missing] = True
        self._holders[version][missing] = alive[missing]

    def question(self, asked: int, answered: int) -> None:
        self.questions += asked
        self.bytes_up += answered * ANSWER_BYTES

    def training(self, delivered: int) -> None:
        self.bytes_up += delivered * self.model_bytes

    def close_round(self, adopted: int | None) -> None:
        """The candidate `adopted` becomes the current model (None: a model that nobody has seen), the others are forgotten."""
        current = (
            np.zeros_like(self._holders[CURRENT]) if adopted is None else self._holders[adopted]
        )
        self._holders = {CURRENT: current}
