"""The front door: run, compare, simulate and load, from five lines of Python.

What needs PyTorch is imported when it is called, so that mistakes are refused at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedcor.core.config import LARGEST_SEED, check_at_least, check_one_of, expand_home, suggests
from fedcor.core.errors import ConfigError, DataError, FedcorError, MissingExtraError
from fedcor.core.types import Selector
from fedcor.reporting.results import Result
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.cluster.address import CLUSTERS, check_place
from fedcor.runs.processes import check_backend, count_processes, map_each
from fedcor.runs.progress import refresh, show_rounds
from fedcor.runs.record import RunRecord, count_rounds, read_run, read_runs
from fedcor.runs.tracking.callback import GivenCallback
from fedcor.runs.tracking.session import check_callbacks
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.experiment_files import Selectors, variants
from fedcor.simulation.experiment_files import experiment as override

if TYPE_CHECKING:
    from fedcor.runs.runner import Job
    from fedcor.simulation.state import SimulationState

Update = Callable[[int, str], None]


@suggests
def run(
    experiment: str | Path | Experiment,
    selector: str | Selector | None = None,
    seed: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    rounds: int | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    engine: str = "simulator",
    address: str | None = None,
    progress: bool | None = None,
    callbacks: Iterable[GivenCallback] = (),
) -> Result:
    """Run an experiment once, in memory or in a folder.

    Args:
        experiment: An `Experiment`, the name of a preset, or the path of a TOML file.
        selector: An object, with its own hyper-parameters; or a name or `module:Class`, with those
            that the experiment sets; None for the experiment's own.
        seed: Fixes everything that is drawn.
        out: The run's folder; None to keep the run in memory.
        resume: Whether a run that is in the folder already is resumed; else it is refused.
        rounds: None for the experiment's own.
        on_round: Called after each round with its record.
        engine: "simulator", or "flower" for Flower's simulation.
        address: Of a Ray cluster that runs, for Flower's simulation; None for `RAY_ADDRESS`, else
            for this machine.
        progress: False shows no progress; it is shown on a terminal and in a notebook.
        callbacks: What hears of the run while it goes on: objects with some of the methods of
            `fedcor.runs.tracking.callback.Callback`, classes of them, functions of a round's record, or names of
            trackers, such as "mlflow".

    Example:
        >>> import fedcor
        >>> result = fedcor.run("digits", "random", rounds=3)
        >>> [entry["round"] for entry in result.runs[0].rounds]
        [0, 1, 2]
    """
    check_one_of("engine", engine, ("simulator", "flower"))
    made = _experiment(experiment, rounds, selector)
    made.build_selector()
    folder = _folder(out, resume)
    told = check_callbacks(callbacks, folder)
    check_at_least("seed", seed, 0, LARGEST_SEED)
    run_on_flower = _flower(address) if engine == "flower" else None
    if address is not None and run_on_flower is None:
        allowed = 'is of a cluster for Flower: choose engine="flower", or compare(backend=...)'
        raise ConfigError("address", address, allowed)
    from fedcor.runs.runner import run as run_on_simulator  # imports torch: after the checks
    from fedcor.runs.runner import run_in_memory

    with _bar(f"{made.name} {made.selector}", made.rounds, progress) as update:

        def show(record: RoundRecord) -> None:
            accuracy, loss = record.test_accuracy, record.test_loss
            score = f"loss {loss:.3g}" if math.isnan(accuracy) else f"accuracy {accuracy:.3f}"
            update(record.round + 1, score)
            if on_round is not None:
                on_round(record)

        if run_on_flower is None and folder is None:
            return Result([run_in_memory(made, seed, show, told)])
        with tempfile.TemporaryDirectory() as temporary:
            where = folder or Path(temporary) / "run"
            run_it = run_on_flower or run_on_simulator
            run_it(made, seed, where, resume=resume, on_round=show, callbacks=told)
            return Result([_read(where, made.rounds, in_memory=folder is None)])


@suggests
def compare(
    experiment: str | Path | Experiment,
    selectors: Selectors,
    seeds: Iterable[int] = (1, 2, 3),
    rounds: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int | None = None,
    backend: str = "loky",
    address: str | None = None,
    progress: bool | None = None,
    callbacks: Iterable[GivenCallback] = (),
) -> Result:
    """Run several selectors on the same seeds: with one seed, all meet the same federation.

    Args:
        experiment: An `Experiment`, the name of a preset, or the path of a TOML file.
        selectors: Names and objects; or a dictionary of labels and selectors. A name takes the
            hyper-parameters that the experiment sets for it, an object has its own.
        seeds: The seeds, each for every selector.
        rounds: Of each run; None for the experiment's own.
        out: Folder of the runs, each in `out/<selector>/seed-<n>`; None to keep them in memory.
        resume: Whether runs that are in the folder already are resumed; else they are refused.
        jobs: How many processes work at once; -1 for as many as there are processors. By default
            one; on a cluster, as many as it can run.
        backend: A backend of joblib. The default needs no `if __name__ == "__main__"` in a script.
            "ray" and "dask" are clusters that run already.
        address: Of the cluster; None for `RAY_ADDRESS` or `DASK_SCHEDULER_ADDRESS`, else for the
            one that this process is connected to.
        progress: False shows no progress; it is shown on a terminal and in a notebook.
        callbacks: What hears of the runs, as in `run`. Of a name or a class, each run has an object
            of its own; another object hears of all runs. In several processes, each has a copy; on
            a cluster, they are called here, when a part of a run has come back.

    Example:
        >>> import fedcor
        >>> result = fedcor.compare("digits", ["random", fedcor.AFL(10)], seeds=[1, 2], rounds=2)
        >>> [(run.header["selector"], run.header["seed"]) for run in result.runs]
        [('random', 1), ('afl', 1), ('random', 2), ('afl', 2)]
    """
    made, seeds = _experiment(experiment, rounds), _check_seeds(seeds)
    check_backend(backend)
    check_place(backend, address)
    chosen, processes = variants(made, selectors), count_processes(jobs, backend)
    place = _Place(processes, backend, address)
    folder = _folder(out, resume)
    told = check_callbacks(callbacks, folder)
    total = sum(one.rounds for one in chosen) * len(seeds)
    with _bar("rounds", total, progress) as update:
        if folder is None and backend not in CLUSTERS:
            work = [(one, seed) for seed in seeds for one in chosen]
            return Result(_run_in_memory(work, place, update, told))
        from fedcor.runs.runner import compare_jobs

        # What comes back from a cluster is kept in files, here, until all of it is there.
        with tempfile.TemporaryDirectory() as temporary:
            where = folder or Path(temporary)
            todo = compare_jobs(made, selectors, seeds, where, resume=resume, callbacks=told)
            return Result(
                _run_in_folder(todo, made.rounds, place, update, in_memory=folder is None)
            )


@suggests
def simulate(
    experiment: str | Path | Experiment,
    selector: str | Selector | None = None,
    seed: int = 1,
    rounds: int | None = None,
) -> Iterator[tuple[RoundRecord, SimulationState]]:
    """Run an experiment round by round, to look inside.

    Args:
        experiment: An `Experiment`, the name of a preset, or the path of a TOML file.
        selector: An object, with its own hyper-parameters; or a name or `module:Class`, with those
            that the experiment sets; None for the experiment's own.
        seed: Fixes everything that is drawn.
        rounds: None for the experiment's own.

    Returns:
        An iterator over the record of each round, and the state after it: the model, the losses
        that are known, and the selector's state.

    Example:
        >>> import fedcor
        >>> for record, state in fedcor.simulate("digits", fedcor.Random(10), rounds=2):
        ...     print(record.round, len(record.selected), tuple(state.model.shape))
        0 10 (2410,)
        1 10 (2410,)
    """
    made = _experiment(experiment, rounds, selector)
    made.build_selector()
    check_at_least("seed", seed, 0, LARGEST_SEED)
    return _rounds(made, seed)


def load(folder: str | Path) -> Result:
    """The runs in a folder and below it, finished or still running.

    Args:
        folder: Of one run, or of many.

    Example:
        >>> import fedcor
        >>> _ = fedcor.run("digits", "random", rounds=2, out="runs/loaded")
        >>> len(fedcor.load("runs/loaded").runs)
        1
    """
    return Result(read_runs(expand_home("folder", folder)))


def _experiment(
    given: str | Path | Experiment, rounds: int | None, selector: str | Selector | None = None
) -> Experiment:
    made = override(given) if rounds is None else override(given, rounds=rounds)
    return made if selector is None else made.with_selector(selector)


def _rounds(made: Experiment, seed: int) -> Iterator[tuple[RoundRecord, SimulationState]]:
    from fedcor.simulation.build import build_simulation, one_thread

    with one_thread():
        yield from build_simulation(made, seed).run(made.rounds)


def _folder(out: str | Path | None, resume: bool) -> Path | None:
    if out is None and resume:
        raise ConfigError("resume", resume, "needs out, the folder of what is resumed")
    return None if out is None else expand_home("out", out)


def _check_seeds(seeds: Iterable[int]) -> list[int]:
    try:
        numbers = list(seeds)
    except TypeError:
        allowed = "must be several whole numbers, such as range(1, 4)"
        raise ConfigError("seeds", seeds, allowed) from None
    for seed in numbers:
        check_at_least("seeds", seed, 0, LARGEST_SEED)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError("seeds", numbers, "must be at least one, and each only once")
    return [int(seed) for seed in numbers]


@contextmanager
def _bar(title: str, total: int, progress: bool | None) -> Iterator[Update]:
    if progress is False:
        yield lambda *_: None
        return
    with show_rounds(title, total) as update:
        yield update


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where runs go: how many at once, and to which backend."""

    processes: int | None
    backend: str
    address: str | None


