"""Oort keeps the rule of its paper: utility, cut-off, exploration and pacer beside slow twins."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from selector_helpers import outcome, play

import fedcor
from fedcor import Devices, Faults, Oort
from fedcor.core.rng import stream
from fedcor.core.types import Outcome, Population
from fedcor.reporting.explanations import explanation
from fedcor.runs.record import read_run
from fedcor.selectors.oort import draw, falls
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment
from fedcor.testing import FakeFederation


def after(selector, losses, *, sizes=None, last=None, durations=None, round=10, **more):
    """A state in which clients have reported these losses; NaN for one that never did."""
    losses = np.asarray(losses, dtype=float)
    sizes = np.full(len(losses), 10) if sizes is None else np.asarray(sizes)
    state = dict(selector.init(Population(sizes)))
    state["rms_losses"], state["round"] = losses, np.array(round)
    state["last"] = np.where(np.isnan(losses), 0, round if last is None else np.asarray(last))
    if durations is not None:
        state["durations"] = np.asarray(durations, dtype=float)
    return {**state, **{name: np.asarray(value) for name, value in more.items()}}


def everyone(count, seed=0, available=None):
    available = np.arange(count) if available is None else available
    return SimpleNamespace(available=available, rng=stream(seed, "test"))


def delivered(selected, participated, losses, durations):
    return dataclasses.replace(
        outcome(0, participated, losses),
        selected=np.asarray(selected),
        durations=None if durations is None else np.asarray(durations, dtype=float),
    )


# --- the utility ----------------------------------------------------------------------------------


def quantile(values, q):
    """By its definition: between the two values that stand at (n - 1) q."""
    values, place = sorted(values), (len(values) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def plain_utility(selector, state):
    """Client -> utility: the paper's lines, one client after the other."""
    known = [k for k, loss in enumerate(state["rms_losses"]) if not math.isnan(loss)]
    U = {k: state["sizes"][k] * state["rms_losses"][k] for k in known}
    cap = quantile(U.values(), selector.clip)
    U = {k: min(u, cap) for k, u in U.items()}
    low, high = min(U.values()), max(U.values())
    low = low - 0.001 * abs(low)
    R = int(state["round"]) + 1
    durations = [d for d in state["durations"] if not math.isnan(d)]
    percentile = float(state["percentile"])
    T = quantile(durations, percentile / 100) if durations and percentile < 100 else math.inf
    utility = {}
    for k in known:
        utility[k] = (U[k] - low) / (high - low) if high > low else 0.0
        utility[k] += math.sqrt(selector.uncertainty * math.log(R) / state["last"][k])
        if state["durations"][k] > T:
            utility[k] *= (T / state["durations"][k]) ** selector.penalty
    return utility


@given(st.data())
def test_the_utility_is_that_of_a_plain_loop(data):
    n = data.draw(st.integers(1, 12))
    number = st.floats(0.01, 50.0)
    losses = data.draw(st.lists(st.one_of(number, st.just(math.nan)), min_size=n, max_size=n))
    if all(math.isnan(loss) for loss in losses):
        losses[0] = 1.0
    round = data.draw(st.integers(1, 300))
    selector = Oort(
        1,
        clip=data.draw(st.sampled_from([0.5, 0.95, 1.0])),
        uncertainty=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        penalty=data.draw(st.sampled_from([0.0, 1.0, 2.0])),
    )
    state = after(
        selector,
        losses,
        sizes=data.draw(st.lists(st.integers(1, 99), min_size=n, max_size=n)),
        last=data.draw(st.lists(st.integers(1, round), min_size=n, max_size=n)),
        durations=data.draw(st.lists(st.one_of(number, st.just(math.nan)), min_size=n, max_size=n)),
        round=round,
        percentile=data.draw(st.floats(0.0, 100.0)),
    )
    told = selector.reasons(state, everyone(n), np.arange(n))
    expected = plain_utility(selector, state)
    for k in range(n):
        assert told["exploring"][k] == (k not in expected)
        assert told["utility"][k] == pytest.approx(expected.get(k, math.nan), nan_ok=True)
    whole = (told["statistical"] + told["uncertainty"]) * told["slowdown"]
    assert told["utility"] == pytest.approx(whole, nan_ok=True)


