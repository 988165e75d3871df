"""A user's own partition, optimiser and schedule: as an object, by entry point, as module:Class."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcor
from fedcor.core.describe import NOT_REPEATABLE, describe, describe_array, reference
from fedcor.core.errors import ConfigError, DataError
from fedcor.core.rng import stream
from fedcor.core.types import Delivery, optimiser_traits
from fedcor.data.partitioners import as_partition, check_parts
from fedcor.optimisers import as_optimiser, build_optimiser
from fedcor.simulation.build import build_simulation, experiment_header
from fedcor.simulation.schedules import as_schedule

MODULE = """
from dataclasses import dataclass
import numpy as np
import torch

@dataclass(frozen=True)
class InTurn:
    clients: int
    def split(self, labels, rng):
        return [np.arange(k, len(labels), self.clients) for k in range(self.clients)]

@dataclass(frozen=True)
class Part:
    share: float = 0.5
    def aggregate(self, model, results, weights):
        return model + self.share * (results.mean(dim=0) - model)

def schedule(round):
    return 0.1 * 0.5**round

class Decay:
    def at(self, round):
        return 0.2 / (1 + round)

class NotOne:
    pass

class Small(torch.nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 10))
    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture
def _my_module(tmp_path, monkeypatch):
    (tmp_path / "my_plugins.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def stepped(optimiser, model, updates, state=None):
    """The next model, with equal weights."""
    m = len(updates)
    delivery = Delivery(
        3, model, np.arange(m), np.ones(m) / m, np.ones(m, dtype=np.int64), 0.1, lambda: updates
    )
    return optimiser.step({} if state is None else state, delivery)[0]


def changed(**changes):
    return fedcor.experiment("digits", selector="random", **changes)


@pytest.mark.usefixtures("_my_module")
def test_by_reference_in_a_file_and_back(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        selector = "random"
        [data]
        name = "digits"
        [partition]
        kind = "my_plugins:InTurn"
        clients = 20
        [model]
        name = "my_plugins:Small"
        width = 7
        [training]
        rounds = 2
        clients_per_round = 4
        batch_size = 8
        local_steps = 1
        learning_rate = "my_plugins:schedule"
        [optimiser]
        name = "my_plugins:Part"
        share = 0.25
        """
    )
    import my_plugins

    named = fedcor.experiment(path)
    assert stepped(named.build_optimiser(), np.zeros(1), np.ones((2, 1))).tolist() == [0.25]
    simulation = build_simulation(named, 1)
    assert simulation.engine.population.count == 20
    assert simulation.engine.vector.size == 64 * 7 + 7 + 7 * 10 + 10
    assert [record.learning_rate for record, _ in simulation.run(2)] == [0.1, 0.05]
    objects = fedcor.experiment(
        named,
        partition=my_plugins.InTurn(20),
        optimiser=my_plugins.Part(0.25),
        learning_rate=my_plugins.schedule,
    )
    assert objects.describe() == named.describe()
    assert named.describe()["training"]["learning_rate"] == "my_plugins:schedule"


@pytest.mark.usefixtures("_my_module")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": {"kind": "my_plugins:NotOne"}}, "partition.kind.*a dataclass with the meth"),
        ({"partition": {"kind": "my_plugins:InTrun"}}, 'did you mean "InTurn"'),
        ({"partition": {"kind": "my_plugins:InTurn", "client": 3}}, "partition.client = 3"),
        (
            {"optimiser": {"name": "my_plugins:NotOne"}},
            "optimiser.name.*init and step, or the method aggr",
        ),
        ({"optimiser": {"name": "my_plugins:Part", "shar": 3}}, 'did you mean "share"'),
        ({"learning_rate": "my_plugins:schedul"}, 'did you mean "schedule"'),
        ({"model": {"name": "my_plugins:Small", "widht": 3}}, 'did you mean "width"'),
        ({"metrics": {"f1": "my_plugins:nothing"}}, "metrics.f1"),
    ],
)
def test_references_that_are_wrong(changes, message):
    with pytest.raises(ConfigError, match=message):
        changed(**changes)


@pytest.mark.usefixtures("_my_module")
def test_by_entry_point(monkeypatch):
    points = [
        EntryPoint("turns", "my_plugins:InTurn", "fedcor.partitions"),
        EntryPoint("part", "my_plugins:Part", "fedcor.optimisers"),
    ]
    monkeypatch.setattr(
        "fedcor.core.registry.entry_points",
        lambda group, name=None: [
            point for point in points if point.group == group and name in (None, point.name)
        ],
    )
    experiment = changed(partition={"kind": "turns", "clients": 10}, optimiser="part")
    assert len(build_simulation(experiment, 1).engine.population.sizes) == 10
    assert not build_optimiser("part", {"share": 1.0}).weighted
    with pytest.raises(ConfigError, match='did you mean "turns"'):
        changed(partition={"kind": "trns", "clients": 10})


@pytest.mark.usefixtures("_my_module")
@pytest.mark.parametrize("given", ["my_plugins:Decay", "an object", "a function"])
def test_schedules(given):
    import my_plugins

    objects = {"an object": my_plugins.Decay(), "a function": my_plugins.Decay().at}
    schedule = as_schedule(objects.get(given, given))
    assert [schedule.at(round) for round in range(2)] == [0.2, 0.1]


# --- optimisers -----------------------------------------------------------------------------------


class Bare:
    """The least that an optimiser is."""

    def aggregate(self, model, results, weights):
        return results.mean(dim=0)


class Weighted(Bare):
    weighted, proximal = True, 0.5


def test_what_an_optimiser_does_not_say_is_as_in_federated_averaging():
    bare, whole = optimiser_traits(as_optimiser(Bare())), optimiser_traits(as_optimiser(Weighted()))
    assert (bare.weighted, bare.proximal, bare.needs_updates) == (False, 0.0, True)
    assert (whole.weighted, whole.proximal) == (True, 0.5)
    simulation = build_simulation(changed(optimiser=Weighted()), 1)
    assert simulation.engine.local_training.proximal == 0.5
    default, own = (
        next(fedcor.simulate(changed(optimiser=one)))[1].model for one in ("fedavg", Bare())
    )
    assert torch.allclose(default, own, atol=1e-6)


@given(st.integers(1, 5), st.integers(0, 99))
def test_the_short_form_is_given_the_clients_models_and_may_write_to_them(m, seed):
    rng = np.random.default_rng(seed)
    model, updates = rng.standard_normal(4), rng.standard_normal((m, 4))
    for array in (model, updates):
        array.flags.writeable = False

    class Mine:
        def aggregate(self, model, results, weights):
            assert weights.sum() == pytest.approx(1)
            results -= model
            return (model + 2 * results.sum(dim=0)).requires_grad_()

    found = stepped(as_optimiser(Mine()), model, updates)
    assert np.allclose(found, model + 2 * updates.sum(axis=0))


@dataclass(frozen=True)
class Momentum:
    """The full form: it has a state."""

    keep: float = 0.5

    def init(self, population, model):
        return {"velocity": np.zeros_like(model)}

    def step(self, state, delivery):
        velocity = self.keep * state["velocity"] + delivery.mean
        return delivery.model + velocity, {"velocity": velocity}


def test_the_full_form_is_used_as_it_is_by_object_and_by_name():
    mine = Momentum()
    assert as_optimiser(mine) is mine
    assert build_optimiser(f"{__name__}:Momentum", {"keep": 0.25}) == Momentum(0.25)
    rounds = list(fedcor.simulate(changed(optimiser=mine), rounds=3))
    before = build_simulation(changed(), 1).start.model
    for _, state in rounds:
        assert np.allclose(state.optimiser["velocity"], state.model - before, atol=1e-6)
        before = state.model


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"weighted": 3}, "weighted = 3: must be true or false"),
        ({"proximal": -1.0}, "proximal = -1.0"),
        ({"extra_down": 0.5}, "extra_down = 0.5"),
        ({"step": None}, "must be a name, or an object with the methods init and step, or the me"),
    ],
)
def test_attributes_of_an_optimiser_that_cannot_be(attributes, message):
    mine = type("Mine", (Momentum,), attributes)()
    with pytest.raises(ConfigError, match=f"^optimiser.*{message}"):
        changed(optimiser=mine)


# --- partitions -----------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), min_size=40, max_size=90),
    st.integers(4, 8),
    st.integers(0, 2**32 - 1),
)
def test_partition_objects_divide_as_the_tables_of_a_file(labels, clients, seed):
    labels = np.array(labels)
    for made in (
        fedcor.IID(clients, size_skew=0.5),
        fedcor.Shards(clients, 3),
        fedcor.Dirichlet(clients, alpha=10, minimum_size=1),
    ):
        table = as_partition(made.describe())
        ours, theirs = (one.split(labels, stream(seed, "test")) for one in (made, table))
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
        assert made == table
        assert made.clients == clients


def test_impossible_partitions_are_refused_when_they_are_made():
    for make in (
        lambda: fedcor.IID(0),
        lambda: fedcor.Shards(5, shards_per_client=0),
        lambda: fedcor.Dirichlet(5, alpha=-1),
        lambda: fedcor.IID(5, size_skew=-1),
    ):
        with pytest.raises(ConfigError):
            make()


class ByLabel:
    """A user's partition that only knows how many clients there are when it sees the data."""

    def split(self, labels, rng):
        return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def test_a_partition_whose_clients_only_the_data_tells():
    experiment = changed(partition=ByLabel())
    assert experiment.clients is None
    assert experiment_header(experiment, 1)["config"]["partition"]["clients"] == 10
    assert build_simulation(experiment, 1).engine.population.count == 10
    with pytest.raises(ConfigError, match="clients_per_round = 11: must be at most 10"):
        build_simulation(fedcor.experiment(experiment, clients_per_round=11), 1)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no clients"),
        ([np.array([0]), np.array([], dtype=int)], "client 1 no samples"),
        ([np.array([0.5])], "client 0 no samples, or no list"),
        ([np.array([0, 10])], "client 0 sample 10 of 10"),
    ],
)
def test_parts_that_cannot_be_trained_on(parts, message):
    with pytest.raises(DataError, match=message):
        check_parts(parts, 10)


