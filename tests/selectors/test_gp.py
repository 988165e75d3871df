"""The low-rank Gaussian process against dense computations: selection, likelihood and fit."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime
from scipy.stats import multivariate_normal
from selector_helpers import select, take_apart

from fedcor.selectors.gp.fit import Samples, fit, log_likelihood_gradient
from fedcor.selectors.gp.greedy import select_proxy


def dense_algorithm_1(X, p, alpha, s2, count, candidates):
    """The paper's Algorithm 1 on the N x N covariance: the picks, and all gains at each pick."""
    N = len(X)
    mu, Sigma = np.zeros(N), X @ X.T + s2 * np.eye(N)
    picked, gains = [], []
    while len(picked) < min(count, len(candidates)):
        objective = np.full(N, np.inf)
        for k in candidates:
            if k in picked:
                continue
            predicted = mu[k] - alpha[k] * math.sqrt(Sigma[k, k])  # line 4
            posterior = mu + Sigma[:, k] / Sigma[k, k] * (predicted - mu[k])  # line 5
            objective[k] = p @ posterior
        k = int(np.argmin(objective))  # line 7
        gains.append((p @ mu) - objective)
        predicted = mu[k] - alpha[k] * math.sqrt(Sigma[k, k])
        mu = mu + Sigma[:, k] / Sigma[k, k] * (predicted - mu[k])  # line 9
        Sigma = Sigma - np.outer(Sigma[:, k], Sigma[k]) / Sigma[k, k]
        picked.append(k)  # line 8
    return np.array(picked), np.array(gains)


