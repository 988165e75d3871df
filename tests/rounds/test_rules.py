"""Rules: who may be chosen, how many of each group, and how many in each round."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import fedcor
from fedcor import Rules
from fedcor.cli import main
from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.rounds.rules.declaration import as_tags, check_rules_for, describe_tags, with_clients
from fedcor.rounds.rules.seats import Seats, fill, make_groups
from fedcor.rounds.selection import decide, observe
from fedcor.selectors import selector_names
from fedcor.selectors.afl import AFL
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.baselines import Full, Random, RoundRobin
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor, Proxy
from fedcor.selectors.oort import Oort
from fedcor.selectors.power_of_choice import PowerOfChoice
from fedcor.simulation.build import build_simulation
from fedcor.testing import FakeFederation, round_trip

QUICK = {"warmup": 2, "interval": 3, "warmup_steps": 5, "refit_steps": 5, "dimension": 3}
SELECTORS = {
    "random": Random(4),
    "round_robin": RoundRobin(4),
    "afl": AFL(4),
    "power_of_choice": PowerOfChoice(4),
    "oort": Oort(4),
    "fedcor": FedCor(4, **QUICK),
    "complement": Complement(4),
    "aligned": Aligned(4),
    "proxy": Proxy(4, **QUICK),
}


def test_every_selector_with_a_number_of_clients_is_tested():
    assert {*SELECTORS, "full"} == set(selector_names())


# --- the slow, obvious way ------------------------------------------------------------------------


def counted(columns, chosen, tag, value):
    return sum(columns[tag][k] == value for k in chosen)


def bounds_of(rules, columns):
    """(tag, value, least, most) of every group."""
    for tag in rules.quota_tags:
        values = {v for v in columns.get(tag, []) if v is not None} | rules.bounded_values(tag)
        for value in sorted(values):
            yield (tag, value, *rules.bounds(tag, value))


def shortfall(rules, columns, chosen):
    found = [
        (counted(columns, chosen, tag, value) if tag in columns else 0, low)
        for tag, value, low, _ in bounds_of(rules, columns)
    ]
    return sum(max(0, low - count) for count, low in found)


def allowed(rules, columns, chosen):
    return all(
        high is None or tag not in columns or counted(columns, chosen, tag, value) <= high
        for tag, value, _, high in bounds_of(rules, columns)
    )


def best_choices(rules, columns, available, count):
    """All sets of clients that keep the maxima, miss the minima least, and are then largest."""
    sets = [
        set(chosen)
        for size in range(min(count, len(available)) + 1)
        for chosen in itertools.combinations(available, size)
        if allowed(rules, columns, chosen)
    ]
    quality = [(shortfall(rules, columns, chosen), -len(chosen)) for chosen in sets]
    return [chosen for chosen, q in zip(sets, quality, strict=True) if q == min(quality)]


# --- invented rules -------------------------------------------------------------------------------

CLIENTS = 7
VALUES = {"site": "abc", "region": "uv", "tier": "xyz"}


@st.composite
def situations(draw, clients=CLIENTS):
    """(rules, columns, available): any bounds on up to three tags that do not contradict."""
    tags = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3, unique=True))
    columns = {
        tag: draw(
            st.lists(st.sampled_from([None, *VALUES[tag]]), min_size=clients, max_size=clients)
        )
        for tag in tags
    }
    at_least, at_most = {}, {}
    for tag in tags:
        for bounds, whole in ((at_least, st.integers(0, 3)), (at_most, st.integers(1, 3))):
            some = st.dictionaries(st.sampled_from(VALUES[tag]), whole, min_size=1)
            if draw(st.booleans()):
                bounds[tag] = draw(st.one_of(whole, some))
    try:
        rules = Rules(at_least=at_least, at_most=at_most)
    except ConfigError:
        assume(False)
    ids = st.integers(0, clients - 1)
    available = sorted(draw(st.sets(ids, min_size=1, max_size=clients)))
    return rules, columns, available


def groups_of(rules, columns):
    clients = len(next(iter(columns.values())))
    return make_groups(rules, columns, np.ones(clients, dtype=bool))


@settings(max_examples=60, deadline=None)
@given(situations(), st.integers(1, 5), st.data())
def test_who_may_take_a_seat_is_who_is_in_a_best_choice(situation, count, data):
    """At every step, until nobody may: against all sets of clients that there are."""
    rules, columns, available = situation
    groups = groups_of(rules, columns)
    assume(groups is not None)
    best = best_choices(rules, columns, available, count)
    seats = Seats(groups, count, np.array(available))
    assert seats.shortfall == shortfall(rules, columns, best[0])
    assert seats.size == len(best[0])
    while True:
        taken = set(seats.taken.tolist())
        may = {k for chosen in best if taken <= chosen for k in chosen - taken}
        assert set(seats.open.tolist()) == may
        assert {k for k in available if seats.admits(k)} == may
        if not may:
            break
        seats = seats.give(data.draw(st.sampled_from(sorted(may))))
    assert set(seats.taken.tolist()) in best


def test_with_three_tags_half_a_client_is_no_client():
    """Client 1 fits only into a best choice that has halves of clients 2, 3 and 4."""
    columns = {
        "x": ["b", "b", "b", "a", "a"],
        "y": ["a", "b", None, None, "b"],
        "z": [None, None, "b", None, "b"],
    }
    rules = Rules(at_least={"x": 1, "z": 1}, at_most={"x": 1, "y": 1, "z": 1})
    seats = Seats(groups_of(rules, columns), 2, np.arange(5))
    assert best_choices(rules, columns, range(5), 2) == [{0, 4}, {2, 3}]
    assert seats.open.tolist() == [0, 2, 3, 4]


@settings(max_examples=50, deadline=None)
@given(situations(), st.integers(1, 5), st.data())
def test_a_best_choice_is_known_as_one(situation, count, data):
    rules, columns, available = situation
    groups = groups_of(rules, columns)
    assume(groups is not None)
    best = best_choices(rules, columns, available, count)
    ids = st.lists(st.sampled_from(available), max_size=count + 1)
    chosen = data.draw(st.one_of(ids, st.sampled_from(best).map(sorted)))
    expected = set(chosen) in best and len(set(chosen)) == len(chosen)
    seats = Seats(groups, count, np.array(available))
    assert seats.is_best(np.array(chosen, dtype=np.int64)) == expected


@pytest.mark.parametrize("name", sorted(SELECTORS))
@settings(max_examples=15, deadline=None)
@given(situation=situations(), count=st.integers(1, 5), seed=st.integers(0, 5))
def test_every_choice_keeps_the_rules_as_well_as_can_be(name, situation, count, seed):
    """Rounds of every selector, with a state that goes through a checkpoint."""
    rules, columns, available = situation
    groups = groups_of(rules, columns)
    selector = with_clients(SELECTORS[name], count)
    check_rules_for(rules, selector)
    federation = FakeFederation.example(CLIENTS, available=available, seed=seed)
    best = best_choices(rules, columns, available, count)
    state = selector.init(federation.population)
    for _ in range(4):
        decision = decide(selector, state, federation, groups=groups)
        chosen = decision.chosen.tolist()
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) in best or groups is None
        missing = {
            f"{tag}={value}": low - counted(columns, chosen, tag, value)
            for tag, value, low, _ in bounds_of(rules, columns)
            if low > counted(columns, chosen, tag, value)
        }
        few = min(count, len(available)) - len(chosen)
        assert decision.unmet == missing | ({"clients_per_round": few} if few else {})
        assert all(len(values) == len(chosen) for values in decision.why.values())
        outcome = federation.train(decision.chosen)
        state = round_trip(observe(selector, decision.state, outcome))


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_a_choice_that_keeps_the_rules_is_the_selectors_own(name):
    """Bounds that no choice breaks change nothing: choices, states, reasons, questions, draws."""
    selector = SELECTORS[name]
    loose = make_groups(Rules(at_most={"site": 99}), {"site": ["a"] * 12}, np.ones(12, bool))
    plain, bound = FakeFederation.example(12), FakeFederation.example(12)
    state = other = selector.init(plain.population)
    for _ in range(8):
        one, two = decide(selector, state, plain), decide(selector, other, bound, groups=loose)
        assert one.chosen.tolist() == two.chosen.tolist()
        assert one.why == two.why
        assert two.unmet == {}
        assert plain.rng.random() == bound.rng.random()
        state = observe(selector, one.state, plain.train(one.chosen))
        other = observe(selector, two.state, bound.train(two.chosen))
        assert all(np.array_equal(state[k], other[k], equal_nan=True) for k in state)
    assert [a.tolist() for a in plain.asked] == [a.tolist() for a in bound.asked]
    assert [a.tolist() for a in plain.tried] == [a.tolist() for a in bound.tried]


# --- single selectors -----------------------------------------------------------------------------


def one_per_site(clients, sites):
    columns = {"site": [str(k % sites) for k in range(clients)]}
    return groups_of(Rules(at_least={"site": 1}, at_most={"site": 1}), columns)


def test_everyone_still_has_a_turn_where_the_rules_change_the_choice():
    """Round robin among the clients of each site: all 12 in 4 rounds, and again."""
    selector, federation = RoundRobin(3), FakeFederation.example(12)
    groups, state = one_per_site(12, 3), selector.init(federation.population)
    for _ in range(3):
        seen = []
        for _ in range(4):
            decision = decide(selector, state, federation, groups=groups)
            state = observe(selector, decision.state, federation.train(decision.chosen))
            seen += decision.chosen.tolist()
        assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("selector", [Complement(3), Aligned(3)])
def test_a_selector_with_a_memory_notes_all_who_were_chosen_and_nobody_else(selector):
    federation, groups = FakeFederation.example(12), one_per_site(12, 3)
    state = selector.init(federation.population)
    for number in range(12):
        decision = decide(selector, state, federation, groups=groups)
        assert np.flatnonzero(decision.state["asked"] == number).tolist() == sorted(decision.chosen)
        assert int(decision.state["round"]) == number + 1
        state = observe(selector, decision.state, federation.train(decision.chosen))
    assert (state["seen"] >= 0).all()


def test_fedcor_measures_and_trains_only_what_keeps_the_rules_and_once_per_round():
    selector = FedCor(3, **{**QUICK, "samples_per_refit": 2})
    federation, groups = FakeFederation.example(12), one_per_site(12, 3)
    state = selector.init(federation.population)
    for number in range(9):
        tried = len(federation.tried)
        decision = decide(selector, state, federation, groups=groups)
        tries = federation.tried[tried:]
        assert len(tries) == (1 if number < 2 else 2 if number % 3 == 0 else 0)
        for one in [*tries, decision.chosen]:
            assert sorted(k % 3 for k in one.tolist()) == [0, 1, 2]
        if number < 2:
            assert tries[0].tolist() == decision.chosen.tolist()
        else:
            assert decision.state["picked"].sum() >= 3
            assert set(decision.why) >= {"gain", "redundancy", "annealing", "others", "own"}
        state = observe(selector, decision.state, federation.train(decision.chosen))


def test_fedcor_picks_the_best_client_that_may_have_the_next_seat():
    """Against the greedy choice with one pick at a time, conditioned on those before."""
    selector, federation = FedCor(4, **QUICK), FakeFederation.example(12)
    groups = one_per_site(12, 4)
    state = selector.init(federation.population)
    for _ in range(8):
        decision = decide(selector, state, federation, groups=groups)
        after = {**decision.state, "picked": decision.state["picked"].copy()}
        after["picked"][decision.chosen] -= 1
        if int(state["round"]) >= selector.warmup:
            seats, gains = Seats(groups, 4, federation.available), []
            while len(seats.open):
                pick = selector.picks(after, federation.weights, seats.open, 1, seats.taken)
                gains.append(float(pick.gain[0]))
                seats = seats.give(int(pick.clients[0]))
            assert decision.chosen.tolist() == seats.taken.tolist()
            assert decision.why["gain"] == pytest.approx(gains)
        state = observe(selector, decision.state, federation.train(decision.chosen))


def test_power_of_choice_has_a_loss_as_the_reason_for_everyone_and_asks_no_client_twice():
    selector, federation = PowerOfChoice(4, candidates=4), FakeFederation.example(12)
    decision = decide(selector, {}, federation, groups=one_per_site(12, 4))
    assert decision.why["loss"] == federation.loss_of(federation.model)[decision.chosen].tolist()
    assert set(decision.chosen.tolist()) <= {k for asked in federation.asked for k in asked}


def test_aligned_matches_the_rest_of_a_group_with_those_who_have_a_seat():
    """Two opposite clients, one of whom must be there: the other completes the group."""
    selector = Aligned(2, longest_wait=1e9)
    state = selector.init(FakeFederation.example(4).population)
    directions = np.array([[1.0, 0.2], [1.0, -0.2], [0.0, 3.0], [1.0, 0.3]])
    state = {
        **state,
        "directions": directions,
        "seen": np.zeros(4, dtype=np.int64),
        "asked": np.array([0, 0, 0, 0]),
        "round": np.array(1),
    }

    class Rest:
        def __init__(self, taken):
            columns = {"site": ["a", "b", "b", "b"]}
            groups = groups_of(Rules(at_least={"site": 1}), columns)
            self.seats = Seats(groups, 1, np.array([1, 2, 3]), np.array(taken))
            self.available, self.weights = np.array([1, 2, 3]), np.array([0.5, 0.5, 0.0, 0.0])
            self.rng, self.round = np.random.default_rng(0), 1

    chosen, _ = Aligned(1, longest_wait=1e9).select(state, Rest([0]))
    assert chosen.tolist() == [1]  # with client 0, it points where the mean points


# --- a user's own selector ------------------------------------------------------------------------


@dataclass(frozen=True)
class Lazy:
    """Chooses one client, however many are asked for."""

    clients_per_round: int

    def init(self, population):
        return {}

    def select(self, state, federation):
        return federation.available[:1], state

    def observe(self, state, outcome):
        return state


class NoDataclass(Lazy):
    def __init__(self):
        object.__setattr__(self, "clients_per_round", 3)


def test_a_selector_that_names_too_few_is_asked_until_the_seats_are_full_and_then_blamed():
    with pytest.raises(FedcorError, match=r"round 0: asked for exactly the clients \[0, 1, 2\]"):
        decide(Lazy(3), {}, FakeFederation.example(6), groups=one_per_site(6, 3))


def test_a_selector_that_names_nobody_ends_the_round():
    columns = {"site": ["a", "a", "b"]}
    seats = Seats(groups_of(Rules(at_least={"site": 1}), columns), 2, np.arange(3))
    assert fill(seats, lambda seats, clients: clients[:0]).tolist() == []


@pytest.mark.parametrize(
    ("rules", "selector", "message"),
    [
        (Rules(at_least={"site": 1}), Full(), "needs a selector with the setting clients_per_r"),
        (Rules(clients_per_round={0: 2}), Full(), "which Full has not"),
        (Rules(at_most={"a": 2}), Random(3, replacement=True), "Random may draw one twice"),
    ],
)
def test_selectors_that_cannot_keep_a_rule_are_refused(rules, selector, message):
    with pytest.raises(ConfigError, match=message):
        check_rules_for(rules, selector)


def test_eligibility_needs_nothing_of_a_selector():
    check_rules_for(Rules(eligible={"site": "a"}), Full())
    check_rules_for(Rules(clients_per_round={0: 2}), Random(3, replacement=True))


# --- the rules themselves -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"at_least": {"site": 3}, "at_most": {"site": 2}}, "at_least.site = 3: must not be above"),
        (
            {"at_least": {"site": {"a": 3}}, "at_most": {"site": 2}},
            "at_least.site.a = 3: must not be above at_most, which is 2",
        ),
        ({"at_least": {"site": 2}, "at_most": {"site": {"b": 1}}}, "at_least.site.b = 2"),
        ({"at_most": {"site": {"b": 0}}}, "at_most.site.b = 0: must be a whole number of at least"),
        ({"at_least": {"site": -1}}, "at_least.site = -1: must be a whole number of at least 0"),
        ({"at_most": {"site": {"a": 1.5}}}, "at_most.site.a = 1.5"),
        ({"at_most": 3}, "at_most = 3: must be a table"),
        ({"eligible": 3}, "eligible = 3: must be a table"),
        ({"eligible": {"site": []}}, "eligible.site"),
        ({"clients_per_round": {0: 0}}, "clients_per_round.0 = 0: must be a whole number"),
        ({"clients_per_round": {"soon": 3}}, "must have the numbers of rounds as keys"),
        ({"clients_per_round": 3}, "must be a table, round -> clients"),
        ({"at_mots": {}}, 'did you mean "at_most"'),
    ],
)
def test_rules_that_cannot_work_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Rules(**given)


def test_clients_per_round_change_with_the_round():
    rules = Rules(clients_per_round={"5": 3, 20: 10})
    assert [rules.clients_at(t) for t in (0, 4, 5, 19, 20, 999)] == [None, None, 3, 3, 10, 10]
    assert Rules(clients_per_round=lambda t: 2 + t).clients_at(3) == 5
    with pytest.raises(ConfigError, match=r"whole number of at least 1 in every round; in round 7"):
        Rules(clients_per_round=lambda t: 7 - t).clients_at(7)


def test_who_is_eligible():
    rules = Rules(eligible={"site": ["a", "b"], "charging": True})
    assert rules.is_eligible(0, {"site": "a", "charging": True})
    assert rules.is_eligible(0, {"site": "b", "charging": "true"})
    assert not rules.is_eligible(0, {"site": "c", "charging": True})
    assert not rules.is_eligible(0, {"site": "a"})
    own = Rules(eligible=lambda client, tags: client > 2 and tags["tier"] == 1)
    assert own.is_eligible(3, {"tier": 1})
    with pytest.raises(FedcorError, match=r"`eligible` failed for client 3: KeyError: 'tier'"):
        own.is_eligible(3, {})
    with pytest.raises(FedcorError, match="gave None for client 1, not True or False"):
        Rules(eligible=lambda client, tags: None).is_eligible(1, {})


def test_bounds_on_several_tags_have_a_limit_that_is_said():
    columns = {"a": [str(k) for k in range(600)], "b": ["x"] * 600, "c": ["y"] * 600}
    rules = Rules(at_most={"a": 1, "b": 5, "c": 5})
    with pytest.raises(ConfigError, match=r"make 600 combinations \(at most 500 are possible"):
        groups_of(rules, columns)
    assert groups_of(Rules(at_most={"a": 1}), columns).cells == 600


def test_one_tag_of_very_many_clients_takes_no_time():
    clients = 100_000
    columns = {"home": [str(k // 2) for k in range(clients)]}
    groups = groups_of(Rules(at_most={"home": 1}), columns)
    federation = FakeFederation.example(clients)
    decision = decide(Random(500), {}, federation, groups=groups)
    assert len({k // 2 for k in decision.chosen.tolist()}) == 500


# --- tags -----------------------------------------------------------------------------------------


def test_tags_of_lists_ranges_and_files_are_the_same(tmp_path):
    expected = {"site": {"a": (0, 1, 2, 5), "b": (3,)}, "tier": {"1": (4,), "2": (0,)}}
    table = {"site": {"a": "0-2, 5", "b": [3]}, "tier": {1: [4], "2": 0}}
    lists = {"site": ["a", "a", "a", "b", None, "a"], "tier": [2, None, None, None, 1, None]}
    (tmp_path / "tags.csv").write_text(
        "client,site,tier\n0,a,2\n1,a,\n2,a,\n5,a,\n3,b,\n4,,1\n", encoding="utf-8"
    )
    assert as_tags(table) == as_tags(lists) == as_tags(tmp_path / "tags.csv") == expected
    assert as_tags(describe_tags(expected)) == expected
    assert as_tags(expected) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"site": {"a": "0-3", "b": "3-5"}}, "tags.site = .*client 3 has two values: 'a' and 'b'"),
        ({"site": {"a": "3-1"}}, "the range 3-1 ends before it starts"),
        ({"site": {"a": "x"}}, "tags.site.a = 'x': must be a list of client ids, or a text"),
        ({"site": {"a": [0.5]}}, "tags.site.a"),
        ({"site": {"a": [-1]}}, "tags.site.a"),
        ({"site": "a"}, "tags.site = 'a': must be a table"),
        (3, "tags = 3: must be a table of tags, or the path"),
        ("nowhere.csv", "the file cannot be read: .*No such file"),
    ],
)
def test_tags_that_cannot_work_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        as_tags(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("who,site\n0,a\n", "must have the column client, and one column per tag"),
        ("client,site\n0,a\n0,b\n", "line 3: '0' is there twice"),
        ("client,site\nzero,a\n", "line 2: 'zero' is no client id"),
    ],
)
def test_files_of_tags_that_cannot_work_are_refused(text, message, tmp_path):
    (tmp_path / "tags.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        as_tags(tmp_path / "tags.csv")


# --- the simulator --------------------------------------------------------------------------------

TAGS = {"site": {"a": "0-24", "b": "25-44", "c": "45-49"}, "region": {"eu": "0-29", "us": "30-49"}}


def digits(**changes):
    base = {"rounds": 6, "clients_per_round": 5, "tags": TAGS}
    quick = {"fedcor": {"warmup": 2, "interval": 2, "dimension": 3}}
    return fedcor.experiment("digits", **{**base, "selectors": quick, **changes})


def site(client):
    return "a" if client < 25 else "b" if client < 45 else "c"


@pytest.mark.parametrize("name", ["random", "fedcor", "aligned", "power_of_choice"])
def test_the_simulator_keeps_rules_on_two_tags(name):
    rules = {"at_least": {"site": 1}, "at_most": {"site": 3, "region": {"us": 2}}}
    (run,) = fedcor.run(digits(rules=rules), name).runs
    for row in run.rounds:
        sites = [site(k) for k in row["selected"]]
        assert set(sites) == {"a", "b", "c"}
        assert max(map(sites.count, "abc")) <= 3
        assert sum(k >= 30 for k in row["selected"]) <= 2
        assert len(row["selected"]) == 5
        assert "unmet" not in row
    assert run.header["config"]["rules"] == rules
    assert run.header["config"]["tags"] == TAGS | {"region": {"eu": "0-29", "us": "30-49"}}


def test_a_client_that_is_not_eligible_is_neither_chosen_nor_asked(tmp_path):
    """FedCor asks everyone it may: 5 clients of site c, and no other."""
    changed = digits(rules={"eligible": {"site": "c"}, "clients_per_round": {0: 2, 4: 3}})
    (run,) = fedcor.run(changed, "fedcor", out=tmp_path / "run").runs
    assert all(site(k) == "c" for row in run.rounds for k in row["selected"])
    assert [len(row["selected"]) for row in run.rounds] == [2, 2, 2, 2, 3, 3]
    assert run.rounds[0]["probed"] == 2 * 5
    own = digits(clients_per_round=2, rules=Rules(eligible=lambda k, tags: tags["site"] == "c"))
    (run,) = fedcor.run(own, "random").runs
    assert all(site(k) == "c" for row in run.rounds for k in row["selected"])


@pytest.mark.parametrize("optimiser", [fedcor.FedRecall(), fedcor.MIFA(wait=True)], ids=repr)
def test_an_optimiser_remembers_everyone_once_all_who_may_be_chosen_were_seen(optimiser, tmp_path):
    """Five of 50 are eligible: who can never come is not waited for, and is no part of any mean."""
    changed = digits(rules={"eligible": {"site": "c"}}, optimiser=optimiser, rounds=2)
    simulation = build_simulation(changed, seed=1)
    assert np.flatnonzero(simulation.start.optimiser["scales"]).tolist() == [45, 46, 47, 48, 49]
    (run,) = fedcor.run(changed, "random", out=tmp_path / "run").runs
    assert run.rounds[0]["participated"] == [45, 46, 47, 48, 49]
    assert run.rounds[0]["test_loss"] != run.rounds[1]["test_loss"]  # MIFA does not wait
    everyone = digits(optimiser=optimiser)
    assert build_simulation(everyone, seed=1).start.optimiser["scales"].all()


def test_an_optimiser_that_starts_over_forgets_nothing_of_who_may_be_chosen():
    """A model that went bad is replaced, and the optimiser's memory with it."""
    changed = digits(rules={"eligible": {"site": "c"}}, optimiser=fedcor.FedRecall())
    simulation = build_simulation(changed, seed=1)
    state = dataclasses.replace(simulation.start, good=simulation.start.model)
    again = simulation.open_round(state).start_over(state.model)
    assert_array_equal(again["scales"], simulation.start.optimiser["scales"])


