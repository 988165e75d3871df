"""FedRecall: its formulas against a slow twin, what it is equal to, and where it leads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from optimiser_plays import Play, Quadratics, Round, models, plays

import fedcor
from fedcor import MIFA, FedAvg, FedNova, FedRecall, FedVARP
from fedcor.core.errors import ConfigError
from fedcor.core.types import Population, optimiser_traits
from fedcor.optimisers import OPTIMISERS
from fedcor.runs.record import read_checkpoint, read_run
from fedcor.testing import check_optimiser

# Without adaptation, FedRecall is a fixed rule, which is compared with others.
FIXED = {"rate": 1.0, "adaptation": 0.0}


def twin(it: FedRecall, play: Play) -> Iterator[tuple[np.ndarray, float]]:
    """The model and the rate after each round, as the module's docstring says, client by client."""
    w, rate, d_before = play.model.astype(float), it.rate, np.zeros(len(play.model))
    p, y_of, last_seen, delivered = play.population.weights, {}, {}, 0
    for number, came in enumerate(play.rounds):
        c = sum(p[k] for k in y_of)
        y = sum(p[k] * y_of[k] for k in y_of) / c if y_of else np.zeros_like(w)
        news, pace, sent = np.zeros_like(w), 0.0, {}
        for k, a, steps, update in zip(
            came.clients, came.weights, came.steps, came.updates.astype(float), strict=True
        ):
            sent[k] = update / (came.rate * steps)
            news += a * (sent[k] - y_of.get(k, y))
            pace += a * came.rate * steps
        gain = max(it.gain, len(came.clients) / play.count)
        d = y + (1 - c * (1 - gain)) * news
        lengths = np.sqrt(((y + news) ** 2).sum() * (d_before**2).sum())
        if lengths > 0:
            cosine = ((y + news) * d_before).sum() / lengths
            rate *= np.exp(it.adaptation * c * cosine)
            rate = max(it.smallest_rate, min(rate, it.largest_rate))
        w = w + pace * (1 + c * (rate - 1)) * d
        y_of |= {k: u.astype(it.dtype).astype(float) for k, u in sent.items()}
        last_seen |= dict.fromkeys(sent, number)
        delivered += len(sent)
        mean_delivered = delivered / (number + 1)
        for k, seen in last_seen.items():
            if number - seen > it.longest_absence * play.count / mean_delivered:
                y_of.pop(k, None)
        d_before = d
        yield w, rate


def states(optimiser, play):
    """The model and the state after each round."""
    model, state = play.model, optimiser.init(play.population, play.model)
    for number, came in enumerate(play.rounds):
        model, state = optimiser.step(state, came.delivery(number, model))
        yield model, state


SETTINGS = [
    FedRecall(),
    FedRecall(gain=1.0, adaptation=1.0),
    FedRecall(gain=0.1, rate=1.0, smallest_rate=0.9, largest_rate=1.1, adaptation=2.0),
    FedRecall(dtype="float16"),
    FedRecall(longest_absence=0.4),
]


@pytest.mark.parametrize("optimiser", SETTINGS, ids=repr)
@given(play=plays())
def test_a_step_is_that_of_the_formulas(optimiser, play):
    expected = list(twin(optimiser, play))
    for (model, state), (w, rate) in zip(states(optimiser, play), expected, strict=True):
        assert_allclose(model, w, rtol=2e-4, atol=2e-4)
        assert_allclose(state["rate"], rate, rtol=1e-4)


@pytest.mark.parametrize("optimiser", [*SETTINGS, FedRecall(weighted=True)], ids=repr)
def test_fedrecall_conforms(optimiser):
    check_optimiser(optimiser)


def test_an_engine_is_told_what_it_needs():
    assert optimiser_traits(FedRecall()).needs_updates
    assert optimiser_traits(FedRecall(weighted=True)).weighted
    assert optimiser_traits(FedRecall()).extra_down == optimiser_traits(FedRecall()).extra_up == 0


# --- what it is equal to --------------------------------------------------------------------------


@given(play=plays(equal_steps=True), rate=st.floats(0.5, 4.0))
def test_the_first_step_is_fedavgs_whatever_the_rate(play, rate):
    first, _ = next(states(FedRecall(rate=rate), play))
    assert_allclose(first, next(models(FedAvg(), play)), rtol=1e-5, atol=1e-5)


@given(play=plays(), rate=st.floats(0.5, 4.0))
def test_the_first_step_after_unequal_training_is_fednovas(play, rate):
    first, _ = next(states(FedRecall(rate=rate), play))
    assert_allclose(first, next(models(FedNova(), play)), rtol=1e-5, atol=1e-5)


