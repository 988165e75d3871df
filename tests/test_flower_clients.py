"""Who is who: names and numbers of clients, on nodes that come, leave and restart."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
from flwr.serverapp.strategy import FedAvg

from fedcor.flower import answers_probes, select_with
from fedcor.flower.roster import Claim, Roster
from fedcor.flower.wire import NOTE
from fedcor.selectors import AFL, FedCor, Full, PowerOfChoice, Random
from flower_grid import (
    QUICK,
    MemoryGrid,
    initial,
    lines,
    logged,
    numpy_app,
    quiet,
    run,
    server_score,
)


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
            assert np.isfinite(selecting._state.selector["samples"][-1]).all()
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
    assert "key-" in (tmp_path / "clients.tsv").read_text()


def test_a_name_of_its_own_comes_before_the_partition(tmp_path):
    run(
        Random(1),
        MemoryGrid(numpy_app(mods=[answers_probes(name="north")]), 1),
        rounds=1,
        folder=tmp_path,
    )
    assert (tmp_path / "clients.tsv").read_text() == "0\tnorth\n"


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
    assert roster.reachable([6, 8, 70], 0).tolist() == [0, 1, 2]
    assert (roster.node(1), roster.client(5), roster.client(6)) == (6, -1, 1)  # it was a restart
    assert roster.reachable([5, 6, 8, 70], 0).tolist() == [0, 1, 2]
    assert roster.node(1) == 5
    roster.failed(1, 0)  # connected still, but dead: the other is tried
    assert roster.node(1) == 6
    roster.unidentified(99, 0)
    assert roster.unknown([98, 99], 1) == [98]
    assert roster.unknown([98, 99], 2) == [98, 99]
    assert roster.reachable([8, 70], 0).tolist() == [0, 2]
    roster.failed(0, 0)
    assert roster.reachable([8, 70], 1).tolist() == [2]
    assert roster.reachable([8], 1).tolist() == [0]  # nobody else is there
    assert roster.reachable([8, 70], 2).tolist() == [0, 2]
    read = Roster.from_arrays(roster.to_arrays())
    assert read.names == roster.names
    assert read.population().sizes.tolist() == [10, 30, 20, 20]
    assert read.unknown([6, 8]) == [6, 8]
