"""XGBoost on Flower: a model of bytes that grows. Bagging works; cyclic training is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flower_grid import QUICK, MemoryGrid, is_training, lines, logged, numpy_app, run
from flower_trees import as_json, bytes_record, no_trees, tree_score, trees, trees_app, wanted
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedXgbBagging,
    FedXgbCyclic,
)

from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.flower import select_with
from fedcor.selectors.afl import AFL
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice


def bagging():
    return FedXgbBagging(fraction_evaluate=0.0)


def grow(selector, grid, rounds=4, *, strategy=None, folder=None, **settings):
    strategy = bagging() if strategy is None else strategy
    settings = {"probe_timeout": 0.05, "wait_for": len(grid.contexts), **settings}
    selecting = select_with(strategy, selector, checkpoint=folder, **settings)
    return selecting.start(
        grid, no_trees(), num_rounds=rounds, timeout=0.05, evaluate_fn=tree_score
    )


@pytest.mark.parametrize(
    "selector",
    [Full(), Random(3), AFL(3), PowerOfChoice(3), FedCor(3, samples_per_refit=2, **QUICK)],
    ids=lambda selector: type(selector).__name__,
)
def test_every_round_adds_a_tree_of_each_chosen_client(selector, tmp_path):
    result = grow(selector, MemoryGrid(trees_app(), 8), rounds=7, folder=tmp_path)
    record = lines(tmp_path)
    chosen = 8 if isinstance(selector, Full) else 3
    assert all(len(entry["participated"]) == chosen and not entry["faults"] for entry in record)
    by_hand: list[float] = []
    for entry in record:
        predicted = sum(by_hand)
        by_hand += [0.1 * (wanted(k) - predicted) for k in entry["participated"]]
    assert trees(result.arrays) == pytest.approx(by_hand)


def test_a_killed_run_resumes_with_the_trees_that_it_had(tmp_path):
    whole = grow(FedCor(3, **QUICK), MemoryGrid(trees_app(), 8), rounds=7)
    grow(FedCor(3, **QUICK), MemoryGrid(trees_app(), 8), rounds=4, folder=tmp_path)
    rest = grow(FedCor(3, **QUICK), MemoryGrid(trees_app(), 8), rounds=7, folder=tmp_path)
    assert trees(rest.arrays) == trees(whole.arrays)
    other = ArrayRecord({"1": Array(np.zeros(0, np.uint8))})
    selecting = select_with(bagging(), FedCor(3, **QUICK), checkpoint=tmp_path, wait_for=8)
    with pytest.raises(RecordError, match="other arrays"):
        selecting.start(MemoryGrid(trees_app(), 8), other, num_rounds=7)


GOOD = as_json([0.25])
FAULTS = {
    "not bytes": ("malformed", Array(np.ones(5, np.float32)), "is not one row of bytes"),
    "two rows": ("malformed", Array(np.ones((2, 5), np.uint8)), "is not one row of bytes"),
    "torn": ("malformed", Array("uint8", (5,), "numpy.ndarray", b"\x93NUMPY torn"), "cannot be"),
    "no text": ("malformed", b"\xff\x00 nonsense", "JSON format"),
    "empty": ("malformed", b"", "JSON format"),
    "no model": ("malformed", b'{"learner": {}}', "JSON format"),
    "a linear model": ("malformed", GOOD.replace(b"trees", b"weights"), "JSON format"),
    "no trees": ("malformed", as_json([]), "JSON format"),
    "a lie": ("malformed", GOOD.replace(b'"num_trees": "1"', b'"num_trees": "2"'), "JSON format"),
    "more at once than there are": ("malformed", as_json([0.25], parallel=2), "JSON format"),
    "nested": ("malformed", b"[" * 100_000, "JSON format"),
    "huge": ("unusable", as_json([0.25]) + b" " * 2_000_000, "bytes, the others'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_reply_that_is_no_model_of_trees_is_refused(name, tmp_path, caplog):
    """The stock strategy would end the run with an error, or make it the model."""
    kind, sent, why = FAULTS[name]
    arrays = bytes_record(sent) if isinstance(sent, bytes) else ArrayRecord({"0": sent})

    def spoil(message, reply):
        if not is_training(message):
            return reply
        metrics = MetricRecord({"loss": 1.0, "num-examples": 10})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    grid, clean = MemoryGrid(trees_app(), 4), MemoryGrid(trees_app(), 4)
    grid.trouble[0] = spoil
    with logged(caplog):
        result = grow(Full(), grid, rounds=2, folder=tmp_path)
    assert caplog.text.count(why) == 2
    for entry in lines(tmp_path):
        assert entry["participated"] == [1, 2, 3]
        assert entry["faults"] == {kind: 1}
    clean.leave(0)
    assert trees(result.arrays) == trees(grow(Full(), clean, rounds=2).arrays)


@pytest.mark.parametrize(("clients", "refused"), [(1, 0), (2, 1), (5, 1)])
def test_one_that_is_alone_may_send_as_much_as_it_likes(clients, refused, tmp_path):
    def pad(message, reply):
        if is_training(message):
            text = reply.content["arrays"]["0"].numpy().tobytes()
            reply.content["arrays"] = bytes_record(text + b" " * 2_000_000)
        return reply

    grid = MemoryGrid(trees_app(), clients)
    grid.trouble[0] = pad
    grow(Full(), grid, rounds=1, folder=tmp_path)
    assert lines(tmp_path)[0]["refused"] == refused


def test_a_strategy_that_makes_no_trees_of_trees_is_stopped():
    class Losing(FedXgbBagging):
        def aggregate_train(self, server_round, replies):
            return bytes_record(b"{}"), None

    with pytest.raises(FedcorError, match="round 1: .*Losing made is unusable: 0 is not a model"):
        grow(Random(2), MemoryGrid(trees_app(), 3), strategy=Losing(fraction_evaluate=0.0))


def test_selectors_that_read_updates_are_refused():
    for selector in (Complement(3), Aligned(3)):
        with pytest.raises(ConfigError, match="clients that grow trees send none.*fedcor"):
            select_with(bagging(), selector)
    with pytest.raises(ConfigError, match="clients that grow trees send none"):
        select_with(bagging(), clients_per_round=3)

    @dataclasses.dataclass(frozen=True)
    class Peeping(Random):
        def observe(self, state, outcome):
            return {"sum": outcome.updates.sum(axis=0)}

    with pytest.raises(FedcorError, match="send no updates of a model"):
        grow(Peeping(2), MemoryGrid(trees_app(), 3))


def test_differential_privacy_around_trees_is_refused():
    private = DifferentialPrivacyServerSideFixedClipping(bagging(), 0.0, 1.0, 3)
    with pytest.raises(ConfigError, match="a model of trees is a text"):
        select_with(private, Random(3))


def test_cyclic_training_is_refused_with_what_to_do_instead():
    with pytest.raises(ConfigError, match="chooses by itself who trains.*FedXgbBagging"):
        select_with(FedXgbCyclic(), Random(1))


def test_a_strategy_that_configures_only_some_of_the_chosen_says_so(caplog):
    """One of a user's own, that nobody can refuse."""

    class Alternating(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            return list(super().configure_train(server_round, arrays, config, grid))[:1]

    grid = MemoryGrid(numpy_app(), 3)
    with logged(caplog):
        run(Full(), grid, rounds=1, strategy=Alternating(fraction_evaluate=0.0))
    assert "round 1: Alternating has no message for 2 of 3 chosen clients" in caplog.text
