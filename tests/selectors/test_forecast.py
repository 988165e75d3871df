"""How well the process foretells, against dense computations, and in the record of a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import kstest, multivariate_normal, norm
from studies.measurements import cosine_similarity

from fedcor.rounds.selection import decide, observe
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.gp.forecast import BINS, covariance_similarity, forecast
from fedcor.testing import FakeFederation


def dense_forecast(X, s2, y, trained):
    """Mean and covariance of those who did not train, by the textbook's formula."""
    Sigma = X @ X.T + s2 * np.eye(len(X))
    given, asked = np.isfinite(y) & trained, np.isfinite(y) & ~trained
    gain = Sigma[np.ix_(asked, given)] @ np.linalg.inv(Sigma[np.ix_(given, given)])
    mean = gain @ y[given]
    covariance = Sigma[np.ix_(asked, asked)] - gain @ Sigma[np.ix_(given, asked)]
    return mean, covariance, np.diag(Sigma)[asked], y[asked]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 25),
    d=st.integers(1, 6),
    s2=st.sampled_from([1e-4, 1e-2, 1.0]),
    silent=st.floats(0, 0.4),
)
def test_the_forecast_equals_the_dense_one(seed, n, d, s2, silent):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) * 0.3
    y = X @ rng.standard_normal(d) + np.sqrt(s2) * rng.standard_normal(n)
    y[rng.random(n) < silent] = np.nan
    trained = rng.random(n) < 0.4
    told = forecast(X, s2, y, trained)
    if not (np.isfinite(y) & ~trained).any():
        assert told is None
        return
    mean, covariance, prior, came = dense_forecast(X, s2, y, trained)
    assert_array_equal(told.changes, came)
    assert_allclose(told.errors, came - mean, rtol=1e-6, atol=1e-7)
    deviation = np.sqrt(np.diag(covariance))
    assert_allclose(told.residuals, (came - mean) / deviation, rtol=1e-5, atol=1e-5)
    joint = multivariate_normal(mean, covariance, allow_singular=True).logpdf(came) / len(came)
    assert told.log_score == pytest.approx(joint, rel=1e-5, abs=1e-5)
    assert told.each == pytest.approx(norm.logpdf(came, mean, deviation).mean(), abs=1e-5)
    alone = norm.logpdf(came, 0, np.sqrt(prior)).mean()
    assert told.independent == pytest.approx(alone, abs=1e-9)


def test_bins_are_of_equal_probability_and_hold_every_residual():
    told = forecast(np.zeros((4000, 1)), 1.0, norm.ppf((np.arange(4000) + 0.5) / 4000),
                    np.zeros(4000, dtype=bool))  # fmt: skip
    assert_array_equal(told.bins, np.full(BINS, 4000 // BINS))
    assert forecast(np.zeros((1, 1)), 1.0, np.array([9.0]), np.zeros(1, dtype=bool)).bins[-1] == 1


def test_a_process_that_is_right_is_calibrated_and_better_than_independence():
    rng = np.random.default_rng(0)
    X, s2, residuals, better = rng.standard_normal((40, 3)), 0.01, [], 0.0
    trained = np.arange(40) < 5
    for _ in range(200):
        y = X @ rng.standard_normal(3) + 0.1 * rng.standard_normal(40)
        told = forecast(X, s2, y, trained)
        residuals.append(told.residuals[0])  # one of each: those of one sample are correlated
        assert told.log_score > told.independent
        better += told.each - told.independent
    assert kstest(residuals, "norm").pvalue > 0.01
    assert better > 0


def test_numbers_that_cannot_be_computed_with_are_no_forecast():
    X, trained = np.ones((3, 2)), np.array([True, False, False])
    for scale in (1e9, 1e200):  # a matrix that is singular but for rounding; numbers that overflow
        assert forecast(scale * X, 1e-4, np.ones(3), trained) is None
    assert np.isnan(covariance_similarity(1e200 * X, X, 1e-4))


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 5), st.floats(1e-4, 2))
def test_the_similarity_equals_the_dense_one(seed, n, d, s2):
    rng = np.random.default_rng(seed)
    X, Y = rng.standard_normal((n, d)), rng.standard_normal((n, d))
    dense = cosine_similarity(X @ X.T + s2 * np.eye(n), Y @ Y.T + s2 * np.eye(n))
    assert covariance_similarity(X, Y, s2) == pytest.approx(dense, abs=1e-12)
    assert covariance_similarity(X, X, s2) == pytest.approx(1)


@pytest.mark.parametrize("tries", [1, 3])
def test_what_the_record_says_is_the_forecast_before_the_fit(tries):
    """From the process before each round, and the changes that the federation answered."""
    selector = FedCor(3, warmup=3, interval=2, samples_per_refit=tries, dimension=2)
    federation = FakeFederation.example(12)
    answers, ask = [], federation.loss_changes
    federation.loss_changes = lambda s: answers.append((s, ask(s))) or answers[-1][1]
    state, told_rounds = selector.init(federation.population), []
    for number in range(7):
        answers.clear()
        decision = decide(selector, state, federation)
        details = decision.details
        if number == 0:
            assert details == {"fitted": [1]}
        elif not answers:
            assert details == {}
        else:
            told_rounds.append(number)
            told = []
            for selection, y in answers:
                trained = np.isin(np.arange(12), selection)
                told.append(forecast(state["embedding"], selector.noise**2, y, trained))
            assert details["forecast_clients"] == [9] * len(answers)
            assert details["log_score"] == pytest.approx([f.log_score for f in told], rel=1e-5)
            assert details["log_score_each"] == pytest.approx([f.each for f in told], rel=1e-5)
            independent = [f.independent for f in told]
            assert details["log_score_independent"] == pytest.approx(independent, rel=1e-5)
            assert details["residual_bins"] == sum(f.bins for f in told).tolist()
            z, e, y = (
                np.concatenate([getattr(f, name) for f in told])
                for name in ("residuals", "errors", "changes")
            )
            sums = [details[k][0] for k in ("residual_squares", "squared_errors")]
            assert sums == pytest.approx([z @ z, e @ e], rel=1e-5)
            assert details["squared_changes"] == pytest.approx([y @ y], rel=1e-5)
            assert details["squared_forecasts"] == pytest.approx([(y - e) @ (y - e)], rel=1e-5)
            s2, X, Y = selector.noise**2, state["embedding"], decision.state["embedding"]
            assert details["similarity"] == pytest.approx([covariance_similarity(X, Y, s2)], 1e-5)
        state = observe(selector, decision.state, federation.train(decision.chosen))
    assert told_rounds == [1, 2, 4, 6]
