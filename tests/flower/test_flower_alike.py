"""Which replies go together: a metric that only some have gets nobody refused but is left out."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from flower_grid import MemoryGrid, initial, lines, logged, numpy_app, record, run, vector
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, QFedAvg
from hypothesis import given
from hypothesis import strategies as st

from fedcor.flower import OptimiserStrategy, select_with
from fedcor.flower.replies import Terms, common_contents, read_model, refused_replies
from fedcor.selectors.afl import AFL
from fedcor.selectors.baselines import Full, RoundRobin

NAMES = ("a", "b", "c", "loss")
VALUES = st.one_of(st.floats(0, 1), st.integers(0, 9), st.lists(st.floats(0, 1), max_size=2))
METRICS = st.dictionaries(st.sampled_from(NAMES), VALUES)
USUAL = {"loss": 1.0, "num-examples": 3}


def reply(metrics, records=("arrays", "metrics")):
    arrays = record(np.ones(3, np.float32))
    metrics = MetricRecord({**metrics, "num-examples": 3})
    content = RecordDict({records[0]: arrays, records[1]: metrics})
    model = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    return read_model(SimpleNamespace(content=content), model, Terms("num-examples"))


def lengths(content):
    (metrics,) = content.metric_records.values()
    return {name: len(v) if isinstance(v, list) else -1 for name, v in metrics.items()}


@given(extras=st.lists(METRICS, min_size=1, max_size=7))
def test_nobody_is_refused_for_metrics_that_nobody_reads(extras):
    """The strategy is given those that are in all replies, with the same length."""
    replies = {k: reply({**one, "num-examples": 3}) for k, one in enumerate(extras)}
    assert not refused_replies(replies)
    common = common_contents(list(replies.values()))
    shared = set.intersection(*({*lengths(one.content).items()} for one in replies.values()))
    assert all({*lengths(content).items()} == shared for content in common)
    assert all(content["arrays"] == record(np.ones(3, np.float32)) for content in common)


@given(metrics=st.lists(METRICS, min_size=1, max_size=5), needed=st.sets(st.sampled_from(NAMES)))
def test_whoever_lacks_a_needed_metric_that_another_has_is_refused(metrics, needed):
    replies = {k: reply({**one, "num-examples": 3}) for k, one in enumerate(metrics)}
    refused = refused_replies(replies, needed=needed)
    known = needed & {name for one in metrics for name in one}
    for client, one in enumerate(metrics):
        assert known <= one.keys() or client in refused
    left = [one.content for client, one in replies.items() if client not in refused]
    for one in left:  # and with the same length, so that the strategy is given it
        assert {n: lengths(one)[n] for n in known} == {n: lengths(left[0])[n] for n in known}


def test_of_several_lengths_of_a_needed_metric_the_commonest_is_right():
    one, two = reply({"loss": 1.0}), reply({"loss": [1.0, 2.0]})
    assert list(refused_replies({0: one, 1: two}, needed=["loss"])) == [1]
    assert list(refused_replies({0: one, 1: two, 2: two}, needed=["loss"])) == [0]


@given(
    names=st.lists(
        st.sampled_from(
            [("arrays", "metrics"), ("metrics", "arrays"), ("a", "m"), ("arrays", "b")]
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_a_reply_calls_its_records_gets_nobody_refused(names):
    replies = {client: reply(USUAL, one) for client, one in enumerate(names)}
    assert not refused_replies(replies)
    common = common_contents(list(replies.values()))
    assert len({tuple(sorted(content)) for content in common}) == 1
    for content in common:
        assert len(content.array_records) == len(content.metric_records) == 1
        assert lengths(content) == dict.fromkeys(USUAL, -1)
    most = max(names.count(one) for one in names)
    assert set(common[0]) in [set(one) for one in names if names.count(one) == most]


# --- in a run -------------------------------------------------------------------------------------


def adding(metrics, kind="train", lost=()):
    """What adds metrics to the replies of a kind, and removes others."""

    def change(message, reply):
        if message.metadata.message_type != kind or "metrics" not in reply.content:
            return reply
        given = {**reply.content["metrics"], **metrics}
        content = {
            **reply.content,
            "metrics": MetricRecord({k: given[k] for k in given if k not in lost}),
        }
        return Message(RecordDict(content), reply_to=message)

    return change


class Watching(FedAvg):
    """Keeps what it aggregates."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.seen += [dict(reply.content["metrics"]) for reply in replies]
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize("who", [[0], [0, 1, 2], [1, 3, 4], [0, 1, 2, 4]])
def test_clients_with_an_extra_metric_outvote_nobody(who, tmp_path, caplog):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble = dict.fromkeys(who, adding({"f1": 0.5}))
    strategy = Watching(fraction_evaluate=0.0)
    with logged(caplog):
        _, result = run(Full(), grid, rounds=3, strategy=strategy, folder=tmp_path)
    for entry in lines(tmp_path):
        assert (entry["participated"], entry["faults"]) == ([0, 1, 2, 3, 4], {})
    assert {tuple(sorted(metrics)) for metrics in strategy.seen} == {("loss", "num-examples")}
    said = [
        r.getMessage() for r in caplog.records if "the metric f1 is not in all" in r.getMessage()
    ]
    assert len(said) == 1
    assert all((f"{k} (partition-{k})" in said[0]) == (k in who) for k in range(5))
    _, plain = run(Full(), MemoryGrid(numpy_app(), 5), rounds=3)
    assert vector(result.arrays).tolist() == vector(plain.arrays).tolist()


