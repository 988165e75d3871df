"""The example job learns, in NVFlare's simulator."""

from __future__ import annotations

import subprocess
import sys

from nvflare_jobs import ROOT

from fedcor.cli import main
from fedcor.runs.record import read_run


def test_the_example_learns_with_the_default_selector(tmp_path):
    job = ROOT / "examples" / "nvflare" / "job.py"
    subprocess.run([sys.executable, str(job)], cwd=tmp_path, check=True)
    folder = tmp_path / "runs" / "nvflare" / "aligned"
    rounds = read_run(folder).rounds
    assert len(rounds) == 8
    assert all(len(line["participated"]) == 3 for line in rounds)
    assert rounds[-1]["test_accuracy"] > 0.7
    assert main(["report", str(folder)]) == 0
