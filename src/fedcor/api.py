"""Run, compare, simulate and load: the one way to run experiments, also for the command line.

Modules that need PyTorch are imported after the arguments are checked, so that mistakes are refused
at once.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fedcor.core.config import LARGEST_SEED, check_at_least, check_one_of, expand_home, suggests
from fedcor.core.errors import ConfigError, MissingExtraError
from fedcor.core.types import Selector
from fedcor.reporting.results import Result
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.progress import score_note, show_rounds
from fedcor.runs.record import RunRecord, read_run, read_runs
from fedcor.runs.tracking.callback import GivenCallback
from fedcor.runs.tracking.session import check_callbacks
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.experiment_files import Selectors, variants
from fedcor.simulation.experiment_files import experiment as override

if TYPE_CHECKING:
    from fedcor.simulation.state import SimulationState


@suggests
def run(
    experiment: str | Path | Experiment,
    selector: str | Selector | None = None,
    seed: int = 1,
    out: str | Path | None = None,
    *,
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
        selector: An object, with its own hyper-parameters; or a name or `module:Class`, with the
            hyper-parameters that the experiment sets; None for the experiment's selector.
        seed: Random seed for everything.
        out: The run's folder; None to keep the run in memory.
        resume: Whether to resume a run that is in the folder already; else it is refused.
        rounds: Number of rounds; None for the experiment's.
        on_round: Called after each round with its record.
        engine: "simulator", or "flower" for Flower's simulation.
        address: Address of a running Ray cluster, for Flower's simulation; None for `RAY_ADDRESS`,
            else for this machine.
        progress: False shows no progress; else it is shown on a terminal and in a notebook.
        callbacks: Callbacks notified during the run: objects with some of the methods of
            `fedcor.Callback`, classes of such objects, functions of a round's record, or names of
            trackers, such as "mlflow".

    Example:
        >>> import fedcor
        >>> result = fedcor.run("digits", "random", rounds=3)
        >>> [entry["round"] for entry in result.runs[0].rounds]
        [0, 1, 2]
    """
    check_one_of("engine", engine, ("simulator", "flower"))
    resolved = _experiment(experiment, rounds, selector)
    resolved.build_selector()
    folder = _folder(out, resume)
    checked = check_callbacks(callbacks, folder)
    check_at_least("seed", seed, 0, LARGEST_SEED)
    seed = int(seed)
    run_on_engine = _engine(engine, address, folder)
    with _bar(f"{resolved.name} {resolved.selector}", resolved.rounds, progress) as update:

        def show(record: RoundRecord) -> None:
            update(record.round + 1, score_note(record.test_accuracy, record.test_loss))
            if on_round is not None:
                on_round(record)

        if engine == "simulator" and folder is None:
            from fedcor.runs.runner import run_in_memory

            return Result([run_in_memory(resolved, seed, [*checked, show])])
        with _or_temporary(folder) as where:
            run_on_engine(resolved, seed, where, resume=resume, callbacks=[*checked, show])
            return Result([_read(where, resolved.rounds, in_memory=folder is None)])