class FlowerPartitioner:
    """What flwr-datasets' partitioners have: `DirichletPartitioner` and its like."""

    def __init__(self, num_partitions, partition_by):
        self._num_partitions, self._partition_by = num_partitions, partition_by
        self._dataset = None

    @property
    def dataset(self):
        return self._dataset

    @dataset.setter
    def dataset(self, value):
        if self._dataset is not None:
            raise Exception("The dataset should be assigned only once")
        self._dataset = value

    @property
    def num_partitions(self):
        assert self._dataset is not None
        return self._num_partitions

    def load_partition(self, partition_id):
        owner = np.array(self.dataset[self._partition_by]) % self._num_partitions
        return self.dataset.select(np.flatnonzero(owner == partition_id))


def check_flower_partitioner(partitioner, clients):
    experiment = changed(partition=partitioner, clients_per_round=2)
    for seed in (1, 2):  # it is given its data once, and used twice
        parts = build_simulation(experiment, seed).engine.population.sizes
        assert len(parts) == clients
        assert parts.sum() == 1438
    partition = experiment.describe()["partition"]
    assert partition["clients"] == clients
    assert partition["kind"].endswith(f":{type(partitioner).__name__}")
    assert partition["partition_by"] == "digit"


def test_a_partitioner_of_flower_datasets():
    """A stand-in: the real package pins other versions than this project's."""
    check_flower_partitioner(FlowerPartitioner(5, "digit"), 5)


