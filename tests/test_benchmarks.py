"""The benchmarks run. No test says how fast anything is: machines are shared."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name, monkeypatch):
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")  # the script sets them for good
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    benchmarks = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmarks)
    spec.loader.exec_module(benchmarks)
    return benchmarks


def test_the_benchmarks_run(monkeypatch, capsys):
    assert load("run", monkeypatch).main(["--quick", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results) == 14
    assert all(result["ratio"] > 0 for result in results)


def test_a_run_of_a_population_is_measured(monkeypatch):
    script = load("population", monkeypatch)
    size = script.Size(300, 6, slice(1, 3), slice(4, 6))
    found = script._run("random", size)
    assert [len(one) for one in found] == [6, 6, 6]
    rows = script._rows("random", size, *map(np.array, found))
    seconds, memory, _ = found
    assert rows[0].ratio == np.mean(seconds[4:6]) / np.mean(seconds[1:3])
    assert rows[1].ratio == memory[-1] / memory[2] >= 1.0


@pytest.mark.slow
def test_the_benchmark_of_a_population_runs():
    """As a script: its processes start anew."""
    path = BENCHMARKS / "population.py"
    done = subprocess.run(
        [sys.executable, str(path), "--quick", "--json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout)
    assert len(rows) == 6
    assert all(row["ratio"] > 0 for row in rows)


def test_the_benchmarks_of_many_clients_run(monkeypatch, capsys, tmp_path):
    scale = load("scale", monkeypatch)
    assert scale.main(["--quick", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results) == 9
    assert all(result["ratio"] > 0 for result in results)
    assert scale.main(["--quick", "--growth", str(tmp_path / "growth.json")]) == 0
    grown = json.loads((tmp_path / "growth.json").read_text())
    assert [line["C"] for line in grown["C"]] == [1, 3, 10, 30, 100]
