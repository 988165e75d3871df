"""A client that fails again and again is left alone, for longer each time, and comes back."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging

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
    logged,
    numpy_app,
    quiet,
    record,
    run,
    server_score,
    vector,
)
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcor.cli import main
from fedcor.core.errors import RecordError
from fedcor.flower import select_with
from fedcor.reporting.notes import faults_note
from fedcor.runs.checkpoints import CHECKPOINT, load_checkpoint, save_checkpoint
from fedcor.runs.record import read_run
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice


def in_training(change):
    return lambda m, r: change(m, r) if is_training(m) else r


def raises(message, _reply):
    return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom")


def malformed(message, _reply):
    return Message(RecordDict({"metrics": MetricRecord({"a": 1})}), reply_to=message)


def unusable(message, reply):
    metrics = MetricRecord({**reply.content["metrics"], "num-examples": -1})
    content = RecordDict({"arrays": reply.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


def too_long(message, reply):
    arrays = record(np.full(3, 1e7, np.float32))
    content = RecordDict({"arrays": arrays, "metrics": reply.content["metrics"]})
    return Message(content, reply_to=message)


def tried(folder, client):
    return [entry["round"] for entry in lines(folder) if client in entry["selected"]]


@dataclasses.dataclass(frozen=True)
class Asking(Full):
    """Asks everyone for a loss, and takes everyone."""

    def select(self, state, federation):
        federation.losses(federation.available)
        return super().select(state, federation)


@pytest.mark.parametrize("change", [raises, malformed, unusable, too_long])
@pytest.mark.parametrize("selector", [Full(), Asking()], ids=["unasked", "answers probes"])
def test_a_client_whose_trainings_are_useless_is_left_alone_for_longer_each_time(
    change, selector, tmp_path
):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = in_training(change)
    run(selector, grid, rounds=21, folder=tmp_path)
    # From the second time in a row on: for 1, 2, 4, 8 rounds.
    assert tried(tmp_path, 2) == [0, 1, 3, 6, 11, 20]
    for entry in lines(tmp_path):
        alone = [] if 2 in entry["selected"] else [2]
        assert entry.get("quarantined", []) == alone
        assert ("quarantined" in entry) == bool(alone)


def test_a_client_that_answers_no_probe_but_trains_well_is_left_alone_too(tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = lambda m, r: (
        raises(m, r) if m.metadata.message_type == "evaluate" and "config" in m.content else r
    )
    run(Asking(), grid, rounds=12, folder=tmp_path)
    assert tried(tmp_path, 2) == [0, 1, 3, 6, 11]
    assert 2 in lines(tmp_path)[0]["participated"]


def test_a_client_that_is_late_in_every_training_is_not_forgiven_for_a_probe(tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = in_training(lambda _m, _r: None)
    run(Asking(), grid, rounds=28, folder=tmp_path)
    assert tried(tmp_path, 2) == [0, 2, 5, 10, 19]  # left alone for 1, 2, 4, 8, 8, ... rounds


def test_a_dead_node_fails_at_everything_and_is_counted_once(tmp_path):
    """It is asked for a loss in some rounds, and trained in others."""

    @dataclasses.dataclass(frozen=True)
    class Sometimes(Full):
        def select(self, state, federation):
            if federation.round % 4 == 0:
                federation.losses(federation.available)
            return super().select(state, federation)

    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = lambda m, r: r if "config" not in m.content else None
    run(Sometimes(), grid, rounds=22, folder=tmp_path)
    assert tried(tmp_path, 2) == [0, 2, 5, 10, 19]


def test_one_bad_answer_is_chance_and_a_good_one_ends_it(tmp_path):
    grid, times = MemoryGrid(numpy_app(), 4), []

    def sometimes(message, reply):
        times.append(message)
        return reply if len(times) in (2, 5, 7) else raises(message, reply)

    grid.trouble[1] = in_training(sometimes)
    run(Full(), grid, rounds=12, folder=tmp_path)
    # Bad, good, bad, bad: left alone once; good, bad, good, bad, bad: once more.
    assert tried(tmp_path, 1) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 11]


def test_attempts_at_one_round_count_once(tmp_path):
    """All fail for a moment: that is one fault of each, however often the round is tried."""
    grid, replies = MemoryGrid(numpy_app(), 3), []

    def fail_at_first(message, reply):
        replies.append(message)
        return raises(message, reply) if len(replies) <= 9 else reply

    grid.trouble = dict.fromkeys(range(3), in_training(fail_at_first))
    run(Full(), grid, rounds=2, folder=tmp_path)
    assert [entry["selected"] for entry in lines(tmp_path)] == [[0, 1, 2]] * 2


def test_if_all_are_left_alone_all_may_be_chosen(tmp_path):
    grid, asked = MemoryGrid(numpy_app(), 3), []

    def silent_at_first(message, reply):
        asked.append(message)
        return None if len(asked) <= 3 else reply

    grid.trouble = dict.fromkeys(range(3), in_training(silent_at_first))
    run(Full(), grid, rounds=1, folder=tmp_path)
    (entry,) = lines(tmp_path)
    assert entry["selected"] == entry["participated"] == [0, 1, 2]
    assert entry["faults"] == {"late": 3}
    assert "quarantined" not in entry


def test_nobody_asks_or_evaluates_one_that_is_left_alone(tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = in_training(raises)
    seen = []

    def score(server_round, arrays):
        seen.append(len([m for m in grid.sent if m.metadata.dst_node_id == node]))
        return server_score(server_round, arrays)

    node = grid.node_of(2)
    selecting = select_with(FedAvg(), Asking(), checkpoint=tmp_path, wait_for=5)
    selecting.start(grid, initial(), num_rounds=8, timeout=0.1, evaluate_fn=score)
    alone = [2 in entry.get("quarantined", []) for entry in lines(tmp_path)]
    assert alone == [False, False, True, False, True, True, False, True]
    # In the round of its second failure, it is not asked to evaluate any more.
    assert [b == a for a, b in itertools.pairwise(seen)] == alone


def in_evaluation(change):
    return lambda m, r: change(m, r) if m.metadata.message_type == "evaluate" else r


def evaluations(selector, grid, folder, rounds):
    """(rounds,) how many evaluate messages client 2 got in each round, questions included."""
    node, counts = grid.node_of(2), []

    def count(_record):
        mine = [m for m in grid.sent if m.metadata.dst_node_id == node]
        counts.append(len([m for m in mine if m.metadata.message_type == "evaluate"]))

    settings = {"on_round": count, "preflight": False}
    run(selector, grid, rounds, strategy=FedAvg(), folder=folder, **settings)
    return [after - before for before, after in itertools.pairwise([0, *counts])]


@pytest.mark.parametrize("change", [raises, lambda _m, _r: None], ids=["error", "silent"])
def test_a_client_that_fails_in_the_strategys_own_evaluation_trains_all_the_same(change, tmp_path):
    """It may have no test data. Such faults are counted, and nothing follows from them."""
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = in_evaluation(change)
    counts = evaluations(Full(), grid, tmp_path, rounds=6)
    assert counts == [1] * 6
    assert all(2 in entry["participated"] for entry in lines(tmp_path))
    assert not any("quarantined" in entry for entry in lines(tmp_path))
    assert all(sum(entry["faults"].values()) == 1 for entry in lines(tmp_path))


@pytest.mark.parametrize("selector", [FedCor(3, **QUICK), PowerOfChoice(3), Random(3)])
def test_every_selector_leaves_it_alone(selector, tmp_path):
    grid = MemoryGrid(numpy_app(), 6)
    for client in (0, 3):
        grid.trouble[client] = in_training(raises)
    run(selector, grid, rounds=20, folder=tmp_path)
    for entry in lines(tmp_path):
        assert not set(entry.get("quarantined", [])) & set(entry["selected"])
    assert any("quarantined" in entry for entry in lines(tmp_path))


def test_the_log_says_once_until_when(caplog):
    grid = MemoryGrid(numpy_app(), 9)
    grid.trouble[2] = in_training(raises)
    grid.trouble[3] = in_training(lambda _m, _r: None)
    with logged(caplog):
        run(Full(), grid, rounds=12)
    said = [m for m in caplog.messages if "left alone until" in m]
    assert said == [
        "round 1: client 3 (partition-3) failed once: left alone until round 3",
        "round 2: client 2 (partition-2) failed 2 times in a row: left alone until round 4",
        "round 3: client 3 (partition-3) failed 2 times in a row: left alone until round 6",
        "round 4: client 2 (partition-2) failed 3 times in a row: left alone until round 7",
        "round 6: client 3 (partition-3) failed 3 times in a row: left alone until round 11",
        "round 7: client 2 (partition-2) failed 4 times in a row: left alone until round 12",
        "round 11: client 3 (partition-3) failed 4 times in a row: left alone until round 20",
        "round 12: client 2 (partition-2) failed 5 times in a row: left alone until round 21",
    ]
    caplog.clear()
    grid = MemoryGrid(numpy_app(), 9)
    grid.trouble = dict.fromkeys(range(7), in_training(lambda _m, _r: None))
    with logged(caplog, logging.INFO):
        run(Full(), grid, rounds=2)
    names = ", ".join(f"partition-{k}" for k in range(5))
    said = f"round 1: 7 clients ({names} and 2 more) failed once: left alone until round 3"
    assert said in caplog.messages
    assert "(2 reachable, 7 left alone)" in caplog.text


def test_a_resumed_run_leaves_the_same_clients_alone(tmp_path):
    class Killed(Exception):
        pass

    def go(folder, killed_after=None):
        grid = MemoryGrid(numpy_app(), 6)
        grid.trouble = {1: in_training(raises), 4: in_training(lambda _m, _r: None)}

        def score(server_round, arrays):
            if server_round == killed_after:
                raise Killed
            return server_score(server_round, arrays)

        selecting = select_with(
            quiet(), Random(3), checkpoint=folder, wait_for=6, probe_timeout=0.05
        )
        return selecting.start(grid, initial(), num_rounds=14, timeout=0.05, evaluate_fn=score)

    whole = go(tmp_path / "whole")
    for round in (3, 7, 11):
        with pytest.raises(Killed):
            go(tmp_path / "killed", round)
    result = go(tmp_path / "killed")
    for key in ("selected", "quarantined", "faults"):
        one, other = ([e.get(key) for e in lines(tmp_path / name)] for name in ("whole", "killed"))
        assert one == other
    assert any(e.get("quarantined") for e in lines(tmp_path / "whole"))
    assert vector(result.arrays).tolist() == vector(whole.arrays).tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("roster/sizes"),
        lambda arrays: arrays.update({"backoff/faults": np.array([0, 2])}),
    ],
    ids=["an array is missing", "an array has another shape"],
)
def test_a_checkpoint_of_another_form_is_refused(change, tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    run(Full(), grid, rounds=1, folder=tmp_path)
    saved = load_checkpoint(tmp_path / CHECKPOINT)
    change(saved.arrays)
    header = json.dumps(saved.header)
    save_checkpoint(tmp_path, saved.arrays, header, rounds=saved.rounds, keep=False)
    with pytest.raises(RecordError, match=r"does not fit this run.*delete it to start over"):
        run(Full(), grid, rounds=4, folder=tmp_path)


def test_whoever_listens_to_the_rounds_hears_of_it():
    grid, heard = MemoryGrid(numpy_app(), 4), []
    grid.trouble[1] = in_training(raises)
    run(Full(), grid, rounds=4, on_round=heard.append)
    assert [entry.quarantined for entry in heard] == [[], [], [1], []]


def test_reports_say_what_went_wrong(tmp_path, capsys):
    grid = MemoryGrid(numpy_app(), 6)
    run(Full(), grid, rounds=1, folder=tmp_path / "well")
    grid = MemoryGrid(numpy_app(), 6)
    grid.trouble = {1: in_training(raises), 4: in_training(lambda _m, _r: None)}
    run(Full(), grid, rounds=8, folder=tmp_path / "run")
    assert faults_note(read_run(tmp_path / "well")) == ""
    assert main(["report", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert (
        f"{tmp_path / 'run'}: faults: 4 error, 3 late; left alone: client 4 (partition-4) in 5 "
        "rounds, client 1 (partition-1) in 4 rounds\n"
    ) in shown
    assert main(["explain", str(tmp_path / "run"), "--round", "5"]) == 0
    assert "left alone after faults: 1, 4\n" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "run"), "--round", "1"]) == 0
    assert "left alone" not in capsys.readouterr().out
