"""Noise on reported losses: what it does, what it guarantees, and that records without it stay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flower_grid import MemoryGrid, numpy_app
from flower_grid import run as run_on_grid
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedcor.core.errors import ConfigError
from fedcor.rounds.loss_screening import LossNoise, epsilon_of
from fedcor.runs.record import read_run
from fedcor.runs.runner import run, run_in_memory
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment


def hockey_stick(sigma, sensitivity, epsilon):
    """delta by its definition: the integral of what exceeds exp(epsilon) times the other."""

    def part(x):
        excess = norm.pdf(x, sensitivity, sigma) - np.exp(epsilon) * norm.pdf(x, 0.0, sigma)
        return max(0.0, excess)

    edge = sensitivity / 2 + epsilon * sigma**2 / sensitivity  # above it, the integrand is positive
    top = max(edge, sensitivity) + 12 * sigma
    return quad(part, edge, top, limit=200)[0]


@given(st.floats(0.2, 5.0), st.floats(0.1, 2.0), st.sampled_from([1e-2, 1e-3]))
def test_epsilon_against_the_definition(sigma, sensitivity, delta):
    epsilon = epsilon_of(sigma, sensitivity, delta)
    if epsilon == 0.0:
        assert hockey_stick(sigma, sensitivity, 0.0) <= delta * (1 + 1e-6)
    elif epsilon < 50:
        assert hockey_stick(sigma, sensitivity, epsilon) == pytest.approx(delta, rel=1e-3)


def test_reports_add_up():
    assert epsilon_of(1.0, 0.1, 1e-5, reports=100) == pytest.approx(epsilon_of(1.0, 1.0, 1e-5))
    assert epsilon_of(1.0, 1.0, 1e-5) == pytest.approx(4.377178, abs=1e-5)
    for wrong in ((0.0, 1.0, 1e-5), (1.0, -1.0, 1e-5), (1.0, 1.0, 0.0), (1.0, 1.0, 1.0)):
        with pytest.raises(ConfigError):
            epsilon_of(*wrong)


def test_what_is_added():
    losses, rng = np.array([0.5, 30.0, -2.0, np.nan]), np.random.default_rng(0)
    assert LossNoise().add(losses, rng) is losses
    drawn = np.array([LossNoise(0.5, 4.0).add(losses, rng) for _ in range(4000)])
    assert drawn[:, :3].mean(axis=0) == pytest.approx([0.5, 4.0, 0.0], abs=0.05)
    assert drawn[:, :3].std(axis=0) == pytest.approx([0.5] * 3, abs=0.03)
    assert np.isnan(drawn[:, 3]).all()


@pytest.mark.parametrize(
    "change", ["loss_noise=-1", "loss_noise=nan", "loss_clip=0", "loss_clip=inf", "lost=1"]
)
def test_settings_that_cannot_be(change):
    with pytest.raises(ConfigError):
        load_experiment("digits", [f"privacy.{change}"])


CHANGES = ["training.rounds=6", "partition.clients=20", "training.clients_per_round=4"]
CHANGES += ["selectors.fedcor.warmup=3"]


@pytest.mark.parametrize("selector", ["random", "afl", "power_of_choice", "fedcor", "oort"])
def test_noise_changes_what_selectors_are_told_and_nothing_else(selector, tmp_path):
    plain = load_experiment("digits", CHANGES, selector)
    noisy = load_experiment("digits", [*CHANGES, "privacy.loss_noise=0.5"], selector)
    without, with_noise = run_in_memory(plain, 1), run_in_memory(noisy, 1)
    assert without.header["config"]["privacy"] == {"loss_noise": 0.0, "loss_clip": 10.0}
    assert with_noise.header["config"]["privacy"] == {"loss_noise": 0.5, "loss_clip": 10.0}

    def lines(record):
        return [{k: v for k, v in entry.items() if k != "seconds"} for entry in record.rounds]

    assert (lines(without) == lines(with_noise)) == (selector == "random")
    # Killed after any round and resumed, it is the same run: noise comes from named streams.
    run(noisy, 1, tmp_path / "whole")
    assert lines(read_run(tmp_path / "whole")) == lines(with_noise)


def test_a_client_gives_one_answer_per_model():
    """Asking again, or of others beside it, does not take the noise away."""
    experiment = load_experiment("digits", [*CHANGES, "privacy.loss_noise=0.5"], "random")
    simulation = build_simulation(experiment, 1)
    one, two = (simulation.open_round(simulation.start) for _ in range(2))
    true = simulation.engine.losses(simulation.start.model, np.arange(20))
    everyone = one.losses(np.arange(20))
    assert two.losses(np.array([3, 7])).tolist() == everyone[[3, 7]].tolist()
    assert one.losses(np.arange(20)).tolist() == everyone.tolist()
    assert np.abs(everyone - true).max() > 0.2


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_on_flower_no_root_mean_square_leaves_a_client_with_noise(sigma):
    from flwr.app import Message, MetricRecord, RecordDict

    from fedcor.flower.protocol import with_noise
    from fedcor.rounds.loss_screening import LossNoise

    metrics = MetricRecord({"loss": 1.0, "rms-loss": 1.1, "num-examples": 4})
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    reply = with_noise(
        Message(RecordDict({"metrics": metrics}), reply_to=question), LossNoise(sigma, 5.0)
    )
    assert ("rms-loss" in reply.content["metrics"]) == (sigma == 0.0)
    assert (reply.content["metrics"]["loss"] == 1.0) == (sigma == 0.0)


def test_on_flower_noise_is_added_before_a_reply_leaves(tmp_path):
    """On losses of training and evaluation; the number of samples and accuracies stay."""
    from fedcor.flower import answers_probes
    from fedcor.selectors.power_of_choice import PowerOfChoice

    seen = {}
    for sigma in (0.0, 0.3):
        mods = [answers_probes(loss_noise=sigma, loss_clip=3.0)]
        grid = MemoryGrid(numpy_app(mods), 8)
        found = seen.setdefault(sigma, [])

        def listen(message, reply, found=found):
            if reply.has_content() and "metrics" in reply.content.metric_records:
                found.append(dict(reply.content["metrics"].items()))
            return reply

        grid.trouble = dict.fromkeys(range(8), listen)
        run_on_grid(PowerOfChoice(3), grid, rounds=1, folder=tmp_path / str(sigma))
    exact, noisy = seen[0.0], seen[0.3]
    assert len(exact) == len(noisy) > 6
    true = np.clip([one["loss"] for one in exact[:6]], 0.0, 3.0)
    said = np.array([one["loss"] for one in noisy[:6]])
    assert 0.01 < np.abs(said - true).max() < 2.0
    assert [one["num-examples"] for one in exact[:6]] == [one["num-examples"] for one in noisy[:6]]
    assert [one.get("accuracy") for one in exact[:6]] == [one.get("accuracy") for one in noisy[:6]]


def test_the_record_says_the_noise(tmp_path):
    run(load_experiment("digits", ["training.rounds=1", "privacy.loss_noise=1"]), 1, tmp_path)
    header = json.loads((Path(tmp_path) / "rounds.jsonl").read_text().splitlines()[0])
    assert header["config"]["privacy"]["loss_noise"] == 1.0
