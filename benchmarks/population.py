"""A population of 10^5 clients of which 1 % can be reached: does a round cost the same at the end?

    python -m benchmarks.population            about a minute
    python -m benchmarks.population --quick    a test of this file: few clients and rounds

The data of a client is drawn when it is needed. Each run is a process of its own. Time is that of
the processor, which other work on the machine disturbs little; memory is the largest that the
process has had.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np

from benchmarks.measure import Result, peak_memory
from fedcor import Aligned, Experiment, Faults, FedCor, Random, Selector, simulate
from fedcor.data.client_data import SyntheticPopulation

CHOSEN, REACHABLE = 10, 0.01
SELECTORS: dict[str, Selector] = {
    "random": Random(CHOSEN),
    "fedcor, 100 asked": FedCor(CHOSEN, probe_clients=100),
    "aligned": Aligned(CHOSEN),
}
# FedRecall keeps an update of each client that was seen: 10 a round, 2.4 kB each.
GOALS = {"time": "at most 1.2", "memory": "at most 1.05"}


@dataclass(frozen=True)
class Size:
    """How much is run, and the windows of rounds that are compared."""

    clients: int
    rounds: int
    early: slice
    late: slice


FULL = Size(100_000, 200, slice(20, 70), slice(150, 200))
QUICK = Size(2_000, 40, slice(10, 20), slice(30, 40))


def results(quick: bool) -> list[Result]:
    """Time and memory of late rounds, divided by those of early ones, for each selector."""
    size = QUICK if quick else FULL
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for name, found in zip(SELECTORS, pool.map(_run, SELECTORS, [size] * 3), strict=True):
            rows += _rows(name, size, *map(np.array, found))
    return rows


def _run(name: str, size: Size) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each round, megabytes after it, and its accuracy."""
    experiment = Experiment(
        SyntheticPopulation(size.clients),
        model="logistic",
        rounds=size.rounds,
        batch_size=10,
        local_steps=5,
        learning_rate=0.05,
        selector=SELECTORS[name],
        faults=Faults(availability=REACHABLE),
    )
    seconds, memory, accuracy = [], [], []
    last = time.process_time()
    for record, _ in simulate(experiment):
        now = time.process_time()
        seconds.append(now - last)
        last = now
        memory.append(peak_memory() / 1e6)
        accuracy.append(record.test_accuracy)
    return seconds, memory, accuracy


def _rows(
    name: str, size: Size, seconds: np.ndarray, memory: np.ndarray, accuracy: np.ndarray
) -> list[Result]:
    early, late = float(seconds[size.early].mean()), float(seconds[size.late].mean())
    before, after = float(memory[size.early.stop - 1]), float(memory[-1])
    windows = [f"{window.start + 1}-{window.stop}" for window in (size.early, size.late)]
    where = f"{name}, {size.clients:,} clients, {REACHABLE:.0%} reachable"
    return [
        Result(
            f"{where}: a round, rounds {windows[1]} / {windows[0]}",
            late / early,
            GOALS["time"],
            f"{1e3 * late:.1f} against {1e3 * early:.1f} ms; {seconds.sum():.1f} s in all; "
            f"accuracy {accuracy[0]:.2f} to {accuracy[-1]:.2f}",
        ),
        Result(
            f"{where}: memory, after round {size.rounds} / {size.early.stop}",
            after / before,
            GOALS["memory"],
            f"{after:.0f} against {before:.0f} MB",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few clients and rounds")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    rows = results(options.quick)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for row in rows:
        print(f"{row.ratio:6.2f}  {row.goal:12}  {row.what}: {row.detail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