@suggests
def compare(
    experiment: str | Path | Experiment,
    selectors: Selectors,
    seeds: Iterable[int] = (1, 2, 3),
    rounds: int | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    jobs: int | None = None,
    backend: str = "loky",
    address: str | None = None,
    progress: bool | None = None,
    on_run: Callable[[RunRecord], None] | None = None,
    callbacks: Iterable[GivenCallback] = (),
) -> Result:
    """Run several selectors on the same seeds, for a paired comparison.

    For a given seed, all selectors see the same federation.

    Args:
        experiment: An `Experiment`, the name of a preset, or the path of a TOML file.
        selectors: Names and objects; or a dictionary of labels and selectors. A name takes the
            hyper-parameters that the experiment sets for it, an object has its own.
        seeds: The seeds, each for every selector.
        rounds: Number of rounds of each run; None for the experiment's.
        out: Folder of the runs, each in `out/<selector>/seed-<n>`; None to keep them in memory.
        resume: Whether to resume runs that are in the folder already; else they are refused.
        jobs: How many processes work at once; -1 for one per processor. The default is one; on a
            cluster, as many as it can run.
        backend: A backend of joblib. The default needs no `if __name__ == "__main__"` in a script.
            "ray" and "dask" are clusters that are running already.
        address: Address of the cluster; None for `RAY_ADDRESS` or `DASK_SCHEDULER_ADDRESS`, else
            for the cluster that this process is connected to.
        progress: False shows no progress; else it is shown on a terminal and in a notebook.
        on_run: Called in this process with the record of each run when it is finished.
        callbacks: Callbacks notified during the runs, as in `run`. For a name or a class, each run
            gets its own object; any other object is shared by all runs. With several processes,
            each has a copy. On a cluster, callbacks are called in this process, when a run is
            finished.

    Example:
        >>> import fedcor
        >>> result = fedcor.compare("digits", ["random", fedcor.AFL(10)], seeds=[1, 2], rounds=2)
        >>> [(run.header["selector"], run.header["seed"]) for run in result.runs]
        [('random', 1), ('afl', 1), ('random', 2), ('afl', 2)]
    """
    from fedcor.runs.processes import check_backend, count_processes

    resolved, seeds = _experiment(experiment, rounds), _check_seeds(seeds)
    check_backend(backend, address)
    chosen, processes = variants(resolved, selectors), count_processes(jobs, backend)
    folder = _folder(out, resume)
    checked = check_callbacks(callbacks, folder)
    from fedcor.runs.runner import compare_jobs, run_jobs  # imports torch: after the checks

    in_memory, total = folder is None, sum(one.rounds for one in chosen) * len(seeds)
    with _or_temporary(folder) as where, _bar("rounds", total, progress) as update:
        todo = compare_jobs(
            resolved,
            selectors,
            seeds,
            where,
            resume=resume,
            callbacks=checked,
            in_memory=in_memory,
        )
        for job in run_jobs(todo, processes, backend, address, update=update):
            if on_run is not None:
                on_run(_read(job.out, resolved.rounds, in_memory=in_memory))
        return Result([_read(job.out, resolved.rounds, in_memory=in_memory) for job in todo])


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
        selector: An object, with its own hyper-parameters; or a name or `module:Class`, with the
            hyper-parameters that the experiment sets; None for the experiment's selector.
        seed: Random seed for everything.
        rounds: Number of rounds; None for the experiment's.

    Returns:
        An iterator over the record of each round and the state after it: the model, the known
        losses, and the selector's state.

    Example:
        >>> import fedcor
        >>> for record, state in fedcor.simulate("digits", fedcor.Random(10), rounds=2):
        ...     print(record.round, len(record.selected), tuple(state.model.shape))
        0 10 (2410,)
        1 10 (2410,)
    """
    resolved = _experiment(experiment, rounds, selector)
    resolved.build_selector()
    check_at_least("seed", seed, 0, LARGEST_SEED)
    return _rounds(resolved, seed)


def load(folder: str | Path) -> Result:
    """The runs in a folder and below it, finished or still running.

    Args:
        folder: Folder of one run, or of several.

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
    changed = override(given) if rounds is None else override(given, rounds=rounds)
    return changed if selector is None else changed.with_selector(selector)


def _rounds(experiment: Experiment, seed: int) -> Iterator[tuple[RoundRecord, SimulationState]]:
    from fedcor.simulation.build import build_simulation, one_thread

    with one_thread():
        yield from build_simulation(experiment, seed).run(experiment.rounds)


@contextmanager
def _or_temporary(folder: Path | None) -> Iterator[Path]:
    """The folder, or one that is deleted when the block ends."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary) / "run"


def _folder(out: str | Path | None, resume: bool) -> Path | None:
    if out is None and resume:
        raise ConfigError("resume", resume, "needs out, the folder of the run to resume")
    return None if out is None else expand_home("out", out)


def _check_seeds(seeds: Iterable[int]) -> list[int]:
    try:
        numbers = list(seeds)
    except TypeError:
        allowed = "must be several integers, such as range(1, 4)"
        raise ConfigError("seeds", seeds, allowed) from None
    for seed in numbers:
        check_at_least("seeds", seed, 0, LARGEST_SEED)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError("seeds", numbers, "give at least one seed, without repeats")
    return [int(seed) for seed in numbers]


def _bar(
    title: str, total: int, progress: bool | None
) -> AbstractContextManager[Callable[[int, str], None]]:
    return nullcontext(lambda *_: None) if progress is False else show_rounds(title, total)


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


def _engine(name: str, address: str | None, root: Path | None) -> Callable[..., None]:
    """The function that runs an experiment in a folder, on the engine of this name."""
    if name == "simulator":
        if address is not None:
            allowed = "needs the engine flower; to run on a cluster, compare with a backend"
            raise ConfigError("address", address, allowed)
        from fedcor.runs.runner import run as run_on_simulator  # imports torch: after the checks

        return functools.partial(run_on_simulator, root=root)
    try:
        from fedcor.flower.bridge import run_on_flower
    except (MissingExtraError, ModuleNotFoundError) as error:
        # One extra has everything it needs, whichever package is missing.
        package = error.package if isinstance(error, MissingExtraError) else error.name
        raise MissingExtraError(package or "flwr", "flower-sim") from error
    return functools.partial(run_on_flower, address=address)
