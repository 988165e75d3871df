"""Runs on Flower are explained like those of the simulator, with the clients' names."""

from __future__ import annotations

import pytest
from flower_grid import MemoryGrid, initial, loss, numpy_app, run, vector

from fedcor.cli import main
from fedcor.reporting.explanations import explanations
from fedcor.reporting.gp_calibration import health
from fedcor.runs.record import client_names, read_run
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice

QUICK = {"warmup": 2, "interval": 3, "dimension": 2, "warmup_steps": 20, "refit_steps": 20}


def test_fedcor_on_flower_is_explained_pick_by_pick(tmp_path, capsys):
    run(FedCor(3, **QUICK), MemoryGrid(numpy_app(), 8), rounds=7, folder=tmp_path)
    record, names = read_run(tmp_path), client_names(tmp_path)
    rounds = explanations(record)
    for found in rounds[2:]:
        for row in found["chosen"]:
            assert row["name"] == names[row["client"]]
            assert sum(row["parts"].values()) == pytest.approx(row["gain"], rel=1e-10)
            assert row["runner_up"]["name"] == names[row["runner_up"]["client"]]
    # A run ends in round 6, which measures: what came in the rounds before it is known.
    assert rounds[3]["chosen"][0]["came"] is not None
    assert health(record)["forecasts"] == 3  # in the rounds 1, 3 and 6
    assert main(["explain", str(tmp_path), "--round", "4"]) == 0
    shown = capsys.readouterr().out
    assert "fedcor, round 4 (numbered as in Flower, from 1)" in shown
    first = rounds[3]["chosen"][0]
    assert f"1. Client {first['client']} ({first['name']}): worth" in shown


def test_the_losses_in_the_record_are_those_that_clients_sent(tmp_path):
    """Asked for, and with the updates: both of the model that the round started with."""
    grid = MemoryGrid(numpy_app(), 6)
    run(PowerOfChoice(2, candidates=4), grid, rounds=3, folder=tmp_path)
    rounds, start = read_run(tmp_path).rounds, vector(initial())
    first = rounds[0]["details"]
    partitions = [int(name.removeprefix("partition-")) for name in client_names(tmp_path)]
    expected = [loss(partitions[k], start) for k in first["known"]]
    assert first["losses"] == pytest.approx(expected, rel=1e-5)
    for entry in rounds:
        details = entry["details"]
        assert set(entry["selected"]) < set(details["candidates"]) <= set(details["known"])
        known = dict(zip(details["known"], details["losses"], strict=True))
        assert details["told"] == pytest.approx([known[k] for k in entry["participated"]], rel=1e-5)
