"""Complement and its relatives: matching against brute force, and the rules of each selector."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_helpers import outcome, play
from studies.relatives import Combined, EqualTarget, Herding, UpdateProcess

from fedcor.core.errors import ConfigError
from fedcor.core.types import Population
from fedcor.runs.record import read_run
from fedcor.runs.runner import run
from fedcor.selectors.complement import Complement
from fedcor.selectors.matching import match
from fedcor.selectors.update_memory import count_sketch
from fedcor.simulation.build import build_simulation
from fedcor.simulation.engine.models import ModelVector, build_model
from fedcor.simulation.experiment_files import load_experiment
from fedcor.testing import FakeFederation, check_selector


@dataclasses.dataclass
class Problem:
    """Directions (n, s), their weights in a mean (n,), and the target (s,)."""

    U: np.ndarray
    weights: np.ndarray
    target: np.ndarray


@st.composite
def problems(draw):
    n, s = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    weights = rng.integers(1, 100, size=n).astype(float) if draw(st.booleans()) else np.ones(n)
    return Problem(rng.standard_normal((n, s)), weights, rng.standard_normal(s))


def gap(problem, group):
    """The distance of the group's weighted mean from the target."""
    mean = np.average(problem.U[list(group)], axis=0, weights=problem.weights[list(group)])
    return float(np.linalg.norm(mean - problem.target))


def greedy_by_trying(problem, first, count):
    """The greedy choice, by trying every candidate at every step."""
    group = list(first)
    while len(group) < count:
        rest = [k for k in range(len(problem.U)) if k not in group]
        group.append(min(rest, key=lambda k: gap(problem, [*group, k])))
    return group


@given(problems(), st.data())
@settings(deadline=None)
def test_greedy_matching_equals_trying_every_candidate(problem, data):
    n = len(problem.U)
    count, first = data.draw(st.integers(1, n)), data.draw(st.integers(0, n - 1))
    chosen = match(problem.U, problem.target, np.array([first]), count, weights=problem.weights)
    expected = greedy_by_trying(problem, [first], count)
    assert gap(problem, chosen) == pytest.approx(gap(problem, expected), abs=1e-9)
    assert len(set(chosen.tolist())) == count
    assert chosen[0] == first


@given(problems(), st.data())
@settings(deadline=None)
def test_swaps_improve_the_match_until_no_single_swap_helps(problem, data):
    n = len(problem.U)
    count = data.draw(st.integers(1, n))
    plain, swapped = (
        match(problem.U, problem.target, np.array([0]), count, swaps=swaps, weights=problem.weights)
        for swaps in (0, 100)
    )
    assert gap(problem, swapped) <= gap(problem, plain) + 1e-12
    assert swapped[0] == 0  # the first is never swapped
    outside = [k for k in range(n) if k not in swapped]
    for place, k in itertools.product(range(1, count), outside):
        other = [*swapped[:place], k, *swapped[place + 1 :]]
        assert gap(problem, swapped) <= gap(problem, other) + 1e-9


def test_a_sketch_keeps_inner_products_on_average():
    U = np.random.default_rng(0).standard_normal((40, 3000))
    sketched = count_sketch(U, 400)
    assert sketched.shape == (40, 400)
    # The same places and signs for every set of rows.
    assert np.array_equal(sketched[:3], count_sketch(U[:3], 400))
    true, kept = U @ U.T, sketched @ sketched.T
    assert np.diag(kept) / np.diag(true) == pytest.approx(np.ones(40), abs=0.35)
    assert abs(float(np.mean((kept - true)[~np.eye(40, dtype=bool)]))) < 10


def test_every_client_trains_once_before_any_trains_twice():
    chosen, state = play(Complement(5), FakeFederation.example(12), 3)
    first = np.concatenate(chosen)[:12]
    assert sorted(first.tolist()) == list(range(12))
    assert (state["seen"] >= 0).all()
    assert len(np.unique(chosen[2])) == 5


def test_a_partial_sweep_leaves_the_rest_of_a_round_to_the_matching():
    selector, federation = Complement(4, sweep=0.5), FakeFederation.example(30)
    state, seen = selector.init(federation.population), np.zeros(30, dtype=bool)
    for t in range(20):
        chosen, state = selector.select(state, federation)
        if t >= 1:
            assert int((~seen[chosen]).sum()) == min(2, int((~seen).sum()))
        seen[chosen] = True
        state = selector.observe(state, federation.train(chosen))
    assert seen.all()


