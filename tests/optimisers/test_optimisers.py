"""Every federated optimiser follows the formulas of its paper, and does what it is made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from optimiser_plays import Play, Quadratics, Round, models, plays

from fedcor import (
    MIFA,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedExP,
    FedNova,
    FedRecall,
    FedStale,
    FedVARP,
    FedYogi,
    Scaffold,
)
from fedcor.core.errors import ConfigError
from fedcor.core.types import Delivery, Optimiser, Population, optimiser_traits
from fedcor.optimisers import OPTIMISERS, build_optimiser
from fedcor.optimisers.memory import all_seen, empty_memory, mean_of_all, recall, remember, resize
from fedcor.testing import check_optimiser, round_trip


def assert_same_models(one: Optimiser, other: Optimiser, play: Play) -> None:
    assert_allclose(list(models(one, play)), list(models(other, play)), rtol=1e-5, atol=1e-5)


# The twins: each rule as its paper writes it, in float64, with a table of all clients.


def twin_momentum(it: FedAvgM, play: Play) -> Iterator[np.ndarray]:
    w, v = play.model.astype(float), 0.0
    for came in play.rounds:
        v = it.momentum * v + came.weights @ came.updates
        w = w + it.learning_rate * v
        yield w


def twin_adaptive(
    square: Callable[[FedAdam, float, float], float],
) -> Callable[[FedAdam, Play], Iterator[np.ndarray]]:
    def twin(it: FedAdam, play: Play) -> Iterator[np.ndarray]:
        w = play.model.astype(float)
        m, v = [0.0] * len(w), [it.tau**2] * len(w)
        for came in play.rounds:
            for i in range(len(w)):
                delta = sum(
                    a * update[i]
                    for a, update in zip(came.weights, came.updates.astype(float), strict=True)
                )
                m[i] = it.beta1 * m[i] + (1 - it.beta1) * delta
                v[i] = square(it, v[i], delta**2)
                w[i] += it.learning_rate * m[i] / (v[i] ** 0.5 + it.tau)
            yield w.copy()

    return twin


def yogi(it: FedYogi, v: float, d2: float) -> float:
    if v > d2:
        return v - (1 - it.beta2) * d2
    return v + (1 - it.beta2) * d2


def twin_nova(it: FedNova, play: Play) -> Iterator[np.ndarray]:
    w = play.model.astype(float)
    for came in play.rounds:
        norms = []
        for steps in came.steps:  # as local SGD with momentum adds gradients up
            factor, norm = 0.0, 0.0
            for _ in range(steps):
                factor = it.momentum * factor + 1.0
                norm += factor
            norms.append(norm)
        effective = sum(a * norm for a, norm in zip(came.weights, norms, strict=True))
        for a, norm, update in zip(came.weights, norms, came.updates, strict=True):
            w = w + effective * a * update / norm
        yield w


def twin_scaffold(it: Scaffold, play: Play) -> Iterator[np.ndarray]:
    w, shares = play.model.astype(float), play.shares(it.weighted)
    c, own = np.zeros_like(w), np.zeros((play.count, len(w)))
    for came in play.rounds:
        change = np.zeros_like(w)
        for k, steps, update in zip(came.clients, came.steps, came.updates, strict=True):
            local = w + update
            new = own[k] - c + (w - local) / (steps * came.rate)
            change += shares[k] * (new - own[k])
            own[k] = new
        w = w + it.learning_rate * came.weights @ came.updates
        c = c + change
        yield w


def twin_dyn(it: FedDyn, play: Play) -> Iterator[np.ndarray]:
    w, shares = play.model.astype(float), play.shares(it.weighted)
    h = np.zeros_like(w)
    for came in play.rounds:
        local = w + came.updates
        h = h - it.alpha * shares[came.clients] @ (local - w)
        w = came.weights @ local - h / it.alpha
        yield w


def twin_varp(it: FedVARP, play: Play, weight: float = 1.0) -> Iterator[np.ndarray]:
    w, shares = play.model.astype(float), play.shares(it.weighted)
    y = np.zeros((play.count, len(w)))
    for came in play.rounds:
        fresh = came.weights @ came.updates
        varp = came.weights @ (came.updates - y[came.clients]) + shares @ y
        w = w + it.learning_rate * ((1 - weight) * fresh + weight * varp)
        y[came.clients] = came.updates
        yield w


def twin_stale(it: FedStale, play: Play) -> Iterator[np.ndarray]:
    return twin_varp(it, play, it.beta)


def twin_mifa(it: MIFA, play: Play) -> Iterator[np.ndarray]:
    w, shares = play.model.astype(float), play.shares(it.weighted)
    table, seen = np.zeros((play.count, len(w))), set()
    for came in play.rounds:
        for k, update in zip(came.clients, came.updates, strict=True):
            table[k] = (w - (w + update)) / came.rate
            seen.add(k)
        if not it.wait or len(seen) == play.count:
            w = w - came.rate * shares @ table
        yield w


def twin_exp(it: FedExP, play: Play) -> Iterator[np.ndarray]:
    w = play.model.astype(float)
    for came in play.rounds:
        mean = came.weights @ came.updates
        squares = sum(a * (u**2).sum() for a, u in zip(came.weights, came.updates, strict=True))
        w = w + max(1.0, squares / (2 * ((mean**2).sum() + it.epsilon))) * mean
        yield w


TWINS = [
    (FedAvgM(learning_rate=0.3), twin_momentum),
    (FedAdagrad(), twin_adaptive(lambda it, v, d2: v + d2)),
    (FedAdagrad(beta1=0.5, tau=0.1), twin_adaptive(lambda it, v, d2: v + d2)),
    (FedAdam(), twin_adaptive(lambda it, v, d2: it.beta2 * v + (1 - it.beta2) * d2)),
    (FedAdam(beta2=0.5), twin_adaptive(lambda it, v, d2: it.beta2 * v + (1 - it.beta2) * d2)),
    (FedYogi(), twin_adaptive(yogi)),
    (FedYogi(tau=0.1, beta2=0.8), twin_adaptive(yogi)),
    (FedNova(), twin_nova),
    (FedNova(momentum=0.9), twin_nova),
    (Scaffold(), twin_scaffold),
    (Scaffold(learning_rate=0.5, weighted=True), twin_scaffold),
    (FedDyn(), twin_dyn),
    (FedDyn(alpha=0.7, weighted=True), twin_dyn),
    (FedVARP(), twin_varp),
    (FedVARP(learning_rate=0.5, weighted=True), twin_varp),
    (FedStale(), twin_stale),
    (FedStale(beta=0.2, learning_rate=2.0, weighted=True), twin_stale),
    (MIFA(), twin_mifa),
    (MIFA(wait=True), twin_mifa),
    (MIFA(weighted=True), twin_mifa),
    (FedExP(), twin_exp),
    (FedExP(epsilon=0.1), twin_exp),
]
WITH_MEMORY = [Scaffold(), FedDyn(), FedVARP(), FedStale(), MIFA()]


@pytest.mark.parametrize(("optimiser", "twin"), TWINS, ids=[repr(it) for it, _ in TWINS])
@given(play=plays())
def test_a_rule_is_that_of_its_paper(optimiser, twin, play):
    expected = list(twin(optimiser, play))
    assert_allclose(list(models(optimiser, play)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "optimiser", [*(it for it, _ in TWINS), FedVARP(dtype="float16")], ids=repr
)
def test_optimiser_conforms(optimiser):
    check_optimiser(optimiser)


# Corrections of local training


@pytest.mark.parametrize("weighted", [False, True])
@given(play=plays())
def test_scaffold_corrects_towards_the_mean_of_the_gradients_seen(weighted, play):
    optimiser = Scaffold(weighted=weighted)
    everyone, shares = np.arange(play.count), play.shares(weighted)
    state, own = (
        optimiser.init(play.population, play.model),
        np.zeros((play.count, len(play.model))),
    )
    for number, came in enumerate(play.rounds):
        corrections = optimiser.corrections(state, everyone)
        assert_allclose(corrections, shares @ own - own, rtol=1e-4, atol=1e-4)
        # A local step is -rate (gradient + correction), so this is the mean gradient.
        pace = (came.steps * came.rate)[:, None]
        own[came.clients] = -came.updates / pace - corrections[came.clients]
        _, state = optimiser.step(state, came.delivery(number, play.model))


@given(play=plays())
def test_feddyn_corrects_by_the_sum_of_past_updates(play):
    optimiser, everyone = FedDyn(alpha=0.3), np.arange(play.count)
    state, past = (
        optimiser.init(play.population, play.model),
        np.zeros((play.count, len(play.model))),
    )
    for number, came in enumerate(play.rounds):
        assert_allclose(optimiser.corrections(state, everyone), 0.3 * past, rtol=1e-5, atol=1e-6)
        past[came.clients] += came.updates
        _, state = optimiser.step(state, came.delivery(number, play.model))


@given(seed=st.integers(0, 1000))
def test_a_client_alone_has_no_drift_to_correct(seed):
    rng = np.random.default_rng(seed)
    optimiser, model = Scaffold(), np.zeros(3, dtype=np.float32)
    state = optimiser.init(Population(np.array([7])), model)
    for number in range(4):
        updates = rng.normal(size=(1, 3)).astype(np.float32)
        came = Round(np.array([0]), np.ones(1), np.array([2]), 0.1, updates)
        model, state = optimiser.step(state, came.delivery(number, model))
        assert_array_equal(optimiser.corrections(state, np.array([0])), np.zeros((1, 3)))


# Identities


@pytest.mark.parametrize(
    ("optimiser", "early", "late"), [(FedAdam(), 5.6, 10.0), (FedYogi(), 5.0, 5.0)], ids=repr
)
def test_far_below_tau_adaptive_steps_are_a_multiple_of_the_updates(optimiser, early, late):
    size, model = 1e-6, np.zeros(1)
    state, found = optimiser.init(Population(np.array([1])), model), []
    came = Round(np.array([0]), np.ones(1), np.ones(1, dtype=np.int64), 0.1, np.full((1, 1), size))
    for number in range(1501):
        moved, state = optimiser.step(state, came.delivery(number, model))
        found.append(float(moved[0]) / size)
    assert_allclose([found[50], found[-1]], [early, late], rtol=0.01)


@given(play=plays())
def test_momentum_zero_is_fedavg(play):
    for one, other in zip(models(FedAvgM(momentum=0.0), play), models(FedAvg(), play), strict=True):
        assert_array_equal(one, other)


@given(play=plays(equal_steps=True))
def test_fednova_with_equal_steps_is_fedavg(play):
    assert_same_models(FedNova(), FedAvg(), play)
    assert_same_models(FedNova(momentum=0.9), FedAvg(), play)


@given(play=plays())
def test_fednova_counts_steps_once(play):
    """With Delta_k = steps x d for all k, the step is the mean number of steps times d."""
    came = play.rounds[0]
    direction = came.updates[0]
    updates = came.steps[:, None].astype(np.float32) * direction
    came = Round(came.clients, came.weights, came.steps, came.rate, updates)
    model, _ = FedNova().step({}, came.delivery(0, play.model))
    expected = play.model + (came.weights @ came.steps) * direction
    assert_allclose(model, expected, rtol=1e-5, atol=1e-5)


@given(play=plays(everyone=True, equal_weights=True))
def test_fedvarp_with_everyone_is_fedavg(play):
    assert_same_models(FedVARP(), FedAvg(), play)


@given(play=plays())
def test_fedstale_lies_between_fedavg_and_fedvarp(play):
    assert_same_models(FedStale(beta=0.0), FedAvg(), play)
    assert_same_models(FedStale(beta=1.0), FedVARP(), play)


@given(play=plays(everyone=True, equal_weights=True))
def test_mifa_with_everyone_is_fedavg(play):
    assert_same_models(MIFA(), FedAvg(), play)
    assert_same_models(MIFA(wait=True), FedAvg(), play)


@pytest.mark.parametrize("through_a_checkpoint", [False, True])
def test_mifa_waits_at_the_start_alone(through_a_checkpoint):
    """A client that joins later, and may never come, does not end the training of the others."""
    it, model = MIFA(wait=True), np.zeros(1, dtype=np.float32)
    state, moved = it.init(Population(np.full(2, 7)), model), []

    def joined(count):
        after = it.join(state, Population(np.full(count, 7)))
        return round_trip(after) if through_a_checkpoint else after

    for number, (clients, there) in enumerate(
        [([0], 2), ([1], 3), ([2], 3), ([0, 1], 4), ([2], 4), ([0], 6), ([1, 2], 6)]
    ):
        state = joined(there)
        m = len(clients)
        equal = np.full(m, 1 / m), np.ones(m, dtype=np.int64), 0.5
        came = Round(np.array(clients), *equal, np.ones((m, 1), np.float32))
        after, state = it.step(state, came.delivery(number, model))
        moved.append(after[0] > model[0])
        model = after
    # The third joined before the first two were seen, so it was waited for, and nobody after it.
    assert moved == [False, False, True, True, True, True, True]


def test_mifa_without_newcomers_keeps_nothing_more():
    """So that records of such runs stay as they were, down to the size of the memory."""
    it, model = MIFA(wait=True), np.zeros(1, dtype=np.float32)
    state = it.init(Population(np.array([3])), model)
    came = Round(np.array([0]), np.ones(1), np.ones(1, dtype=np.int64), 0.5, np.float32([[1.0]]))
    _, state = it.step(state, came.delivery(0, model))
    state = it.join(state, Population(np.array([4])))
    assert state.keys() == {"scales", "total", "update/0"}


def test_mifa_waits_for_everyone():
    population, model = Population(np.array([1, 1])), np.zeros(1, dtype=np.float32)
    first, second = (
        Round(
            np.array([k]),
            np.ones(1),
            np.ones(1, dtype=np.int64),
            rate,
            np.float32([[rate * (k + 1)]]),
        )
        for k, rate in ((0, 0.5), (1, 0.1))
    )  # so that y_k = k + 1
    optimiser = MIFA(wait=True)
    waiting, state = optimiser.step(optimiser.init(population, model), first.delivery(0, model))
    assert_array_equal(waiting, model)
    moved, _ = optimiser.step(state, second.delivery(1, waiting))
    assert_allclose(moved, [0.1 * (1 + 2) / 2], rtol=1e-6)
    # Without waiting, who was never seen counts as zero.
    impatient, _ = MIFA().step(MIFA().init(population, model), first.delivery(0, model))
    assert_allclose(impatient, [0.5 * (1 + 0) / 2], rtol=1e-6)


@given(play=plays(), epsilon=st.floats(1e-9, 10.0))
def test_fedexp_never_shortens_a_step(play, epsilon):
    came = play.rounds[0].delivery(0, play.model)
    factor = FedExP(epsilon=epsilon).factor(came)
    assert factor >= 1.0
    assert_allclose(
        FedExP(epsilon=epsilon).step({}, came)[0] - play.model,
        factor * came.mean,
        rtol=1e-3,
        atol=1e-5,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_fedexp_goes_half_as_far_as_there_are_orthogonal_updates(count):
    updates = np.eye(count, 10, dtype=np.float32)
    clients, weights = np.arange(count), np.full(count, 1.0 / count)
    came = Round(clients, weights, np.ones(count, dtype=np.int64), 1.0, updates)
    factor = FedExP(epsilon=1e-9).factor(came.delivery(0, np.zeros(10, dtype=np.float32)))
    assert_allclose(factor, max(1.0, count / 2), rtol=1e-5)


# What they are made for: clients with quadratic losses (w - o_k)' A_k (w - o_k) / 2, A_k diagonal.


@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize(
    "optimiser",
    [Scaffold(), Scaffold(weighted=True), FedDyn(alpha=1.0), FedDyn(alpha=1.0, weighted=True)],
    ids=repr,
)
def test_corrections_lead_to_the_global_optimum(optimiser, chosen):
    clients = Quadratics.example(4)
    found = clients.train(optimiser, rounds=600, chosen=chosen)
    assert_allclose(found, clients.best(optimiser.weighted), atol=1e-4)


def test_fedavg_does_not_find_the_global_optimum():
    clients = Quadratics.example(4)
    found = clients.train(FedAvg(), rounds=200, chosen=4)
    assert_allclose(found, clients.fedavg_limit(), atol=1e-4)
    assert np.abs(found - clients.best()).max() > 0.05


@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize(
    "optimiser",
    [
        FedVARP(learning_rate=0.5),
        FedVARP(learning_rate=0.5, weighted=True),
        MIFA(),
        MIFA(weighted=True),
    ],
    ids=repr,
)
def test_memory_removes_the_noise_of_who_was_chosen(optimiser, chosen):
    """It goes where everyone's mean leads, to which FedAvg with a few clients never settles."""
    clients = Quadratics.example(4)
    limit = clients.fedavg_limit(optimiser.weighted)
    assert_allclose(clients.train(optimiser, rounds=600, chosen=chosen), limit, atol=1e-4)
    plain = clients.train(FedAvg(optimiser.weighted), rounds=600, chosen=chosen)
    assert np.abs(plain - limit).max() > 0.05


