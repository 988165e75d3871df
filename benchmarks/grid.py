"""A whole comparison, 4 selectors x 2 seeds, in one and in two processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import DifferentResultsError, Result, skipped

SELECTORS = "random,afl,power_of_choice,fedcor"


def results(quick: bool) -> list[Result]:
    """Rows of the table."""
    preset, rounds = ("digits", 2) if quick else ("fmnist-2spc", 120)
    what = f"comparison of 4 selectors x 2 seeds, {preset}, {rounds} rounds: one process / two"
    goal = "at least 1.8"
    with tempfile.TemporaryDirectory() as name:
        seconds, records = [], []
        for jobs in (1, 2):
            out = Path(name) / str(jobs)
            started = time.perf_counter()
            command = [sys.executable, "-m", "fedcor", "compare", preset, "--seeds", "1,2"]
            command += ["--selectors", SELECTORS, "--rounds", str(rounds)]
            command += ["--jobs", str(jobs), "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            seconds.append(time.perf_counter() - started)
            if done.returncode:
                return [skipped(what, goal, done.stderr.strip().splitlines()[-1])]
            records.append(read_records(out))
    if records[0] != records[1] or len(records[0]) != 8:
        raise DifferentResultsError("one and two processes gave different records")
    one, two = seconds
    return [Result(what, one / two, goal, f"{one:.1f} against {two:.1f} s, start included")]


def read_records(folder: Path) -> dict[str, list[Any]]:
    """Each run's rounds, without their times."""
    found = {}
    for path in sorted(folder.rglob("rounds.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rounds = [{k: v for k, v in line.items() if k != "seconds"} for line in lines[1:]]
        found[str(path.parent.relative_to(folder))] = rounds
    return found