def test_tables_and_objects():
    assert as_partition({"kind": "iid", "clients": 3}) == fedcor.IID(3)
    own = ByLabel()
    assert as_partition(own) is own


# --- descriptions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    value: object


def test_descriptions():
    assert describe([1, (2.5, None)]) == [1, (2.5, None)]
    assert describe(np.float32(0.5)) == 0.5
    assert describe(np.arange(3)) == describe(torch.arange(3)) == describe_array([0, 1, 2])
    assert describe_array([])["shape"] == [0]
    assert describe_array(np.array(["a", None], dtype=object))["dtype"] == "object"
    assert describe(Holder({"a": Holder})) == {
        "class": f"{__name__}:Holder",
        "value": {"a": f"{__name__}:Holder"},
    }
    assert describe(functools.partial(Holder, value=3)) == describe(Holder(3))
    assert reference(lambda: 0) is None


def test_a_description_is_the_same_where_the_code_is():
    def make(number):
        return lambda x: x in {"a", "b", number} or (lambda: number)

    def other():
        return lambda x: x in {"a", "c"}

    assert describe(make(1)) == describe(make(1))
    assert describe(make(1))["code"] != describe(other())["code"]

    @dataclass(frozen=True)
    class Local:
        number: int = 1

        def method(self):
            return self.number

    assert describe(Local())[NOT_REPEATABLE] == "Local in test_registry.py"
    assert describe(eval("lambda: 0"))[NOT_REPEATABLE] == "<lambda> in a script or notebook"
