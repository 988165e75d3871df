"""Checks of what clients and selectors send: bad numbers from clients are refused and counted, bad
client ids from a selector are an error."""

from __future__ import annotations

import numpy as np

from fedcor.errors import FedcorError
from fedcor.types import FloatArray, IntArray

__all__ = ["FEWEST_REPORTS", "LARGEST_LOSS", "check_clients", "clip_reports", "screen_losses"]

# No loss of a model worth averaging is this large; one that claims to be would dominate every fit
# and every ranking.
LARGEST_LOSS = 1e6
FEWEST_REPORTS = 5  # answers of which the median says what is usual
_TO_SIGMA = 1.4826  # the standard deviation of a normal distribution, in units of its MAD


def screen_losses(answers: FloatArray) -> tuple[FloatArray, int]:
    """Replace unusable answers (not finite, or absurdly large) by NaN.

    Returns:
        The answers, and how many were unusable.
    """
    finite = np.isfinite(answers)
    usable = finite & (np.abs(np.where(finite, answers, 0.0)) <= LARGEST_LOSS)
    return np.where(usable, answers, np.nan), int(np.count_nonzero(~usable))


def clip_reports(answers: FloatArray, limit: float) -> FloatArray:
    """Winsorise what clients reported: what is far from the others becomes what is just not far.

    An answer may be `limit` standard deviations above or below the median of all answers to the
    same question. The standard deviation is taken from their median absolute deviation (MAD), so
    fewer than half of the clients cannot move the bounds far. Of fewer than `FEWEST_REPORTS`
    answers nobody can say what is usual: they stay as they are. Where more than half of the answers
    are the same number, the MAD is 0 and all answers become it.

    Args:
        answers: Of one question; NaN where none came, which stays NaN.
        limit: In standard deviations, above 0; 0 for no bounds.

    Example:
        >>> clip_reports(np.array([1.0, 2.0, 3.0, 4.0, 500.0]), 2.0)
        array([1.    , 2.    , 3.    , 4.    , 5.9652])
    """
    came = answers[np.isfinite(answers)]
    if not limit or len(came) < FEWEST_REPORTS:
        return answers
    median = np.median(came)
    reach = limit * _TO_SIGMA * np.median(np.abs(came - median))
    clipped: FloatArray = np.clip(answers, median - reach, median + reach)
    return clipped


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
    unavailable = np.unique(clients[~np.isin(clients, available)])
    if len(unavailable):
        raise FedcorError(
            f"round {round}: the selector chose clients that are not available: {unavailable}"
        )
    return clients
