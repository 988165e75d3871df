"""All benchmarks, as one table of ratios: `make bench`, or

    python -m benchmarks.run               everything, in less than ten minutes; writes
                                           benchmarks/results.md and benchmarks/results.json
    python -m benchmarks.run --out DIR     writes them there
    python -m benchmarks.run --only fmnist,growth
    python -m benchmarks.run --quick       a test of the benchmarks: small sizes, too few repeats to
                                           trust; writes nothing without --out
    python -m benchmarks.run --json        prints JSON

Everything of ours runs in one thread. What is timed is first held against its twin. FedLab and
Flower are installed when they are first needed (packages.py), which is not part of any time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import torch

from benchmarks.measure import Result, machine

# Modules of this package with a function `results(quick) -> rows of what, ratio, goal, detail`.
BENCHMARKS = (
    "fmnist",
    "cifar",
    "own_module",
    "grid",
    "growth",
    "selection",
)
HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="modules, with commas")
    parser.add_argument("--out", type=Path, default=None, help="folder for results.md and .json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.perf_counter()
    rows: list[Result] = []
    for name in options.only.split(","):
        begun = time.perf_counter()
        found = importlib.import_module(f"benchmarks.{name}").results(options.quick)
        rows += [Result(row.what, row.ratio, row.goal, row.detail) for row in found]
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    whole = {
        "machine": machine(),
        "seconds": round(time.perf_counter() - started),
        "results": [row.as_json() for row in rows],
    }
    out = options.out or (None if options.quick else HERE)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        (out / "results.json").write_text(text, encoding="utf-8")
        (out / "results.md").write_text(markdown(whole), encoding="utf-8")
    print(json.dumps(whole["results"], indent=2) if options.json else markdown(whole))
    return 0


def markdown(whole: dict[str, Any]) -> str:
    """The machine and the table."""
    where = whole["machine"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "torch", "numpy"))
    lines = [
        f"{where['processor']}, {where['cores']} cores, {where['system']}; {versions}; "
        f"one thread; {whole['seconds']} s in all.",
        "",
        "| measured | ratio | goal | reached | detail |",
        "|---|---|---|---|---|",
    ]
    for row in whole["results"]:
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        reached = {True: "yes", False: "**no**", None: ""}[row["reached"]]
        lines.append(f"| {row['what']} | {ratio} | {row['goal']} | {reached} | {row['detail']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
