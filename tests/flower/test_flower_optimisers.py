"""Federated optimisers of fedcor as a Flower strategy, alone and with a selector around it."""

from __future__ import annotations

import copy
import logging
import random
import statistics
from dataclasses import dataclass

import flower_grid
import numpy as np
import pytest
from flower_grid import (
    CENTRES,
    QUICK,
    RATE,
    STEPS,
    Correcting,
    MemoryGrid,
    Momentum,
    Remembering,
    initial,
    lines,
    logged,
    numpy_app,
    record,
    run,
    server_score,
    vector,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedcor.optimisers
import fedcor.selectors
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.types import Delivery, Population
from fedcor.flower import OptimiserStrategy, answers_probes, select_with
from fedcor.flower.optimiser_strategy import read_local_training
from fedcor.flower.protocol import RATE as LOCAL_RATE
from fedcor.flower.protocol import STEPS as LOCAL_STEPS
from fedcor.flower.strategy_memory import Frozen, pack, snapshot, unpack
from fedcor.rounds.model_arrays import PLAIN, layout_of
from fedcor.runs.record import read_checkpoint, read_run
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice

OPTIMISERS = [fedcor.optimisers.FedAvg(), Momentum(), Remembering()]
each_optimiser = pytest.mark.parametrize("optimiser", OPTIMISERS, ids=lambda o: type(o).__name__)


def alone(optimiser, **settings):
    return OptimiserStrategy(optimiser, fraction_evaluate=0.0, **settings)


class ByHand:
    """The same optimiser in a plain loop over the quadratic clients: the slow, obvious twin."""

    def __init__(self, optimiser, sizes):
        self.optimiser, self.sizes = optimiser, np.array(sizes)
        self.model, self.round = np.zeros(3, np.float32), 0
        self.state = optimiser.init(Population(self.sizes), self.model)

    def trained(self, k):
        w = self.model
        for _ in range(STEPS):
            w = w - np.float32(RATE) * (w - CENTRES[k])
        return w

    def train(self, chosen):
        clients, times = np.unique(chosen, return_counts=True)
        weights = (times * self.sizes[clients]).astype(float)
        delivery = Delivery(
            self.round,
            self.model,
            clients,
            weights / weights.sum(),
            np.ones(len(clients), dtype=np.int64),
            1.0,
            read_updates=lambda: np.array([self.trained(k) for k in clients]) - self.model,
        )
        self.model, self.state = self.optimiser.step(self.state, delivery)
        self.round += 1


def sizes(clients):
    return [flower_grid.sizes(k) for k in range(clients)]


# --- the same model as by hand --------------------------------------------------------------------


@each_optimiser
@pytest.mark.parametrize(
    "selector",
    [Random(3), Random(5, replacement=True), PowerOfChoice(3), FedCor(3, **QUICK), Complement(3)],
    ids=lambda s: type(s).__name__,
)
def test_with_a_selector_the_model_is_the_one_of_a_loop_by_hand(optimiser, selector, tmp_path):
    """FedCor tries candidates before it chooses, which leaves the optimiser's state alone."""
    grid = MemoryGrid(numpy_app(), 9)
    _, result = run(selector, grid, rounds=7, strategy=alone(optimiser), folder=tmp_path)
    twin = ByHand(optimiser, sizes(9))
    for line in lines(tmp_path):
        twin.train(line["selected"])
    assert twin.round == 7
    assert vector(result.arrays).tolist() == twin.model.tolist()


@each_optimiser
def test_alone_it_takes_everyone_as_fedavg_does(optimiser):
    grid = MemoryGrid(numpy_app(), 5, shuffle=False)
    result = alone(optimiser).start(grid, initial(), num_rounds=4)
    # Its clients are nodes, in the order of their ids.
    twin = ByHand(optimiser, sizes(5))
    for _ in range(4):
        twin.train(np.arange(5))
    assert vector(result.arrays) == pytest.approx(twin.model, abs=1e-6)


def test_fedavg_is_flowers():
    """Its weights are the numbers of samples, though ours would weight clients alike."""
    models = [
        one.start(MemoryGrid(numpy_app(), 6), initial(), num_rounds=3).arrays
        for one in (alone("fedavg"), FedAvg(fraction_evaluate=0.0))
    ]
    assert vector(models[0]) == pytest.approx(vector(models[1]), abs=1e-6)
    equal = ByHand(fedcor.optimisers.FedAvg(), [1] * 6)
    for _ in range(3):
        equal.train(np.arange(6))
    assert vector(models[0]) != pytest.approx(equal.model, abs=1e-4)


@pytest.mark.parametrize("name", ["fedvarp", "mifa", "fedrecall"])
@pytest.mark.parametrize("around", [True, False], ids=["selecting", "alone"])
def test_a_memory_leads_to_the_minimum_of_the_loss_of_all_data(name, around, monkeypatch):
    """Replies count by their samples, and so does what is remembered of the clients."""
    monkeypatch.setattr(flower_grid, "sizes", lambda k: [10, 1000][k % 2])
    grid = MemoryGrid(numpy_app(), 4)
    if around:
        _, result = run(Random(2), grid, rounds=150, strategy=alone(name))
    else:
        result = alone(name, fraction_train=0.5).start(grid, initial(), num_rounds=150)
    shares = np.array([10, 1000, 10, 1000]) / 2020
    assert vector(result.arrays) == pytest.approx(shares @ CENTRES[:4], abs=1e-3)


def test_an_optimiser_runs_weighted_and_the_record_says_so(tmp_path):
    given = fedcor.optimisers.MIFA(wait=True)
    strategy = alone(given)
    assert strategy.optimiser == fedcor.optimisers.MIFA(weighted=True, wait=True)
    assert not given.weighted
    run(Random(2), MemoryGrid(numpy_app(), 3), rounds=1, strategy=strategy, folder=tmp_path)
    expected = {"name": "mifa", "weighted": True, "dtype": "float32", "wait": True}
    assert read_run(tmp_path).header["config"]["optimiser"] == expected
    already = fedcor.optimisers.FedAvg(weighted=True)
    assert alone(already).optimiser is already


def test_every_start_begins_without_a_memory():
    strategy = alone(Momentum(0.9))
    first, second = (
        strategy.start(MemoryGrid(numpy_app(), 4, shuffle=False), initial(), num_rounds=3).arrays
        for _ in range(2)
    )
    assert vector(first) == pytest.approx(vector(second), abs=1e-6)


def test_a_round_without_a_reply_changes_nothing_and_is_over():
    strategy = alone(Momentum())
    with pytest.raises(FedcorError, match="without configure_train"):
        strategy.aggregate_train(1, [])
    grid = MemoryGrid(numpy_app(), 3)
    strategy.configure_train(1, initial(), ConfigRecord(), grid)
    assert strategy.aggregate_train(1, []) == (None, None)
    assert strategy.memory == {}
    with pytest.raises(FedcorError, match="without configure_train"):
        strategy.aggregate_train(1, [])


# --- what a client is -----------------------------------------------------------------------------


def test_a_client_that_joins_later_is_taken_in(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    joined = []

    def score(server_round, arrays):
        if server_round == 3:
            joined.append(grid.join())
        return server_score(server_round, arrays)

    selecting = select_with(alone(Remembering()), Full(), checkpoint=tmp_path, wait_for=4)
    result = selecting.start(grid, initial(), num_rounds=6, timeout=0.1, evaluate_fn=score)
    twin = ByHand(Remembering(), sizes(4))
    for line in lines(tmp_path):
        if twin.round == 3:
            twin.sizes = np.array(sizes(5))
            twin.state = Remembering().join(twin.state, Population(twin.sizes))
        assert line["selected"] == list(range(len(twin.sizes)))
        twin.train(line["selected"])
    assert joined
    assert vector(result.arrays).tolist() == twin.model.tolist()


def test_alone_a_node_that_joins_later_is_a_new_client():
    grid = MemoryGrid(numpy_app(), 3, shuffle=False)
    seen = []

    class Watching(Remembering):
        def step(self, state, delivery):
            seen.append((int(state["count"]), delivery.clients.tolist()))
            return super().step(state, delivery)

    def score(server_round, arrays):
        if server_round == 2:
            grid.join()

    alone(Watching()).start(grid, initial(), num_rounds=3, evaluate_fn=score)
    assert seen == [(3, [0, 1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])]


def test_alone_a_client_that_does_not_train_counts_in_the_population():
    seen = []

    class Watching(Momentum):
        def init(self, population, model):
            seen.append(population.sizes.tolist())
            return super().init(population, model)

    grid = MemoryGrid(numpy_app(), 5)
    alone(Watching(), fraction_train=0.4).start(grid, initial(), num_rounds=1)
    (found,) = seen
    assert len(found) == 5
    # Those that did not say their size are taken to be of the others' mean size.
    assert set(found) <= {*sizes(5), *range(10, 15)}


@pytest.mark.parametrize("around", [True, False], ids=["selecting", "alone"])
@pytest.mark.parametrize("name", ["fedrecall", "fedvarp"])
def test_an_optimiser_learns_sizes_as_they_become_known(name, around):
    """Clients that do not say their size before they train."""
    grid = MemoryGrid(numpy_app([answers_probes()]), 6)
    if around:
        selecting, _ = run(Random(2), grid, rounds=12, strategy=alone(name))
        memory, expected = selecting.strategy.memory, sizes(6)
    else:
        strategy = alone(name, fraction_train=0.34)
        random.seed(0)  # with which Flower draws everyone within twelve rounds
        strategy.start(grid, initial(), num_rounds=12)
        memory, expected = strategy.memory, list(strategy._met.values())
        assert sorted(expected) == sizes(6)
    assert memory["scales"].tolist() == expected
    vectors = np.array([memory[f"update/{k}"] for k in range(6)])
    assert memory["total"] == pytest.approx(expected @ vectors.astype(float))


def test_sizes_of_clients_that_did_not_change_are_not_joined_again():
    class Counting(Remembering):
        def join(self, state, population):
            joined.append(population.sizes.tolist())
            return super().join(state, population)

    joined = []
    run(Full(), MemoryGrid(numpy_app(), 4), rounds=3, strategy=alone(Counting()))
    assert joined == []


def test_a_node_that_restarts_keeps_its_memory_within_a_selection(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)

    def score(server_round, arrays):
        if server_round == 2:  # client 1 comes back on a node with another id
            grid.leave(1)
            grid.join(1)
        return server_score(server_round, arrays)

    selecting = select_with(alone(Remembering()), Full(), checkpoint=tmp_path, wait_for=4)
    result = selecting.start(grid, initial(), num_rounds=5, timeout=0.1, evaluate_fn=score)
    twin = ByHand(Remembering(), sizes(4))
    for line in lines(tmp_path):
        twin.train(line["selected"])
    assert vector(result.arrays).tolist() == twin.model.tolist()


# --- its state ------------------------------------------------------------------------------------


class Killed(BaseException):
    """As kill -9: nothing of ours gets to clean up in between."""


@each_optimiser
def test_a_server_that_was_killed_resumes_as_if_it_was_not(optimiser, tmp_path):
    selector = FedCor(3, **QUICK)
    grid = MemoryGrid(numpy_app(), 8, seed=1)
    _, whole = run(selector, grid, rounds=8, strategy=alone(optimiser), folder=tmp_path / "whole")

    def kill(server_round, arrays):
        if server_round == 5:
            raise Killed
        return server_score(server_round, arrays)

    folder = tmp_path / "killed"
    selecting = select_with(alone(optimiser), selector, checkpoint=folder, wait_for=8)
    with pytest.raises(Killed):
        selecting.start(
            MemoryGrid(numpy_app(), 8, seed=2), initial(), 8, timeout=0.1, evaluate_fn=kill
        )
    assert len(lines(folder)) == 4
    # Other node ids, and an object of the strategy that knows nothing.
    grid = MemoryGrid(numpy_app(), 8, seed=3)
    _, resumed = run(selector, grid, rounds=8, strategy=alone(optimiser), folder=folder)
    assert vector(resumed.arrays).tolist() == vector(whole.arrays).tolist()
    saved = [read_checkpoint(tmp_path / name) for name in ("whole", "killed")]
    assert saved[0].keys() == saved[1].keys()
    for name, array in saved[0].items():
        assert array.tobytes() == saved[1][name].tobytes(), name


def test_only_what_an_optimiser_remembers_is_in_the_checkpoint(tmp_path):
    run(Full(), MemoryGrid(numpy_app(), 4), 2, strategy=alone(Remembering()), folder=tmp_path)
    saved = unpack(read_checkpoint(tmp_path), "strategy")
    assert saved.keys() == {"_memory", "_sizes"}
    assert saved["_sizes"].tolist() == sizes(4)
    assert set(saved["_memory"]) == {"count", "total", *(f"update/{k}" for k in range(4))}


def test_a_snapshot_does_not_copy_the_state(tmp_path):
    selecting, _ = run(Full(), MemoryGrid(numpy_app(), 4), 2, strategy=alone(Remembering()))
    memory = snapshot(selecting.strategy).values["_memory"]
    assert memory is selecting.strategy._memory
    with pytest.raises(ValueError, match="read-only"):
        memory["total"][0] = 1.0
    assert copy.deepcopy(memory) is memory
    again = unpack(pack({"_memory": memory}, "strategy"), "strategy")["_memory"]
    assert isinstance(again, Frozen)
    assert {k: v.tolist() for k, v in again.items()} == {k: v.tolist() for k, v in memory.items()}


def test_a_trial_of_a_candidate_leaves_the_state_alone():
    tried = []

    @dataclass(frozen=True)
    class Trying(Random):
        def select(self, state, federation):
            before = strategy._memory
            federation.loss_changes(np.array([0, 1]))
            assert strategy._memory is before
            tried.append(federation.round)
            return np.array([2, 3]), state

    strategy = alone(Momentum())
    _, result = run(Trying(2), MemoryGrid(numpy_app(), 5), rounds=4, strategy=strategy)
    twin = ByHand(Momentum(), sizes(5))
    for _ in tried:
        twin.train(np.array([2, 3]))
    assert len(tried) == 4
    assert vector(result.arrays).tolist() == twin.model.tolist()


def test_within_a_strategy_that_wraps_it(tmp_path):
    """Differential privacy without noise, and with a norm that clips nothing."""

    def wrapped():
        return DifferentialPrivacyServerSideFixedClipping(alone(Remembering()), 0.0, 1e6, 4)

    run(Full(), MemoryGrid(numpy_app(), 4), rounds=2, strategy=wrapped(), folder=tmp_path)
    _, result = run(Full(), MemoryGrid(numpy_app(), 4), rounds=5, strategy=wrapped(), folder=None)
    twin = ByHand(Remembering(), sizes(4))
    for _ in range(5):
        twin.train(np.arange(4))
    assert vector(result.arrays) == pytest.approx(twin.model, abs=1e-6)
    assert "strategy._memory" in unpack(read_checkpoint(tmp_path), "strategy")
    assert read_run(tmp_path).header["config"]["optimiser"]["name"].endswith(":Remembering")


# --- arrays ---------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
            st.sampled_from(["float16", "float32", "float64", "int64", "bool"]),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.integers(0, 99),
)
def test_arrays_survive_the_way_through_a_vector(parts, seed):
    rng = np.random.default_rng(seed)
    model = {
        f"{i}.running_var" if plain else str(i): np.asarray(rng.standard_normal(shape)).astype(kind)
        for i, (shape, kind, plain) in enumerate(parts)
    }
    expected = {
        name: values
        for name, values in model.items()
        if values.dtype.kind == "f" and not name.endswith("running_var")
    }
    layout = layout_of(model)
    flat = layout.flatten(model)
    assert flat.dtype == ("float64" if any(v.dtype == "f8" for v in expected.values()) else "f4")
    assert flat.tolist() == [float(x) for v in expected.values() for x in v.ravel()]
    found = layout.unflatten(flat)
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        assert found[name].tobytes() == values.tobytes()


def normalised_app():
    """Client k sends weights k + 1, a running variance of k + 1, and k + 1 batches."""
    app = ClientApp(mods=[answers_probes()])

    @app.train()
    def train(message, context):
        k = int(context.node_config["partition-id"])
        start = message.content["arrays"]
        arrays = {name: Array(np.full_like(array.numpy(), k + 1)) for name, array in start.items()}
        arrays["causal"] = start["causal"]
        metrics = MetricRecord({"loss": 1.0, "num-examples": [1, 3][k], "local-steps": 7 - k})
        metrics["learning-rate"] = 0.5
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()  # without which the mod is not asked, and clients have no stable names
    def evaluate(message, context):
        metrics = MetricRecord({"loss": 1.0, "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


NORMALISED = {
    "layer.weight": np.zeros((2, 2), np.float32),
    "norm.running_var": np.ones(2, np.float32),
    "norm.num_batches_tracked": np.array(0),
    "half": np.zeros(1, np.float16),
    "mask": np.array([True, False]),
    "ema": np.zeros(1),
    "causal": np.array([0, -np.inf], np.float32),
}


def normalised():
    return ArrayRecord({name: Array(values.copy()) for name, values in NORMALISED.items()})


@dataclass(frozen=True)
class Reversing:
    """Goes the wrong way, which would make a variance negative."""

    def init(self, population, model):
        return {}

    def step(self, state, delivery):
        return delivery.model - 4 * delivery.mean, state


@pytest.mark.parametrize("around", [True, False], ids=["selecting", "alone"])
def test_what_is_no_weight_is_averaged_and_keeps_its_type(around):
    strategy = alone(Reversing(), plain=(*PLAIN, "ema"))
    strategy = select_with(strategy, Full(), wait_for=2) if around else strategy
    result = strategy.start(MemoryGrid(normalised_app(), 2), normalised(), num_rounds=1)
    made = {name: array.numpy() for name, array in result.arrays.items()}
    assert list(made) == list(NORMALISED)
    assert {n: v.dtype for n, v in made.items()} == {n: v.dtype for n, v in NORMALISED.items()}
    # The mean of 1 and 2 with weights 1 and 3 is 1.75; the optimiser moves by minus four times it.
    assert made["layer.weight"].tolist() == [[-7, -7], [-7, -7]]
    assert made["half"].tolist() == [-7]
    assert made["norm.running_var"].tolist() == [1.75, 1.75]
    assert made["ema"].tolist() == [1.75]
    assert made["norm.num_batches_tracked"].tolist() == 2
    assert made["mask"].tolist() == [True, True]
    assert made["causal"].tolist() == [0, -np.inf]


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (lambda: FedAvg(fraction_evaluate=0.0), 6),
        (lambda: alone(Reversing()), 6),
        (lambda: alone(Reversing(), plain=(*PLAIN, "ema")), 5),
    ],
    ids=["flower's", "ours", "patterns"],
)
def test_what_is_no_weight_is_not_shown_to_a_selector(strategy, size):
    seen = []

    @dataclass(frozen=True)
    class Observing(Full):
        def observe(self, state, outcome):
            seen.append((outcome.updates.tolist(), outcome.head))
            return state

    grid = MemoryGrid(normalised_app(), 2)
    select_with(strategy(), Observing(), wait_for=2).start(grid, normalised(), num_rounds=1)
    # Client k sends k + 1 for every weight. The only matrix has four, and comes first.
    assert seen == [([[1.0] * size, [2.0] * size], slice(0, 4))]


def test_an_optimiser_is_told_how_far_clients_trained():
    seen = []

    class Watching(Reversing):
        def step(self, state, delivery):
            assert not delivery.model.flags.writeable
            assert not delivery.updates.flags.writeable
            seen.append((delivery.round, delivery.steps.tolist(), delivery.learning_rate))
            return super().step(state, delivery)

    grid = MemoryGrid(normalised_app(), 2)
    select_with(alone(Watching()), Full(), wait_for=2).start(grid, normalised(), num_rounds=2)
    assert seen == [(0, [7, 6], 0.5), (1, [7, 6], 0.5)]
    seen.clear()
    run(Full(), MemoryGrid(numpy_app(), 2), rounds=1, strategy=alone(Watching()))
    assert seen == [(0, [1, 1], 1.0)]


def saying(steps, rate):
    """A trouble of the grid: a client says that it trained so far."""

    def changed(message, reply):
        for metrics in reply.content.metric_records.values():
            metrics["local-steps"], metrics["learning-rate"] = steps, rate
        return reply

    return changed


@pytest.mark.parametrize("around", [True, False], ids=["selecting", "alone"])
@pytest.mark.parametrize(
    ("steps", "rate", "used", "said"),
    [
        (0, 0.1, 5, "local-steps is 0, 5 is used"),
        (-3, 0.1, 5, "local-steps is -3, 5 is used"),
        (10**6, 0.1, 50, "local-steps is 1e+06, 50 is used"),
        (10**12, 0.1, 5, "local-steps is 1e+12, 5 is used"),
        (5, 0.0, 5, "learning-rate is 0, 0.1 is used"),
        (5, -1.0, 5, "learning-rate is -1, 0.1 is used"),
        (5, 7.0, 5, None),
    ],
)
def test_one_reply_does_not_change_the_unit_of_all(steps, rate, used, said, around, caplog):
    seen = []

    class Watching(Reversing):
        def step(self, state, delivery):
            seen.append((sorted(delivery.steps.tolist()), delivery.learning_rate))
            return delivery.model, state

    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble = {k: saying(5, 0.1) for k in range(3)} | {3: saying(steps, rate)}
    with logged(caplog):
        if around:
            run(Full(), grid, rounds=2, strategy=alone(Watching()))
        else:
            alone(Watching()).start(grid, initial(), num_rounds=2)
    assert seen == [(sorted([5, 5, 5, used]), 0.1)] * 2
    who = "client 3 (partition-3)" if around else f"node {grid.node_of(3)}"
    warnings = [line for line in caplog.messages if "is used" in line]
    assert len(warnings) == (said is not None)
    if said is not None:
        assert f"{who}: {said} (" in warnings[0]


def test_a_selector_is_told_how_far_clients_trained_as_the_optimiser_is():
    seen, paces = [], []

    class Watching(Reversing):
        def step(self, state, delivery):
            paces.append((delivery.learning_rate * delivery.steps).tolist())
            return delivery.model, state

    @dataclass(frozen=True)
    class Observing(Full):
        def observe(self, state, outcome):
            seen.append(outcome.step_sizes.tolist())
            return state

    grid = MemoryGrid(numpy_app(), 3)
    run(Observing(), grid, rounds=1, strategy=alone(Watching()))
    grid.trouble = {0: saying(4, 0.5), 1: saying(8, 0.5), 2: saying(0, 0.5)}
    run(Observing(), grid, rounds=1, strategy=alone(Watching()))
    assert seen == paces == [[1.0, 1.0, 1.0], [2.0, 4.0, 3.0]]


metric = st.none() | st.integers(-(10**10), 10**10) | st.floats(0, 20, allow_nan=False)


@given(st.lists(st.tuples(metric, metric), min_size=1, max_size=6))
def test_how_far_clients_trained_as_a_plain_loop_finds_it(said):
    records = [
        MetricRecord(
            {k: v for k, v in zip((LOCAL_STEPS, LOCAL_RATE), one, strict=True) if v is not None}
        )
        for one in said
    ]
    found = read_local_training(records)
    counts = [s for s, _ in said if s is not None and 1 <= s <= 1e9]
    rates = [r for _, r in said if r is not None and r > 0]
    usual = statistics.median(counts) if counts else 1
    for (count, _), steps in zip(said, found.steps.tolist(), strict=True):
        expected = min(count, 10 * usual) if count in counts else usual
        assert steps == round(expected)
    assert found.learning_rate == pytest.approx(statistics.median(rates) if rates else 1.0)
    assert found.step_sizes.tolist() == [found.learning_rate * e for e in found.steps.tolist()]
    # Whoever is not believed is named, unless nobody says anything.
    doubted = {(row, what.split(" ")[0]) for row, what in found.doubts}
    odd_steps = {
        (row, LOCAL_STEPS) for row, (s, _) in enumerate(said) if s not in counts or s > 10 * usual
    }
    odd_rates = {(row, LOCAL_RATE) for row, (_, r) in enumerate(said) if r not in rates}
    silent = all(s is None for s, _ in said), all(r is None for _, r in said)
    assert doubted == (set() if silent[0] else odd_steps) | (set() if silent[1] else odd_rates)


def test_alone_a_reply_that_cannot_be_used_is_left_out(caplog):
    grid = MemoryGrid(numpy_app(), 4, shuffle=False)

    def nan(message, reply):
        metrics = reply.content["metrics"]
        arrays = record(np.full(3, np.nan, np.float32))
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    grid.trouble[1] = nan
    with logged(caplog):
        result = alone("fedavg").start(grid, initial(), num_rounds=1)
    assert "is left out: unusable: w has numbers that are not finite" in caplog.text
    twin = ByHand(fedcor.optimisers.FedAvg(), sizes(4))
    twin.train(np.array([0, 2, 3]))
    assert vector(result.arrays) == pytest.approx(twin.model, abs=1e-6)


def test_an_error_in_an_optimiser_says_the_round_as_flower_counts():
    class Failing(Reversing):
        def step(self, state, delivery):
            return delivery.model * np.float32("nan"), state

    with pytest.raises(FedcorError, match="round 1: the optimiser Failing made numbers that are n"):
        run(Full(), MemoryGrid(numpy_app(), 2), rounds=1, strategy=alone(Failing()))
    with pytest.raises(FedcorError, match="round 1: the optimiser Failing made numbers that are n"):
        alone(Failing()).start(MemoryGrid(numpy_app(), 2), initial(), num_rounds=1)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Correcting(), "optimiser = .*corrects the local steps.*the simulator runs it"),
        (fedcor.optimisers.FedProx(mu=0.5), "proximal term.*flwr.serverapp.strategy.FedProx"),
        ("fedprox", "optimiser = 'fedprox': .*flwr.serverapp.strategy.FedProx"),
        ("fedavgg", 'optimiser = .*did you mean "fedavg"'),
        (3, "optimiser = 3: must be a name, or an object"),
    ],
    ids=["corrections", "proximal", "by name", "no such name", "no optimiser"],
)
def test_what_cannot_run_on_the_server_alone_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        OptimiserStrategy(given)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match='did you mean "fraction_train"'):
        OptimiserStrategy("fedavg", fraction_trai=0.1)
    for plain in ("running_mean", (3,)):
        with pytest.raises(ConfigError, match="plain = .*list of patterns"):
            OptimiserStrategy("fedavg", plain=plain)
    assert OptimiserStrategy(fedcor.optimisers.FedProx(mu=0.0)).optimiser.mu == 0.0


