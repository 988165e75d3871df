"""What follows from an attempt at a round, weights in a mean, and the back-off of clients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcor.rounds.backoff import count_faults, grow, no_faults, offered_clients, read_faults
from fedcor.rounds.defence.model_health import Condition, Health
from fedcor.rounds.round import Delivered, Step, mean_weights, next_step

GOOD, UNKNOWN, BAD = Condition.GOOD, Condition.UNKNOWN, Condition.BAD


def came(condition: Condition, *clients: int) -> Delivered:
    ids = np.array(clients, dtype=np.int64)
    return Delivered(np.arange(3), ids, mean_weights(np.ones_like(ids), None), condition, Health())


@pytest.mark.parametrize(
    ("delivered", "can_return", "attempt", "others", "step"),
    [
        # somebody delivered, and the model is usable
        (came(GOOD, 1), True, 0, True, Step.ADOPT),
        (came(UNKNOWN, 1), True, 3, False, Step.ADOPT),
        # bad, with another good model: others first, then back to it
        (came(BAD), True, 0, True, Step.TRY_OTHERS),
        (came(BAD), True, 0, False, Step.ROLL_BACK),
        (came(BAD), True, 3, True, Step.TRY_OTHERS),
        (came(BAD), True, 4, True, Step.ROLL_BACK),
        (came(BAD, 1), True, 4, True, Step.ROLL_BACK),
        # bad, and nothing to return to
        (came(BAD, 1), False, 0, True, Step.ADOPT),
        (came(BAD), False, 0, True, Step.TRY_OTHERS),
        # nobody delivered
        (came(UNKNOWN), True, 0, True, Step.TRY_OTHERS),
        (came(UNKNOWN), True, 3, False, Step.TRY_OTHERS),
        (came(UNKNOWN), False, 4, True, Step.GIVE_UP),
        (came(BAD), False, 4, True, Step.GIVE_UP),
    ],
)
def test_each_row_of_the_table(delivered, can_return, attempt, others, step):
    found = next_step(delivered, can_return=can_return, attempt=attempt, attempts=5, others=others)
    assert found is step


def test_with_one_attempt_a_bad_model_is_replaced_at_once():
    only = {"attempt": 0, "attempts": 1, "others": True}
    assert next_step(came(BAD), can_return=True, **only) is Step.ROLL_BACK
    assert next_step(came(UNKNOWN), can_return=True, **only) is Step.GIVE_UP


def test_weights_in_the_mean_sum_to_one():
    times, sizes = np.array([1, 2, 1]), np.array([30, 10, 50])
    assert np.allclose(mean_weights(times, None), [0.25, 0.5, 0.25])
    assert np.allclose(mean_weights(times, sizes), [0.3, 0.2, 0.5])
    assert len(mean_weights(times[:0], sizes[:0])) == 0


# --- back-off -------------------------------------------------------------------------------------


def test_a_client_that_fails_on_is_left_alone_longer_and_longer():
    state, rounds = no_faults(3), []
    for t in range(40):
        if 1 in offered_clients(state, t, np.arange(3)):
            rounds.append(t)
            state = count_faults(state, t, {1: True}, {0, 2})
    assert rounds == [0, 1, 3, 6, 11, 20, 37]


def test_a_round_counts_once_and_a_usable_one_resets():
    state = count_faults(no_faults(2), 0, {0: True}, {0, 1})  # it answered, and failed to train
    assert state["faults"].tolist() == [1, 0]
    state = count_faults(state, 1, {}, {0})
    assert state["faults"].tolist() == [0, 0]


def test_silence_is_left_alone_at_once_and_nobody_is_where_nobody_is_left():
    state = count_faults(no_faults(2), 0, {0: False, 1: False}, set())
    assert offered_clients(state, 1, np.arange(2)).tolist() == [0, 1]  # else there is no one
    state = count_faults(state, 1, {}, {1})
    assert offered_clients(state, 1, np.arange(2)).tolist() == [1]


@given(
    st.lists(
        st.tuples(st.dictionaries(st.integers(0, 4), st.booleans()), st.sets(st.integers(0, 4))),
        max_size=30,
    )
)
def test_somebody_can_always_be_chosen_and_the_memory_survives_a_file(history):
    state = no_faults(5)
    for t, (faults, usable) in enumerate(history):
        state = count_faults(state, t, faults, usable)
        assert len(offered_clients(state, t + 1, np.arange(5)))
        again = read_faults(dict(state), 5)
        assert all(np.array_equal(again[name], state[name]) for name in state)
    assert grow(state, 7)["until"][5:].tolist() == [0, 0]