# The memory


@st.composite
def stores(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    stored = []
    for _ in range(draw(st.integers(1, 6))):
        clients = np.sort(rng.choice(count, size=draw(st.integers(1, count)), replace=False))
        magnitude = 10.0 ** rng.uniform(-9, 6, size=(len(clients), size))
        stored.append((clients, (magnitude * rng.normal(size=magnitude.shape)).astype(np.float32)))
    return Population(rng.integers(1, 50, size=count)), size, stored


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@given(case=stores())
def test_the_memory_is_a_table_of_all_clients(dtype, weighted, case):
    population, size, stored = case
    scales = population.sizes if weighted else np.ones(population.count)
    state = empty_memory(population, np.zeros(size), weighted=weighted)
    table, known = np.zeros((population.count, size)), np.zeros(population.count, dtype=bool)
    ever = 0.0
    for clients, vectors in stored:
        state = remember(state, clients, vectors, dtype)
        with np.errstate(over="ignore"):
            as_stored = vectors.astype(dtype)
        largest = np.finfo(dtype).max
        table[clients] = np.clip(as_stored.astype(float), -float(largest), float(largest))
        known[clients] = True
        recalled, seen = recall(state, np.arange(population.count))
        assert recalled.dtype == np.float32
        assert_array_equal(recalled, table)
        assert_array_equal(seen, known)
        assert all_seen(state) == known.all()
        # Sums in float64 are exact to 1e-16 of the largest that they ever were.
        ever = max(ever, float(np.abs(scales[:, None] * table).sum()))
        assert_allclose(state["total"], scales @ table, rtol=0, atol=1e-14 * ever)
        assert_allclose(
            mean_of_all(state), scales @ table / scales.sum(), rtol=0, atol=1e-14 * ever
        )


@given(case=stores())
def test_to_remember_copies_no_vector_of_others(case):
    population, size, stored = case
    state = empty_memory(population, np.zeros(size))
    for clients, vectors in stored:
        copies = {key: array.copy() for key, array in state.items()}
        new = remember(state, clients, vectors)
        assert state.keys() == copies.keys()
        for key, array in state.items():
            assert_array_equal(array, copies[key])
            if key not in {"total", *(f"update/{client}" for client in clients)}:
                assert new[key] is array
        state = new


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=5),
)
def test_half_precision_errs_by_half_a_unit_in_the_last_place(numbers):
    vectors = np.array([numbers], dtype=np.float32)
    state = empty_memory(Population(np.array([1])), vectors[0])
    recalled, _ = recall(remember(state, np.array([0]), vectors, "float16"), np.array([0]))
    inside = np.abs(vectors) <= 65504
    error = np.abs(recalled - vectors)
    assert np.all(error[inside] <= np.maximum(2.0**-11 * np.abs(vectors[inside]), 2.0**-25))
    assert_array_equal(recalled[~inside], np.sign(vectors[~inside]) * 65504)


