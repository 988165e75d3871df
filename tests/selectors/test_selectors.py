"""Every selector passes the conformance suite and follows the rule of its paper."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import pkgutil
import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from selector_helpers import outcome, play

import fedcor.selectors
from fedcor import (
    AFL,
    Aligned,
    Complement,
    FedCor,
    Full,
    Oort,
    PowerOfChoice,
    Proxy,
    Random,
    RoundRobin,
    build_selector,
)
from fedcor.core.errors import ConfigError
from fedcor.core.rng import stream
from fedcor.core.types import Population
from fedcor.selectors import selector_class, selector_name, selector_names
from fedcor.selectors.base import StatelessSelector
from fedcor.selectors.gp.fit import Samples, fit
from fedcor.selectors.gp.greedy import select_proxy
from fedcor.testing import FakeFederation, check_selector

SMALL = {"warmup": 4, "interval": 3, "dimension": 3, "warmup_steps": 20, "refit_steps": 10}


CONFORMING = [
    Random(3),
    Random(3, replacement=True),
    Full(),
    AFL(3),
    AFL(3, alpha1=1.0, alpha3=0.0),
    PowerOfChoice(3),
    PowerOfChoice(3, candidates=5),
    FedCor(3, **SMALL),
    FedCor(3, **{**SMALL, "warmup": 0, "samples_per_refit": 2, "history": 0}),
    FedCor(3, **SMALL, probe_fraction=0.4),
    FedCor(3, **{**SMALL, "samples_per_refit": 2}, probe_clients=5),
    FedCor(3, **SMALL, probe_clients=100),
    Proxy(3, **SMALL),
    Proxy(3, **SMALL, probe_clients=1),
    Complement(3),
    Complement(3, sketch=4, start="oldest", normalised=True, ageing=0.9, swaps=2, explore=0.4),
    Aligned(3),
    Aligned(3, sketch=4, swaps=0, longest_wait=0.5),
    Aligned(3, sketch="full"),
    RoundRobin(3),
    Oort(3),
    Oort(3, exploration=0.0, window=2, most_rounds=2),
]


@pytest.mark.parametrize("selector", CONFORMING, ids=repr)
def test_selector_conforms(selector):
    check_selector(selector)


@pytest.mark.parametrize("selector", CONFORMING, ids=repr)
def test_clients_can_join_before_the_first_round(selector):
    state = selector.init(FakeFederation.example(6).population)
    federation = FakeFederation.example(12, available=range(6, 12))
    chosen, _ = selector.select(selector.join(state, federation.population), federation)
    assert len(chosen)
    assert set(chosen) <= set(range(6, 12))


def test_every_registered_selector_is_in_the_conformance_test():
    assert {selector_class(name) for name in selector_names()} == {
        type(selector) for selector in CONFORMING
    }


@pytest.mark.parametrize("name", selector_names())
def test_every_hyper_parameter_is_documented(name):
    cls = selector_class(name)
    for field in dataclasses.fields(cls):
        assert re.search(rf"\b{field.name}[,:]", cls.__doc__), field.name


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(fedcor.selectors.__path__)])
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(f"fedcor.selectors.{name}")
    assert doctest.testmod(module).failed == 0


# --- the conformance suite detects faulty selectors -------------------------------------------


@dataclasses.dataclass(frozen=True)
class Faulty(StatelessSelector):
    fault: str
    clients_per_round: int = 3

    def init(self, population):
        return {"seen": np.zeros(population.count)}

    def select(self, state, federation):
        first = federation.available[: self.clients_per_round]
        if self.fault == "global randomness":
            return np.random.permutation(federation.available)[: self.clients_per_round], state  # noqa: NPY002
        if self.fault == "unavailable":
            return np.arange(min(3, len(federation.available))), state
        if self.fault == "twice":
            return np.repeat(
                first[:1], min(self.clients_per_round, len(federation.available))
            ), state
        if self.fault == "too few":
            return first[:1], state
        if self.fault == "in place":
            state["seen"][first] += 1
        if self.fault == "objects":
            return first, {"seen": np.array([object()])}
        if self.fault == "not an array":
            return first.tolist(), state
        if self.fault == "asks the unavailable":
            federation.losses(np.arange(12))
        if self.fault == "hidden state":
            HIDDEN.append(1)
            return np.roll(federation.available, len(HIDDEN))[: self.clients_per_round], state
        return first, state


HIDDEN: list[int] = []


@pytest.mark.parametrize(
    "fault",
    [
        "global randomness",
        "unavailable",
        "twice",
        "too few",
        "in place",
        "objects",
        "not an array",
        "hidden state",
        "asks the unavailable",
    ],
)
def test_the_suite_rejects_a_selector_with(fault):
    with pytest.raises(AssertionError):
        check_selector(Faulty(fault))


def test_the_suite_rejects_a_dataclass_that_is_not_frozen():
    @dataclasses.dataclass
    class Loose(StatelessSelector):
        def select(self, state, federation):
            return federation.available, state

    with pytest.raises(AssertionError, match="frozen"):
        check_selector(Loose())


# --- random ---------------------------------------------------------------------------------------


def test_random_is_uniform_without_replacement():
    federation = FakeFederation.example(10)
    counts = np.zeros(10)
    for t in range(2000):
        federation.rng = stream(5, "select", t)
        chosen, _ = Random(3).select({}, federation)
        assert len(set(chosen)) == 3
        counts[chosen] += 1
    assert chisquare(counts).pvalue > 1e-4


def test_random_with_replacement_can_draw_a_client_twice():
    federation = FakeFederation.example(3)
    selector, repeated = Random(3, replacement=True), False
    for t in range(50):
        federation.rng = stream(9, "select", t)
        chosen, _ = selector.select({}, federation)
        repeated |= len(set(chosen)) < 3
    assert repeated


# --- power-of-choice ------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 8))
def test_power_of_choice_takes_the_largest_losses_of_its_candidates(seed, count, extra):
    rng = np.random.default_rng(seed)
    federation = FakeFederation(
        rng.standard_normal((15, 3)), sizes=rng.integers(1, 100, size=15), seed=seed
    )
    chosen, _ = PowerOfChoice(count, candidates=count + extra).select({}, federation)
    (candidates,) = federation.asked
    assert len(np.unique(candidates)) == count + extra
    assert set(chosen) <= set(candidates)
    losses = federation.loss_of(federation.model)
    rest = np.setdiff1d(candidates, chosen)
    assert not len(rest) or losses[chosen].min() >= losses[rest].max()


def test_power_of_choice_draws_2c_candidates_by_weight_by_default():
    sizes = np.array([1] * 9 + [91])
    federation = FakeFederation(np.zeros((10, 2)), sizes=sizes)
    heavy = 0
    for t in range(400):
        federation.rng = stream(1, "select", t)
        PowerOfChoice(1).select({}, federation)
        assert len(federation.asked[-1]) == 2
        heavy += 9 in federation.asked[-1]
    assert heavy / 400 > 0.85


def test_power_of_choice_asks_nobody_when_nobody_is_available():
    federation = FakeFederation.example(6, available=[])
    chosen, _ = PowerOfChoice(3).select({}, federation)
    assert len(chosen) == len(federation.asked) == 0


def test_power_of_choice_prefers_candidates_that_answered():
    federation = FakeFederation.example(6, silent=[0, 1, 2])
    chosen, _ = PowerOfChoice(3, candidates=6).select({}, federation)
    assert set(chosen) == {3, 4, 5}


# --- active federated learning --------------------------------------------------------------------


def test_afl_values_clients_by_root_size_times_last_reported_loss():
    selector = AFL(2)
    state = selector.init(Population(np.array([4, 9, 16, 25])))
    state = selector.observe(state, outcome(0, [0, 1], [2.0, 4.0]))
    # Clients that never trained have the mean of the first reported losses, 3.
    assert selector.valuations(state).tolist() == [2 * 2.0, 3 * 4.0, 4 * 3.0, 5 * 3.0]
    state = selector.observe(state, outcome(1, [1, 2], [1.0, np.nan]))
    assert selector.valuations(state).tolist() == [2 * 2.0, 3 * 1.0, 4 * 3.0, 5 * 3.0]
    assert selector.observe(state, outcome(2, [3], [np.nan])) is state


def test_afl_drops_small_valuations_draws_by_softmax_and_fills_uniformly():
    """alpha3 = 0 draws from the largest quarter by softmax; alpha3 = 1 uniformly from everyone."""
    sizes = np.ones(8, dtype=np.int64)
    federation = FakeFederation(np.zeros((8, 2)), sizes=sizes)
    selector = AFL(1, alpha1=0.75, alpha2=1.0, alpha3=0.0)
    state = {**selector.init(Population(sizes)), "losses": np.array([1, 2, 3, 4, 5, 6, 7, 8.0]) / 8}
    counts = np.zeros(8)
    uniform_counts = np.zeros(8)
    for t in range(3000):
        federation.rng = stream(2, "select", t)
        counts[selector.select(state, federation)[0]] += 1
        uniform_counts[AFL(1, alpha3=1.0).select(state, federation)[0]] += 1
    assert (counts[:6] == 0).all()
    odds = np.exp([7 / 8, 1.0])
    assert chisquare(counts[6:], 3000 * odds / odds.sum()).pvalue > 1e-4
    assert chisquare(uniform_counts).pvalue > 1e-4


def test_afl_draws_four_of_five_by_valuation_with_the_published_alphas():
    """C = 5, alpha3 = 0.1: four from the largest quarter, one uniformly."""
    federation = FakeFederation(np.zeros((40, 2)), sizes=np.ones(40, dtype=np.int64))
    selector = AFL(5)
    state = {**selector.init(federation.population), "losses": np.arange(40.0)}
    for t in range(50):
        federation.rng = stream(3, "select", t)
        chosen, _ = selector.select(state, federation)
        assert (np.sort(chosen)[1:] >= 30).all()
        assert (chosen[:4] >= 30).all()


@pytest.mark.parametrize(
    ("alpha3", "by_valuation"), [(0.0, 10), (0.1, 9), (0.8, 2), (0.9, 1), (1.0, 0)]
)
def test_afl_counts_are_not_affected_by_rounding_errors(alpha3, by_valuation):
    federation = FakeFederation(np.zeros((40, 2)), sizes=np.ones(40, dtype=np.int64))
    selector = AFL(10, alpha1=0.7, alpha2=0.0, alpha3=alpha3)
    state = {**selector.init(federation.population), "losses": np.arange(40.0)}
    chosen, _ = selector.select(state, federation)
    assert (chosen[:by_valuation] >= 28).all()  # 0.7 * 40 is 28, and not 27.999...
    assert len(chosen) == 10


def test_afl_handles_valuations_that_would_underflow_a_softmax():
    federation = FakeFederation(np.zeros((8, 2)), sizes=np.ones(8, dtype=np.int64))
    selector = AFL(3, alpha1=0.0, alpha2=1.0, alpha3=0.0)
    state = {
        **selector.init(federation.population),
        "losses": np.array([1e5, 0, 0, 0, 0, 0, 0, 0.0]),
    }
    chosen, _ = selector.select(state, federation)
    assert 0 in chosen
    assert len(set(chosen)) == 3


# --- FedCor ---------------------------------------------------------------------------------------


def test_fedcor_measures_in_the_rounds_that_the_paper_says():
    """Warm-up: one sample per round, of the selection that trains. Then S at t % interval == 0."""
    federation = FakeFederation.example(12)
    selector = FedCor(3, **{**SMALL, "samples_per_refit": 2})
    choices, state = play(selector, federation, 11)
    assert len(federation.tried) == 4 + 2 * 2  # rounds 0-3; rounds 6 and 9
    for t in range(4):
        assert np.array_equal(federation.tried[t], choices[t])
    assert not federation.asked
    assert state["sample_rounds"].tolist() == [0, 1, 2, 3, 6, 6, 9, 9]


def test_fedcor_fits_the_discounted_likelihood_from_the_last_embedding():
    """After every fit, the embedding is what Adam makes of the last one with the same samples."""
    selector = FedCor(
        3,
        warmup=3,
        interval=5,
        dimension=2,
        warmup_history=1,
        history=1,
        warmup_steps=7,
        refit_steps=5,
    )
    rng = stream(0, "select", 0)
    federation = FakeFederation.example(12)
    rng.choice(federation.available, size=3, replace=False)
    X = rng.standard_normal((12, 2)) / np.sqrt(2)
    state, measured = selector.init(federation.population), []
    for t in range(6):
        chosen, state = selector.select(state, federation)
        if t < 3 or t == 5:
            measured.append(federation.loss_changes(federation.tried[-1]))
            federation.tried.pop()
            ages = np.array([{0: 0, 1: 1, 2: 1, 5: 3}[t], 0]) if t else np.array([0])
            samples = Samples(np.array(measured[-2:]), 0.9**ages)
            X = fit(X, samples, 1e-4, 7 if t < 3 else 5, 0.01)
        assert np.allclose(state["embedding"], X, atol=1e-12), t
        federation.train(chosen)


def test_fedcor_counts_its_picks_and_resets_them_at_a_refit():
    federation = FakeFederation.example(12)
    selector = FedCor(3, **SMALL)
    state = selector.init(federation.population)
    expected = np.zeros(12, dtype=int)
    for t in range(10):
        chosen, state = selector.select(state, federation)
        if t < 4 or t % 3 == 0:
            expected[:] = 0
        expected[chosen] += 1
        assert state["picked"].tolist() == expected.tolist()
        federation.train(chosen)


def test_fedcor_chooses_its_picks_with_the_current_annealing():
    federation = FakeFederation.example(12)
    selector = FedCor(3, **SMALL)
    _, state = play(selector, federation, 7)
    picks = selector.picks(state, federation.weights, federation.available)
    chosen, after = selector.select(state, federation)
    assert np.array_equal(chosen, picks.clients)
    annealing = selector.reasons(after, federation, chosen)["annealing"]
    assert np.array_equal(annealing, 0.95 ** state["picked"][chosen])


def test_fedcor_learns_groups_of_clients_and_takes_one_of_each():
    """Losses of clients change together in three groups: a round of three has one of each."""
    group = np.arange(12) % 3
    federation = FakeFederation(3.0 * np.eye(3)[group], learning_rate=0.3)
    choices, state = play(FedCor(3, warmup=15, interval=5, dimension=4), federation, 20)
    unit = state["embedding"] / np.linalg.norm(state["embedding"], axis=1, keepdims=True)
    same = group[:, None] == group
    assert (unit @ unit.T)[same].min() > 0.9
    assert (unit @ unit.T)[~same].max() < 0.5
    assert [len({k % 3 for k in chosen}) for chosen in choices[15:]] == [3] * 5


def test_a_fit_that_overflows_keeps_the_last_embedding(monkeypatch):
    monkeypatch.setattr("fedcor.selectors.gp_selector.fit", lambda X, *_: np.full_like(X, np.nan))
    federation = FakeFederation.example(6)
    _, state = play(FedCor(2, **SMALL), federation, 6)
    assert np.isfinite(state["embedding"]).all()


# --- the proxy algorithm --------------------------------------------------------------------------


def test_proxy_chooses_by_the_sum_of_learnt_covariances():
    federation = FakeFederation.example(12)
    selector = Proxy(3, **SMALL)
    _, state = play(selector, federation, 7)
    chosen, _ = selector.select(state, federation)
    expected = select_proxy(state["embedding"], federation.weights, 1e-4, 3, federation.available)
    assert np.array_equal(chosen, expected)


# --- hyper-parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("fedcor", {"beta": 1.0}, "beta"),
        ("fedcor", {"beta": 0.0}, "beta"),
        ("fedcor", {"interval": 0}, "interval"),
        ("fedcor", {"noise": 0.0}, "noise"),
        ("fedcor", {"noise": float("nan")}, "noise"),
        ("fedcor", {"discount": 1.5}, "discount"),
        ("fedcor", {"warmup": -1}, "warmup"),
        ("fedcor", {"warmup": 2.5}, "warmup"),
        ("afl", {"alpha1": 2.0}, "alpha1"),
        ("power_of_choice", {"candidates": 2}, "candidates"),
        ("random", {"replacement": "yes"}, "replacement"),
    ],
)
def test_invalid_hyper_parameters_are_rejected_by_name(name, options, key):
    with pytest.raises(ConfigError) as caught:
        build_selector(name, 3, options)
    assert caught.value.key == key
    assert caught.value.given == options[key] or options[key] != options[key]


def test_a_selector_is_recorded_by_its_registered_name_or_by_module_and_class():
    for name in selector_names():
        assert selector_name(build_selector(name, 3)) == name
    assert selector_name(Faulty("twice")) == f"{__name__}:Faulty"


def test_a_misspelt_selector_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match='did you mean "fedcor"'):
        build_selector("fedcorr", 3)


def test_clients_per_round_must_be_positive():
    with pytest.raises(ConfigError, match="clients_per_round"):
        Random(0)


def test_a_users_selector_is_found_by_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedcor.selectors.base import StatelessSelector\n"
        "@dataclass(frozen=True)\n"
        "class First(StatelessSelector):\n"
        "    clients_per_round: int\n"
        "    reverse: bool = False\n"
        "    def select(self, state, federation):\n"
        "        return federation.available[: self.clients_per_round], state\n"
        "class NotOne: pass\n"
    )
    monkeypatch.chdir(tmp_path)
    selector = build_selector("mine:First", 2, {"reverse": True})
    check_selector(selector)
    with pytest.raises(ConfigError, match="init, select and observe"):
        build_selector("mine:NotOne", 2)
    with pytest.raises(ConfigError, match='did you mean "First"'):
        build_selector("mine:Frist", 2)
    with pytest.raises(ConfigError, match="could not be imported"):
        build_selector("no_such_module_here:X", 2)


def test_a_selector_of_an_installed_package_is_found_by_entry_point(monkeypatch):
    from importlib.metadata import EntryPoint

    point = EntryPoint("theirs", "fedcor.selectors.baselines:Random", "fedcor.selectors")
    monkeypatch.setattr(
        "fedcor.core.registry.entry_points",
        lambda group, name=None: (
            [point] if name in (None, "theirs") and group == "fedcor.selectors" else []
        ),
    )
    assert "theirs" in selector_names()
    assert build_selector("theirs", 2) == Random(2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "init returned the state None, not a mapping"),
        ({"next": 0}, "init returned a state whose 'next' is a int, not a NumPy array"),
        ({0: np.zeros(1)}, "init returned a state with the name 0, not a text"),
    ],
)
def test_the_suite_says_what_is_wrong_with_a_state(state, message):
    @dataclass(frozen=True)
    class Wrong(Random):
        def init(self, population):
            return state

    with pytest.raises(AssertionError, match=message):
        check_selector(Wrong(3))


@pytest.mark.parametrize(("reasons", "message"), [("why", "not a mapping"), ({"a": 1.0}, "shape")])
def test_the_suite_says_what_is_wrong_with_reasons(reasons, message):
    @dataclass(frozen=True)
    class Wrong(Random):
        def reasons(self, state, federation, chosen):
            return reasons

    with pytest.raises(AssertionError, match=message):
        check_selector(Wrong(3))


@pytest.mark.parametrize(
    ("details", "message"),
    [("why", "not a mapping"), ({"a": 1.0}, "list of numbers"), ({"a": ["x"]}, "list of numbers")],
)
def test_the_suite_says_what_is_wrong_with_details(details, message):
    @dataclass(frozen=True)
    class Wrong(Random):
        def details(self, before, state, federation, chosen):
            return details

    with pytest.raises(AssertionError, match=message):
        check_selector(Wrong(3))


def test_the_suite_refuses_reasons_that_draw():
    @dataclass(frozen=True)
    class Drawing(Random):
        def reasons(self, state, federation, chosen):
            return {"luck": federation.rng.random(len(chosen))}

    with pytest.raises(AssertionError, match="drew from"):
        check_selector(Drawing(3))


@pytest.mark.parametrize("phase", [3, "one line\nand another"])
def test_the_suite_says_what_is_wrong_with_a_phase(phase):
    @dataclass(frozen=True)
    class Wrong(Random):
        def phase(self, state):
            return phase

    with pytest.raises(AssertionError, match="not a text of one line"):
        check_selector(Wrong(3))


def test_the_suite_wants_an_object():
    with pytest.raises(AssertionError, match="this is a class"):
        check_selector(Random)


@pytest.mark.parametrize("selector", [FedCor(3, **SMALL), Proxy(3, **SMALL)], ids=repr)
def test_a_process_that_was_never_fitted_chooses_uniformly_and_says_so_once(selector, caplog):
    """Nobody ever answers: an embedding that was drawn at random would choose the same for ever."""
    federation = FakeFederation.example(12, silent=range(12))
    state, counts = selector.init(federation.population), np.zeros(12)
    with caplog.at_level("WARNING", "fedcor"):
        for _ in range(404):
            chosen, state = selector.select(state, federation)
            if federation.round >= selector.warmup:
                counts[chosen] += 1
            assert getattr(selector, "reasons", lambda *_: {})(state, federation, chosen) == {}
            state = selector.observe(state, federation.train(chosen))
    assert chisquare(counts).pvalue > 0.01
    assert caplog.text.count("the Gaussian process was never fitted") == 1
    assert f"{type(selector).__name__}: the warm-up measured no loss change" in caplog.text


def test_the_first_measured_loss_change_ends_the_uniform_choice():
    """One client that answers is enough for a fit, as it is where some do not answer."""
    selector = FedCor(3, **SMALL)
    federation = FakeFederation.example(12, silent=range(12))
    state = selector.init(federation.population)
    for _ in range(6):
        chosen, state = selector.select(state, federation)
        state = selector.observe(state, federation.train(chosen))
    assert not len(state["samples"])
    federation.answering[:] = True  # from round 6 on, which refits
    chosen, state = selector.select(state, federation)
    assert len(state["samples"]) == 1
    assert set(selector.reasons(state, federation, chosen)) >= {"gain", "redundancy", "annealing"}
    picked = state["picked"].copy()
    picked[chosen] -= 1
    before = {**state, "picked": picked}
    expected = selector.picks(before, federation.weights, federation.available).clients
    assert chosen.tolist() == expected.tolist()