def _run_in_folder(
    todo: list[Job], rounds: int, place: _Place, update: Update, *, in_memory: bool
) -> list[RunRecord]:
    from fedcor.runs.runner import run_jobs

    finished: list[Job] = []

    def show() -> None:
        done = sum(min(count_rounds(job.out), rounds) for job in todo)
        update(done, f"{len(finished)}/{len(todo)} runs")

    with refresh(show):
        finished.extend(run_jobs(todo, place.processes, place.backend, place.address))
    return [_read(job.out, rounds, in_memory=in_memory) for job in todo]


def _run_in_memory(
    work: list[tuple[Experiment, int]],
    place: _Place,
    update: Update,
    callbacks: tuple[GivenCallback, ...],
) -> list[RunRecord]:
    """The runs, in the order of `work`. Each notes its rounds in a file, for the progress."""
    runs: dict[int, RunRecord] = {}
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder) / str(index) for index in range(len(work))]
        tasks = [_Task(index, *one, notes[index], callbacks) for index, one in enumerate(work)]

        def show() -> None:
            done = sum(note.stat().st_size for note in notes if note.exists())
            update(done, f"{len(runs)}/{len(work)} runs")

        with refresh(show):
            for task, run in map_each(_run_task, tasks, place.processes, place.backend):
                runs[task.index] = run
    return [runs[index] for index in range(len(work))]


