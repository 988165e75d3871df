"""Aligned and round-robin: the choice against brute force, who waits how long, and why."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from selector_helpers import outcome, play

from fedcor import Aligned, RoundRobin
from fedcor.core.errors import ConfigError
from fedcor.core.types import Population, selector_traits
from fedcor.runs.record import read_run
from fedcor.runs.runner import run
from fedcor.selectors.matching import match
from fedcor.simulation.experiment_files import load_experiment
from fedcor.testing import FakeFederation


def cosine(rows, target, weights=None):
    """That of the weighted sum of `rows` and `target`; 0 where one has no direction."""
    total = rows.sum(axis=0) if weights is None else weights @ rows
    lengths = np.linalg.norm(total) * np.linalg.norm(target)
    return float(total @ target / lengths) if lengths > 0 else 0.0


# --- matching by direction ------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Directions (n, s), weights (n,), a target (s,), a few first rows, and the group's size."""
    n, s = draw(st.integers(2, 9)), draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    weights = rng.integers(1, 100, size=n).astype(float) if draw(st.booleans()) else np.ones(n)
    # Of lengths that differ by orders of magnitude: they must not matter for the target.
    rows = rng.standard_normal((n, s)) * 10.0 ** rng.uniform(-1, 1, size=(n, 1))
    count = draw(st.integers(1, n))
    first = rng.choice(n, size=draw(st.integers(1, count)), replace=False)
    return rows, weights, rng.standard_normal(s), first, count


def aligned(problem, swaps):
    rows, weights, target, first, count = problem
    return match(rows, target, first, count, swaps=swaps, weights=weights, criterion="direction")


def quality(problem, group):
    rows, weights, target, *_ = problem
    return cosine(rows[list(group)], target, weights[list(group)])


@given(problems())
@settings(deadline=None)
def test_each_greedy_pick_is_the_best_of_all_that_are_left(problem):
    n, first, count = len(problem[0]), problem[3], problem[4]
    chosen = aligned(problem, swaps=0)
    assert chosen[: len(first)].tolist() == first.tolist()
    assert len(set(chosen.tolist())) == count
    for size in range(len(first), count):
        before = chosen[:size].tolist()
        best = max(quality(problem, [*before, k]) for k in range(n) if k not in before)
        assert quality(problem, chosen[: size + 1]) == pytest.approx(best, abs=1e-6)


@given(problems())
@settings(deadline=None)
def test_swaps_improve_the_cosine_until_no_single_swap_does(problem):
    n, first, count = len(problem[0]), problem[3], problem[4]
    plain, swapped = (aligned(problem, swaps) for swaps in (0, 100))
    assert quality(problem, swapped) >= quality(problem, plain) - 1e-9
    assert swapped[: len(first)].tolist() == first.tolist()  # never swapped
    outside = [k for k in range(n) if k not in swapped]
    for place, k in itertools.product(range(len(first), count), outside):
        other = [*swapped[:place], k, *swapped[place + 1 :]]
        assert quality(problem, other) <= quality(problem, swapped) + 1e-6


def test_the_choice_is_nearly_as_good_as_the_best_of_all_groups():
    rng, lost = np.random.default_rng(0), []
    for _ in range(60):
        problem = rng.standard_normal((9, 4)), np.ones(9), rng.standard_normal(4), np.array([0]), 4
        groups = ([0, *rest] for rest in itertools.combinations(range(1, 9), 3))
        best = max(quality(problem, group) for group in groups)
        lost.append(best - quality(problem, aligned(problem, swaps=20)))
    assert min(lost) >= -1e-12
    assert np.mean(lost) < 0.01


@given(problems(), st.integers(-40, 40), st.sampled_from(["rows", "target", "weights"]))
@settings(deadline=None)
def test_the_choice_does_not_depend_on_any_scale(problem, power, what):
    rows, weights, target, first, count = problem
    scales = {"rows": 1.0, "target": 1.0, "weights": 1.0, what: 2.0**power}  # exact in binary
    rows, target = scales["rows"] * rows, scales["target"] * target
    scaled = rows, scales["weights"] * weights, target, first, count
    assert_array_equal(aligned(problem, swaps=20), aligned(scaled, swaps=20))


def test_short_rows_near_the_target_lose_against_long_ones_that_point_there():
    rows, target = np.array([[0.0, 0.0], [1.0, 0.5], [20.0, 1.0]]), np.array([1.0, 0.0])
    first = np.array([0])
    assert match(rows, target, first, 2, criterion="distance").tolist() == [0, 1]
    assert match(rows, target, first, 2, criterion="direction").tolist() == [0, 2]


