"""The simulated clock, against a server that is played event by event."""

from __future__ import annotations

import dataclasses
import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcor
from fedcor.core.errors import ConfigError
from fedcor.core.rng import stream
from fedcor.data.datasets import load
from fedcor.rounds.ledger import ANSWER_BYTES
from fedcor.selectors.base import StatelessSelector
from fedcor.simulation.build import build_simulation
from fedcor.simulation.clock import Devices, device_speeds, wait
from fedcor.simulation.faults import Faults

DIGITS = load("digits")
N, MBIT = 50, 1e6 / 8


def play(times, goal=None, deadline=None, counts=None, order=None):
    """`wait`, event by event: (who counts, when the server stops waiting)."""
    expected = {k for k, time in enumerate(times) if math.isfinite(time)}
    tie = [0] * len(times) if order is None else order
    events = [(times[k], 0, tie[k], k) for k in expected]
    if deadline is not None:
        # At the same moment, who is back comes before the deadline.
        events.append((deadline, 1, 0, None))
    heapq.heapify(events)
    back, have, now = set(), 0, 0.0
    while events:
        if goal is not None and have >= goal:
            return back, now
        if len(back) == (len(times) if deadline is not None else len(expected)):
            return back, now
        now, _, _, client = heapq.heappop(events)
        if client is None:
            return back, now
        back.add(client)
        have += 1 if counts is None else counts[client]
    return back, now


# Few different times, so that there are ties.
TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0, math.inf]) | st.floats(0.0, 10.0)


@given(
    st.lists(st.tuples(TIMES, st.integers(1, 3)), max_size=9),
    st.none() | st.integers(1, 12),
    st.none() | st.sampled_from([0.5, 1.5, 2.0, 20.0]),
    st.randoms(use_true_random=False),
)
def test_waiting_is_what_an_event_by_event_server_does(clients, goal, deadline, random):
    times = np.array([time for time, _ in clients], dtype=np.float64)
    counts = np.array([count for _, count in clients], dtype=np.int64)
    order = np.array(random.sample(range(len(clients)), len(clients)), dtype=np.int64)
    back, seconds = wait(times, goal=goal, deadline=deadline, counts=counts, order=order)
    expected, then = play(times.tolist(), goal, deadline, counts.tolist(), order.tolist())
    assert {*np.flatnonzero(back).tolist()} == expected
    assert seconds == then


def test_without_an_order_the_lower_place_is_first():
    back, seconds = wait(np.array([1.0, 1.0, 1.0]), goal=2)
    assert (back.tolist(), seconds) == ([True, True, False], 1.0)
    assert wait(np.empty(0), deadline=5.0)[1] == 0.0  # nobody was asked


# --- devices --------------------------------------------------------------------------------------


def test_devices_are_log_normal_around_the_median_and_fixed_by_the_seed():
    devices = Devices(0.5, down=20.0, up=5.0, speed_spread=0.6, bandwidth_spread=0.3)
    speeds = device_speeds(devices, seed=1, clients=20_000)
    logs = np.log(speeds.seconds_per_step / 0.5)
    assert abs(logs.mean()) < 0.02
    assert logs.std() == pytest.approx(0.6, abs=0.02)
    assert np.log(speeds.down / (20 * MBIT)).std() == pytest.approx(0.3, abs=0.02)
    assert np.allclose(speeds.down / speeds.up, 4.0)
    assert abs(np.corrcoef(logs, np.log(speeds.down))[0, 1]) < 0.03
    again = device_speeds(devices, seed=1, clients=20_000)
    assert all(np.array_equal(a, b) for a, b in zip(speeds, again, strict=True))
    other = device_speeds(devices, seed=2, clients=20_000)
    assert not np.array_equal(speeds.seconds_per_step, other.seconds_per_step)