def test_what_a_round_cannot_meet_is_met_as_far_as_possible_and_recorded(tmp_path):
    rules = {"at_least": {"site": {"c": 3}}}
    changed = digits(rules=rules, rounds=30, faults={"availability": 0.4})
    (run,) = fedcor.run(changed, "random", out=tmp_path / "run").runs
    unmet = [row.get("unmet") for row in run.rounds]
    chosen = [sum(site(k) == "c" for k in row["selected"]) for row in run.rounds]
    assert unmet == [None if n >= 3 else {"site=c": 3 - n} for n in chosen]
    assert {n for n in chosen if n < 3}
    assert max(chosen) >= 3


def test_the_only_eligible_clients_may_be_out_of_reach():
    changed = digits(clients_per_round=1, rounds=20, faults={"availability": 0.05})
    changed = fedcor.experiment(changed, rules={"eligible": {"site": "c"}})
    (run,) = fedcor.run(changed, "random").runs
    assert all([site(k) for k in row["selected"]] == ["c"] for row in run.rounds)


def test_rules_change_with_a_round_from_zero_and_a_resumed_run_is_the_same(tmp_path):
    rules = {"at_most": {"site": 2}, "clients_per_round": {"0": 2, "12": 4}}
    changed = digits(rules=rules, rounds=14)
    (whole,) = fedcor.run(changed, "aligned").runs
    assert [len(row["selected"]) for row in whole.rounds] == [2] * 12 + [4] * 2
    fedcor.run(fedcor.experiment(changed, rounds=10), "aligned", out=tmp_path / "run")
    (resumed,) = fedcor.run(changed, "aligned", out=tmp_path / "run", resume=True).runs
    for one, other in zip(whole.rounds, resumed.rounds, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    with pytest.raises(RecordError, match=r"rules.at_most.site is 2 there, 3 here"):
        other = fedcor.experiment(changed, rules={"at_most": {"site": 3}})
        fedcor.run(other, "aligned", out=tmp_path / "run", resume=True)


def test_all_selectors_of_a_comparison_have_the_same_rules():
    rules = {"at_most": {"site": 2}}
    result = fedcor.compare(digits(rules=rules, rounds=2), ["random", "afl"], seeds=[1])
    for run in result.runs:
        for row in run.rounds:
            assert max(map([site(k) for k in row["selected"]].count, "abc")) <= 2


FILE = """
[rules]
at_least.site = 1
[rules.at_most]
site = 3
[rules.clients_per_round]
0 = 4
1 = 5
[tags.site]
a = "0-24"
b = "25-44"
c = [45, 46, 47, 48, 49]
"""


def test_a_file_has_rules_and_the_command_line_changes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    preset = resources.files("fedcor.simulation") / "presets" / "digits.toml"
    Path("mine.toml").write_text(preset.read_text() + FILE, encoding="utf-8")
    given = ["run", "mine.toml", "--selector", "random", "--rounds", "2", "--out", "runs/a"]
    assert (
        main([*given, "--set", "rules.at_most.site=2", "--set", "rules.clients_per_round.1=6"]) == 0
    )
    (run,) = fedcor.load("runs/a").runs
    assert run.header["config"]["rules"] == {
        "at_least": {"site": 1},
        "at_most": {"site": 2},
        "clients_per_round": {"0": 4, "1": 6},
    }
    assert [len(row["selected"]) for row in run.rounds] == [4, 6]
    assert [site(k) for k in sorted(run.rounds[1]["selected"])] == [*"aabbcc"]
    Path("tags.csv").write_text("client,site\n" + "".join(f"{k},{site(k)}\n" for k in range(50)))
    again = ["--set", "tags=tags.csv", "--set", "rules.at_most.site=2", "--resume"]
    assert main([*given, *again, "--set", "rules.clients_per_round.1=6"]) == 0


def test_the_documented_file_and_command_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "rules.md").read_text(encoding="utf-8")
    table, command = (
        re.search(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)[1]
        for language in ("toml", "bash")
    )
    preset = (resources.files("fedcor.simulation") / "presets" / "digits.toml").read_text(
        encoding="utf-8"
    )
    Path("mine.toml").write_text(f"{preset}\n{table}", encoding="utf-8")
    assert main(["run", "mine.toml", "--rounds", "2", "--out", "runs/file"]) == 0
    assert main(shlex.split(command)[1:]) == 0
    one, other = (fedcor.load(f"runs/{name}").runs[0] for name in ("file", "rules"))
    assert [len(row["selected"]) for row in one.rounds] == [5, 5]
    assert max(k for row in one.rounds for k in row["selected"]) < 40
    assert all(sum(k < 25 for k in row["selected"]) in (4, 5, 6) for row in other.rounds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": {"at_least": {"sit": 1}}}, 'no client has this tag.*did you mean "site"'),
        (
            {"rules": {"at_most": {"site": {"d": 1}}}},
            "no client has site = 'd'; there are: a, b, c",
        ),
        (
            {"rules": {"eligible": {"site": "d"}}},
            "rules.eligible.site = .*no client has site = 'd'",
        ),
        (
            {"rules": {"at_least": {"site": 2}}},
            "rules.at_least = .*cannot be met with 5 clients in a round, even if all can be "
            "reached: the groups of site need 6 together",
        ),
        (
            {"rules": {"at_least": {"site": {"c": 6}}}, "clients_per_round": 9},
            "site=c has 5 of 6 clients",
        ),
        (
            {"rules": {"at_least": {"site": 2}, "at_most": {"region": 2}}, "clients_per_round": 6},
            "the minima and maxima contradict each other",
        ),
        (
            {"rules": {"at_most": {"site": 1}}},
            "rules.at_most = .*lets 3 clients in a round, but 5 are chosen",
        ),
        (
            {"rules": {"eligible": {"site": "c"}}, "clients_per_round": 6},
            "lets 5 clients in, but 6 are chosen",
        ),
        ({"rules": {"clients_per_round": {3: 51}}}, "asks for 51 clients, but there are 50"),
        (
            {"rules": {"clients_per_round": lambda t: 5 + t, "at_most": {"site": 2}}},
            "lets 6 clients in a round, but 7 are chosen",
        ),
        (
            {
                "rules": {"clients_per_round": {3: 9}},
                "selectors": {"power_of_choice": {"candidates": 8}},
                "selector": "power_of_choice",
            },
            "9 clients do not go with the selector: candidates = 8",
        ),
        ({"rules": {"eligible": lambda k, tags: False}}, "none of the 50 clients is eligible"),
        (
            {"rules": {"at_most": {"site": 2}}, "selector": "full"},
            "rules.at_most = .*which Full has",
        ),
        ({"rules": {"at_lest": {}}}, 'rules.at_lest.*did you mean "at_least"'),
        ({"rules": 3}, "rules = 3: must be fedcor.Rules, or a table"),
        ({"tags": {"site": {"a": "0-50"}}}, "there is no client 50: the clients are 0 to 49"),
    ],
)
def test_rules_that_an_experiment_can_never_keep_are_refused_when_it_is_made(changes, message):
    with pytest.raises(ConfigError, match=message):
        digits(**changes)