DEGENERATE = {
    "all zero": (np.zeros((4, 3)), np.zeros(3)),
    "no direction but a target": (np.zeros((4, 3)), np.ones(3)),
    "no target": (np.eye(4, 3), np.zeros(3)),
    "equal rows": (np.ones((4, 3)), np.ones(3)),
    "all against the target": (-np.ones((4, 3)) - np.eye(4, 3), np.ones(3)),
    "rows that cancel": (np.outer([1.0, -1.0, 1.0, -1.0], [1.0, 0.1]), np.ones(2)),
    "one long row": (np.array([[1e9, 0], [0, 1e-9], [0, 1.0], [1.0, 0]]), np.array([0.0, 1.0])),
    "without numbers": (np.zeros((4, 0)), np.zeros(0)),
}  # fmt: skip


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_degenerate_directions_give_a_group_all_the_same(case, count):
    rows, target = DEGENERATE[case]
    with np.errstate(all="raise"):
        chosen = match(rows, target, np.array([1]), count, swaps=20, criterion="direction")
    assert chosen[0] == 1
    assert len(set(chosen.tolist())) == count


def test_a_sum_that_is_zero_but_for_rounding_has_no_direction():
    """0.1 + 0.2 - 0.3 is not zero: read as a direction, it would point exactly to the target."""
    rows = np.array([[0.1 + 0.2, 1.0], [-0.3, -1.0], [1.0, 1.0]])
    total = rows[0] + rows[1]
    assert 0 < total[0] < 1e-15
    assert total[1] == 0
    chosen = match(rows, np.array([1.0, 0.0]), np.array([0]), 2, swaps=20, criterion="direction")
    assert chosen.tolist() == [0, 2]


def test_of_rows_that_all_point_away_the_least_bad_is_chosen():
    rows, target = np.array([[-1.0, 0.0], [-1.0, 0.1], [-1.0, 3.0]]), np.array([1.0, 0.0])
    assert match(rows, target, np.array([0]), 2, swaps=20, criterion="direction").tolist() == [0, 2]


# --- the choice of a round ------------------------------------------------------------------------


def known_state(selector, directions, asked, shares=None):
    """The state in which all clients sent `directions`, and were last chosen in `asked`."""
    count = len(directions)
    state = {
        **selector.init(Population(np.ones(count, dtype=np.int64))),
        "round": np.array(int(np.max(asked)) + 1),
        "directions": np.asarray(directions, dtype=float),
        "asked": np.asarray(asked),
        "seen": np.asarray(asked),
    }
    return state if shares is None else {**state, "shares": np.asarray(shares)}


@given(seed=st.integers(0, 10**6), count=st.integers(1, 8), weighted=st.booleans())
@settings(deadline=None)
def test_after_the_oldest_client_each_pick_aligns_the_group_best(seed, count, weighted):
    rng = np.random.default_rng(seed)
    n, selector = 8, Aligned(count, sketch="full", swaps=0)
    asked = rng.permutation(n)  # one was chosen in each round
    U = rng.standard_normal((n, 3))
    shares = rng.uniform(1, 9, size=n) if weighted else np.ones(n)
    sizes = rng.integers(1, 50, size=n)
    federation = FakeFederation(np.zeros((n, 3)), sizes=sizes, seed=seed)
    state = known_state(selector, U, asked, shares)
    chosen, after = selector.select(state, federation)
    limit = 3.0 * n / count
    overdue = np.flatnonzero(n - asked >= limit)
    first = min(max(len(overdue), int(count > 1)), count)
    assert set(chosen[:first].tolist()) == set(np.argsort(asked)[:first].tolist())
    target = sizes @ U / sizes.sum()
    for size in range(first, count):
        before = chosen[:size].tolist()
        left = [k for k in range(n) if k not in before]
        found = [cosine(U[[*before, k]], target, shares[[*before, k]]) for k in left]
        at = cosine(U[chosen[: size + 1]], target, shares[chosen[: size + 1]])
        assert at == pytest.approx(max(found), abs=1e-6)
    reasons = selector.reasons(after, federation, chosen)
    expected = [cosine(U[chosen[:k]], target, shares[chosen[:k]]) for k in range(1, count + 1)]
    assert_allclose(reasons["cosine"], expected, atol=1e-12)
    assert_array_equal(reasons["age"], n - asked[chosen])


