"""Build a simulation from an experiment: load and split the data, make the model, check memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from fedcor.core.config import check_memory, expand_home
from fedcor.core.errors import ConfigError, blame, errors_under
from fedcor.core.rng import stream
from fedcor.core.types import IntArray, Optimiser, Selector, optimiser_traits
from fedcor.data.cache import cache_file
from fedcor.data.client_data import ClientData
from fedcor.data.datasets import Dataset, load
from fedcor.data.partition import randomise_labels
from fedcor.data.partitioners import check_parts
from fedcor.rounds.loss_screening import LossNoise
from fedcor.rounds.record_line import run_header
from fedcor.simulation.coerce import OwnClients, OwnData
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import build_model, count_parameters
from fedcor.simulation.engine.train import LocalTraining
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.loop import Simulation
from fedcor.simulation.tasks import Task, build_task

LABEL_NOISE = "label noise"  # the random stream of clients with random labels
BYTES_PER_CLIENT = 400  # at the least: its rows, its size, and what is known of it


@functools.lru_cache(maxsize=1)
def _load(name: str, stamp: tuple[int, int] | None) -> Dataset:  # noqa: ARG001
    """The data set, kept for further runs in this process until its file changes."""
    return load(name)


def _stamp(name: str) -> tuple[int, int] | None:
    """When the file of a data set was written, and its size; None if there is none."""
    path = expand_home("data.name", name) if name.endswith(".npz") else cache_file(name)
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def build_simulation(experiment: Experiment, seed: int, data: Dataset | None = None) -> Simulation:
    """The experiment's federation for one seed: the same for every selector.

    Args:
        experiment: All settings but the seed.
        seed: Fixes the partition, the initial model, every shuffle and every fault.
        data: The data set; the one that the experiment names is loaded if it is not given.

    Example:
        >>> from fedcor.simulation.experiment_files import load_experiment
        >>> simulation = build_simulation(load_experiment("digits", selector="random"), seed=1)
        >>> [record.round for record, _ in simulation.run(3)]
        [0, 1, 2]
    """
    data = data or load_data(experiment)
    selector, optimiser = experiment.build_selector(), experiment.build_optimiser()
    schedule = experiment.build_schedule()
    if (count := experiment.clients) is not None:
        check_memory("partition.clients", count, float(BYTES_PER_CLIENT) * count)
    clients: list[IntArray] | ClientData
    if isinstance(experiment.data, OwnClients):
        clients = experiment.data.clients
        sizes = np.asarray(clients.sizes)
    else:
        clients = split_data(experiment, data, seed)
        sizes = np.array([len(rows) for rows in clients])
        if noisy := experiment.noisy_clients:
            rng = stream(seed, LABEL_NOISE)
            labels = randomise_labels(data.train_y, data.classes, clients, noisy, rng)
            data = dataclasses.replace(data, train_y=labels)
    task = build_task(experiment.loss, experiment.metrics, classes=data.classes)
    module = _build_module(experiment, data, task, seed)
    parameters = sum(tensor.numel() for tensor in module.parameters())
    _check_memory(experiment, selector, optimiser, sizes, parameters)
    local = LocalTraining(
        batch_size=experiment.batch_size,
        local_steps=experiment.local_steps,
        learning_rate=schedule.at(0),
        weight_decay=experiment.weight_decay,
        proximal=optimiser_traits(optimiser).proximal,
    )
    engine = Engine(
        data,
        clients,
        module,
        local,
        seed,
        holdout=experiment.holdout,
        device=_device(experiment.device),
        task=task,
    )
    rules = experiment.fix_rules(len(sizes))
    experiment.check_faults(len(sizes), rules)
    experiment.byzantine.who(seed, len(sizes))  # refuses a fraction of less than one client
    simulation = Simulation(
        engine=engine,
        selector=selector,
        optimiser=optimiser,
        faults=experiment.faults,
        learning_rate=schedule,
        seed=seed,
        rules=rules,
        byzantine=experiment.byzantine,
        defence=experiment.defence,
        noise=LossNoise(experiment.loss_noise, experiment.loss_clip),
    )
    _ = simulation.speeds  # refuses devices tied to labels where there are none
    return simulation


def _build_module(experiment: Experiment, data: Dataset, task: Task, seed: int) -> nn.Module:
    """The model with its initial weights."""
    model = experiment.model
    options = dict(model) if isinstance(model, Mapping) else {"name": model}
    name = options.pop("name")
    with errors_under("model"):
        # Counted first, so that a model that is too large is refused before it is made.
        parameters = count_parameters(name, data.shape, data.outputs, options)
        check_memory("name", name, 4.0 * parameters)
        return build_model(name, data.shape, data.outputs, seed, options, data=data, task=task)


def _check_memory(
    experiment: Experiment,
    selector: Selector,
    optimiser: Optimiser,
    sizes: IntArray,
    parameters: int,
) -> None:
    """Refuse settings for which a run of this data and this model would not fit into memory."""
    clients, steps = len(sizes), experiment.local_steps
    chosen = experiment.faults.choose(max(1, experiment.clients_per_round), clients)
    with errors_under("training"):
        # A client's mini-batches of a round: the number of each row, and what an array takes.
        rows = min(experiment.batch_size, int(sizes.max()))
        check_memory("local_steps", steps, steps * (100.0 + 8.0 * rows))
        # The updates of a round, and their mean.
        check_memory("clients_per_round", chosen, 4.0 * (chosen + 2) * parameters)
    forecast = getattr(selector, "memory_bytes", None)  # setting -> bytes
    for key, needed in forecast(clients, parameters).items() if callable(forecast) else ():
        name = f"selectors.{experiment.selector_label}.{key}"
        check_memory(name, getattr(selector, key), needed)
    if optimiser_traits(optimiser).remembers:
        seen = min(clients, chosen * experiment.rounds)
        itemsize = np.dtype(getattr(optimiser, "dtype", "float32")).itemsize
        given = f"{type(optimiser).__name__} of {seen} clients with {parameters} parameters each"
        check_memory("optimiser.name", given, float(itemsize) * seen * parameters)


def load_data(experiment: Experiment) -> Dataset:
    """The experiment's data: its own, or the data set that it names."""
    data = experiment.data
    return data.dataset if isinstance(data, OwnData) else _load(data, _stamp(data))


