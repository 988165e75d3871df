"""Complement: the group whose mean update stands for everyone's, against brute force and by its promises."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcor.engine.models import ModelVector, build_model
from fedcor.errors import ConfigError
from fedcor.experiment import load_experiment
from fedcor.record import read_run
from fedcor.reproduce.relatives import Combined, EqualTarget, Herding, UpdateProcess
from fedcor.runner import build_simulation, run
from fedcor.selectors import Complement
from fedcor.selectors.complement import match, project
from fedcor.testing import FakeFederation, check_selector
from fedcor.types import Outcome, Population


def delivered(round, clients, updates):
    """The outcome of a round in which `clients` sent `updates`, each with a weight and step size of 1."""
    clients, ones = np.array(clients), np.ones(len(clients))
    return Outcome(
        round,
        clients,
        clients,
        step_sizes=ones,
        aggregation_weights=ones,
        read_losses=lambda: None,
        read_updates=lambda: updates,
    )


def gap(problem, group):
    mean = np.average(problem.U[list(group)], axis=0, weights=problem.shares[list(group)])
    return float(np.linalg.norm(mean - problem.target))


def greedy_by_hand(problem, first, count):
    group = list(first)
    while len(group) < count:
        rest = [k for k in range(len(problem.U)) if k not in group]
        group.append(min(rest, key=lambda k: gap(problem, [*group, k])))
    return group


@dataclasses.dataclass
class Problem:
    U: np.ndarray
    shares: np.ndarray
    target: np.ndarray


@st.composite
def problems(draw):
    n, s, rng = (
        draw(st.integers(2, 9)),
        draw(st.integers(1, 5)),
        np.random.default_rng(draw(st.integers(0, 10**6))),
    )
    shares = rng.integers(1, 100, size=n).astype(float) if draw(st.booleans()) else np.ones(n)
    return Problem(rng.standard_normal((n, s)), shares, rng.standard_normal(s))


@given(problems(), st.data())
@settings(deadline=None)
def test_greedy_matching_equals_the_obvious_loop(problem, data):
    n = len(problem.U)
    count, first = data.draw(st.integers(1, n)), data.draw(st.integers(0, n - 1))
    chosen = match(problem.U, problem.target, np.array([first]), count, shares=problem.shares)
    assert gap(problem, chosen) == pytest.approx(
        gap(problem, greedy_by_hand(problem, [first], count)), abs=1e-9
    )
    assert len(set(chosen.tolist())) == count
    assert chosen[0] == first


@given(problems(), st.data())
@settings(deadline=None)
def test_swaps_only_improve_and_end_where_no_exchange_helps(problem, data):
    n = len(problem.U)
    count = data.draw(st.integers(1, n))
    plain, swapped = (
        match(problem.U, problem.target, np.array([0]), count, swaps, problem.shares)
        for swaps in (0, 100)
    )
    assert gap(problem, swapped) <= gap(problem, plain) + 1e-12
    assert swapped[0] == 0  # the first stays
    outside = [k for k in range(n) if k not in swapped]
    for place, k in itertools.product(range(1, count), outside):
        assert (
            gap(problem, swapped)
            <= gap(problem, [*swapped[:place], k, *swapped[place + 1 :]]) + 1e-9
        )


def test_a_sketch_keeps_inner_products_on_average():
    U = np.random.default_rng(0).standard_normal((40, 3000))
    sketched = project(U, 400)
    assert sketched.shape == (40, 400)
    assert np.array_equal(
        sketched[:3], project(U[:3], 400)
    )  # the same places and signs, whoever else is there
    true, kept = U @ U.T, sketched @ sketched.T
    assert np.diag(kept) / np.diag(true) == pytest.approx(np.ones(40), abs=0.35)
    assert abs(float(np.mean((kept - true)[~np.eye(40, dtype=bool)]))) < 10


def played(selector, federation, rounds):
    state, chosen = selector.init(federation.population), []
    for _ in range(rounds):
        choice, state = selector.select(state, federation)
        chosen.append(choice)
        state = selector.observe(state, federation.train(choice))
    return chosen, state


def test_everyone_is_seen_once_before_anyone_is_chosen_again():
    chosen, state = played(Complement(5), FakeFederation.example(12), 3)
    first = np.concatenate(chosen)[:12]
    assert sorted(first.tolist()) == list(range(12))
    assert (state["seen"] >= 0).all()
    assert len(np.unique(chosen[2])) == 5


def test_a_mixed_sweep_shares_each_round_with_the_matching():
    federation = FakeFederation.example(30)
    state, seen = Complement(4, sweep=0.5).init(federation.population), np.zeros(30, dtype=bool)
    for t in range(20):
        chosen, state = Complement(4, sweep=0.5).select(state, federation)
        if t >= 1:
            assert int((~seen[chosen]).sum()) == min(2, int((~seen).sum()))
        seen[chosen] = True
        state = Complement(4, sweep=0.5).observe(state, federation.train(chosen))
    assert seen.all()


def test_the_memory_is_the_last_update_over_rate_and_steps():
    federation = FakeFederation.example(6, local_steps=3, learning_rate=0.05)
    _, state = played(Complement(2, sketch="full"), federation, 2)
    fresh = FakeFederation.example(6, local_steps=3, learning_rate=0.05)
    chosen, _ = played(Complement(2, sketch="full"), fresh, 1)
    last = np.setdiff1d(np.flatnonzero(state["seen"] == 0), [])
    expected = (FakeFederation.example(6, local_steps=3, learning_rate=0.05).trained(last)) / 0.15
    assert sorted(chosen[0].tolist()) == last.tolist()
    assert state["directions"][last] == pytest.approx(expected)


def test_it_chooses_the_group_that_matches_the_population():
    """Three kinds of clients, one of them twice as large: after the sweep each kind has its share in every group."""
    centres = np.repeat(np.eye(3) * 10, [12, 6, 6], axis=0)
    federation = FakeFederation(centres, learning_rate=0.01)
    chosen, state = played(Complement(4, sketch="full"), federation, 40)
    kinds = np.repeat([0, 1, 2], [12, 6, 6])
    for choice in chosen[7:]:
        assert np.bincount(kinds[choice], minlength=3).tolist() == [2, 1, 1]
    reasons = Complement(4, sketch="full").reasons(state, federation, chosen[-1])
    assert reasons["distance"][-1] < 0.2 < reasons["distance"][0]


def test_it_asks_nothing():
    federation = FakeFederation.example(12)
    played(Complement(4), federation, 10)
    assert not federation.asked
    assert not federation.tried


def test_a_client_that_never_delivers_is_tried_ever_more_rarely_and_never_given_up():
    federation = FakeFederation.example(10, silent=[0, 1])
    chosen, _ = played(Complement(3), federation, 200)
    for client in (0, 1):
        rounds = [t for t, choice in enumerate(chosen) if client in choice]
        waits = np.diff(rounds).tolist()
        assert waits == sorted(waits)
        assert all(wait >= 2 ** (i + 1) for i, wait in enumerate(waits))
        assert len(rounds) >= 6
    assert (np.bincount(np.concatenate(chosen), minlength=10)[2:] > 10).all()


@pytest.mark.parametrize("options", [{}, {"start": "oldest"}, {"explore": 0.5}], ids=repr)
def test_a_known_client_that_dies_does_not_keep_its_place(options):
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
    assert (times[[3, 8]] <= 7).all()  # 80 rounds hold no more than the waits 2 + 4 + ... + 32


@pytest.mark.parametrize(
    ("explore", "places"), [(0.5, 2), (0.1, 1)]
)  # a small share is still one client
def test_exploration_takes_those_who_were_seen_longest_ago(explore, places):
    federation = FakeFederation.example(12)
    chosen, _ = played(Complement(4, explore=explore), federation, 30)
    last = np.full(12, -1)
    for t, choice in enumerate(chosen):
        if t >= 3:
            oldest = np.sort(last)[:places]
            assert set(np.sort(last[choice])[:places].tolist()) == set(oldest.tolist())
        last[choice] = t


def test_ageing_gives_old_directions_less_of_the_target():
    selector = Complement(1, sketch="full", ageing=0.5)
    state = selector.init(Population(np.array([1, 1, 1])))
    for t, client in enumerate((0, 1)):
        state = {**state, "round": np.array(t + 1)}
        update = np.eye(3)[[client]]
        state = selector.observe(
            state,
            delivered(t, [client], update),
        )
    assert selector.target(state, np.full(3, 1 / 3)) == pytest.approx([1 / 3, 2 / 3, 0])


def test_updates_that_are_no_numbers_are_not_remembered():
    selector = Complement(2, sketch="full")
    state = {**selector.init(Population(np.array([1, 1]))), "round": np.array(1)}
    for worthless in (np.nan, np.inf, 1e160, -1e20):
        bad = np.array([[1.0, worthless], [1.0, 2.0]])
        after = selector.observe(state, delivered(0, [0, 1], bad))
        assert after["seen"].tolist() == [-1, 0]
        assert after["directions"].tolist() == [[0, 0], [1, 2]]
    # of a model of another size, and bad: the memory stays
    alone = delivered(0, [0], np.array([[np.nan]]))
    assert selector.observe(after, alone) is after


def test_there_are_never_more_rows_than_there_are():
    assert sorted(match(np.eye(3), np.ones(3), np.array([1]), 8, 5).tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("model", "options", "numbers"),
    [("mlp", {}, 30 * 10 + 10), ("logistic", {}, 784 * 10 + 10), ("cnn", {}, 64 * 10 + 10)],
)
def test_the_head_is_the_output_layer(model, options, numbers):
    module = build_model(model, (1, 28, 28), 10, 1, options)
    vector = ModelVector(module)
    assert vector.head.stop - vector.head.start == numbers
    flat = vector.read(module)
    layer = [m for m in module.modules() if list(m.parameters(recurse=False))][-1]
    assert flat[vector.head].tolist() == pytest.approx(
        [*layer.weight.flatten().tolist(), *layer.bias.flatten().tolist()]
    )


def test_it_costs_what_random_selection_costs_to_the_byte(tmp_path):
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
def test_impossible_settings_are_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        Complement(3, **{key: value})


@pytest.mark.parametrize("weighted", [True, False])
def test_a_mean_that_weighs_clients_by_their_data_is_matched_as_it_is(weighted):
    selector, federation = Complement(4, sketch="full", swaps=0), FakeFederation.example(12)
    sizes = federation.population.sizes.astype(float)
    state = selector.init(federation.population)
    for _ in range(9):
        chosen, after = selector.select(state, federation)
        reasons = selector.reasons(after, federation, chosen)
        matched, outcome = state, federation.train(chosen)
        if weighted:
            weights = sizes[outcome.participated]
            outcome = dataclasses.replace(outcome, aggregation_weights=weights)
        state = selector.observe(after, outcome)
    U, target = matched["directions"], federation.weights @ matched["directions"]
    problem = Problem(U, sizes if weighted else np.ones(12), target)
    assert chosen.tolist() == greedy_by_hand(problem, chosen[:1].tolist(), 4)
    assert reasons["distance"][-1] == pytest.approx(gap(problem, chosen) / np.linalg.norm(target))


def test_the_simulator_says_what_each_client_counts():
    for weighted in (True, False):
        changes = [
            "partition.kind=dirichlet",
            "partition.minimum_size=3",
            f"optimiser.weighted={str(weighted).lower()}",
        ]
        simulation = build_simulation(load_experiment("digits", changes, "complement"), 1)
        *_, (_, progress) = simulation.run(3)
        state, sizes = progress.selector, simulation.engine.population.sizes
        seen = state["seen"] >= 0
        assert state["shares"][seen] == pytest.approx(sizes[seen] if weighted else 1.0)


# --- its relatives ---------------------------------------------------------------------------------------------------


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
def test_the_relatives_are_selectors_too(selector):
    check_selector(selector)


@pytest.mark.parametrize(
    "selector",
    [
        UpdateProcess(3, sketch="full"),
        Combined(3, sketch="full", warmup=8, dimension=3, discount=0.5),
    ],
    ids=repr,
)
def test_the_relatives_take_one_of_each_kind(selector):
    """Three kinds of clients that pull in different directions: nothing is gained from two of a kind."""
    federation = FakeFederation(np.repeat(np.eye(3) * 10, 6, axis=0), learning_rate=0.01)
    chosen, _ = played(selector, federation, 30)
    kinds = [len(set((choice // 6).tolist())) for choice in chosen[10:]]
    assert np.mean(kinds) > 2.7  # three of 18 at random: 2.2 kinds on average


def test_herding_makes_up_for_what_was_missed():
    """Groups of two of three kinds: each misses a kind, and over rounds every kind has its share to the last choice."""
    federation = FakeFederation(
        np.repeat(np.eye(3) * 10, 6, axis=0), learning_rate=1e-6
    )  # directions stay as they are
    chosen, state = played(Herding(2, sketch="full", carry=1.0), federation, 9 + 60)
    times = np.bincount(np.concatenate(chosen[9:]) // 6, minlength=3)
    assert np.ptp(times) <= 3
    assert (
        np.linalg.norm(state["missed"]) < 30
    )  # bounded, though there were 60 rounds with an error of 4 each


def test_an_equal_target_is_the_plain_mean():
    selector = EqualTarget(2, sketch="full")
    federation = FakeFederation.example(8)
    _, state = played(selector, federation, 6)
    assert selector.target(state, federation.weights) == pytest.approx(
        state["directions"].mean(axis=0)
    )


@pytest.mark.parametrize(
    "selector", [UpdateProcess(3), Combined(3, warmup=2, dimension=2)], ids=repr
)
def test_the_relatives_leave_the_dead_in_peace(selector):
    chosen, _ = played(selector, FakeFederation.example(12, silent=[4]), 60)
    late = np.concatenate(chosen[10:])
    assert np.count_nonzero(late == 4) <= 6


def test_the_unknown_count_as_much_as_the_known_do_on_average():
    """Beside clients that count their data in hundreds, one that was never seen must not look weightless."""
    selector, federation = Combined(3, warmup=4, dimension=2), FakeFederation.example(12)
    _, state = played(selector, federation, 6)
    state["updates/seen"][:6] = -1  # as if they had never come
    known = state["updates/seen"] >= 0
    in_hundreds = {**state, "updates/shares": np.where(known, 500.0, 1.0)}
    for seed in range(20):
        choices = []
        for of_one in (state, in_hundreds):
            federation.rng = np.random.default_rng(seed)
            choices.append(selector.select(of_one, federation)[0].tolist())
        assert choices[0] == choices[1]


def test_the_update_process_is_the_papers_choice_on_the_remembered_directions():
    selector = UpdateProcess(3, sketch="full", noise=0.3)
    federation = FakeFederation.example(9)
    _, state = played(selector, federation, 8)
    there = np.array([0, 2, 3, 5, 6, 8])
    federation.available = there  # the others are still cared for
    chosen, _ = selector.select(state, federation)
    U, p = state["directions"], federation.weights
    sigma = U @ U.T / np.mean(np.sum(U**2, axis=1)) + 0.09 * np.eye(9)  # dense, conditioned by hand
    by_hand: list[int] = []
    for _ in range(3):
        left = np.setdiff1d(there, by_hand)
        posterior = (
            sigma
            - sigma[:, by_hand] @ np.linalg.pinv(sigma[np.ix_(by_hand, by_hand)]) @ sigma[by_hand]
        )
        gain = (
            0.95 ** state["picked"]
            * (p @ posterior)
            / np.sqrt(np.maximum(np.diag(posterior), 1e-12))
        )
        by_hand.append(int(left[np.argmax(gain[left])]))
    assert chosen.tolist() == by_hand


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
def test_impossible_relatives_are_refused(make, key):
    with pytest.raises(ConfigError, match=key):
        make()