def test_only_who_is_slower_than_preferred_is_worth_less():
    selector = Oort(1, uncertainty=0.0)
    state = after(selector, [2.0] * 4, durations=[5.0, 10.0, 20.0, 40.0], percentile=100 / 3)
    assert selector.preferred(state) == pytest.approx(10.0)
    told = selector.reasons(state, everyone(4), np.arange(4))
    assert told["slowdown"] == pytest.approx([1.0, 1.0, 0.25, 1 / 16])  # (T / d)^2
    # At the 100th percentile nobody is too slow; nor without a clock.
    for free in (after(selector, [2.0] * 4, durations=[5.0, 10.0, 20.0, 40.0], percentile=100.0),
                 after(selector, [2.0] * 4)):  # fmt: skip
        assert selector.preferred(free) == math.inf
        assert selector.reasons(free, everyone(4), np.arange(4))["slowdown"].tolist() == [1.0] * 4


def test_a_boast_counts_as_the_quantile_and_no_more():
    losses = [*np.linspace(1.0, 2.0, 40), 1e6]
    selector = Oort(1, uncertainty=0.0)
    told = selector.reasons(after(selector, losses), everyone(41), np.arange(41))
    assert told["statistical"].max() == 1.0
    assert np.sum(told["statistical"] == 1.0) == 3  # the largest twentieth share it
    open_to_boasts = Oort(1, uncertainty=0.0, clip=1.0)
    told = open_to_boasts.reasons(after(selector, losses), everyone(41), np.arange(41))
    assert np.sort(told["statistical"])[-2] < 1e-5


def test_it_remembers_root_mean_square_losses_where_the_engine_knows_them():
    selector = Oort(2)
    told = dataclasses.replace(
        outcome(0, [1, 3], [1.0, 2.0]), read_rms_losses=lambda: np.array([1.5, np.nan])
    )
    state = selector.observe(selector.init(Population(np.full(4, 7))), told)
    assert state["rms_losses"][1] == 1.5
    assert np.isnan(state["rms_losses"][[0, 2, 3]]).all()  # an unusable one is none
    assert state["gained"][-1] == 7 * 1.5
    assert (state["last"].tolist(), state["times"].tolist()) == ([0, 1, 0, 1], [0, 1, 0, 1])


# --- exploitation and exploration -----------------------------------------------------------------


def test_exploits_by_utility_whoever_reaches_the_cut_off():
    selector = Oort(2, exploration=0.0, cut_off=0.5, clip=1.0, uncertainty=0.0)
    # Utilities of about 0, .3, .6, .8, 1; the second best has .8, so .4 is enough.
    state = after(selector, [1.0, 1.3, 1.6, 1.8, 2.0])
    utility = selector.reasons(state, everyone(5), np.arange(5))["utility"]
    first = np.zeros(5)
    for seed in range(4000):
        chosen, same = selector.select(state, everyone(5, seed))
        assert same is state
        assert len(set(chosen.tolist())) == 2
        first[chosen[0]] += 1
    assert first[:2].tolist() == [0, 0]
    assert chisquare(first[2:], 4000 * utility[2:] / utility[2:].sum()).pvalue > 0.001
    only = dataclasses.replace(selector, cut_off=1.0)  # exactly the best
    assert {*only.select(state, everyone(5))[0].tolist()} == {3, 4}


@given(
    weights=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6),
    count=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_a_draw_takes_each_once_and_who_weighs_nothing_last(weights, count, seed):
    clients, weights = np.arange(10, 10 + len(weights)), np.array(weights)
    count = min(count, len(clients))
    drawn = draw(stream(seed, "draw"), clients, weights, count)
    assert len(set(drawn.tolist())) == len(drawn) == count
    assert set(drawn.tolist()) <= set(clients.tolist())
    taken = weights[drawn - 10]
    heavy = int(np.sum(weights > 1e-100))
    assert (taken[:heavy] > 1e-100).all()


def test_exploration_falls_by_a_fiftieth_each_round_to_a_fifth():
    selector = Oort(10)
    state = selector.init(Population(np.full(50, 3)))
    shares = [selector.epsilon({**state, "round": np.array(t)}) for t in range(200)]
    assert shares[:3] == pytest.approx([0.9, 0.882, 0.86436])
    assert shares[-1] == min(shares) == 0.2
    # 20 have reported, 30 have not: so many of ten seats are explored.
    losses = np.where(np.arange(50) < 20, 1.0, np.nan)
    for t, explored in ((0, 9), (25, 6), (200, 2)):
        known = after(selector, losses, round=t, last=np.ones(50))
        chosen, _ = selector.select(known, everyone(50))
        assert (chosen >= 20).sum() == explored
        assert (chosen[: 10 - explored] < 20).all()


