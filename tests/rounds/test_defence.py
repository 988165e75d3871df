"""The simulator under attack: long updates, updates that are no numbers, and models that go bad."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import fedcor
from fedcor import Defence, FedAvg
from fedcor.core.errors import ConfigError
from fedcor.data.datasets import load
from fedcor.runs import runner
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment
from fedcor.simulation.state import SimulationState

DIGITS = load("digits")


def attacked(spoil, selector="random", *changes, defence=None):
    """A simulation whose engine's results go through `spoil(round, clients, model, results)`."""
    experiment = load_experiment("digits", [*changes], selector)
    made = build_simulation(experiment, 1, DIGITS)
    train = made.engine.train

    def spoilt(model, clients, round, *args, **options):
        return spoil(round, clients, model, train(model, clients, round, *args, **options))

    made.engine.train = spoilt
    return made if defence is None else dataclasses.replace(made, defence=defence)


def longer(times, byzantine=range(5), since=0):
    def spoil(round, clients, model, results):
        lying = torch.tensor([k in byzantine and round >= since for k in clients])
        return torch.where(lying[:, None], model + times * (results - model), results)

    return spoil


def play(simulation, rounds):
    return [record for record, _ in simulation.run(rounds)]


def test_the_table_of_a_file_and_the_header():
    experiment = load_experiment("digits", ["defence.clip_norms=3"])
    assert experiment.defence == Defence(clip_norms=3.0)
    assert experiment.describe()["defence"] == {"clip_norms": 3.0}
    assert load_experiment("digits").describe()["defence"] == {}
    changed = fedcor.experiment(experiment, defence={"refuse_norms": 50})
    assert changed.defence == Defence(clip_norms=3.0, refuse_norms=50.0)
    assert build_simulation(experiment, 1, DIGITS).defence == experiment.defence
    with pytest.raises(ConfigError, match=r"defence\.clip_norm "):
        load_experiment("digits", ["defence.clip_norm=3"])
    with pytest.raises(ConfigError, match="must be fedcor.Defence"):
        dataclasses.replace(experiment, defence=3)


def test_without_an_attack_no_line_says_anything_of_it():
    records = play(attacked(lambda _r, _c, _m, results: results, "aligned"), 12)
    switched_off = attacked(
        lambda _r, _c, _m, results: results, "aligned", defence=Defence(0.0, 0.0)
    )
    for record, same in zip(records, play(switched_off, 12), strict=True):
        assert (record.clipped, record.refused_updates, record.rolled_back) == ([], {}, 0)
        assert dataclasses.replace(record, seconds=0) == dataclasses.replace(same, seconds=0)


def test_a_long_update_is_scaled_to_the_limit_and_everyone_is_given_the_same():
    """The aggregation, a candidate, the selector and the optimiser."""
    made = attacked(longer(1e2), "random", defence=Defence(clip_norms=2.0))
    federation = made.open_round(made.start)
    chosen = np.array([0, 10, 11, 12, 13, 14])
    federation.loss_changes(chosen)
    state, outcome = federation.finish(chosen, made.start.selector)
    lengths = np.linalg.norm(outcome.updates, axis=1)
    usual = np.sort(lengths)[2]  # of six, the lower median; the long one is among the upper ones
    assert lengths[0] == pytest.approx(2.0 * usual, rel=1e-5)
    assert list(federation.results.clipped) == [0]
    change = (state.model - made.start.model).numpy()
    assert_allclose(change, outcome.updates.mean(axis=0), atol=1e-6)
    # Its direction is kept.
    plain = attacked(lambda _r, _c, _m, results: results).open_round(made.start)
    _, honest = plain.finish(chosen, made.start.selector)
    cosine = honest.updates[0] @ outcome.updates[0] / np.linalg.norm(honest.updates[0]) / lengths[0]
    assert cosine == pytest.approx(1.0, abs=1e-4)
    assert_array_equal(honest.updates[1:], outcome.updates[1:])


def test_updates_far_too_long_are_refused_and_named():
    records = play(attacked(longer(1e6)), 10)
    lying = [sorted(set(record.selected) & set(range(5))) for record in records]
    assert sum(map(len, lying)) > 5
    for record, byzantine in zip(records, lying, strict=True):
        assert record.refused_updates == ({"too long": byzantine} if byzantine else {})
        assert record.refused == len(byzantine)
        assert not set(record.participated) & set(range(5))


