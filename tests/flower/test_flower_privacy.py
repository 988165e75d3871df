"""Differential privacy within a selection: the noise fits, and what is spent is counted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import flwr.serverapp
import numpy as np
import pytest
from flower_grid import (
    QUICK,
    MemoryGrid,
    initial,
    is_training,
    lines,
    logged,
    numpy_app,
    quiet,
    run,
    server_score,
)
from flwr.app import RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from fedcor.core.errors import ConfigError, RecordError
from fedcor.flower import answers_probes, select_with
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor

# Older releases have no accountants, and so no way to say how clients are sampled.
SamplingMethod = getattr(flwr.serverapp, "SamplingMethod", None)
accountants = pytest.mark.skipif(SamplingMethod is None, reason="this Flower has no accountants")
WRAPPERS = {
    "server, fixed": lambda m: DifferentialPrivacyServerSideFixedClipping(quiet(), 0.01, 1.0, m),
    "client, fixed": lambda m: DifferentialPrivacyClientSideFixedClipping(quiet(), 0.01, 1.0, m),
    "server, adaptive": lambda m: DifferentialPrivacyServerSideAdaptiveClipping(quiet(), 0.01, m),
    "client, adaptive": lambda m: DifferentialPrivacyClientSideAdaptiveClipping(quiet(), 0.01, m),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_noise_for_more_clients_than_are_chosen_is_refused(name):
    with pytest.raises(ConfigError, match="num_sampled_clients = 5: .*3 clients.*too small"):
        select_with(WRAPPERS[name](5), Random(3))
    with pytest.raises(ConfigError, match="may count a client twice"):
        select_with(WRAPPERS[name](3), Random(3, replacement=True))
    for most in (1, 3):
        select_with(WRAPPERS[name](most), Random(3))
    select_with(WRAPPERS[name](5), Full())  # says not how many it chooses


def test_bulyan_with_too_few_clients_is_refused():
    """It would make nothing of any round, and the run would end well."""
    with pytest.raises(ConfigError, match="num_malicious_nodes = 1: needs 7 clients"):
        select_with(Bulyan(num_malicious_nodes=1), Random(6))
    select_with(Bulyan(num_malicious_nodes=1), Random(7))


def test_a_round_that_makes_no_model_is_logged(caplog):
    with logged(caplog):
        run(Full(), MemoryGrid(numpy_app(), 3), rounds=1, strategy=Bulyan(num_malicious_nodes=1))
    assert "round 1: Bulyan made no model of the replies" in caplog.text


# --- settings of a strategy within a wrapper ------------------------------------------------------


def renaming(message, context, call_next):
    """The app finds the model and the configuration under other names in the messages."""
    content = message.content
    message.content = RecordDict({"arrays": content["model"], "config": content["settings"]})
    reply = call_next(message, context)
    if is_training(message):
        reply.content["metrics"]["one"] = 1
    return reply


def test_the_settings_of_a_strategy_within_a_wrapper_hold(tmp_path):
    inner = FedAvg(
        fraction_evaluate=0.0,
        min_available_nodes=5,
        weighted_by_key="one",
        arrayrecord_key="model",
        configrecord_key="settings",
    )
    weights = []

    @dataclasses.dataclass(frozen=True)
    class Watching(FedCor):
        def observe(self, state, outcome):
            weights.append(outcome.aggregation_weights.tolist())
            return super().observe(state, outcome)

    private = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e6, 3)
    selecting = select_with(private, Watching(3, **QUICK), checkpoint=tmp_path)
    grid = MemoryGrid(numpy_app(mods=[answers_probes(), renaming]), 6)
    selecting.start(grid, initial(), num_rounds=2, timeout=0.1)
    assert [entry["faults"] for entry in lines(tmp_path)] == [{}, {}]
    assert [entry["probed"] for entry in lines(tmp_path)] == [12, 6]
    assert weights == [[1.0, 1.0, 1.0]] * 2
    assert selecting._run.wait_for == 5
    nobody = DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_train=0.0), 0.0, 1.0, 3)
    with pytest.raises(ConfigError, match="switches training off"):
        select_with(nobody, Random(3))


# --- what is spent --------------------------------------------------------------------------------


class Accountant:
    """Counts releases, as Flower's PrivacyAccountant does; its mathematics is not needed here."""

    def __init__(self, most=None, population=8):
        self.config = SimpleNamespace(
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            population_size=population,
            max_epsilon=most,
        )
        self.num_releases = 0

    def compose(self, event, count=1):
        assert event.sample_size == 3
        self.num_releases += count

    def would_exceed(self, event, max_epsilon=None, count=1):
        return self.num_releases + count > self.config.max_epsilon

    def get_privacy_spent(self, delta=None):
        return SimpleNamespace(
            epsilon=float(self.num_releases), delta=1e-5, num_releases=self.num_releases
        )

    def state_dict(self):
        return {"releases": [{"count": self.num_releases}], "size": self.config.population_size}

    def load_state_dict(self, state):
        if state["size"] != self.config.population_size:
            raise ValueError("another population")
        self.num_releases = state["releases"][0]["count"]


