"""What a wary server shows a selector: clipped reports, and a cap on anyone's share of rounds."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest
from flower_grid import MemoryGrid, lines, numpy_app, run
from flower_runs import experiment, on_flower
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st

import fedcor
from fedcor.core.errors import ConfigError
from fedcor.data.datasets import load
from fedcor.flower import answers_probes, select_with
from fedcor.flower.bridge import run_on_flower
from fedcor.rounds.defence.guarded_federation import (
    Cap,
    after_round,
    guard_federation,
    guard_outcome,
    no_turns,
)
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.loss_screening import FEWEST_REPORTS, clip_reports
from fedcor.rounds.selection import decide, observe
from fedcor.runs.record import read_run
from fedcor.runs.runner import run as simulate
from fedcor.runs.runner import run_in_memory
from fedcor.selectors import build_selector, selector_names
from fedcor.selectors.base import StatelessSelector
from fedcor.simulation.build import build_simulation
from fedcor.testing import FakeFederation

DIGITS = load("digits")
finite = st.floats(-1e6, 1e6)


# --- clipped reports ------------------------------------------------------------------------------


def slow_clip(answers, limit):
    """One answer after the other, with the standard library's medians."""
    came = [a for a in answers if np.isfinite(a)]
    if limit == 0 or len(came) < 5:
        return list(answers)
    middle = statistics.median(came)
    mad = statistics.median([abs(a - middle) for a in came])
    low, high = middle - limit * 1.4826 * mad, middle + limit * 1.4826 * mad
    return [a if not np.isfinite(a) else min(max(a, low), high) for a in answers]


@given(st.lists(finite | st.just(float("nan")), max_size=20), st.floats(0, 10))
def test_clipping_is_the_slow_rule(answers, limit):
    given = np.array(answers, dtype=np.float64)
    np.testing.assert_allclose(clip_reports(given, limit), slow_clip(answers, limit), rtol=1e-9)


@given(
    st.lists(st.floats(0, 10), min_size=9, max_size=30),
    st.lists(st.floats(1e3, 1e6), min_size=1, max_size=4),
    st.floats(0.5, 5),
)
def test_a_minority_cannot_report_more_than_the_honest_ones_allow(honest, lies, limit):
    """However large the lies: the median lies within the honest answers, and so does the MAD."""
    clipped = clip_reports(np.array(honest + lies), limit)
    assert clipped.max() <= 10 + limit * 1.4826 * 10


def test_few_answers_stay_as_they_are():
    few = np.array([1.0, 2.0, 3.0, 1e6] + [np.nan] * 10)
    assert FEWEST_REPORTS == 5
    assert np.array_equal(clip_reports(few, 1.0), few, equal_nan=True)


# --- the cap --------------------------------------------------------------------------------------


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.floats(1.0, 3.0),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_nobody_has_more_than_its_share_of_any_window(clients, chosen, most, seed, greedy):
    """Held against the whole history, counted window by window, for a choice that is greedy."""
    chosen = min(clients, chosen)
    rng = np.random.default_rng(seed)
    cap = Cap(clients, chosen, most)
    window = cap.window
    fair = window * chosen / clients
    limit = max(1, int(np.floor(most * fair + 1e-9)))
    past, history = no_turns(), []
    for round in range(2 * window + 3):
        size = clients if greedy else int(rng.integers(0, clients + 1))
        available = np.sort(rng.permutation(clients)[:size])
        before = [sum(k in old for old in history[-(window - 1) :]) for k in available.tolist()]
        if window == 1:
            before = [0] * size
        may = cap.offered(past, round, available)
        under = [k for k, n in zip(available.tolist(), before, strict=True) if n < limit]
        if len(under) >= min(chosen, size):
            assert may.tolist() == under
        else:  # raised as little as needed, and for all who are equal
            worst = sorted(before)[min(chosen, size) - 1]
            more = [k for k, n in zip(available.tolist(), before, strict=True) if n <= worst]
            assert may.tolist() == more
        assert len(may) >= min(chosen, size)
        picked = may[:chosen]
        history.append(set(picked.tolist()))
        past = cap.count(past, round, picked)
        assert len(past["rounds"]) <= window * chosen


def test_the_window_has_four_turns_of_everyone():
    assert [Cap(n, c, 1.0).window for n, c in ((50, 10), (100, 5), (7, 2), (5, 5))] == [
        20,
        80,
        14,
        4,
    ]


@dataclasses.dataclass(frozen=True)
class Lowest(StatelessSelector):
    """Always the same clients, if it may."""

    clients_per_round: int = 5

    def select(self, state, federation):
        return federation.available[: self.clients_per_round], state