def test_secure_aggregation_refuses_an_optimiser_that_reads_single_updates():
    with pytest.raises(ConfigError, match="optimiser = Remembering.*choose one that reads the me"):
        select_with(alone(Remembering()), Random(2), secure_aggregation=True)
    select_with(alone(Momentum()), Random(2), secure_aggregation=True)
    with pytest.raises(ConfigError, match="selector = Aligned.*choose one that does not"):
        select_with(FedAvg(), clients_per_round=2, secure_aggregation=True)


# --- the default ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own(Random):
    """A selector that goes with an optimiser of its own."""

    optimiser = "flower_grid:Momentum"


@pytest.fixture
def own_default(monkeypatch):
    monkeypatch.setattr(fedcor.selectors, "DEFAULT_SELECTOR", "test_flower_optimisers:Own")


def test_without_a_selector_the_default_one_chooses_and_its_optimiser_aggregates(
    own_default, tmp_path, caplog
):
    given = FedAvg(fraction_evaluate=0.0, min_available_nodes=5, weighted_by_key="num-examples")
    selecting = select_with(given, clients_per_round=3, checkpoint=tmp_path)
    made = selecting.strategy
    assert isinstance(made, OptimiserStrategy)
    for name, value in vars(given).items():
        assert getattr(made, name) == value, name
    with logged(caplog, logging.INFO):
        result = selecting.start(
            MemoryGrid(numpy_app(), 6), initial(), 4, timeout=0.1, evaluate_fn=server_score
        )
    assert "Selection: Own(clients_per_round=3" in caplog.text
    assert "Aggregation: OptimiserStrategy" in caplog.text
    assert "Optimiser: Momentum(keep=0.5" in caplog.text
    twin = ByHand(Momentum(), sizes(6))
    for line in lines(tmp_path):
        assert len(line["selected"]) == 3
        twin.train(line["selected"])
    assert vector(result.arrays).tolist() == twin.model.tolist()
    config = read_run(tmp_path).header["config"]
    assert config["strategy"] == "OptimiserStrategy"
    named = {"name": "flower_grid:Momentum", "keep": 0.5, "weighted": True}
    assert config["optimiser"] == named


