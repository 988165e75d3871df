"""Experiments of the simulator on a grid in memory: the same records, whoever aggregates."""

from __future__ import annotations

import pickle

import pytest
from flower_grid import Correcting, Momentum, Remembering, logged
from flower_runs import CLIENTS, ROUNDS, end_of, experiment, on_flower
from torch import nn

import fedcor
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.data.client_data import SyntheticPopulation
from fedcor.flower import bridge
from fedcor.flower.bridge import run_on_flower
from fedcor.optimisers.averaging import FedAvg, FedProx
from fedcor.runs.record import read_checkpoint, read_run
from fedcor.runs.runner import run

# fmt: off
SAME = (
    "round", "selected", "participated", "probed", "refused", "learning_rate",
    "test_accuracy", "test_loss", "why",
)
# fmt: on


class Killed(BaseException):
    """As kill -9: nothing of ours gets to clean up in between."""


class Normalised(nn.Sequential):
    """Has float buffers, which no optimiser sees."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("optimiser", "selector", "changes"),
    [
        (FedAvg(), "fedcor", {}),
        (FedAvg(weighted=True), "random", {}),
        (FedProx(mu=0.5), "random", {}),
        (Momentum(), "fedcor", {}),
        (Momentum(weighted=True), "power_of_choice", {}),
        (Remembering(), "fedcor", {}),
        (Remembering(), "random", {"model": Normalised}),
        (FedAvg(), "oort", {}),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_flower_repeats_the_simulator_to_the_last_bit(optimiser, selector, changes, tmp_path):
    one = experiment(optimiser, selector, **changes)
    run(one, 1, tmp_path / "simulator")
    rounds = on_flower(one, tmp_path / "flower")
    simulated = read_run(tmp_path / "simulator").rounds
    assert len(simulated) == len(rounds) == ROUNDS
    for ours, theirs in zip(simulated, rounds, strict=True):
        for key in SAME:
            assert theirs[key] == ours[key], key
        assert theirs.get("memory_bytes") == ours.get("memory_bytes")
    arrays = read_checkpoint(tmp_path / "simulator")
    model, state = end_of(tmp_path / "flower")
    assert model.tobytes() == arrays["model"].tobytes()
    kept = {name for name in arrays if name.startswith("optimiser/")}
    assert {f"optimiser/{name}" for name in state} == kept
    for name, array in state.items():
        assert array.tobytes() == arrays[f"optimiser/{name}"].tobytes(), name


def test_clients_that_load_their_data_and_probes_of_a_sample_repeat_the_simulator(tmp_path):
    made = fedcor.Experiment(
        SyntheticPopulation(CLIENTS, features=5, classes=3, samples=10, tested=40),
        model="logistic",
        rounds=ROUNDS,
        batch_size=8,
        local_steps=2,
        learning_rate=0.05,
        selector=fedcor.FedCor(2, warmup=2, interval=2, refit_steps=5, probe_clients=3),
    )
    run(made, 1, tmp_path / "simulator")
    ours, theirs = read_run(tmp_path / "simulator").rounds, on_flower(made, tmp_path / "flower")
    for mine, same in zip(ours, theirs, strict=True):
        assert {key: mine[key] for key in SAME} == {key: same[key] for key in SAME}
    assert max(entry["probed"] for entry in ours) == 6


def test_a_run_that_was_killed_resumes_as_if_it_was_not(tmp_path):
    one = experiment(Remembering(), "fedcor")

    def kill(record):
        if record.round == 3:
            raise Killed

    with pytest.raises(Killed):
        on_flower(one, tmp_path / "killed", kill)
    resumed, whole = (on_flower(one, tmp_path / name, seed=5) for name in ("killed", "whole"))
    assert [[line[key] for key in SAME] for line in resumed] == [
        [line[key] for key in SAME] for line in whole
    ]
    (model, state), (expected, expected_state) = (
        end_of(tmp_path / name) for name in ("killed", "whole")
    )
    assert model.tobytes() == expected.tobytes()
    assert state.keys() == expected_state.keys() > {"total"}
    assert all(state[name].tobytes() == expected_state[name].tobytes() for name in state)


def test_an_optimiser_that_corrects_local_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="optimiser = Correcting.*run it with the simulator"):
        run_on_flower(experiment(Correcting()), 1, tmp_path / "x")
    assert not (tmp_path / "x").exists()


class Breaking(Momentum):
    """Fails in the first round."""

    def step(self, state, delivery):
        raise ZeroDivisionError("oh")


class Failing(nn.Module):
    """Can be evaluated, but not trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        if self.training:
            raise ZeroDivisionError("oh")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("selector", ["fedcor", "random"])
def test_an_optimiser_that_fails_is_blamed_with_flowers_number_of_the_round(selector, tmp_path):
    said = "^round 1: the optimiser Breaking failed in step: ZeroDivisionError: oh"
    with pytest.raises(FedcorError, match=said):
        on_flower(experiment(Breaking(), selector), tmp_path)


def test_a_client_that_fails_is_logged_with_one_number_of_the_round(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    with logged(caplog), pytest.raises(FedcorError, match="round 1: no client delivered"):
        on_flower(experiment(FedAvg(), model=Failing), tmp_path)
    failed = [r.getMessage() for r in caplog.records if "ZeroDivisionError" in r.getMessage()]
    assert failed
    assert all("round 1: client" in one and "round 0" not in one for one in failed)
    assert "error: FedcorError('local training failed: ZeroDivisionError: oh (" in failed[0]


class Alike(SyntheticPopulation):
    """Clients that say the same of themselves, whichever they are."""

    def describe(self):
        return {"of": "a test"}


def test_a_simulation_is_shared_by_copies_of_an_experiment_but_not_by_other_clients():
    one, other = (
        bridge._Held(
            fedcor.Experiment(
                Alike(6, alpha=alpha, size_spread=0.0, features=4, classes=3, tested=20),
                model="logistic",
                test_data=([[0.0] * 4] * 3, [0, 1, 2]),
                batch_size=8,
                local_steps=2,
                learning_rate=0.1,
                rounds=2,
                selector=fedcor.Random(2),
            )
        )
        for alpha in (0.1, 0.9)
    )
    built = bridge._simulation(one, 1)
    # A worker is sent the experiment anew with every message, and must not build it every time.
    assert bridge._simulation(pickle.loads(pickle.dumps(one)), 1) is built
    assert bridge._simulation(other, 1) is not built
