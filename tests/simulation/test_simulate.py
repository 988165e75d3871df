"""The round loop: bytes counted by hand, pairing, faults, and bad numbers kept from the model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.data.datasets import load
from fedcor.rounds.ledger import ANSWER_BYTES, CURRENT, Ledger
from fedcor.rounds.loss_screening import screen_losses
from fedcor.selectors.base import StatelessSelector
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment
from fedcor.simulation.faults import Faults
from fedcor.simulation.schedules import LearningRate

DIGITS = load("digits")
N, C = 50, 10


def simulation(selector="random", *changes, seed=1):
    experiment = load_experiment("digits", [*changes, "selectors.fedcor.warmup=3"], selector)
    return build_simulation(experiment, seed, DIGITS)


def records(selector, rounds, *changes, seed=1):
    return [record for record, _ in simulation(selector, *changes, seed=seed).run(rounds)]


@dataclasses.dataclass(frozen=True)
class Scripted(StatelessSelector):
    """Does what a test says: `script(federation) -> choice`."""

    script: object

    def select(self, state, federation):
        return np.asarray(self.script(federation)), state


def scripted(script, *changes):
    return dataclasses.replace(simulation("random", *changes), selector=Scripted(script))


# --- the ledger -----------------------------------------------------------------------------------


def test_random_moves_c_models_down_and_c_up():
    model = simulation().engine.model_bytes
    assert model == 4 * (64 * 32 + 32 + 32 * 10 + 10)
    for record in records("random", 3):
        assert (record.bytes_down, record.bytes_up, record.probed) == (C * model, C * model, 0)


def test_fmnist_2spc_by_hand():
    """Every byte at the paper's size: 52,500 parameters, 100 clients, 5 chosen, warm-up, refit."""
    M, n, c = 4 * 52_500, 100, 5
    random = build_simulation(load_experiment("fmnist-2spc", selector="random"), 1)
    for record, _ in random.run(2):
        assert (record.bytes_down, record.bytes_up) == (c * M, c * M)

    changes = [
        "selectors.fedcor.warmup=2",
        "selectors.fedcor.interval=3",
        "selectors.fedcor.samples_per_refit=2",
    ]
    fedcor = build_simulation(load_experiment("fmnist-2spc", changes, "fedcor"), 1)
    rounds = [record for record, _ in fedcor.run(4)]
    # Round 0: the first model to all, which serves the training too; the candidate to all; all
    # answer for both.
    assert rounds[0].bytes_down == n * M + n * M
    assert rounds[0].bytes_up == c * M + 2 * n * ANSWER_BYTES
    # Round 1: the candidate became the model, so all have it, and their losses are known. Only the
    # new candidate is sent.
    assert rounds[1].bytes_down == n * M
    assert rounds[1].bytes_up == c * M + n * ANSWER_BYTES
    # Round 2: an ordinary round, and again everyone holds the model already.
    assert (rounds[2].bytes_down, rounds[2].bytes_up, rounds[2].probed) == (0, c * M, 0)
    # Round 3, a refit: the model to all, two candidates to all; two trainings and the round's own,
    # each client once.
    assert rounds[3].bytes_down == 3 * n * M
    assert rounds[3].probed == 3 * n
    trainings = (rounds[3].bytes_up - 3 * n * ANSWER_BYTES) / M
    rng = stream(1, "select", 3)
    tried = {k for _ in range(2) for k in rng.choice(n, size=c, replace=False).tolist()}
    assert trainings == len(tried | set(rounds[3].selected))


def test_a_warm_up_after_an_unknown_model_pays_for_the_model_where_it_is_not_known():
    M = simulation().engine.model_bytes

    def script(federation):
        choice = np.arange(C)
        if federation.round == 1:
            federation.loss_changes(choice)
        return choice

    first, second = (record for record, _ in scripted(script).run(2))
    assert (first.bytes_down, first.bytes_up) == (C * M, C * M)
    assert second.bytes_down == N * M + N * M  # the model that round 0 made is known to nobody
    assert second.bytes_up == C * M + 2 * N * ANSWER_BYTES


