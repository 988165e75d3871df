"""The strategy against a grid in memory: its choices, its bytes, every fault, and going on after a crash."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    Krum,
)

import flower_grid
from fedcor.errors import ConfigError, FedcorError, RecordError
from fedcor.flower import FedCorStrategy, SelectingStrategy, answers_probes, select_with
from fedcor.flower.memory import pack, restore, snapshot, unpack, writable
from fedcor.flower.roster import Claim, Roster
from fedcor.flower.wire import NOTE, payload_bytes, version_of
from fedcor.record import read_run
from fedcor.report.summary import summarise
from fedcor.rng import stream
from fedcor.selectors import AFL, Complement, FedCor, Full, PowerOfChoice, Proxy, Random
from fedcor.types import Outcome
from flower_grid import MemoryGrid, error, initial, loss, numpy_app, record, server_score, vector

QUICK = {"warmup": 3, "interval": 3, "warmup_steps": 20, "refit_steps": 20}


def quiet(strategy=None):
    return FedAvg(fraction_evaluate=0.0) if strategy is None else strategy


def run(selector, grid, rounds=6, *, strategy=None, folder=None, timeout=0.05, **settings):
    """(the wrapped strategy, Flower's result) of a whole run."""
    settings = {"probe_timeout": 0.05, "wait_for": len(grid.contexts), **settings}
    selecting = select_with(quiet(strategy), selector, checkpoint=folder, **settings)
    arrays = settings.pop("arrays", None) or initial()
    return selecting, selecting.start(
        grid, arrays, num_rounds=rounds, timeout=timeout, evaluate_fn=server_score
    )


def lines(folder):
    return read_run(folder).rounds


def train_messages(grid):
    return [m for m in grid.sent if m.metadata.message_type == "train"]


# --- the same choices as a loop by hand -----------------------------------------------------------------------------------


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
    from fedcor.types import Population

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


# --- every strategy's own aggregation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg(fraction_evaluate=0.0),
        lambda: FedProx(fraction_evaluate=0.0, proximal_mu=0.5),
        lambda: FedAdam(fraction_evaluate=0.0, eta=0.05, beta_1=0.9, beta_2=0.99),
        lambda: FedAvgM(fraction_evaluate=0.0, server_momentum=0.5),
        lambda: FedTrimmedAvg(fraction_evaluate=0.0, beta=0.2),
        lambda: FedMedian(fraction_evaluate=0.0),
        lambda: Krum(fraction_evaluate=0.0, num_malicious_nodes=1),
        lambda: Bulyan(fraction_evaluate=0.0, num_malicious_nodes=1),
    ],
    ids=["FedAvg", "FedProx", "FedAdam", "FedAvgM", "FedTrimmedAvg", "FedMedian", "Krum", "Bulyan"],
)
def test_a_strategy_aggregates_as_it_does_alone(make):
    """With everyone chosen, nothing but the choice is ours: the model is the one that the bare strategy makes."""
    alone = make().start(MemoryGrid(numpy_app(), 7, shuffle=False), initial(), num_rounds=4)
    _, ours = run(Full(), MemoryGrid(numpy_app(), 7), rounds=4, strategy=make())
    assert vector(ours.arrays) == pytest.approx(vector(alone.arrays), abs=1e-6)
    # Trying candidates out leaves no trace in the strategy.
    asking = run(
        FedCor(7, warmup=4, warmup_steps=5), MemoryGrid(numpy_app(), 7), rounds=4, strategy=make()
    )[1]
    assert vector(asking.arrays) == pytest.approx(vector(alone.arrays), abs=1e-6)


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


# --- bytes ------------------------------------------------------------------------------------------------------------------


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


def test_a_node_that_lost_the_model_gets_it_again(tmp_path):
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


def test_losses_that_an_evaluation_brought_are_not_asked_for_again(tmp_path):
    grid = MemoryGrid(numpy_app(), 6)
    selecting = select_with(
        FedAvg(), FedCor(2, warmup=9, warmup_steps=5), checkpoint=tmp_path, wait_for=6
    )
    selecting.start(grid, initial(), num_rounds=3, timeout=0.1)
    assert [entry["probed"] for entry in lines(tmp_path)] == [12, 6, 6]
    assert (
        lines(tmp_path)[0]["test_accuracy"] > 0
    )  # the clients' own evaluation, where the server has none


# --- faults -----------------------------------------------------------------------------------------------------------------


def spoilt_training(change):
    def spoil(message, reply):
        return change(message, reply) if message.metadata.message_type == "train" else reply

    return spoil


def with_content(message, arrays=None, metrics=None):
    arrays = record(np.ones(3, np.float32)) if arrays is None else arrays
    metrics = MetricRecord({"loss": 1.0, "num-examples": 10}) if metrics is None else metrics
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def arrays_of(**named):
    return ArrayRecord({name: Array(values) for name, values in named.items()})


def archive():
    file = io.BytesIO()
    np.savez(file, np.ones(2))
    return file.getvalue()


