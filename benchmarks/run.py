"""All benchmarks, as one table of ratios: `make bench`, or

    python -m benchmarks.run               everything, in less than ten minutes; writes
                                           benchmarks/results.md, benchmarks/results.json, and
                                           the table in docs/results/speed.md
    python -m benchmarks.run --out DIR     writes them there
    python -m benchmarks.run --only fmnist,growth      prints those alone
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

from benchmarks.measure import DifferentResultsError, Result, machine, skipped

# Modules of this package with a function `results(quick) -> rows of what, ratio, goal, detail`.
BENCHMARKS = (
    "fmnist",
    "other_packages",
    "cifar",
    "own_module",
    "own_loop",
    "grid",
    "growth",
    "selection",
    "scale",
    "population",
)
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results" / "speed.md"
MARKS = ("<!-- written by make bench -->\n", "<!-- end of what make bench writes -->\n")


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
    wrong = False
    for name in options.only.split(","):
        begun = time.perf_counter()
        try:
            found = importlib.import_module(f"benchmarks.{name}").results(options.quick)
        except DifferentResultsError as error:  # no time of it is printed
            found = [skipped(f"**{name}**", "", f"{error}")]
            wrong = True
        found = [Result(row.what, row.ratio, row.goal, row.detail) for row in found]
        rows += found
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        for row in found:
            print(f"    {row.what}: {row.ratio:.2f} ({row.detail})", file=sys.stderr)
    whole = {
        "machine": machine(),
        "seconds": round(time.perf_counter() - started),
        "results": [row.as_json() for row in rows],
    }
    everything = not options.quick and options.only == ",".join(BENCHMARKS)
    out = options.out or (HERE if everything else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        (out / "results.json").write_text(text, encoding="utf-8")
        (out / "results.md").write_text(markdown(whole), encoding="utf-8")
    if out == HERE:
        page = with_table(PAGE.read_text(encoding="utf-8"), markdown(whole))
        PAGE.write_text(page, encoding="utf-8")
    print(json.dumps(whole["results"], indent=2) if options.json else markdown(whole))
    return 1 if wrong else 0


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


def with_table(page: str, table: str) -> str:
    """The page with another table between its two marks."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}"


if __name__ == "__main__":
    sys.exit(main())
