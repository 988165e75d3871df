"""Candidates: what was measured is adopted, and a strategy can tell a trial from a round."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    ErrorCode,
    MemoryGrid,
    error,
    initial,
    is_training,
    lines,
    numpy_app,
    quiet,
    run,
    server_score,
    vector,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcor.flower import is_candidate, select_with
from fedcor.flower.protocol import version_of
from fedcor.selectors.baselines import Random
from fedcor.selectors.fedcor import FedCor

DRAWS = np.random.default_rng(0)  # no attribute of a strategy, so nobody puts it back
CALLS: list[tuple[int, bool]] = []  # (round, whether it was a trial) of each aggregation


class Noisy(FedAvg):
    """Adds noise of its own to the mean, and remembers what it did."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.made = 0

    def configure_train(self, server_round, arrays, config, grid):
        config["tag"] = float(DRAWS.random())
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        self.made += 1
        CALLS.append((server_round, is_candidate()))
        arrays, metrics = super().aggregate_train(server_round, replies)
        noisy = {
            name: array.numpy() + DRAWS.normal(0, 0.01, array.shape).astype(np.float32)
            for name, array in arrays.items()
        }
        metrics["drawn"] = float(DRAWS.random())
        return ArrayRecord({name: Array(values) for name, values in noisy.items()}), metrics


@pytest.fixture(autouse=True)
def _forget_calls():
    CALLS.clear()


def probed_versions(grid):
    """The models that nodes were sent to evaluate, in order, each once."""
    sent = [
        version_of(arrays)
        for message in grid.sent
        if message.metadata.message_type == "evaluate"
        for arrays in message.content.array_records.values()
    ]
    return list(dict.fromkeys(sent))


def test_the_model_of_a_warm_up_round_is_the_candidate_that_was_measured():
    grid, adopted = MemoryGrid(numpy_app(), 8), []

    def score(server_round, arrays):
        adopted.append(version_of(arrays))
        return server_score(server_round, arrays)

    strategy = Noisy()
    selecting = select_with(strategy, FedCor(3, warmup=4, warmup_steps=5), wait_for=8)
    selecting.start(grid, initial(), num_rounds=4, timeout=0.1, evaluate_fn=score)
    assert probed_versions(grid) == adopted
    assert CALLS == [(1, True), (2, True), (3, True), (4, True)]  # one aggregation per round
    assert strategy.made == 4


def test_losses_of_an_adopted_candidate_are_not_asked_for_again(tmp_path):
    """As with a strategy that does not draw."""
    run(
        FedCor(3, warmup=4, warmup_steps=5),
        MemoryGrid(numpy_app(), 8),
        rounds=4,
        strategy=Noisy(),
        folder=tmp_path,
    )
    assert [entry["probed"] for entry in lines(tmp_path)] == [16, 8, 8, 8]


@dataclasses.dataclass(frozen=True)
class Trying(Random):
    """Tries these candidates, then chooses the clients `chosen`."""

    tried: tuple[tuple[int, ...], ...] = ()
    chosen: tuple[int, ...] = ()

    def select(self, state, federation):
        for candidate in self.tried:
            federation.loss_changes(np.array(candidate))
        return np.array(self.chosen), state


def shares(selection):
    """Who counts how much in the mean: drawn twice, a client alone is as if it was drawn once."""
    return frozenset((k, Fraction(selection.count(k), len(selection))) for k in selection)


@given(
    tried=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3).map(
        tuple
    ),
    chosen=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
)
@settings(max_examples=30, deadline=None)
def test_each_selection_is_aggregated_once(tried, chosen):
    CALLS.clear()
    strategy, grid = Noisy(), MemoryGrid(numpy_app(), 4)
    _, result = run(Trying(2, tried=tried, chosen=chosen), grid, rounds=1, strategy=strategy)
    candidates = {shares(one) for one in tried}
    repeated = shares(chosen) in candidates
    assert sum(trial for _, trial in CALLS) == len(candidates)
    assert sum(not trial for _, trial in CALLS) == (0 if repeated else 1)
    assert strategy.made == 1  # trials left no trace but in the one that was adopted
    assert (version_of(result.arrays) in probed_versions(grid)) == repeated
    assert "drawn" in result.train_metrics_clientapp[1]