def test_the_simulator_caps_a_selector_that_has_favourites():
    experiment = fedcor.experiment(
        "digits", selector="random", clients_per_round=5, defence={"most_share": 1.5}
    )
    simulation = dataclasses.replace(build_simulation(experiment, 1, DIGITS), selector=Lowest())
    chosen = [record.selected for record, _ in simulation.run(45)]
    times = [np.bincount(np.concatenate(chosen[t : t + 40])).max() for t in range(6)]
    assert times == [6] * 6  # 1.5 x the fair share of 40 rounds, which is 4
    free = dataclasses.replace(simulation, defence=Defence())
    assert {k for record, _ in free.run(10) for k in record.selected} == set(range(5))


@pytest.mark.parametrize("name", [n for n in selector_names() if ":" not in n])
def test_every_selector_works_behind_the_shield(name):
    defence, turns = Defence(most_share=1.5, clip_reports=2.0), no_turns()
    federation = FakeFederation.example(clients=12)
    options = {"warmup": 2, "interval": 2, "dimension": 3} if name in ("fedcor", "proxy") else {}
    selector = build_selector(name, 3, options)
    state = selector.init(federation.population)
    history = []
    for _ in range(40):
        decision = decide(selector, state, guard_federation(defence, turns, selector, federation))
        outcome = federation.train(decision.chosen)
        state = observe(selector, decision.state, guard_outcome(defence, outcome))
        turns = after_round(defence, turns, selector, outcome, 12)
        history.append(set(decision.chosen.tolist()))
    if name == "full":
        assert all(len(chosen) == 12 for chosen in history)  # it cannot be capped
    else:
        window = Cap(12, 3, 1.5).window
        for first in range(len(history) - window + 1):
            of_window = history[first : first + window]
            assert max(sum(k in one for one in of_window) for k in range(12)) <= 6


def test_who_is_held_back_is_still_asked_what_its_loss_does():
    federation = FakeFederation.example(clients=12)
    defence = Defence(most_share=1.0)
    turns = {"clients": np.zeros(20, dtype=np.int64), "rounds": np.zeros(20, dtype=np.int64)}
    shown = guard_federation(defence, turns, Lowest(3), federation)
    assert 0 not in shown.available
    assert len(shown.available) == 11
    assert np.isfinite(shown.loss_changes(np.array([1, 2]))[0])
    with pytest.raises(ValueError, match="read-only"):
        shown.available[0] = 3


def test_the_share_is_that_of_the_clients_who_may_be_chosen():
    """Of 50 clients 20 are eligible: they share all rounds, and the cap bites where it should."""
    eligible = list(range(20))
    counts = {}
    for most in (0.0, 1.5):
        made = fedcor.experiment(
            "digits",
            clients_per_round=5,
            rounds=60,
            selector="power_of_choice",
            rules={"eligible": {"site": ["a"]}},
            tags={"site": {"a": eligible}},
            defence={"most_share": most},
        )
        rounds = [record for record, _ in build_simulation(made, 1).run(60)]
        picked = np.concatenate([record.selected for record in rounds])
        counts[most] = np.bincount(picked, minlength=20) / (60 * 5 / 20)
    assert counts[0.0].max() > 1.5
    assert counts[1.5].max() <= 1.5
    assert counts[1.5].min() < 0.7  # and the choice is still the selector's


@pytest.mark.parametrize("defence", [{"most_share": 2.0}, {"clip_reports": 3.0}], ids=str)
def test_what_is_known_of_losses_is_recorded_behind_the_shield(defence):
    def details(**more):
        simulation = build_simulation(fedcor.experiment("digits", selector="fedcor", **more), 1)
        return [sorted(record.details) for record, _ in simulation.run(2)]

    assert details(defence=defence) == details()
    assert "known" in details()[1]


def test_without_the_options_a_selector_sees_the_federation_itself():
    federation = FakeFederation.example(clients=12)
    assert guard_federation(Defence(), no_turns(), Lowest(3), federation) is federation
    outcome = federation.train(np.array([1, 2]))
    assert guard_outcome(Defence(), outcome) is outcome
    turns = no_turns()
    assert after_round(Defence(), turns, Lowest(3), outcome, 12) is turns


def test_the_losses_of_an_outcome_are_clipped_too():
    federation = FakeFederation.example(clients=12)
    outcome = federation.train(np.arange(12))
    told = outcome.losses.copy()
    told[3] = 1e5
    lied = dataclasses.replace(outcome, read_losses=lambda: told)
    shown = guard_outcome(Defence(clip_reports=2.0), lied)
    assert np.array_equal(shown.losses, clip_reports(told, 2.0))
    assert shown.losses[3] < 1e3