@given(play=plays(everyone=True, equal_steps=True, by_data=True), rate=st.floats(0.5, 4.0))
def test_once_everyone_was_seen_the_whole_step_is_times_the_rate(play, rate):
    optimiser = FedRecall(gain=1.0, rate=rate, adaptation=0.0)
    w = play.model.astype(float)
    for number, (came, model) in enumerate(zip(play.rounds, models(optimiser, play), strict=True)):
        w = w + (rate if number else 1.0) * came.weights @ came.updates
        assert_allclose(model, w, rtol=1e-4, atol=1e-4)


@given(play=plays(everyone_first=True, equal_steps=True, equal_rates=True))
def test_with_everyone_seen_and_the_whole_gain_it_is_fedvarp_by_data(play):
    one, other = models(FedRecall(gain=1.0, **FIXED), play), models(FedVARP(weighted=True), play)
    assert_allclose(list(one), list(other), rtol=1e-4, atol=1e-4)


@given(play=plays(everyone_first=True, same_number=True, equal_steps=True, equal_weights=True,
                  equal_sizes=True))  # fmt: skip
def test_with_everyone_seen_and_a_gain_of_c_over_n_it_is_mifa(play):
    gain = len(play.rounds[-1].clients) / play.count
    one, other = models(FedRecall(gain=gain, **FIXED), play), models(MIFA(), play)
    assert_allclose(list(one), list(other), rtol=1e-4, atol=1e-4)


@given(play=plays(everyone=True, equal_steps=True, by_data=True))
def test_if_everyone_trains_the_whole_gain_is_fedavg_by_data(play):
    one, other = models(FedRecall(gain=1.0, **FIXED), play), models(FedAvg(weighted=True), play)
    assert_allclose(list(one), list(other), rtol=1e-5, atol=1e-5)


@given(play=plays(everyone=True, equal_steps=True, equal_rates=True, by_data=True),
       gain=st.floats(0.05, 1.0))  # fmt: skip
def test_if_everyone_trains_nothing_is_recalled_whatever_the_gain(play, gain):
    one = models(FedRecall(gain=gain, **FIXED), play)
    assert_allclose(list(one), list(models(FedAvg(weighted=True), play)), rtol=1e-4, atol=1e-4)


@given(play=plays(), gain=st.floats(0.05, 1.0))
def test_where_all_send_the_same_per_unit_of_training_nothing_depends_on_who_was_chosen(play, gain):
    direction, w = play.rounds[0].updates[0], play.model.astype(float)
    rounds = [
        dataclasses.replace(it, updates=np.outer(it.rate * it.steps, direction).astype(np.float32))
        for it in play.rounds
    ]
    same = dataclasses.replace(play, rounds=rounds)
    for came, model in zip(rounds, models(FedRecall(gain=gain, **FIXED), same), strict=True):
        w = w + came.rate * (came.weights @ came.steps) * direction
        assert_allclose(model, w, rtol=1e-4, atol=1e-4)


# --- the rate -------------------------------------------------------------------------------------


def rates(optimiser, updates):
    """The rate after each round of two clients that both send `updates[t]`."""
    rounds = [
        Round(np.arange(2), np.full(2, 0.5), np.full(2, 3), 0.1, np.float32([update, update]))
        for update in updates
    ]
    play = Play(Population(np.array([4, 9])), np.zeros(2, dtype=np.float32), rounds)
    return [float(state["rate"]) for _, state in states(optimiser, play)]


def test_the_rate_grows_while_updates_stay_the_same():
    optimiser = FedRecall(rate=1.5, largest_rate=4.0)
    found = rates(optimiser, [[1.0, 2.0]] * 40)
    assert found[0] == 1.5  # nothing was remembered
    factor = np.exp(optimiser.adaptation)
    assert_allclose(found[:4], 1.5 * factor ** np.arange(4))
    assert found == sorted(found)
    assert found[-1] == 4.0


def test_the_rate_falls_while_updates_point_back():
    optimiser = FedRecall(gain=1.0, rate=1.5, smallest_rate=0.5)
    found = rates(optimiser, [[1.0, 2.0], [-1.0, -2.0]] * 20)
    factor = np.exp(-optimiser.adaptation)
    assert_allclose(found[:4], 1.5 * factor ** np.arange(4))
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0.5


def test_updates_of_zero_leave_the_rate_as_it_is():
    assert rates(FedRecall(rate=1.5), np.zeros((5, 2))) == [1.5] * 5


@given(play=plays(), adaptation=st.floats(0.0, 10.0), width=st.floats(1.0, 3.0))
def test_the_rate_keeps_its_limits(play, adaptation, width):
    optimiser = FedRecall(
        rate=1.0, smallest_rate=1.0 / width, largest_rate=width, adaptation=adaptation
    )
    for _, state in states(optimiser, play):
        assert 1.0 / width <= state["rate"] <= width


