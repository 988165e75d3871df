"""All trials, and their table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

# Before NumPy and torch: one thread per process, as in every run.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

from torture.tally import Line, as_markdown

# The parts, the longest first, and the module of each.
MODULES = {
    "crashes-fmnist": "crashes",
    "crashes-digits": "crashes",
    "crashes-optimisers": "crashes",
    "crashes-flower": "flower_crashes",
    "input-settings": "inputs",
    "input-records": "inputs",
    "input-checkpoints": "inputs",
    "input-data": "inputs",
    "input-flower": "flower_inputs",
    "disk": "disk",
    "files-runs": "damage",
    "files-checkpoints": "damage",
}
GROUPS = ("crashes", "disk", "files", "input")


def find(part: str) -> Callable[[bool], list[Line]]:
    """The function of a part: takes whether to be quick, returns its lines."""
    found: Callable[[bool], list[Line]] = import_module(f"torture.{MODULES[part]}").PARTS[part]
    return found


def run_parts(parts: Sequence[str], quick: bool, jobs: int) -> list[Line]:
    """The lines of all parts, each in a process of its own, `jobs` of them at once."""
    waiting, running, lines = list(parts), dict[str, subprocess.Popen[bytes]](), list[Line]()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                part = waiting.pop(0)
                flags = ["--quick"] if quick else []
                command = [sys.executable, "-m", "torture", "--part", part, *flags]
                command += ["--to", f"{scratch}/{part}.json"]
                running[part] = subprocess.Popen(command)
            time.sleep(0.05)
            for part, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[part]
                if process.returncode:
                    lines.append(_broken(part, f"the part ended with {process.returncode}"))
                    continue
                found = json.loads(Path(scratch, f"{part}.json").read_text(encoding="utf-8"))
                lines += [Line(**one) for one in found]
                print(f"done: {part}", file=sys.stderr, flush=True)
    return sorted(lines, key=lambda line: (GROUPS.index(line.group), line.what))


def _broken(part: str, why: str) -> Line:
    return Line(part.partition("-")[0], part, 1, 1, {"lost": 1}, [why])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, print their table; 1 where anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few trials, in seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--only", default="", help="the parts that begin so")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--out", type=Path, help="also write OUT.md and OUT.json")
    parser.add_argument("--part", choices=MODULES, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        lines = find(options.part)(options.quick)
        options.to.write_text(json.dumps([asdict(line) for line in lines]), encoding="utf-8")
        return 0
    started = time.perf_counter()
    parts = [part for part in MODULES if part.startswith(options.only)]
    lines = run_parts(parts, options.quick, options.jobs)
    seconds = round(time.perf_counter() - started)
    table = {"seconds": seconds, "lines": [asdict(line) for line in lines]}
    if options.out:
        options.out.with_suffix(".md").write_text(as_markdown(lines), encoding="utf-8")
        options.out.with_suffix(".json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    print(json.dumps(table, indent=1) if options.json else as_markdown(lines))
    print(f"{seconds // 60} min {seconds % 60} s on {options.jobs} processes", file=sys.stderr)
    return int(any(line.lost for line in lines))


if __name__ == "__main__":
    sys.exit(main())
