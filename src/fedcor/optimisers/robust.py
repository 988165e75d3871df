"""Means that a minority of liars cannot move far, in place of the weighted mean of the updates.

TrimmedMean       per parameter, the mean without the floor(trim m) smallest and largest numbers
GeometricMedian   argmin_v sum_k a_k |v - Delta_k|
MultiKrum         the mean of the m - f updates whose sum of squared distances to their m - f - 2
                  nearest neighbours is smallest;  f = floor(liars m)

All three leave out what is far from the others. Where clients' data differ, so do honest updates:
on such data they cost accuracy even if nobody lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.checks import check_at_least, check_between
from fedcor.config import plain_keywords
from fedcor.optimisers.memory import weighted_mean
from fedcor.types import Array, Delivery, FloatArray, Population, State

__all__ = ["GeometricMedian", "MultiKrum", "TrimmedMean"]

_COLUMNS = 1 << 16  # parameters that are worked on at once, so that copies stay small


class _RobustMean(ABC):
    """The model moves by a robust mean of the updates. Nothing is remembered."""

    needs_updates: ClassVar[bool] = True

    @abstractmethod
    def mean(self, delivery: Delivery) -> Array:
        """(P,) the robust mean."""

    def init(self, population: Population, model: Array) -> State:  # noqa: ARG002
        """Nothing is remembered."""
        return {}

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + the robust mean of the updates."""
        model = delivery.model + self.mean(delivery)
        return model.astype(delivery.model.dtype), state


@plain_keywords
@dataclass(frozen=True)
class TrimmedMean(_RobustMean):
    """The coordinate-wise trimmed mean (Yin et al., 2018).

    Clients count alike, however much data they have. It holds against fewer than trim m liars.

    Args:
        trim: share of the numbers left out at each end, below .5. With few clients per round it
            must be at least 1/m to leave out anyone: .2 for five.

    Example:
        >>> from fedcor import TrimmedMean
        >>> TrimmedMean(trim=0.3)
        TrimmedMean(trim=0.3)
    """

    trim: float = 0.2

    def __post_init__(self) -> None:
        check_between("trim", self.trim, 0.0, 0.4999)

    def mean(self, delivery: Delivery) -> Array:
        """(P,) per parameter, the mean of the numbers in the middle."""
        cut = _share(self.trim, len(delivery.clients))
        updates, kept = delivery.updates, len(delivery.clients) - cut
        return np.concatenate(
            [
                np.sort(updates[:, columns], axis=0)[cut:kept].mean(axis=0, dtype=np.float64)
                for columns in _blocks(updates)
            ]
        )


@plain_keywords
@dataclass(frozen=True)
class GeometricMedian(_RobustMean):
    """The geometric median of the updates (Pillutla et al., 2022, call it RFA).

    It holds against liars with less than half of the weight, whatever they send.

    Args:
        iterations: of Weiszfeld's algorithm, from the weighted mean. The paper uses few.
        smoothing: keeps weights finite where the median meets an update; relative to the median
            distance.
        weighted: as for FedAvg.

    Example:
        >>> from fedcor import GeometricMedian
        >>> GeometricMedian(iterations=10)
        GeometricMedian(iterations=10, smoothing=1e-06, weighted=False)
    """

    iterations: int = 32
    smoothing: float = 1e-6
    weighted: bool = False

    def __post_init__(self) -> None:
        check_at_least("iterations", self.iterations, 1)
        check_between("smoothing", self.smoothing, 1e-12, 1.0)

    def shares(self, delivery: Delivery) -> FloatArray:
        """(m,) share of each update in the median: it is a weighted mean of the updates."""
        products = _products(delivery.updates)
        shares = delivery.weights.astype(np.float64)
        for _ in range(self.iterations):
            distances = _distances_to(shares, products)
            middle = float(np.median(distances))
            if not middle > 0.0:  # most of them are equal, so this is the median
                break
            pulls = delivery.weights / np.maximum(distances, self.smoothing * middle)
            shares = pulls / pulls.sum()
        return shares

    def mean(self, delivery: Delivery) -> Array:
        """(P,) the geometric median."""
        return weighted_mean(self.shares(delivery), delivery.updates)


@plain_keywords
@dataclass(frozen=True)
class MultiKrum(_RobustMean):
    """Multi-Krum (Blanchard et al., 2017): the mean of the updates with the closest neighbours.

    Clients count alike, however much data they have.

    Args:
        liars: share of the clients that may lie, below .5. With few clients per round it must be
            at least 1/m to leave out anyone: .2 for five.

    Example:
        >>> from fedcor import MultiKrum
        >>> MultiKrum(liars=0.3)
        MultiKrum(liars=0.3)
    """

    liars: float = 0.2

    def __post_init__(self) -> None:
        check_between("liars", self.liars, 0.0, 0.4999)

    def chosen(self, delivery: Delivery) -> list[int]:
        """Sorted positions of the updates that are averaged; of equals, the first ones."""
        count = len(delivery.clients)
        liars = _share(self.liars, count)
        products = _products(delivery.updates)
        squares = np.diag(products)
        distances = squares[:, None] + squares[None, :] - 2.0 * products
        np.fill_diagonal(distances, 0.0)
        # Its own distance, 0, stands first; at least one neighbour counts where there is one.
        near = np.sort(distances, axis=1)[:, 1 : 1 + max(1, count - liars - 2)]
        order = np.argsort(near.sum(axis=1), kind="stable")
        return sorted(order[: count - liars].tolist())

    def mean(self, delivery: Delivery) -> Array:
        """(P,) the mean of the chosen updates."""
        shares = np.zeros(len(delivery.clients))
        chosen = self.chosen(delivery)
        shares[chosen] = 1.0 / len(chosen)
        return weighted_mean(shares, delivery.updates)


def _share(share: float, count: int) -> int:
    """floor(share * count), where .2 of five is one in spite of rounding."""
    return int(share * count + 1e-9)


def _blocks(updates: Array) -> Iterator[slice]:
    return (slice(at, at + _COLUMNS) for at in range(0, updates.shape[1], _COLUMNS))


def _products(updates: Array) -> FloatArray:
    """(m, m) inner products of the updates after their mean was subtracted, in float64.

    Distances do not change with the mean, and lose fewer digits without it.
    """
    products = np.zeros((len(updates), len(updates)))
    for columns in _blocks(updates):
        block = updates[:, columns].astype(np.float64)
        block -= block.mean(axis=0)
        products += block @ block.T
    return products


def _distances_to(shares: FloatArray, products: FloatArray) -> FloatArray:
    """(m,) distance of each update to the mean with these shares."""
    across = products @ shares
    squares = np.diag(products) - 2.0 * across + shares @ across
    distances: FloatArray = np.sqrt(np.maximum(squares, 0.0))
    return distances
