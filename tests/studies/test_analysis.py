"""What the paper examines besides accuracy, against obvious twins and known answers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_engines import MODELS, engine_of
from studies.loss_changes import loss_changes
from studies.measurements import (
    chance_purity,
    cosine_similarity,
    expected_similarity,
    normalised,
    principal_components,
    project,
    purity,
)
from studies.toy import losses, play, train

from fedcor.simulation.engine.train import LocalTraining


@pytest.mark.parametrize("holdout", [0.0, 0.3])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "a user's module"])
def test_many_candidates_equal_each_one_evaluated(model, holdout, monkeypatch):
    monkeypatch.setattr("studies.loss_changes._ROWS", 5)
    engine = engine_of(model, LocalTraining(8, 4, 0.1, weight_decay=0.01), holdout=holdout)
    selections = np.array([[0, 1], [4, 2], [3, 1], [1, 3]])
    seen = []
    fast = loss_changes(engine, engine.initial_model, 2, 0.1, selections, seen.append)
    everyone = np.arange(5)
    results = engine.train(engine.initial_model, everyone.tolist(), 2, 0.1)
    before = engine.losses(engine.initial_model, everyone)
    for row, selection in zip(fast, selections, strict=True):
        candidate = torch.stack([results[k] for k in selection]).mean(dim=0)
        assert np.allclose(row, engine.losses(candidate, everyone) - before, atol=2e-6)
    assert np.allclose(fast[2], fast[3])
    assert seen in ([], [1, 2, 3, 4])


def test_a_gaussian_passes_and_an_exponential_does_not():
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((3, 8)) * np.array([[9.0], [3.0], [1.0]])
    gaussian = principal_components(rng.standard_normal((1000, 3)) @ mixing, 3)
    skewed = principal_components(rng.exponential(size=(1000, 1)) @ mixing[:1], 1)
    assert all(component.p_value > 1e-3 for component in gaussian)
    assert [c.share for c in gaussian] == sorted((c.share for c in gaussian), reverse=True)
    assert sum(c.share for c in gaussian) == pytest.approx(1.0)
    assert skewed[0].p_value < 1e-9
    assert skewed[0].skewness == pytest.approx(2.0, abs=0.5)
    assert skewed[0].distance > 5 * max(c.distance for c in gaussian) / 2
    for component in gaussian:
        assert component.scores.std() == pytest.approx(1.0)


@given(st.integers(0, 1000), st.floats(0.1, 10.0))
def test_cosine_similarity(seed, scale):
    rng = np.random.default_rng(seed)
    A, B = (x @ x.T for x in rng.standard_normal((2, 5, 5)))
    assert cosine_similarity(A, scale * A) == pytest.approx(1.0)
    assert cosine_similarity(A, B) == pytest.approx(cosine_similarity(scale * B, A))
    expected = np.trace(A.T @ B) / np.sqrt(np.trace(A.T @ A) * np.trace(B.T @ B))
    assert cosine_similarity(A, B) == pytest.approx(expected)
    assert 0 <= cosine_similarity(A, B) <= 1 + 1e-12


def test_noise_alone_leaves_less_with_fewer_samples():
    rng = np.random.default_rng(0)
    changes = rng.standard_normal((2000, 30))
    assert expected_similarity(changes[:60]) < expected_similarity(changes) < 1


def test_purity_of_perfect_and_of_random_maps():
    labels = np.arange(20) % 4
    perfect = np.eye(4)[labels] * np.arange(1, 21)[:, None]  # lengths do not matter
    assert purity(perfect, labels, 4) == 1.0
    assert chance_purity(labels) == pytest.approx(4 / 19)
    rng = np.random.default_rng(0)
    mean = np.mean([purity(rng.standard_normal((20, 6)), labels, 4) for _ in range(200)])
    assert mean == pytest.approx(chance_purity(labels), abs=0.03)
    assert np.allclose(np.linalg.norm(normalised(perfect), axis=1), 1)
    assert np.isfinite(normalised(np.zeros((2, 2)))).all()


def test_the_map_is_the_same_every_time():
    X = np.random.default_rng(0).standard_normal((15, 4))
    assert project(X, 1).shape == (15, 2)
    assert np.array_equal(project(X, 1), project(X, 1))


def test_the_toy_choices_are_what_they_say():
    toy = play(3)
    features = np.column_stack([toy.samples, np.ones(len(toy.labels))])
    before = losses(toy.start, features, toy.labels)
    assert set(toy.choices["Ind"].clients) == set(np.argsort(-before)[:2])
    every = {}
    for pair in itertools.combinations(range(len(toy.labels)), 2):
        model = train(toy.start, features[list(pair)], toy.labels[list(pair)], 20, 0.2)
        every[pair] = losses(model, features, toy.labels).mean()
    assert toy.choices["Opt"].global_loss == pytest.approx(min(every.values()))
    assert toy.random_loss == pytest.approx(np.mean(list(every.values())))
    for choice in toy.choices.values():
        assert choice.global_loss == pytest.approx(every[tuple(sorted(choice.clients.tolist()))])


def test_the_toys_training_descends_the_gradient():
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((2, 3)), np.array([1.0, -1.0])
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.softplus(
        -torch.tensor(labels) * (torch.tensor(features) @ w)
    ).mean().backward()
    assert np.allclose(train(np.zeros(3), features, labels, 1, 0.3), -0.3 * w.grad.numpy())


def test_the_toy_on_seeds_that_chose_nothing():
    """The paper's claim: Cor is within a few per cent of Opt, Ind clearly worse."""
    games = [play(seed) for seed in range(1, 21)]
    cor, ind = (
        np.mean(
            [game.choices[name].global_loss / game.choices["Opt"].global_loss for game in games]
        )
        for name in ("Cor", "Ind")
    )
    assert cor < 1.06
    assert ind > 1.5