@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), wait=st.floats(0.1, 4.0))
@settings(deadline=None)
def test_those_who_waited_too_long_come_first(seed, count, wait):
    rng = np.random.default_rng(seed)
    selector = Aligned(count, sketch="full", longest_wait=wait)
    asked = rng.integers(0, 20, size=12)
    state = known_state(selector, rng.standard_normal((12, 3)), asked)
    federation = FakeFederation(np.zeros((12, 3)), seed=seed)
    chosen, _ = selector.select(state, federation)
    overdue = int(np.sum(state["round"] - asked >= wait * 12 / count))
    first = min(max(overdue, int(count > 1)), count)
    # Of clients that were last chosen in the same round, any may come first.
    assert sorted(asked[chosen])[:first] == sorted(asked)[:first]


def test_among_those_who_waited_equally_long_chance_decides():
    selector, found = Aligned(2, sketch="full"), set()
    state = known_state(selector, np.eye(4), [5, 5, 5, 9])
    for seed in range(40):
        chosen, _ = selector.select(state, FakeFederation(np.zeros((4, 4)), seed=seed))
        found |= set(chosen[:1].tolist())
    assert found == {0, 1, 2}


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 24),
    fraction=st.floats(0.01, 1.0),
    wait=st.floats(0.2, 4.0),
)
@settings(deadline=None, max_examples=40)
def test_nobody_waits_longer_than_is_said(seed, n, fraction, wait):
    rng, count = np.random.default_rng(seed), max(1, round(fraction * n))
    selector = Aligned(count, sketch="full", longest_wait=wait)
    federation = FakeFederation(np.zeros((n, 3)), sizes=rng.integers(1, 50, size=n), seed=seed)
    # Where the wait is shorter than everyone in turn takes, everyone comes in turn.
    bound = max(math.ceil(wait * n / count), math.ceil(n / count))
    state, last = selector.init(federation.population), np.full(n, -1)
    for t in range(4 * bound + 2):
        chosen, state = selector.select(state, federation)
        assert len(np.unique(chosen)) == len(chosen) == count
        federation.train(chosen)  # the next round, with its own random stream
        # Some clients are always right: they would be chosen in every round.
        updates = rng.standard_normal((count, 3)) * (1 + 9 * (np.sort(chosen) % 3 == 0)[:, None])
        state = selector.observe(state, outcome(t, np.sort(chosen), updates=updates))
        last[chosen] = t
        assert t - last.min() < bound


def test_the_only_seat_of_a_round_goes_to_the_best_direction_unless_somebody_is_overdue():
    """Given to the oldest, it would be round-robin, with which FedRecall ends below random."""
    selector = Aligned(1, sketch="full")
    directions = np.array([[0.0, 1.0], [3.0, 1.0], [1.0, 1.0], [-1.0, 0.0]])
    federation = FakeFederation(np.zeros((4, 2)))
    for oldest, expected in ((8, 2), (1, 0)):  # after 3 * 4 rounds, the first one is overdue
        state = known_state(selector, directions, [oldest, 10, 11, 12])
        chosen, _ = selector.select(state, federation)
        assert chosen.tolist() == [expected]


@pytest.mark.parametrize("count", [4, 7])
def test_a_client_that_sends_nothing_fills_no_seat_but_that_of_the_oldest(count):
    """Its zero would leave the cosine of a well aligned group as it is."""
    rng = np.random.default_rng(1)
    directions = rng.standard_normal((10, 3)) + 1.0
    directions[:3] = 0.0
    selector = Aligned(count, sketch="full")
    federation = FakeFederation(np.zeros((10, 3)))
    for oldest in (9, 0):
        asked = np.full(10, 9)
        asked[oldest] = 8
        chosen, _ = selector.select(known_state(selector, directions, asked), federation)
        assert chosen[0] == oldest
        assert (chosen[1:] >= 3).all()


def test_where_too_few_clients_move_the_others_fill_the_round():
    selector, directions = Aligned(4, sketch="full"), np.zeros((6, 2))
    directions[5] = 1.0
    chosen, _ = selector.select(
        known_state(selector, directions, np.arange(6)), FakeFederation(np.zeros((6, 2)))
    )
    assert len(set(chosen.tolist())) == 4
    assert 5 in chosen


def test_clients_that_left_no_longer_count_in_the_mean_of_everyone():
    """Where N / C is 5 rounds, they count for 50."""
    selector, weights = Aligned(2, sketch="full"), np.full(10, 0.1)
    asked = np.r_[np.zeros(5, dtype=int), np.full(5, 50)]
    for later, expected in ((50, [0.5, 0.5]), (51, [0.0, 1.0])):
        state = known_state(selector, np.repeat(np.eye(2), 5, axis=0), asked)
        state = {**state, "round": np.array(later)}
        assert selector.target(state, weights) == pytest.approx(expected)
    state = {**state, "round": np.array(1000)}  # nobody delivers: the past is all that there is
    assert selector.target(state, weights) == pytest.approx([0.5, 0.5])


