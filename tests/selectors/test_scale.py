"""Many clients: what is kept in blocks equals what is kept whole, and memory grows with N alone."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from selector_helpers import play
from studies.relatives import Combined, Herding, UpdateProcess

from fedcor import Aligned, Complement, FedCor
from fedcor.rounds.selection import decide, observe
from fedcor.selectors import selector_class, selector_names
from fedcor.selectors.base import longest_ago, without
from fedcor.selectors.fedcor import _annealing
from fedcor.selectors.gp.forecast import covariance_similarity, forecast
from fedcor.selectors.gp_selector import _of_last_rounds
from fedcor.selectors.matching import match, replacements
from fedcor.selectors.update_memory import (
    ROWS,
    extend_table,
    replace_rows,
    table_blocks,
    table_rows,
)
from fedcor.testing import FakeFederation, check_selector

# --- a table in blocks ------------------------------------------------------------------------


@given(st.data(), st.integers(1, 6), st.integers(1, 30), st.integers(0, 3))
def test_a_table_in_blocks_is_the_table(data, block, count, width):
    """Rows replaced and clients joined, one after the other, in a table and in a plain array."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    whole = rng.standard_normal((count, width))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcor.selectors.update_memory.ROWS", block)
        state = extend_table({"other": np.array(3), "t": np.empty((0, width))}, "t", count)
        state = replace_rows(state, "t", np.arange(count), whole)
        for _ in range(4):
            if data.draw(st.booleans()):
                clients = rng.permutation(len(whole))[: data.draw(st.integers(0, len(whole)))]
                rows = rng.standard_normal((len(clients), width))
                before = [part.copy() for part in table_blocks(state, "t")]
                after = replace_rows(state, "t", clients, rows)
                assert_array_equal(np.concatenate(before), np.concatenate(table_blocks(state, "t")))
                state, whole = after, whole.copy()
                whole[clients] = rows
            else:
                more = data.draw(st.integers(0, 9))
                state = extend_table(state, "t", len(whole) + more)
                whole = np.concatenate([whole, np.zeros((more, width))])
            assert_array_equal(np.concatenate(table_blocks(state, "t")), whole)
            some = rng.integers(0, len(whole), size=7)
            assert_array_equal(table_rows(state, "t", some), whole[some])
            assert state["other"] == 3
            assert ("t" in state) == (len(table_blocks(state, "t")) == 1)


def test_blocks_without_a_new_row_are_shared(monkeypatch):
    monkeypatch.setattr("fedcor.selectors.update_memory.ROWS", 4)
    state = extend_table({"t": np.empty((0, 2))}, "t", 19)
    after = replace_rows(state, "t", np.array([5, 6, 18]), np.ones((3, 2)))
    shared = [after[f"t/{i}"] is state[f"t/{i}"] for i in range(5)]
    assert shared == [True, False, True, True, False]


def in_blocks(patch, rows):
    patch.setattr("fedcor.selectors.update_memory.ROWS", rows)
    patch.setattr("fedcor.selectors.matching.FEW", rows)


REMEMBERING = [
    Complement(4, sketch="full"),
    Complement(4, sketch=3, start="oldest", ageing=0.9, explore=0.5),
    Aligned(4, sketch="full"),
    Aligned(4, sketch=3, swaps=2, longest_wait=0.5),
    Herding(4, sketch="full"),
    UpdateProcess(4, sketch="full"),
    Combined(4, sketch="full", warmup=3, interval=3, dimension=2),
]


@pytest.mark.parametrize("selector", REMEMBERING, ids=repr)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_memory_in_blocks_gives_the_same_choices(selector, compiled, monkeypatch):
    whole, _ = play(selector, FakeFederation.example(23, silent=[4, 9]), 25)
    in_blocks(monkeypatch, 5)
    monkeypatch.setattr(
        "fedcor.selectors.numba_passes.COMPILED_FROM", 0 if compiled else sys.maxsize
    )
    chosen, state = play(selector, FakeFederation.example(23, silent=[4, 9]), 25)
    assert any(name.endswith("directions/4") for name in state)
    for ours, theirs in zip(chosen, whole, strict=True):
        assert_array_equal(ours, theirs)


def test_clients_that_join_a_large_population_before_its_first_update(monkeypatch):
    in_blocks(monkeypatch, 5)
    selector, federation = Aligned(4), FakeFederation.example(23)
    state = selector.join(
        selector.init(FakeFederation.example(12).population), federation.population
    )
    chosen, state = selector.select(state, federation)
    state = selector.observe(state, federation.train(chosen))
    assert len(table_blocks(state, "directions")) == 5


