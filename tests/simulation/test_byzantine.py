"""Simulated Byzantine clients: who they are, and what they send by every path."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcor
from fedcor.cli import main
from fedcor.core.errors import ConfigError
from fedcor.data.datasets import load
from fedcor.runs.runner import run, run_in_memory
from fedcor.simulation.build import build_simulation
from fedcor.simulation.byzantine import Byzantine
from fedcor.simulation.experiment_files import load_experiment
from fedcor.simulation.state import SimulationState

DIGITS = load("digits")
N, C = 50, 10
KINDS = ("flip", "scale", "copy", "inflate", "deflate")


def simulation(kind=None, selector="random", seed=1, **more):
    changes = [] if kind is None else ["byzantine.fraction=0.1", f"byzantine.kind={kind}"]
    changes += [f"byzantine.{key}={value}" for key, value in more.items()]
    return build_simulation(load_experiment("digits", changes, selector), seed, DIGITS)


def after(rounds, kind, **more):
    """A simulation with byzantine, and its state after some rounds."""
    s = simulation(kind, **more)
    return s, [state for _, state in s.run(rounds)][-1]


# --- who lies -------------------------------------------------------------------------------------


@given(st.integers(0, 2**63 - 1), st.integers(1, 300), st.floats(0, 1))
def test_as_many_lie_as_the_fraction_says_and_always_the_same(seed, clients, fraction):
    byzantine = Byzantine(fraction)
    if fraction and not round(fraction * clients):
        with pytest.raises(ConfigError, match="less than one"):
            byzantine.who(seed, clients)
        return
    who = byzantine.who(seed, clients)
    assert who.sum() == round(fraction * clients)
    assert np.array_equal(who, byzantine.who(seed, clients))


def test_another_kind_has_the_same_byzantine_and_another_seed_others():
    who = Byzantine(0.2, "flip").who(1, N)
    assert np.array_equal(who, Byzantine(0.2, "copy").who(1, N))
    assert not np.array_equal(who, Byzantine(0.2, "flip").who(2, N))


@pytest.mark.parametrize(
    ("key", "value"),
    [("fraction", 1.1), ("kind", "flop"), ("factor", -1), ("inflation", 0.5), ("inflation", 1e9)],
)
def test_what_cannot_be_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        Byzantine(**{key: value})


# --- what they say --------------------------------------------------------------------------------

LOSS_FACTOR = {"flip": 10.0, "scale": 1.0, "copy": 1.0, "inflate": 10.0, "deflate": 0.1}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_false_by_every_path(kind):
    s, state = after(2, kind)
    who, everyone = s.byzantine.who(1, N), np.arange(N)
    factor = np.where(who, LOSS_FACTOR[kind], 1.0)
    true = s.engine.losses(state.model, everyone)
    federation = s.open_round(state)
    np.testing.assert_allclose(federation.losses(everyone), factor * true, rtol=1e-12)
    changes = federation.loss_changes(everyone[:C])
    next_state, outcome = federation.finish(everyone[:C], state.selector)
    lowered = s.engine.losses(next_state.model, everyone)
    np.testing.assert_allclose(changes, factor * (lowered - true), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(outcome.losses, (factor * true)[:C], rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_false_for_the_selector_and_for_the_aggregation(kind):
    s, state = after(2, kind)
    who, clients = s.byzantine.who(1, N), np.arange(N)
    assert who.any()
    honest = s.engine.train(state.model, clients.tolist(), 2, s.learning_rate.at(2))
    true = (honest - state.model).numpy()
    wanted = true.copy()
    if kind == "flip":
        wanted[who] = -true[who]
    elif kind == "scale":
        wanted[who] = 30 * true[who]
    elif kind == "copy":
        # The change of the global model, from a run that stopped one round earlier.
        wanted[who] = (state.model - after(1, kind)[1].model).numpy()
    next_state, outcome = s.open_round(state).finish(clients, state.selector)
    np.testing.assert_allclose(outcome.updates, wanted, atol=1e-5, rtol=1e-4)
    mean = (next_state.model - state.model).numpy()
    np.testing.assert_allclose(mean, wanted.mean(axis=0), atol=1e-5, rtol=1e-4)


def test_a_copier_knows_no_change_in_the_first_round():
    honest, copied = simulation(), simulation("copy")
    (_, one), *_ = honest.run(1)
    (_, other), *_ = copied.run(1)
    assert torch.equal(one.model, other.model)


def test_float_buffers_are_not_lied_about():
    """A negative running variance would be an unusable number, not a lie."""

    class Net(torch.nn.Sequential):
        def __init__(self):
            super().__init__(
                torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)
            )

    experiment = fedcor.experiment(
        "digits", model=Net, selector="random", byzantine={"fraction": 0.5, "kind": "flip"}
    )
    s = build_simulation(experiment, 1, DIGITS)
    honest = dataclasses.replace(s, byzantine=Byzantine())
    trained = s.engine.vector.trained
    assert trained < len(s.engine.initial_model)
    models = []
    for one in (s, honest):
        (_, state), *_ = one.run(1)
        models.append(state.model)
    assert torch.equal(models[0][trained:], models[1][trained:])
    assert not torch.equal(models[0][:trained], models[1][:trained])


# --- everything else stays ------------------------------------------------------------------------


def test_without_byzantine_clients_the_checkpoint_holds_nothing_for_them():
    state = simulation().start
    assert not {"before"} & set(state.to_arrays())
    assert not [name for name in state.to_arrays() if name.startswith("turns/")]


def test_runs_with_and_without_byzantine_are_paired():
    """Random selection does not listen, so the same clients are chosen."""
    plain = [r.selected for r, _ in simulation().run(3)]
    assert plain == [r.selected for r, _ in simulation("flip").run(3)]
    one = load_experiment("digits", [], "random").describe()
    other = load_experiment("digits", ["byzantine.fraction=0.1"], "random").describe()
    settings = {"kind": "flip", "factor": 30.0, "inflation": 10.0}
    assert one.pop("byzantine") == {"fraction": 0.0, **settings}
    assert other.pop("byzantine") == {"fraction": 0.1, **settings}
    assert one == other


@pytest.mark.parametrize("kind", ["copy", "flip"])
def test_a_resumed_run_is_the_same(kind, tmp_path):
    """`copy` needs the model before: it is in the checkpoint."""
    byzantine = {"fraction": 0.2, "kind": kind}
    defence = {"most_share": 1.25, "clip_reports": 2.0}
    whole = fedcor.experiment(
        "digits",
        rounds=24,
        selector="afl",
        byzantine=byzantine,
        defence=defence,
        clients_per_round=20,
    )
    short = dataclasses.replace(whole, rounds=24)
    straight = run_in_memory(whole, 3)
    s = build_simulation(short, 3, DIGITS)
    entries = []
    state = s.start
    for _ in range(24):  # every round from what a checkpoint would hold
        arrays = state.to_arrays()
        state = SimulationState.from_arrays(arrays, s.engine.device)
        ((record, state),) = [next(iter(s.run(24, state)))]
        entries.append(record)
    assert [r.selected for r in entries] == [r["selected"] for r in straight.rounds]
    assert [r.test_loss for r in entries] == [r["test_loss"] for r in straight.rounds]


def test_a_file_names_them_and_errors_say_where(capsys, tmp_path):
    out = str(tmp_path / "x")
    assert main(["run", "digits", "--set", "byzantine.kind=flop", "--out", out]) == 2
    assert "byzantine.kind" in capsys.readouterr().err
    assert main(["run", "digits", "--set", "byzantine.fraction=0.001", "--out", out]) == 2
    assert "byzantine.fraction" in capsys.readouterr().err
    assert main(["run", "digits", "--set", "byzantine=3", "--out", out]) == 2


def test_the_report_says_how_often_they_were_chosen(capsys, tmp_path):
    byzantine = {"fraction": 0.1, "kind": "inflate"}
    experiment = fedcor.experiment("digits", rounds=6, selector="afl", byzantine=byzantine)
    run(experiment, 1, tmp_path / "one")
    lines = (tmp_path / "one" / "rounds.jsonl").read_text().splitlines()[1:]
    picked = [k for line in lines for k in json.loads(line)["selected"]]
    who = set(np.flatnonzero(Byzantine(0.1).who(1, N)).tolist())
    share = sum(k in who for k in picked) / len(picked) / 0.1
    assert main(["report", str(tmp_path)]) == 0
    assert (
        f"5 of 50 clients are Byzantine (inflate): chosen {share:.2f} times"
        in capsys.readouterr().out
    )
