"""The baselines' reasons, pick by pick, against slow twins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fedcor.rounds.rules.declaration import Rules
from fedcor.rounds.rules.seats import make_groups
from fedcor.rounds.selection import decide, observe
from fedcor.selectors.afl import AFL
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.base import ready
from fedcor.selectors.complement import Complement
from fedcor.selectors.matching import replacements
from fedcor.selectors.power_of_choice import PowerOfChoice
from fedcor.testing import FakeFederation


def play(selector, federation, rounds):
    """The decisions of some rounds, with the state before each."""
    state, played = selector.init(federation.population), []
    for _ in range(rounds):
        decision = decide(selector, state, federation)
        played.append((state, decision))
        state = observe(selector, decision.state, federation.train(decision.chosen))
    return played


# --- AFL ------------------------------------------------------------------------------------------


def test_the_probability_is_how_often_a_client_is_drawn_for_the_seat():
    """Many draws from one state, for the first seat and for the second one after the first."""
    federation = FakeFederation(np.zeros((6, 1)), sizes=np.ones(6, dtype=np.int64), seed=1)
    selector = AFL(3, alpha1=0.34, alpha2=1.0, alpha3=0.3)  # 2 dropped, 2 seats of 3 by valuation
    losses = np.array([0.1, 0.2, 1.0, 1.5, 2.0, 2.5])
    state = {**selector.init(federation.population), "losses": losses}
    first, second, said = np.zeros(6), np.zeros((6, 6)), {}
    draws = 20_000
    for _ in range(draws):
        chosen, _ = selector.select(state, federation)
        pair = tuple(chosen[:2].tolist())
        first[pair[0]] += 1
        second[pair] += 1
        if pair not in said:
            said[pair] = selector.reasons(state, federation, chosen)
    assert set(said) == set(itertools.permutations(range(2, 6), 2))  # the two smallest are dropped
    for (a, b), reasons in said.items():
        assert reasons["probability"][0] == pytest.approx(first[a] / draws, abs=0.015)
        assert reasons["probability"][1] == pytest.approx(second[a, b] / first[a], abs=0.04)
        assert reasons["probability"][2] == 1 / 4  # uniform among those who are left
        assert reasons["by_valuation"].tolist() == [1, 1, 0]
        assert reasons["kept"].tolist()[:2] == [1, 1]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 8),
    alpha1=st.sampled_from([0.0, 0.3, 0.75, 1.0]),
    alpha3=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_afl_says_who_was_kept_where_chance_did_not_decide(seed, count, alpha1, alpha3):
    rng = np.random.default_rng(seed)
    selector = AFL(count, alpha1=alpha1, alpha3=alpha3)
    federation = FakeFederation(np.zeros((8, 1)), sizes=np.ones(8, dtype=np.int64), seed=seed)
    losses = rng.integers(1, 4, size=8).astype(float)  # with ties
    state = {**selector.init(federation.population), "losses": losses}
    chosen, _ = selector.select(state, federation)
    reasons = selector.reasons(state, federation, chosen)
    dropped = int(alpha1 * 8 + 1e-9)
    by_valuation = min(int((1 - alpha3) * count + 1e-9), 8 - dropped)
    assert reasons["by_valuation"].tolist() == [1] * by_valuation + [0] * (count - by_valuation)
    assert ((reasons["probability"] > 0) & (reasons["probability"] <= 1)).all()
    for client, kept, drawn in zip(chosen, reasons["kept"], reasons["by_valuation"], strict=True):
        below, equal = (losses < losses[client]).sum(), (losses == losses[client]).sum()
        sure = 1 if below >= dropped else 0 if below + equal <= dropped else None
        expected = 1 if drawn else sure
        assert np.isnan(kept) if expected is None else kept == expected


# --- power-of-choice ------------------------------------------------------------------------------


def test_power_of_choice_names_its_candidates_the_largest_loss_first():
    federation = FakeFederation.example(12)
    for _, decision in play(PowerOfChoice(3, candidates=5), federation, 4):
        candidates = decision.details["candidates"]
        assert len(set(candidates)) == 5
        assert candidates[:3] == decision.chosen.tolist()
    assert len(federation.asked) == 8  # once in each choice and, free, once for its reasons


# --- complement and aligned -----------------------------------------------------------------------


def quality(U, weights, target, group, criterion):
    """The relative distance of a group's mean from the target, or the cosine of its sum."""
    total = weights[group] @ U[group]
    if criterion == "distance":
        return np.linalg.norm(total / weights[group].sum() - target) / np.linalg.norm(target)
    return total @ target / np.linalg.norm(total) / np.linalg.norm(target)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 9),
    count=st.integers(1, 5),
    criterion=st.sampled_from(["distance", "direction"]),
)
def test_the_best_replacement_is_found_by_trying_all(seed, n, count, criterion):
    rng = np.random.default_rng(seed)
    U, target, weights = rng.standard_normal((n, 3)), rng.standard_normal(3), rng.uniform(1, 5, n)
    members = rng.permutation(n)[:count]
    kinds = rng.integers(0, 2, size=n)
    rows, values = replacements(
        U, target, members, kinds=kinds, weights=weights, criterion=criterion
    )
    for place in range(len(members)):
        found = {}
        alike = np.flatnonzero(kinds == kinds[members[place]])
        for row in np.setdiff1d(alike, members).tolist():
            group = members.copy()
            group[place] = row
            found[row] = quality(U, weights, target, group, criterion)
        if not found:
            assert rows[place] == -1
            assert np.isnan(values[place])
            continue
        best = (min if criterion == "distance" else max)(found.values())
        assert values[place] == pytest.approx(best, abs=1e-6)
        assert found[int(rows[place])] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("selector", [Complement(4, sketch="full"), Aligned(4, sketch="full")])
