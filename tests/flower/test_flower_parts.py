"""Parts of the Flower room on their own, and paths that a whole run seldom takes."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading

import numpy as np
import pytest
from flower_grid import (
    SAYS_KEYS,
    ErrorCode,
    MemoryGrid,
    error,
    initial,
    is_training,
    lines,
    logged,
    numpy_app,
    quiet,
    record,
    run,
    server_score,
)
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcor.core.errors import FedcorError, RecordError
from fedcor.flower import select_with
from fedcor.flower.client_registry import Claim, Roster
from fedcor.flower.exchange import Exchange, SomeNodes, limited
from fedcor.rounds.model_arrays import layout_of
from fedcor.runs.checkpoints import CHECKPOINT, load_checkpoint, save_checkpoint
from fedcor.selectors.baselines import Full, Random


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(3,), (2,)], slice(None)),
        ([(4, 2), (4,), (3, 4), (3,)], slice(12, 27)),
        ([(4, 2), (2,), (4, 3)], slice(10, 22)),
        ([(2, 2), (7,)], slice(0, 4)),
    ],
)
def test_the_output_layer_is_the_last_matrix_with_its_bias(shapes, expected):
    model = {str(place): np.zeros(shape) for place, shape in enumerate(shapes)}
    assert layout_of(model).head == expected


def test_some_nodes_of_a_grid_are_a_grid():
    class Whole(MemoryGrid):
        run = "the run"

        def set_run(self, run):
            self.asked = run

        def create_message(self, *arguments):
            return arguments

    whole = Whole(numpy_app(), 3)
    one = next(iter(whole.contexts))
    some = SomeNodes(whole, [one])
    assert some.get_node_ids() == [one]
    if SAYS_KEYS:
        assert [node.node_id for node in some.get_nodes()] == [one]
    assert some.run == "the run"
    some.set_run("another")
    assert whole.asked == "another"
    content = RecordDict({"arrays": initial()})
    assert some.create_message(content, "train", one, "1") == (content, "train", one, "1", None)
    identifiers = list(some.push_messages([Message(content, one, "evaluate")]))
    assert len(identifiers) == len(list(some.pull_messages(identifiers))) == 1
    assert len(list(some.send_and_receive([Message(content, one, "evaluate")]))) == 1


def test_a_strategys_limits_are_put_back_after_an_error():
    strategy = FedAvg(fraction_train=0.1, min_available_nodes=9)
    with pytest.raises(ValueError, match="x"), limited(strategy, 3, everyone=True):
        assert (strategy.fraction_train, strategy.min_available_nodes) == (1.0, 3)
        raise ValueError("x")
    with limited(strategy, 3):
        assert (strategy.fraction_train, strategy.min_available_nodes) == (0.1, 3)
    assert (strategy.fraction_train, strategy.min_available_nodes) == (0.1, 9)


def test_a_second_reply_to_a_message_is_ignored():
    grid, roster = MemoryGrid(numpy_app(), 1), Roster()
    (node,) = grid.contexts
    roster.enrol({node: Claim("a")})
    exchange = Exchange(grid, roster.names, 0)
    message = Message(RecordDict({"arrays": initial()}), node, "evaluate")
    grid.push_messages([message])
    (reply,) = grid.pull_messages([message.metadata.message_id])
    assert exchange.match({0: message}, [reply, reply], task="probe") == {0: reply}
    assert not exchange.faults


def test_a_node_that_is_gone_when_it_is_asked_who_it_is_is_not_enrolled(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[3] = lambda m, _r: error(m, ErrorCode.NODE_UNAVAILABLE, "gone")
    run(Full(), grid, rounds=1, folder=tmp_path)
    assert lines(tmp_path)[0]["selected"] == [0, 1, 2]


@dataclasses.dataclass(frozen=True)
class Asking(Random):
    """Keeps the losses in `seen`, and chooses client 0."""

    seen: list = dataclasses.field(default_factory=list, compare=False)

    def select(self, state, federation):
        self.seen.append(federation.losses(federation.available))
        return np.array([0]), state


def test_a_node_that_lost_the_model_before_a_question_is_sent_it(tmp_path):
    """The model stays the same, and client 1 holds it, but its first answer could not be used."""

    class Skipping(FedAvg):
        def aggregate_train(self, server_round, replies):
            return None, None

    grid, answers = MemoryGrid(numpy_app(), 3), []

    def nan_at_first(message, reply):
        if message.metadata.message_type != "evaluate" or not reply.content.metric_records:
            return reply
        answers.append(reply)
        if len(answers) > 1:
            return reply
        for context in grid.contexts.values():
            context.state.clear()  # every node restarts
        metrics = MetricRecord({"loss": float("nan"), "num-examples": 3})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid.trouble[1] = nan_at_first
    selector = Asking(1)
    run(selector, grid, rounds=2, strategy=Skipping(fraction_evaluate=0.0), folder=tmp_path)
    first, second = selector.seen
    assert np.isnan(first).tolist() == [False, True, False]
    assert np.isfinite(second).all()
    assert [entry["faults"] for entry in lines(tmp_path)] == [{"unusable": 1}, {}]
    assert [entry["probed"] for entry in lines(tmp_path)] == [3, 1]
    # Asked without the model, which it says it has lost, and then with it.
    node = grid.node_of(1)
    asked = [m for m in grid.sent if m.metadata.dst_node_id == node and "config" in m.content]
    assert ["arrays" in m.content for m in asked] == [True, False, True]


def test_a_candidate_that_nobody_delivers_changes_nothing():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Trying(Random):
        def select(self, state, federation):
            seen.append(federation.loss_changes(np.array([], dtype=np.int64)))
            seen.append(federation.loss_changes(np.array([0])))
            return np.array([1]), state

    grid = MemoryGrid(numpy_app(), 3)
    grid.trouble[0] = lambda m, r: (
        error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "x") if is_training(m) else r
    )
    run(Trying(1), grid, rounds=1)
    assert all(np.isnan(changes).all() for changes in seen)


def test_a_strategy_that_loses_an_array_or_its_shape_is_stopped():
    class Losing(FedAvg):
        made = ArrayRecord({"w": record(np.ones(3, np.float32))["w"]})

        def aggregate_train(self, server_round, replies):
            return self.made, None

    class Reshaping(Losing):
        made = record(np.ones(4, np.float32))

    for strategy, wrong in ((Losing, "b is missing"), (Reshaping, "b has another shape")):
        with pytest.raises(FedcorError, match=f"round 1: .*{strategy.__name__} made.*{wrong}"):
            run(
                Random(2),
                MemoryGrid(numpy_app(), 3),
                rounds=1,
                strategy=strategy(fraction_evaluate=0.0),
            )


def test_a_strategy_that_is_not_known_to_weight_replies_counts_them_alike():
    class Alike(FedAvg):
        def __init__(self):
            super().__init__(fraction_evaluate=0.0)
            del self.weighted_by_key

        def summary(self): ...

        def aggregate_train(self, server_round, replies):
            return next(iter(replies)).content["arrays"], None

    weights = []

    @dataclasses.dataclass(frozen=True)
    class Watching(Full):
        def observe(self, state, outcome):
            weights.append(outcome.aggregation_weights.tolist())
            return state

    run(Watching(), MemoryGrid(numpy_app(), 3), rounds=1, strategy=Alike())
    assert weights == [[1.0, 1.0, 1.0]]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    run(Random(2), MemoryGrid(numpy_app(), 3), rounds=1, folder=tmp_path)
    saved = load_checkpoint(tmp_path / CHECKPOINT)
    del saved.arrays["known"]
    header = json.dumps(saved.header)
    save_checkpoint(tmp_path, saved.arrays, header, rounds=saved.rounds, keep=False)
    with pytest.raises(RecordError, match="does not fit this run.*choose another folder"):
        run(Random(2), MemoryGrid(numpy_app(), 3), rounds=2, folder=tmp_path)


def test_memory_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    class Remembering(FedAvg):
        def __init__(self):
            super().__init__(fraction_evaluate=0.0)
            self.lock = threading.Lock()  # cannot be copied
            self.momentum = np.zeros(2)

        def configure_train(self, server_round, arrays, config, grid):
            self.seen = {*getattr(self, "seen", ()), server_round}
            self.momentum = self.momentum + 1
            return super().configure_train(server_round, arrays, config, grid)

    grid = MemoryGrid(numpy_app(), 3)
    selecting = select_with(Remembering(), Random(2), checkpoint=tmp_path, wait_for=3)
    with logged(caplog, logging.WARNING):
        selecting.start(grid, initial(), num_rounds=3, timeout=0.1, evaluate_fn=server_score)
    assert caplog.text.count("attribute seen (a set) cannot be written") == 1
    assert "attribute lock" not in caplog.text
    resumed = Remembering()
    select_with(resumed, Random(2), checkpoint=tmp_path).start(grid, initial(), num_rounds=3)
    assert resumed.momentum.tolist() == [3, 3]


def test_without_a_folder_every_round_is_still_reported():
    rounds = []
    selecting = select_with(quiet(), Random(2), wait_for=3, on_round=rounds.append)
    selecting.start(MemoryGrid(numpy_app(), 3), initial(), num_rounds=2, timeout=0.1)
    assert [one.round for one in rounds] == [0, 1]


def test_nodes_that_all_keep_silent_at_first_are_asked_a_second_time(tmp_path, caplog):
    grid, asked = MemoryGrid(numpy_app(), 3), set()

    def silent_once(message, reply):
        node = message.metadata.dst_node_id
        if node in asked:
            return reply
        asked.add(node)
        return None

    grid.trouble = dict.fromkeys(range(3), silent_once)
    with logged(caplog, logging.ERROR):
        run(Full(), grid, rounds=1, folder=tmp_path)
    assert "round 1: no answer to the question for the identity from 3 nodes" in caplog.text
    assert lines(tmp_path)[0]["participated"] == [0, 1, 2]