def test_a_direction_is_the_update_over_learning_rate_times_steps():
    federation = FakeFederation.example(6, local_steps=3, learning_rate=0.05)
    chosen, state = play(Complement(2, sketch="full"), federation, 2)
    first = np.flatnonzero(state["seen"] == 0)
    assert sorted(chosen[0].tolist()) == first.tolist()
    before = FakeFederation.example(6, local_steps=3, learning_rate=0.05)  # its model is 0
    assert state["directions"][first] == pytest.approx(before.trained(first) / 0.15)


def test_groups_have_the_proportions_of_the_population():
    """Three kinds of clients, one twice as common: so it is in every group after the sweep."""
    centres = np.repeat(np.eye(3) * 10, [12, 6, 6], axis=0)
    federation = FakeFederation(centres, learning_rate=0.01)
    chosen, state = play(Complement(4, sketch="full"), federation, 40)
    kinds = np.repeat([0, 1, 2], [12, 6, 6])
    for choice in chosen[7:]:
        assert np.bincount(kinds[choice], minlength=3).tolist() == [2, 1, 1]
    reasons = Complement(4, sketch="full").reasons(state, federation, chosen[-1])
    assert reasons["distance"][-1] < 0.2 < reasons["distance"][0]


def test_complement_asks_the_clients_nothing():
    federation = FakeFederation.example(12)
    play(Complement(4), federation, 10)
    assert not federation.asked
    assert not federation.tried


def test_a_client_that_never_delivers_is_chosen_less_and_less_often_but_never_dropped():
    federation = FakeFederation.example(10, silent=[0, 1])
    chosen, _ = play(Complement(3), federation, 200)
    for client in (0, 1):
        rounds = [t for t, choice in enumerate(chosen) if client in choice]
        waits = np.diff(rounds).tolist()
        assert waits == sorted(waits)
        assert all(wait >= 2 ** (i + 1) for i, wait in enumerate(waits))
        assert len(rounds) >= 6
    assert (np.bincount(np.concatenate(chosen), minlength=10)[2:] > 10).all()


@pytest.mark.parametrize("options", [{}, {"start": "oldest"}, {"explore": 0.5}], ids=repr)
def test_a_known_client_that_stops_delivering_is_chosen_less_often(options):
    federation = FakeFederation.example(20)
    selector = Complement(4, **options)
    state, late = selector.init(federation.population), []
    for t in range(100):
        if t == 20:
            federation.answering = ~np.isin(np.arange(20), [3, 8])
        chosen, state = selector.select(state, federation)
        state = selector.observe(state, federation.train(chosen))
        late += chosen.tolist() if t >= 20 else []
    times = np.bincount(late, minlength=20)
    assert (times[[3, 8]] <= 7).all()  # waits of 2, 4, ..., 32 rounds fill the 80 rounds


@pytest.mark.parametrize(("explore", "places"), [(0.5, 2), (0.1, 1)])  # at least one client
def test_exploration_takes_the_clients_chosen_longest_ago(explore, places):
    federation = FakeFederation.example(12)
    chosen, _ = play(Complement(4, explore=explore), federation, 30)
    last = np.full(12, -1)
    for t, choice in enumerate(chosen):
        if t >= 3:
            oldest = np.sort(last)[:places]
            assert set(np.sort(last[choice])[:places].tolist()) == set(oldest.tolist())
        last[choice] = t


def test_ageing_lowers_the_weight_of_old_directions_in_the_target():
    selector = Complement(1, sketch="full", ageing=0.5)
    state = selector.init(Population(np.array([1, 1, 1])))
    for t, client in enumerate((0, 1)):
        state = {**state, "round": np.array(t + 1)}
        state = selector.observe(state, outcome(t, [client], updates=np.eye(3)[[client]]))
    assert selector.target(state, np.full(3, 1 / 3)) == pytest.approx([1 / 3, 2 / 3, 0])


