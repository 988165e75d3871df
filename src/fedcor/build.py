"""From an experiment to a simulation that is ready to run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from fedcor.data import Dataset, load, randomise_labels
from fedcor.engine import Engine, LocalTraining, build_model
from fedcor.errors import ConfigError
from fedcor.experiments import Experiment
from fedcor.header import run_header
from fedcor.rng import stream
from fedcor.simulation import LearningRate, Simulation

__all__ = ["LABEL_NOISE", "build_simulation", "experiment_header", "use_one_thread"]

LABEL_NOISE = "label noise"  # the stream that says whose labels are random, and which

_load = functools.lru_cache(maxsize=1)(load)  # the runs of one process share the data


def build_simulation(experiment: Experiment, seed: int, data: Dataset | None = None) -> Simulation:
    """The experiment's federation for one seed: the same for every selector.

    Args:
        experiment: All settings but the seed.
        seed: Fixes the partition, the initial model, every shuffle and every fault.
        data: The data set; the one that the experiment names is loaded if it is not given.

    Example:
        >>> from fedcor.experiments import load_experiment
        >>> simulation = build_simulation(load_experiment("digits", selector="random"), seed=1)
        >>> [record.round for record, _ in simulation.run(3)]
        [0, 1, 2]
    """
    training = experiment.training
    data = data or _load(experiment.data.name)
    optimiser = experiment.build_optimiser()
    with _errors_under("partition"):
        parts = experiment.partition.split(data.train_y, stream(seed, "partition"))
    if experiment.data.noisy_clients:
        noisy, rng = experiment.data.noisy_clients, stream(seed, LABEL_NOISE)
        with _errors_under("data"):
            labels = randomise_labels(data.train_y, data.classes, parts, noisy, rng)
        data = dataclasses.replace(data, train_y=labels)
    options = {key: value for key, value in experiment.model.items() if key != "name"}
    with _errors_under("model"):
        module = build_model(experiment.model["name"], data.shape, data.outputs, seed, options)
    local = LocalTraining(
        training.batch_size,
        training.local_steps,
        training.learning_rate,
        training.weight_decay,
        optimiser.proximal,
    )
    holdout, device = experiment.data.holdout, _device(training.device)
    engine = Engine(data, parts, module, local, seed, holdout=holdout, device=device)
    rate = LearningRate(training.learning_rate, training.milestones, training.factor)
    return Simulation(engine, experiment.build_selector(), optimiser, experiment.faults, rate, seed)


def experiment_header(
    experiment: Experiment, seed: int, engine: str | None = None
) -> dict[str, Any]:
    """The header of a run of `experiment`, on the simulator or on another `engine`."""
    config = experiment.describe()
    # Never "auto", which may be another device next time.
    config["training"]["device"] = _device(experiment.training.device)
    versions = {"torch": torch.__version__}
    return run_header(experiment.name, experiment.selector, seed, config, versions, engine)


def use_one_thread() -> None:
    """Compute in one thread: sums then have one order, and runs are equal bit for bit."""
    torch.set_num_threads(1)
    threadpool_limits(1)


@contextmanager
def _errors_under(table: str) -> Iterator[None]:
    """Name the table of settings in which an impossible setting stands."""
    try:
        yield
    except ConfigError as error:
        raise error.under(table) from None


def _device(wanted: str) -> str:
    """The device to use; "auto" takes an accelerator when there is one."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "training.device", wanted, f"cannot be used here: {str(error).splitlines()[0]}"
        ) from None
    return wanted