@st.composite
def problems(draw, largest=60):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    N, d = draw(st.integers(1, largest)), draw(st.integers(1, 8))
    X = rng.standard_normal((N, d)) * draw(st.sampled_from([0.01, 0.1, 1.0, 10.0]))
    if draw(st.booleans()):  # copies of clients, which are fully redundant
        X[N // 2 :] = X[: N - N // 2]
    p = rng.dirichlet(np.ones(N)) if draw(st.booleans()) else np.full(N, 1 / N)
    alpha = draw(st.sampled_from([0.5, 0.95])) ** rng.integers(0, 4, size=N)
    s2 = draw(st.sampled_from([1e-4, 1e-2, 1.0]))
    candidates = np.sort(rng.choice(N, size=draw(st.integers(1, N)), replace=False))
    return X, p, alpha, s2, draw(st.integers(1, 10)), candidates


def assert_same_choice(problem):
    X, p, alpha, s2, count, candidates = problem
    fast = select(X, p, alpha, s2, count, candidates)
    slow, gains = dense_algorithm_1(X, p, alpha, s2, count, candidates)
    for j, (ours, theirs) in enumerate(zip(fast.clients, slow, strict=True)):
        scale = np.abs(gains[j][np.isfinite(gains[j])]).max()
        assert gains[j][ours] == pytest.approx(gains[j][theirs], rel=1e-6, abs=1e-6 * scale)
        assert fast.gain[j] == pytest.approx(gains[j][ours], rel=1e-5, abs=1e-6 * scale)
        if ours != theirs:  # a tie: both are right, and what follows may differ
            return


@settings(max_examples=300)
@given(problems())
def test_selection_equals_dense_algorithm_1(problem):
    assert_same_choice(problem)


@settings(deadline=None)
@given(problems(), st.integers(1, 5))
def test_the_compiled_selection_equals_dense_algorithm_1(problem, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcor.selectors.numba_passes.COMPILED_FROM", 0)
        patch.setattr("fedcor.selectors.gp.posterior.BLOCK", block)
        assert_same_choice(problem)


@pytest.mark.parametrize("seed", range(5))
def test_the_compiled_selection_equals_numpys_with_thousands_of_clients(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    N = 3_000 + 700 * seed
    X, p = rng.standard_normal((N, 2 + 4 * seed)) * 0.3, rng.dirichlet(np.ones(N))
    candidates = np.arange(N) if seed % 2 else np.sort(rng.permutation(N)[: N // 2])
    problem = X, p, 0.9 ** rng.integers(0, 5, size=N), 1e-4, 40, candidates
    with_numpy = select(*problem, earlier=np.setdiff1d(np.arange(N), candidates)[:3])
    monkeypatch.setattr("fedcor.selectors.numba_passes.COMPILED_FROM", 0)
    compiled = select(*problem, earlier=np.setdiff1d(np.arange(N), candidates)[:3])
    assert np.array_equal(compiled.clients, with_numpy.clients)
    assert compiled.gain == pytest.approx(with_numpy.gain, rel=1e-9)
    again = select(*problem, earlier=np.setdiff1d(np.arange(N), candidates)[:3])
    assert np.array_equal(again.gain, compiled.gain)  # to the last bit
    # Reasons are of the same passes.
    picks = with_numpy.clients
    ours = take_apart(*problem[:4], picks, candidates)
    monkeypatch.setattr("fedcor.selectors.numba_passes.COMPILED_FROM", 10**9)
    theirs = take_apart(*problem[:4], picks, candidates)
    assert np.array_equal(ours.runner_up, theirs.runner_up)
    assert ours.gain == pytest.approx(theirs.gain, rel=1e-9)
    assert ours.margin == pytest.approx(theirs.margin, abs=1e-9 * theirs.gain.max())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_compiled_pass_finds_the_first_of_equal_gains_and_negative_ones(sign, monkeypatch):
    """Two groups of 2,000 equal clients, all of whose gains are negative if weights are."""
    X = np.repeat(np.array([[1.0, 0.1], [0.2, 0.9]]), 2_000, axis=0)
    problem = X, np.full(4_000, sign / 4_000), np.ones(4_000), 1e-2, 6, np.arange(4_000)
    with_numpy = select(*problem)
    monkeypatch.setattr("fedcor.selectors.numba_passes.COMPILED_FROM", 0)
    compiled = select(*problem)
    assert compiled.gain == pytest.approx(with_numpy.gain, rel=1e-9)
    assert len(np.unique(compiled.clients)) == 6
    assert np.sign(compiled.gain[0]) == sign


def test_where_no_gain_is_a_number_the_compiled_pass_still_names_different_clients(monkeypatch):
    monkeypatch.setattr("fedcor.selectors.numba_passes.COMPILED_FROM", 0)
    p = np.full(300, np.nan)
    picks = select(np.ones((300, 2)), p, np.ones(300), 0.01, 3, np.arange(300))
    assert picks.clients.tolist() == [0, 1, 2]


def test_without_numba_many_clients_are_chosen_from_as_well(monkeypatch):
    rng = np.random.default_rng(0)
    problem = rng.standard_normal((500, 3)), np.full(500, 1 / 500), np.ones(500), 0.01
    expected = select(*problem, 9, np.arange(500))
    monkeypatch.setattr("fedcor.selectors.numba_passes.COMPILED_FROM", 0)
    monkeypatch.delitem(sys.modules, "fedcor.selectors.compiled", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    found = select(*problem, 9, np.arange(500))
    assert np.array_equal(found.clients, expected.clients)
    assert np.array_equal(found.gain, expected.gain)


@given(problems(), st.integers(1, 5))
def test_selection_in_blocks_of_clients_is_the_selection_at_once(problem, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcor.selectors.gp.posterior.BLOCK", block)
        assert_same_choice(problem)


@pytest.mark.parametrize("seed", range(5))
def test_selection_equals_dense_algorithm_1_with_500_clients(seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((500, 15)) * 0.2
    p = rng.dirichlet(np.ones(500))
    problem = X, p, 0.95 ** rng.integers(0, 5, size=500), 1e-4, 20, np.arange(500)
    assert_same_choice(problem)
    assert np.array_equal(select(*problem).clients, dense_algorithm_1(*problem)[0])  # no ties here


@given(problems(largest=25))
def test_the_gains_of_the_first_two_picks_are_those_of_lemma_3(problem):
    X, p, alpha, s2, _, _ = problem
    N = len(X)
    picks = select(X, p, alpha, s2, 2, np.arange(N))
    Sigma = X @ X.T + s2 * np.eye(N)
    sigma = np.sqrt(np.diag(Sigma))
    r = Sigma / np.outer(sigma, sigma)
    single = r @ (p * sigma)  # sum_i p_i sigma_i r_ik
    first = alpha * single
    k1 = picks.clients[0]
    assert picks.gain[0] == pytest.approx(first[k1])
    assert first[k1] == pytest.approx(first.max(), rel=1e-9)
    if N > 1:
        others = np.delete(np.arange(N), k1)
        second = (
            alpha[others]
            * (single[others] - r[k1, others] * single[k1])
            / np.sqrt(1 - r[k1, others] ** 2)
        )
        k2 = picks.clients[1]
        scale = np.abs(second).max()
        assert picks.gain[1] == pytest.approx(second[others == k2][0], rel=1e-5, abs=1e-6 * scale)
        assert picks.gain[1] >= second.max() - 1e-6 * scale


def test_a_copy_of_a_picked_client_is_not_picked():
    X = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.9]])
    picks = select(X, np.full(3, 1 / 3), np.ones(3), 1e-4, 2, np.arange(3))
    assert set(picks.clients) == {0, 2}


def test_only_candidates_are_picked_but_the_losses_of_all_clients_count():
    X = np.array([[1.0, 0.0], [0.0, 0.6], [0.0, 0.5], [0.0, 0.5]])
    picks = select(X, np.full(4, 0.25), np.ones(4), 1e-4, 1, np.array([0, 1]))
    assert picks.clients.tolist() == [1]  # it is correlated with 2 and 3, which are no candidates


@given(problems())
def test_proxy_takes_the_largest_sums_of_covariances(problem):
    X, p, _, s2, count, candidates = problem
    chosen = select_proxy(X, p, s2, count, candidates)
    score = (X @ X.T + s2 * np.eye(len(X))) @ p
    assert len(np.unique(chosen)) == min(count, len(candidates))
    assert np.isin(chosen, candidates).all()
    rest = np.setdiff1d(candidates, chosen)
    if len(rest):
        assert score[chosen].min() >= score[rest].max() - 1e-12 * np.abs(score).max()


@st.composite
def sampled(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    N, d, m = draw(st.integers(2, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    Y = rng.standard_normal((m, N))
    if draw(st.booleans()):
        Y[rng.random((m, N)) < 0.4] = np.nan  # clients that did not answer; possibly all
    return (
        rng.standard_normal((N, d)),
        Samples(Y, 0.9 ** np.arange(m)),
        draw(st.sampled_from([0.01, 0.3, 1.0])),
    )


@given(sampled(), st.integers(1, 5))
def test_the_gradient_in_blocks_of_clients_is_the_gradient_at_once(problem, block):
    X, samples, s2 = problem
    whole = log_likelihood_gradient(X, samples, s2)
    fitted = fit(X, samples, s2, steps=3, learning_rate=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcor.selectors.gp.posterior.BLOCK", block)
        scale = np.abs(whole).max(initial=1e-300)
        assert log_likelihood_gradient(X, samples, s2) == pytest.approx(whole, abs=1e-9 * scale)
        assert fit(X, samples, s2, 3, 0.01) == pytest.approx(fitted, abs=1e-6)


def log_likelihood(X, samples, s2):
    """Phi, by the dense normal distribution of the clients that answered."""
    Sigma, total = X @ X.T + s2 * np.eye(len(X)), 0.0
    for y, w in zip(samples.Y, samples.w, strict=True):
        known = np.isfinite(y)
        if known.any():
            normal = multivariate_normal(np.zeros(known.sum()), Sigma[np.ix_(known, known)])
            total += w * normal.logpdf(y[known])
    return total


@given(sampled())
def test_gradient_equals_finite_differences(problem):
    X, samples, s2 = problem

    def likelihood(x):
        return log_likelihood(x.reshape(X.shape), samples, s2)

    differences = approx_fprime(X.reshape(-1), likelihood, 1e-6)
    gradient = log_likelihood_gradient(X, samples, s2).reshape(-1)
    scale = max(1.0, np.abs(differences).max())
    assert np.allclose(gradient, differences, rtol=1e-3, atol=1e-3 * scale)


def test_the_embedding_of_a_client_that_never_answered_does_not_change():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((6, 2))
    Y = rng.standard_normal((3, 6))
    Y[:, 4] = np.nan
    fitted = fit(X, Samples(Y, np.ones(3)), 0.01, steps=20, learning_rate=0.01)
    assert np.array_equal(fitted[4], X[4])
    assert not np.allclose(np.delete(fitted, 4, 0), np.delete(X, 4, 0))


def test_a_fit_without_answers_changes_nothing():
    X = np.ones((3, 2))
    assert np.array_equal(fit(X, Samples(np.full((2, 3), np.nan), np.ones(2)), 0.01, 5, 0.01), X)


def test_the_fit_equals_torchs_adam():
    import torch

    rng = np.random.default_rng(3)
    X, Y, s2 = rng.standard_normal((7, 3)), rng.standard_normal((2, 7)), 0.05
    samples = Samples(Y, np.array([1.0, 0.9]))
    theirs = torch.tensor(X, requires_grad=True)
    adam = torch.optim.Adam([theirs], lr=0.01)
    for _ in range(60):
        adam.zero_grad()
        normal = torch.distributions.MultivariateNormal(
            torch.zeros(7, dtype=torch.float64),
            theirs @ theirs.T + s2 * torch.eye(7, dtype=torch.float64),
        )
        (-(normal.log_prob(torch.tensor(Y)) * torch.tensor(samples.w)).sum()).backward()
        adam.step()
    assert np.allclose(fit(X, samples, s2, 60, 0.01), theirs.detach().numpy(), atol=1e-9)


def test_a_fit_raises_the_likelihood_and_finds_the_groups():
    """The losses of two groups change oppositely: the learnt covariance has the right signs."""
    rng = np.random.default_rng(1)
    direction = np.repeat([1.0, -1.0], 5)
    Y = rng.standard_normal((10, 1)) * direction + 0.05 * rng.standard_normal((10, 10))
    X = rng.standard_normal((10, 3)) / math.sqrt(3)
    samples = Samples(Y, np.ones(10))
    fitted = fit(X, samples, 1e-2, steps=2000, learning_rate=0.01)
    assert log_likelihood(fitted, samples, 1e-2) > log_likelihood(X, samples, 1e-2)
    covariance = fitted @ fitted.T
    assert (np.sign(covariance) == np.outer(direction, direction)).all()
