"""The benchmarks run, and say truly whether a goal is reached. How fast anything is, no test says:
machines are shared."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from benchmarks import population, scale
from benchmarks.measure import DifferentResultsError, Result, check, skipped
from benchmarks.run import HERE, PAGE, main, with_table


def test_the_benchmarks_run(monkeypatch, capsys, tmp_path):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the processes that are started inherit them
    assert main(["--quick", "--json", "--out", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results) == 22 + 3 + 9 + 6
    # So small a measurement may lose itself in the noise, and a difference come out below zero.
    assert all(math.isfinite(result["ratio"]) for result in results)
    written = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert written["results"] == results
    assert written["machine"]["processor"]
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert all(result["what"] in table for result in results)


@pytest.mark.parametrize(
    ("goal", "ratio", "reached"),
    [
        ("at most 1.7", 1.7, True),
        ("at most 1.7", 1.71, False),
        ("at least 10", 9.9, False),
        ("at least 10, as before", 10.0, True),
        ("above 1", 1.0, False),
        ("about 10: linear", 10.0, None),
        ("", 3.0, None),
        ("at most 2", math.nan, None),
    ],
)
def test_a_goal_is_reached_or_not(goal, ratio, reached):
    assert Result("a / b", ratio, goal, "").reached is reached


def test_what_was_not_measured_has_no_ratio():
    row = skipped("a / b", "at most 2", "no network").as_json()
    assert row["ratio"] is None
    assert "no network" in row["detail"]


def test_different_results_are_not_timed():
    check("same", [1.0, 2.0], [1.0, 2.0 + 1e-9], 1e-6)
    with pytest.raises(DifferentResultsError, match="differ by 1"):
        check("other", [1.0, 2.0], [1.0, 3.0], 1e-6)
    with pytest.raises(DifferentResultsError, match="nan"):
        check("not a number", [math.nan], [1.0], 1e-6)


def test_the_page_has_the_table_that_was_written_last():
    table, page = (path.read_text(encoding="utf-8") for path in (HERE / "results.md", PAGE))
    assert with_table(page, table) == page
    assert "another table" in with_table(page, "another table\n")


def test_the_growth_of_selection_is_measured(tmp_path):
    assert scale.main(["--quick", "--growth", str(tmp_path / "growth.json")]) == 0
    grown = json.loads((tmp_path / "growth.json").read_text())
    assert [line["C"] for line in grown["C"]] == [1, 3, 10, 30, 100]


def test_a_run_of_a_population_is_measured():
    size = population.Size(300, 6, slice(1, 3), slice(4, 6))
    found = population._run("random", size)
    assert [len(one) for one in found] == [6, 6, 6]
    rows = population._rows("random", size, *map(np.array, found))
    seconds, memory, _ = found
    assert rows[0].ratio == np.mean(seconds[4:6]) / np.mean(seconds[1:3])
    assert rows[1].ratio == memory[-1] / memory[2] >= 1.0