@dataclasses.dataclass(frozen=True)
class _Task:
    index: int
    experiment: Experiment
    seed: int
    note: Path
    callbacks: tuple[GivenCallback, ...]


def _run_task(task: _Task) -> RunRecord:
    from fedcor.runs.runner import run_in_memory

    def note(record: RoundRecord) -> None:  # noqa: ARG001
        if task.note.parent.exists():  # not on another machine
            with task.note.open("ab") as file:
                file.write(b".")

    try:
        return run_in_memory(task.experiment, task.seed, note, task.callbacks)
    except (ConfigError, DataError):
        raise
    except FedcorError as error:  # of many runs, say which
        which = f"{task.experiment.selector}, seed {task.seed}"
        raise FedcorError(f"{which}: {error}") from error


def _read(folder: Path, rounds: int, *, in_memory: bool = False) -> RunRecord:
    """The run, cut to `rounds`: it may have been run further before."""
    run = read_run(folder)
    config = {**run.header["config"]}
    config["training"] = {**config["training"], "rounds": rounds}
    return dataclasses.replace(
        run,
        path=None if in_memory else run.path,
        header={**run.header, "config": config},
        rounds=run.rounds[:rounds],
    )


def _flower(address: str | None) -> Callable[..., None]:
    try:
        from fedcor.flower.bridge import run_on_flower
    except (MissingExtraError, ModuleNotFoundError) as error:
        # One extra has all that it needs, whatever was missing first.
        package = error.package if isinstance(error, MissingExtraError) else error.name
        raise MissingExtraError(package or "flwr", "flower-sim") from error
    return functools.partial(run_on_flower, address=address)
