"""Robust means follow their papers' rules, and a minority of byzantine cannot move them far."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import minimize

from fedcor import GeometricMedian, MultiKrum, TrimmedMean
from fedcor.core.errors import ConfigError
from fedcor.core.types import Delivery
from fedcor.optimisers.robust import _share, _weighted_median
from fedcor.testing import check_optimiser

ALL = [TrimmedMean(), TrimmedMean(trim=0.4), GeometricMedian(), GeometricMedian(weighted=True),
       MultiKrum(), MultiKrum(byzantine=0.4)]  # fmt: skip


def delivered(updates, weights=None) -> Delivery:
    updates = np.asarray(updates, dtype=np.float32)
    count = len(updates)
    weights = np.full(count, 1.0 / count) if weights is None else weights / np.sum(weights)
    return Delivery(
        0,
        np.zeros(updates.shape[1], np.float32),
        np.arange(count),
        weights,
        np.ones(count, np.int64),
        0.1,
        lambda: updates,
    )


@st.composite
def deliveries(draw, least=1):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(least, 9)), draw(st.integers(1, 6))
    return delivered(rng.standard_normal(shape) * 10.0 ** draw(st.integers(-3, 3)))


@pytest.mark.parametrize("optimiser", ALL, ids=repr)
def test_optimiser_conforms(optimiser):
    check_optimiser(optimiser)


# Each rule against a slow twin


@given(delivery=deliveries(), trim=st.floats(0.0, 0.49))
def test_a_trimmed_mean_leaves_out_both_ends_of_each_parameter(delivery, trim):
    count = len(delivery.clients)
    cut = _share(trim, count)
    expected = []
    for numbers in delivery.updates.T.astype(float):
        left = sorted(numbers)
        for _ in range(cut):
            left.remove(min(left))
            left.remove(max(left))
        expected.append(sum(left) / len(left))
    assert_allclose(TrimmedMean(trim).mean(delivery), expected, rtol=1e-6, atol=1e-9)


@given(delivery=deliveries(), seed=st.integers(0, 2**32 - 1))
def test_no_point_nearby_has_a_smaller_sum_of_distances_than_the_geometric_median(delivery, seed):
    rng, points = np.random.default_rng(seed), delivery.updates.astype(float)

    def cost(point):
        return float(delivery.weights @ np.linalg.norm(points - point, axis=1))

    found = GeometricMedian(iterations=2000).mean(delivery)
    spread = np.abs(points).max()
    tried = [*points, *(found + spread * 10.0 ** rng.uniform(-3, 0, (40, 1))
                        * rng.standard_normal((40, len(found))))]  # fmt: skip
    assert cost(found) <= min(map(cost, tried)) * (1 + 1e-3) + 1e-12


@given(delivery=deliveries(), byzantine=st.floats(0.0, 0.49))
def test_multi_krum_averages_those_with_the_closest_neighbours(delivery, byzantine):
    points, count = delivery.updates.astype(float), len(delivery.clients)
    f = _share(byzantine, count)
    scores = []
    for k in range(count):
        away = sorted(((points[k] - points[i]) ** 2).sum() for i in range(count) if i != k)
        scores.append(sum(away[: max(1, count - f - 2)]))
    chosen = MultiKrum(byzantine).chosen(delivery)
    assert len(chosen) == count - f
    left_out = set(range(count)) - set(chosen)
    margin = 1e-9 * (1 + max(scores))
    assert all(scores[i] <= scores[k] + margin for i, k in itertools.product(chosen, left_out))
    assert_allclose(MultiKrum(byzantine).mean(delivery), points[chosen].mean(axis=0), rtol=1e-6)


# What they are for


@pytest.mark.parametrize("optimiser", ALL, ids=repr)
@given(
    update=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=4), count=st.integers(1, 9)
)
def test_where_all_agree_the_step_is_theirs(optimiser, update, count):
    step = optimiser.mean(delivered([update] * count))
    assert_allclose(step, update, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "optimiser", [TrimmedMean(0.3), GeometricMedian(), MultiKrum(0.3)], ids=repr
)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e1, 1e4, 1e7]),
    together=st.booleans(),
)
def test_three_byzantine_of_ten_cannot_move_the_step_out_of_the_honest_cloud(
    optimiser, seed, size, together
):
    """Whereas they move a mean by a third of whatever they send."""
    rng = np.random.default_rng(seed)
    honest = rng.standard_normal((7, 5))
    lies = size * rng.standard_normal((1 if together else 3, 5)) * np.ones((3, 1))
    everyone = np.concatenate([honest, lies])[rng.permutation(10)]
    away = np.linalg.norm(optimiser.mean(delivered(everyone)) - honest.mean(axis=0))
    assert away <= 3.0 * np.linalg.norm(honest - honest.mean(axis=0), axis=1).max()


def cost_of(points, weights):
    """v -> sum_k a_k |v - Delta_k|, which a geometric median minimises."""
    points = points.astype(float)
    return lambda v: float(weights @ np.linalg.norm(points - v, axis=1))


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e1, 1e3, 1e6, 1e9, 1e20]),
    together=st.booleans(),
    weighted=st.booleans(),
)
def test_byzantine_with_less_than_half_of_the_weight_cannot_move_a_geometric_median_away(
    seed, size, together, weighted
):
    """Five of eleven, or fourteen of twenty that have 45 % of the data, whatever they send."""
    rng = np.random.default_rng(seed)
    honest = rng.standard_normal((6, 20))
    lies = size * rng.standard_normal((1 if together else 14 if weighted else 5, 20))
    lies = lies * np.ones((14 if weighted else 5, 1))
    weights = np.r_[np.full(6, 0.55 / 6), np.full(len(lies), 0.45 / len(lies))]
    order = rng.permutation(len(weights))
    delivery = delivered(np.concatenate([honest, lies])[order], weights[order])
    found = GeometricMedian(weighted=weighted).mean(delivery)
    centre, cost = honest.mean(axis=0), cost_of(delivery.updates, delivery.weights)
    spread = np.linalg.norm(honest - centre, axis=1).max()
    # No answer that is nearly the best can be further off than that: by the triangle inequality,
    # byzantine pull with .45 at most, and the honest ones with .55 but for what lies between them.
    assert np.linalg.norm(found - centre) <= 2.0 * 0.55 / (0.55 - 0.45) * spread
    assert cost(found) <= min(map(cost, [centre, *honest])) * (1 + 1e-9)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e1, 1e3, 1e6, 1e9])
def test_five_byzantine_of_eleven_get_the_geometric_median_that_a_minimiser_finds(size):
    rng = np.random.default_rng(3)
    honest = rng.standard_normal((6, 50))
    delivery = delivered(np.concatenate([honest, np.full((5, 50), size)]))
    found = GeometricMedian(iterations=300).mean(delivery)
    longest = np.linalg.norm(honest, axis=1).max()
    assert np.linalg.norm(found) < 1.5 * longest
    assert_allclose(found, minimum(delivery), atol=1e-3 * longest)
    assert_allclose(GeometricMedian().mean(delivery), found, atol=1e-2 * longest)


@pytest.mark.parametrize("seed", range(12))
def test_a_geometric_median_is_the_one_that_a_minimiser_finds(seed):
    rng = np.random.default_rng(seed)
    shape = rng.integers(3, 12), rng.integers(2, 20)
    scales = 10.0 ** rng.uniform(-1, 2, size=(shape[0], 1))  # some far longer than others
    delivery = delivered(scales * rng.standard_normal(shape), rng.uniform(0.2, 1.0, size=shape[0]))
    cost, best = cost_of(delivery.updates, delivery.weights), minimum(delivery)
    assert cost(GeometricMedian().mean(delivery)) <= cost(best) * (1 + 1e-3)
    assert cost(GeometricMedian(iterations=2000).mean(delivery)) <= cost(best) * (1 + 1e-6)


def minimum(delivery):
    """The geometric median as SciPy finds it, from the best single update on."""
    points, weights = delivery.updates.astype(float), delivery.weights

    def cost(v):
        away = points - v
        distances = np.sqrt((away**2).sum(axis=1) + 1e-18)
        return float(weights @ distances), -(weights / distances) @ away

    start = min(points, key=cost_of(points, weights))
    exact = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-15, "gtol": 1e-9}
    return minimize(cost, start + 1e-3, jac=True, method="L-BFGS-B", options=exact).x


@given(
    numbers=st.lists(st.floats(-10, 10), min_size=1, max_size=14),
    repeat=st.integers(1, 3),
)
def test_a_weighted_median_with_equal_weights_is_the_median(numbers, repeat):
    values, weights = np.array(numbers), np.full(len(numbers), 1.0 / len(numbers))
    assert _weighted_median(values, weights) == np.median(values)
    # A weight of 3 is three clients of weight 1.
    thrice = np.repeat(values, np.where(np.arange(len(values)) == 0, repeat, 1))
    heavy = np.where(np.arange(len(values)) == 0, float(repeat), 1.0)
    assert _weighted_median(values, heavy) == np.median(thrice)


@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_clients_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    points, order = rng.standard_normal((6, 3)), rng.permutation(6)
    for optimiser in ALL:
        one, other = optimiser.mean(delivered(points)), optimiser.mean(delivered(points[order]))
        assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_median_counts_clients_by_their_weight():
    points = [[0.0], [1.0], [2.0]]
    assert_allclose(GeometricMedian().mean(delivered(points)), [1.0], atol=1e-6)
    heavy = delivered(points, np.array([1.0, 1.0, 9.0]))
    assert_allclose(GeometricMedian(iterations=200).mean(heavy), [2.0], atol=1e-4)


def test_a_large_model_is_worked_on_in_parts():
    rng = np.random.default_rng(1)
    updates = rng.standard_normal((5, 150_000)).astype(np.float32)
    delivery = delivered(updates)
    assert_allclose(TrimmedMean(0.2).mean(delivery), np.sort(updates, 0)[1:4].mean(0), atol=1e-6)
    distances = ((updates[:, None] - updates[None]).astype(float) ** 2).sum(-1)
    scores = np.sort(distances, axis=1)[:, 1:3].sum(axis=1)
    assert MultiKrum(0.2).chosen(delivery) == sorted(np.argsort(scores)[:4].tolist())


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: TrimmedMean(trim=0.5), "trim"),
        (lambda: TrimmedMean(trim=-0.1), "trim"),
        (lambda: GeometricMedian(iterations=0), "iterations"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing"),
        (lambda: MultiKrum(byzantine=0.5), "byzantine"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(build, key):
    with pytest.raises(ConfigError) as refused:
        build()
    assert refused.value.key == key