def client_names_of(experiment: Experiment) -> tuple[str, ...]:
    """What clients are called in the user's own data; () where they have numbers alone."""
    data = experiment.data
    return data.dataset.client_names if isinstance(data, OwnData) else ()


def split_data(experiment: Experiment, data: Dataset, seed: int) -> list[IntArray]:
    """The training samples of each client."""
    with errors_under("partition"), blame("the partition failed"):
        parts = experiment.partition.split(data.train_y, stream(seed, "partition"))
        checked = check_parts(parts, len(data.train_y))
    if experiment.clients_per_round > len(checked):
        allowed = f"must be at most {len(checked)}: the partition has as many clients"
        raise ConfigError("clients_per_round", experiment.clients_per_round, allowed)
    return checked


def experiment_header(
    experiment: Experiment, seed: int, engine: str | None = None
) -> dict[str, Any]:
    """The header of a run of `experiment`, on the simulator or on another `engine`."""
    config = experiment.describe()
    # Never "auto", which may be another device next time.
    config["training"]["device"] = _device(experiment.device)
    if config["partition"].get("clients") is None:
        clients = len(split_data(experiment, load_data(experiment), seed))
        config["partition"]["clients"] = clients
    versions = {"torch": torch.__version__}
    selector = experiment.selector_label
    return run_header(experiment.name, selector, seed, config, versions, engine=engine)


def use_one_thread() -> None:
    """Compute in one thread: sums then have one order, and runs are equal bit for bit."""
    torch.set_num_threads(1)
    threadpool_limits(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """As `use_one_thread`, for as long as the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


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
            "device", wanted, f"cannot be used here: {str(error).splitlines()[0]}"
        ) from None
    return wanted
