"""The benchmarks run. How fast anything is, no test says: these machines are shared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmarks_run():
    script = Path(__file__).parents[1] / "benchmarks" / "run.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 12
    assert all(result["ratio"] > 0 for result in results)