def test_the_configuration_that_goes_with_the_adopted_candidate_is_kept(tmp_path):
    grid, config = MemoryGrid(numpy_app(), 4), ConfigRecord()
    selecting = select_with(
        Noisy(), Trying(2, tried=((0, 1), (2, 3)), chosen=(0, 1)), wait_for=4, checkpoint=tmp_path
    )
    selecting.start(grid, initial(), num_rounds=1, timeout=0.1, train_config=config)
    sent = {
        grid.contexts[m.metadata.dst_node_id].node_config["partition-id"]: m.content["config"]
        for m in grid.sent
        if is_training(m)
    }
    assert config["tag"] == sent[0]["tag"] == sent[1]["tag"] != sent[2]["tag"]


def test_a_selection_of_which_less_is_left_is_aggregated_anew():
    """The second candidate shows that client 1 is odd: its result is refused for the first, too."""

    def with_bit(message, reply):
        """Adds a metric that the strategy names: it is needed as soon as somebody has it."""
        if not is_training(message):
            return reply
        metrics = MetricRecord({**reply.content["metrics"], "norm_bit": 1.0})
        content = RecordDict({"arrays": reply.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    grid, strategy = MemoryGrid(numpy_app(), 5), Noisy()
    strategy.bit_key = "norm_bit"
    grid.trouble = {3: with_bit, 4: with_bit}
    selector = Trying(2, tried=((1, 2), (1, 3, 4)), chosen=(1, 2))
    _, result = run(selector, grid, rounds=1, strategy=strategy)
    assert CALLS == [(1, True), (1, True), (1, False)]
    assert strategy.made == 1
    alone = run(Trying(2, chosen=(2,)), MemoryGrid(numpy_app(), 5), rounds=1)[1]
    assert vector(result.arrays) == pytest.approx(vector(alone.arrays), abs=0.1)


def test_a_strategy_hears_of_a_candidate_that_is_adopted():
    saved = []

    class Saving(FedAvg):
        """As the documentation of is_candidate shows it."""

        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            if not is_candidate():
                self.save(server_round, arrays)
            return arrays, metrics

        def candidate_adopted(self, server_round, arrays, metrics):
            assert not is_candidate()
            assert metrics["loss"] > 0
            self.save(server_round, arrays)

        def save(self, server_round, arrays):
            saved.append((server_round, version_of(arrays)))

    def runs(strategy):
        saved.clear()
        adopted = []

        def score(server_round, arrays):
            adopted.append((server_round, version_of(arrays)))
            return server_score(server_round, arrays)

        selecting = select_with(strategy, FedCor(3, samples_per_refit=2, **QUICK), wait_for=8)
        selecting.start(
            MemoryGrid(numpy_app(), 8), initial(), num_rounds=7, timeout=0.1, evaluate_fn=score
        )
        return adopted[1:]

    assert runs(Saving(fraction_evaluate=0.0)) == saved
    # Within another strategy too.
    inner = Saving(fraction_evaluate=0.0)
    outer = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e6, 3)
    assert [one for one, _ in runs(outer)] == [one for one, _ in saved]
    assert not is_candidate()


def test_an_error_in_a_trial_does_not_leave_it_open():
    class Failing(FedAvg):
        def aggregate_train(self, server_round, replies):
            raise RuntimeError("no")

    with pytest.raises(Exception, match="no"):
        run(FedCor(2, **QUICK), MemoryGrid(numpy_app(), 4), rounds=1, strategy=Failing())
    assert not is_candidate()


def test_a_chosen_client_that_failed_in_the_trial_is_not_waited_for_again():
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[0] = lambda m, r: (
        error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "x") if is_training(m) else r
    )
    _, result = run(Trying(2, tried=((0, 1),), chosen=(0, 1)), grid, rounds=1, strategy=Noisy())
    assert CALLS == [(1, True)]
    assert version_of(result.arrays) in probed_versions(grid)
    plain = run(Trying(2, chosen=(1,)), MemoryGrid(numpy_app(), 4), rounds=1, strategy=quiet())[1]
    assert vector(result.arrays) == pytest.approx(vector(plain.arrays), abs=0.1)