def test_asking_costs_the_model_once_and_the_answer_once():
    M = simulation().engine.model_bytes
    spent = []

    def script(federation):
        for ask in (
            lambda: federation.losses(np.array([1, 2, 3])),  # three models, three answers
            lambda: federation.losses(np.array([3, 2])),  # known already: nothing
            lambda: federation.losses(np.array([3, 4])),  # one of them new
            # the model to the rest, the candidate to all
            lambda: federation.loss_changes(np.array([1, 2])),
            lambda: federation.loss_changes(np.array([2, 1])),  # the same candidate: nothing
            # one more training, one more candidate
            lambda: federation.loss_changes(np.array([2, 5])),
        ):
            before = federation.ledger.bytes_down, federation.ledger.bytes_up
            ask()
            spent.append(
                (federation.ledger.bytes_down - before[0], federation.ledger.bytes_up - before[1])
            )
        return [1, 2]

    (record,) = (record for record, _ in scripted(script).run(1))
    a = ANSWER_BYTES
    assert spent == [
        (3 * M, 3 * a),
        (0, 0),
        (M, a),
        ((N - 4) * M + N * M, 2 * M + (N - 4) * a + N * a),
        (0, 0),
        (N * M, M + N * a),
    ]
    # Choosing what was tried costs nothing more.
    assert (record.bytes_down, record.bytes_up) == tuple(np.sum(spent, axis=0))


def test_a_client_that_trained_and_is_asked_pays_the_answer_only():
    spent = []

    def script(federation):
        federation.train(np.array([7]))
        before = federation.ledger.bytes_down, federation.ledger.bytes_up
        federation.losses(np.array([7]))
        spent.append(
            (federation.ledger.bytes_down - before[0], federation.ledger.bytes_up - before[1])
        )
        return [7]

    list(scripted(script).run(1))
    assert spent == [(0, ANSWER_BYTES)]


def test_power_of_choice_pays_for_its_candidates():
    M = simulation().engine.model_bytes
    for record in records("power_of_choice", 3):
        # The chosen are among the candidates and have the model.
        assert record.bytes_down == 2 * C * M
        assert record.bytes_up == C * M + 2 * C * ANSWER_BYTES
        assert record.probed == 2 * C


def test_the_ledger_forgets_candidates_and_keeps_the_adopted():
    everyone = np.ones(4, dtype=bool)
    ledger = Ledger(4, 100)
    candidate, other = 1, 2
    ledger.send(candidate, np.array([0, 1]), everyone)
    ledger.send(other, np.array([3]), everyone)
    ledger.close_round(candidate)
    assert ledger.holders(CURRENT).tolist() == [True, True, False, False]
    ledger.close_round(None)
    assert not ledger.holders(CURRENT).any()


# --- what a question means ------------------------------------------------------------------------


def test_loss_changes_are_those_of_the_round_that_follows():
    """Measured before the choice, they are the change of all losses in the round, bit for bit."""
    seen = {}

    def script(federation):
        if federation.round == 0:
            seen["before"] = federation.losses(federation.available)
            seen["changes"] = federation.loss_changes(np.array([3, 8, 20]))
        else:
            seen["after"] = federation.losses(federation.available)
        return [20, 3, 8]

    list(scripted(script).run(2))
    assert np.array_equal(seen["changes"], seen["after"] - seen["before"])


def test_asking_moves_no_model():
    quiet = [state.model for _, state in scripted(lambda f: [1, 2]).run(3)]

    def curious(federation):
        federation.loss_changes(np.array([4, 5]))
        federation.losses(np.array([9]))
        return [1, 2]

    asking = [state.model for _, state in scripted(curious).run(3)]
    assert all(torch.equal(a, b) for a, b in zip(quiet, asking, strict=True))


def test_a_client_drawn_twice_counts_twice():
    outcomes = list(scripted(lambda f: [1, 1, 2]).run(1))
    s = simulation()
    results = s.engine.train(s.engine.initial_model, [1, 2], 0, 0.05)
    model = s.engine.initial_model
    expected = model + torch.tensor([2 / 3, 1 / 3]) @ (results - model)
    assert torch.equal(outcomes[0][1].model, expected)
    assert outcomes[0][0].participated == [1, 2]