@pytest.mark.parametrize("selector", REMEMBERING[:4], ids=repr)
def test_with_a_memory_in_blocks_a_selector_conforms(selector, monkeypatch):
    in_blocks(monkeypatch, 5)
    check_selector(selector)


@pytest.mark.parametrize("selector", [Complement(4, sketch="full"), Aligned(4, sketch="full")])
def test_reasons_of_a_memory_in_blocks_are_the_same(selector, monkeypatch):
    told = {}
    for rows in (4096, 5):
        in_blocks(monkeypatch, rows)
        federation = FakeFederation.example(23, silent=[3])
        state, told[rows] = selector.init(federation.population), []
        for _ in range(20):
            decision = decide(selector, state, federation)
            told[rows].append((decision.why, decision.details))
            state = observe(selector, decision.state, federation.train(decision.chosen))
    for (why, details), (ours, more) in zip(told[4096], told[5], strict=True):
        assert details == more
        assert set(why) == set(ours)
        for name, values in why.items():
            expected = np.array(values, dtype=float)
            assert np.array(ours[name], dtype=float) == pytest.approx(
                expected, abs=1e-6, nan_ok=True
            )


# --- matching in blocks -----------------------------------------------------------------------


def gap(U, weights, target, group, criterion):
    total = weights[group] @ U[group]
    if criterion == "distance":
        return np.linalg.norm(total / weights[group].sum() - target)
    return -(total @ target) / np.linalg.norm(total)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 80),
    count=st.integers(1, 9),
    firsts=st.integers(0, 2),
    criterion=st.sampled_from(["distance", "direction"]),
    block=st.integers(1, 30),
    compiled=st.booleans(),
)
def test_matching_in_blocks_equals_matching(seed, n, count, firsts, criterion, block, compiled):
    rng = np.random.default_rng(seed)
    U, weights = rng.standard_normal((n, 4)) + 0.2, rng.uniform(1, 5, size=n)
    if seed % 3 == 0:  # a group may then not get closer
        U[n // 2 :] = U[: n - n // 2]
    target, first = weights @ U / weights.sum(), rng.permutation(n)[:firsts]
    allowed = rng.random(n) < 0.8 if seed % 2 else None
    blocks = [U[start : start + block] for start in range(0, n, block)]
    options = {"weights": weights, "criterion": criterion, "allowed": allowed}
    whole = match(U, target, first, count, swaps=20, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcor.selectors.numba_passes.COMPILED_FROM", 0 if compiled else sys.maxsize)
        chosen = match(blocks, target, first, count, swaps=20, **options)
        kinds = rng.integers(0, 2, size=n)
        rows, values = replacements(blocks, target, whole, kinds=kinds, **options)
    assert len(np.unique(chosen)) == len(chosen) == len(whole)
    if allowed is not None:
        assert (allowed | np.isin(np.arange(n), first))[chosen].all()
    assert_array_equal(chosen[: min(count, firsts)], first[:count])
    if len(whole):
        expected = gap(U, weights, target, whole, criterion)
        assert gap(U, weights, target, chosen, criterion) == pytest.approx(expected, abs=1e-7)
    _, same = replacements(U, target, whole, kinds=kinds, **options)
    assert values == pytest.approx(same, abs=1e-6, nan_ok=True)
    assert ((rows < 0) == np.isnan(same)).all()


# --- few of many ------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(0, 35), st.booleans())
def test_those_chosen_longest_ago_are_the_first_in_a_sort_of_all(seed, n, count, draws):
    rng = np.random.default_rng(seed)
    asked, ties = rng.integers(-1, 4, size=n), rng.random(n)
    order = np.lexsort((ties, asked)) if draws else np.argsort(asked, kind="stable")
    assert_array_equal(longest_ago(asked, count, ties if draws else None), order[:count])


@given(st.integers(0, 10**6), st.integers(0, 30))
def test_without_is_the_difference_of_sorted_ids(seed, n):
    rng = np.random.default_rng(seed)
    clients, others = np.flatnonzero(rng.random(n) < 0.7), rng.integers(0, 30, size=5)
    assert_array_equal(without(clients, others), np.setdiff1d(clients, others))


@given(st.floats(0.01, 0.99), st.integers(0, 10**6))
def test_annealing_from_a_table_of_powers_is_the_power_to_the_last_bit(beta, seed):
    picked = np.random.default_rng(seed).integers(0, 60, size=1 + seed % 200)
    assert_array_equal(_annealing(beta, picked), beta**picked)


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 13), st.integers(0, 6))
def test_the_samples_of_the_last_rounds(measured, before, count):
    rounds = np.sort(np.array(measured, dtype=np.int64))
    last = sorted({t for t in measured if t < before})[-count:] if count else []
    expected = [t in last or t >= before for t in rounds]
    kept = np.zeros(len(rounds), dtype=bool)
    kept[_of_last_rounds(rounds, before, count)] = True
    assert kept.tolist() == expected


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_a_forecast_in_blocks_of_clients_is_the_forecast_at_once(seed, block):
    rng = np.random.default_rng(seed)
    X, y = rng.standard_normal((17, 3)), rng.standard_normal(17)
    y[rng.random(17) < 0.2] = np.nan
    trained = rng.random(17) < 0.3
    whole, alike = forecast(X, 0.1, y, trained), covariance_similarity(X, X + 0.3, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcor.selectors.gp.posterior.BLOCK", block)
        parts = forecast(X, 0.1, y, trained)
        assert covariance_similarity(X, X + 0.3, 0.1) == pytest.approx(alike)
    assert (whole is None) == (parts is None)
    if whole is not None and parts is not None:
        assert parts.residuals == pytest.approx(whole.residuals)
        assert [parts.log_score, parts.each] == pytest.approx([whole.log_score, whole.each])


# --- memory -----------------------------------------------------------------------------------


def peak_of_rounds(selector, N, rounds):
    """Bytes at the peak of `rounds` rounds with N clients, beside what the federation holds."""
    rng = np.random.default_rng(N)
    federation = FakeFederation(rng.standard_normal((N, 2)), sizes=rng.integers(1, 9, size=N))
    gc.collect()
    tracemalloc.start()
    try:
        state = selector.init(federation.population)
        for _ in range(rounds):
            decision = decide(selector, state, federation)
            outcome = federation.train(decision.chosen)
            state = observe(selector, decision.state, outcome)
            del decision, outcome
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def of_many(name):
    """The selector of this name, which comes to its own rule within three rounds."""
    options = {} if name == "full" else {"clients_per_round": 50}
    if name in ("fedcor", "proxy"):
        options |= {"warmup": 1, "interval": 2, "warmup_steps": 1, "refit_steps": 1}
    if name in ("aligned", "complement"):
        options |= {"sketch": 16}
    return selector_class(name)(**options)


@pytest.mark.parametrize("name", selector_names())
def test_no_array_of_clients_times_clients(name):
    """With 20,000 clients, one of a byte per pair would have 400 MB."""
    N = 20_000
    assert peak_of_rounds(of_many(name), N, 3) < 800 * N  # bytes: a hundred numbers per client


@pytest.mark.parametrize("selector", [Aligned(200, sketch=4), Complement(200, sketch=4)])
def test_matching_keeps_no_array_of_clients_times_members(selector):
    N, rng = 20_000, np.random.default_rng(0)
    federation = FakeFederation(rng.standard_normal((N, 2)))
    state = dict(selector.init(federation.population))
    state |= {"directions": rng.standard_normal((N, 4)), "seen": np.zeros(N, dtype=np.int64)}
    state |= {"asked": rng.integers(0, 9, size=N), "round": np.array(9)}
    gc.collect()
    tracemalloc.start()
    try:
        decision = decide(selector, state, federation)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(decision.chosen) == 200
    assert set(decision.why) >= {"runner_up", "margin"}
    assert peak < 8 * N * 200 / 4


def test_a_round_that_observes_few_clients_copies_few_of_the_remembered_numbers():
    N, s, rng = 200_000, 16, np.random.default_rng(0)
    selector, federation = Aligned(2, sketch=s), FakeFederation(np.zeros((N, 20)))
    state = {**selector.init(federation.population), "round": np.array(1)}
    state = extend_table({**state, "directions": np.empty((0, s))}, "directions", N)
    state = observe(selector, state, federation.train(rng.permutation(N)[:2]))
    outcome = federation.train(rng.permutation(N)[:2])
    gc.collect()
    tracemalloc.start()
    try:
        after = observe(selector, state, outcome)
        new, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    blocks = sum(after[k] is not state[k] for k in after if k.startswith("directions/"))
    assert 1 <= blocks <= 2 < math.ceil(N / ROWS)
    assert new < 8 * (2 * ROWS * s + 3.1 * N) + 1e5
    assert peak < 1.1 * new


def test_a_refit_holds_the_embedding_twice_and_two_moments_beside_the_samples():
    N, d = 90_000, 15
    selector = FedCor(5, warmup=2, warmup_steps=2, refit_steps=2, interval=2, dimension=d)
    most = 8 * N * (4 * d + 2 * 4 + 10)  # a few numbers per client, and what a block needs
    assert peak_of_rounds(selector, N, 4) < most


def test_memory_grows_with_the_clients():
    for name, factor in itertools.product(("fedcor", "aligned"), (2,)):
        few, many = (peak_of_rounds(of_many(name), N, 3) for N in (10_000, factor * 10_000))
        assert many / few < 1.3 * factor, name
