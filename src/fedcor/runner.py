"""Runs in folders: one, or many paired ones beside each other, one process a core and one thread a process."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from fedcor.data import Dataset, load, randomise_labels
from fedcor.engine import Engine, LocalTraining, build_model
from fedcor.errors import (
    ConfigError,
    FedcorError,
    RecordError,
    RunExistsError,
    WorkerDiedError,
)
from fedcor.experiment import Experiment
from fedcor.header import run_header
from fedcor.record import RoundRecord, count_rounds, has_run, open_run
from fedcor.rng import stream
from fedcor.simulate import LearningRate, Simulation, SimulationState
from fedcor.types import Array

__all__ = [
    "Job",
    "build_simulation",
    "compare_jobs",
    "experiment_header",
    "in_processes",
    "run",
    "run_jobs",
    "use_one_thread",
]

CHECKPOINT_EVERY = 10  # rounds
LABEL_NOISE = "label noise"  # the stream that says whose labels are random, and which

_load = functools.lru_cache(maxsize=1)(load)  # the runs of one process share the data


def build_simulation(experiment: Experiment, seed: int, data: Dataset | None = None) -> Simulation:
    """The experiment's federation for one seed: the same for every selector."""
    training = experiment.training
    data = data or _load(experiment.data.name)
    optimiser = experiment.build_optimiser()
    try:
        parts = experiment.partition.split(data.train_y, stream(seed, "partition"))
    except ConfigError as error:
        raise error.under("partition") from None
    if experiment.data.noisy_clients:
        try:
            noise = randomise_labels(
                data.train_y,
                data.classes,
                parts,
                experiment.data.noisy_clients,
                stream(seed, LABEL_NOISE),
            )
        except ConfigError as error:
            raise error.under("data") from None
        data = dataclasses.replace(data, train_y=noise)
    options = {key: value for key, value in experiment.model.items() if key != "name"}
    try:
        module = build_model(
            experiment.model["name"], data.train_x.shape[1:], data.classes, seed, options
        )
    except ConfigError as error:
        raise error.under("model") from None
    local_training = LocalTraining(
        training.batch_size,
        training.local_steps,
        training.learning_rate,
        training.weight_decay,
        optimiser.proximal,
    )
    engine = Engine(
        data,
        parts,
        module,
        local_training,
        seed,
        holdout=experiment.data.holdout,
        device=_device(training.device),
    )
    rate = LearningRate(training.learning_rate, training.milestones, training.factor)
    return Simulation(engine, experiment.build_selector(), optimiser, experiment.faults, rate, seed)


def _device(wanted: str) -> str:
    if wanted == "auto":
        return (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "training.device", wanted, f"cannot be used here: {str(error).splitlines()[0]}"
        ) from None
    return wanted


def use_one_thread() -> None:
    """Sums in one order, however many cores there are: runs are equal bit for bit."""
    torch.set_num_threads(1)
    threadpool_limits(1)


def experiment_header(
    experiment: Experiment, seed: int, engine: str | None = None
) -> dict[str, Any]:
    """The header of a run of `experiment`, on the simulator or on another `engine`."""
    config = experiment.describe()
    config["training"]["device"] = _device(
        experiment.training.device
    )  # never "auto": it may be another one next time
    versions = {"torch": torch.__version__}
    return run_header(experiment.name, experiment.selector, seed, config, versions, engine)


def run(
    experiment: Experiment,
    seed: int,
    out: Path,
    *,
    resume: bool = False,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> None:
    """One run in the folder `out`; with `resume`, from where it was left. A finished run is left as it is."""
    use_one_thread()
    rounds = experiment.training.rounds
    with open_run(out, experiment_header(experiment, seed), resume=resume) as writer:
        if writer.done >= rounds:
            return
        simulation = build_simulation(experiment, seed)
        writer.begin()  # after what only the data can tell was not refused
        start = _progress(writer.checkpoint, simulation, out) if writer.checkpoint else None
        for record, progress in simulation.run(rounds, start):
            writer.append(dataclasses.asdict(record))
            if progress.round % CHECKPOINT_EVERY == 0 or progress.round == rounds:
                writer.save(progress.to_arrays())
            if on_round is not None:
                on_round(record)


def _progress(
    checkpoint: Mapping[str, Array], simulation: Simulation, out: Path
) -> SimulationState:
    try:
        progress = SimulationState.from_arrays(checkpoint, simulation.engine.device)
        fits = (
            progress.model.shape == simulation.engine.initial_model.shape
            and progress.known.shape == progress.holders.shape
        )
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise RecordError(
            f"the checkpoint in {out} does not fit this run; delete it to begin this run again"
        )
    return progress


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    experiment: Experiment
    seed: int
    out: Path
    resume: bool


def compare_jobs(
    experiment: Experiment,
    selectors: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    resume: bool,
) -> list[Job]:
    """Every selector on every seed, seed by seed, each in `out/<selector>/seed-<n>`."""
    variants = [experiment.with_selector(name) for name in selectors]
    jobs = [
        Job(variant, seed, out / folder_name(variant.selector) / f"seed-{seed}", resume)
        for seed in seeds
        for variant in variants
    ]
    taken = [job.out for job in jobs if has_run(job.out)]
    if taken and not resume:  # all are looked at before any is begun
        raise RunExistsError(taken[0])
    return jobs


def folder_name(selector: str) -> str:
    """A selector's name as a folder: a user's `module:Class` has a character that some systems do not take."""
    return selector.replace(":", ".")


def run_jobs(jobs: Sequence[Job], processes: int) -> Iterator[Job | None]:
    """Run them all, `processes` at once. Yields each job when it is finished, and None now and then between."""
    done_before = [
        job
        for job in jobs
        if job.resume and count_rounds(job.out) >= job.experiment.training.rounds
    ]
    for job in done_before:  # checked, and left as they are: no process need start for that
        run(job.experiment, job.seed, job.out, resume=True)
        yield job
    jobs = [job for job in jobs if job not in done_before]
    tasks: dict[Callable[[], None], Job] = {functools.partial(_run_job, job): job for job in jobs}
    for task in in_processes(list(tasks), processes):
        yield None if task is None else tasks[task]


def _run_job(job: Job) -> None:
    try:
        run(job.experiment, job.seed, job.out, resume=job.resume)
    except (ConfigError, RecordError):
        raise
    except FedcorError as error:  # of many runs, say which
        raise FedcorError(f"{job.out}: {error}") from error


def in_processes(
    tasks: Sequence[Callable[[], None]], processes: int
) -> Iterator[Callable[[], None] | None]:
    """Call each task in one of several processes. Yields each when it is done, and None twice a second between.

    Whatever ends this generator early (an error in a task, an interrupt, a killed worker) ends the workers too: what they were
    doing can be resumed. They also end by themselves when this process dies.
    """
    if not tasks:
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        max(1, min(processes, len(tasks))), mp_context=context, initializer=_begin_worker
    )
    try:
        pending: dict[Future[None], Callable[[], None]] = {
            pool.submit(task): task for task in tasks
        }
        while pending:
            done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                yield pending.pop(future)
            yield None
    except BrokenProcessPool:
        raise WorkerDiedError(
            "a worker process died (killed, or out of memory?); what was recorded is kept, and can be resumed"
        ) from None
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """A worker leaves interrupts to its parent, and ends when its parent dies: else it would hold its run's lock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