def test_weighting_by_size_is_an_option():
    changes = ('partition.kind="dirichlet"', "partition.minimum_size=3", "optimiser.weighted=true")
    s = scripted(lambda f: [1, 2], *changes)
    model = next(iter(s.run(1)))[1].model
    results = s.engine.train(s.engine.initial_model, [1, 2], 0, 0.05)
    sizes = s.engine.population.sizes[[1, 2]]
    assert sizes[0] != sizes[1]
    weights = torch.tensor(sizes / sizes.sum(), dtype=results.dtype)
    assert torch.allclose(model, weights @ results, atol=1e-6)


def test_the_outcome_brings_losses_and_updates():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watching(Scripted):
        def observe(self, state, outcome):
            seen.append(outcome)
            return state

    s = dataclasses.replace(simulation(), selector=Watching(lambda f: [6, 4]))
    state = next(iter(s.run(1)))[1]
    (outcome,) = seen
    assert outcome.participated.tolist() == [4, 6]
    assert outcome.losses == pytest.approx(
        s.engine.losses(s.engine.initial_model, np.array([4, 6]))
    )
    moved = state.model - s.engine.initial_model
    assert np.allclose(outcome.updates.mean(axis=0), moved.numpy(), atol=1e-7)


def test_a_choice_of_someone_who_is_not_there_is_an_error():
    with pytest.raises(FedcorError, match="not available"):
        list(scripted(lambda f: [N]).run(1))


@pytest.mark.parametrize(
    ("choice", "refused"),
    [
        ([1.5], "not a list of client ids"),
        ([[1, 2]], "not a list of client ids"),
        ([-1], "not available"),
        (3, "not a list"),
    ],
)
def test_a_choice_that_is_no_choice_is_an_error(choice, refused):
    with pytest.raises(FedcorError, match=refused):
        list(scripted(lambda f: choice).run(1))


def test_a_selector_that_fails_is_named_with_its_round_and_line():
    with pytest.raises(
        FedcorError,
        match=r"round 0: the selector failed in select: ZeroDivisionError.*test_simulate.py, line",
    ):
        list(scripted(lambda f: 1 / 0).run(1))


@pytest.mark.parametrize(
    "state", [None, [1], {"a": 3}, {"a": np.array([object()])}, {1: np.zeros(1)}]
)
def test_a_state_that_no_checkpoint_takes_is_an_error(state):
    @dataclasses.dataclass(frozen=True)
    class Careless(Scripted):
        def observe(self, _, outcome):
            return state

    with pytest.raises(FedcorError, match="state"):
        list(dataclasses.replace(simulation(), selector=Careless(lambda f: [1])).run(1))


def test_choosing_nobody_is_a_round_without_participants():
    (record, state), *_ = scripted(lambda f: []).run(1)
    assert record.participated == []
    assert state.round == 1


# --- pairing --------------------------------------------------------------------------------------


def test_selectors_with_one_seed_meet_the_same_federation():
    one, other = simulation("random"), simulation("fedcor")
    assert torch.equal(one.engine.initial_model, other.engine.initial_model)
    held, same = one.engine.store.training([0]), other.engine.store.training([0])
    assert torch.equal(held.x, same.x)
    assert torch.equal(held.y, same.y)
    assert np.array_equal(one.engine.population.sizes, other.engine.population.sizes)
    assert not torch.equal(
        one.engine.initial_model, simulation("random", seed=2).engine.initial_model
    )
    changes = ("faults.availability=0.5",)
    for t in range(5):
        a, b = (
            s.open_round(dataclasses.replace(s.start, round=t)).available
            for s in (simulation("random", *changes), simulation("afl", *changes))
        )
        assert np.array_equal(a, b)