def test_a_tighter_limit_saves_the_model_from_longer_updates():
    """A tenth of the clients sends thirty times its update."""
    open_to_it = play(attacked(longer(30.0), defence=Defence(0.0, 0.0)), 30)
    guarded = play(attacked(longer(30.0), defence=Defence(clip_norms=2.0)), 30)
    assert np.mean([r.test_accuracy for r in open_to_it[20:]]) < 0.5
    assert np.mean([r.test_accuracy for r in guarded[20:]]) > 0.65


@pytest.mark.parametrize("selector", ["random", "aligned", "fedcor"])
def test_a_model_that_went_bad_is_rolled_back_and_the_run_goes_on(selector):
    """From round 5 on, who trains from this one model gets no numbers."""
    bad = []

    def spoil(round, clients, model, results):
        if round == 5 and not bad:
            bad.append(model.clone())
        poisoned = bool(bad) and torch.equal(model, bad[0])
        return torch.full_like(results, np.nan) if poisoned else results

    changes = ["selectors.fedcor.warmup=3"] if selector == "fedcor" else []
    states, records = [], []
    for record, state in attacked(spoil, selector, *changes).run(12):
        records.append(record)
        states.append(state)
    assert [record.rolled_back for record in records] == [0] * 5 + [1] + [0] * 6
    assert records[5].participated == []
    assert records[5].refused_updates == {"not finite": sorted(records[5].selected)}
    # Back to what round 4 started from; round 6 trains from there.
    assert torch.equal(states[5].model, states[3].model)
    assert len(records[6].participated) == 10
    assert records[11].test_accuracy > records[3].test_accuracy


def test_one_byzantine_that_delivers_does_not_make_a_bad_model_good():
    """In rounds 5 and 6 one client alone delivers from a bad model, in round 7 nobody does."""
    seen, back = [], []

    def spoil(round, clients, model, results):
        if round < 5:
            seen.append(model.clone())
        if round < 5 or back or any(torch.equal(model, one) for one in seen):
            back.extend([round] if round >= 5 else [])
            return results
        spoilt = torch.full_like(results, np.nan)
        if round < 7:
            spoilt[0] = results[0]
        return spoilt

    records = play(attacked(spoil), 10)
    assert [len(record.participated) for record in records] == [10] * 5 + [1, 1, 0, 10, 10]
    assert [record.rolled_back for record in records] == [0] * 7 + [1, 0, 0]
    assert records[-1].test_accuracy > 0.3


@pytest.mark.parametrize("seed", [1, 3])
def test_byzantine_that_send_next_to_nothing_do_not_stop_a_run(seed):
    """Two clients train in a round; in seed 3 a Byzantine client is among the first two."""
    changes = ["byzantine.fraction=0.1", "byzantine.kind=scale", "byzantine.factor=1e-5"]
    experiment = load_experiment("digits", [*changes, "training.clients_per_round=2"], "random")
    records = play(build_simulation(experiment, seed, DIGITS), 40)
    assert sum(not record.participated for record in records) == 0
    assert all(record.clipped == [] for record in records[5:])
    assert records[-1].test_accuracy > 0.4


def test_a_past_that_refuses_everyone_is_outvoted():
    """Most updates of round 0 are next to nothing; then all are refused until they count."""

    def spoil(round, clients, model, results):
        tiny = torch.tensor([round == 0 and at < 3 for at in range(len(clients))])
        return torch.where(tiny[:, None], model + 1e-5 * (results - model), results)

    records = play(attacked(spoil, "random", "training.clients_per_round=5"), 8)
    assert [len(record.participated) for record in records] == [3, 0, 0, 5, 5, 5, 5, 5]
    # First the model is doubted, then the past.
    assert [record.rolled_back for record in records] == [0, 1, 0, 0, 0, 0, 0, 0]


def test_lone_absurd_updates_are_refused_for_ever_where_one_client_trains():
    made = attacked(longer(1e9, since=5), "random", "training.clients_per_round=1")
    records = play(made, 60)
    lying = [record for record in records[5:] if record.selected[0] < 5]
    assert len(lying) >= 3
    assert all(record.refused_updates == {"too long": record.selected} for record in lying)