def test_scaling_all_updates_changes_no_choice():
    choices = []
    for scale in (1.0, 2.0**-10, 2.0**10):
        example = FakeFederation.example(15)
        federation = FakeFederation(scale * example.centres, sizes=example.population.sizes)
        choices.append(play(Aligned(4, sketch="full"), federation, 30)[0])
    for other in choices[1:]:
        assert_array_equal(other, choices[0])


def test_every_client_trains_once_before_any_trains_twice():
    chosen, state = play(Aligned(5), FakeFederation.example(12), 3)
    assert sorted(np.concatenate(chosen)[:12].tolist()) == list(range(12))
    assert (state["seen"] >= 0).all()
    assert len(np.unique(chosen[2])) == 5


@pytest.mark.parametrize(("n", "count"), [(1, 1), (5, 5), (5, 9)])
def test_if_there_are_no_more_everyone_trains(n, count):
    chosen, _ = play(Aligned(count), FakeFederation.example(n), 6)
    for choice in chosen:
        assert sorted(choice.tolist()) == list(range(n))


def test_it_asks_the_clients_nothing():
    federation = FakeFederation.example(12)
    play(Aligned(4), federation, 10)
    assert not federation.asked
    assert not federation.tried


def test_a_client_that_never_delivers_rests_longer_each_time_but_is_never_dropped():
    chosen, _ = play(Aligned(3), FakeFederation.example(10, silent=[0, 1]), 200)
    for client in (0, 1):
        rounds = [t for t, choice in enumerate(chosen) if client in choice]
        waits = np.diff(rounds)
        assert (waits >= 2 ** (1 + np.arange(len(waits)))).all()
        assert len(rounds) >= 6
    assert (np.bincount(np.concatenate(chosen), minlength=10)[2:] > 10).all()


def test_a_known_client_that_stops_delivering_rests_although_it_is_overdue():
    federation = FakeFederation.example(20)
    selector, late = Aligned(4), []
    state = selector.init(federation.population)
    for t in range(100):
        if t == 20:
            federation.answering = ~np.isin(np.arange(20), [3, 8])
        chosen, state = selector.select(state, federation)
        state = selector.observe(state, federation.train(chosen))
        late += chosen.tolist() if t >= 20 else []
    assert (np.bincount(late, minlength=20)[[3, 8]] <= 6).all()  # after 2, 4, ..., 32 rounds


def test_clients_that_join_train_one_after_the_other():
    small, large = FakeFederation.example(6), FakeFederation.example(9)
    selector = Aligned(4)
    _, state = play(selector, small, 8)
    state, joined = selector.join(state, large.population), []
    for _ in range(3):
        chosen, after = selector.select(state, large)
        assert_array_equal(after["directions"][:6], state["directions"][:6])
        joined += [k for k in chosen.tolist() if state["seen"][k] < 0]
        state = selector.observe(after, large.train(chosen))
    assert sorted(joined) == [6, 7, 8]


def test_where_too_few_are_known_those_who_joined_fill_the_round():
    small, large = FakeFederation.example(2), FakeFederation.example(9)
    selector = Aligned(6)
    _, state = play(selector, small, 3)
    chosen, _ = selector.select(selector.join(state, large.population), large)
    assert {0, 1} < set(chosen.tolist())
    assert len(chosen) == 6


def test_a_first_training_has_no_cosine_and_no_age():
    selector = Aligned(2, sketch="full")
    state = known_state(selector, np.eye(4), [0, 1, 2, 3])
    state = {**state, "seen": np.array([0, -1, 2, 3])}
    federation = FakeFederation(np.zeros((4, 4)))
    chosen, after = selector.select(state, federation)
    assert chosen.tolist() == [1, 0]  # the new one, then the oldest
    reasons = selector.reasons(after, federation, chosen)
    assert np.isnan([reasons["cosine"][0], reasons["age"][0]]).all()
    # Three known directions at right angles: each has a third of the mean.
    assert reasons["cosine"][1] == pytest.approx(1 / np.sqrt(3))
    assert reasons["age"][1] == 4


