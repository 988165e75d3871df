"""The paper's convergence theorem on strongly convex quadratic clients, for the proxy algorithm.

Client k has l_k(w) = m/2 |w - c_k|^2, so its gradient is m (w - c_k), the embedding X = G (B = I),
and the learning rate is the theorem's beta / (t + gamma) with beta > 1/m. The theorem bounds the
squared distance by nu / (gamma + t).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedcor.selectors.gp.greedy import select_proxy

M, CLIENTS, CHOSEN = 1.0, 30, 5


def distances(seed: int, horizon: int, choose) -> np.ndarray:
    """|w^t - w*|^2 for t = 0 .. horizon-1."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((CLIENTS, 6))
    p = rng.dirichlet(np.full(CLIENTS, 5.0))
    optimum = p @ centres
    w = optimum + 5.0
    squared = np.empty(horizon)
    for t in range(horizon):
        squared[t] = np.sum((w - optimum) ** 2)
        gradients = M * (w - centres)  # (N, dim) rows of G'
        chosen = choose(gradients, p, rng)
        w = w - 2.0 / M / (t + 8.0) * gradients[chosen].mean(axis=0)
    return squared


def proxy(gradients, p, rng):
    return select_proxy(gradients, p, 1e-12, CHOSEN, np.arange(CLIENTS))


def slope(squared: np.ndarray) -> float:
    """Of log squared distance over log t, by octaves from t = 10 to the end: three decades."""
    edges = np.unique(np.geomspace(10, len(squared), 31).astype(int))
    middle = np.sqrt(edges[:-1] * edges[1:])
    level = [squared[a:b].mean() for a, b in itertools.pairwise(edges)]
    return float(np.polyfit(np.log(middle), np.log(level), 1)[0])


def uniform(gradients, p, rng):
    return rng.choice(CLIENTS, size=CHOSEN, replace=False)


@pytest.mark.parametrize("seed", range(4))
def test_the_distance_of_the_proxy_algorithm_falls_like_1_over_t(seed):
    """Measured: |w - w*| falls like 1/T, so its square falls like 1/T^2, well below the theorem's
    bound of 1/T."""
    squared = distances(seed, 10_000, proxy)
    assert slope(np.sqrt(squared)) == pytest.approx(-1.0, abs=0.15)
    bound = squared[0] * 8.0 / (np.arange(len(squared)) + 8.0)
    assert (squared <= bound).all()


def test_uniform_choice_does_not_reach_the_weighted_optimum():
    """So the slope above is due to the choice: with unequal weights, uniform choice converges to
    another point."""
    assert slope(np.sqrt(distances(0, 10_000, uniform))) > -0.5
