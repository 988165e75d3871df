"""Partitions: every sample in exactly one client, nobody empty, and each fallback reached."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedcor.core.errors import ConfigError, DataError, MissingExtraError
from fedcor.core.rng import stream
from fedcor.core.types import FloatArray, IntArray
from fedcor.data import partition
from fedcor.data.datasets import load
from fedcor.data.partition import (
    IID,
    Dirichlet,
    Shards,
    client_sizes,
    label_distributions,
    randomise_labels,
    round_to_row_sums,
)
from fedcor.data.partitioners import Partitioner, as_partition

SEEDS = st.integers(0, 2**32 - 1)


def assert_whole(parts: list[IntArray], samples: int, clients: int) -> IntArray:
    """Each sample in exactly one client, in ascending order, nobody empty; returns the sizes."""
    assert len(parts) == clients
    for part in parts:
        assert part.dtype == np.int64
        assert np.all(np.diff(part) > 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(samples))
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 1
    return sizes


def counts_of(parts: list[IntArray], labels: IntArray) -> IntArray:
    """(N, L) samples of each label on each client."""
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


@st.composite
def labels_and_clients(draw: st.DrawFn) -> tuple[IntArray, int]:
    labels = np.array(draw(st.lists(st.integers(0, 6), min_size=1, max_size=120)))
    return labels, draw(st.integers(1, len(labels)))


@given(labels_and_clients(), SEEDS)
def test_iid_is_whole_and_even(case: tuple[IntArray, int], seed: int) -> None:
    labels, clients = case
    sizes = assert_whole(IID(clients).split(labels, stream(seed, "test")), len(labels), clients)
    assert np.ptp(sizes) <= 1


@given(labels_and_clients(), SEEDS, st.data())
def test_shards_are_whole_and_even(
    case: tuple[IntArray, int], seed: int, data: st.DataObject
) -> None:
    labels, clients = case
    per_client = data.draw(st.integers(1, len(labels) // clients))
    parts = Shards(clients, per_client).split(labels, stream(seed, "test"))
    sizes = assert_whole(parts, len(labels), clients)
    assert np.ptp(sizes) <= per_client
    # A shard is a run in the order of the labels, so a client of c shards holds at most c runs.
    rank = np.empty(len(labels), int)
    rank[np.argsort(labels, kind="stable")] = np.arange(len(labels))
    for part in parts:
        assert np.sum(np.diff(np.sort(rank[part])) > 1) < per_client


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 6), SEEDS)
def test_one_shard_is_one_label_when_it_divides(
    labels: int, clients_a_label: int, size: int, seed: int
) -> None:
    y = stream(seed, "labels").permutation(np.repeat(np.arange(labels), clients_a_label * size))
    parts = Shards(labels * clients_a_label, 1).split(y, stream(seed, "test"))
    for part in parts:
        assert len(part) == size
        assert len(np.unique(y[part])) == 1


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), st.integers(4, 10), st.floats(0.05, 50), st.integers(1, 3), SEEDS)
def test_dirichlet_is_whole(
    labels: int, clients_a_label: int, alpha: float, minimum: int, seed: int
) -> None:
    clients = labels * clients_a_label
    y = stream(seed, "labels").integers(0, labels, 12 * clients)
    parts = Dirichlet(clients, alpha, minimum).split(y, stream(seed, "test"))
    assert_whole(parts, len(y), clients)


@pytest.mark.parametrize("kind", ["iid", "shards", "dirichlet"])
def test_same_stream_same_partition(kind: Any) -> None:
    labels = stream(0, "labels").integers(0, 10, 2000)
    partition = as_partition({"kind": kind, "clients": 40})
    first, second, other = (
        partition.split(labels, stream(seed, "partition")) for seed in (1, 1, 2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# The Dirichlet draw


def test_label_distributions_follow_the_dirichlet_distribution() -> None:
    """Against the known marginal, q_l ~ Beta(α p_l, α (1 - p_l)), where nothing underflows."""
    p = np.array([0.5, 0.3, 0.2])
    q = label_distributions(p, 4000, 6.0, stream(0, "test"))
    np.testing.assert_allclose(q.sum(axis=0), 1)
    for row, share in zip(q, p, strict=True):
        assert stats.kstest(row, stats.beta(6 * share, 6 * (1 - share)).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.2, 1e6])
def test_label_distributions_do_not_underflow(alpha: float) -> None:
    p = np.full(10, 0.1)
    q = label_distributions(p, 5000, alpha, stream(0, "test"))
    assert np.isfinite(q).all()
    np.testing.assert_allclose(q.sum(axis=0), 1, atol=1e-10)
    np.testing.assert_allclose(q.mean(axis=1), p, atol=0.02)
    if alpha < 1e-2:  # in the limit, one label each, in the proportions of the prior
        assert np.mean(q.max(axis=0) > 0.999) > 0.95


def test_at_the_papers_alpha_a_client_holds_nearly_one_label() -> None:
    """Its mean square entry is known: sum E q_l^2 = (1 + α sum p_l^2) / (1 + α)."""
    q = label_distributions(np.full(10, 0.1), 20_000, 0.2, stream(0, "test"))
    assert (q**2).sum(axis=0).mean() == pytest.approx((1 + 0.2 * 0.1) / 1.2, abs=0.005)


# The quadratic programme


@pytest.mark.parametrize("seed", range(40))
def test_sizes_equal_those_of_a_general_optimiser(seed: int) -> None:
    rng = stream(seed, "programme")
    labels, clients, alpha = rng.integers(2, 5), rng.integers(6, 13), np.exp(rng.uniform(-1, 3))
    q = label_distributions(np.full(labels, 1 / labels), clients, alpha, rng)
    d = q @ (10 + rng.exponential(50, clients))  # so that there is a solution
    slow = optimize.minimize(
        lambda z: z @ z / 2 / d.sum(),
        np.full(clients, d.sum() / clients),
        jac=lambda z: z / d.sum(),
        bounds=[(10, None)] * clients,
        constraints={"type": "eq", "fun": lambda z: q @ z - d, "jac": lambda _: q},
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    np.testing.assert_allclose(client_sizes(q, d, 10), slow.x, atol=1e-3)


@pytest.mark.parametrize(
    ("clients", "alpha", "share"),
    [(100, 0.2, 0.5), (100, 1.0, 0.8), (100, 1e6, 0.8), (1000, 0.2, 0.9), (3000, 0.2, 0.9)],
)
def test_sizes_satisfy_the_optimality_conditions(clients: int, alpha: float, share: float) -> None:
    """x_k = max(minimum, q_k'ν) for one ν in R^L, with Qx = d: it is strictly convex."""
    rng = stream(1, "test")
    d, minimum = np.full(10, 6000), share * 60_000 / clients
    x = None
    while x is None:
        q = label_distributions(d / d.sum(), clients, alpha, rng)
        x = client_sizes(q, d, minimum)
    np.testing.assert_allclose(q @ x, d, rtol=1e-7)
    assert x.min() >= minimum
    free = x > minimum * (1 + 1e-6)
    assert 10 < free.sum() < clients, "the bound is active for some and not for others"
    nu = np.linalg.lstsq(q[:, free].T, x[free], rcond=None)[0]
    np.testing.assert_allclose(np.maximum(q.T @ nu, minimum), x, rtol=1e-4)


def test_a_programme_without_solution_is_recognised() -> None:
    assert client_sizes(np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([5, 5]), 1) is None
    assert client_sizes(np.eye(2), np.array([5, 50]), 6) is None
    np.testing.assert_allclose(client_sizes(np.eye(2), np.array([5, 50]), 5), [5, 50], rtol=1e-6)


# Fallbacks, each really reached


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each programme that was posed had a solution."""
    seen: list[bool] = []
    real: Callable[..., FloatArray | None] = client_sizes

    def watched(*arguments: Any) -> FloatArray | None:
        x = real(*arguments)
        seen.append(x is not None)
        return x

    monkeypatch.setattr(partition, "client_sizes", watched)
    return seen


def test_redraws_until_it_fits(calls: list[bool]) -> None:
    labels = np.arange(1437) % 10
    parts = Dirichlet(20, 0.2, 10).split(labels, stream(2, "test"))
    assert_whole(parts, 1437, 20)
    assert calls[-1]
    assert calls.count(False) == len(calls) - 1 >= 1


def test_gives_up_after_a_bounded_number_of_redraws(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "REDRAWS", 20)
    with pytest.raises(
        DataError,
        match=r"any of 20 draws.*10 clients, 10 labels.*raise alpha, or lower minimum_size",
    ):
        Dirichlet(10, 0.2, 10).split(np.arange(1000) % 10, stream(1, "test"))
    assert calls == [False] * 20


def test_the_remainder_goes_to_clients_that_rounding_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posed: list[tuple[FloatArray, IntArray]] = []

    def watched(amounts: FloatArray, d: IntArray, rng: np.random.Generator) -> IntArray:
        posed.append((amounts, d))
        return round_to_row_sums(amounts, d, rng)

    monkeypatch.setattr(partition, "round_to_row_sums", watched)
    labels = np.arange(6000) % 10
    parts = Dirichlet(50, 1.0).split(labels, stream(1, "test"))
    ((amounts, d),) = posed
    counts = counts_of(parts, labels).T  # (L, N)
    np.testing.assert_array_equal(counts.sum(axis=1), d)
    left = d - np.floor(amounts + 1e-6).sum(axis=1)
    assert np.all(left > 0), "there was a remainder of every label"
    assert np.abs(counts - amounts).max() < 1
    assert np.all(counts[amounts == 0] == 0)


def test_the_remainder_is_unbiased() -> None:
    amounts, d = np.array([[0.5, 1.5, 2.5, 0.5]]), np.array([5])
    rng = stream(0, "test")
    drawn = np.mean([round_to_row_sums(amounts, d, rng)[0] for _ in range(4000)], axis=0)
    np.testing.assert_allclose(drawn, amounts[0], atol=0.05)


def test_whole_amounts_stay_whatever_the_solvers_tolerance() -> None:
    amounts = np.array([[3.0, 2.0, 5.0]]) * (1 - 1e-9)
    rounded = round_to_row_sums(amounts, np.array([10]), stream(0, "test"))
    np.testing.assert_array_equal(rounded, [[3, 2, 5]])


def test_an_emptied_client_is_given_a_sample_of_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[IntArray, IntArray]] = []
    real = partition._fill_empty

    def watched(owner: IntArray, clients: int, rng: np.random.Generator) -> None:
        before = np.bincount(owner, minlength=clients)
        real(owner, clients, rng)
        seen.append((before, np.bincount(owner, minlength=clients)))

    monkeypatch.setattr(partition, "_fill_empty", watched)
    sizes = assert_whole(Dirichlet(20, 10.0, 1).split(np.arange(30) % 3, stream(1, "test")), 30, 20)
    ((before, after),) = seen
    assert np.sum(before == 0) >= 1
    np.testing.assert_array_equal(after, sizes)
    np.testing.assert_array_equal(after[before == 0], 1)
    assert np.all(after[before > 0] <= before[before > 0])
    assert after.max() < before.max() or np.sum(after == after.max()) < np.sum(
        before == before.max()
    )


# Unequal sizes, random labels


@given(labels_and_clients(), SEEDS, st.floats(0.1, 10), st.data())
def test_skewed_sizes_are_whole_and_leave_nobody_out(
    case: tuple[IntArray, int], seed: int, skew: float, data: st.DataObject
) -> None:
    labels, clients = case
    assert_whole(
        IID(clients, size_skew=skew).split(labels, stream(seed, "test")),
        len(labels),
        clients,
    )
    each = data.draw(st.integers(1, len(labels) // clients))
    partition = Shards(clients, each, size_skew=skew)
    assert_whole(partition.split(labels, stream(seed, "test")), len(labels), clients)


def test_skewed_sizes_have_the_logarithmic_spread_asked_for() -> None:
    labels = np.arange(400_000) % 10
    sizes = [len(part) for part in IID(2000, size_skew=1.2).split(labels, stream(1, "test"))]
    assert np.std(np.log(sizes)) == pytest.approx(1.2, rel=0.06)
    # A shard is a run of sorted labels, however long.
    parts = Shards(200, 1, size_skew=1.2).split(labels, stream(1, "test"))
    assert all(np.ptp(labels[part]) <= 1 + 10 * len(part) / len(labels) for part in parts)


@given(st.floats(0, 1), SEEDS)
def test_random_labels_on_a_share_of_the_clients_and_nobody_else(share: float, seed: int) -> None:
    labels = np.repeat(np.arange(10), 60)
    parts = Shards(20, 1).split(labels, stream(seed, "parts"))
    if share > 0 and round(share * 20) == 0:
        with pytest.raises(ConfigError, match="less than one of 20 clients"):
            randomise_labels(labels, 10, parts, share, stream(seed, "noise"))
        return
    noisy = randomise_labels(labels, 10, parts, share, stream(seed, "noise"))
    changed = [k for k, part in enumerate(parts) if np.any(noisy[part] != labels[part])]
    assert len(changed) == round(share * 20)  # thirty draws never all hit the one true label
    assert noisy.min() >= 0
    assert noisy.max() < 10


def test_random_labels_are_uniform() -> None:
    labels = np.zeros(10_000, dtype=np.int64)
    noisy = randomise_labels(labels, 10, [np.arange(10_000)], 1.0, stream(1, "noise"))
    assert stats.chisquare(np.bincount(noisy, minlength=10)).pvalue > 0.001


# Settings


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("clients", 0, "whole number of at least 1"),
        ("clients", 2.5, "whole number of at least 1"),
        ("clients", True, "whole number of at least 1"),
        ("shards_per_client", 0, "whole number of at least 1"),
        ("minimum_size", 0, "whole number of at least 1"),
        ("size_skew", -0.1, "from 0 to 10"),
        ("size_skew", float("nan"), "from 0 to 10"),
        ("alpha", 0, "from 1e-06 to 1e"),
        ("alpha", float("nan"), "from 1e-06 to 1e"),
        ("alpha", float("inf"), "from 1e-06 to 1e"),
        ("alpha", "0.2", "from 1e-06 to 1e"),
        ("alpha", True, "from 1e-06 to 1e"),
    ],
)
def test_settings_that_cannot_work(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        kind = Dirichlet if key in Dirichlet.__dataclass_fields__ else Shards
        kind(**{"clients": 10, key: value})
    assert error.value.key == key


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        ({"kind": "shard"}, "kind", 'did you mean "shards"'),
        ({}, "kind", "must be one of iid, shards, dirichlet"),
        ({"kind": "dirichlet", "size_skew": 1.0}, "size_skew", "must be 0 for a dirichlet"),
        ({"kind": "iid", "alpah": 1.0}, "alpah", "unknown setting"),
        ({"kind": "iid", "clients": "10"}, "clients", "whole number"),
    ],
)
def test_tables_that_cannot_work(table: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        as_partition({"clients": 10, **table})
    assert error.value.key == f"partition.{key}"


def test_a_table_may_have_parameters_of_another_kind() -> None:
    """So that `partition.kind` of a preset can be overridden alone."""
    table = {"kind": "iid", "clients": 10, "alpha": 0.2, "shards_per_client": 2}
    assert as_partition(table) == IID(10)


@pytest.mark.parametrize(
    ("partition", "key"),
    [
        (IID(31), "clients"),
        (Shards(31), "clients"),
        (Shards(10, shards_per_client=4), "shards_per_client"),
        (Dirichlet(31), "clients"),
        (Dirichlet(2, minimum_size=1), "clients"),
        (Dirichlet(10, minimum_size=4), "minimum_size"),
    ],
)
def test_settings_that_do_not_fit_the_data(partition: Partitioner, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        partition.split(np.arange(30) % 3, stream(1, "test"))
    assert error.value.key == key


def test_labels_must_be_a_list_unless_only_their_number_counts() -> None:
    with pytest.raises(DataError, match=r"shape \(5, 2\)"):
        Shards(2, 1).split(np.zeros((5, 2)), stream(1, "test"))
    assert [len(part) for part in IID(2).split(np.zeros((5, 2)), stream(1, "test"))] == [3, 2]


def test_missing_clarabel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "clarabel", None)
    with pytest.raises(MissingExtraError, match=r"clarabel.*sim"):
        Dirichlet(5, 1.0).split(np.arange(100) % 2, stream(1, "test"))


# The paper's settings on the real labels


def test_fmnist_as_the_paper_divides_it() -> None:
    labels = load("fmnist").train_y
    for seed in range(1, 6):
        parts = Dirichlet(100, alpha=0.2).split(labels, stream(seed, "partition"))
        sizes = assert_whole(parts, 60_000, 100)
        assert sizes.min() >= 10
        assert 1.2 < sizes.max() / sizes.mean() < 4, "unbalanced, but not over-concentrated"
        counts = counts_of(parts, labels)
        assert np.mean(counts.max(axis=1) / sizes) > 0.75, "most clients hold nearly one label"
    two, one = (
        Shards(100, shards_per_client=c).split(labels, stream(1, "partition")) for c in (2, 1)
    )
    assert np.all(assert_whole(two, 60_000, 100) == 600)
    assert np.all((counts_of(two, labels) > 0).sum(axis=1) <= 2)
    assert np.all((counts_of(one, labels) > 0).sum(axis=1) == 1)