@pytest.mark.parametrize(("key", "value"), [("most_share", 0.9), ("clip_reports", -1.0)])
def test_what_cannot_be_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        Defence(**{key: value})


def test_byzantine_have_at_most_their_share_and_the_header_says_why():
    byzantine = {"fraction": 0.1, "kind": "inflate"}
    defence = {"most_share": 1.5, "clip_reports": 2.0}
    experiment = fedcor.experiment("digits", selector="afl", rounds=40, byzantine=byzantine)
    guarded = fedcor.experiment(experiment, defence=defence)
    assert guarded.describe()["defence"] == {"clip_reports": 2.0, "most_share": 1.5}
    who = experiment.byzantine.who(1, 50)

    def share(one):
        chosen = [k for entry in run_in_memory(one, 1).rounds for k in entry["selected"]]
        return who[chosen].mean() / 0.1

    assert share(experiment) > 3
    assert share(guarded) <= 1.5


# --- on Flower ------------------------------------------------------------------------------------


def test_flower_caps_too_and_resumes_with_the_counts(tmp_path):
    def one(folder, rounds):
        grid = MemoryGrid(numpy_app(), 10)
        run(Lowest(5), grid, rounds, folder=folder, defence=Defence(most_share=1.0))
        return [line["selected"] for line in lines(folder)]

    chosen = one(tmp_path / "whole", 10)
    window = Cap(10, 5, 1.0).window
    for first in range(10 - window + 1):
        assert np.bincount(np.concatenate(chosen[first : first + window])).max() <= 4
    assert {k for one in chosen for k in one} == set(range(10))
    assert read_run(tmp_path / "whole").header["config"]["defence"] == {"most_share": 1.0}
    one(tmp_path / "parts", 3)
    assert one(tmp_path / "parts", 10) == chosen


@pytest.mark.parametrize("selector", ["random", "afl", "fedcor", "power_of_choice", "oort"])
def test_a_defended_experiment_is_the_same_on_flower(selector, tmp_path):
    defence = {"most_share": 1.25, "clip_reports": 1.0}
    one = experiment(fedcor.FedAvg(), selector, defence=defence)
    simulate(one, 1, tmp_path / "simulator")
    simulated = read_run(tmp_path / "simulator").rounds
    flower = on_flower(one, tmp_path / "flower")
    for key in ("selected", "test_loss", "why", "probed"):
        assert [line[key] for line in flower] == [line[key] for line in simulated]


def test_flower_takes_a_table_and_refuses_what_cannot_be():
    with pytest.raises(ConfigError, match=r"defence\.most_share"):
        select_with(FedAvg(), "random", clients_per_round=3, defence={"most_share": 0.5})


def inflates(message, context, call_next):
    """A mod of clients: number 3 reports a thousand times its loss."""
    reply = call_next(message, context)
    if context.node_config["partition-id"] == 3:
        for record in reply.content.metric_records.values():
            if "loss" in record:
                record["loss"] = 1000.0 * (1.0 + record["loss"])
    return reply


@dataclasses.dataclass(frozen=True)
class Listening(StatelessSelector):
    """Keeps what it is told."""

    heard: list
    clients_per_round: int = 8

    def select(self, state, federation):
        self.heard.append(federation.losses(federation.available))
        self.heard.append(federation.loss_changes(federation.available[:4]))
        return federation.available, state

    def observe(self, state, outcome):
        self.heard.append(outcome.losses)
        return state


def test_flower_clips_what_a_selector_is_told_by_every_path():
    told = {}
    for limit in (0.0, 2.0):
        heard = told[limit] = []
        grid = MemoryGrid(numpy_app(mods=[inflates, answers_probes()]), 8)
        run(Listening(heard), grid, 1, defence=Defence(clip_reports=limit))
    assert len(told[0.0]) == len(told[2.0]) == 3
    for raw, clipped in zip(told[0.0], told[2.0], strict=True):
        assert np.abs(raw).max() > 100
        assert np.array_equal(clipped, clip_reports(raw, 2.0))
        assert np.abs(clipped).max() < 100


@pytest.mark.parametrize("given", [{"byzantine": {"fraction": 0.5}}, {"loss_noise": 0.1}], ids=str)
def test_what_is_simulated_is_refused_on_flower(given, tmp_path):
    one = experiment(fedcor.FedAvg(), "random", **given)
    with pytest.raises(ConfigError, match="simulated by fedcor's own engine only"):
        run_on_flower(one, 1, tmp_path)
    assert not list(tmp_path.iterdir())