def equal_weights(message, reply):
    if is_training(message):
        reply.content["metrics"]["one"] = 1
    return reply


def grid_of_equals():
    grid = MemoryGrid(numpy_app(), 8)
    grid.trouble = dict.fromkeys(range(8), equal_weights)
    return grid


def accounted(accountant):
    inner = FedAvg(fraction_evaluate=0.0, weighted_by_key="one")
    return DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, 3, accountant=accountant)


@dataclasses.dataclass(frozen=True)
class Trying(Random):
    """Shows two candidates to everyone, and chooses the first."""

    def select(self, state, federation):
        first, second = np.array([0, 1, 2]), np.array([3, 4, 5])
        federation.loss_changes(first)
        federation.loss_changes(second)
        return first, state


@accountants
def test_every_model_that_clients_were_shown_is_a_release():
    for selector, releases in ((Random(3), 4), (Trying(3), 8), (FedCor(3, warmup=4), 4)):
        accountant = Accountant()
        strategy = accounted(accountant)
        run(selector, grid_of_equals(), rounds=4, strategy=strategy)
        assert strategy.accountant is accountant  # the one that the user holds
        assert accountant.num_releases == releases
        assert not strategy._pending_events


@accountants
def test_a_budget_ends_the_run():
    with pytest.raises(Exception, match="would exceed max_epsilon"):
        run(Random(3), grid_of_equals(), rounds=4, strategy=accounted(Accountant(most=2)))


@accountants
def test_a_resumed_run_continues_to_count(tmp_path):
    run(Random(3), grid_of_equals(), rounds=2, strategy=accounted(Accountant()), folder=tmp_path)
    again = Accountant()
    run(Random(3), grid_of_equals(), rounds=5, strategy=accounted(again), folder=tmp_path)
    assert again.num_releases == 5
    for other in (accounted(Accountant(population=9)), accounted(None)):
        with pytest.raises(RecordError, match="privacy"):
            run(Random(3), grid_of_equals(), rounds=6, strategy=other, folder=tmp_path)


@accountants
def test_what_was_spent_in_a_round_that_failed_stays_spent(tmp_path):
    def fail(server_round, arrays):
        if server_round == 2:
            raise KeyboardInterrupt
        return server_score(server_round, arrays)

    accountant = Accountant()
    selecting = select_with(
        accounted(accountant), Random(3), checkpoint=tmp_path, wait_for=8, probe_timeout=0.1
    )
    with pytest.raises(KeyboardInterrupt):
        selecting.start(grid_of_equals(), initial(), num_rounds=3, timeout=0.1, evaluate_fn=fail)
    assert len(lines(tmp_path)) == 1
    assert accountant.num_releases == 2
    selecting.start(
        grid_of_equals(), initial(), num_rounds=3, timeout=0.1, evaluate_fn=server_score
    )
    assert accountant.num_releases == 4


@accountants
def test_an_accountant_is_missed_where_the_checkpoint_has_none(tmp_path):
    run(Random(3), grid_of_equals(), rounds=2, strategy=accounted(None), folder=tmp_path)
    with pytest.raises(RecordError, match="privacy was accounted for before and is not now"):
        run(
            Random(3), grid_of_equals(), rounds=3, strategy=accounted(Accountant()), folder=tmp_path
        )
