"""The strategy against a grid in memory: whom it chooses, what it sends, what it refuses."""

from __future__ import annotations

import ast
import dataclasses
import logging
from pathlib import Path

import flower_grid
import numpy as np
import pytest
from flower_grid import (
    QUICK,
    MemoryGrid,
    initial,
    lines,
    logged,
    loss,
    numpy_app,
    quiet,
    run,
    train_messages,
    vector,
)
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

import fedcor.flower
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import Outcome
from fedcor.flower import FedCorStrategy, SelectingStrategy, SelectionSettings, select_with
from fedcor.flower.protocol import NOTE, flower_round, own_round, payload_bytes, version_of
from fedcor.selectors.afl import AFL
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor, Proxy
from fedcor.selectors.power_of_choice import PowerOfChoice

# --- the same choices as a loop by hand ----------------------------------------------------------


class ByHand:
    """The same federation without Flower: the slow, obvious twin."""

    def __init__(self, clients, seed=0):
        self.round, self.seed, self.clients = 0, seed, clients
        self.model = np.zeros(3, np.float32)
        sizes = np.array([flower_grid.sizes(k) for k in range(clients)])
        self.weights, self.sizes = sizes / sizes.sum(), sizes
        self.available = np.arange(clients)

    @property
    def rng(self):
        self._rng = getattr(self, "_rng", None) or stream(self.seed, "select", self.round)
        return self._rng

    def losses(self, clients):
        return np.array([loss(int(k), self.model) for k in clients])

    def trained(self, k):
        w = self.model
        for _ in range(flower_grid.STEPS):
            w = w - np.float32(flower_grid.RATE) * (w - flower_grid.CENTRES[k])
        return w

    def mean(self, chosen):
        chosen = np.sort(chosen)
        total = sum(int(self.sizes[k]) for k in chosen)
        out = None
        for k in chosen:
            term = self.trained(k) * (int(self.sizes[k]) / total)
            out = term if out is None else out + term
        return out

    def loss_changes(self, selection):
        candidate = self.mean(selection)
        return np.array([loss(k, candidate) - loss(k, self.model) for k in range(self.clients)])

    def train(self, chosen):
        participated = np.unique(chosen)
        before, results = (
            self.losses(participated),
            np.array([self.trained(k) for k in participated]),
        )
        updates = results - self.model
        outcome = Outcome(
            self.round,
            chosen,
            participated,
            step_sizes=np.ones(len(participated)),
            # FedAvg weights by num-examples.
            aggregation_weights=self.sizes[participated].astype(float),
            read_losses=lambda: before,
            read_updates=lambda: updates,
        )
        self.model = self.mean(chosen)
        self.round += 1
        self._rng = None
        return outcome


SELECTORS = [
    Random(3),
    Random(3, replacement=True),
    AFL(3),
    PowerOfChoice(3),
    FedCor(3, **QUICK),
    FedCor(3, samples_per_refit=2, **QUICK),
    Proxy(3, **QUICK),
    Complement(3),
    Complement(3, sketch="full"),
    Full(),
]


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_every_selector_chooses_as_in_a_loop_by_hand(selector, tmp_path):
    from fedcor.core.types import Population

    _, result = run(selector, MemoryGrid(numpy_app(), 12), rounds=8, folder=tmp_path)
    twin = ByHand(12)
    state, chosen_by_twin = selector.init(Population(twin.sizes)), []
    for _ in range(8):
        chosen, state = selector.select(state, twin)
        state = selector.observe(state, twin.train(chosen))
        chosen_by_twin.append(chosen.tolist())
    assert [entry["selected"] for entry in lines(tmp_path)] == chosen_by_twin
    assert vector(result.arrays) == pytest.approx(twin.model, abs=1e-6)


def test_a_warm_up_round_trains_its_clients_once():
    grid = MemoryGrid(numpy_app(), 12)
    run(FedCor(3, warmup=4, warmup_steps=5), grid, rounds=4)
    assert len(train_messages(grid)) == 4 * 3


def test_the_outcome_carries_losses_and_updates(tmp_path):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watching(Random):
        def observe(self, state, outcome):
            seen.append((outcome.participated, outcome.losses, outcome.updates))
            return state

    run(Watching(3), MemoryGrid(numpy_app(), 12), rounds=2)
    twin = ByHand(12)
    for participated, losses, updates in seen:
        expected = twin.train(participated)
        assert losses == pytest.approx(expected.losses)
        assert updates == pytest.approx(expected.updates, abs=1e-6)


# --- the strategy that is wrapped ----------------------------------------------------------------


