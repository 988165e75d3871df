"""What each pick was worth, against dense computations: the parts add up to the gain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from selector_helpers import select, take_apart
from test_gp import problems

from fedcor.rounds.rules.declaration import Rules
from fedcor.rounds.rules.seats import Seats, make_groups
from fedcor.rounds.selection import decide, observe
from fedcor.selectors.fedcor import FedCor
from fedcor.testing import FakeFederation

QUICK = {"warmup": 2, "interval": 3, "dimension": 2, "warmup_steps": 20, "refit_steps": 20}


class Dense:
    """Algorithm 1 on the N x N covariance, for picks that are given."""

    def __init__(self, X, p, alpha, s2):
        self.p, self.alpha = p, alpha
        self.mu, self.Sigma = np.zeros(len(X)), X @ X.T + s2 * np.eye(len(X))
        self.picked = []

    def predicted(self, k):
        return self.mu[k] - self.alpha[k] * math.sqrt(self.Sigma[k, k])

    def posterior(self, k):
        return self.mu + self.Sigma[:, k] / self.Sigma[k, k] * (self.predicted(k) - self.mu[k])

    def gain(self, k):
        return self.p @ (self.mu - self.posterior(k))

    def pick(self, k):
        self.mu = self.posterior(k)
        self.Sigma = self.Sigma - np.outer(self.Sigma[:, k], self.Sigma[k]) / self.Sigma[k, k]
        self.picked.append(k)


def close(value, scale):
    return pytest.approx(value, rel=1e-5, abs=1e-6 * scale)


@settings(max_examples=100)
@given(problems(largest=30), st.randoms(use_true_random=False))
def test_who_has_a_place_for_another_reason_is_no_rival_and_has_none(problem, random):
    X, p, alpha, s2, _, candidates = problem
    chosen = select(*problem).clients
    placed = np.array([random.random() < 0.4 for _ in chosen], dtype=bool)
    parts = take_apart(X, p, alpha, s2, chosen, candidates, placed)
    plain = take_apart(X, p, alpha, s2, chosen, candidates)
    for name in ("gain", "redundancy", "annealing", "others", "own", "change"):
        assert_array_equal(getattr(parts, name), getattr(plain, name))
    for j in range(len(chosen)):
        rivals = np.setdiff1d(candidates, [*chosen[: j + 1], *chosen[placed]])
        if placed[j] or not len(rivals):
            assert np.isnan(parts.runner_up[j])
            assert math.isnan(parts.margin[j])
        else:
            assert parts.runner_up[j] in rivals


@settings(max_examples=200)
@given(problems(largest=30), st.booleans())
def test_the_parts_equal_the_dense_ones_and_add_up_to_the_gain(problem, greedy):
    X, p, alpha, s2, count, candidates = problem
    picks = select(*problem)
    chosen = picks.clients if greedy else candidates[::-1][:count]  # any order can be explained
    parts = take_apart(X, p, alpha, s2, chosen, candidates)
    if greedy:
        assert_array_equal(parts.gain, picks.gain)  # the very same numbers
    assert_array_equal(parts.annealing, alpha[chosen])
    first, dense = Dense(X, p, alpha, s2), Dense(X, p, alpha, s2)
    scale = float(np.sqrt(np.max(np.diag(first.Sigma))))
    for j, k in enumerate(chosen.tolist()):
        sigma = math.sqrt(first.Sigma[k, k])
        others = sum(p[i] * first.Sigma[i, k] for i in range(len(X)) if i != k) / sigma
        assert parts.others[j] == close(others, scale)
        assert parts.own[j] == close(p[k] * sigma, scale)
        assert parts.gain[j] == close(dense.gain(k), scale)
        assert parts.redundancy[j] == close(first.gain(k) - dense.gain(k), scale)
        assert parts.change[j] == close(dense.predicted(k), scale)
        rivals = {i: dense.gain(i) for i in candidates if i not in [*dense.picked, k]}
        if rivals:
            assert parts.runner_up[j] in rivals
            assert rivals[parts.runner_up[j]] == close(max(rivals.values()), scale)
            assert parts.margin[j] == close(dense.gain(k) - max(rivals.values()), scale)
            assert not greedy or parts.margin[j] >= 0
        else:
            assert np.isnan(parts.runner_up[j])
            assert np.isnan(parts.margin[j])
        dense.pick(k)
    assert_allclose(
        parts.annealing * (parts.others + parts.own) - parts.redundancy,
        parts.gain,
        rtol=1e-10,
        atol=1e-12 * scale,
    )
    assert -parts.gain.sum() == close(p @ dense.mu, scale)  # everyone's predicted change


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), sites=st.integers(2, 4))
def test_under_rules_the_runner_up_could_have_had_the_seat(seed, sites):
    """Against the gains of all who may have the next seat, one pick at a time."""
    selector, rng = FedCor(4, **QUICK), np.random.default_rng(seed)
    federation = FakeFederation.example(12)
    columns = {"site": [str(k) for k in rng.integers(0, sites, size=12)]}
    groups = make_groups(Rules(at_most={"site": 2}), columns, np.ones(12, dtype=bool))
    state = selector.init(federation.population)
    for number in range(6):
        decision = decide(selector, state, federation, groups=groups)
        if number >= selector.warmup:
            alpha = decision.state["picked"].copy()
            alpha[decision.chosen] -= 1
            X, s2 = decision.state["embedding"], selector.noise**2
            dense = Dense(X, federation.weights, selector.beta**alpha, s2)
            seats = Seats(groups, 4, federation.available)
            for j, k in enumerate(decision.chosen.tolist()):
                rivals = {i: dense.gain(i) for i in seats.open.tolist() if i != k}
                runner_up, margin = decision.why["runner_up"][j], decision.why["margin"][j]
                if not rivals:
                    assert runner_up is margin is None
                    continue
                best = max(rivals.values())
                assert rivals[int(runner_up)] == pytest.approx(best, rel=1e-6, abs=1e-9)
                assert margin == pytest.approx(dense.gain(k) - best, rel=1e-5, abs=1e-9)
                assert margin >= 0
                dense.pick(k)
                seats = seats.give(k)
        state = observe(selector, decision.state, federation.train(decision.chosen))