def test_stored_vectors_are_copies():
    vectors = np.ones((2, 3), dtype=np.float32)
    state = empty_memory(Population(np.array([1, 1])), vectors[0])
    state = remember(state, np.array([0, 1]), vectors)
    vectors[:] = 5.0
    assert_array_equal(recall(state, np.array([0, 1]))[0], np.ones((2, 3)))
    assert state["update/0"].base is None


@pytest.mark.parametrize("weighted", [False, True])
def test_a_client_that_joins_counts_as_zero(weighted):
    vectors = np.float32([[1.0, 2.0], [3.0, -4.0]])
    state = empty_memory(Population(np.array([1, 1, 1])), vectors[0], weighted=weighted)
    state = remember(state, np.array([0, 2]), vectors)
    sizes = np.array([1, 1, 3, 5])  # one joined, and the third turned out to be larger
    grown = resize(state, Population(sizes), weighted=weighted)
    shares = sizes / 10 if weighted else np.full(4, 0.25)
    assert_allclose(mean_of_all(grown), shares[[0, 2]] @ vectors)
    assert len(state["scales"]) == 3


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(1, 1000), st.booleans()), min_size=1, max_size=6
    ),
    st.lists(st.integers(1, 1000), max_size=3),
    st.booleans(),
)
def test_a_memory_of_other_sizes_is_the_one_that_was_made_with_them(clients, joined, weighted):
    before, after, seen = (np.array(column) for column in zip(*clients, strict=True))
    who = np.flatnonzero(seen)
    vectors = np.random.default_rng(0).standard_normal((len(who), 3)).astype(np.float32)
    larger = Population(np.append(after, joined).astype(np.int64))
    first = empty_memory(Population(before), np.zeros(3), weighted=weighted)
    found = resize(remember(first, who, vectors), larger, weighted=weighted)
    there = remember(empty_memory(larger, np.zeros(3), weighted=weighted), who, vectors)
    assert found.keys() == there.keys()
    assert_array_equal(found["scales"], there["scales"])
    assert_allclose(found["total"], there["total"], rtol=1e-9, atol=1e-9)