@pytest.mark.parametrize(
    "settings",
    [
        {"seconds_per_step": 0.0},
        {"seconds_per_step": math.nan},
        {"seconds_per_step": 1e300},
        {"seconds_per_step": 1.0, "down": -1.0},
        {"seconds_per_step": 1.0, "up": True},
        {"seconds_per_step": 1.0, "speed_spread": -0.1},
        {"seconds_per_step": 1.0, "bandwidth_spread": 1e9},
        {"seconds_per_step": 1.0, "bandwith_spread": 0.1},
        {},
    ],
)
def test_impossible_devices_are_refused(settings):
    with pytest.raises(ConfigError):
        Devices(**settings)
    with pytest.raises(ConfigError):
        Faults(devices=settings)


# --- a whole round --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Five(StatelessSelector):
    """Stands for a selector of five clients; tests choose themselves."""

    clients_per_round: int = 5


BASE = build_simulation(fedcor.experiment("digits", selector="random"), 1, DIGITS)
CLIENTS = st.lists(st.integers(0, N - 1), min_size=1, max_size=9).map(sorted)
STEPS = st.lists(
    st.tuples(st.just("losses"), CLIENTS) | st.tuples(st.just("changes"), CLIENTS), max_size=3
)


class Server:
    """One round of a federation, client by client, with nothing but sets and sums."""

    def __init__(self, simulation, goal):
        self.s, self.faults, self.goal = simulation, simulation.faults, goal
        self.model, seed = simulation.engine.model_bytes, simulation.seed
        self.available = self.faults.available(seed, 0, N).tolist()
        self.dead = self.faults.dropped(seed, 0, N)
        self.fails = self.dead | self.faults.training_dropped(seed, 0, N)
        self.silent = self.dead | self.faults.silent(seed, 0, N)
        self.steps = self.faults.steps(seed, 0, N, simulation.engine.local_training.local_steps)
        self.order = stream(seed, "arrival", 0).permutation(N)
        self.speeds = simulation.speeds
        self.sent, self.asked, self.known = {0: set()}, set(), set()
        self.told, self.there = set(), set()
        self.tried = {}
        self.seconds, self.down, self.up = 0.0, 0, 0

    def send(self, version, k):
        bytes = 0 if k in self.sent[version] else self.model
        self.sent[version].add(k)
        self.down += bytes
        return bytes

    def stop(self, times, **options):
        back, seconds = play(list(times.values()), deadline=self.faults.deadline, **options)
        self.seconds += seconds
        return {list(times)[place] for place in back}

    def question(self, version, clients):
        times = {}
        for k in clients:
            down = self.send(version, k) / self.speeds.down[k]
            batches = math.ceil(
                self.s.engine.population.sizes[k] / self.s.engine.local_training.batch_size
            )
            work = batches * self.speeds.seconds_per_step[k] / 3
            times[k] = down + work + ANSWER_BYTES / self.speeds.up[k]
            if self.silent[k]:
                times[k] = math.inf
            else:
                self.up += ANSWER_BYTES
        return self.stop(times) if times else set()

    def losses(self, clients):
        new = [k for k in sorted({*clients}) if k not in self.asked]
        self.asked |= {*new}
        self.known |= self.question(0, new)
        return self.known

    def train(self, clients):
        times = {}
        for k in clients:
            if k in self.told:
                if k in self.there:
                    times[k] = 0.0
                continue
            self.told.add(k)
            down = self.send(0, k) / self.speeds.down[k]
            work = self.steps[k] * self.speeds.seconds_per_step[k]
            times[k] = down + work + self.model / self.speeds.up[k]
            if self.fails[k]:
                times[k] = math.inf
            else:
                self.up += self.model
        order = [int(self.order[k]) for k in times]
        back = self.stop(times, goal=self.goal, order=order) if times else set()
        self.there |= back
        return sorted(back)

    def changes(self, clients):
        before = self.losses(self.available)
        participants = self.train(clients)
        if not participants:
            return set()
        if tuple(participants) not in self.tried:
            version = len(self.sent)
            self.sent[version] = set()
            self.tried[tuple(participants)] = self.question(version, self.available)
        return before & self.tried[tuple(participants)]


