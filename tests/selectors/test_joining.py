"""Clients that join later: fifty new ones in every round do not take the federation over."""

from __future__ import annotations

import numpy as np
import pytest

from fedcor import AFL, Aligned, Complement, FedCor, Oort, PowerOfChoice, Proxy, RoundRobin
from fedcor.core.rng import stream
from fedcor.testing import FakeFederation

FOUNDERS, JOINING, CHOSEN = 12, 50, 4
RNG = np.random.default_rng(0)
CENTRES = RNG.standard_normal((FOUNDERS + 20 * JOINING, 3))
QUICK = {"warmup": 5, "interval": 5, "dimension": 4, "warmup_steps": 20, "refit_steps": 20}


def federation_of(count, round, model=None):
    federation = FakeFederation(CENTRES[:count])
    federation.round, federation.rng = round, stream(0, "select", round)
    federation.model = federation.model if model is None else model
    return federation


def invaded(selector):
    """Round -> who was chosen, and whether each of them had trained before; from round 10 on."""
    federation = federation_of(FOUNDERS, 0)
    state, trained, rounds = selector.init(federation.population), set(), {}
    for t in range(25):
        if t >= 10:
            count = FOUNDERS + JOINING * (t - 9)
            federation = federation_of(count, t, federation.model)
            state = selector.join(state, federation.population)
        chosen, state = selector.select(state, federation)
        assert len(chosen) == CHOSEN
        if t >= 10:
            rounds[t] = [(k, k in trained) for k in chosen.tolist()]
        trained |= set(chosen.tolist())
        state = selector.observe(state, federation.train(chosen))
    return rounds


@pytest.mark.parametrize("selector", [Complement(CHOSEN), Aligned(CHOSEN)])
def test_a_quarter_of_a_round_is_for_those_who_joined_and_never_trained(selector):
    for chosen in invaded(selector).values():
        assert [known for _, known in chosen].count(False) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_few_seats_those_who_joined_get_a_quarter_on_average(count):
    """With one seat, every round would be theirs, and founders would never be chosen again."""
    selector, federation, new = Aligned(count), federation_of(FOUNDERS, 0), 0
    state = selector.init(federation.population)
    for t in range(300):
        if t >= FOUNDERS:
            federation = federation_of(FOUNDERS + t * count, t, federation.model)
            state = selector.join(state, federation.population)
        chosen, after = selector.select(state, federation)
        joined = (chosen >= FOUNDERS) & (state["seen"][chosen] < 0)
        assert joined.sum() <= 1
        new += int(joined.sum())
        state = selector.observe(after, federation.train(chosen))
    assert new / (300 - FOUNDERS) == pytest.approx(0.25 * count, abs=0.08)


def test_oort_explores_those_who_joined_in_no_more_seats_than_epsilon_says():
    selector = Oort(CHOSEN, exploration=0.5, least_exploration=0.25, exploration_decay=0.9)
    for chosen in invaded(selector).values():
        assert [known for _, known in chosen].count(False) <= 2
    late = [known for t, one in invaded(selector).items() if t >= 20 for _, known in one]
    assert late.count(False) == len(late) // 4


def test_in_the_first_sweep_founders_come_first_and_fill_the_rounds():
    selector, small = Aligned(CHOSEN), federation_of(FOUNDERS, 0)
    first, state = selector.select(selector.init(small.population), small)
    state = selector.observe(state, small.train(first))
    large = federation_of(FOUNDERS + JOINING, 1, small.model)
    second, _ = selector.select(selector.join(state, large.population), large)
    assert (second < FOUNDERS).all()
    assert not set(second.tolist()) & set(first.tolist())


def test_who_joins_before_the_first_round_is_a_founder():
    selector, large = Complement(CHOSEN), federation_of(FOUNDERS, 0)
    state = selector.init(federation_of(3, 0).population)
    state = selector.join(state, large.population)
    for _ in range(3):
        chosen, state = selector.select(state, large)
        state = selector.observe(state, large.train(chosen))
    assert (state["seen"] >= 0).all()


@pytest.mark.parametrize(
    "selector",
    [AFL(CHOSEN), FedCor(CHOSEN, **QUICK), Proxy(CHOSEN, **QUICK),
     FedCor(CHOSEN, **QUICK, probe_clients=8), PowerOfChoice(CHOSEN),
     Complement(CHOSEN), Aligned(CHOSEN), RoundRobin(CHOSEN)],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
def test_as_many_newcomers_as_founders_do_not_get_most_of_the_seats(selector):
    """They took all of them under AFL and RoundRobin, which valued them above everyone."""
    federation = federation_of(FOUNDERS, 0)
    state, joined = selector.init(federation.population), []
    for t in range(50):
        if t == 10:
            federation = federation_of(2 * FOUNDERS, t, federation.model)
            state = selector.join(state, federation.population)
        chosen, state = selector.select(state, federation)
        joined += (chosen >= FOUNDERS).tolist() if t >= 10 else []
        state = selector.observe(state, federation.train(chosen))
    assert 0.0 < np.mean(joined) <= 0.75


def test_afl_values_a_newcomer_like_the_mean_of_those_who_reported():
    selector, small = AFL(CHOSEN), federation_of(FOUNDERS, 0)
    state = selector.init(small.population)
    for _ in range(5):
        chosen, state = selector.select(state, small)
        state = selector.observe(state, small.train(chosen))
    large = federation_of(FOUNDERS + 1, 5, small.model)
    joined = selector.join(state, large.population)
    reported = state["losses"][np.isfinite(state["losses"])]
    assert joined["losses"][-1] == pytest.approx(reported.mean())
