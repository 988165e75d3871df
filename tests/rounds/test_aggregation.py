"""A federated optimiser in the simulator: its state, candidates, corrections, buffers and bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedcor
from fedcor.core.errors import FedcorError
from fedcor.core.types import Population
from fedcor.data.datasets import load
from fedcor.rounds.aggregation import find_corrections, init_optimiser, join_optimiser, state_bytes
from fedcor.rounds.ledger import ANSWER_BYTES, Ledger
from fedcor.runs.record import read_checkpoint, read_run
from fedcor.selectors.base import StatelessSelector
from fedcor.simulation.build import build_simulation

DIGITS = load("digits")
CHOSEN = [3, 8, 20]


@dataclass(frozen=True)
class Remembering(fedcor.FedAvg):
    """Remembers the last update of each client, and counts the rounds."""

    def init(self, population, model):
        return {"rounds": np.array(0), "start": model.copy()}

    def step(self, state, delivery):
        model = delivery.model + 1.5 * delivery.mean
        seen = dict(zip(delivery.clients.tolist(), delivery.updates, strict=True))
        updates = {f"update/{client}": update for client, update in seen.items()}
        return model, {**state, **updates, "rounds": np.array(state["rounds"] + 1)}


@dataclass(frozen=True)
class Correcting(fedcor.FedAvg):
    """Each client adds the same number to all gradients: its id, times `scale`."""

    scale: float = 0.1
    extra_down: int = 0
    extra_up: int = 0

    def init(self, population, model):
        return {"size": np.array(len(model))}

    def corrections(self, state, clients):
        return self.scale * np.repeat(clients[:, None].astype(float), int(state["size"]), axis=1)


@dataclass(frozen=True)
class Scripted(StatelessSelector):
    """Does what a test says: `script(federation) -> choice`."""

    script: object

    def select(self, state, federation):
        return np.asarray(self.script(federation)), state


def simulation(optimiser, script=lambda _: CHOSEN, **changes):
    experiment = fedcor.experiment("digits", optimiser=optimiser, selector="random", **changes)
    made = build_simulation(experiment, 1, DIGITS)
    return dataclasses.replace(made, selector=Scripted(script))


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


# --- the state ------------------------------------------------------------------------------------


def test_the_state_follows_the_rounds():
    s = simulation(Remembering(), lambda f: [CHOSEN[f.round], 5])
    assert np.array_equal(s.start.optimiser["start"], s.engine.initial_model)
    before, update = s.start.model, {}
    for t, (_, state) in enumerate(s.run(3)):
        results = s.engine.train(before, [CHOSEN[t], 5], t, s.learning_rate.at(t))
        update |= dict(zip([CHOSEN[t], 5], (results - before).numpy(), strict=True))
        assert state.optimiser["rounds"] == t + 1
        found = {key: a for key, a in state.optimiser.items() if key.startswith("update/")}
        assert same(found, {f"update/{client}": change for client, change in update.items()})
        expected = before + 1.5 * (results - before).mean(dim=0)
        assert torch.allclose(state.model, expected, atol=1e-6)
        before = state.model


def test_the_state_of_a_candidate_is_kept_only_if_the_candidate_is_chosen():
    def curious(choice):
        def script(federation):
            federation.loss_changes(np.array([4, 5]))
            federation.loss_changes(np.array([1, 2]))
            return choice

        return script

    for choice in ([4, 5], [1, 2], [7, 9]):
        asked = [state for _, state in simulation(Remembering(), curious(choice)).run(2)]
        quiet = [state for _, state in simulation(Remembering(), lambda _, c=choice: c).run(2)]
        for one, other in zip(asked, quiet, strict=True):
            assert torch.equal(one.model, other.model)
            assert same(one.optimiser, other.optimiser)
        assert asked[-1].optimiser["rounds"] == 2


def test_a_tried_optimiser_is_called_once_for_a_candidate_and_not_again_for_its_adoption():
    calls = []

    class Counting(Remembering):
        def step(self, state, delivery):
            calls.append(delivery.clients.tolist())
            return super().step(state, delivery)

    def script(federation):
        for selection in ([3, 4], [4, 3], [1, 2]):
            federation.loss_changes(np.array(selection))
        return [3, 4]

    list(simulation(Counting(), script).run(1))
    assert calls == [[3, 4], [1, 2]]


def test_nobody_delivers_and_the_state_stays():
    s = simulation(Remembering(), faults={"dropout": 1.0})
    ((_, state),) = s.run(1)
    assert same(state.optimiser, s.start.optimiser)


@pytest.mark.parametrize("selector", ["random", "fedcor"])
def test_a_resumed_run_equals_a_whole_one(selector, tmp_path):
    experiment = fedcor.experiment(
        "digits", optimiser=Remembering(), selectors={"fedcor": {"warmup": 4}}
    )
    fedcor.run(experiment, selector, out=tmp_path / "whole", rounds=14)
    fedcor.run(experiment, selector, out=tmp_path / "parts", rounds=6)
    fedcor.run(experiment, selector, out=tmp_path / "parts", rounds=14, resume=True)
    whole, parts = (
        [{**row, "seconds": 0} for row in read_run(tmp_path / name).rounds]
        for name in ("whole", "parts")
    )
    assert whole == parts
    one, other = (read_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert same({**one, "known": 0}, {**other, "known": 0})
    assert one["optimiser/rounds"] == 14


def test_a_line_says_how_much_is_remembered_if_anything_is(tmp_path):
    fedcor.run("digits", "random", out=tmp_path / "fedavg", rounds=2)
    assert "memory_bytes" not in read_run(tmp_path / "fedavg").rounds[0]
    experiment = fedcor.experiment("digits", optimiser=Remembering())
    fedcor.run(experiment, "random", out=tmp_path / "mine", rounds=2)
    first, _ = read_run(tmp_path / "mine").rounds
    assert first["memory_bytes"] == 8 + 11 * 4 * 2410
    found = fedcor.load(tmp_path)
    assert "random" in repr(found)
    assert found.to_frame()["accuracy"].notna().all()
    assert state_bytes({}) == 0


# --- what an optimiser is given -------------------------------------------------------------------


def test_a_delivery_says_who_did_how_much_and_cannot_be_written_to():
    seen = []

    class Curious(fedcor.FedAvg):
        def step(self, state, delivery):
            seen.append(delivery)
            return super().step(state, delivery)

    faults = {"stragglers": 0.9}
    changes = {"partition": {"kind": "dirichlet", "minimum_size": 3}, "faults": faults}
    s = simulation(Curious(weighted=True), lambda _: [8, 3, 3, 20], **changes)
    ((_, state),) = s.run(1)
    (delivery,) = seen
    sizes, times = s.engine.population.sizes[CHOSEN], np.array([2, 1, 1])
    assert delivery.clients.tolist() == CHOSEN
    assert np.allclose(delivery.weights, sizes * times / (sizes * times).sum())
    steps = s.faults.steps(1, 0, 50, s.engine.local_training.local_steps)
    assert delivery.steps.tolist() == steps[CHOSEN].tolist()
    assert len(set(delivery.steps.tolist())) > 1
    assert (delivery.round, delivery.learning_rate) == (0, s.learning_rate.at(0))
    assert np.allclose(delivery.mean, delivery.weights @ delivery.updates, atol=1e-6)
    assert np.array_equal(state.model, delivery.model + delivery.mean)
    arrays = [delivery.model, delivery.clients, delivery.weights, delivery.steps]
    for array in (*arrays, delivery.mean, delivery.updates):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.norm(x.flatten(1)))


def test_buffers_of_a_model_become_their_mean_whatever_the_optimiser_does():
    sizes = []

    class Wild(Correcting):
        """Would drive every variance below zero."""

        def step(self, state, delivery):
            sizes.append((delivery.model.shape, delivery.mean.shape, delivery.updates.shape))
            return delivery.model - 1e3, state

    s = simulation(Wild(), model=Normalised)
    vector = s.engine.vector
    parameters, buffers = slice(vector.trained), slice(vector.trained, vector.size)
    assert vector.size == vector.trained + 128
    ((_, state),) = s.run(1)
    assert sizes == [((vector.trained,), (vector.trained,), (3, vector.trained))]
    start = s.engine.initial_model
    assert torch.allclose(state.model[parameters], start[parameters] - 1e3)
    corrections = torch.tensor(CHOSEN)[:, None].expand(3, vector.trained) * 0.1
    rate = s.learning_rate.at(0)
    results = s.engine.train(start, CHOSEN, 0, rate, corrections=corrections.contiguous())
    assert torch.allclose(state.model[buffers], results[:, buffers].mean(dim=0), atol=1e-6)
    assert (state.model[-64:] >= 0).all()
    assert not torch.equal(state.model[buffers], start[buffers])


# --- corrections ----------------------------------------------------------------------------------


def test_clients_train_with_the_corrections_of_the_state():
    s = simulation(Correcting(), lambda f: f.loss_changes(np.array([8, 30])) is None or CHOSEN)
    federation = s.open_round(s.start)
    federation.loss_changes(np.array([8, 30]))
    federation.train(np.array(CHOSEN))
    for client in (8, 30, 3, 20):
        found = federation.results.of(np.array([client]))[0]
        e = torch.full((1, s.engine.vector.trained), 0.1 * client)
        alone = s.engine.train(s.start.model, [client], 0, s.learning_rate.at(0), corrections=e)
        assert torch.equal(found, alone[0])
    assert [client for client in range(50) if client in federation.results] == [3, 8, 20, 30]


@pytest.mark.parametrize(
    ("corrections", "message"),
    [
        (lambda state, clients: np.zeros(3), "a float64 array of shape .3,., not .* shape .2, 4."),
        (lambda state, clients: None, "returned a NoneType"),
        (lambda state, clients: np.full((2, 4), np.nan), "corrections that are not finite"),
        (lambda state, clients: np.zeros((2, 4), dtype=int), "a int64 array"),
        (lambda state, clients: state["none"], "failed in corrections: KeyError: 'none'.*line"),
    ],
)
def test_a_mistake_in_corrections_is_told(corrections, message):
    mine = type("Mine", (fedcor.FedAvg,), {"corrections": staticmethod(corrections)})()
    with pytest.raises(FedcorError, match=f"round 7: the optimiser Mine .*{message}"):
        find_corrections(mine, {}, np.array([1, 2]), 4, round=7)


def test_a_mistake_in_init_or_join_is_told():
    class Mine(fedcor.FedAvg):
        def init(self, population, model):
            model += 1

        def join(self, state, population):
            return {"clients": population.count}

    population = Population(np.array([3, 4]))
    with pytest.raises(FedcorError, match="the optimiser Mine failed in init: .*read-only"):
        init_optimiser(Mine(), population, np.zeros(3))
    with pytest.raises(FedcorError, match="the optimiser Mine's state 'clients' is not a plain"):
        join_optimiser(Mine(), {}, population)
    state = {"kept": np.zeros(1)}
    assert join_optimiser(fedcor.FedAvg(), state, population) is state


# --- bytes ----------------------------------------------------------------------------------------


def test_further_vectors_are_billed_to_clients_that_train_and_to_no_others():
    def script(federation):
        federation.losses(np.array([1, 2]))  # two models, two answers, no vectors
        federation.loss_changes(np.array([1, 5]))  # trains 1 and 5, asks all 50 twice
        return [1, 5, 9]  # trains 9

    bills = {}
    for down, up in ((0, 0), (1, 0), (2, 3)):
        s = simulation(Correcting(False, 0.0, down, up), script)
        ((record, _),) = s.run(1)
        bills[down, up] = record.bytes_down, record.bytes_up
    M = s.engine.model_bytes
    assert bills[0, 0] == (2 * 50 * M, 3 * M + 2 * 50 * ANSWER_BYTES)
    assert bills[1, 0] == (bills[0, 0][0] + 3 * M, bills[0, 0][1])
    assert bills[2, 3] == (bills[0, 0][0] + 6 * M, bills[0, 0][1] + 9 * M)


def test_a_vector_to_a_client_that_drops_out_is_spent():
    s = simulation(Correcting(False, 0.0, 1, 1), faults={"dropout": 1.0})
    ((record, _),) = s.run(1)
    assert (record.bytes_down, record.bytes_up) == (2 * 3 * s.engine.model_bytes, 0)


def test_a_vector_has_as_many_numbers_as_there_are_parameters():
    s = simulation(Correcting(False, 0.0, 1, 1), model=Normalised)
    ((record, _),) = s.run(1)
    both = 4 * (s.engine.vector.size + s.engine.vector.trained)
    assert (record.bytes_down, record.bytes_up) == (3 * both, 3 * both)


def test_the_ledger_counts_vectors():
    ledger = Ledger(clients=4, model_bytes=100)
    ledger.vectors(sent=3, received=2, vector_bytes=80)
    assert (ledger.bytes_down, ledger.bytes_up, ledger.questions) == (240, 160, 0)
