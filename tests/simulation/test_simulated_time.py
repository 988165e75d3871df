"""Simulated time stands beside rounds and bytes: in the verdict, the table and the page."""

from __future__ import annotations

import numpy as np
import pytest
from fake_runs import fake_run

from fedcor.reporting.page.data import page_data
from fedcor.reporting.summary import summarise
from fedcor.reporting.verdict import experiment_verdict

# random reaches .5 in its fourth round, oort in its second; rounds take 90 and 60 seconds.
ACCURACY = {"random": [0.1, 0.2, 0.4, 0.6], "oort": [0.3, 0.55, 0.6, 0.7]}
SECONDS = {"random": 90.0, "oort": 60.0}


def timed(accuracy=ACCURACY, seconds=SECONDS, **options):
    runs = []
    for name, values in accuracy.items():
        for seed in (1, 2, 3):
            run = fake_run([v + 0.001 * seed for v in values], name, seed, **options)
            for row in run.rounds if seconds else ():
                row["duration"] = seconds[name]
            runs.append(run)
    return runs


def verdict(runs):
    return experiment_verdict(summarise(runs).experiments[0])


def test_the_verdict_says_the_time_to_the_target_where_there_is_a_clock():
    said = verdict(timed())
    assert "oort reaches 50 % after 2 rounds (2.00 min of simulated time)" in said
    assert "random reaches 50 % after 4 rounds (6.00 min of simulated time)" in said
    assert "simulated" not in verdict(timed(seconds=None))
    late = verdict(timed({**ACCURACY, "random": [0.1] * 4}))
    assert "(2.00 min of simulated time); random does not" in late


def test_the_page_has_time_in_its_table_and_its_curves():
    (experiment,) = page_data(timed())["experiments"]
    table = experiment["table"]
    keys = [column["key"] for column in table["columns"]]
    assert keys == ["mean", "final", "rounds", "bytes_to", "time_to", "time", "bytes", "gap"]
    rows = {one["name"]: row for one, row in zip(experiment["series"], table["rows"], strict=True)}
    assert rows["oort"]["time_to"] == [120, "2.00 min"]
    assert rows["oort"]["time"] == [240, "4.00 min"]
    assert rows["random"]["time_to"] == [360, "6.00 min"]
    curve = next(one for one in experiment["series"] if one["name"] == "random")
    assert curve["simulated"] == pytest.approx(np.cumsum([90.0] * 4))
    assert curve["seconds"] == pytest.approx(np.cumsum([0.5] * 4))


def test_without_a_clock_or_a_target_there_is_no_such_column():
    (experiment,) = page_data(timed(seconds=None))["experiments"]
    keys = {column["key"] for column in experiment["table"]["columns"]}
    assert not keys & {"time", "time_to"}
    assert experiment["series"][0]["simulated"] == [None] * 4
    (experiment,) = page_data(timed(target=None))["experiments"]
    keys = {column["key"] for column in experiment["table"]["columns"]}
    assert keys & {"time", "time_to"} == {"time"}
