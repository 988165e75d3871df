"""The benchmarks run. No test says how fast anything is: machines are shared."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

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


def test_the_benchmarks_of_many_clients_run(monkeypatch, capsys, tmp_path):
    scale = load("scale", monkeypatch)
    assert scale.main(["--quick", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results) == 9
    assert all(result["ratio"] > 0 for result in results)
    assert scale.main(["--quick", "--growth", str(tmp_path / "growth.json")]) == 0
    grown = json.loads((tmp_path / "growth.json").read_text())
    assert [line["C"] for line in grown["C"]] == [1, 3, 10, 30, 100]