@given(play=plays())
def test_without_adaptation_the_rate_stays(play):
    for _, state in states(FedRecall(rate=2.0, adaptation=0.0), play):
        assert state["rate"] == 2.0


# --- where it leads -------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, FIXED, {"dtype": "float16"}], ids=repr)
def test_it_goes_where_the_mean_of_all_data_leads(options, weighted, chosen):
    """Whoever is chosen, and however the news is weighted, the memory counts by data."""
    clients = Quadratics.example(4)
    found = clients.train(FedRecall(weighted, **options), rounds=600, chosen=chosen)
    atol = 1e-2 if "dtype" in options else 1e-3
    assert_allclose(found, clients.fedavg_limit(weighted=True), atol=atol)


@pytest.mark.parametrize("chosen", [7, 8, 9, 10])
def test_a_rate_at_which_models_diverge_falls_by_itself(chosen):
    """Clients that go nearly all the way to their optimum: four times as far is far too far."""
    rng = np.random.default_rng(0)
    optima = rng.normal(size=(10, 5))

    def distance(optimiser):
        draw, w = np.random.default_rng(1), np.zeros(5, dtype=np.float32)
        state = optimiser.init(Population(np.full(10, 7)), w)
        for number in range(200):
            clients = np.sort(draw.choice(10, size=chosen, replace=False))
            updates = (0.95 * (optima[clients] - w)).astype(np.float32)
            equal = np.full(chosen, 1 / chosen), np.full(chosen, 5)
            came = Round(clients, *equal, 0.1, updates)
            w, state = optimiser.step(state, came.delivery(number, w))
            if np.abs(w).max() > 1e6:
                return np.inf, state
        return float(np.linalg.norm(w - optima.mean(axis=0))), state

    assert distance(FedRecall(rate=4.0, adaptation=0.0))[0] == np.inf
    found, state = distance(FedRecall(rate=4.0))
    assert found < 1e-3
    assert state["rate"] < 2.5


# --- clients that leave and join ------------------------------------------------------------------


def test_a_client_that_left_is_forgotten_and_comes_back_as_a_new_one():
    optimiser, w = FedRecall(longest_absence=1.5, **FIXED), np.zeros(2, dtype=np.float32)
    state = optimiser.init(Population(np.array([3, 3, 3])), w)
    one = np.float32([[1.0, 0.0]]), np.float32([[0.0, 1.0]])

    def after(state, client, number, update):
        came = Round(np.array([client]), np.ones(1), np.array([5]), 0.1, update)
        return optimiser.step(state, came.delivery(number, w))

    for number, client in enumerate([0, 1, 2, 1, 2]):
        state = after(state, client, number, one[client % 2])[1]
        assert "update/0" in state  # 1.5 x 3 rounds are not over
    state = after(state, 1, 5, one[1])[1]
    assert "update/0" not in state
    assert state["seen"].tolist() == [-1, 5, 4]
    assert_allclose(state["total"], 3 * (state["update/1"] + state["update/2"]))
    # Where one of three is not remembered, its news counts as that of one who was never seen.
    back, _ = after(state, 0, 6, one[0])
    y = (state["update/1"] + state["update/2"]).astype(float) / 2
    gain = 1 - 2 / 3 * (1 - 1 / 3)  # one of three delivers, which is more than .3
    assert_allclose(back, 0.5 * (y + gain * (one[0][0] / 0.5 - y)), rtol=1e-5)


@given(play=plays(), joined=st.integers(0, 3))
def test_after_clients_joined_a_round_is_as_if_they_had_been_there(play, joined):
    larger = Population(np.append(play.population.sizes, np.full(joined, 9)))
    optimiser = FedRecall(**FIXED)  # how fast a rate adapts depends on how many are remembered
    grown, there = (optimiser.init(it, play.model) for it in (play.population, larger))
    for number, came in enumerate(play.rounds):
        delivery = came.delivery(number, play.model)
        (_, grown), (_, there) = (optimiser.step(state, delivery) for state in (grown, there))
    grown = optimiser.join(grown, larger)
    came = play.rounds[0]
    for clients in (came.clients, larger.count - 1 - np.arange(len(came.clients))[::-1]):
        delivery = dataclasses.replace(came, clients=clients).delivery(9, play.model)
        one, other = (optimiser.step(state, delivery) for state in (grown, there))
        assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-5)
        assert one[1].keys() == other[1].keys()
        assert_array_equal(one[1]["seen"], other[1]["seen"])
        assert_allclose(one[1]["total"], other[1]["total"], rtol=1e-9, atol=1e-9)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("gain", {"gain": 0.0}),
        ("gain", {"gain": 1.1}),
        ("rate", {"rate": 9.0}),
        ("rate", {"rate": 0.1}),
        ("rate", {"rate": float("nan")}),
        ("smallest_rate", {"smallest_rate": 3.0, "largest_rate": 2.0}),
        ("rate", {"smallest_rate": 3.0}),
        ("longest_absence", {"longest_absence": 0.0}),
        ("smallest_rate", {"smallest_rate": 0.0}),
        ("largest_rate", {"largest_rate": float("inf")}),
        ("adaptation", {"adaptation": -0.1}),
        ("dtype", {"dtype": "float64"}),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(key, options):
    with pytest.raises(ConfigError) as refused:
        FedRecall(**options)
    assert refused.value.key == key


