"""Where `aligned` with FedRecall is compared, and with what: scenarios, and pairs of selector and
optimiser.

Each scenario changes one thing in a setting of the paper, of the digits, or of generated data. Its
rounds are few enough that all scenarios together run on several seeds in an hour or two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fedcor.core.types import Array
from fedcor.data.partition import Dirichlet, Shards
from fedcor.simulation.experiment import Experiment
from studies.plan import Plan
from studies.scaffold import DIGITS_CHANGES, Scenario, Variant

EVERYONE_SEEDS = 3  # everyone training takes ten times as long as any other pair
EVERYONE_SCENARIOS = ("2spc", "1spc", "dir")  # where it is run at all


def pair(label: str, selector: str, optimiser: str = "fedavg", **options: float) -> Variant:
    """A selector with an optimiser, and options of the optimiser."""
    name = selector if optimiser == "fedavg" else f"{selector}+{optimiser}"
    folder = "-".join([name, *(f"{key}-{value:g}" for key, value in options.items())])
    return Variant(label, selector, folder, optimiser={"name": optimiser, **options})


RANDOM = pair("random", "random")
OURS = pair("aligned + FedRecall", "aligned", "fedrecall")
EVERYONE = Variant("everyone", "full", optimiser={"name": "fedavg"}, seeds=EVERYONE_SEEDS)
PAIRS = [
    RANDOM,
    pair("power-of-choice", "power_of_choice"),
    pair("FedCor", "fedcor"),
    pair("complement", "complement"),
    pair("random + FedVARP", "random", "fedvarp"),
    pair("round-robin + FedVARP", "round_robin", "fedvarp"),
    OURS,
]
CIFAR10_PAIRS = [p for p in PAIRS if p.label in (RANDOM.label, "complement", OURS.label)]


def _fmnist(name: str, title: str, rounds: int, *changes: str, setting: str = "2spc") -> Scenario:
    return Scenario(name, "memory", f"fmnist-{setting}", changes, rounds=rounds, title=title)


FMNIST = [
    _fmnist("2spc", "FMNIST, two shards", 200),
    _fmnist("1spc", "FMNIST, one shard", 200, setting="1spc"),
    _fmnist("dir", "FMNIST, Dirichlet", 200, setting="dir"),
    _fmnist("2spc-plain", "two shards, no dropout", 100, "model.dropout=0.0"),
    _fmnist("1spc-plain", "one shard, no dropout", 100, "model.dropout=0.0", setting="1spc"),
    _fmnist("dir-plain", "Dirichlet, no dropout", 100, "model.dropout=0.0", setting="dir"),
    _fmnist("two", "two shards, 2 per round", 200, "training.clients_per_round=2"),
    _fmnist("iid", "iid", 100, "partition.kind=iid"),
    _fmnist("unequal", "very unequal sizes", 100, "partition.size_skew=1.5"),
    _fmnist("noise", "a third with random labels", 100, "data.noisy_clients=0.3333"),
    _fmnist("faults", "half away, 30 % die", 100, "faults.availability=0.5", "faults.dropout=0.3"),
    _fmnist(
        "many",
        "1000 clients, 10 per round",
        200,
        "partition.clients=1000",
        "training.clients_per_round=10",
    ),
]
_SHARDS = {"1spc": "one shard", "2spc": "two shards", "dir": "Dirichlet"}
DIGITS = [
    Scenario(
        f"digits-{setting}",
        "memory",
        "digits",
        DIGITS_CHANGES[setting],
        rounds=100,
        title=f"digits, {title}",
    )
    for setting, title in _SHARDS.items()
]
CIFAR10 = [
    Scenario(
        f"cifar10-{setting}",
        "memory",
        f"cifar10-{setting}",
        rounds=300,
        title=f"CIFAR-10, {_SHARDS[setting]}",
    )
    for setting in ("2spc", "1spc", "dir")
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


def _falling(classes: int, ratio: float) -> Array:
    """(classes,) shares of classes, each `ratio` times the one before."""
    powers = ratio ** np.arange(classes)
    shares: Array = powers / powers.sum()
    return shares


def _generated(title: str, rounds: int, classes: int, *data: Any) -> Scenario:
    source = partial(_table, classes, *data)
    return Scenario(f"table-{classes}", "memory", source, rounds=rounds, title=title)


TABLES = [
    _generated("20 classes", 60, 20, Dirichlet(50)),
    _generated("10 classes", 60, 10, Dirichlet(50)),
    # A Dirichlet partition of so many unequal classes does not exist for 50 clients.
    _generated("40 unequal classes", 100, 40, Shards(50, 2), _falling(40, 0.93)),
]


def scenarios_of(plan: Plan) -> list[Scenario]:
    """All scenarios but CIFAR-10's, which are slow; for the digits, the fast ones.

    The plan's settings say which of CIFAR-10's are run. All others are compared as a whole.
    """
    fast = {"fmnist": [*FMNIST, *DIGITS, *TABLES], "digits": [*DIGITS, *TABLES]}
    slow = [s for s in CIFAR10 if s.name.removeprefix("cifar10-") in plan.settings]
    return fast.get(plan.dataset, slow)


def pairs_of(plan: Plan, scenario: Scenario) -> list[Variant]:
    """All pairs, and everyone training in some scenarios; few for CIFAR-10.

    Each run on CIFAR-10 takes 25 to 40 minutes.
    """
    if plan.dataset == "cifar10":
        return CIFAR10_PAIRS
    return [*PAIRS, *([EVERYONE] if scenario.name in EVERYONE_SCENARIOS else [])]
