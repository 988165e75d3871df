"""Runs in folders: a single one, or many in several processes or on a cluster."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import numpy as np

from fedcor.core.errors import ConfigError, FedcorError, RecordError, RunExistsError
from fedcor.core.types import Array
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.cluster.address import CLUSTERS
from fedcor.runs.cluster.retry import run_with_retries
from fedcor.runs.processes import for_each
from fedcor.runs.progress import refresh
from fedcor.runs.record import RunRecord, count_rounds, has_run, json_line, read_run
from fedcor.runs.resume import (
    folder_name,
    open_run,
    pack_run,
    unpack_run,
    write_client_names,
)
from fedcor.runs.tracking.callback import GivenCallback, StartedRun, as_entry
from fedcor.runs.tracking.session import following
from fedcor.simulation.build import build_simulation, client_names_of, experiment_header, one_thread
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.experiment_files import Selectors, variants
from fedcor.simulation.loop import Simulation
from fedcor.simulation.state import SimulationState

CHECKPOINT_EVERY = 10  # rounds
WAIT_FOR_LOCK = 60.0  # seconds that a retry waits for the lock of a worker that was lost
_OF_ONE_SIZE = ("model", "good", "before", "known", "holders")  # in each state of a simulation
SCORES = ("test_accuracy", "test_loss", "learning_rate")  # NaN is null in a record


def run(
    experiment: Experiment,
    seed: int,
    out: Path,
    *,
    resume: bool = False,
    callbacks: Sequence[GivenCallback] = (),
    root: Path | None = None,
    wait: float = 0.0,
) -> None:
    """Run an experiment in a folder. A finished run is left as it is; callbacks are still called.

    Args:
        experiment: All settings but the seed.
        seed: Random seed for everything.
        out: The run's folder.
        resume: Whether to resume a run that is in the folder already; else it is refused.
        callbacks: Callbacks notified during the run; see `fedcor.Callback`.
        root: The folder of all runs that belong together, for callbacks. None if `out` is a
            temporary folder, which they are not told.
        wait: For how many seconds to wait for another process that writes to the folder.

    Example:
        >>> from fedcor.simulation.experiment_files import load_experiment
        >>> run(load_experiment("digits", ["training.rounds=3"], "random"), 1, Path("runs/a"))
        >>> count_rounds(Path("runs/a"))
        3
    """
    rounds = experiment.rounds
    header = experiment_header(experiment, seed)
    with (
        one_thread(),
        open_run(out, header, resume=resume, wait=wait) as writer,
        following(callbacks) as session,
    ):
        if writer.done < rounds:
            # Built before anything is written: only the data can tell that settings cannot work.
            simulation = build_simulation(experiment, seed)
            start = _restore(writer.checkpoint, simulation, out) if writer.checkpoint else None
            writer.begin()
            if names := client_names_of(experiment):
                write_client_names(out, names)
        started = StartedRun(json.loads(json_line(writer.header)))
        if root is not None:
            started = StartedRun(started.header, out, root, writer.resumed, writer.kept)
        session.start(started)
        for record, state in simulation.run(rounds, start) if writer.done < rounds else ():
            writer.append(dataclasses.asdict(record))
            if state.round % CHECKPOINT_EVERY == 0 or state.round == rounds:
                writer.save(state.to_arrays())
            session.round(record)
        session.end()


def run_in_memory(
    experiment: Experiment, seed: int, callbacks: Sequence[GivenCallback] = ()
) -> RunRecord:
    """Run an experiment and return its record, which is what `run` would have written.

    Args:
        experiment: All settings but the seed.
        seed: Random seed for everything.
        callbacks: Callbacks notified during the run; see `fedcor.Callback`.
    """
    with one_thread(), following(callbacks) as session:
        given = {"kind": "header", **experiment_header(experiment, seed)}
        header = json.loads(json_line(given))
        rounds = []
        simulation = build_simulation(experiment, seed)
        session.start(StartedRun(header))
        for record, _ in simulation.run(experiment.rounds):
            rounds.append(as_entry(record))
            session.round(record)
        session.end()
    return RunRecord(None, header, rounds)


def _restore(checkpoint: Mapping[str, Array], simulation: Simulation, out: Path) -> SimulationState:
    """The state in a checkpoint; refuses one that is not of this simulation."""
    try:
        state = SimulationState.from_arrays(checkpoint, simulation.engine.device)
        fits = _fits(checkpoint, simulation.start.to_arrays())
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise RecordError(
            f"the checkpoint in {out} does not fit this run; delete it to start this run over"
        )
    return state


def _fits(saved: Mapping[str, Array], first: Mapping[str, Array]) -> bool:
    """Whether a saved state can be one of the simulation that began with the state `first`."""
    for name, array in saved.items():
        expected = first.get("model" if name in ("good", "before") else name)
        if expected is None:  # a state may grow and be kept under further names
            continue
        if array.dtype.kind != expected.dtype.kind or array.ndim != expected.ndim:
            return False
        same = array.shape == expected.shape and array.dtype == expected.dtype
        if name in _OF_ONE_SIZE and not same:
            return False
    for part in ("selector/", "optimiser/"):
        memory, initial = ({n for n in state if n.startswith(part)} for state in (saved, first))
        if memory and initial and not memory & initial:  # the state of something else
            return False
    return bool(np.isfinite(saved["model"]).all())


@dataclass(frozen=True, eq=False)
class Job:
    """One run of many: the arguments of `run`."""

    experiment: Experiment
    seed: int
    out: Path
    resume: bool
    callbacks: tuple[GivenCallback, ...] = ()
    root: Path | None = None


def compare_jobs(
    experiment: Experiment,
    selectors: Selectors,
    seeds: Sequence[int],
    out: Path,
    *,
    resume: bool,
    callbacks: Sequence[GivenCallback] = (),
    in_memory: bool = False,
) -> list[Job]:
    """The runs of a comparison: every selector on every seed.

    Args:
        experiment: All settings but the selector and the seed.
        selectors: Names or objects of the selectors; see `fedcor.simulation.experiment_files`.
        seeds: The seeds. For a given seed, all selectors see the same federation.
        out: The folder; each run gets `out/<selector>/seed-<n>`.
        resume: Whether to resume runs that are there already. Otherwise one such run is enough to
            refuse them all, before any starts.
        callbacks: Callbacks notified during each run; see
            `fedcor.runs.tracking.callback.Callback`.
        in_memory: Whether the folder is a temporary one.

    Returns:
        The jobs, seed by seed.
    """
    pairs = list(itertools.product(seeds, variants(experiment, selectors)))
    folders = [out / folder_name(one.selector_label) / f"seed-{seed}" for seed, one in pairs]
    if in_memory:  # where any two labels are different
        folders = [out / str(index) for index in range(len(pairs))]
    if len(set(folders)) < len(pairs):
        raise ConfigError("selectors", selectors, "have labels that give the same folder")
    for folder in folders:
        if has_run(folder) and not resume:
            raise RunExistsError(folder)
    root = None if in_memory else out
    return [
        Job(variant, seed, folder, resume=resume, callbacks=tuple(callbacks), root=root)
        for (seed, variant), folder in zip(pairs, folders, strict=True)
    ]


def run_jobs(
    jobs: Sequence[Job],
    processes: int | None,
    backend: str = "loky",
    address: str | None = None,
    *,
    update: Callable[[int, str], None] | None = None,
) -> Iterator[Job]:
    """Run all jobs, up to `processes` at once. Yields each job when it is finished.

    With one process, they run in this process. Whatever ends this generator early ends the worker
    processes; the unfinished runs can be resumed.

    Args:
        jobs: What to run.
        processes: How many at once; see `fedcor.runs.processes.count_processes`.
        backend: A backend of joblib; or "ray" or "dask", for a cluster that runs.
        address: Of the cluster; see `fedcor.runs.cluster.retry`.
        update: Called every half second with the number of rounds that are done, and a note.
    """
    finished: list[Job] = []

    def show() -> None:
        if update is not None:
            done = sum(min(count_rounds(job.out), job.experiment.rounds) for job in jobs)
            update(done, f"{len(finished)}/{len(jobs)} runs")

    with refresh(show):
        for job in _run_jobs(jobs, processes, backend, address):
            finished.append(job)
            yield job


def _run_jobs(
    jobs: Sequence[Job], processes: int | None, backend: str, address: str | None
) -> Iterator[Job]:
    left = []
    for job in jobs:
        if job.resume and count_rounds(job.out) >= job.experiment.rounds:
            _run_job(job)  # checked, and left as it is: no process need start for that
            yield job
        else:
            left.append(job)
    if backend in CLUSTERS and left:
        yield from _run_on_cluster(left, processes, backend, address)
    else:
        yield from for_each(_run_job, left, processes, backend)


def _run_job(job: Job) -> None:
    with _named(job):
        run(**vars(job))


@contextmanager
def _named(job: Job) -> Iterator[None]:
    """An error in one of many runs says which run it was."""
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except FedcorError as error:
        name = f"{job.experiment.selector}, seed {job.seed}" if job.root is None else job.out
        raise FedcorError(f"{name}: {error}") from error


def _run_on_cluster(
    jobs: Sequence[Job], at_once: int | None, backend: str, address: str | None
) -> Iterator[Job]:
    """Run jobs on a cluster, each as one task, which the cluster retries when a worker is lost.

    A worker that shares the runs' folder writes to it, and a retry resumes from it. Any other
    worker starts the run from its first round, and sends its files back when it is finished.
    Callbacks are called in this process, when the run is finished.
    """
    before = {job: _count_kept(job) for job in jobs}
    sent = {dataclasses.replace(job, callbacks=()): job for job in jobs}
    with _lease(Path(os.path.commonpath([job.out.absolute().parent for job in jobs]))) as lease:
        work = partial(_run_on_worker, lease, Path.cwd())
        for task, files in run_with_retries(
            work, list(sent), at_once, backend=backend, address=address
        ):
            job = sent[task]
            with _named(job):
                if files is not None:
                    unpack_run(job.out, experiment_header(job.experiment, job.seed), files)
                _replay(job, before[job])
            yield job


def _count_kept(job: Job) -> int:
    """How many rounds need not be run again. Refuses a folder that cannot be used."""
    header = experiment_header(job.experiment, job.seed)
    with open_run(job.out, header, resume=job.resume) as writer:
        return writer.done


@contextmanager
def _lease(folder: Path) -> Iterator[Path]:
    """A file in `folder`. A worker that sees it shares the folder, and stops when it is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    lease = folder / f".lease-{uuid4().hex}"
    lease.touch()
    try:
        yield lease
    finally:
        lease.unlink(missing_ok=True)


