"""The benchmarks run. No test says how fast anything is: machines are shared."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "run.py"


def test_the_benchmarks_run(monkeypatch, capsys):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the script sets them for good
    spec = importlib.util.spec_from_file_location("benchmarks_run", SCRIPT)
    benchmarks = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmarks)
    spec.loader.exec_module(benchmarks)

    assert benchmarks.main(["--quick", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results) == 14
    assert all(result["ratio"] > 0 for result in results)
