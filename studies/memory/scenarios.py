"""Where selectors and optimisers are compared: the paper's settings, and what may break them.

Each scenario changes one thing. Its rounds are few enough that all scenarios together can be run on
several seeds in an hour or two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcor.core.types import Array
from fedcor.data.partitioners import Dirichlet, Shards
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.experiment_files import load_experiment


@dataclass(frozen=True)
class MemoryScenario:
    """One experiment in which pairs of selector and optimiser are compared.

    Attributes:
        name: Part of the folder's name.
        title: In tables and figures.
        rounds: Of each run.
        build: Makes the experiment, with any selector and any number of rounds.
        everyone: Whether full participation is run as well.
    """

    name: str
    title: str
    rounds: int
    build: Callable[[], Experiment]
    everyone: bool = False


def _preset(preset: str, *changes: str) -> Callable[[], Experiment]:
    return lambda: load_experiment(preset, changes, "random")


def _fmnist(
    name: str, title: str, rounds: int, *changes: str, setting: str = "2spc", everyone: bool = False
) -> MemoryScenario:
    return MemoryScenario(
        name, title, rounds, _preset(f"fmnist-{setting}", *changes), everyone=everyone
    )


FMNIST = [
    _fmnist("2spc", "FMNIST, two shards", 200, everyone=True),
    _fmnist("1spc", "FMNIST, one shard", 200, setting="1spc", everyone=True),
    _fmnist("dir", "FMNIST, Dirichlet", 200, setting="dir", everyone=True),
    _fmnist("2spc-plain", "two shards, no dropout", 100, "model.dropout=0.0"),
    _fmnist("1spc-plain", "one shard, no dropout", 100, "model.dropout=0.0", setting="1spc"),
    _fmnist("dir-plain", "Dirichlet, no dropout", 100, "model.dropout=0.0", setting="dir"),
    _fmnist("two", "two shards, 2 per round", 200, "training.clients_per_round=2"),
    _fmnist("iid", "iid", 100, "partition.kind=iid"),
    _fmnist("unequal", "very unequal sizes", 100, "partition.size_skew=1.5"),
    _fmnist("noise", "a third with random labels", 100, "data.noisy_clients=0.3333"),
    _fmnist(
        "faults",
        "half away, 30 % die",
        100,
        *("faults.availability=0.5", "faults.dropout=0.3"),
    ),
    _fmnist(
        "many",
        "1000 clients, 10 per round",
        200,
        *("partition.clients=1000", "training.clients_per_round=10"),
    ),
]

DIGITS = [
    MemoryScenario("digits-1spc", "digits, one shard", 100, _preset("digits")),
    MemoryScenario(
        "digits-2spc",
        "digits, two shards",
        100,
        _preset("digits", "partition.shards_per_client=2", "training.clients_per_round=5"),
    ),
    MemoryScenario(
        "digits-dir",
        "digits, Dirichlet",
        100,
        _preset(
            "digits",
            *("partition.kind=dirichlet", "partition.minimum_size=3"),
            "training.clients_per_round=5",
        ),
    ),
]

CIFAR10 = [
    MemoryScenario(f"cifar10-{setting}", title, 300, _preset(f"cifar10-{setting}"))
    for setting, title in {
        "2spc": "CIFAR-10, two shards",
        "1spc": "CIFAR-10, one shard",
        "dir": "CIFAR-10, Dirichlet",
    }.items()
]


def _table(classes: int, partition: Any, weights: Array | None = None) -> Experiment:
    """Generated data of `classes` classes, as a newcomer may bring, on 50 clients."""
    from sklearn.datasets import make_classification

    x, y = make_classification(
        12_000,
        40,
        n_informative=24,
        n_classes=classes,
        n_clusters_per_class=1,
        class_sep=2,
        weights=weights,
        random_state=0,
    )
    return Experiment(
        data=(x[:10_000], y[:10_000], x[10_000:], y[10_000:]),
        partition=partition,
        model={"name": "mlp", "hidden": [64], "dropout": 0.0},
        rounds=60,
        clients_per_round=5,
        local_steps=10,
        batch_size=32,
        learning_rate=0.05,
        selector="random",
    )


def _generated(
    classes: int, title: str, rounds: int, partition: Any, weights: Array | None = None
) -> MemoryScenario:
    def build() -> Experiment:
        return _table(classes, partition, weights)

    return MemoryScenario(f"table-{classes}", title, rounds, build)


def _falling(classes: int, ratio: float) -> Array:
    """(classes,) shares of classes, each `ratio` times the one before."""
    powers = ratio ** np.arange(classes)
    shares: Array = powers / powers.sum()
    return shares


TABLES = [
    _generated(20, "20 classes", 60, Dirichlet(50)),
    _generated(10, "10 classes", 60, Dirichlet(50)),
    # A Dirichlet partition of so many unequal classes does not exist for 50 clients.
    _generated(40, "40 unequal classes", 100, Shards(50, 2), _falling(40, 0.93)),
]
