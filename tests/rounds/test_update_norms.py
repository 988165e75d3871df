"""Updates of an unusual length: the rule against a slow twin, its bounds, and what it remembers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from fedcor import Defence
from fedcor.core.errors import ConfigError
from fedcor.rounds.defence.update_norms import GROWTH, ROUNDS, NormLimits, judge, no_norms, remember

LENGTHS = st.one_of(st.just(0.0), st.floats(1e-6, 1e12))
LIMITS = NormLimits(30.0, 1000.0)


def matrix(rows, parts=2):
    return np.array(rows, dtype=float).reshape(-1, parts)


def past_of(rows):
    return remember(no_norms(2), matrix(rows), 0, range(len(rows)))


def twin(limits, past, came):
    """Client by client and part by part, as the notation says it."""
    verdicts = []
    references, founded = [], []
    for part in range(2):
        now = [row[part] for row in came if row[part] > 0]
        before = [row[part] for row in past if row[part] > 0]
        middle = statistics.median_low(now) if now else 0.0
        usual = statistics.median_low(before) if before else 0.0
        if not before or (len(before) < 3 and len(now) >= 3):
            references.append(middle)
        elif len(now) < 3:
            references.append(usual)
        else:
            references.append(min(max(usual, middle), GROWTH * usual))
        founded.append(len(before) >= 3 or len(now) >= 3)
    for row in came:
        times = [r / ref if ref else 0.0 for r, ref in zip(row, references, strict=True)]
        refused = any(t > limits.refuse and f for t, f in zip(times, founded, strict=True))
        factors = [min(1.0, limits.clip / one) if one else 1.0 for one in times]
        verdicts.append((refused, factors))
    return verdicts


@given(
    past=st.lists(st.tuples(LENGTHS, LENGTHS), max_size=8),
    came=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=8),
)
def test_the_rule_is_that_of_its_slow_twin(past, came):
    verdict = judge(LIMITS, past_of(past), matrix(came))
    slow = twin(LIMITS, past, came)
    assert verdict.refused.tolist() == [refused for refused, _ in slow]
    assert_allclose(verdict.factors, [factors for _, factors in slow], rtol=1e-12)
    assert_array_equal(np.isnan(verdict.norms).all(axis=1), verdict.refused)


@given(
    honest=st.lists(st.floats(1.0, 10.0), min_size=3, max_size=9),
    lies=st.lists(st.floats(1e-3, 1e30), max_size=4),
)
def test_a_minority_never_gets_further_than_the_limit_of_the_honest(honest, lies):
    assume(len(lies) < len(honest))
    came = matrix([(one, 0.0) for one in [*honest, *lies]])
    verdict = judge(LIMITS, no_norms(2), came)
    kept = verdict.norms[~verdict.refused, 0]
    assert kept.max() <= LIMITS.clip * max(honest) * (1 + 1e-9)
    assert not verdict.refused[: len(honest)].any() or min(lies) * 1000 < max(honest)


@given(lengths=st.lists(st.floats(1.0, 29.0), min_size=1, max_size=9), past=st.booleans())
def test_honest_updates_are_left_as_they_are(lengths, past):
    before = past_of([(1.0, 0.0)] * 3) if past else no_norms(2)
    verdict = judge(LIMITS, before, matrix([(one, 0.0) for one in lengths]))
    assert_array_equal(verdict.factors, 1.0)
    assert not verdict.refused.any()


def test_two_in_the_first_round_and_one_in_a_later():
    """Of two, nobody knows which is the absurd one: the longer is scaled down, not refused."""
    verdict = judge(LIMITS, no_norms(2), matrix([(1.0, 0.0), (9e9, 0.0)]))
    assert verdict.clipped.tolist() == [False, True]
    assert_allclose(verdict.factors[1, 0] * 9e9, 30.0)
    assert_allclose(verdict.norms[:, 0], [1.0, 9e9])  # it is remembered as it came
    off = judge(NormLimits(0.0, 1000.0), no_norms(2), matrix([(1.0, 0.0), (9e9, 0.0)]))
    assert_allclose(off.factors[1, 0] * 9e9, 1000.0)
    # Alone in the first round: there is nothing to compare with.
    assert not judge(LIMITS, no_norms(2), matrix([(9e9, 0.0)])).refused.any()
    verdict = judge(LIMITS, past_of([(1.0, 0.0)]), matrix([(100.0, 0.0)]))
    assert verdict.clipped.tolist() == [True]
    assert_allclose(verdict.norms[0, 0], 30.0)


def test_a_majority_of_byzantine_in_one_round_raises_the_reference_ten_times_at_most():
    past = past_of([(1.0, 0.0)] * 5)
    verdict = judge(LIMITS, past, matrix([(500.0, 0.0)] * 4 + [(1.0, 0.0)]))
    assert_allclose(verdict.norms[:4, 0], 300.0)


def test_zeros_say_nothing_of_what_is_usual():
    verdict = judge(LIMITS, no_norms(2), matrix([(0.0, 0.0)] * 5 + [(1.0, 0.0)]))
    assert_array_equal(verdict.factors, 1.0)
    assert not verdict.refused.any()


def test_buffers_are_judged_apart():
    verdict = judge(LIMITS, no_norms(2), matrix([(1.0, 5.0)] * 3 + [(1.0, 500.0)]))
    assert_allclose(verdict.factors[3], [1.0, 0.3])
    assert verdict.clipped.tolist() == [False] * 3 + [True]


def test_those_accepted_before_in_the_round_count():
    earlier = matrix([(1.0, 0.0)] * 4)
    verdict = judge(LIMITS, no_norms(2), matrix([(1e6, 0.0)]), earlier)
    assert verdict.refused.tolist() == [True]


@given(rounds=st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_past_is_the_last_rounds_that_accepted_anything(rounds):
    past = no_norms(2)
    for number, count in enumerate(rounds):
        norms = matrix([(number + 1.0, 1.0)] * count + [(np.nan, np.nan)])
        past = remember(past, norms, number, range(count + 1))
    told = [number for number, count in enumerate(rounds) if count]
    assert sorted(set(past["rounds"].tolist())) == told[-ROUNDS:]
    assert_array_equal(past["norms"][:, 0], past["rounds"] + 1.0)


def test_a_lone_absurd_update_is_refused_where_three_clients_made_the_past():
    past = no_norms(2)
    for number, client in enumerate([4, 4, 4, 5, 6]):
        verdict = judge(LIMITS, past, matrix([(1e9, 0.0)]))
        assert not verdict.refused.any()  # one or two clients made the past
        past = remember(past, matrix([(1.0, 0.0)]), number, [client])
    assert judge(LIMITS, past, matrix([(1e9, 0.0)])).refused.tolist() == [True]


@given(
    tiny=st.floats(1e-9, 1e-4), few=st.integers(1, 2),
    lengths=st.lists(st.floats(1.0, 10.0), min_size=3, max_size=6),
)  # fmt: skip
def test_a_past_of_one_or_two_does_not_bind_a_round_with_more(tiny, few, lengths):
    verdict = judge(LIMITS, past_of([(tiny, 0.0)] * few), matrix([(one, 0.0) for one in lengths]))
    assert_array_equal(verdict.factors, 1.0)
    assert not verdict.refused.any()


def test_a_tiny_update_at_the_start_is_outvoted():
    """Two clients in a round: nobody is refused, and the third honest length heals the past."""
    past, used = no_norms(2), []
    for number, (clients, lengths) in enumerate(
        [([0, 1], [1e-6, 1.0]), ([2, 3], [1.0, 1.0]), ([4, 5], [1.0, 1.0]), ([0, 1], [1e-6, 1.0])]
    ):
        verdict = judge(LIMITS, past, matrix([(one, 0.0) for one in lengths]))
        assert not verdict.refused.any()
        used.append(verdict.factors[-1, 0])
        past = remember(past, verdict.norms, number, clients)
    assert_allclose(used, [3e-5, 3e-5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"clip_norms": 0.5}, "clip_norms"),
        ({"clip_norms": float("nan")}, "clip_norms"),
        ({"clip_norms": True}, "clip_norms"),
        ({"refuse_norms": -1.0}, "refuse_norms"),
        ({"clip_norms": 50.0, "refuse_norms": 40.0}, "refuse_norms"),
        ({"clip_norm": 3.0}, "clip_norm"),
    ],
)
def test_impossible_limits_are_refused(options, key):
    with pytest.raises(ConfigError) as caught:
        Defence(**options)
    assert caught.value.key == key


def test_limits_can_be_switched_off():
    limits = Defence(clip_norms=0.0, refuse_norms=0.0).norm_limits
    verdict = judge(limits, past_of([(1.0, 1.0)] * 3), matrix([(1e30, 1.0)]))
    assert_array_equal(verdict.factors, 1.0)
    assert not verdict.refused.any()