# --- in the simulator -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMISERS.built_in)
def test_a_resumed_run_equals_a_whole_one_whatever_aggregates(name, tmp_path):
    experiment = fedcor.experiment("digits", optimiser=name, clients_per_round=3, local_steps=2)
    for folder, parts in (("whole", [8]), ("parts", [4, 8])):
        for rounds in parts:
            fedcor.run(
                experiment, "random", out=tmp_path / folder, rounds=rounds, resume=rounds > parts[0]
            )
    whole, parts = (
        [{**row, "seconds": 0} for row in read_run(tmp_path / folder).rounds]
        for folder in ("whole", "parts")
    )
    assert whole == parts
    one, other = (read_checkpoint(tmp_path / folder) for folder in ("whole", "parts"))
    one.pop("known"), other.pop("known")  # losses that are NaN until they are asked for
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert_array_equal(array, other[key])


def test_the_default_pair_resumes_as_well(tmp_path):
    experiment = fedcor.experiment("digits", clients_per_round=20)  # known to all after 3 rounds
    assert (experiment.selector, type(experiment.build_optimiser())) == ("aligned", FedRecall)
    fedcor.run(experiment, out=tmp_path / "whole", rounds=10)
    fedcor.run(experiment, out=tmp_path / "parts", rounds=5)
    fedcor.run(experiment, out=tmp_path / "parts", rounds=10, resume=True)
    whole, parts = (
        [{**row, "seconds": 0} for row in read_run(tmp_path / folder).rounds]
        for folder in ("whole", "parts")
    )
    assert whole == parts
    assert whole[-1]["why"]["cosine"][-1] > 0
    assert whole[-1]["memory_bytes"] > 50 * 2410 * 4


def _deliver(optimiser, state, clients, update, model):
    """One round in which each of `clients` sends `update`."""
    m = len(clients)
    came = Round(
        np.array(clients),
        np.full(m, 1.0 / m),
        np.ones(m, dtype=np.int64),
        1.0,
        np.tile(np.asarray(update, dtype=np.float32), (m, 1)),
    )
    return optimiser.step(state, came.delivery(0, model))


def test_a_client_that_left_is_forgotten_and_no_other():
    it, model = FedRecall(longest_absence=2.0), np.zeros(2, dtype=np.float32)
    state = it.init(Population(np.array([1, 2, 3])), model)
    _, state = _deliver(it, state, [0], [5.0, 0.0], model)
    for t in range(1, 20):  # clients 1 and 2 take turns; N / m is 3, so 6 rounds are too long
        before = state
        _, state = _deliver(it, state, [1 + t % 2], [0.0, 1.0], model)
        assert ("update/0" in state) == (t <= 6)
        assert "update/1" in state or t < 2
        known = {k: n for k, n in enumerate([1, 2, 3]) if _has(state, k)}
        remembered = sum(n * state[f"update/{k}"] for k, n in known.items())
        assert_allclose(state["total"], remembered)
        assert "update/0" in before or t > 7  # the given state keeps it
    assert state["seen"][0] == -1
    _, state = _deliver(it, state, [0], [1.0, 0.0], model)  # it comes back as a new client
    assert state["seen"][0] == 20
    assert_array_equal(state["update/0"], [1.0, 0.0])


def _has(state, client):
    return f"update/{client}" in state


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_remembered_is_finite_even_where_an_update_per_step_is_not(dtype):
    it, model = FedRecall(dtype=dtype), np.zeros(2, dtype=np.float32)
    state = it.init(Population(np.array([1, 1])), model)
    sent = Round(np.array([0]), np.ones(1), np.ones(1, dtype=np.int64), 1e-4, np.full((1, 2), 3e36))
    _, state = it.step(state, sent.delivery(0, model))
    assert all(np.isfinite(state[name]).all() for name in ("update/0", "total", "last_step"))
