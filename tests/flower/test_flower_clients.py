"""Who is who: names and numbers of clients, on nodes that come, leave and restart."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    SAYS_KEYS,
    MemoryGrid,
    initial,
    is_introduction,
    lines,
    logged,
    numpy_app,
    our_lines,
    quiet,
    run,
    server_score,
)
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

from fedcor.flower import answers_probes, federation_state, select_with
from fedcor.flower.client_registry import Claim, Roster
from fedcor.flower.protocol import NOTE
from fedcor.selectors.afl import AFL
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice


def test_numbers_follow_the_partitions_whatever_the_nodes_are_called():
    for seed in range(3):
        selecting, _ = run(Random(3), grid := MemoryGrid(numpy_app(), 12, seed=seed), rounds=1)
        for partition in range(12):
            assert selecting._state.roster.client(grid.node_of(partition)) == partition


def test_a_node_that_comes_late_is_taken_in(tmp_path):
    for selector in (FedCor(3, **QUICK), AFL(3), PowerOfChoice(3), Random(3), Full()):
        grid, folder = MemoryGrid(numpy_app(), 6), tmp_path / type(selector).__name__

        def score(server_round, arrays, grid=grid):
            if server_round == 4:
                grid.join()
                grid.join()
            return server_score(server_round, arrays)

        selecting = select_with(quiet(), selector, checkpoint=folder, wait_for=6)
        selecting.start(grid, initial(), num_rounds=12, evaluate_fn=score, timeout=0.1)
        if isinstance(selector, Random | Full):
            assert {6, 7} <= {k for entry in lines(folder) for k in entry["selected"]}
        if isinstance(selector, FedCor):  # it may find them dispensable, but it has measured them
            assert np.isfinite(selecting._state.current.selector["samples"][-1]).all()
        assert (folder / "clients.tsv").read_text().splitlines()[-1] == "7\tpartition-7"


def test_a_selector_that_cannot_take_in_clients_starts_over(tmp_path, caplog):
    @dataclasses.dataclass(frozen=True)
    class Counting:
        clients_per_round: int

        def init(self, population):
            return {"seen": np.zeros(population.count)}

        def select(self, state, federation):
            return np.argsort(state["seen"], kind="stable")[: self.clients_per_round], state

        def observe(self, state, outcome):
            seen = state["seen"].copy()
            seen[outcome.participated] += 1
            return {"seen": seen}

    grid = MemoryGrid(numpy_app(), 3)

    def score(server_round, arrays):
        if server_round == 2:
            grid.join()
        return server_score(server_round, arrays)

    with logged(caplog, logging.WARNING):
        select_with(quiet(), Counting(1), checkpoint=tmp_path).start(
            grid, initial(), num_rounds=6, evaluate_fn=score, timeout=0.1
        )
    assert "its state starts over" in caplog.text
    assert [entry["selected"] for entry in lines(tmp_path)] == [[0], [1], [0], [1], [2], [3]]


def test_a_node_that_left_is_not_waited_for(tmp_path):
    grid = MemoryGrid(numpy_app(), 6)

    def score(server_round, arrays):
        if server_round == 2:
            for partition in (0, 1, 2, 3, 4):
                grid.leave(partition)
        return server_score(server_round, arrays)

    strategy = FedAvg(min_available_nodes=6, min_train_nodes=6, min_evaluate_nodes=6)
    selecting = select_with(strategy, FedCor(3, **QUICK), checkpoint=tmp_path, probe_timeout=0.1)
    selecting.start(grid, initial(), num_rounds=5, evaluate_fn=score, timeout=0.1)
    assert [entry["selected"] for entry in lines(tmp_path)][2:] == [[5]] * 3


def test_a_client_keeps_its_number_when_its_node_restarts(tmp_path):
    grid = MemoryGrid(numpy_app(), 6)

    def score(server_round, arrays):
        if server_round == 2:
            grid.leave(3)
            grid.join(partition=3)
        return server_score(server_round, arrays)

    selecting = select_with(quiet(), Full(), checkpoint=tmp_path)
    selecting.start(grid, initial(), num_rounds=4, evaluate_fn=score, timeout=0.1)
    assert all(entry["participated"] == [0, 1, 2, 3, 4, 5] for entry in lines(tmp_path))


def test_clients_without_the_mod_are_asked_with_plain_messages(tmp_path):
    grid = MemoryGrid(numpy_app(mods=[], loss_name="eval_loss"), 8)
    run(FedCor(3, **QUICK), grid, rounds=6, folder=tmp_path)
    entries = lines(tmp_path)
    assert all(len(entry["participated"]) == 3 for entry in entries)
    assert entries[0]["probed"] == 16
    assert all(not entry["faults"] for entry in entries)
    assert all(NOTE not in m.content for m in grid.sent if m.content.array_records)
    assert ("key-" if SAYS_KEYS else "node-") in (tmp_path / "clients.tsv").read_text()


def test_clients_that_do_not_say_who_they_are_are_known_by_their_nodes_keys(tmp_path):
    """An id alone would make each of them a second client after a restart of the SuperLink."""

    def without_partition(message, reply):
        if is_introduction(message):
            del reply.content.config_records[NOTE]["partition"]
        return reply

    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble = dict.fromkeys(range(4), without_partition)
    selecting, _ = run(Random(2), grid, rounds=2, folder=tmp_path)
    assert all(
        name.startswith("key-" if SAYS_KEYS else "node-") for name in selecting._state.roster.names
    )
    assert all(selecting._state.roster.has_mod(client) for client in range(4))


def test_a_name_of_its_own_comes_before_the_partition(tmp_path):
    run(
        Random(1),
        MemoryGrid(numpy_app(mods=[answers_probes(name="north")]), 1),
        rounds=1,
        folder=tmp_path,
    )
    assert (tmp_path / "clients.tsv").read_text() == "0\tnorth\n"


# --- introductions need nothing of the app --------------------------------------------------------


def names(folder):
    return [line.split("\t")[1] for line in (folder / "clients.tsv").read_text().splitlines()]


def training_app(mods, train_mods=(), evaluate_mods=None):
    """An app that trains, and evaluates only if `evaluate_mods` is given; and what it was sent."""
    whole, seen = numpy_app(mods=[]), []
    app = ClientApp(mods=list(mods))

    @app.train(mods=list(train_mods))
    def train(message, context):
        seen.append(message)
        return whole(message, context)

    if evaluate_mods is not None:

        @app.evaluate(mods=list(evaluate_mods))
        def evaluate(message, context):
            return whole(message, context)

    return app, seen


def error_replies(grid):
    """The errors among all replies from now on."""
    found = []

    def look(_message, reply):
        if reply.has_error():
            found.append(reply.error.reason)
        return reply

    for context in grid.contexts.values():
        grid.trouble[int(context.node_config["partition-id"])] = look
    return found


def test_an_app_without_an_evaluate_function_says_who_it_is(tmp_path):
    app, seen = training_app([answers_probes()])
    grid = MemoryGrid(app, 5)
    errors = error_replies(grid)
    run(Random(2), grid, rounds=2, folder=tmp_path)
    assert names(tmp_path) == [f"partition-{k}" for k in range(5)]
    assert errors == []
    assert all(message.content.array_records for message in seen)  # no introduction reached it
    assert len(seen) == 4


def test_an_app_of_the_old_form_says_who_it_is(tmp_path):
    """`ClientApp(client_fn=...)`: a NumPyClient, which new strategies cannot train with."""

    class Idle(NumPyClient):
        def fit(self, parameters, config):
            raise AssertionError("an introduction reached the app")

    app = ClientApp(client_fn=lambda context: Idle().to_client(), mods=[answers_probes()])
    selecting = select_with(quiet(), Random(2), checkpoint=tmp_path, attempts=1, probe_timeout=0.1)
    with pytest.raises(Exception, match="no client delivered"):
        selecting.start(MemoryGrid(app, 3), initial(), num_rounds=1, timeout=0.1)
    assert selecting._state.roster.names == ["partition-0", "partition-1", "partition-2"]


@pytest.mark.parametrize(
    "mod", [adaptiveclipping_mod, fixedclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 1e-3)]
)
def test_a_mod_that_rejects_introductions_is_said_once(mod, tmp_path, caplog):
    app, _ = training_app([mod, answers_probes()])
    strategy = DifferentialPrivacyClientSideFixedClipping(quiet(), 0.1, 1.0, 2)
    with logged(caplog):
        run(Random(2), MemoryGrid(app, 4), rounds=2, strategy=strategy, folder=tmp_path)
    (line,) = [line for line in our_lines(caplog) if "answers_probes() first" in line]
    assert line.startswith("4 of 4 nodes")
    assert "expects exactly one ArrayRecord" in line  # the mod's own reason
    # With ours first, there is nothing to say.
    caplog.clear()
    app, _ = training_app([answers_probes(), mod])
    with logged(caplog):
        run(Random(2), MemoryGrid(app, 4), rounds=2, strategy=strategy, folder=tmp_path / "first")
    assert not [line for line in our_lines(caplog) if "answers_probes" in line]
    assert names(tmp_path / "first") == [f"partition-{k}" for k in range(4)]


def test_the_mod_also_stands_before_those_of_single_functions(tmp_path, caplog):
    """A clipping mod belongs to the train function: it rejects every evaluate message."""
    app, _ = training_app([answers_probes()], [fixedclipping_mod], evaluate_mods=[])
    strategy = DifferentialPrivacyClientSideFixedClipping(quiet(), 0.1, 1.0, 2)
    with logged(caplog):
        run(PowerOfChoice(2), MemoryGrid(app, 5), rounds=2, strategy=strategy, folder=tmp_path)
    assert names(tmp_path) == [f"partition-{k}" for k in range(5)]
    assert all(not entry["faults"] for entry in lines(tmp_path))


def test_an_older_mod_is_understood(tmp_path, caplog):
    """It answers without a version, whatever the type of the message is."""

    def older(message, context, call_next):
        note = message.content.config_records.get(NOTE)
        if note is not None and note["ask"] == "identity":
            answer = ConfigRecord({"partition": int(context.node_config["partition-id"])})
            return Message(RecordDict({NOTE: answer}), reply_to=message)
        return answers_probes()(message, context, call_next)

    with logged(caplog):
        run(FedCor(2, **QUICK), MemoryGrid(numpy_app(mods=[older]), 5), rounds=4, folder=tmp_path)
    assert names(tmp_path) == [f"partition-{k}" for k in range(5)]
    assert not our_lines(caplog)  # it works, so there is nothing to do


def test_another_protocol_is_said(tmp_path, caplog):
    def foreign(message, context, call_next):
        reply = answers_probes()(message, context, call_next)
        if NOTE in reply.content and context.node_config["partition-id"] == 2:
            reply.content[NOTE]["protocol"] = "2.0"
            reply.content[NOTE]["fedcor"] = "9.1"
        return reply

    with logged(caplog):
        run(Random(2), MemoryGrid(numpy_app(mods=[foreign]), 5), rounds=2, folder=tmp_path)
    (line,) = our_lines(caplog)
    assert "partition-2" in line
    assert "fedcor 9.1" in line
    assert "install the same version" in line


def test_a_train_function_without_the_mod_is_called_once_without_a_model(tmp_path, caplog):
    app, seen = training_app([])
    with logged(caplog):
        run(Random(2), MemoryGrid(app, 3), rounds=2, folder=tmp_path)
    assert len([message for message in seen if not message.content.array_records]) == 3
    assert len(seen) == 3 + 2 * 2
    (line,) = our_lines(caplog)
    assert line.startswith("3 of 3 nodes")
    assert "ClientApp(mods=[answers_probes(), ...])" in line


# --- waiting --------------------------------------------------------------------------------------


@pytest.fixture
def fast_clock(monkeypatch):
    """Within it, every pause of a second is over at once. Returns the seconds that have passed."""
    passed = [0.0]

    class Clock:
        @staticmethod
        def monotonic():
            return passed[0]

        @staticmethod
        def sleep(seconds):
            passed[0] += seconds
            for when, event in list(events.items()):
                if passed[0] >= when:
                    del events[when]
                    event()

    events = {}
    monkeypatch.setattr(federation_state, "time", Clock)
    return events


def test_waiting_is_said_again_every_ten_seconds(tmp_path, caplog, fast_clock):
    grid = MemoryGrid(numpy_app(), 3)
    fast_clock[25.0] = grid.join
    fast_clock[47.0] = grid.join
    with logged(caplog, logging.INFO):
        run(Random(2), grid, rounds=1, wait_for=5, folder=tmp_path)
    said = [line for line in our_lines(caplog) if "waiting for nodes" in line]
    assert said[0] == "waiting for nodes: 3 connected, 5 needed (0 s)"
    assert said[1].startswith("waiting for nodes: 3 connected, 5 needed (10 s)")
    assert "wait_for" in said[1]  # what to do
    assert [int(line.split()[3]) for line in said] == [3, 3, 3, 4, 4, 4]
    assert len(names(tmp_path)) == 5


def test_more_clients_per_round_than_nodes_is_said_while_it_waits(caplog, fast_clock):
    grid = MemoryGrid(numpy_app(), 3)
    fast_clock[15.0] = grid.join
    with logged(caplog, logging.INFO):
        select_with(quiet(), Random(4)).start(grid, initial(), num_rounds=1, timeout=0.1)
    said = [line for line in our_lines(caplog) if "waiting for nodes" in line]
    assert said[1] == (
        "waiting for nodes: 3 connected, 4 needed (10 s): each round has 4 clients. "
        "wait_for=3 begins with fewer"
    )


def test_an_outage_in_the_middle_of_a_run_is_said_too(tmp_path, caplog, fast_clock):
    grid = MemoryGrid(numpy_app(), 3)

    def score(server_round, arrays):
        if server_round == 1:
            for partition in range(3):
                grid.leave(partition)
            fast_clock[35.0] = lambda: grid.join(1)
        return server_score(server_round, arrays)

    selecting = select_with(quiet(), Random(2), checkpoint=tmp_path, wait_for=3)
    with logged(caplog, logging.INFO):
        selecting.start(grid, initial(), num_rounds=2, evaluate_fn=score, timeout=0.1)
    said = [line for line in our_lines(caplog) if "waiting for nodes" in line]
    assert said == [f"waiting for nodes: 0 connected, 1 needed ({s} s)" for s in (0, 10, 20, 30)]
    assert lines(tmp_path)[1]["selected"] == [1]


def test_the_roster():
    roster = Roster()
    roster.enrol(
        {
            70: Claim("partition-10"),
            5: Claim("partition-2", 30),
            9: Claim("east"),
            8: Claim("partition-1", 10),
        }
    )
    assert roster.names == ["partition-1", "partition-2", "partition-10", "east"]
    assert roster.population().sizes.tolist() == [10, 30, 20, 20]
    assert roster.unknown([5, 6]) == [6]
    roster.enrol({6: Claim("partition-2")})
    # Two nodes claim to be the same client: the first is trusted while it is there.
    assert roster.node(1) == 5
    assert roster.connect([6, 8, 70]).tolist() == [0, 1, 2]
    assert (roster.node(1), roster.client(5), roster.client(6)) == (6, -1, 1)  # it was a restart
    assert roster.connect([5, 6, 8, 70]).tolist() == [0, 1, 2]
    assert roster.node(1) == 5
    roster.look_elsewhere(1)  # connected still, but dead: the other is tried
    assert roster.node(1) == 6
    roster.unidentified(99, 0)
    assert roster.unknown([98, 99], 1) == [98]
    assert roster.unknown([98, 99], 2) == [98, 99]
    assert roster.connect([8, 70]).tolist() == [0, 2]
    assert roster.connect([8, 70], lambda client: client > 0).tolist() == [2]
    read = Roster.from_arrays(roster.to_arrays())
    assert read.names == roster.names
    assert read.population().sizes.tolist() == [10, 30, 20, 20]
    assert read.unknown([6, 8]) == [6, 8]