@pytest.mark.parametrize(("known", "exploited"), [(50, 10), (47, 7), (4, 1), (0, 0)])
def test_seats_that_one_side_cannot_fill_go_to_the_other(known, exploited):
    selector = Oort(10)
    losses = np.where(np.arange(50) < known, 1.0, np.nan)
    chosen, _ = selector.select(after(selector, losses, round=1), everyone(50))
    assert len(set(chosen.tolist())) == 10
    assert (chosen < known).sum() == exploited


def test_everyone_is_explored_while_there_is_time():
    choices, state = play(Oort(3), FakeFederation.example(30), 20)
    assert len(set(np.concatenate(choices[:11]).tolist())) >= 27
    assert np.isfinite(state["rms_losses"]).all()


def test_who_was_too_late_is_known_to_be_slow_and_explored_less():
    selector = Oort(2)
    state = selector.init(Population(np.full(6, 10)))
    state = selector.observe(state, delivered([0, 1, 2, 3], [0, 1], [1.0, 1.0], [4.0, 8.0]))
    assert state["durations"][:4].tolist() == [4.0, 8.0, 8.0, 8.0]
    assert np.isnan(state["durations"][4:]).all()
    assert np.isnan(state["rms_losses"][2:]).all()  # they reported nothing
    # A later, shorter wait does not make it faster; its own delivery does.
    state = selector.observe(state, delivered([0, 2], [0], [1.0], [4.0]))
    assert state["durations"][2] == 8.0
    state = selector.observe(state, delivered([2], [2], [1.0], [6.0]))
    assert state["durations"][2] == 6.0
    assert selector.preferred(state) < 8.0
    times = np.zeros(6)
    for seed in range(600):
        times[selector.select(state, everyone(6, seed))[0]] += 1
    assert times[3] < 0.7 * times[4:].min()


@pytest.mark.parametrize("durations", [None, np.linspace(1.0, 3.0, 40)], ids=["no clock", "clock"])
def test_who_never_delivers_is_asked_ever_less(durations):
    federation = FakeFederation.example(clients=40, silent=range(8), durations=durations)
    choices, state = play(Oort(5), federation, 90)
    wasted = [int((chosen < 8).sum()) for chosen in choices]
    assert max(wasted) < 5  # one seat at least is for those who are known to deliver
    assert sum(wasted[60:]) <= 15  # of 150 seats
    assert state["failed"].tolist()[8:] == [0] * 32
    assert min(state["failed"][:8]) >= 3  # they are never given up


def test_who_failed_rests_twice_as_long_each_time_until_it_delivers():
    selector = Oort(2, exploration=1.0, exploration_decay=1.0)
    state = selector.init(Population(np.full(4, 10)))
    state = selector.observe(state, delivered([1, 2], [1, 2], [1.0, 1.0], None))
    for failures in (1, 2, 3):
        state = selector.observe(state, delivered([0, 1], [1], [1.0], None))
        assert state["failed"].tolist() == [failures, 0, 0, 0]
        for _ in range(2**failures - 1):
            chosen, _ = selector.select(state, everyone(4))
            assert 0 not in chosen
            told = selector.reasons(state, everyone(4), chosen)
            assert (told["exploring"] == np.isnan(told["utility"])).all()
            state = selector.observe(state, delivered([1, 2], [1, 2], [1.0, 1.0], None))
        assert 0 in selector.select(state, everyone(4, available=np.array([0, 1, 2])))[0]
    # Where nobody else is there, it is asked all the same.
    resting = selector.observe(state, delivered([0, 1], [1], [1.0], None))
    assert 0 in selector.select(resting, everyone(4, available=np.array([0, 1])))[0]
    state = selector.observe(state, delivered([0, 1], [0, 1], [1.0, 1.0], None))
    assert not state["failed"].any()


def test_who_is_known_and_stops_delivering_rests_as_well():
    selector = Oort(2, exploration=0.0)
    state = after(selector, [9.0, 1.0, 1.0, 1.0], most=2)
    state = selector.observe(state, delivered([0, 1], [1], [1.0], None))
    assert 0 not in selector.select(state, everyone(4))[0]


def test_who_joins_has_not_failed():
    selector = Oort(2)
    state = selector.observe(
        after(selector, [1.0, np.nan], most=2), delivered([0, 1], [0], [1.0], None)
    )
    joined = selector.join(state, Population(np.full(4, 10)))
    assert joined["failed"].tolist() == [0, 1, 0, 0]
    assert {2, 3} >= {*selector.select(joined, everyone(4))[0][1:].tolist()}