def test_groups_are_aligned_better_than_by_chance():
    """Three kinds of clients, one twice as common: so it is in every group after the sweep."""
    centres = np.repeat(np.eye(3) * 10, [12, 6, 6], axis=0)
    federation = FakeFederation(centres, learning_rate=1e-6)  # directions do not change
    chosen, _ = play(Aligned(4, sketch="full"), federation, 40)
    kinds = np.repeat([0, 1, 2], [12, 6, 6])
    waiting = 0
    for choice in chosen[6:]:
        waiting += np.bincount(kinds[choice], minlength=3).tolist() != [2, 1, 1]
    assert waiting <= 4  # rounds in which several of a kind had waited too long


def test_the_optimiser_that_goes_with_it_aggregates_where_none_is_named():
    assert selector_traits(Aligned(3)).optimiser == "fedrecall"
    assert selector_traits(Aligned(3)).needs_updates


def test_it_costs_the_same_bytes_as_random_selection(tmp_path):
    bills = {}
    for name in ("random", "aligned"):
        run(load_experiment("digits", ["training.rounds=8"], name), 1, tmp_path / name)
        rounds = read_run(tmp_path / name).rounds
        bills[name] = [(row["bytes_down"], row["bytes_up"], row["probed"]) for row in rounds]
    assert bills["aligned"] == bills["random"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("sketch", "tail"), ("swaps", -1), ("longest_wait", 0.0), ("clients_per_round", 0)],
)
def test_invalid_hyper_parameters_are_rejected(key, value):
    with pytest.raises(ConfigError, match=key):
        Aligned(**{"clients_per_round": 3, key: value})


# --- round robin ----------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), rounds=st.integers(1, 5))
@settings(deadline=None)
def test_round_robin_takes_everyone_once_in_each_cycle(seed, count, rounds):
    n = count * rounds
    chosen, _ = play(RoundRobin(count), FakeFederation(np.zeros((n, 2)), seed=seed), 3 * rounds)
    for cycle in np.concatenate(chosen).reshape(3, n):
        assert sorted(cycle.tolist()) == list(range(n))


@given(seed=st.integers(0, 10**6), n=st.integers(1, 20), count=st.integers(1, 25))
@settings(deadline=None)
def test_in_round_robin_nobody_waits_longer_than_a_cycle(seed, n, count):
    chosen, _ = play(RoundRobin(count), FakeFederation(np.zeros((n, 2)), seed=seed), 25)
    last = np.full(n, -1)
    for t, choice in enumerate(chosen):
        assert len(np.unique(choice)) == len(choice) == min(n, count)
        last[choice] = t
        assert t - last.min() < math.ceil(n / count)


def test_round_robin_draws_the_order():
    orders = {
        tuple(np.concatenate(play(RoundRobin(1), FakeFederation.example(8, seed=seed), 8)[0]))
        for seed in range(6)
    }
    assert len(orders) == 6


@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
@settings(deadline=None)
def test_round_robin_takes_those_here_who_were_chosen_longest_ago(seed, count):
    rng, selector = np.random.default_rng(seed), RoundRobin(count)
    federation = FakeFederation.example(10, seed=seed)
    state, last = selector.init(federation.population), np.full(10, -1)
    for t in range(25):
        federation.available = np.flatnonzero(rng.random(10) < 0.5)
        chosen, state = selector.select(state, federation)
        here = np.sort(last[federation.available])
        assert np.isin(chosen, federation.available).all()
        assert np.sort(last[chosen]).tolist() == here[:count].tolist()
        last[chosen] = t
        state = selector.observe(state, federation.train(chosen))


def test_round_robin_puts_clients_that_join_at_the_end_of_the_queue():
    selector, large = RoundRobin(3), FakeFederation.example(9)
    earlier, state = play(selector, FakeFederation.example(6), 4)
    state, chosen = selector.join(state, large.population), []
    for _ in range(3):
        group, state = selector.select(state, large)
        chosen.append(sorted(group.tolist()))
    assert chosen[0] == sorted(np.asarray(earlier[2]).tolist())
    assert sorted(k for group in chosen for k in group) == list(range(9))


def test_where_nothing_points_anywhere_chance_decides_and_not_the_lowest_ids():
    selector, times = Aligned(clients_per_round=5), np.zeros(30)
    state = selector.init(Population(np.ones(30, dtype=np.int64)))
    state = {**state, "directions": np.zeros((30, 4)), "seen": np.zeros(30, dtype=np.int64)}
    state = {**state, "asked": np.zeros(30, dtype=np.int64), "round": np.array(1)}
    for seed in range(60):
        chosen, _ = selector.select(state, FakeFederation(np.ones((30, 1)), seed=seed))
        assert len(set(chosen.tolist())) == 5
        times[chosen] += 1
    assert times.max() < 30
    assert (times > 0).sum() > 25