def test_unusable_updates_are_not_remembered():
    selector = Complement(2, sketch="full")
    state = {**selector.init(Population(np.array([1, 1]))), "round": np.array(1)}
    for bad in (np.nan, np.inf, 1e160, -1e20):
        updates = [[1.0, bad], [1.0, 2.0]]
        after = selector.observe(state, outcome(0, [0, 1], updates=updates))
        assert after["seen"].tolist() == [-1, 0]
        assert after["directions"].tolist() == [[0, 0], [1, 2]]
    # An unusable update of a model of another size does not erase what is known.
    assert selector.observe(after, outcome(0, [0], updates=[[np.nan]])) is after


def test_a_group_larger_than_the_candidates_takes_all_of_them():
    assert sorted(match(np.eye(3), np.ones(3), np.array([1]), 8, swaps=5).tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("model", "numbers"),
    [("mlp", 30 * 10 + 10), ("logistic", 784 * 10 + 10), ("cnn", 64 * 10 + 10)],
)
def test_the_head_of_a_model_vector_is_the_output_layer(model, numbers):
    module = build_model(model, (1, 28, 28), 10, 1)
    vector = ModelVector(module)
    assert vector.head.stop - vector.head.start == numbers
    flat = vector.read(module)
    layer = [m for m in module.modules() if list(m.parameters(recurse=False))][-1]
    expected = [*layer.weight.flatten().tolist(), *layer.bias.flatten().tolist()]
    assert flat[vector.head].tolist() == pytest.approx(expected)


def test_complement_costs_the_same_bytes_as_random_selection(tmp_path):
    changes = ["training.rounds=8"]
    for name in ("random", "complement"):
        run(load_experiment("digits", changes, name), 1, tmp_path / name)
    bill = {
        name: [
            (entry["bytes_down"], entry["bytes_up"], entry["probed"])
            for entry in read_run(tmp_path / name).rounds
        ]
        for name in ("random", "complement")
    }
    assert bill["complement"] == bill["random"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sketch", "tail"),
        ("sketch", 0),
        ("start", "last"),
        ("ageing", 2.0),
        ("swaps", -1),
        ("explore", -1),
        ("sweep", 0.0),
    ],
)
def test_invalid_hyper_parameters_are_rejected(key, value):
    with pytest.raises(ConfigError, match=key):
        Complement(3, **{key: value})


@pytest.mark.parametrize("weighted", [True, False])
def test_the_matched_mean_has_the_weights_of_the_aggregation(weighted):
    selector, federation = Complement(4, sketch="full", swaps=0), FakeFederation.example(12)
    sizes = federation.population.sizes.astype(float)
    state = selector.init(federation.population)
    for _ in range(9):
        chosen, after = selector.select(state, federation)
        reasons = selector.reasons(after, federation, chosen)
        matched, result = state, federation.train(chosen)
        if weighted:
            weights = sizes[result.participated]
            result = dataclasses.replace(result, aggregation_weights=weights)
        state = selector.observe(after, result)
    U, target = matched["directions"], federation.weights @ matched["directions"]
    problem = Problem(U, sizes if weighted else np.ones(12), target)
    assert chosen.tolist() == greedy_by_trying(problem, chosen[:1].tolist(), 4)
    assert reasons["distance"][-1] == pytest.approx(gap(problem, chosen) / np.linalg.norm(target))


def test_the_simulator_reports_the_aggregation_weight_of_each_client():
    for weighted in (True, False):
        changes = [
            "partition.kind=dirichlet",
            "partition.minimum_size=3",
            f"optimiser.weighted={str(weighted).lower()}",
        ]
        simulation = build_simulation(load_experiment("digits", changes, "complement"), 1)
        *_, (_, after) = simulation.run(3)
        state, sizes = after.selector, simulation.engine.population.sizes
        seen = state["seen"] >= 0
        assert state["shares"][seen] == pytest.approx(sizes[seen] if weighted else 1.0)


# --- its relatives --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selector",
    [
        UpdateProcess(3, sketch="full"),
        UpdateProcess(3, sketch=2),
        EqualTarget(3),
        Herding(3),
        Combined(3, warmup=2, interval=2, dimension=2),
    ],
    ids=repr,
)
def test_relative_conforms(selector):
    check_selector(selector)