def test_nobody_fails_where_more_are_chosen_than_are_needed():
    """The surplus of a round is no failure: they are chosen as if there was no rule about it."""
    simulation = build_simulation(load_experiment("digits", CLOCK, "oort"), 1)
    for record, state in simulation.run(12):
        assert (len(record.selected), len(record.participated)) == (6, 4)
        assert not state.selector["failed"].any()
        assert int(state.selector["most"]) == 4


def test_who_took_part_too_often_is_no_longer_exploited():
    selector = Oort(2, exploration=0.0, most_rounds=3)
    state = after(selector, [9.0, 1.0, 1.0, 1.0], times=[3, 2, 0, 1])
    for seed in range(20):
        assert 0 not in selector.select(state, everyone(4, seed))[0]
    # Where nobody else is there, the round is still full.
    chosen, _ = selector.select(state, everyone(4, available=np.array([0, 2])))
    assert sorted(chosen.tolist()) == [0, 2]


@pytest.mark.parametrize(
    "options",
    [{"percentile": 0.0}, {"percentile": 100.5}, {"window": 10_001}, {"window": 0}],
    ids=str,
)
def test_settings_are_checked(options):
    with pytest.raises(fedcor.core.errors.ConfigError, match=next(iter(options))):
        Oort(2, **options)


# --- the pacer ------------------------------------------------------------------------------------


def plain_percentiles(gains, window, start, step):
    """The pacer in a few lines: what was gained is compared every `window` rounds."""
    percentile, found = start, []
    for R in range(1, len(gains) + 1):
        if 2 * window <= R and R % window == 0:
            before, now = gains[R - 2 * window : R - window], gains[R - window : R]
            if sum(before) > sum(now):
                percentile = min(100.0, percentile + step)
        found.append(percentile)
    return found


def percentiles(selector, gains, duration):
    state, found = selector.init(Population(np.full(3, 1))), []
    for gain in gains:  # with one sample, a client's utility is its loss
        took = None if duration is None else [duration]
        state = selector.observe(state, delivered([0], [0], [gain], took))
        found.append(float(state["percentile"]))
    return found


@given(
    gains=st.lists(st.integers(0, 9).map(float), max_size=40),
    window=st.integers(1, 6),
    start=st.sampled_from([1.0, 30.0, 97.0]),
)
def test_the_pacer_is_that_of_a_plain_loop(gains, window, start):
    selector = Oort(1, window=window, percentile=start, percentile_step=5.0)
    expected = plain_percentiles(gains, window, start, 5.0)
    assert percentiles(selector, gains, duration=2.0) == expected
    assert percentiles(selector, gains, duration=None) == [start] * len(gains)  # no clock: it rests


def test_the_pacer_lets_slower_clients_in_when_utility_falls_and_only_then():
    falling, rising = [5.0] * 20 + [4.0] * 20, [4.0] * 20 + [5.0] * 20
    assert percentiles(Oort(1), falling, 2.0)[-2:] == [30.0, 35.0]
    assert percentiles(Oort(1), rising, 2.0)[-1] == 30.0
    assert not falls(np.array([5.0, 4.0]), rounds=1)  # there must be two windows


# --- in a simulation, with and without a clock ----------------------------------------------------

CHANGES = ["training.rounds=12", "partition.clients=20", "training.clients_per_round=4"]
CLOCK = [*CHANGES, "faults.over_selection=1.5",
         "faults.devices={seconds_per_step=1.0, speed_spread=1.0}",
         "selectors.oort.window=3"]  # fmt: skip


def without_seconds(record):
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in record.rounds]


@pytest.mark.parametrize("changes", [CHANGES, CLOCK], ids=["statistical", "clock"])
def test_killed_and_resumed_it_is_the_same_run(changes, tmp_path):
    whole = load_experiment("digits", changes, "oort")
    fedcor.run(whole, seed=1, out=tmp_path / "whole")
    part = dataclasses.replace(whole, rounds=5)
    fedcor.run(part, seed=1, out=tmp_path / "parts")
    fedcor.run(whole, seed=1, out=tmp_path / "parts", resume=True)
    one, two = (without_seconds(read_run(tmp_path / name)) for name in ("whole", "parts"))
    assert one == two
    timed = changes is CLOCK
    assert [("preferred" in entry["details"]) for entry in one[1:]] == [timed] * 11
    assert [entry["details"]["epsilon"] for entry in one[:2]] == [[0.9], [0.882]]


def test_the_penalty_makes_rounds_shorter():
    took = {}
    for penalty in (0.0, 2.0):
        changes = [*CLOCK, "training.rounds=40", f"selectors.oort.penalty={penalty}"]
        result = fedcor.run(load_experiment("digits", changes, "oort"), seed=1)
        took[penalty] = result.runs[0].rounds[-1]["clock"]
    assert took[2.0] < 0.95 * took[0.0]


