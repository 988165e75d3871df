"""Probes of a sample of the clients: whom they go to, what they cost, and who is explored."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_helpers import play, select

import fedcor
from fedcor import FedCor, Proxy
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import planned_questions
from fedcor.data.datasets import load
from fedcor.flower.preflight import expected_models
from fedcor.reporting.explanations import explanation
from fedcor.rounds.defence.guarded_federation import guard_federation
from fedcor.rounds.defence.settings import Defence
from fedcor.rounds.ledger import ANSWER_BYTES
from fedcor.runs.runner import run_in_memory
from fedcor.selectors.base import StatelessSelector
from fedcor.selectors.gp.fit import Samples, fit
from fedcor.selectors.gp_selector import count_asked, explored, is_seen, whom_to_ask
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment
from fedcor.testing import FakeFederation

DIGITS = load("digits")
SMALL = {"warmup": 4, "interval": 3, "dimension": 3, "warmup_steps": 20, "refit_steps": 10}


# --- whom to ask ----------------------------------------------------------------------------------


@given(
    available=st.sets(st.integers(0, 40), min_size=1),
    chosen=st.integers(1, 8),
    tries=st.integers(1, 3),
    fraction=st.floats(0.01, 1.0),
    most=st.none() | st.integers(1, 50),
    seed=st.integers(0, 9),
)
def test_as_many_are_asked_as_was_said_and_those_who_train_among_them(
    available, chosen, tries, fraction, most, seed
):
    rng, there = stream(seed, "test"), np.array(sorted(available))
    count = count_asked(len(there), fraction, most)
    assert 1 <= count <= max(1, fraction * len(there) + 1e-6)
    assert most is None or count <= most
    selections = [rng.choice(there, min(chosen, len(there)), replace=False) for _ in range(tries)]
    asked = whom_to_ask(rng, there, selections, count)
    for one, selection in zip(asked, selections, strict=True):
        assert np.array_equal(one, np.unique(one))
        assert set(selection) <= set(one) <= available
        assert len(one) == min(max(count, len(selection)), len(there))
    union = set().union(*asked)
    assert len(union) <= count + sum(map(len, selections))  # the others are the same for all


def test_the_others_are_uniform():
    hits = np.zeros(20)
    for seed in range(3000):
        (asked,) = whom_to_ask(stream(seed, "test"), np.arange(20), [np.array([3, 4])], 6)
        hits[asked] += 1
    assert hits[[3, 4]].tolist() == [3000, 3000]
    others = np.delete(hits, [3, 4])
    assert others.mean() == pytest.approx(3000 * 4 / 18)
    assert np.abs(others - others.mean()).max() < 5 * np.sqrt(3000 * (4 / 18) * (14 / 18))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"probe_fraction": 0.0}, "probe_fraction"),
        ({"probe_fraction": 1.1}, "probe_fraction"),
        ({"probe_clients": 0}, "probe_clients"),
    ],
)
def test_shares_and_numbers_are_checked(options, key):
    with pytest.raises(ConfigError, match=key):
        FedCor(3, **options)


def test_a_federation_without_the_second_argument_serves_those_who_ask_everyone():
    class Old(FakeFederation):
        def loss_changes(self, selection):
            return super().loss_changes(selection)

    play(FedCor(3, **SMALL), Old.example(12), 8)
    shown = guard_federation(Defence(clip_reports=2.0), {}, FedCor(3), Old.example(12))
    assert np.isfinite(shown.loss_changes(np.arange(3))).all()
    with pytest.raises(TypeError):
        play(FedCor(3, **SMALL, probe_clients=4), Old.example(12), 1)


# --- in the federations ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scripted(StatelessSelector):
    """Does what a test says: `script(federation) -> choice`."""

    script: object

    def select(self, state, federation):
        return np.asarray(self.script(federation)), state


def scripted(script, *changes):
    experiment = load_experiment("digits", changes, "random")
    return dataclasses.replace(build_simulation(experiment, 1, DIGITS), selector=Scripted(script))


def test_only_those_who_are_asked_get_the_models_and_answer():
    spent, answers = [], []
    selection, asked = np.arange(10), np.array([2, 5, 30, 41])

    def script(federation):
        for clients in (asked, asked[:2], np.append(asked, 7), None):
            before = federation.ledger.bytes_down, federation.ledger.bytes_up
            answers.append(federation.loss_changes(selection, clients))
            after = federation.ledger.bytes_down, federation.ledger.bytes_up
            spent.append((after[0] - before[0], after[1] - before[1]))
        return selection

    ((record, state),) = scripted(script).run(1)
    model = build_simulation(load_experiment("digits", (), "random"), 1, DIGITS).engine.model_bytes
    # The model to the four, and to the eight others who train; the candidate to the four.
    assert spent[0] == ((4 + 8 + 4) * model, 10 * model + 8 * ANSWER_BYTES)
    assert spent[1] == (0, 0)
    assert spent[2] == (model, 2 * ANSWER_BYTES)  # client 7 holds the model: it has trained
    assert spent[3] == ((50 - 12 + 50 - 5) * model, 2 * 45 * ANSWER_BYTES)
    assert record.probed == 100
    whole = answers[3]
    assert np.isfinite(whole).all()
    for given_to, answer in zip((asked, asked[:2], np.append(asked, 7)), answers, strict=False):
        known = np.zeros(50, dtype=bool)
        known[given_to] = True
        assert np.array_equal(np.isfinite(answer), known)
        np.testing.assert_allclose(answer[known], whole[known], rtol=1e-6)
    assert np.isfinite(state.known).all()  # of the model that was adopted


def test_who_is_not_available_cannot_be_asked():
    simulation = scripted(
        lambda f: [f.loss_changes(f.available[:2], np.arange(50)), f.available[:2]][1],
        "faults.availability=0.5",
    )
    with pytest.raises(FedcorError, match="not available"):
        list(simulation.run(1))


@pytest.mark.parametrize("tries", [1, 2])
def test_the_traffic_is_what_was_foretold(tries):
    """On average: who holds which model is a matter of luck."""
    changes = [
        "training.rounds=12",
        "selectors.fedcor.warmup=5",
        "selectors.fedcor.interval=3",
        "selectors.fedcor.warmup_steps=2",
        "selectors.fedcor.refit_steps=2",
        "selectors.fedcor.probe_clients=15",
        f"selectors.fedcor.samples_per_refit={tries}",
    ]
    experiment = load_experiment("digits", changes, "fedcor")
    seeds = range(8)
    simulations = [build_simulation(experiment, seed, DIGITS) for seed in seeds]
    rounds = [[record for record, _ in one.run(12)] for one in simulations]
    plan = [planned_questions(experiment.build_selector(), t, 50) for t in range(12)]
    assert {one.asked for one in plan} == {15, None}
    chosen, model_bytes = experiment.clients_per_round, simulations[0].engine.model_bytes
    expected = expected_models(plan, clients=50, chosen=chosen)
    down = sum(entry.bytes_down for one in rounds for entry in one) / len(rounds) / model_bytes
    up = sum(entry.bytes_up for one in rounds for entry in one) / len(rounds) / model_bytes
    assert down == pytest.approx(expected[0], rel=0.15)
    assert up == pytest.approx(expected[1], rel=0.15)


@pytest.mark.parametrize("defence", [{}, {"clip_reports": 2.0, "most_share": 1.5}], ids=str)
def test_runs_with_sampled_probes_work_behind_a_shield_and_with_faults(defence):
    made = fedcor.experiment(
        load_experiment("digits", ["training.rounds=12"], "fedcor"),
        selector=FedCor(10, **SMALL, probe_fraction=0.3),
        faults=fedcor.Faults(availability=0.5, dropout=0.2),
        defence=defence,
    )
    run = run_in_memory(made, 1)
    assert len(run.rounds) == 12
    asked = [entry["probed"] for entry in run.rounds]
    assert max(asked) <= 2 * 25
    assert min(asked[:4]) > 0
    assert asked[4] == asked[5] == 0


@pytest.mark.parametrize("kind", [FedCor, Proxy])
def test_rules_are_kept_while_unseen_clients_are_explored(kind):
    made = fedcor.experiment(
        load_experiment("digits", ["training.rounds=14"], "fedcor"),
        selector=kind(10, **SMALL, probe_clients=12),
        tags={"site": {"a": "0-19", "b": "20-39", "c": "40-49"}},
        rules=fedcor.Rules(at_least={"site": 2}, at_most={"site": 5}),
    )
    new = 0
    for record, state in fedcor.simulate(made):
        chosen = np.array(record.selected)
        assert len(np.unique(chosen)) == 10
        sites = np.bincount(np.digitize(chosen, [20, 40]), minlength=3)
        assert sites.min() >= 2
        assert sites.max() <= 5
        assert not record.unmet
        if record.round >= 4:
            new += int((~is_seen(state.selector["embedding"][chosen])).sum())
    assert new > 0


# --- what is learnt -------------------------------------------------------------------------------


def test_a_fit_leaves_out_who_is_in_no_sample_and_gives_the_same_bits():
    rng = stream(1, "test")
    X, Y = rng.standard_normal((30, 4)), rng.standard_normal((5, 30))
    Y[rng.random(Y.shape) < 0.6] = np.nan
    Y[:, [3, 17, 29]] = np.nan
    w = np.array([1.0, 0.5, 0.2, 1.0, 1.0])
    selector = FedCor(3, dimension=4)
    whole = fit(X, Samples(Y, w), selector.noise**2, 40, selector.gp_learning_rate)
    assert np.array_equal(selector._refit(X, Samples(Y, w), 40), whole)
    assert np.array_equal(whole[[3, 17, 29]], X[[3, 17, 29]])


@pytest.mark.parametrize("kind", [FedCor, Proxy])
def test_who_was_never_asked_keeps_the_prior(kind):
    selector, federation = kind(3, **SMALL, probe_clients=5), FakeFederation.example(40)
    state, asked = selector.init(federation.population), set()
    for t in range(14):
        chosen, state = selector.select(state, federation)
        if t < selector.warmup or t % selector.interval == 0:
            asked |= set(federation.probed[-1].tolist())
            assert len(federation.probed[-1]) == 5
        X = state["embedding"]
        assert set(np.flatnonzero(is_seen(X))) == asked
        # Of the prior, N(0, X X' + s2 I), nothing but its own variance is left.
        unseen = np.setdiff1d(np.arange(40), sorted(asked))
        assert not (X @ X[unseen].T).any()
        if t >= selector.warmup:
            new = np.isin(chosen, unseen)
            assert new.sum() == 1  # a quarter of three, at least one
            assert new.tolist() == sorted(new.tolist())  # the process picks first
        state = selector.observe(state, federation.train(chosen))
    assert len(asked) < 40


@given(
    clients=st.integers(1, 30),
    seen=st.integers(0, 30),
    count=st.integers(1, 12),
    taken=st.integers(0, 4),
    seed=st.integers(0, 5),
)
def test_the_unseen_have_a_bounded_share_and_no_seat_stays_empty(clients, seen, count, taken, seed):
    X = np.zeros((clients + taken, 2))
    X[: min(seen, clients), 0] = 1.0
    ids, seated = np.arange(clients), np.arange(clients, clients + taken)
    new = explored(stream(seed, "test"), X, ids, count, seated)
    assert len(np.unique(new)) == len(new)
    assert not is_seen(X[new]).any()
    known = min(seen, clients)
    if count + taken == 1 and known:  # the only seat is theirs by chance
        assert len(new) <= min(1, clients - known)
        return
    share = max(1, int(0.25 * (count + taken))) - taken  # all who are seated are unseen here
    wanted = min(count, max(share, count - known, 0))
    assert len(new) == min(wanted, clients - known)
    assert min(count, clients) - len(new) <= known


def test_the_only_seat_of_a_round_is_explored_in_one_of_four():
    X = np.array([[1.0], [0.0], [0.0]])
    nobody = np.arange(0)
    given_to = [explored(stream(t, "one"), X, np.arange(3), 1, nobody) for t in range(2000)]
    times = sum(map(len, given_to))
    assert abs(times - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75)
    assert {*np.concatenate(given_to).tolist()} == {1, 2}


def test_one_seat_is_not_all_for_clients_that_never_answer():
    selector = FedCor(1, **{**SMALL, "warmup": 10}, probe_clients=8)
    choices, _ = play(selector, FakeFederation.example(12, silent=[0, 1]), 80)
    wasted = sum(int(chosen[0]) in (0, 1) for chosen in choices[40:])
    assert 1 <= wasted <= 20


def test_any_other_start_of_unseen_clients_would_flood_the_choice():
    """With random embeddings, or with the mean, the process prefers whom it knows nothing of."""
    changes = ["partition.clients=100", "partition.shards_per_client=2", "training.rounds=5"]
    changes += ["selectors.fedcor.probe_fraction=0.1", "selectors.fedcor.warmup=5"]
    simulation = build_simulation(load_experiment("digits", changes, "fedcor"), 1, DIGITS)
    *_, (_, state) = simulation.run(5)
    X, p = state.selector["embedding"], simulation.engine.population.weights
    seen = is_seen(X)
    assert 30 <= seen.sum() <= 50

    def unseen_picks(rows):
        Z = X.copy()
        Z[~seen] = rows
        picks = select(Z, p, np.ones(100), 1e-4, 10, np.arange(100)).clients
        return int((~seen)[picks].sum())

    shape = (int((~seen).sum()), X.shape[1])
    assert unseen_picks(stream(1, "test").standard_normal(shape) / np.sqrt(shape[1])) >= 5
    assert unseen_picks(X[seen].mean(axis=0)) >= 8
    assert unseen_picks(0.0) == 0  # hence the exploration


def test_unseen_clients_neither_starve_nor_flood_the_choice():
    """Ten are asked at a time of 400, a part of whom can be reached in each round."""
    selector = FedCor(8, **SMALL, probe_clients=10)
    federation = FakeFederation.example(400)
    state, share = selector.init(federation.population), []
    for t in range(40):
        there = np.sort(stream(t, "there").choice(400, 100, replace=False))
        federation.available = there
        before = state["embedding"]
        chosen, state = selector.select(state, federation)
        if t > selector.warmup:
            unseen = ~is_seen(state["embedding"] if t % 3 == 0 else before)
            enough = int((~unseen)[there].sum()) >= 8
            share += [unseen[chosen].mean()] if enough else []
        state = selector.observe(state, federation.train(chosen))
    assert len(share) > 20
    assert set(share) == {0.25}


def test_clients_that_appear_late_and_leave_for_good(tmp_path):
    """A trace says when clients exist: 0-29 from the start, 20-49 from round 10; 0-19 leave."""
    trace = tmp_path / "trace.csv"
    rows = [f"{k},0,9" for k in range(20)] + [f"{k},0," for k in range(20, 30)]
    rows += [f"{k},10," for k in range(30, 50)]
    trace.write_text("client,first,last\n" + "\n".join(rows) + "\n")
    made = fedcor.experiment(
        load_experiment("digits", ["training.rounds=30"], "fedcor"),
        selector=FedCor(6, **SMALL, probe_fraction=0.5),
        clients_per_round=6,
        faults=fedcor.Faults(availability=str(trace)),
    )
    late, first_seen = [], {}
    for record, state in fedcor.simulate(made):
        chosen = np.array(record.selected)
        assert (chosen < 30).all() if record.round < 10 else (chosen >= 20).all()
        seen = is_seen(state.selector["embedding"])
        for client in np.flatnonzero(seen).tolist():
            first_seen.setdefault(client, record.round)
        late += chosen[chosen >= 30].tolist()
    assert len(set(late)) > 10  # most of those who came late had a turn
    assert all(round >= 10 for client, round in first_seen.items() if client >= 30)
    assert np.isfinite(state.selector["embedding"]).all()


def test_who_joins_has_the_prior():
    selector, small = FedCor(3, **SMALL, probe_clients=6), FakeFederation.example(12)
    _, state = play(selector, small, 6)
    joined = selector.join(state, FakeFederation.example(20).population)
    assert not joined["embedding"][12:].any()
    assert np.isnan(joined["samples"][:, 12:]).all()
    everyone = FedCor(3, **SMALL)
    _, state = play(everyone, small, 6)
    mean = everyone.join(state, FakeFederation.example(20).population)["embedding"]
    assert np.array_equal(mean[12:], np.tile(state["embedding"].mean(axis=0), (8, 1)))


def test_the_reasons_say_who_was_explored():
    made = fedcor.experiment(
        load_experiment("digits", ["training.rounds=7"], "fedcor"),
        selector=FedCor(10, **SMALL, probe_clients=11),
    )
    found = explanation(run_in_memory(made, 1), 5)
    new = [row for row in found["chosen"] if row["explored"]]
    assert len(new) == 2
    for row in new:
        assert row["parts"]["others"] == 0
        assert "explored, since none of its loss changes was ever measured" in row["sentence"]
    assert "explored" in found["reasons"]


@pytest.mark.parametrize(
    "rules", [fedcor.Rules(), fedcor.Rules(at_least={"site": 2})], ids=["free", "rules"]
)
def test_runners_up_are_of_those_who_could_have_had_the_place(rules):
    made = fedcor.experiment(
        load_experiment("digits", ["training.rounds=12"], "fedcor"),
        selector=FedCor(10, **SMALL, probe_clients=11, beta=0.5),
        tags={"site": {"a": "0-24", "b": "25-49"}},
        rules=rules,
    )
    rivals = 0
    for record, state in fedcor.simulate(made):
        for place, explored_one in enumerate((record.why or {}).get("explored", ())):
            other, margin = (record.why[name][place] for name in ("runner_up", "margin"))
            assert (other is None) == (margin is None)
            if explored_one:
                assert other is None
            elif other is not None:
                assert is_seen(state.selector["embedding"])[int(other)]
                rivals += 1
    assert rivals > 20


@settings(deadline=None, max_examples=20)
@given(asked=st.integers(1, 40), tries=st.integers(1, 2), seed=st.integers(0, 3))
def test_nothing_is_foretold_of_clients_that_were_never_seen(asked, tries, seed):
    selector = FedCor(3, **{**SMALL, "samples_per_refit": tries}, probe_clients=asked)
    federation = FakeFederation.example(30, seed=seed)
    state = selector.init(federation.population)
    for t in range(7):
        before = state
        chosen, state = selector.select(state, federation)
        details = selector.details(before, state, federation, chosen)
        known = is_seen(before["embedding"]) if t else np.zeros(30, dtype=bool)
        most = sum(int(known[one].sum()) for one in federation.probed)
        assert sum(details.get("forecast_clients", [0])) <= most
        federation.probed.clear()
        state = selector.observe(state, federation.train(chosen))