def test_a_selector_reads_the_losses_that_the_strategy_is_not_given(tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble = dict.fromkeys((0, 3), adding({}, lost=("loss",)))
    strategy = Watching(fraction_evaluate=0.0)
    selecting, _ = run(AFL(5), grid, rounds=1, strategy=strategy, folder=tmp_path)
    assert {tuple(metrics) for metrics in strategy.seen} == {("num-examples",)}
    known = np.isfinite(selecting._state.current.selector["losses"])
    assert known.tolist() == [False, True, True, False, True]


def test_an_optimiser_reads_the_steps_that_flower_is_not_given(tmp_path):
    """One client does not say its steps: it is taken to have trained as far as the others."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Counting:
        def init(self, population, model):
            return {}

        def step(self, state, delivery):
            seen.append((delivery.steps.tolist(), delivery.learning_rate))
            return delivery.model + delivery.mean, state

    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble = dict.fromkeys((0, 1, 3), adding({"local-steps": 7, "learning-rate": 0.1}))
    run(Full(), grid, rounds=1, strategy=OptimiserStrategy(Counting(), fraction_evaluate=0.0))
    assert seen == [([7, 7, 7, 7], 0.1)]


def test_a_metric_that_the_strategy_reads_is_no_extra_one(tmp_path):
    grid = MemoryGrid(numpy_app(loss_name="train_loss"), 5)
    grid.trouble[1] = adding({}, lost=("train_loss",))
    strategy = QFedAvg(client_learning_rate=0.1, fraction_evaluate=0.0)
    run(Full(), grid, rounds=2, strategy=strategy, folder=tmp_path)
    for entry in lines(tmp_path):
        assert (entry["participated"], entry["faults"]) == ([0, 2, 3, 4], {"malformed": 1})


@pytest.mark.parametrize("chosen", [1, 2])
def test_one_client_without_a_metric_that_the_strategy_reads_does_not_end_the_run(chosen, tmp_path):
    """It is at least half of a round."""
    grid = MemoryGrid(numpy_app(loss_name="train_loss"), 5)
    grid.trouble[1] = adding({}, lost=("train_loss",))
    strategy = QFedAvg(client_learning_rate=0.1, fraction_evaluate=0.0)
    run(RoundRobin(chosen), grid, rounds=6, strategy=strategy, folder=tmp_path)
    entries = lines(tmp_path)
    assert len(entries) == 6
    assert all(entry["participated"] and 1 not in entry["participated"] for entry in entries)
    assert sum(entry["faults"].get("malformed", 0) for entry in entries) >= 1


def test_a_metric_called_as_a_record_of_the_strategy_outvotes_nobody(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[0] = adding({"arrays": 1, "config": 2, "norm_bit": 1})
    run(Full(), grid, rounds=2, folder=tmp_path)
    assert [entry["participated"] for entry in lines(tmp_path)] == [[0, 1, 2, 3]] * 2


def test_an_extra_metric_of_evaluations_is_left_out_and_its_losses_are_known(tmp_path, caplog):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble = dict.fromkeys((0, 1, 2), adding({"f1": 0.5}, "evaluate"))
    selecting = select_with(FedAvg(), Full(), checkpoint=tmp_path, wait_for=5)
    with logged(caplog):
        result = selecting.start(grid, initial(), num_rounds=2, timeout=0.1)
    assert [entry["faults"] for entry in lines(tmp_path)] == [{}, {}]
    for metrics in result.evaluate_metrics_clientapp.values():
        assert set(metrics) == {"loss", "accuracy"}
    assert np.isfinite(selecting._state.current.known).tolist() == [True] * 5
    assert caplog.text.count("the metric f1 is not in all evaluate replies") == 1