def test_the_same_client_in_the_same_round_from_the_same_model_gives_the_same_bits():
    """Whoever trains beside it, chosen directly or tried out first."""
    a = scripted(lambda f: [3, 5, 9])
    results = a.open_round(a.start)
    results.train(np.array([3, 5, 9]))
    b = scripted(lambda f: [9])
    others = b.open_round(b.start)
    others.loss_changes(np.array([9, 30]))
    others.train(np.array([9, 1, 2, 3]))
    nine = np.array([9])
    assert torch.equal(results.results.of(nine), others.results.of(nine))
    assert torch.equal(results.results.of(nine - 6), others.results.of(nine - 6))


def test_fedcors_warm_up_is_randoms_first_rounds():
    """Both draw uniformly from the round's stream, so until FedCor has learned, they are equal."""
    random, fedcor = records("random", 3), records("fedcor", 3)
    assert [r.selected for r in random] == [r.selected for r in fedcor]
    assert [r.test_accuracy for r in random] == [r.test_accuracy for r in fedcor]


def test_a_run_repeats_bit_for_bit():
    one, two = records("fedcor", 6), records("fedcor", 6)
    assert [dataclasses.replace(r, seconds=0) for r in one] == [
        dataclasses.replace(r, seconds=0) for r in two
    ]


# --- faults and bad numbers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "selector", ["random", "afl", "power_of_choice", "fedcor", "complement", "proxy", "full"]
)
def test_every_selector_lives_through_faults(selector):
    faults = ("faults.availability=0.6", "faults.dropout=0.3", "faults.stragglers=0.5")
    rounds = records(selector, 8, *faults)
    assert len(rounds) == 8
    lost = any(len(r.participated) < len(r.selected) for r in rounds)
    assert lost or selector == "power_of_choice"  # which avoids the dead: they do not answer
    assert all(set(r.participated) <= set(r.selected) for r in rounds)
    assert all(np.isfinite(r.test_loss) for r in rounds)


def test_a_round_that_nobody_survives_leaves_the_model_and_what_is_known():
    s = dataclasses.replace(scripted(lambda f: [1, 2]), faults=Faults(dropout=1.0))
    (record, state), *_ = s.run(1)
    assert record.participated == []
    assert record.bytes_down == 2 * s.engine.model_bytes  # it was sent
    assert record.bytes_up == 0  # and nothing came back
    assert torch.equal(state.model, s.engine.initial_model)
    assert not state.holders.any()


def test_stragglers_deliver_what_they_had_time_for():
    s = dataclasses.replace(simulation(), faults=Faults(stragglers=0.9))
    federation = s.open_round(s.start)
    federation.train(np.arange(C))
    steps = s.faults.steps(1, 0, N, s.engine.local_training.local_steps)
    assert len(set(steps[:C].tolist())) > 1
    for k in range(C):
        alone = s.engine.train(
            s.engine.initial_model, [k], 0, s.learning_rate.at(0), steps=[int(steps[k])]
        )[0]
        assert torch.equal(federation.results.of(np.array([k]))[0], alone)


def test_the_dead_neither_answer_nor_deliver():
    s = dataclasses.replace(simulation(), faults=Faults(dropout=0.5))
    federation = s.open_round(s.start)
    dead = s.faults.dropped(1, 0, N)
    losses = federation.losses(np.arange(N))
    assert np.array_equal(np.isnan(losses), dead)
    changes = federation.loss_changes(np.arange(C))
    assert np.array_equal(np.isnan(changes), dead)
    assert (
        federation.ledger.bytes_up
        == int((~dead).sum()) * 2 * ANSWER_BYTES + int((~dead[:C]).sum()) * s.engine.model_bytes
    )


def test_the_dead_are_billed_once_a_round():
    s = dataclasses.replace(simulation(), faults=Faults(dropout=0.5))
    federation = s.open_round(s.start)
    everyone, M = np.arange(N), s.engine.model_bytes
    federation.losses(everyone)
    assert (federation.ledger.bytes_down, federation.ledger.questions) == (N * M, N)
    federation.losses(np.array([3, 3, 3]))
    federation.losses(everyone)
    federation.train(everyone)
    assert (federation.ledger.bytes_down, federation.ledger.questions) == (N * M, N)


