"""Probes of a sample: whom to ask for loss changes, who was ever seen, and who is explored.

Notation
    X       client embeddings, row k is x_k; 0 for a client of whom no loss change is known  (N, d)
    n       how many clients are asked for the sake of a candidate

The clients that train for a candidate are always asked; uniform others fill up the sample to n.
They are sent the model anyway, their own loss changes most, and of two clients the process learns
from the samples in which both answered. The price is that they are a larger part of a small sample
than of all clients.

A client that was never seen has the prior: x_k = 0, a variance s^2 of its own and no covariance
with anyone. So it has no part in what the process knows, and is hardly worth anything to it. It
gets its place by exploration instead: while there are such clients, they have a quarter of a round,
or the only seat of a round with probability 1/4. (By chance, not by the round's number: a round
that is tried again because nobody delivered need not explore again.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedcor.selectors.base import fraction_of, uniform
from fedcor.types import BoolArray, FloatArray, IntArray

__all__ = ["count_asked", "explored", "first_embedding", "is_seen", "whom_to_ask"]

_UNSEEN_SHARE = 0.25  # of a round


def count_asked(available: int, fraction: float, most: int | None) -> int:
    """n, of so many available clients: a fraction of them, at least one, and no more than `most`.

    >>> count_asked(1000, 0.3, None), count_asked(1000, 0.3, 100), count_asked(3, 0.1, None)
    (300, 100, 1)
    """
    wanted = max(1, fraction_of(fraction, available))
    return wanted if most is None else min(wanted, most)


def whom_to_ask(
    rng: np.random.Generator, available: IntArray, selections: Sequence[IntArray], count: int
) -> list[IntArray]:
    """For each of the selections, the sorted clients that are asked: its own and uniform others.

    The others are the same for all selections, as far as they do not train: who is asked for
    several candidates is asked only once for the loss of the current model.

    Args:
        rng: The round's stream.
        available: Who can be asked.
        selections: Clients that train for each candidate.
        count: n. A larger selection is asked as a whole.
    """
    order = rng.permutation(available)
    asked = []
    for selection in selections:
        others = order[~np.isin(order, selection)]
        more = max(0, count - len(np.unique(selection)))
        asked.append(np.union1d(selection, others[:more]))
    return asked


def first_embedding(rng: np.random.Generator, clients: int, dimension: int) -> FloatArray:
    """(n, d) where a fit starts, for clients that no fit has had yet."""
    X: FloatArray = rng.standard_normal((clients, dimension)) / math.sqrt(dimension)
    return X


def is_seen(X: FloatArray) -> BoolArray:
    """(n,) of whom a loss change is known."""
    return np.asarray(X.any(axis=1))


def explored(
    rng: np.random.Generator, X: FloatArray, clients: IntArray, count: int, taken: IntArray
) -> IntArray:
    """Clients to explore: uniform ones that were never seen.

    They have a quarter of the round, at least one seat; the only seat of a round in one of four
    rounds, by chance; and what is left where too few of the clients were seen.

    Args:
        rng: The round's stream.
        X: (N, d) The embedding.
        clients: Who may be chosen.
        count: How many are.
        taken: Who has a seat in the round already.
    """
    unseen = clients[~is_seen(X[clients])]
    if not len(unseen):
        return unseen
    seats = count + len(taken)
    least = 1 if seats > 1 else int(rng.random() < _UNSEEN_SHARE)
    share = max(least, fraction_of(_UNSEEN_SHARE, seats))
    share -= int(np.count_nonzero(~is_seen(X[taken])))
    rest = count - (len(clients) - len(unseen))
    return uniform(rng, unseen, min(count, max(share, rest, 0)))
