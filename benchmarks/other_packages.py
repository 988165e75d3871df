"""A round on FMNIST 2SPC in FedLab and in Flower's simulation: random, and with questions."""

from __future__ import annotations

import statistics

from benchmarks.measure import DifferentResultsError, Result, skipped
from benchmarks.packages import (
    MissingPackageError,
    run_fedlab,
    run_flower,
    run_flower_with_engine,
)
from benchmarks.replay import our_rounds
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment

PRESET, SEED = "fmnist-2spc", 1


def results(quick: bool) -> list[Result]:
    """Rows of the table; none of them is quick."""
    rows: list[Result] = []
    if quick:
        return rows
    for selector, name, last in (
        ("random", "random round", 15),
        ("benchmarks.asking:EveryTenth", "all asked every tenth round", 31),
    ):
        ours = our_rounds(build_simulation(load_experiment(PRESET, selector=selector), SEED), last)
        for package, goal, run in (
            ("FedLab", "at least 5", run_fedlab),
            ("Flower's simulation (plain PyTorch clients)", "at least 10", run_flower),
            ("Flower's simulation (our engine in its clients)", "", run_flower_with_engine),
        ):
            what = f"FMNIST, {package} / ours, {name}"
            try:
                seconds, version = run(PRESET, SEED, selector, ours)
            except (MissingPackageError, DifferentResultsError) as error:
                rows.append(skipped(what, goal, str(error)))
                continue
            # The first round has a start in it.
            pick = statistics.median if selector == "random" else statistics.fmean
            mine = pick([r.seconds if run is run_fedlab else r.clock for r in ours[1:]])
            theirs = pick(seconds[1:])
            detail = f"{theirs * 1e3:.0f} against {mine * 1e3:.1f} ms per round; {version}"
            rows.append(Result(what, theirs / mine, goal, detail))
    return rows
