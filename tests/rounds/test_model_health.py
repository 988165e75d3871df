"""When a model is good, and when it is bad."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedcor.rounds.defence.model_health import Condition, Health, Signs, examine

CLIENTS = st.sets(st.integers(0, 5), max_size=3)


def signs(delivered=(), refused=(), usable=(), unusable=(), reachable=9):
    return Signs(delivered, refused, usable, unusable, reachable)


def test_a_model_is_good_where_more_deliver_than_are_refused():
    health = Health(doubters=frozenset({4}))
    assert examine(health, signs([1, 5, 6], [2, 3])) == (Condition.GOOD, Health())
    assert examine(health, signs([1], [])) == (Condition.GOOD, Health())


def test_one_that_delivers_among_many_refused_says_nothing():
    """It may be the byzantine: what was good before, and who doubts, is kept."""
    health = Health(doubters=frozenset({4}))
    assert examine(health, signs([1], [2, 3])) == (Condition.UNKNOWN, health)
    assert examine(health, signs([1, 1, 1], [2, 3])) == (Condition.UNKNOWN, health)  # drawn thrice
    assert examine(health, signs([1, 5], [2, 3])) == (Condition.UNKNOWN, health)


def test_it_takes_two_in_one_round_or_in_several():
    condition, health = examine(Health(), signs(refused=[3]))
    assert (condition, health.doubters) == (Condition.UNKNOWN, {3})
    assert examine(health, signs(refused=[3]))[0] is Condition.UNKNOWN  # the same one again
    assert examine(health, signs(refused=[5])) == (Condition.BAD, Health())
    assert examine(Health(), signs(refused=[3, 5]))[0] is Condition.BAD
    assert examine(Health(), signs(refused=[3], reachable=1))[0] is Condition.BAD


def test_a_round_in_which_nobody_says_anything_tells_nothing():
    health = Health(True, frozenset({4}))
    assert examine(health, signs()) == (Condition.UNKNOWN, health)


def test_losses_say_something_only_where_they_were_ever_usable():
    came = signs([1, 2], unusable=[1, 2])
    assert examine(Health(), came)[0] is Condition.GOOD
    assert examine(Health(heard=True), came)[0] is Condition.BAD
    assert examine(Health(heard=True), signs([1, 2], unusable=[1]))[0] is Condition.UNKNOWN
    mixed = signs([1, 2], usable=[2], unusable=[1, 3, 4])
    # One usable loss among many unusable ones may be the lie.
    assert examine(Health(heard=True), mixed) == (Condition.UNKNOWN, Health(heard=True))
    mixed = signs([1, 2], usable=[2, 3], unusable=[1])
    assert examine(Health(heard=True), mixed) == (Condition.GOOD, Health(heard=True))


@given(st.booleans(), CLIENTS, CLIENTS, CLIENTS, CLIENTS, CLIENTS)
def test_one_usable_update_and_loss_keep_a_model_from_being_bad(heard, before, d, r, u, n):
    health = Health(heard, frozenset(before))
    condition, after = examine(health, signs(d | {7}, r, u | {8}, n))
    delivered, usable = d | {7}, u | {8}
    good = (not r or len(delivered) > len(r)) and (not n or len(usable) > len(n))
    assert condition is (Condition.GOOD if good else Condition.UNKNOWN)
    assert after == (Health(True) if good else Health(True, frozenset(before)))
    assert Health.from_arrays(after.to_arrays()) == after
    assert Health.from_arrays(health.to_arrays()) == health