def test_unusable_reported_losses_are_counted(monkeypatch):
    s = simulation("afl")
    monkeypatch.setattr(s.engine, "losses", lambda model, clients: np.full(len(clients), np.nan))
    (record, _), *_ = s.run(1)
    assert record.refused == C


def test_updates_that_are_not_finite_are_refused_and_counted(monkeypatch):
    s = scripted(lambda f: [1, 2, 3])
    train = s.engine.train

    def poisoned(model, clients, *rest, **options):
        results = train(model, clients, *rest, **options)
        results[clients.index(2), 5] = float("nan")
        return results

    monkeypatch.setattr(s.engine, "train", poisoned)
    (record, state), *_ = s.run(1)
    assert record.participated == [1, 3]
    assert record.refused == 1
    assert torch.isfinite(state.model).all()


def test_a_result_too_far_from_the_model_for_its_type_is_refused(monkeypatch):
    s = scripted(lambda f: [1, 2, 3])
    s.engine.initial_model[5] = -2e38

    def far(model, clients, *_, **__):
        results = model.repeat(len(clients), 1)
        results[clients.index(2), 5] = 3e38  # finite, but 5e38 away from the model
        return results

    monkeypatch.setattr(s.engine, "train", far)
    (record, state), *_ = s.run(1)
    assert record.participated == [1, 3]
    assert torch.isfinite(state.model).all()


def test_losses_that_are_absurd_are_refused_and_counted(monkeypatch):
    s = simulation()
    honest = s.engine.losses
    lies = np.array([np.nan, np.inf, -np.inf, 1e30])
    monkeypatch.setattr(
        s.engine,
        "losses",
        lambda model, clients: np.where(clients < 4, lies[clients % 4], honest(model, clients)),
    )
    federation = s.open_round(s.start)
    answers = federation.losses(np.arange(6))
    assert np.isnan(answers[:4]).all()
    assert np.isfinite(answers[4:]).all()
    assert federation.refused == 4


def test_screening_keeps_what_is_usable():
    clean, refused = screen_losses(np.array([0.0, -3.0, 1e6, 1.1e6, np.nan, np.inf]))
    assert clean[:3].tolist() == [0.0, -3.0, 1e6]
    assert np.isnan(clean[3:]).all()
    assert refused == 3


def test_learning_rate_is_halved_at_its_milestones():
    rate = LearningRate(0.005, (150, 300), 0.5)
    assert [rate.at(t) for t in (0, 149, 150, 299, 300, 499)] == [
        0.005,
        0.005,
        0.0025,
        0.0025,
        0.00125,
        0.00125,
    ]


class Cosine:
    def at(self, round):
        return 0.05 * (1 + np.cos(round))


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.1, [0.1, 0.1]),
        (lambda round: 0.1 / (1 + round), [0.1, 0.05]),
        (lambda round: torch.tensor(0.5), [0.5, 0.5]),
        (Cosine(), [0.1, 0.05 * (1 + np.cos(1))]),
        (LearningRate(0.2, (1,), 0.5), [0.2, 0.1]),
    ],
    ids=["number", "function", "torch", "object", "milestones"],
)
def test_learning_rates_are_numbers_functions_or_objects(rate, expected):
    run = dataclasses.replace(simulation(), learning_rate=rate)
    assert [record.learning_rate for record, _ in run.run(2)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (lambda round: 0.1 - 0.1 * round, "must give a number above 0 .* gave 0 in round 1"),
        (lambda round: float("nan") if round else 1, "gave nan in round 1"),
        (lambda round: [0.1][round], "failed in round 1: IndexError"),
    ],
)
def test_a_learning_rate_that_cannot_work_is_refused_in_its_round(rate, message):
    rounds = dataclasses.replace(simulation(), learning_rate=rate).run(3)
    next(rounds)
    with pytest.raises(FedcorError, match=message):
        next(rounds)
    with pytest.raises(FedcorError, match="learning_rate = None"):
        dataclasses.replace(simulation(), learning_rate=None)
