"""Which replies go together: an extra metric gets nobody refused, a missing usual one does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flower_grid import MemoryGrid, initial, lines, logged, numpy_app, record, run, vector
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, QFedAvg
from hypothesis import given
from hypothesis import strategies as st

from fedcor.flower import OptimiserStrategy, select_with
from fedcor.flower.reply_schema import Signature, compare_replies, with_common_metrics
from fedcor.selectors.afl import AFL
from fedcor.selectors.baselines import Full, RoundRobin

NAMES = ("a", "b", "c", "loss")
VALUES = st.one_of(st.floats(0, 1), st.integers(0, 9), st.lists(st.floats(0, 1), max_size=2))
METRICS = st.dictionaries(st.sampled_from(NAMES), VALUES)
USUAL = {"loss": 1.0, "num-examples": 3}


def reply(metrics, records=("arrays", "metrics")):
    arrays = record(np.ones(3, np.float32))
    return RecordDict({records[0]: arrays, records[1]: MetricRecord(metrics)})


def lengths(content):
    (metrics,) = content.metric_records.values()
    return {name: len(v) if isinstance(v, list) else -1 for name, v in metrics.items()}


def kept(replies, found):
    return [content for client, content in replies.items() if client not in found.refused]


@given(
    extras=st.lists(METRICS, min_size=1, max_size=7),
    honest=st.sets(st.integers(0, 7)),
    known=st.booleans(),
)
def test_whatever_others_add_a_reply_with_the_usual_metrics_is_never_refused(extras, honest, known):
    """Minorities and majorities; what is added may also take the place of a usual metric."""
    replies = {
        client: reply(USUAL if client in honest else {**USUAL, **extra})
        for client, extra in enumerate(extras)
    }
    usual = compare_replies({0: reply(USUAL)}, None).usual if known else None
    found = compare_replies(replies, usual)
    assert not honest & found.refused.keys()
    assert 2 * len(found.refused) < len(replies)
    assert known or not found.refused
    common = with_common_metrics(kept(replies, found))
    assert len({tuple(sorted(lengths(content).items())) for content in common}) == 1
    assert lengths(common[0])["num-examples"] == -1
    assert all(content["arrays"] == record(np.ones(3, np.float32)) for content in common)
    left = {name for content in kept(replies, found) for name in lengths(content)}
    assert left - lengths(common[0]).keys() <= found.left_out.keys()


@given(rounds=st.lists(st.lists(METRICS, max_size=6), min_size=1, max_size=5))
def test_no_later_round_refuses_the_client_that_was_there_first(rounds):
    """Client 0 sends the same metrics in every round; the others send what they like."""
    usual = None
    for extras in rounds:
        replies = {0: reply(USUAL)}
        replies |= {client: reply({**USUAL, **one}) for client, one in enumerate(extras, start=1)}
        found = compare_replies(replies, usual)
        assert 0 not in found.refused
        usual = found.usual


@given(
    metrics=st.lists(METRICS, min_size=1, max_size=7),
    usual=METRICS,
    wanted=st.sets(st.sampled_from(NAMES)),
)
def test_those_who_are_refused_are_a_minority_and_lack_what_most_have(metrics, usual, wanted):
    replies = {k: reply({**one, "num-examples": 3}) for k, one in enumerate(metrics)}
    before = compare_replies({0: reply({**usual, "num-examples": 3})}, None).usual
    found = compare_replies(replies, before, wanted=wanted)
    assert 2 * len(found.refused) < len(replies)
    common = lengths(with_common_metrics(kept(replies, found))[0])
    for client in found.refused:
        assert common.items() - lengths(replies[client]).items()
    for name in found.left_out:
        assert name not in common
    assert found.usual.metrics <= before.metrics
    assert Signature.from_text(found.usual.to_text()) == found.usual


@given(
    metrics=st.lists(METRICS, min_size=1, max_size=5),
    usual=st.one_of(st.none(), METRICS),
    needed=st.sets(st.sampled_from(NAMES)),
)
def test_whoever_lacks_a_needed_metric_is_refused_as_soon_as_it_is_known(metrics, usual, needed):
    replies = {k: reply({**one, "num-examples": 3}) for k, one in enumerate(metrics)}
    before = None if usual is None else compare_replies({0: reply(usual)}, None).usual
    found = compare_replies(replies, before, needed=needed)
    known = needed & ({name for one in metrics for name in one} | {*(usual or {})})
    for client, one in enumerate(metrics):
        assert known <= one.keys() or client in found.refused
    left = kept(replies, found)
    for one in left:  # and with the same length, so that the strategy is given it
        assert {n: lengths(one)[n] for n in known} == {n: lengths(left[0])[n] for n in known}
    if not left:
        assert found.usual == before


def test_of_several_lengths_of_a_needed_metric_the_usual_one_is_right():
    one, two = reply({"loss": 1.0}), reply({"loss": [1.0, 2.0]})
    usual = compare_replies({0: two}, None).usual
    assert list(compare_replies({0: one, 1: two}, None, needed=["loss"]).refused) == [1]
    assert list(compare_replies({0: one, 1: two, 2: two}, None, needed=["loss"]).refused) == [0]
    assert list(compare_replies({0: one, 1: one, 2: two}, usual, needed=["loss"]).refused) == [0, 1]


def test_a_metric_that_is_usual_and_that_most_have_is_kept():
    before = compare_replies({0: reply(USUAL)}, None).usual
    replies = {0: reply({"num-examples": 1}), 1: reply(USUAL), 2: reply(USUAL)}
    found = compare_replies(replies, before)
    assert found.refused == {0: "its reply lacks the metric loss that the others have"}
    replies[0] = reply({"num-examples": 1, "loss": [1.0, 2.0]})
    why = "its metric loss is a list of 2, the others' is a single number"
    assert compare_replies(replies, before).refused == {0: why}
    # Without most of them, it is left out, and no longer usual.
    del replies[2]
    found = compare_replies(replies, before)
    assert (found.refused, found.left_out) == ({}, {"loss": [0, 1]})
    assert found.usual.metrics == {("num-examples", -1)}
    assert lengths(with_common_metrics(list(replies.values()))[0]) == {"num-examples": -1}


def test_where_each_lacks_another_usual_metric_most_are_kept():
    full = {"a": 1, "b": 1, "c": 1}
    before = compare_replies({0: reply(full)}, None).usual
    replies = {k: reply({n: 1 for n in full if n != lost}) for k, lost in enumerate("abc")}
    found = compare_replies(replies, before)
    assert len(found.refused) == 1
    assert len(found.left_out) == 2


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
    assert not compare_replies(replies, None).refused
    common = with_common_metrics(list(replies.values()))
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


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (adding({}, lost=("loss",)), "its reply lacks the metric loss that the others have"),
        (adding({"loss": [1.0, 2.0]}), "its metric loss is a list of 2, the others' is a single"),
    ],
)
def test_a_client_that_lacks_a_usual_metric_is_refused(change, why, resumed, tmp_path, caplog):
    grid, later = MemoryGrid(numpy_app(), 5), []
    grid.trouble[2] = lambda m, r: change(m, r) if later else r

    class Changing(FedAvg):
        def aggregate_train(self, server_round, replies):
            later.append(server_round)
            return super().aggregate_train(server_round, replies)

    if resumed:
        run(Full(), grid, rounds=1, strategy=Changing(fraction_evaluate=0.0), folder=tmp_path)
    with logged(caplog):
        run(Full(), grid, rounds=2, strategy=Changing(fraction_evaluate=0.0), folder=tmp_path)
    first, second = lines(tmp_path)
    assert (first["participated"], first["faults"]) == ([0, 1, 2, 3, 4], {})
    assert (second["participated"], second["faults"]) == ([0, 1, 3, 4], {"malformed": 1})
    assert f"round 2: client 2 (partition-2): malformed: {why}" in caplog.text


def test_a_selector_reads_the_losses_that_the_strategy_is_not_given(tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble = dict.fromkeys((0, 3), adding({}, lost=("loss",)))
    strategy = Watching(fraction_evaluate=0.0)
    selecting, _ = run(AFL(5), grid, rounds=1, strategy=strategy, folder=tmp_path)
    assert {tuple(metrics) for metrics in strategy.seen} == {("num-examples",)}
    known = np.isfinite(selecting._state.selector["losses"])
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
    # With one client per round it must not be the first: nobody could say what is usual.
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
    assert sorted(selecting._state.model.losses) == [0, 1, 2, 3, 4]
    assert caplog.text.count("the metric f1 is not in all evaluate replies") == 1