GOOD = {"w": np.ones(2, np.float32), "b": np.ones(1, np.float32)}
FAULTS = {
    "dead": ("late", lambda _m, _r: None),
    "gone": ("unreachable", lambda m, _r: error(m, ErrorCode.NODE_UNAVAILABLE, "gone")),
    "raised": (
        "error",
        lambda m, _r: error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom " * 200),
    ),
    "nan": (
        "unusable",
        lambda m, _r: with_content(
            m, arrays_of(**{**GOOD, "w": np.array([1, np.nan], np.float32)})
        ),
    ),
    "infinite": (
        "unusable",
        lambda m, _r: with_content(m, arrays_of(**{**GOOD, "w": np.array([1, np.inf])})),
    ),
    "absurd": (
        "unusable",
        lambda m, _r: with_content(m, arrays_of(**{**GOOD, "w": np.array([1, 1e30])})),
    ),
    "wrong shape": (
        "malformed",
        lambda m, _r: with_content(m, arrays_of(**{**GOOD, "w": np.ones(5, np.float32)})),
    ),
    "wrong names": (
        "malformed",
        lambda m, _r: with_content(m, arrays_of(v=np.ones(3, np.float32))),
    ),
    "texts": (
        "malformed",
        lambda m, _r: with_content(m, arrays_of(**{**GOOD, "w": np.array(["a", "b"])})),
    ),
    "torn bytes": (
        "malformed",
        lambda m, _r: with_content(
            m,
            ArrayRecord(
                {
                    "w": Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY torn"),
                    "b": Array(GOOD["b"]),
                }
            ),
        ),
    ),
    "big numbers": (
        "unusable",
        lambda m, _r: with_content(m, arrays_of(**{**GOOD, "w": np.array([1, 2**62])})),
    ),
    "an archive": (
        "malformed",
        lambda m, _r: with_content(
            m,
            ArrayRecord(
                {"w": Array("float32", (2,), "numpy.ndarray", archive()), "b": Array(GOOD["b"])}
            ),
        ),
    ),
    "another record name": (
        "malformed",
        lambda m, r: Message(
            RecordDict({"evil": r.content["arrays"], "metrics": r.content["metrics"]}), reply_to=m
        ),
    ),
    "a list": (
        "malformed",
        lambda m, _r: with_content(
            m, metrics=MetricRecord({"loss": [1.0, 2.0], "num-examples": 3})
        ),
    ),
    "absurd loss": (
        "unusable",
        lambda m, _r: with_content(m, metrics=MetricRecord({"loss": 1e200, "num-examples": 3})),
    ),
    "says missing": (
        "malformed",
        lambda m, _r: Message(RecordDict({NOTE: ConfigRecord({"missing": True})}), reply_to=m),
    ),
    "no arrays": (
        "malformed",
        lambda m, _r: Message(RecordDict({"metrics": MetricRecord({"a": 1})}), reply_to=m),
    ),
    "no weight": ("malformed", lambda m, _r: with_content(m, metrics=MetricRecord({"loss": 1.0}))),
    "other metrics": (
        "malformed",
        lambda m, _r: with_content(m, metrics=MetricRecord({"num-examples": 3})),
    ),
    "negative weight": (
        "unusable",
        lambda m, _r: with_content(m, metrics=MetricRecord({"loss": 1.0, "num-examples": -5})),
    ),
    "weight of all": (
        "unusable",
        lambda m, _r: with_content(m, metrics=MetricRecord({"loss": 1.0, "num-examples": 1e300})),
    ),
    "nan metric": (
        "unusable",
        lambda m, _r: with_content(
            m, metrics=MetricRecord({"loss": float("nan"), "num-examples": 5})
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_reply_is_counted_and_left_out(name, tmp_path):
    kind, change = FAULTS[name]
    grid, clean = MemoryGrid(numpy_app(), 5), MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = spoilt_training(change)
    _, result = run(Full(), grid, rounds=1, folder=tmp_path / "bad")
    (entry,) = lines(tmp_path / "bad")
    assert entry["participated"] == [0, 1, 3, 4]
    assert entry["selected"] == [0, 1, 2, 3, 4]
    assert entry["faults"] == {kind: 1}
    clean.leave(2)
    _, without = run(Full(), clean, rounds=1)
    assert vector(result.arrays) == pytest.approx(vector(without.arrays))


@pytest.mark.parametrize(
    ("kind", "metrics"),
    [
        ("malformed", MetricRecord({"loss": 1.0, "num-examples": 3})),
        ("malformed", MetricRecord({"loss": 1.0, "accuracy": 0.5, "num-examples": [3]})),
        ("malformed", MetricRecord({"loss": 1.0, "accuracy": [0.5], "num-examples": 3})),
        ("unusable", MetricRecord({"loss": 1.0, "accuracy": 0.5, "num-examples": -46})),
        ("unusable", MetricRecord({"loss": 1.0, "accuracy": 1e300, "num-examples": 3})),
        ("unusable", MetricRecord({"loss": float("nan"), "accuracy": 0.5, "num-examples": 3})),
    ],
)
def test_a_bad_evaluation_is_counted_and_left_out(kind, metrics, tmp_path):
    def spoil(message, reply):
        evaluation = (
            message.metadata.message_type == "evaluate"
            and "server-round" in message.content.get("config", {})
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message) if evaluation else reply

    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[0] = spoil
    selecting = select_with(FedAvg(), Random(2), checkpoint=tmp_path, wait_for=5)
    selecting.start(grid, initial(), num_rounds=2, timeout=0.1)
    assert [entry["faults"] for entry in lines(tmp_path)] == [{kind: 1}] * 2
    assert 0 < lines(tmp_path)[-1]["test_accuracy"] < 1


def test_other_types_and_orders_of_an_honest_client_are_fitted_to_the_model():
    def other(message, reply):
        arrays = reply.content["arrays"]
        turned = ArrayRecord(
            {name: Array(arrays[name].numpy().astype(np.float64)) for name in ("b", "w")}
        )
        return Message(
            RecordDict({"arrays": turned, "metrics": reply.content["metrics"]}), reply_to=message
        )

    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble = dict.fromkeys((0, 2), spoilt_training(other))
    _, result = run(Full(), grid, rounds=2)
    _, plain = run(Full(), MemoryGrid(numpy_app(), 4), rounds=2)
    assert [array.dtype for array in result.arrays.values()] == ["float32", "float32"]
    assert vector(result.arrays) == pytest.approx(vector(plain.arrays), abs=1e-6)


def test_a_mask_of_infinities_is_no_fault():
    mask = np.array([0.0, -np.inf], np.float32)
    start = ArrayRecord({**initial(), "mask": Array(mask)})

    def with_mask(message, reply):
        arrays = ArrayRecord({**reply.content["arrays"], "mask": Array(mask)})
        return Message(
            RecordDict({"arrays": arrays, "metrics": reply.content["metrics"]}), reply_to=message
        )

    app = numpy_app()
    grid = MemoryGrid(lambda message, context: app(without_mask(message), context), 3)
    grid.trouble = dict.fromkeys(range(3), spoilt_training(with_mask))
    result = select_with(quiet(), Random(2), wait_for=3).start(
        grid, start, num_rounds=2, timeout=0.1
    )
    assert result.arrays["mask"].numpy().tolist() == [0.0, -np.inf]


def without_mask(message):
    if "arrays" in message.content:
        message.content["arrays"] = ArrayRecord(
            {k: v for k, v in message.content["arrays"].items() if k != "mask"}
        )
    return message


def test_a_strategy_that_makes_nonsense_of_good_replies_is_stopped():
    class Dividing(FedAvg):
        def aggregate_train(self, server_round, replies):
            _, metrics = super().aggregate_train(server_round, replies)
            return record(np.full(3, np.nan, np.float32)), metrics

    with pytest.raises(
        FedcorError, match="the model that Dividing made is unusable: w has numbers"
    ):
        run(
            Random(2),
            MemoryGrid(numpy_app(), 4),
            rounds=1,
            strategy=Dividing(fraction_evaluate=0.0),
        )


def test_a_strategy_that_leaves_the_model_as_it_is_may(tmp_path):
    class Skipping(FedAvg):
        def aggregate_train(self, server_round, replies):
            return (
                (None, None)
                if server_round == 2
                else super().aggregate_train(server_round, replies)
            )

    run(
        Random(2),
        MemoryGrid(numpy_app(), 4),
        rounds=3,
        strategy=Skipping(fraction_evaluate=0.0),
        folder=tmp_path,
    )
    losses = [entry["test_loss"] for entry in lines(tmp_path)]
    assert losses[0] == losses[1] != losses[2]


def test_a_strategy_is_configured_for_whom_it_aggregates():
    class Remembering(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            messages = list(super().configure_train(server_round, arrays, config, grid))
            self.configured = {message.metadata.dst_node_id for message in messages}
            self.times = {
                **getattr(self, "times", {}),
                server_round: getattr(self, "times", {}).get(server_round, 0) + 1,
            }
            return messages

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            assert {reply.metadata.src_node_id for reply in replies} == self.configured
            return super().aggregate_train(server_round, replies)

    strategy = Remembering(fraction_evaluate=0.0)
    run(
        FedCor(3, samples_per_refit=2, **QUICK),
        MemoryGrid(numpy_app(), 8),
        rounds=7,
        strategy=strategy,
    )
    assert strategy.times == dict.fromkeys(range(1, 8), 1)


def test_an_impostor_does_not_take_the_place_of_a_client_that_answers(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    impostors = []

    def score(server_round, arrays):
        if server_round == 1:
            impostors.append(grid.join(partition=1))
        if server_round == 3:
            del grid.contexts[impostors[0]]
        return server_score(server_round, arrays)

    honest = grid.node_of(1)
    selecting = select_with(quiet(), Full(), checkpoint=tmp_path, wait_for=4)
    selecting.start(grid, initial(), num_rounds=5, evaluate_fn=score, timeout=0.1)
    assert all(entry["participated"] == [0, 1, 2, 3] for entry in lines(tmp_path))
    assert {m.metadata.dst_node_id for m in train_messages(grid)} == set(grid.contexts)
    assert honest in grid.contexts


def test_a_node_that_does_not_say_who_it_is_does_not_hold_up_every_round(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[3] = lambda _m, _r: None
    started = time.perf_counter()
    run(Random(2), grid, rounds=8, folder=tmp_path, probe_timeout=0.2)
    assert (
        time.perf_counter() - started < 1.5
    )  # asked in the rounds 1, 3 and 6: three deadlines, not eight


@pytest.mark.parametrize(
    "claim", [{"examples": 2**62}, {"examples": -5}, {"examples": True}, {"name": ""}]
)
def test_a_strange_claim_does_not_own_the_weights(claim):
    def spoil(message, reply):
        note = reply.content.config_records.get(NOTE)
        return (
            reply
            if note is None
            else Message(RecordDict({NOTE: ConfigRecord({**note, **claim})}), reply_to=message)
        )

    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[0] = spoil
    selecting, _ = run(PowerOfChoice(2), grid, rounds=3)
    assert selecting._roster.population().weights.max() < 0.3


def test_by_key_nobody_chooses_who_it_is(tmp_path):
    grid = MemoryGrid(
        numpy_app(mods=[answers_probes(name="the same for all", examples=lambda _c: 7)]), 3
    )
    selecting, _ = run(Random(2), grid, rounds=2, folder=tmp_path, identity="key")
    names = [line.split("\t")[1] for line in (tmp_path / "clients.tsv").read_text().splitlines()]
    assert len(set(names)) == 3
    assert all(name.startswith("key-") for name in names)
    assert selecting._roster.population().sizes.tolist() == [7, 7, 7]


def test_names_are_kept_to_one_printable_line(tmp_path):
    run(
        Random(1),
        MemoryGrid(numpy_app(mods=[answers_probes(name="a\tb\n\0" + "c" * 500)]), 1),
        rounds=1,
        folder=tmp_path,
    )
    (line,) = (tmp_path / "clients.tsv").read_text().splitlines()
    assert line == "0\tab" + "c" * 198


def test_a_number_of_samples_that_cannot_be_told_does_not_change_who_a_client_is(tmp_path):
    def fails(context):
        raise OSError("no data yet")

    run(
        Random(2),
        MemoryGrid(numpy_app(mods=[answers_probes(examples=fails)]), 3),
        rounds=1,
        folder=tmp_path,
    )
    assert "partition-0" in (tmp_path / "clients.tsv").read_text()


def test_evaluation_does_not_send_a_model_twice_either():
    grid = MemoryGrid(numpy_app(), 5)
    select_with(FedAvg(), FedCor(2, warmup=9, warmup_steps=5), wait_for=5).start(
        grid, initial(), num_rounds=4, timeout=0.1
    )
    sent = [
        (m.metadata.dst_node_id, version_of(arrays))
        for m in grid.sent
        for arrays in m.content.array_records.values()
    ]
    assert len(sent) == len(set(sent))


def test_a_node_that_lost_the_model_before_the_evaluation_gets_it_again(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)

    class Forgetting(FedAvg):
        def configure_evaluate(self, server_round, arrays, config, grid_of_some):
            for context in grid.contexts.values():
                context.state.clear()
            return super().configure_evaluate(server_round, arrays, config, grid_of_some)

    selecting = select_with(
        Forgetting(), FedCor(2, warmup=9, warmup_steps=5), checkpoint=tmp_path, wait_for=4
    )
    result = selecting.start(grid, initial(), num_rounds=3, timeout=0.5)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert all(entry["faults"] == {} for entry in lines(tmp_path))
    whole = select_with(FedAvg(), FedCor(2, warmup=9, warmup_steps=5), wait_for=4).start(
        MemoryGrid(numpy_app(), 4), initial(), num_rounds=3, timeout=0.5
    )
    assert vector(result.arrays).tolist() == vector(whole.arrays).tolist()
    assert result.evaluate_metrics_clientapp == whole.evaluate_metrics_clientapp


def test_a_second_start_begins_anew(tmp_path):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Asking(Random):
        def select(self, state, federation):
            seen.append(federation.losses(federation.available).tolist())
            return super().select(state, federation)

    selecting = select_with(quiet(), Asking(2), wait_for=3)
    for _ in range(2):
        selecting.start(MemoryGrid(numpy_app(), 3), initial(), num_rounds=2, timeout=0.1)
    assert seen[:2] == seen[2:]


@pytest.mark.parametrize("name", ["dead", "gone"])
def test_a_node_that_cannot_be_reached_is_not_chosen_next(name, tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = lambda m, r: (
        r if NOTE in m.content and not m.content.array_records else FAULTS[name][1](m, r)
    )
    run(Full(), grid, rounds=12, folder=tmp_path)
    tried = [entry["round"] for entry in lines(tmp_path) if 2 in entry["selected"]]
    assert tried == [0, 2, 5, 10]  # left alone for 1, 2, 4 rounds


def test_a_node_that_died_in_a_round_is_not_waited_for_again_in_it(tmp_path):
    """It died after the last answers: seen when it should train, and then neither probed nor sent the choice."""
    grid, dead = MemoryGrid(numpy_app(), 6), []
    grid.trouble[2] = lambda m, r: (
        None if dead or (m.metadata.message_type == "train" and not dead.append(1)) else r
    )

    @dataclasses.dataclass(frozen=True)
    class Trying(Full):
        def select(self, state, federation):
            federation.loss_changes(federation.available)
            return super().select(state, federation)

    started = time.perf_counter()
    run(Trying(), grid, rounds=1, folder=tmp_path, timeout=0.3, probe_timeout=0.3)
    assert time.perf_counter() - started < 0.9  # one deadline
    assert lines(tmp_path)[0]["faults"] == {"late": 1}


def test_a_round_ends_within_its_deadline():
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = lambda m, r: r if NOTE in m.content and not m.content.array_records else None
    started = time.perf_counter()
    run(FedCor(3, warmup=1, warmup_steps=5), grid, rounds=1, timeout=0.3, probe_timeout=0.2)
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), 1e12, -1e12])
def test_a_bad_answer_to_a_probe_is_no_answer(answer, tmp_path):
    def spoil(message, reply):
        if message.metadata.message_type != "evaluate" or not reply.content.metric_records:
            return reply
        return Message(
            RecordDict({"metrics": MetricRecord({"loss": answer, "num-examples": 1})}),
            reply_to=message,
        )

    grid = MemoryGrid(numpy_app(), 6)
    grid.trouble[4] = spoil
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Asking(Random):
        def select(self, state, federation):
            asked.append(
                (federation.losses(federation.available), federation.loss_changes(np.array([0, 1])))
            )
            return super().select(state, federation)

    run(Asking(2), grid, rounds=2, folder=tmp_path)
    for losses, changes in asked:
        assert np.isnan(losses[4])
        assert np.isnan(changes[4])
        assert np.isfinite(np.delete(losses, 4)).all()
        assert np.isfinite(np.delete(changes, 4)).all()
    assert lines(tmp_path)[0]["refused"] == 1  # of a change without a before it is not asked again
    assert lines(tmp_path)[0]["faults"] == {"unusable": 1}


def test_a_client_that_never_answers_probes_does_not_stop_fedcor(tmp_path):
    grid = MemoryGrid(numpy_app(), 8)
    grid.trouble[3] = lambda m, r: (
        error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "x") if m.content.array_records else r
    )
    run(FedCor(3, **QUICK), grid, rounds=8, folder=tmp_path)
    assert len(lines(tmp_path)) == 8
    assert all(entry["participated"] for entry in lines(tmp_path))


def test_a_round_without_anyone_is_loud_and_tried_again(tmp_path, caplog):
    grid, failures = MemoryGrid(numpy_app(), 5), []

    def fail_twice(message, reply):
        if len(failures) < 10:
            failures.append(message)
            return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom")
        return reply

    grid.trouble = dict.fromkeys(range(5), spoilt_training(fail_twice))
    with caplog.at_level(logging.INFO, "flwr.fedcor"):
        _attached(caplog)
        run(Full(), grid, rounds=2, folder=tmp_path)
    assert "NOBODY" in caplog.text
    assert "attempt 3 of 5" in caplog.text
    first, second = lines(tmp_path)
    assert first["participated"] == second["participated"] == [0, 1, 2, 3, 4]
    assert first["faults"] == {"error": 10}


def test_an_outage_of_everyone_passes(tmp_path):
    """All nodes are silent for a while, in the first round (nobody says who it is) and in a later one."""
    grid, silent = MemoryGrid(numpy_app(), 4), {"until": time.monotonic() + 0.3}
    grid.trouble = dict.fromkeys(
        range(4), lambda _m, r: None if time.monotonic() < silent["until"] else r
    )

    def score(server_round, arrays):
        if server_round == 2:
            silent["until"] = time.monotonic() + 0.3
        return server_score(server_round, arrays)

    selecting = select_with(quiet(), Random(2), checkpoint=tmp_path, wait_for=4, probe_timeout=0.1)
    selecting.start(grid, initial(), num_rounds=4, timeout=0.1, evaluate_fn=score)
    assert all(len(entry["participated"]) == 2 for entry in lines(tmp_path))
    assert lines(tmp_path)[2]["faults"]["late"] >= 2


def test_a_federation_that_never_delivers_ends_with_an_error_and_keeps_what_was_done(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    run(Random(2), grid, rounds=2, folder=tmp_path)
    grid.trouble = dict.fromkeys(
        range(4), lambda m, _r: error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom")
    )
    with pytest.raises(FedcorError, match="3 attempts, and nobody delivered"):
        run(Random(2), grid, rounds=4, folder=tmp_path, attempts=3)
    assert len(lines(tmp_path)) == 2
    grid.trouble = {}
    run(Random(2), grid, rounds=4, folder=tmp_path)
    assert len(lines(tmp_path)) == 4


def _attached(caplog):
    logging.getLogger("flwr").addHandler(caplog.handler)


@pytest.fixture(autouse=True)
def detached(caplog):
    yield
    logging.getLogger("flwr").removeHandler(caplog.handler)


# --- who is who -----------------------------------------------------------------------------------------------------------------


def test_numbers_follow_the_partitions_whatever_the_nodes_are_called():
    for seed in range(3):
        selecting, _ = run(Random(3), grid := MemoryGrid(numpy_app(), 12, seed=seed), rounds=1)
        for partition in range(12):
            assert selecting._roster.client(grid.node_of(partition)) == partition


def test_a_node_that_comes_late_is_taken_in(tmp_path):
    for selector in (FedCor(3, **QUICK), AFL(3), PowerOfChoice(3), Random(3), Full()):
        grid, folder = MemoryGrid(numpy_app(), 6), tmp_path / type(selector).__name__

        def score(server_round, arrays, grid=grid):
            if server_round == 4:
                grid.join()
                grid.join()
            return server_score(server_round, arrays)

        selecting = select_with(quiet(), selector, checkpoint=folder, wait_for=6)
        selecting.start(grid, initial(), num_rounds=25, evaluate_fn=score, timeout=0.1)
        if isinstance(selector, Random | Full):
            assert {6, 7} <= {k for entry in lines(folder) for k in entry["selected"]}
        if isinstance(selector, FedCor):  # it may find them dispensable, but it has measured them
            assert np.isfinite(selecting._state["samples"][-1]).all()
        assert (folder / "clients.tsv").read_text().splitlines()[-1] == "7\tpartition-7"


def test_a_selector_that_cannot_grow_begins_afresh(tmp_path, caplog):
    @dataclasses.dataclass(frozen=True)
    class Counting:
        clients_per_round: int

        def init(self, population):
            return {"seen": np.zeros(population.count)}

        def select(self, state, federation):
            return np.argsort(state["seen"], kind="stable")[: self.clients_per_round], state

        def observe(self, state, outcome):
            seen = state["seen"].copy()
            seen[outcome.participated] += 1
            return {"seen": seen}

    grid = MemoryGrid(numpy_app(), 3)

    def score(server_round, arrays):
        if server_round == 2:
            grid.join()
        return server_score(server_round, arrays)

    with caplog.at_level(logging.WARNING, "flwr.fedcor"):
        _attached(caplog)
        select_with(quiet(), Counting(1), checkpoint=tmp_path).start(
            grid, initial(), num_rounds=6, evaluate_fn=score, timeout=0.1
        )
    assert "begins afresh" in caplog.text
    assert [entry["selected"] for entry in lines(tmp_path)] == [[0], [1], [0], [1], [2], [3]]


def test_a_node_that_left_is_not_waited_for(tmp_path):
    grid = MemoryGrid(numpy_app(), 6)

    def score(server_round, arrays):
        if server_round == 2:
            for partition in (0, 1, 2, 3, 4):
                grid.leave(partition)
        return server_score(server_round, arrays)

    strategy = FedAvg(min_available_nodes=6, min_train_nodes=6, min_evaluate_nodes=6)
    selecting = select_with(strategy, FedCor(3, **QUICK), checkpoint=tmp_path, probe_timeout=0.1)
    selecting.start(grid, initial(), num_rounds=5, evaluate_fn=score, timeout=0.1)
    assert [entry["selected"] for entry in lines(tmp_path)][2:] == [[5]] * 3


def test_a_client_keeps_its_number_when_its_node_restarts(tmp_path):
    grid = MemoryGrid(numpy_app(), 6)

    def score(server_round, arrays):
        if server_round == 2:
            grid.leave(3)
            grid.join(partition=3)
        return server_score(server_round, arrays)

    selecting = select_with(quiet(), Full(), checkpoint=tmp_path)
    selecting.start(grid, initial(), num_rounds=4, evaluate_fn=score, timeout=0.1)
    assert all(entry["participated"] == [0, 1, 2, 3, 4, 5] for entry in lines(tmp_path))


def test_clients_without_the_mod_are_asked_with_plain_messages(tmp_path):
    grid = MemoryGrid(numpy_app(mods=[], loss_name="eval_loss"), 8)
    run(FedCor(3, **QUICK), grid, rounds=6, folder=tmp_path)
    entries = lines(tmp_path)
    assert all(len(entry["participated"]) == 3 for entry in entries)
    assert entries[0]["probed"] == 16
    assert all(not entry["faults"] for entry in entries)
    assert all(NOTE not in m.content for m in grid.sent if m.content.array_records)
    assert "key-" in (tmp_path / "clients.tsv").read_text()


def test_a_name_of_its_own_comes_before_the_partition(tmp_path):
    run(
        Random(1),
        MemoryGrid(numpy_app(mods=[answers_probes(name="north")]), 1),
        rounds=1,
        folder=tmp_path,
    )
    assert (tmp_path / "clients.tsv").read_text() == "0\tnorth\n"


def test_the_roster():
    roster = Roster()
    roster.enrol(
        {
            70: Claim("partition-10"),
            5: Claim("partition-2", 30),
            9: Claim("east"),
            8: Claim("partition-1", 10),
        }
    )
    assert roster.names == ["partition-1", "partition-2", "partition-10", "east"]
    assert roster.population().sizes.tolist() == [10, 30, 20, 20]
    assert roster.strangers([5, 6]) == [6]
    roster.enrol({6: Claim("partition-2")})
    assert (
        roster.node(1) == 5
    )  # another says that it is the same client: the first is believed while it is there
    assert roster.reachable([6, 8, 70], 0).tolist() == [0, 1, 2]
    assert (roster.node(1), roster.client(5), roster.client(6)) == (6, -1, 1)  # it was a restart
    assert roster.reachable([5, 6, 8, 70], 0).tolist() == [0, 1, 2]
    assert roster.node(1) == 5
    roster.failed(1, 0)  # connected still, but dead: the other is tried
    assert roster.node(1) == 6
    roster.mute(99, 0)
    assert roster.strangers([98, 99], 1) == [98]
    assert roster.strangers([98, 99], 2) == [98, 99]
    assert roster.reachable([8, 70], 0).tolist() == [0, 2]
    roster.failed(0, 0)
    assert roster.reachable([8, 70], 1).tolist() == [2]
    assert roster.reachable([8], 1).tolist() == [0]  # nobody else is there: it is tried again
    assert roster.reachable([8, 70], 2).tolist() == [0, 2]
    again = Roster.from_arrays(roster.to_arrays())
    assert again.names == roster.names
    assert again.population().sizes.tolist() == [10, 30, 20, 20]
    assert again.strangers([6, 8]) == [6, 8]


# --- going on ------------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As kill -9: nothing of ours gets to clean up in between."""


STRATEGIES = {
    "FedAvg": lambda: FedAvg(fraction_evaluate=0.0),
    "FedAdam": lambda: FedAdam(fraction_evaluate=0.0, eta=0.05, beta_1=0.9, beta_2=0.99),
    "FedAvgM": lambda: FedAvgM(fraction_evaluate=0.0, server_momentum=0.5),
}


@pytest.mark.parametrize(
    "selector", [FedCor(3, **QUICK), AFL(3), PowerOfChoice(3)], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("where", ["train", "evaluate", "score"])
def test_a_run_that_was_killed_goes_on_as_if_it_was_not(selector, name, where, tmp_path):
    _, whole = run(
        selector,
        MemoryGrid(numpy_app(), 12),
        rounds=12,
        strategy=STRATEGIES[name](),
        folder=tmp_path / "a",
    )
    grid, state = MemoryGrid(numpy_app(), 12, seed=1), {"round": 0, "messages": 0}

    def score(server_round, arrays):
        state["round"] = server_round
        if server_round == 7 and where == "score":
            raise Killed
        return server_score(server_round, arrays)

    def kill(message, reply):
        if state["round"] == 6 and message.metadata.message_type == where and where != "score":
            raise Killed
        return reply

    grid.trouble = dict.fromkeys(range(12), kill)
    selecting = select_with(STRATEGIES[name](), selector, checkpoint=tmp_path / "b", wait_for=12)
    killed = False
    try:
        selecting.start(grid, initial(), num_rounds=12, timeout=0.1, evaluate_fn=score)
    except Killed:
        killed = True
    if where != "evaluate":  # not every selector asks in round 7
        assert killed
        assert len(lines(tmp_path / "b")) == 6
    grid = MemoryGrid(
        numpy_app(), 12, seed=2
    )  # the server has started again: other node ids, empty memories
    _, rest = run(selector, grid, rounds=12, strategy=STRATEGIES[name](), folder=tmp_path / "b")
    assert [e["selected"] for e in lines(tmp_path / "b")] == [
        e["selected"] for e in lines(tmp_path / "a")
    ]
    assert vector(rest.arrays).tolist() == vector(whole.arrays).tolist()
    if killed:
        assert min(rest.train_metrics_clientapp) == 7


def test_a_finished_run_is_left_as_it_is(tmp_path):
    run(Random(2), MemoryGrid(numpy_app(), 4), rounds=3, folder=tmp_path)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    _, result = run(Random(2), grid := MemoryGrid(numpy_app(), 4), rounds=3, folder=tmp_path)
    assert not grid.sent
    assert (tmp_path / "rounds.jsonl").read_bytes() == before
    assert len(vector(result.arrays)) == 3


def test_a_folder_of_another_run_is_refused(tmp_path):
    run(Random(2), MemoryGrid(numpy_app(), 4), rounds=2, folder=tmp_path)
    with pytest.raises(RecordError, match="another run"):
        run(AFL(2), MemoryGrid(numpy_app(), 4), rounds=4, folder=tmp_path)
    with pytest.raises(RecordError, match="other settings"):
        run(Random(3), MemoryGrid(numpy_app(), 4), rounds=4, folder=tmp_path)
    grid = MemoryGrid(numpy_app(), 4)
    with pytest.raises(RecordError, match="other arrays"):
        select_with(quiet(), Random(2), checkpoint=tmp_path, wait_for=4).start(
            grid, ArrayRecord({"v": Array(np.zeros(2))}), num_rounds=4
        )


def test_the_record_is_read_by_the_report(tmp_path):
    for selector in (Random(3), FedCor(3, **QUICK)):
        folder = tmp_path / type(selector).__name__
        run(selector, MemoryGrid(numpy_app(), 12), rounds=4, folder=folder)
    from fedcor.record import read_runs

    summary = summarise(read_runs(tmp_path))
    assert json.dumps(dataclasses.asdict(summary), default=str).count("fedcor")


def test_a_strategys_memory_survives_a_file_and_a_trial():
    strategy = FedAdam(eta=0.05)
    strategy.m_t = {"w": np.arange(3.0), "b": np.ones(1)}
    strategy.history = [1, 2.5, None, "x", (np.float64(3), np.arange(2))]
    strategy.current = record(np.arange(3, dtype=np.float32))
    strategy.counts, strategy.seen = {1: b"x", 2: np.float32(0.5)}, {3}
    strategy.myself = strategy
    memory = snapshot(strategy)
    kept = {key: value for key, value in memory.values.items() if writable(value)}
    assert memory.values.keys() - kept.keys() == {"seen"}
    again = unpack(pack(kept, "strategy"), "strategy")
    assert again["m_t"]["w"].tolist() == [0, 1, 2]
    assert again["history"][:4] == [1, 2.5, None, "x"]
    assert isinstance(again["history"][4], tuple)
    assert isinstance(again["history"][4][0], np.float64)
    assert again["counts"] == {1: b"x", 2: np.float32(0.5)}
    assert isinstance(again["counts"][2], np.float32)
    assert vector(again["current"]).tolist() == [0, 1, 2]
    strategy.seen.add(4)
    strategy.counts.clear()
    strategy.m_t["w"][0] = 9
    strategy.extra = 5
    restore(strategy, memory)
    assert strategy.m_t["w"].tolist() == [0, 1, 2]
    assert not hasattr(strategy, "extra")
    assert (strategy.seen, len(strategy.counts), strategy.myself) == ({3}, 2, strategy)
    damaged = pack(kept, "strategy")
    damaged.pop("strategy/0")
    with pytest.raises(RecordError, match="damaged"):
        unpack(damaged, "strategy")


# --- mistakes ---------------------------------------------------------------------------------------------------


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="must be given with a selector's name"):
        select_with(FedAvg(), "random")
    with pytest.raises(ConfigError, match="set by the selector"):
        select_with(FedAvg(), Random(3), clients_per_round=3)
    with pytest.raises(ConfigError, match="strategy"):
        select_with("fedavg", Random(3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be name or key"):
        select_with(FedAvg(), Random(3), identity="face")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="secure aggregation hides"):
        select_with(FedAvg(), Complement(3), secure_aggregation=True)
    with pytest.raises(ConfigError, match="a loop of its own"):
        select_with(type("Looping", (FedAvg,), {"start": lambda self: None})(), Random(3))
    with pytest.raises(ConfigError, match="switches training off"):
        select_with(FedAvg(fraction_train=0.0), Random(3))
    with pytest.raises(ConfigError, match="verbs"):
        SelectingStrategy(FedAvg(), object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="probe_timeout"):
        FedCorStrategy(3, probe_timeout=0)
    with pytest.raises(ConfigError, match="did you mean"):
        FedCorStrategy(3, warmpu=3)
    assert isinstance(
        select_with(FedAvg(), "power_of_choice", clients_per_round=3).selector, PowerOfChoice
    )
    assert FedCorStrategy(3, beta=0.5).selector.beta == 0.5


def test_secure_aggregation_hides_updates_from_any_selector():
    @dataclasses.dataclass(frozen=True)
    class Peeping(Random):
        def observe(self, state, outcome):
            return {"sum": outcome.updates.sum(axis=0)}

    with pytest.raises(FedcorError, match="hidden by secure aggregation"):
        run(Peeping(2), MemoryGrid(numpy_app(), 4), rounds=1, secure_aggregation=True)


def test_a_selectors_own_error_is_told_with_its_round():
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
