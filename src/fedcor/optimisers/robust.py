"""Robust means of the updates, which a minority of Byzantine clients cannot move far.

TrimmedMean       per parameter, the mean without the floor(trim m) smallest and largest numbers
GeometricMedian   argmin_v sum_k a_k |v - Delta_k|
MultiKrum         the mean of the m - f updates whose sum of squared distances to their m - f - 2
                  nearest neighbours is smallest;  f = floor(byzantine m)

All three leave out what is far from the others. Where clients' data differ, so do honest updates:
on such data they cost accuracy even if nobody lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.core.config import check_at_least, check_between, plain_keywords
from fedcor.core.types import Array, Delivery, FloatArray, State
from fedcor.optimisers.memory import StatelessOptimiser, weighted_mean

_COLUMNS = 1 << 16  # parameters that are worked on at once, so that copies stay small
_SLACK = 1e-3  # of a usual distance, by which two sums of distances may differ and be about equal
_SMALLEST = 1e-5  # distance, relative to the longest one, that is far above rounding errors


class _RobustMean(StatelessOptimiser, ABC):
    """The model moves by a robust mean of the updates. Nothing is remembered."""

    needs_updates: ClassVar[bool] = True

    @abstractmethod
    def mean(self, delivery: Delivery) -> Array:
        """(P,) the robust mean."""

    def step(self, state: State, delivery: Delivery) -> tuple[Array, State]:
        """(P,) w^t + the robust mean of the updates."""
        model = delivery.model + self.mean(delivery)
        return model.astype(delivery.model.dtype), state


@plain_keywords
@dataclass(frozen=True)
class TrimmedMean(_RobustMean):
    """The coordinate-wise trimmed mean (Yin et al., 2018).

    All clients count equally, however much data they have. It holds against fewer than trim m
    Byzantine clients.

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

    It holds against Byzantine clients with less than half of the weight, whatever they send.

    Weiszfeld's algorithm starts from the weighted mean, as in the paper. Byzantine clients may have
    moved that too far away to come back in so many iterations. So it also starts from a mean that
    they cannot move far, that of the half nearest to the best single update, and the better answer
    counts.

    Args:
        iterations: of Weiszfeld's algorithm, from either start. The paper uses few.
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
        weights = delivery.weights.astype(np.float64)
        products = _products(delivery.updates)
        half, usual, precise = _nearest_half(weights, products)
        if not precise:
            products = _products(delivery.updates, weights)
            half, usual, _ = _nearest_half(weights, products)
        starts = (weights, half) if precise else (half,)
        found = [self._approach(start, weights, products) for start in starts]
        costs = [float(weights @ _distances_to(shares, products)) for shares in found]
        # Two that are about as good are the same but for the last digits: then it is the paper's.
        return found[0] if costs[0] <= costs[-1] + _SLACK * usual else found[-1]

    def _approach(
        self, shares: FloatArray, weights: FloatArray, products: FloatArray
    ) -> FloatArray:
        """(m,) shares of the median, from those of a first guess. Each step comes nearer to it."""
        for _ in range(self.iterations):
            distances = _distances_to(shares, products)
            middle = float(_weighted_median(distances, weights))
            if not middle > 0.0:  # most of them are equal, so this is the median
                break
            pulls = weights / np.maximum(distances, self.smoothing * middle)
            shares = pulls / pulls.sum()
        return shares

    def mean(self, delivery: Delivery) -> Array:
        """(P,) the geometric median."""
        return weighted_mean(self.shares(delivery), delivery.updates)


@plain_keywords
@dataclass(frozen=True)
class MultiKrum(_RobustMean):
    """Multi-Krum (Blanchard et al., 2017): the mean of the updates with the closest neighbours.

    All clients count equally, however much data they have.

    Args:
        byzantine: share of the clients that may be Byzantine, below .5. With few clients per round
            it must be at least 1/m to leave out anyone: .2 for five.

    Example:
        >>> from fedcor import MultiKrum
        >>> MultiKrum(byzantine=0.3)
        MultiKrum(byzantine=0.3)
    """

    byzantine: float = 0.2

    def __post_init__(self) -> None:
        check_between("byzantine", self.byzantine, 0.0, 0.4999)

    def chosen(self, delivery: Delivery) -> list[int]:
        """Sorted positions of the updates that are averaged; of equals, the first ones."""
        count = len(delivery.clients)
        byzantine = _share(self.byzantine, count)
        distances = _squared_distances(_products(delivery.updates))
        # Its own distance, 0, stands first; at least one neighbour counts where there is one.
        near = np.sort(distances, axis=1)[:, 1 : 1 + max(1, count - byzantine - 2)]
        order = np.argsort(near.sum(axis=1), kind="stable")
        return sorted(order[: count - byzantine].tolist())

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


def _products(updates: Array, weights: FloatArray | None = None) -> FloatArray:
    """(m, m) inner products of the updates after a common centre was subtracted, in float64.

    Distances do not change with the centre, and lose fewer digits if it is near.

    Args:
        updates: (m, P)
        weights: (m,) With them the centre is the median of each parameter, which a minority cannot
            move; without, it is the mean.
    """
    products = np.zeros((len(updates), len(updates)))
    for columns in _blocks(updates):
        block = updates[:, columns].astype(np.float64)
        block -= block.mean(axis=0) if weights is None else _weighted_median(block, weights)
        products += block @ block.T
    return products


def _squared_distances(products: FloatArray) -> FloatArray:
    """(m, m) of the updates from each other; a rounding error may be below zero."""
    squares = np.diag(products)
    distances: FloatArray = squares[:, None] + squares[None, :] - 2.0 * products
    np.fill_diagonal(distances, 0.0)
    return distances


def _nearest_half(weights: FloatArray, products: FloatArray) -> tuple[FloatArray, float, bool]:
    """The half of the updates nearest to the best single one: a minority cannot move its mean away.

    The best single one has the smallest sum of distances to all others.

    Returns:
        (m,) shares of each in the mean of that half; the largest distance in it; and whether that
        is far above the rounding errors that the longest update causes.
    """
    distances = np.sqrt(np.maximum(_squared_distances(products), 0.0))
    to_best = distances[int(np.argmin(distances @ weights))]
    usual = float(_weighted_median(to_best, weights))
    near = np.where(to_best <= usual, weights, 0.0)
    return near / near.sum(), usual, usual >= _SMALLEST * float(to_best.max())


def _weighted_median(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Along the first axis; where two values are in the middle, their mean, as NumPy has it."""
    order = np.argsort(values, axis=0)
    below = np.cumsum(weights[order], axis=0) / weights.sum()
    rounding = 1e-9  # of sums of weights
    middle = np.stack([np.argmax(below >= 0.5 - rounding, axis=0),
                       np.argmax(below > 0.5 + rounding, axis=0)])  # fmt: skip
    at = np.take_along_axis(order, middle, axis=0)
    median: FloatArray = np.take_along_axis(values, at, axis=0).mean(axis=0)
    return median


def _distances_to(shares: FloatArray, products: FloatArray) -> FloatArray:
    """(m,) distance of each update to the mean with these shares."""
    across = products @ shares
    squares = np.diag(products) - 2.0 * across + shares @ across
    distances: FloatArray = np.sqrt(np.maximum(squares, 0.0))
    return distances