@pytest.mark.parametrize(
    "selector",
    [
        UpdateProcess(3, sketch="full"),
        Combined(3, sketch="full", warmup=8, dimension=3, discount=0.5),
    ],
    ids=repr,
)
def test_relatives_take_one_client_of_each_kind(selector):
    """Three kinds of clients with different directions: two of a kind would be redundant."""
    federation = FakeFederation(np.repeat(np.eye(3) * 10, 6, axis=0), learning_rate=0.01)
    chosen, _ = play(selector, federation, 30)
    kinds = [len(set((choice // 6).tolist())) for choice in chosen[10:]]
    assert np.mean(kinds) > 2.7  # three of 18 at random: 2.2 kinds on average


def test_herding_balances_the_kinds_over_rounds():
    """A group of two misses one of three kinds, but over rounds all are chosen equally often."""
    # With such a small learning rate the directions do not change.
    federation = FakeFederation(np.repeat(np.eye(3) * 10, 6, axis=0), learning_rate=1e-6)
    chosen, state = play(Herding(2, sketch="full", carry=1.0), federation, 9 + 60)
    times = np.bincount(np.concatenate(chosen[9:]) // 6, minlength=3)
    assert np.ptp(times) <= 3
    # Bounded, though each of the 60 rounds misses the target by 4.
    assert np.linalg.norm(state["missed"]) < 30


def test_the_target_of_equal_target_is_the_plain_mean():
    selector = EqualTarget(2, sketch="full")
    federation = FakeFederation.example(8)
    _, state = play(selector, federation, 6)
    expected = state["directions"].mean(axis=0)
    assert selector.target(state, federation.weights) == pytest.approx(expected)


@pytest.mark.parametrize(
    "selector", [UpdateProcess(3), Combined(3, warmup=2, dimension=2)], ids=repr
)
def test_relatives_rarely_choose_a_client_that_never_delivers(selector):
    chosen, _ = play(selector, FakeFederation.example(12, silent=[4]), 60)
    late = np.concatenate(chosen[10:])
    assert np.count_nonzero(late == 4) <= 6


def test_combined_gives_unknown_clients_the_mean_weight_of_the_known():
    """Beside known clients of weight 500, an unknown one must not look as if it had weight 1."""
    selector, federation = Combined(3, warmup=4, dimension=2), FakeFederation.example(12)
    _, state = play(selector, federation, 6)
    state["updates/seen"][:6] = -1  # as if they had never delivered
    known = state["updates/seen"] >= 0
    in_hundreds = {**state, "updates/shares": np.where(known, 500.0, 1.0)}
    for seed in range(20):
        choices = []
        for weights_of in (state, in_hundreds):
            federation.rng = np.random.default_rng(seed)
            choices.append(selector.select(weights_of, federation)[0].tolist())
        assert choices[0] == choices[1]


def test_update_process_is_algorithm_1_on_the_remembered_directions():
    selector = UpdateProcess(3, sketch="full", noise=0.3)
    federation = FakeFederation.example(9)
    _, state = play(selector, federation, 8)
    there = np.array([0, 2, 3, 5, 6, 8])
    federation.available = there  # the losses of the others still count
    chosen, _ = selector.select(state, federation)
    U, p = state["directions"], federation.weights
    sigma = U @ U.T / np.mean(np.sum(U**2, axis=1)) + 0.09 * np.eye(9)  # dense, conditioned by hand
    picks: list[int] = []
    for _ in range(3):
        left = np.setdiff1d(there, picks)
        inverse = np.linalg.pinv(sigma[np.ix_(picks, picks)])
        posterior = sigma - sigma[:, picks] @ inverse @ sigma[picks]
        deviation = np.sqrt(np.maximum(np.diag(posterior), 1e-12))
        gain = 0.95 ** state["picked"] * (p @ posterior) / deviation
        picks.append(int(left[np.argmax(gain[left])]))
    assert chosen.tolist() == picks


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: UpdateProcess(3, beta=1.5), "beta"),
        (lambda: UpdateProcess(3, interval=0), "interval"),
        (lambda: UpdateProcess(3, noise=0.0), "noise"),
        (lambda: Herding(3, carry=1.5), "carry"),
        (lambda: Combined(3, sketch="tail"), "sketch"),
    ],
)
def test_invalid_hyper_parameters_of_relatives_are_rejected(make, key):
    with pytest.raises(ConfigError, match=key):
        make()
