"""`kill -9` of runs on the simulator, and `--resume`: the record is the uninterrupted one.

A run is killed again and again: at random moments, just before an operation on a file, with a part
of a checkpoint written, and once more while it resumes. When it has ended, its record is compared,
line by line without `seconds`, with one that nobody killed, and so is its last checkpoint.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcor.cli import main
from fedcor.optimisers import optimiser_names
from fedcor.runs.record import RECORD, read_checkpoint
from fedcor.selectors import selector_names
from fedcor.simulation.experiment_files import load_experiment
from torture.children import Ended, die_at_file_operation, die_while_writing, run_in_child
from torture.tally import Line, Tally

ROUNDS, CHECKPOINTS = 24, 3  # a run has one after 10, 20 and 24 rounds
KINDS = ("at a random moment", "at a file operation", "in a checkpoint's write", "while resuming")
SMALL = ("partition.clients=20", "training.clients_per_round=4", "training.local_steps=2")
SOON = tuple(f"selectors.{key}=4" for key in ("fedcor.warmup", "fedcor.interval", "proxy.warmup"))


@dataclass(frozen=True)
class Subject:
    """What is killed.

    Attributes:
        name: What it is called if something is lost.
        work: Runs it in the given folder, or resumes it there; returns an exit code.
        checkpoints: How many checkpoints a whole run writes.
        ignored: What of a line is not compared.
    """

    name: str
    work: Callable[[Path], int]
    checkpoints: int = CHECKPOINTS
    ignored: tuple[str, ...] = ("seconds",)


def _run(experiment: str, selector: str, changes: Sequence[str], folder: Path) -> int:
    arguments = ["run", experiment, "--selector", selector, "--rounds", str(ROUNDS), "--resume"]
    for change in (*SMALL, *SOON, *changes):
        arguments += ["--set", change]
    return main([*arguments, "--out", str(folder)])


def subject(experiment: str, selector: str, *changes: str) -> Subject:
    """A run of the simulator."""
    name = " ".join((experiment, selector, *changes))
    return Subject(name, lambda folder: _run(experiment, selector, changes, folder))


def load_before(experiment: str) -> None:
    """Import and load what every child needs, once: children are forks of this process."""
    from fedcor.runs.runner import run
    from fedcor.simulation.build import build_simulation, use_one_thread

    use_one_thread()
    del run  # imported for the children
    build_simulation(load_experiment(experiment, SMALL, "random"), 1)


def finished(
    folder: Path, ignored: Sequence[str] = ("seconds",)
) -> tuple[list[object], dict[str, bytes]]:
    """A run's record without what is ignored, and the arrays of its last checkpoint, as bytes."""
    lines = (folder / RECORD).read_text(encoding="utf-8").splitlines()
    entries = [
        {key: value for key, value in json.loads(line).items() if key not in ignored}
        for line in lines
    ]
    arrays = read_checkpoint(folder) or {}
    return list(entries), {name: array.tobytes() for name, array in arrays.items()}


def kill_again_and_again(subjects: Sequence[Subject], kills: Sequence[Tally], seed: int) -> None:
    """Kill each subject once for each of `kills` (a tally per kind in `KINDS`), and compare.

    A process that has ended before it was killed is no trial; its run is compared, and the trial
    is made on a new one.
    """
    rng = np.random.default_rng(seed)
    for one in subjects:
        with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
            _torture_one(one, kills, rng, Path(scratch))


def _torture_one(
    one: Subject, kills: Sequence[Tally], rng: np.random.Generator, scratch: Path
) -> None:
    output = scratch / "output"
    whole = run_in_child(lambda: one.work(scratch / "whole"), output)
    if whole.code:
        kills[0].lose(f"{one.name}: the uninterrupted run failed: {whole.text}")
        return
    wanted, number = finished(scratch / "whole", one.ignored), 0
    folder = scratch / "run-0"
    for tally in kills:
        for _attempt in range(20):
            ended = _attempt_kill(one, tally.what, folder, output, whole.seconds, rng)
            if ended.killed:
                tally.add("killed")
                break
            problem = _compare(one, ended, folder, wanted)
            if problem:
                tally.lose(problem)
            number += 1
            folder = scratch / f"run-{number}"
        else:
            tally.lose(f"{one.name}: it could not be killed {tally.what}")
    problem = _compare(one, run_in_child(lambda: one.work(folder), output), folder, wanted)
    if problem:
        kills[-1].lose(problem, counted=True)


def _attempt_kill(
    one: Subject,
    kind: str,
    folder: Path,
    output: Path,
    seconds: float,
    rng: np.random.Generator,
) -> Ended:
    if kind.endswith(KINDS[0]):
        after = float(rng.uniform(0.0, seconds))
        return run_in_child(lambda: one.work(folder), output, kill_after=after)
    # Each checkpoint opens, renames and removes about ten times; what resumes does so at once.
    again = kind.endswith(KINDS[3])
    number = int(rng.integers(1, 25 if again else 10 * one.checkpoints))
    share = float(rng.uniform())

    def work() -> int:
        if kind.endswith(KINDS[2]):
            die_while_writing(1 + number % max(1, one.checkpoints - 1), share)
        else:
            die_at_file_operation(folder, number)
        return one.work(folder)

    return run_in_child(work, output)


def _compare(
    one: Subject, ended: Ended, folder: Path, wanted: tuple[list[object], dict[str, bytes]]
) -> str:
    """What is wrong with a run that has ended; empty if nothing is."""
    if ended.code or ended.traceback:
        return f"{one.name}: exit code {ended.code}: {ended.text[-1500:]}"
    left = [str(path) for path in folder.rglob("*.tmp")]
    if left:
        return f"{one.name}: left behind {left}"
    lines, arrays = finished(folder, one.ignored)
    differing = sum(a != b for a, b in zip(lines, wanted[0], strict=False))
    differing += abs(len(lines) - len(wanted[0]))
    if differing:
        return f"{one.name}: {differing} lines of the record differ"
    if arrays != wanted[1]:
        return f"{one.name}: the last checkpoint differs"
    shutil.rmtree(folder)
    return ""


def _tallies(whose: str, rounds: int) -> list[Tally]:
    return [Tally("crashes", f"`kill -9` of {whose} {kind}") for kind in KINDS] * rounds


def _lines(tallies: Sequence[Tally]) -> list[Line]:
    return [tally.line() for tally in dict.fromkeys(tallies)]


def crash_selectors(quick: bool, experiment: str, rounds: int) -> list[Line]:
    """Every registered selector."""
    load_before(experiment)
    names = ["fedcor", "aligned"] if quick else selector_names()
    tallies = _tallies(f"{experiment}, every selector,", 1 if quick else rounds)
    extra = ["training.local_steps=1"] if experiment != "digits" else []
    kill_again_and_again([subject(experiment, name, *extra) for name in names], tallies, 1)
    return _lines(tallies)


def crash_optimisers(quick: bool) -> list[Line]:
    """Every registered federated optimiser."""
    load_before("digits")
    names = ["scaffold"] if quick else optimiser_names()
    tallies = _tallies("digits, every federated optimiser,", 1)
    subjects = [subject("digits", "random", f"optimiser.name={name}") for name in names]
    kill_again_and_again(subjects, tallies, 2)
    return _lines(tallies)


PARTS: dict[str, Callable[[bool], list[Line]]] = {
    "crashes-digits": lambda quick: crash_selectors(quick, "digits", 4),
    "crashes-fmnist": lambda quick: [] if quick else crash_selectors(quick, "fmnist-2spc", 2),
    "crashes-optimisers": crash_optimisers,
}