@pytest.mark.parametrize("ruled", [False, True])
def test_each_step_and_each_runner_up_of_a_group(selector, ruled):
    """Before, after, and with the best other client that could be in each place."""
    what, before = ("distance", "before")
    criterion, better = "distance", min
    if isinstance(selector, Aligned):
        what, before, criterion, better = "cosine", "cosine_before", "direction", max
    site = np.arange(12) % 2
    groups = make_groups(Rules(at_most={"site": 2}), {"site": site.astype(str).tolist()},
                         np.ones(12, dtype=bool)) if ruled else None  # fmt: skip
    federation = FakeFederation.example(12)
    state, checked = selector.init(federation.population), 0
    for number in range(14):
        if number == 5:
            federation.answering[3] = False  # it rests after it has failed
        decision = decide(selector, state, federation, groups=groups)
        chosen, why = decision.chosen, decision.why
        if (state["seen"][chosen] < 0).all():
            assert why == {}
        elif (state["seen"][chosen] >= 0).all() and (
            "before_rules" not in decision.details  # else nobody else was allowed
        ):
            checked += 1
            U, shares = state["directions"], state["shares"]
            target = federation.weights @ U
            steps = [quality(U, shares, target, chosen[:k], criterion) for k in range(1, 5)]
            assert_allclose(why[what], steps, atol=1e-9)
            assert why[before] == [None, *why[what][:-1]]
            may = ready(state, np.arange(12))
            for place, client in enumerate(chosen.tolist()):
                values = {}
                for other in range(12):
                    if other in chosen or other not in may:
                        continue
                    if ruled and site[other] != site[client]:
                        continue
                    group = chosen.copy()
                    group[place] = other
                    values[other] = quality(U, shares, target, group, criterion)
                best = better(values.values())
                assert values[int(why["runner_up"][place])] == pytest.approx(best, abs=1e-6)
                margin = best - steps[-1] if criterion == "distance" else steps[-1] - best
                assert why["margin"][place] == pytest.approx(margin, abs=1e-6)
                if place:  # swaps leave nothing better, but for the first, which is fixed
                    assert margin > -1e-6
        state = observe(selector, decision.state, federation.train(chosen))
    assert checked >= 3


def test_aligned_says_who_has_a_seat_for_waiting():
    selector = Aligned(3, sketch="full", longest_wait=1.5)
    seats = 0
    for state, decision in play(selector, FakeFederation.example(12), 14):
        t, details = int(state["round"]), decision.details
        waited = [t - int(asked) if asked >= 0 else None for asked in state["asked"]]
        assert details["waited"] == [waited[k] for k in decision.chosen]
        if None in waited:
            assert details["overdue"] == [0, 0, 0]
            continue
        overdue = min(max(sum(w >= 1.5 * 12 / 3 for w in waited), 1), 3)
        assert details["overdue"] == [1] * overdue + [0] * (3 - overdue)
        first = sorted((waited[k] for k in decision.chosen[:overdue]), reverse=True)
        assert first == sorted(waited, reverse=True)[:overdue]
        assert details["waited_alike"] == [waited.count(waited[k]) for k in decision.chosen]
        seats += overdue
    assert seats > 10


# --- rules ----------------------------------------------------------------------------------------


def test_a_choice_that_rules_changed_is_kept_beside_the_other():
    selector, federation = PowerOfChoice(4, candidates=4), FakeFederation.example(12)
    columns = {"site": [str(k % 4) for k in range(12)]}
    groups = make_groups(Rules(at_most={"site": 1}), columns, np.ones(12, dtype=bool))
    free = decide(selector, {}, FakeFederation.example(12))
    ruled = decide(selector, {}, federation, groups=groups)
    assert "before_rules" not in free.details
    assert sorted(k % 4 for k in ruled.chosen) == [0, 1, 2, 3]
    assert ruled.details["before_rules"] == free.chosen.tolist()
