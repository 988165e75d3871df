"""Back-off: nobody is left alone without a cause, and everybody comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcor.rounds.backoff import (
    LONGEST_SILENT,
    LONGEST_USELESS,
    count_faults,
    grow,
    no_faults,
    offered_clients,
    read_faults,
    rounds_alone,
)

# What happens to a client in a round in which it may be asked.
EVENTS = st.lists(st.sampled_from(["good", "useless", "silent"]), max_size=60)


def after(state, round, event):
    faults = {} if event == "good" else {0: event == "useless"}
    return count_faults(state, round, faults, [0] if event == "good" else [])


@given(EVENTS)
def test_nobody_is_left_alone_without_a_cause_and_everybody_comes_back(events):
    state, round, row = no_faults(1), 0, []  # faults since a good reply
    for event in events:
        assert state["until"][0] <= round
        state = after(state, round, event)
        row = [] if event == "good" else [*row, event]
        alone = max(0, int(state["until"][0]) - round - 1)
        if "silent" not in row:
            assert (alone > 0) == (len(row) >= 2)  # one useless reply may be chance
        assert alone <= (LONGEST_SILENT if event == "silent" else LONGEST_USELESS)
        round = max(round + 1, int(state["until"][0]))
    assert after(state, round, "good")["until"][0] == 0


def test_a_round_with_a_fault_and_a_usable_reply_counts_as_a_fault():
    state = count_faults(no_faults(2), 0, {0: True}, [0, 1])
    assert state["faults"].tolist() == [1, 0]


def test_nobody_is_left_alone_where_that_would_leave_no_one():
    state = count_faults(no_faults(3), 0, {0: False, 1: False}, [2])
    assert offered_clients(state, 1, np.array([0, 1, 2])).tolist() == [2]
    assert offered_clients(state, 1, np.array([0, 1])).tolist() == [0, 1]
    assert offered_clients(state, 2, np.array([0, 1, 2])).tolist() == [0, 1, 2]


def test_the_memory_grows_and_survives_a_checkpoint():
    state = grow(count_faults(no_faults(1), 0, {0: False}, []), 3)
    assert state["faults"].tolist() == [1, 0, 0]
    assert grow(state, 3) is state
    read = read_faults(dict(state), 3)
    assert all(np.array_equal(read[name], state[name]) for name in state)
    with pytest.raises(ValueError, match="not of these clients"):
        read_faults(dict(state), 4)


@pytest.mark.parametrize("replied", [False, True])
def test_nobody_is_left_alone_for_longer_than_it_has_been_failing(replied):
    state, round, times = no_faults(1), 0, []
    while len(times) < 12:
        state = count_faults(state, round, {0: replied}, [])
        times.append(max(0, int(state["until"][0]) - round - 1))
        assert times[-1] <= round + 1
        round = max(round + 1, int(state["until"][0]))
    longest = LONGEST_USELESS if replied else LONGEST_SILENT
    assert times == sorted(times)
    assert times[-1] == longest


def share_alone(probability, *, replied, rounds=50_000):
    """In which share of the rounds a client is left alone that fails by chance, if asked."""
    state, rng, alone = no_faults(1), np.random.default_rng(1), 0
    for round in range(rounds):
        if state["until"][0] > round:
            alone += 1
        elif rng.random() < probability:
            state = count_faults(state, round, {0: replied}, [])
        elif state["faults"][0]:
            state = no_faults(1)
    return alone / rounds


@pytest.mark.parametrize(
    ("probability", "silent", "useless"),
    [
        (0.05, 0.05, 0.00),
        (0.1, 0.10, 0.01),
        (0.2, 0.21, 0.05),
        (0.3, 0.32, 0.13),
        (0.5, 0.56, 0.50),
        (0.7, 0.74, 0.86),
        (0.9, 0.85, 0.97),
        (1.0, 0.89, 0.98),
    ],
)
def test_an_honest_client_on_a_flaky_line_does_not_starve(probability, silent, useless):
    """A fault in every fifth round costs it one round in five beside, and no more."""
    for share, replied in ((silent, False), (useless, True)):
        # The f-th fault in a row is rare: (1 - p) p^f of the rounds in which it is asked.
        per_round = sum(
            (1 - probability) * probability**f * rounds_alone(f, replied=replied)
            for f in range(1, 1000)
        ) or (LONGEST_USELESS if replied else LONGEST_SILENT)
        assert per_round / (1 + per_round) == pytest.approx(share, abs=0.006)
        assert share_alone(probability, replied=replied) == pytest.approx(share, abs=0.03)