def _run_on_worker(lease: Path, folder: Path, job: Job) -> dict[str, bytes] | None:
    """The run's files, or None if the worker has written them to the run's own folder.

    Args:
        lease: See `_lease`.
        folder: The folder in which the command was started.
        job: The run, without its callbacks.
    """

    def check_lease(record: RoundRecord) -> None:
        if not lease.exists():
            raise FedcorError(f"stopped after round {record.round}: it is no longer waited for")

    with _named(job):
        if lease.exists():
            run(
                job.experiment,
                job.seed,
                folder / job.out,
                resume=True,  # of an earlier try; what was there before has been checked
                callbacks=[check_lease],
                wait=WAIT_FOR_LOCK,
            )
            return None
        with TemporaryDirectory() as scratch:
            run(job.experiment, job.seed, Path(scratch) / "run")
            return pack_run(Path(scratch) / "run")


def _replay(job: Job, done: int) -> None:
    """Call the callbacks of a finished run, of which `done` rounds were in the folder before."""
    if not job.callbacks:
        return
    record = read_run(job.out)
    kept, new = record.rounds[:done], record.rounds[done:]
    started = StartedRun(record.header)
    if job.root is not None:
        started = StartedRun(record.header, job.out, job.root, bool(kept), kept)
    with following(job.callbacks) as session:
        session.start(started)
        for line in new:
            scores = {name: math.nan for name in SCORES if line.get(name) is None}
            session.round(RoundRecord(**{**line, **scores}))
        session.end()
