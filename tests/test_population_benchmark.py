"""The benchmark of a large population runs. No test says how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "population.py"


def population_script(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    spec = importlib.util.spec_from_file_location("benchmarks_population", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    return script


def test_a_run_of_a_population_is_measured(monkeypatch):
    script = population_script(monkeypatch)
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
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)
    assert len(rows) == 6
    assert all(row["ratio"] > 0 for row in rows)
