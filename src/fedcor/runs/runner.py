"""Runs in folders: a single one, or many paired ones in several processes of one thread each.

On a cluster, a run is computed in parts. A worker is sent the state after the last part, and sends
back some rounds and the state after them; this process writes the folder, as it would have done
alone. So a worker needs no folder, and one that is lost takes a part with it at most.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedcor.core.errors import ConfigError, FedcorError, RecordError, RunExistsError
from fedcor.core.types import Array
from fedcor.rounds.record_line import RoundRecord, upgrade
from fedcor.runs.cluster.address import CLUSTERS
from fedcor.runs.cluster.backends import connect
from fedcor.runs.cluster.scheduler import Errand, run_errands
from fedcor.runs.folder import RunWriter, open_run, write_client_names
from fedcor.runs.processes import for_each
from fedcor.runs.record import RunRecord, count_rounds, has_run, json_line
from fedcor.runs.tracking.callback import GivenCallback, StartedRun
from fedcor.runs.tracking.session import following
from fedcor.simulation.build import build_simulation, client_names_of, experiment_header, one_thread
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.experiment_files import Selectors, variants
from fedcor.simulation.loop import Simulation
from fedcor.simulation.state import SimulationState

CHECKPOINT_EVERY = 10  # rounds
FIRST_PART, LONGEST_PART = 0.5, 60.0  # seconds; each part of a run takes twice the one before


def run(
    experiment: Experiment,
    seed: int,
    out: Path,
    *,
    resume: bool = False,
    on_round: Callable[[RoundRecord], None] | None = None,
    callbacks: Sequence[GivenCallback] = (),
    root: Path | None = None,
) -> None:
    """Run an experiment in a folder. A finished run is left as it is, but callbacks are told of it.

    Args:
        experiment: All settings but the seed.
        seed: Fixes everything that is drawn.
        out: The run's folder.
        resume: Whether to resume a run that is in the folder already; else it is refused.
        on_round: Called after each round with its record.
        callbacks: What else hears of the run; see `fedcor.runs.tracking.callback.Callback`.
        root: The folder of all runs that belong together; None for `out`.

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
        open_run(out, header, resume=resume) as writer,
        following(callbacks) as session,
    ):
        if writer.done >= rounds:
            session.start(_started(writer, root))
            session.end()
            return
        # Built before anything is written: only the data can tell that some settings cannot work.
        simulation = build_simulation(experiment, seed)
        start = _restore(writer.checkpoint, simulation, out) if writer.checkpoint else None
        _begin(writer, experiment)
        session.start(_started(writer, root))
        for record, state in simulation.run(rounds, start):
            writer.append(dataclasses.asdict(record))
            if state.round % CHECKPOINT_EVERY == 0 or state.round == rounds:
                writer.save(state.to_arrays())
            session.round(record)
            if on_round is not None:
                on_round(record)
        session.end()


def _begin(writer: RunWriter, experiment: Experiment) -> None:
    """Begin the record, and say in its folder what the clients are called."""
    writer.begin()
    if names := client_names_of(experiment):
        write_client_names(writer.folder, names)


def _started(writer: RunWriter, root: Path | None) -> StartedRun:
    """What callbacks are told at the start."""
    header = upgrade(json.loads(json_line(writer.header)))
    kept = list(writer.kept)
    return StartedRun(header, writer.folder, root or writer.folder, writer.resumed, kept)


def run_in_memory(
    experiment: Experiment,
    seed: int,
    on_round: Callable[[RoundRecord], None] | None = None,
    callbacks: Sequence[GivenCallback] = (),
) -> RunRecord:
    """Run an experiment and return its record, which is what `run` would have written.

    Args:
        experiment: All settings but the seed.
        seed: Fixes everything that is drawn.
        on_round: Called after each round with its record.
        callbacks: What else hears of the run; see `fedcor.runs.tracking.callback.Callback`.
    """
    with one_thread(), following(callbacks) as session:
        given = {"kind": "header", **experiment_header(experiment, seed)}
        header = upgrade(json.loads(json_line(given)))
        rounds = []
        simulation = build_simulation(experiment, seed)
        session.start(StartedRun(header))
        for record, _ in simulation.run(experiment.rounds):
            rounds.append(json.loads(json_line(dataclasses.asdict(record))))
            session.round(record)
            if on_round is not None:
                on_round(record)
        session.end()
    return RunRecord(None, header, rounds)


def _restore(checkpoint: Mapping[str, Array], simulation: Simulation, out: Path) -> SimulationState:
    """The state in a checkpoint; refuses one that is not of this simulation."""
    try:
        state = SimulationState.from_arrays(checkpoint, simulation.engine.device)
        fits = _fits(state, simulation.start)
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise RecordError(
            f"the checkpoint in {out} does not fit this run; delete it to start this run over"
        )
    if state.optimiser:
        return state
    # A checkpoint of before optimisers had a state, or of one that has none.
    return dataclasses.replace(state, optimiser=simulation.optimiser_start)