def test_a_strategy_that_changes_its_configuration_does_so_once_a_round(tmp_path):
    class Decaying(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            config["lr"] = float(config["lr"]) * 0.5
            return super().configure_train(server_round, arrays, config, grid)

    selecting = select_with(
        Decaying(fraction_evaluate=0.0), FedCor(3, **QUICK), checkpoint=tmp_path, wait_for=12
    )
    selecting.start(
        MemoryGrid(numpy_app(), 12),
        initial(),
        num_rounds=4,
        train_config=ConfigRecord({"lr": 1.0}),
        timeout=0.1,
    )
    assert [entry["learning_rate"] for entry in lines(tmp_path)] == [0.5, 0.25, 0.125, 0.0625]


def test_the_strategys_share_and_minimum_do_not_hold_the_choice_back():
    strategy = FedAvg(
        fraction_train=0.1, min_train_nodes=2, min_available_nodes=12, fraction_evaluate=0.0
    )
    selecting, _ = run(Random(5), grid := MemoryGrid(numpy_app(), 12), rounds=2, strategy=strategy)
    assert len(train_messages(grid)) == 10
    assert (strategy.fraction_train, strategy.min_train_nodes, strategy.min_available_nodes) == (
        0.1,
        2,
        12,
    )
    assert selecting.strategy is strategy


# --- bytes ---------------------------------------------------------------------------------------


def test_the_record_counts_the_bytes_that_went(tmp_path):
    grid = MemoryGrid(numpy_app(), 12)
    run(FedCor(3, **QUICK), grid, rounds=8, folder=tmp_path)
    assert sum(entry["bytes_down"] for entry in lines(tmp_path)) == sum(
        payload_bytes(m.content) for m in grid.sent
    )


def test_no_node_is_sent_a_model_twice():
    grid = MemoryGrid(numpy_app(), 12)
    run(FedCor(3, samples_per_refit=2, **QUICK), grid, rounds=8)
    seen, models = set(), 0
    for message in grid.sent:
        for arrays in message.content.array_records.values():
            models += 1
            seen.add((message.metadata.dst_node_id, version_of(arrays)))
    assert len(seen) == models > 12


def test_random_selection_sends_plain_messages():
    grid = MemoryGrid(numpy_app(), 12)
    run(Random(3), grid, rounds=3)
    assert all(NOTE not in message.content for message in train_messages(grid))


def test_a_node_that_lost_the_model_is_sent_it(tmp_path):
    class Forgetful(Random):
        def select(self, state, federation):
            federation.losses(federation.available)
            for context in grid.contexts.values():
                context.state.clear()  # every node restarts between the question and the training
            return super().select(state, federation)

    grid = MemoryGrid(numpy_app(), 4)
    run(
        dataclasses.make_dataclass("F", [], bases=(Forgetful,), frozen=True)(2),
        grid,
        rounds=3,
        folder=tmp_path,
    )
    assert all(len(entry["participated"]) == 2 for entry in lines(tmp_path))
    assert all(not entry["faults"] for entry in lines(tmp_path))


def test_losses_that_an_evaluation_brought_are_not_asked_for(tmp_path):
    grid = MemoryGrid(numpy_app(), 6)
    selecting = select_with(
        FedAvg(), FedCor(2, warmup=9, warmup_steps=5), checkpoint=tmp_path, wait_for=6
    )
    selecting.start(grid, initial(), num_rounds=3, timeout=0.1)
    assert [entry["probed"] for entry in lines(tmp_path)] == [12, 6, 6]
    # The clients' own evaluation, where the server has none.
    assert lines(tmp_path)[0]["test_accuracy"] > 0


# --- mistakes ------------------------------------------------------------------------------------


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="must be given with a selector's name"):
        select_with(FedAvg(), "random")
    with pytest.raises(ConfigError, match="set by the selector"):
        select_with(FedAvg(), Random(3), clients_per_round=3)
    with pytest.raises(ConfigError, match="strategy"):
        select_with("fedavg", Random(3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be one of name, key"):
        select_with(FedAvg(), Random(3), identity="face")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="secure aggregation hides"):
        select_with(FedAvg(), Complement(3), secure_aggregation=True)
    with pytest.raises(ConfigError, match="its own loop"):
        select_with(type("Looping", (FedAvg,), {"start": lambda self: None})(), Random(3))
    with pytest.raises(ConfigError, match="switches training off"):
        select_with(FedAvg(fraction_train=0.0), Random(3))
    with pytest.raises(ConfigError, match="methods"):
        SelectingStrategy(FedAvg(), object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="probe_timeout"):
        FedCorStrategy(3, probe_timeout=0)
    with pytest.raises(ConfigError, match='warmpu.*did you mean "warmup"'):
        FedCorStrategy(3, warmpu=3)
    with pytest.raises(ConfigError, match='chekpoint.*did you mean "checkpoint"'):
        FedCorStrategy(3, chekpoint="x")
    with pytest.raises(ConfigError, match='wait_fro.*did you mean "wait_for"'):
        select_with(FedAvg(), Random(3), wait_fro=3)
    with pytest.raises(ConfigError, match="attempts"):
        select_with(FedAvg(), Random(3), attempts=0)
    with pytest.raises(FedcorError, match="outside its own start"):
        FedCorStrategy(3).aggregate_train(1, [])
    assert isinstance(
        select_with(FedAvg(), "power_of_choice", clients_per_round=3).selector, PowerOfChoice
    )
    assert FedCorStrategy(3, beta=0.5).selector.beta == 0.5
    settings = SelectionSettings(wait_for=7, seed=2)
    assert SelectingStrategy(FedAvg(), Random(3), settings).settings == settings


# --- the shape of the room ------------------------------------------------------------------------

PUBLIC = {
    "flwr.app",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.simulation",
}


def test_non_public_modules_of_flower_are_imported_in_one_place():
    folder = Path(fedcor.flower.__file__).parent
    for path in folder.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        modules = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        modules += [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
        found = {name for name in modules if name.split(".")[0] == "flwr"} - PUBLIC
        assert not found or path.name == "protocol.py", f"{path} imports {found}"


def test_the_strategy_keeps_no_attribute_beside_those_of_its_constructor():
    selecting = select_with(quiet(), FedCor(3, **QUICK), wait_for=4)
    before = set(vars(selecting))
    assert len(before) < 8
    selecting.start(MemoryGrid(numpy_app(), 4), initial(), num_rounds=2, timeout=0.1)
    assert set(vars(selecting)) == before


def test_rounds_are_renumbered_in_one_place(tmp_path, caplog):
    """Ours count from 0 over the whole run. Flower's loop counts from 1 in every start."""
    assert [own_round(server_round, 0) for server_round in (0, 1, 2)] == [-1, 0, 1]
    assert flower_round(own_round(1, finished=6)) == 7
    seen = []

    class Watching(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            seen.append(("configure_train", server_round))
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_evaluate(self, server_round, replies):
            seen.append(("aggregate_evaluate", server_round))
            return super().aggregate_evaluate(server_round, replies)

    @dataclasses.dataclass(frozen=True)
    class Asking(Random):
        def select(self, state, federation):
            seen.append(("select", federation.round))
            return super().select(state, federation)

        def observe(self, state, outcome):
            if outcome.round == 2:
                raise ValueError("no")
            return state

    grid = MemoryGrid(numpy_app(), 4)
    run(Asking(2), grid, rounds=1, strategy=Watching(), folder=tmp_path)
    with logged(caplog, logging.INFO), pytest.raises(FedcorError, match="round 3: .* observe"):
        run(Asking(2), grid, rounds=3, strategy=Watching(), folder=tmp_path)
    assert [entry["round"] for entry in lines(tmp_path)] == [0, 1]
    for verb, numbers in (
        ("select", [0, 1, 2]),
        ("configure_train", [1, 2, 3]),
        ("aggregate_evaluate", [1, 2]),
    ):
        assert [number for name, number in seen if name == verb] == numbers
    assert {m.content["config"]["server-round"] for m in train_messages(grid)} == {1, 2, 3}
    assert "after round 1" in caplog.text
    assert "round 2 of 3: selected 2 of 4 clients" in caplog.text
    assert "round 3 of 3: selected 2 of 4 clients" in caplog.text


# --- errors of others -----------------------------------------------------------------------------


def test_secure_aggregation_hides_updates_from_any_selector():
    @dataclasses.dataclass(frozen=True)
    class Peeping(Random):
        def observe(self, state, outcome):
            return {"sum": outcome.updates.sum(axis=0)}

    with pytest.raises(FedcorError, match="hidden by secure aggregation"):
        run(Peeping(2), MemoryGrid(numpy_app(), 4), rounds=1, secure_aggregation=True)


def test_a_selectors_own_error_names_its_round():
    @dataclasses.dataclass(frozen=True)
    class Broken(Random):
        def select(self, state, federation):
            return [0] + 1

    with pytest.raises(FedcorError, match="round 1: the selector failed in select: TypeError"):
        run(Broken(2), MemoryGrid(numpy_app(), 4), rounds=1)


def test_without_ray_the_bridge_says_what_to_install(tmp_path, monkeypatch, capsys):
    from fedcor.cli import main

    monkeypatch.setattr("fedcor.flower.bridge.find_spec", lambda _name: None)
    assert main(["run", "digits", "--engine", "flower", "--out", str(tmp_path / "x")]) == 2
    assert "pip install 'fedcor[flower-sim]'" in capsys.readouterr().err