def test_losses_that_are_all_unusable_show_a_bad_model_too():
    made = attacked(lambda _r, _c, _m, results: results, "power_of_choice")
    answer, bad = made.engine.losses, []

    def losses(model, clients):
        if bad and torch.equal(model, bad[0]):
            return np.full(len(clients), 1e9)
        return answer(model, clients)

    made.engine.losses = losses
    records, state = [], made.start
    for number in range(4):
        if number == 2:
            bad.append(state.model)
        record, state = next(iter(made.run(number + 1, state)))
        records.append(record)
    assert [record.rolled_back for record in records] == [0, 0, 1, 0]


def test_the_first_model_has_nothing_to_go_back_to():
    made = attacked(lambda _r, _c, _m, results: torch.full_like(results, np.nan))
    records = play(made, 3)
    assert [record.rolled_back for record in records] == [0, 0, 0]


def test_the_optimiser_starts_over_from_the_good_model():
    calls = []

    def spoil(round, clients, model, results):
        return torch.full_like(results, np.nan) if round == 3 else results

    made = attacked(spoil, "random", "optimiser.name=fedavgm")
    for _, state in made.run(4):
        calls.append(state.optimiser)
    assert all(float(np.abs(array).sum()) == 0.0 for array in calls[3].values())
    assert any(float(np.abs(array).sum()) > 0.0 for array in calls[2].values())


def test_a_checkpoint_holds_the_good_model_and_what_was_usual():
    bad = []

    def spoil(round, clients, model, results):
        if round == 5 and not bad:
            bad.append(model.clone())
        poisoned = bool(bad) and torch.equal(model, bad[0])
        return torch.full_like(results, np.nan) if poisoned else results

    whole = attacked(spoil)
    states = [state for _, state in whole.run(9)]
    made = attacked(spoil)
    state = states[4]  # the model is bad, and nobody knows it yet
    again = SimulationState.from_arrays(state.to_arrays(), made.engine.device)
    resumed = [record for record, _ in made.run(9, again)]
    assert resumed[0].rolled_back == 1
    *_, (_, last) = attacked(spoil).run(9, again)
    assert torch.equal(last.model, states[-1].model)
    for name, array in states[-1].to_arrays().items():
        assert_array_equal(last.to_arrays()[name], array)


def test_a_killed_run_resumes_to_the_same_record_under_attack(tmp_path, monkeypatch):
    """What is usual is part of the state: without it, other updates would be clipped."""
    experiment = load_experiment("digits", ["defence.clip_norms=1.1", "training.rounds=12"])
    monkeypatch.setattr(runner, "CHECKPOINT_EVERY", 5)
    runner.run(experiment, 1, tmp_path / "whole")
    short = dataclasses.replace(experiment, rounds=7)
    runner.run(short, 1, tmp_path / "parts")
    runner.run(experiment, 1, tmp_path / "parts", resume=True)

    def lines(folder):
        text = (tmp_path / folder / "rounds.jsonl").read_text().splitlines()[1:]
        return [{k: v for k, v in json.loads(one).items() if k != "seconds"} for one in text]

    assert lines("whole") == lines("parts")
    assert sum(len(line.get("clipped", [])) for line in lines("whole")) >= 3


def test_buffers_are_judged_by_their_own_length():
    class Norm(torch.nn.Sequential):
        def __init__(self):
            super().__init__(
                torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16),
                torch.nn.ReLU(), torch.nn.Linear(16, 10),
            )  # fmt: skip

    experiment = dataclasses.replace(load_experiment("digits", [], "random"), model=Norm)
    made = build_simulation(experiment, 1, DIGITS)
    made = dataclasses.replace(made, optimiser=FedAvg())
    trained, train = made.engine.vector.trained, made.engine.train

    def spoilt(model, clients, *args, **options):
        results = train(model, clients, *args, **options).clone()
        for row, client in enumerate(clients):
            if client == 0:
                results[row, trained:] += 1e9
        return results

    made.engine.train = spoilt
    federation = made.open_round(made.start)
    federation.finish(np.arange(6), made.start.selector)
    assert federation.results.refused == {"too long": [0]}
