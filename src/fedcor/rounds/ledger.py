"""The bytes of a round, down and up, from who received which version of the model.

A model costs its bytes for every client that does not hold that version yet. An update that comes
back costs a model. An answer to a question costs one float. Some federated optimisers send further
vectors with a training, down or up, which cost their bytes. What comes along with an update (its
loss) is free, and protocol overhead is not counted.
"""

from __future__ import annotations

import numpy as np

from fedcor.core.types import BoolArray, IntArray

ANSWER_BYTES = 4
CURRENT = 0  # the version of the global model; candidates of a round are 1, 2, ...


class Ledger:
    """The account of one round.

    Of the models that it saw, only the one that becomes the current model outlives the round.

    Args:
        clients: N, the number of clients.
        model_bytes: Bytes of one model.
        holders: (N,) Which clients hold the current model already; nobody if it is not given.

    Attributes:
        bytes_down: Bytes sent to clients so far.
        bytes_up: Bytes received from clients so far.
        questions: How many losses clients were asked for so far.

    Example:
        >>> ledger = Ledger(clients=3, model_bytes=100)
        >>> everyone, alive = np.arange(3), np.ones(3, dtype=bool)
        >>> ledger.send(CURRENT, everyone, alive)
        array([100, 100, 100])
        >>> ledger.send(CURRENT, everyone, alive)  # they hold it already
        array([0, 0, 0])
        >>> ledger.question(asked=3, answered=3)
        >>> ledger.bytes_down, ledger.bytes_up
        (300, 12)
        >>> ledger.training(2)
        >>> ledger.vectors(sent=2, received=2, vector_bytes=100)  # SCAFFOLD: one each way
        >>> ledger.bytes_down, ledger.bytes_up
        (500, 412)
    """

    def __init__(self, clients: int, model_bytes: int, holders: BoolArray | None = None) -> None:
        self.model_bytes = model_bytes
        current = np.zeros(clients, dtype=bool) if holders is None else holders.copy()
        # version -> (N,) who has it; and who was sent it, dropped clients included
        self._holders: dict[int, BoolArray] = {CURRENT: current}
        self._sent: dict[int, BoolArray] = {CURRENT: current.copy()}
        self.bytes_down = self.bytes_up = self.questions = 0

    def holders(self, version: int = CURRENT) -> BoolArray:
        """(N,) Which clients hold a version; nobody holds one that was never sent."""
        return self._holders.get(version, np.zeros_like(self._holders[CURRENT]))

    def send(self, version: int, clients: IntArray, alive: BoolArray) -> IntArray:
        """Send a version once to each of `clients` that was not sent it yet.

        Clients that are not `alive` (N,) do not receive it, but its bytes are spent.

        Returns:
            (len(clients),) Bytes that each was sent.
        """
        nobody = np.zeros_like(self._holders[CURRENT])
        sent = self._sent.setdefault(version, nobody.copy())
        holders = self._holders.setdefault(version, nobody)
        lacks = ~sent[clients]
        missing = clients[lacks]
        self.bytes_down += len(missing) * self.model_bytes
        sent[missing] = True
        holders[missing] = alive[missing]
        return lacks * self.model_bytes

    def question(self, asked: int, answered: int) -> None:
        """Count a question to `asked` clients, of which `answered` gave an answer."""
        self.questions += asked
        self.bytes_up += answered * ANSWER_BYTES

    def training(self, delivered: int) -> None:
        """Count the updates of `delivered` clients."""
        self.bytes_up += delivered * self.model_bytes

    def vectors(self, sent: int, received: int, vector_bytes: int) -> None:
        """Count vectors that go along with a training: `sent` to clients, `received` from them."""
        self.bytes_down += sent * vector_bytes
        self.bytes_up += received * vector_bytes

    def close_round(self, adopted: int | None) -> None:
        """End the round.

        The candidate `adopted` becomes the current model; None means a model that nobody has
        received. All other versions are forgotten.
        """
        nobody = np.zeros_like(self._holders[CURRENT])
        self._holders = {CURRENT: nobody if adopted is None else self.holders(adopted)}
