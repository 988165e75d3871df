"""Nodes that fail, lie or say nonsense: each is counted and left out, and the run continues."""

from __future__ import annotations

import dataclasses
import io
import itertools
import logging
import time

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    SAYS_KEYS,
    ErrorCode,
    MemoryGrid,
    error,
    initial,
    is_training,
    lines,
    logged,
    numpy_app,
    quiet,
    record,
    run,
    server_score,
    train_messages,
    vector,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, QFedAvg

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.flower import answers_probes, select_with
from fedcor.flower.protocol import NOTE, version_of
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.base import StatelessSelector
from fedcor.selectors.baselines import Full, Random, RoundRobin
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice


def spoilt_training(change):
    def spoil(message, reply):
        return change(message, reply) if is_training(message) else reply

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
    "whole numbers": (
        "malformed",
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
    "a record too many": (
        "malformed",
        lambda m, r: Message(
            RecordDict({"evil": r.content["arrays"], **dict(r.content.items())}), reply_to=m
        ),
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
    "negative weight": (
        "unusable",
        lambda m, _r: with_content(m, metrics=MetricRecord({"loss": 1.0, "num-examples": -5})),
    ),
    "weight of all": (
        "unusable",
        lambda m, _r: with_content(m, metrics=MetricRecord({"loss": 1.0, "num-examples": 1e300})),
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


BAD_METRICS = {
    "a loss that is not a number": {"loss": float("nan")},
    "a large loss": {"loss": 4e6},
    "a time in nanoseconds": {"started": 1_700_000_000_000_000_000},
    "an infinite perplexity": {"perplexity": float("inf")},
    "a list with a hole": {"recalls": [0.5, float("nan")]},
}


@pytest.mark.parametrize("who", [[2], [0, 1, 2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("name", BAD_METRICS)
def test_a_bad_metric_that_nobody_reads_is_left_out_and_the_update_is_used(
    name, who, tmp_path, caplog
):
    bad = BAD_METRICS[name]

    def spoil(message, reply):
        metrics = MetricRecord({**reply.content["metrics"], **bad})
        return with_content(message, reply.content["arrays"], metrics)

    grid = MemoryGrid(numpy_app(), 5)
    # First with a number that is usual: who has none later does not lack it.
    grid.trouble = dict.fromkeys(range(5), spoilt_training(adding_one(bad)))
    run(Full(), grid, rounds=1, folder=tmp_path)
    grid.trouble |= dict.fromkeys(who, spoilt_training(spoil))
    with logged(caplog):
        _, result = run(Full(), grid, rounds=4, folder=tmp_path)
    for entry in lines(tmp_path):
        assert (entry["participated"], entry["faults"]) == ([0, 1, 2, 3, 4], {})
        assert entry["refused"] == 0
        assert "rolled_back" not in entry
    (metric,) = bad
    assert all(metric not in result.train_metrics_clientapp[round] for round in (2, 3, 4))
    said = f"the metric {metric} is not in all"
    assert caplog.text.count(said) == 1
    assert f"clients {who[0]} (partition-{who[0]})" in caplog.text
    _, plain = run(Full(), MemoryGrid(numpy_app(), 5), rounds=4)
    assert vector(result.arrays).tolist() == vector(plain.arrays).tolist()


def adding_one(metrics):
    """What adds the same metrics with usable numbers."""
    usable = {k: [1.0, 1.0] if isinstance(v, list) else type(v)(1) for k, v in metrics.items()}

    def add(message, reply):
        given = MetricRecord({**reply.content["metrics"], **usable})
        return with_content(message, reply.content["arrays"], given)

    return add


def test_clients_that_always_send_a_bad_metric_train_like_the_others(tmp_path):
    """Where few train in a round, all of them may be such clients: the model is not at fault."""

    def spoil(message, reply):
        metrics = MetricRecord({**reply.content["metrics"], "auc": float("nan"), "loss": 4e6})
        return with_content(message, reply.content["arrays"], metrics)

    grid = MemoryGrid(numpy_app(), 8)
    grid.trouble = dict.fromkeys(range(4), spoilt_training(spoil))
    run(RoundRobin(2), grid, rounds=12, folder=tmp_path)
    entries = lines(tmp_path)
    assert sorted(k for entry in entries for k in entry["participated"]) == sorted([*range(8)] * 3)
    assert all(entry["faults"] == {} and "rolled_back" not in entry for entry in entries)


def test_a_bad_metric_that_the_strategy_reads_is_refused_and_no_doubt_about_the_model(
    tmp_path, caplog
):
    def spoil(message, reply):
        metrics = MetricRecord({**reply.content["metrics"], "loss": float("nan")})
        return with_content(message, reply.content["arrays"], metrics)

    def strategy():
        return QFedAvg(client_learning_rate=0.1, train_loss_key="loss", fraction_evaluate=0.0)

    grid, clean = MemoryGrid(numpy_app(), 5), MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = spoilt_training(spoil)
    _, result = run(Full(), grid, rounds=1, strategy=strategy(), folder=tmp_path / "one")
    (entry,) = lines(tmp_path / "one")
    assert (entry["participated"], entry["faults"]) == ([0, 1, 3, 4], {"unusable": 1})
    clean.leave(2)
    _, without = run(Full(), clean, rounds=1, strategy=strategy())
    assert vector(result.arrays) == pytest.approx(vector(without.arrays))
    # From everyone, after a round that was fine: it is tried again, from the same model.
    run(Full(), MemoryGrid(numpy_app(), 5), rounds=1, strategy=strategy(), folder=tmp_path / "all")
    grid.trouble = dict.fromkeys(range(5), spoilt_training(spoil))
    with (
        logged(caplog, logging.ERROR),
        pytest.raises(FedcorError, match="no client delivered a usable update in 2 attempts"),
    ):
        run(Full(), grid, 3, strategy=strategy(), folder=tmp_path / "all", attempts=2)
    assert "NO CLIENT delivered" in caplog.text
    assert "WENT BAD" not in caplog.text


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


@pytest.mark.parametrize("who", [[0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("bad", [{"f1": float("nan")}, {"loss": 4e6}])
def test_a_bad_metric_of_evaluations_is_left_out_unless_most_have_what_the_record_takes(
    who, bad, tmp_path, caplog
):
    def spoil(message, reply):
        evaluates = message.metadata.message_type == "evaluate" and "metrics" in reply.content
        if evaluates:
            reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **bad})
        return reply

    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble = dict.fromkeys(who, spoil)
    selecting = select_with(FedAvg(), Random(2), checkpoint=tmp_path, wait_for=5)
    with logged(caplog):
        result = selecting.start(grid, initial(), num_rounds=2, timeout=0.1)
    (metric,) = bad
    refused = metric == "loss" and len(who) == 1  # the others' loss goes into the record
    faults = [entry["faults"] for entry in lines(tmp_path)]
    assert faults == [{"unusable": 1} if refused else {}] * 2
    for metrics in result.evaluate_metrics_clientapp.values():
        assert set(metrics) == {"accuracy", "loss"} - (set() if refused else {metric})
    assert caplog.text.count(f"the metric {metric} is not in all") == (not refused)


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
    run(Random(2), grid, rounds=8, folder=tmp_path, probe_timeout=0.05)
    node = grid.node_of(3)
    asked = [m for m in grid.sent if m.metadata.dst_node_id == node]
    assert len(asked) == 3  # in the rounds 1, 3 and 6: three deadlines, not eight


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
    assert selecting._state.roster.population().weights.max() < 0.3


@pytest.mark.skipif(not SAYS_KEYS, reason="this release of Flower cannot say nodes' keys")
def test_by_key_nobody_chooses_who_it_is(tmp_path):
    grid = MemoryGrid(
        numpy_app(mods=[answers_probes(name="the same for all", examples=lambda _c: 7)]), 3
    )
    selecting, _ = run(Random(2), grid, rounds=2, folder=tmp_path, identity="key")
    names = [line.split("\t")[1] for line in (tmp_path / "clients.tsv").read_text().splitlines()]
    assert len(set(names)) == 3
    assert all(name.startswith("key-") for name in names)
    assert selecting._state.roster.population().sizes.tolist() == [7, 7, 7]


def test_keys_are_refused_where_flower_cannot_say_them(monkeypatch):
    monkeypatch.setattr("fedcor.flower.settings.SAYS_KEYS", False)
    with pytest.raises(ConfigError, match="needs flwr 1.38"):
        select_with(FedAvg(), Random(2), identity="key")


def test_names_are_kept_to_one_printable_line(tmp_path):
    run(
        Random(1),
        MemoryGrid(numpy_app(mods=[answers_probes(name="a\tb\n\0" + "c" * 500)]), 1),
        rounds=1,
        folder=tmp_path,
    )
    (line,) = (tmp_path / "clients.tsv").read_text().splitlines()
    # What cannot be shown is shown escaped; the file escapes the backslashes once more.
    assert line == "0\t" + r"a\\tb\\n\\x00" + "c" * 190


def test_an_unknown_number_of_samples_does_not_change_who_a_client_is(tmp_path):
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


def test_a_node_that_lost_the_model_before_the_evaluation_is_sent_it(tmp_path):
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


def test_a_second_start_starts_over(tmp_path):
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


def test_a_node_that_died_in_a_round_is_waited_for_once(tmp_path):
    """It dies when it should train; then it is neither probed nor sent the choice."""
    grid, dead = MemoryGrid(numpy_app(), 6), []
    grid.trouble[2] = lambda m, r: None if dead or (is_training(m) and not dead.append(1)) else r

    @dataclasses.dataclass(frozen=True)
    class Trying(Full):
        def select(self, state, federation):
            federation.loss_changes(federation.available)
            return super().select(state, federation)

    run(Trying(), grid, rounds=1, folder=tmp_path, timeout=0.05, probe_timeout=0.05)
    sent = [m for m in grid.sent if m.metadata.dst_node_id == grid.node_of(2)]
    assert is_training(sent[-1])  # nothing was sent after it: one deadline
    assert sum(map(is_training, sent)) == 1
    assert lines(tmp_path)[0]["faults"] == {"late": 1}


def test_a_round_ends_within_its_deadline():
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[2] = lambda m, r: r if NOTE in m.content and not m.content.array_records else None
    started = time.perf_counter()
    run(FedCor(3, warmup=1, warmup_steps=5), grid, rounds=1, timeout=0.3, probe_timeout=0.2)
    assert time.perf_counter() - started < 30  # not the 60 s that a question may take by default


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
    assert (
        lines(tmp_path)[0]["refused"] == 1
    )  # without a loss before, it is not asked for one after
    assert lines(tmp_path)[0]["faults"] == {"unusable": 1}


def test_a_client_that_never_answers_probes_does_not_stop_fedcor(tmp_path):
    grid = MemoryGrid(numpy_app(), 8)
    grid.trouble[3] = lambda m, r: (
        error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "x") if m.content.array_records else r
    )
    run(FedCor(3, **QUICK), grid, rounds=8, folder=tmp_path)
    assert len(lines(tmp_path)) == 8
    assert all(entry["participated"] for entry in lines(tmp_path))


def test_a_round_without_anyone_is_logged_and_retried(tmp_path, caplog):
    grid, failures = MemoryGrid(numpy_app(), 5), []

    def fail_twice(message, reply):
        if len(failures) < 10:
            failures.append(message)
            return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom")
        return reply

    grid.trouble = dict.fromkeys(range(5), spoilt_training(fail_twice))
    with logged(caplog, logging.INFO):
        run(Full(), grid, rounds=2, folder=tmp_path)
    assert "NO CLIENT" in caplog.text
    assert "attempt 3 of 5" in caplog.text
    first, second = lines(tmp_path)
    assert first["participated"] == second["participated"] == [0, 1, 2, 3, 4]
    assert first["faults"] == {"error": 10}


def test_an_outage_of_everyone_passes(tmp_path):
    """All nodes are silent for a while, in the first round and in a later one."""
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


@dataclasses.dataclass(frozen=True)
class LowestFirst(StatelessSelector):
    """Chooses the same clients again and again, whoever delivers."""

    clients_per_round: int

    def select(self, state, federation):
        return federation.available[: self.clients_per_round], state


def raising(message, _reply):
    return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom")


def test_an_attempt_leaves_out_who_failed_in_the_one_before(tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble = dict.fromkeys(range(4), spoilt_training(raising))
    run(LowestFirst(2), grid, rounds=1, folder=tmp_path)
    (entry,) = lines(tmp_path)
    assert (entry["selected"], entry["participated"]) == ([4], [4])
    assert entry["faults"] == {"error": 4}  # 0 and 1, then 2 and 3


@pytest.mark.parametrize("selector", [Aligned(1), Complement(1)])
def test_broken_nodes_do_not_end_a_run_that_prefers_clients_that_never_trained(selector, tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble = dict.fromkeys(range(4, 7), spoilt_training(raising))

    def score(server_round, arrays):
        if server_round == 5:
            for _ in range(3):
                grid.join()
        return server_score(server_round, arrays)

    selecting = select_with(quiet(), selector, checkpoint=tmp_path, wait_for=4, probe_timeout=0.05)
    selecting.start(grid, initial(), num_rounds=20, timeout=0.05, evaluate_fn=score)
    assert any("faults" in entry and entry["faults"] for entry in lines(tmp_path)[5:])
    assert all(entry["participated"] for entry in lines(tmp_path))


def test_one_client_that_is_left_over_does_not_make_a_model_bad(tmp_path):
    """Two fail without a word on the model, the third finds it unusable: that is one doubter."""
    grid = MemoryGrid(numpy_app(), 3)

    def only(time, spoil):
        asked = itertools.count(1)
        return spoilt_training(lambda m, r: spoil(m, r) if next(asked) == time else r)

    grid.trouble = {0: only(2, raising), 1: only(2, raising), 2: only(1, FAULTS["nan"][1])}
    run(LowestFirst(2), grid, rounds=2, folder=tmp_path)
    _, second = lines(tmp_path)
    assert second["faults"] == {"error": 2, "unusable": 1}
    assert second["participated"] == [0, 1]  # everyone had failed once: all may come again
    assert "rolled_back" not in second


def test_a_federation_that_never_delivers_ends_with_an_error_and_keeps_what_was_done(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    run(Random(2), grid, rounds=2, folder=tmp_path)
    grid.trouble = dict.fromkeys(
        range(4), lambda m, _r: error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom")
    )
    with pytest.raises(FedcorError, match="no client delivered a usable update in 3 attempts"):
        run(Random(2), grid, rounds=4, folder=tmp_path, attempts=3)
    assert len(lines(tmp_path)) == 2
    grid.trouble = {}
    run(Random(2), grid, rounds=4, folder=tmp_path)
    assert len(lines(tmp_path)) == 4