def _fits(state: SimulationState, start: SimulationState) -> bool:
    """Whether a state that was read can be one of the simulation that began with `start`."""
    model, first = state.model, start.model
    if model.shape != first.shape or model.dtype != first.dtype or not model.isfinite().all():
        return False
    others = [one for one in (state.good, state.before) if one is not None]
    if any(one.shape != first.shape or one.dtype != first.dtype for one in others):
        return False
    pairs = [(state.known, start.known), (state.holders, start.holders)]
    if any(one.shape != own.shape or one.dtype != own.dtype for one, own in pairs):
        return False
    # Memories grow, and get new names; what was there at the start keeps its kind. A checkpoint of
    # an earlier version lacks what is remembered only since then. It is not made up here: whoever
    # remembers it knows what the earlier version did without.
    for memory, own in ((state.selector, start.selector), (state.optimiser, start.optimiser)):
        shared = memory.keys() & own.keys()
        if memory and own and not shared:  # of something else that has the same name
            return False
        for name in shared:
            old, new = np.asarray(own[name]), np.asarray(memory[name])
            if old.dtype.kind != new.dtype.kind or old.ndim != new.ndim:
                return False
    return True


@dataclass(frozen=True)
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
) -> list[Job]:
    """The runs of a comparison: every selector on every seed.

    Args:
        experiment: All settings but the selector and the seed.
        selectors: Names or objects of the selectors; see `fedcor.simulation.experiment_files`.
        seeds: The seeds. Runs with the same seed meet the same federation.
        out: The folder; each run gets `out/<selector>/seed-<n>`.
        resume: Whether to resume runs that are there already. Otherwise one such run is enough to
            refuse them all, before any starts.
        callbacks: What hears of each run; see `fedcor.runs.tracking.callback.Callback`.

    Returns:
        The jobs, seed by seed.
    """
    jobs = [
        Job(
            variant,
            seed,
            out / folder_name(variant.selector_label) / f"seed-{seed}",
            resume,
            tuple(callbacks),
            out,
        )
        for seed, variant in itertools.product(seeds, variants(experiment, selectors))
    ]
    if len({job.out for job in jobs}) < len(jobs):
        raise ConfigError("selectors", selectors, "have labels that give the same folder")
    for job in jobs:
        if has_run(job.out) and not resume:
            raise RunExistsError(job.out)
    return jobs


def folder_name(selector: str) -> str:
    """A selector's name as a folder: some systems do not take the colon of `module:Class`.

    >>> folder_name("fedcor(beta=0.5, warmup=3)")
    'fedcor-beta-0.5-warmup-3'
    """
    return re.sub(r"[^\w.+-]+", "-", selector.replace(":", ".")).strip("-")


def run_jobs(
    jobs: Sequence[Job],
    processes: int | None,
    backend: str = "loky",
    address: str | None = None,
) -> Iterator[Job]:
    """Run all jobs, up to `processes` at once. Yields each job when it is finished.

    With one process, they run in this process. Whatever ends this generator early ends the worker
    processes; the unfinished runs can be resumed.

    Args:
        jobs: What to run.
        processes: How many at once; see `fedcor.runs.processes.count_processes`.
        backend: A backend of joblib; or "ray" or "dask", for a cluster that runs.
        address: Of the cluster; see `fedcor.runs.cluster.backends`.
    """
    finished = [
        job for job in jobs if job.resume and count_rounds(job.out) >= job.experiment.rounds
    ]
    for job in finished:  # checked, and left as they are: no process need start for that
        _run_job(job)
        yield job
    left = [job for job in jobs if not any(job is one for one in finished)]
    if backend in CLUSTERS and left:
        with connect(backend, address) as cluster:
            yield from run_errands(cluster, ((job, _in_parts(job)) for job in left), processes)
    else:
        yield from for_each(_run_job, left, processes, backend)


def _run_job(job: Job) -> None:
    with _naming(job):
        run(
            job.experiment,
            job.seed,
            job.out,
            resume=job.resume,
            callbacks=job.callbacks,
            root=job.root,
        )


def _in_parts(job: Job) -> Errand:
    """As `run`, but every round is computed elsewhere, some at a time."""
    experiment, seed, out = job.experiment, job.seed, job.out
    header, seconds = experiment_header(experiment, seed), FIRST_PART
    with (
        _naming(job),
        open_run(out, header, resume=job.resume) as writer,
        following(job.callbacks) as session,
    ):
        done, state, begun = writer.done, writer.checkpoint, False
        while done < experiment.rounds:
            part = yield partial(_run_part, experiment, seed, out, state, seconds)
            if not begun:  # not before: only the data can tell that some settings cannot work
                begun = True
                _begin(writer, experiment)
                session.start(_started(writer, job.root))
            for record in part.records:
                writer.append(dataclasses.asdict(record))
            writer.save(part.state)
            for record in part.records:
                session.round(record)
            done, state = done + len(part.records), part.state
            seconds = min(2 * seconds, LONGEST_PART)
        if not begun:
            session.start(_started(writer, job.root))
        session.end()


@dataclass(frozen=True)
class _Part:
    """Some rounds of a run, and the state after them."""

    records: list[RoundRecord]
    state: Mapping[str, Array]


def _run_part(
    experiment: Experiment,
    seed: int,
    out: Path,
    checkpoint: Mapping[str, Array] | None,
    seconds: float,
) -> _Part:
    """The rounds after `checkpoint`, for as long as `seconds` allow; at least one."""
    records: list[RoundRecord] = []
    with one_thread():
        simulation = build_simulation(experiment, seed)
        start = _restore(checkpoint, simulation, out) if checkpoint else None
        end = time.monotonic() + seconds
        for record, state in simulation.run(experiment.rounds, start):  # noqa: B007
            records.append(record)
            if time.monotonic() >= end:
                break
        return _Part(records, state.to_arrays())


@contextmanager
def _naming(job: Job) -> Iterator[None]:
    """Of many runs, an error says which."""
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except FedcorError as error:
        raise FedcorError(f"{job.out}: {error}") from error
