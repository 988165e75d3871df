"""Checks of what clients and selectors send: bad numbers from clients are refused and counted, bad
client ids from a selector are an error."""

from __future__ import annotations

import numpy as np

from fedcor.errors import FedcorError
from fedcor.types import FloatArray, IntArray

__all__ = ["LARGEST_LOSS", "check_clients", "screen_losses"]

# No loss of a model worth averaging is this large; one that claims to be would dominate every fit
# and every ranking.
LARGEST_LOSS = 1e6


def screen_losses(answers: FloatArray) -> tuple[FloatArray, int]:
    """Replace unusable answers (not finite, or absurdly large) by NaN.

    Returns:
        The answers, and how many were unusable.
    """
    finite = np.isfinite(answers)
    usable = finite & (np.abs(np.where(finite, answers, 0.0)) <= LARGEST_LOSS)
    return np.where(usable, answers, np.nan), int(np.count_nonzero(~usable))


def check_clients(clients: IntArray, available: IntArray, round: int) -> IntArray:
    """The client ids that a selector returned, as an array.

    Raises:
        FedcorError: They are not a list of ids, or name a client that is not available.
    """
    clients = np.asarray(clients)
    if clients.ndim != 1 or (clients.size and clients.dtype.kind not in "iu"):
        raise FedcorError(
            f"round {round}: the selector returned {clients!r}, which is not a list of client ids"
        )
    clients = clients.astype(np.int64)
    unavailable = np.setdiff1d(clients, available)
    if len(unavailable):
        raise FedcorError(
            f"round {round}: the selector chose clients that are not available: {unavailable}"
        )
    return clients