def test_explained_in_words(tmp_path):
    fedcor.run(load_experiment("digits", CLOCK, "oort"), seed=1, out=tmp_path)
    found = explanation(read_run(tmp_path))
    assert "never reported a loss" in found["note"]
    assert "count for less that take longer than" in found["note"]
    said = " ".join(row["sentence"] for row in found["chosen"])
    assert "drawn by its utility" in said or "is explored" in said
    first = explanation(read_run(tmp_path), 0)
    assert all("is explored" in row["sentence"] for row in first["chosen"])


# --- root mean square losses ----------------------------------------------------------------------


def simulation_of(*changes, **more):
    experiment = load_experiment("digits", [*CHANGES, *changes], "random")
    return build_simulation(dataclasses.replace(experiment, **more), 1)


def test_the_engine_takes_the_root_of_the_mean_of_each_samples_squared_loss():
    engine = simulation_of().engine
    model, clients = engine.initial_model, np.array([3, 0, 7])
    expected = []
    for client in clients:
        each = [
            engine._forward(model, x, y)[0].double().numpy()
            for k, x, y in engine.measured_rows(50)
            if k == client
        ]
        expected.append(math.sqrt(np.mean(np.concatenate(each) ** 2)))
    assert engine.rms_losses(model, clients) == pytest.approx(expected)
    assert (engine.rms_losses(model, clients) >= engine.losses(model, clients)).all()


def test_they_are_computed_when_they_are_read(monkeypatch):
    s = simulation_of()
    asked = []
    true = s.engine.rms_losses
    monkeypatch.setattr(s.engine, "rms_losses", lambda *given: asked.append(1) or true(*given))
    _, found = s.open_round(s.start).finish(np.arange(4), {})
    assert not asked
    assert found.rms_losses.tolist() == true(s.start.model, np.arange(4)).tolist()
    assert asked == [1]


def test_with_noise_on_losses_no_second_number_leaves_a_client():
    s = simulation_of("privacy.loss_noise=0.5")
    _, found = s.open_round(s.start).finish(np.arange(4), {})
    assert found.rms_losses.tolist() == found.losses.tolist()


def test_byzantine_lie_about_them_and_a_defence_clips_them():
    lying = fedcor.Byzantine(0.25, "inflate")
    s = simulation_of(byzantine=lying)
    clients = np.arange(20)
    _, found = s.open_round(s.start).finish(clients, {})
    true, byzantine = s.engine.rms_losses(s.start.model, clients), lying.who(1, 20)
    assert (found.rms_losses[byzantine] > 2 * true[byzantine]).all()
    assert found.rms_losses[~byzantine] == pytest.approx(true[~byzantine])
    from fedcor.rounds.defence.guarded_federation import guard_outcome
    from fedcor.rounds.defence.settings import Defence

    shown = guard_outcome(Defence(clip_reports=2.0), found)
    assert shown.rms_losses.max() < found.rms_losses.max()


def test_an_engine_that_does_not_know_them_gives_the_mean_losses():
    plain = Outcome(0, *(np.arange(2),) * 2, np.ones(2), np.ones(2), lambda: np.array([1.0, 2.0]),
                    lambda: np.zeros((2, 1)))  # fmt: skip
    assert plain.rms_losses.tolist() == [1.0, 2.0]


# --- devices tied to the data ---------------------------------------------------------------------


def test_tied_devices_are_the_same_devices_dealt_out_by_label():
    plain = {"seconds_per_step": 1.0, "speed_spread": 0.8, "bandwidth_spread": 0.3}
    free = simulation_of(faults=Faults(devices=Devices(**plain)))
    tied = simulation_of(faults=Faults(devices=Devices(**plain, tied_to="labels")))
    assert sorted(tied.speeds.seconds_per_step) == sorted(free.speeds.seconds_per_step)
    assert tied.speeds.down.tolist() == free.speeds.down.tolist()
    labels = tied.engine.majority_labels()
    slowest = {label: tied.speeds.seconds_per_step[labels == label] for label in set(labels)}
    for label in sorted(slowest)[1:]:
        below = max(other for other in slowest if other < label)
        assert slowest[label].min() >= slowest[below].max()
    # A record of an earlier version has no such key, and resumes.
    assert Faults(devices=Devices(**plain, tied_to="labels")).describe()["devices"]["tied_to"]
    with pytest.raises(fedcor.core.errors.ConfigError, match="tied_to"):
        Faults(devices={**plain, "tied_to": "sizes"})