def test_only_clients_that_count_for_another_amount_are_read_when_sizes_become_known():
    class Counting(dict):
        def get(self, name, default=None):
            asked.append(name)
            return super().get(name, default)

    asked = []
    state = empty_memory(Population(np.array([1, 2, 3])), np.zeros(2), weighted=True)
    state = Counting(remember(state, np.arange(3), np.ones((3, 2), np.float32)))
    resize(state, Population(np.array([1, 5, 3, 7])), weighted=True)
    assert asked == ["update/1", "update/3"]


@pytest.mark.parametrize("optimiser", WITH_MEMORY, ids=repr)
@given(play=plays(), joined=st.integers(0, 3))
def test_after_clients_joined_a_round_is_as_if_they_had_been_there(optimiser, play, joined):
    larger = Population(np.append(play.population.sizes, np.full(joined, 9)))
    grown, there = (optimiser.init(it, play.model) for it in (play.population, larger))
    for number, came in enumerate(play.rounds):
        _, grown = optimiser.step(grown, came.delivery(number, play.model))
        # What is stored must not depend on N: of SCAFFOLD it does, through c.
        if not isinstance(optimiser, Scaffold):
            _, there = optimiser.step(there, came.delivery(number, play.model))
    if isinstance(optimiser, Scaffold):
        everyone = np.arange(play.count)
        own, _ = recall(grown, everyone, "control")
        there = remember(there, everyone, own, name="control")
    grown = optimiser.join(grown, larger)
    came = play.rounds[0].delivery(9, play.model)
    assert_allclose(
        optimiser.step(grown, came)[0], optimiser.step(there, came)[0], rtol=1e-5, atol=1e-5
    )
    if hasattr(optimiser, "corrections"):
        clients = np.arange(larger.count)
        assert_allclose(
            optimiser.corrections(grown, clients),
            optimiser.corrections(there, clients),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("optimiser", [*WITH_MEMORY, MIFA(wait=True), FedRecall()], ids=repr)
@given(play=plays(), joined=st.integers(0, 2))
def test_who_has_no_samples_is_not_in_the_federation(optimiser, play, joined):
    """Rules exclude them: nobody waits for them, and they count in no mean, now or after a join."""
    sizes, none = play.population.sizes, np.zeros(2, dtype=np.int64)
    without, beside = (
        optimiser.init(Population(it), play.model) for it in (sizes, np.append(sizes, none))
    )
    one = other = play.model
    for number, came in enumerate(play.rounds * 2):
        if number == len(play.rounds):
            sizes = np.append(sizes, np.full(joined, 9))
            without = optimiser.join(without, Population(sizes))
            beside = optimiser.join(beside, Population(np.append(sizes, none)))
        one, without = optimiser.step(without, came.delivery(number, one))
        other, beside = optimiser.step(beside, came.delivery(number, other))
        assert_array_equal(one, other)
        if hasattr(optimiser, "corrections"):
            clients = np.arange(len(sizes))
            assert_array_equal(*(optimiser.corrections(it, clients) for it in (without, beside)))


@pytest.mark.parametrize("weighted", [False, True])
def test_who_is_excluded_later_is_left_out_of_the_mean_and_counts_again_when_let_in(weighted):
    vectors, sizes = np.float32([[1.0, 2.0], [3.0, -4.0]]), np.array([2, 2, 2])
    state = empty_memory(Population(sizes), vectors[0], weighted=weighted)
    state = remember(state, np.array([0, 1]), vectors)
    assert not all_seen(state)
    some = resize(state, Population(np.array([2, 0, 0])), weighted=weighted)
    assert_allclose(mean_of_all(some), vectors[0])
    assert all_seen(some)
    again = resize(some, Population(sizes), weighted=weighted)
    assert_allclose(mean_of_all(again), vectors.sum(axis=0) / 3)


# Settings


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: FedAvgM(momentum=1.0), "momentum"),
        (lambda: FedAvgM(learning_rate=0.0), "learning_rate"),
        (lambda: FedAdam(tau=0.0), "tau"),
        (lambda: FedAdam(beta2=1.0), "beta2"),
        (lambda: FedYogi(beta1=-0.1), "beta1"),
        (lambda: FedAdagrad(learning_rate=-1.0), "learning_rate"),
        (lambda: FedNova(momentum=1.0), "momentum"),
        (lambda: Scaffold(learning_rate=0.0), "learning_rate"),
        (lambda: FedDyn(alpha=0.0), "alpha"),
        (lambda: FedVARP(dtype="float8"), "dtype"),
        (lambda: FedVARP(learning_rate=float("nan")), "learning_rate"),
        (lambda: FedStale(beta=1.5), "beta"),
        (lambda: FedStale(learning_rate=0.0), "learning_rate"),
        (lambda: MIFA(dtype="int8"), "dtype"),
        (lambda: FedExP(epsilon=0.0), "epsilon"),
        (lambda: FedAdam(beta_2=0.9), "beta_2"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(build, key):
    with pytest.raises(ConfigError) as refused:
        build()
    assert refused.value.key == key


def test_engines_are_told_what_an_optimiser_needs():
    for optimiser, _ in TWINS:
        assert isinstance(optimiser, Optimiser)
        reads_means_alone = isinstance(optimiser, FedAvgM | FedAdam | FedAdagrad)
        assert optimiser_traits(optimiser).needs_updates != reads_means_alone
    assert optimiser_traits(FedDyn(alpha=0.2)).proximal == 0.2
    assert optimiser_traits(Scaffold()).extra_down == optimiser_traits(Scaffold()).extra_up == 1
    assert optimiser_traits(FedVARP(weighted=True)).weighted


@pytest.mark.parametrize(
    "optimiser", [it for it, _ in TWINS if not optimiser_traits(it).needs_updates], ids=repr
)
def test_without_need_of_single_updates_none_are_read(optimiser):
    """So that these work under secure aggregation."""

    def hidden() -> np.ndarray:
        raise AssertionError("read the updates of single clients")

    model = np.zeros(2, dtype=np.float32)
    delivery = Delivery(
        0, model, np.array([0]), np.ones(1), np.ones(1, dtype=np.int64), 0.1, hidden,
        lambda: np.ones(2, dtype=np.float32),
    )  # fmt: skip
    moved, _ = optimiser.step(optimiser.init(Population(np.array([3])), model), delivery)
    assert np.all(moved > 0.0)


@pytest.mark.parametrize("name", OPTIMISERS.built_in)
def test_the_page_on_optimisers_has_every_one_and_its_settings(name):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "optimisers.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith(f"| `{name}`"))
    optimiser = build_optimiser(name)
    traits = optimiser_traits(optimiser)
    assert f"| {1 + traits.extra_down}, {1 + traits.extra_up} |" in row
    assert ("| yes |" in row) == (not traits.needs_updates)
    if "as `fedadam`" in row:
        return
    for field in fields(optimiser):
        if field.name not in ("weighted", "dtype"):
            default = f"{field.default:g}".removeprefix("0") or "0"
            assert f"`{field.name}` ({'false' if field.default is False else default})" in row