def test_any_other_strategy_and_any_given_selector_keep_their_aggregation(own_default):
    class Mine(FedAvg):
        pass

    for strategy in (FedAdam(), Mine(), alone(Remembering())):
        selecting = select_with(strategy, clients_per_round=2)
        assert selecting.strategy is strategy
        assert isinstance(selecting.selector, Own)
    plain = FedAvg()
    for selector in (Own(2), "test_flower_optimisers:Own"):
        named = {"clients_per_round": 2} if isinstance(selector, str) else {}
        assert select_with(plain, selector, **named).strategy is plain


def test_the_default_selector_needs_to_know_how_many_clients():
    with pytest.raises(ConfigError, match="clients_per_round = None: must be given where no"):
        select_with(FedAvg())
    selecting = select_with(FedAvg(), clients_per_round=3)
    assert selecting.selector.clients_per_round == 3
    assert fedcor.selectors.selector_name(selecting.selector) == fedcor.selectors.DEFAULT_SELECTOR


class ShortForm:
    """A user's own optimiser with one method, on tensors: the mean of the clients, unweighted."""

    def aggregate(self, model, results, weights):
        return results.mean(dim=0)


def test_a_short_form_is_taken_and_named(tmp_path, caplog):
    grid = MemoryGrid(numpy_app(), 4)
    with logged(caplog):
        _, result = run(Full(), grid, rounds=3, strategy=alone(ShortForm()), folder=tmp_path)
    assert "cannot be written" not in caplog.text
    twin = ByHand(fedcor.optimisers.FedAvg(), [1] * 4)
    for _ in range(3):
        twin.train(np.arange(4))
    assert vector(result.arrays) == pytest.approx(twin.model, abs=1e-6)
    config = read_run(tmp_path).header["config"]
    assert config["optimiser"] == {"name": "test_flower_optimisers:ShortForm"}


def test_the_record_says_how_much_an_optimiser_remembers(tmp_path):
    def sizes_of(strategy, folder):
        run(Random(1), MemoryGrid(numpy_app(), 3), 3, strategy=strategy, folder=folder)
        return [line.get("memory_bytes") for line in lines(folder)]

    assert sizes_of(None, tmp_path / "plain") == [None] * 3
    assert sizes_of(alone(Momentum()), tmp_path / "momentum") == [12] * 3
    chosen = [line["selected"] for line in lines(tmp_path / "momentum")]
    met = [len({tuple(one) for one in chosen[: i + 1]}) for i in range(3)]
    expected = [8 + 24 + 12 * count for count in met]
    assert sizes_of(alone(Remembering()), tmp_path / "remembering") == expected


def test_the_header_of_another_strategy_names_no_optimiser(tmp_path):
    """Runs of before are resumed: their headers have none."""
    run(Random(2), MemoryGrid(numpy_app(), 3), rounds=1, folder=tmp_path)
    assert "optimiser" not in read_run(tmp_path).header["config"]