@given(
    st.integers(1, 10_000),
    STEPS,
    CLIENTS,
    st.none() | st.sampled_from([1.0, 4.0, 6.0, 60.0]),
    st.sampled_from([1.0, 1.4]),
    st.booleans(),
)
def test_a_round_is_what_an_event_by_event_server_does(seed, script, chosen, deadline, over, alike):
    spread = 0.0 if alike else 0.8
    faults = Faults(
        0.7,
        *(0.1, 0.3),
        training_dropout=0.2,
        silence=0.2,
        devices=Devices(1.0, 0.5, 0.2, spread, spread),
        deadline=deadline,
        over_selection=over,
    )
    s = dataclasses.replace(BASE, selector=Five(), faults=faults, seed=seed)
    federation, server = s.open_round(s.start), Server(s, 5 if over > 1 else None)
    reach = {*federation.available.tolist()}
    assert [*sorted(reach)] == server.available
    for what, clients in script:
        clients = sorted(reach & {*clients})
        asked = np.array(clients, dtype=np.int64)
        if what == "losses":
            answered = {*asked[np.isfinite(federation.losses(asked))].tolist()}
            assert answered == server.losses(clients) & {*clients}
        else:
            changes = federation.loss_changes(asked)
            assert {*np.flatnonzero(np.isfinite(changes)).tolist()} == server.changes(clients)
    chosen = sorted(reach & {*chosen})
    after, outcome = federation.finish(np.array(chosen, dtype=np.int64), {})
    assert outcome.participated.tolist() == server.train(chosen)
    assert federation.attendance.seconds == pytest.approx(server.seconds, rel=1e-12)
    assert after.clock == federation.attendance.seconds
    assert (federation.ledger.bytes_down, federation.ledger.bytes_up) == (server.down, server.up)
    missing = federation.attendance.missing(outcome.selected, outcome.participated)
    absent = {*chosen} - {*outcome.participated.tolist()}
    expected = {k: "dropped" if server.fails[k] else "late" for k in absent}
    assert {k: reason for reason, clients in missing.items() for k in clients} == expected


def test_by_hand():
    """One Mbit/s, one second per step: 5 steps, 9 640 bytes each way."""
    devices = Devices(1.0, down=1.0, up=0.5)
    s = dataclasses.replace(BASE, selector=Five(), faults=Faults(devices=devices))
    model = s.engine.model_bytes
    assert (model, s.engine.local_training.local_steps) == (9640, 5)
    federation = s.open_round(s.start)
    _, outcome = federation.finish(np.arange(5), {})
    training = 9640 / MBIT + 5.0 + 9640 / (0.5 * MBIT)
    assert federation.attendance.seconds == pytest.approx(training)
    assert outcome.durations == pytest.approx([training] * 5)
    federation = s.open_round(s.start)
    federation.losses(np.arange(5))  # now they hold the model
    federation.finish(np.arange(5), {})
    batches = -(-s.engine.population.sizes[:5] // 16)
    question = 9640 / MBIT + batches.max() / 3 + 4 / (0.5 * MBIT)
    second = 5.0 + 9640 / (0.5 * MBIT)
    assert federation.attendance.seconds == pytest.approx(question + second)


def test_without_devices_there_is_no_clock():
    s = dataclasses.replace(BASE, selector=Five(), faults=Faults(over_selection=1.4))
    federation = s.open_round(s.start)
    after, outcome = federation.finish(np.arange(7), {})
    assert federation.attendance.seconds is None
    assert after.clock == 0.0
    assert outcome.durations is None
    assert len(outcome.participated) == 5  # drawn at random
    firsts = {
        tuple(
            dataclasses.replace(s, seed=seed)
            .open_round(s.start)
            .finish(np.arange(7), {})[1]
            .participated
        )
        for seed in range(1, 30)
    }
    assert len(firsts) > 10
