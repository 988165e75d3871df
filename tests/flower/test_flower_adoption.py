"""What an engineer meets who adopts it: wrong settings, late nodes, resumes, and the four ends."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from flower_grid import (
    ErrorCode,
    MemoryGrid,
    error,
    initial,
    is_training,
    lines,
    logged,
    numpy_app,
    our_lines,
    quiet,
    record,
    run,
    server_score,
    vector,
)
from flower_trees import no_trees, tree_score, trees_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedXgbBagging,
)

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.flower import answers_probes, select_with
from fedcor.selectors.afl import AFL
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.power_of_choice import PowerOfChoice


def in_training(change):
    return lambda m, r: change(m, r) if is_training(m) else r


def raises(message, _reply):
    return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "boom")


def sends(values):
    def change(message, reply):
        arrays = record(np.full(3, values, np.float32))
        return Message(RecordDict({**reply.content, "arrays": arrays}), reply_to=message)

    return in_training(change)


# --- how a round ends -----------------------------------------------------------------------------


def test_updates_are_adopted(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[0] = in_training(raises)
    run(Full(), grid, 1, folder=tmp_path)
    assert lines(tmp_path)[0]["participated"] == [1, 2, 3]


def test_without_an_update_other_clients_are_tried_at_once(tmp_path, caplog):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble = dict.fromkeys(range(2), in_training(raises))
    seeds = range(20)
    for seed in seeds:
        started = time.monotonic()
        with logged(caplog):
            run(Random(2), grid, 1, folder=tmp_path / str(seed), seed=seed, probe_timeout=30.0)
        assert time.monotonic() - started < 10
        if "trying again with other clients, attempt 2 of 5" in caplog.text:
            break
    else:
        pytest.fail("the two were never chosen together")
    assert lines(tmp_path / str(seed))[0]["participated"] == [2, 3]


def test_a_bad_model_is_tried_by_others_and_then_replaced(tmp_path, caplog):
    """All clients find the model of round 3 unusable; the next round trains from the good one."""
    grid = MemoryGrid(numpy_app(), 6)

    def broken(message, reply):
        bad = message.content["config"]["server-round"] == 3
        return sends(np.nan)(message, reply) if bad else reply

    grid.trouble = dict.fromkeys(range(6), in_training(broken))
    with logged(caplog):
        _, result = run(Random(2), grid, 5, folder=tmp_path)
    assert [line.get("rolled_back", 0) for line in lines(tmp_path)] == [0, 0, 1, 0, 0]
    assert [len(line["participated"]) for line in lines(tmp_path)] == [2, 2, 0, 2, 2]
    assert lines(tmp_path)[2]["faults"] == {"unusable": 6}  # three attempts: everyone
    assert lines(tmp_path)[2]["test_loss"] == lines(tmp_path)[0]["test_loss"]
    assert "the MODEL WENT BAD" in caplog.text
    assert sorted(result.train_metrics_clientapp) == [1, 2, 4, 5]


def test_without_a_good_model_the_run_ends_with_what_was_seen():
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble = dict.fromkeys(range(4), sends(np.nan))
    said = (
        r"no client delivered a usable update in 3 attempts \(\d+ unusable replies\); for example"
    )
    with pytest.raises(FedcorError, match=said):
        run(Random(2), grid, 2, attempts=3)


# --- going on without the slow --------------------------------------------------------------------


class SlowGrid(MemoryGrid):
    """The trainings of some partitions take `seconds`."""

    slow: tuple[int, ...] = ()
    seconds = 5.0

    def push_messages(self, messages):
        messages = list(messages)
        identifiers = super().push_messages(messages)
        self.ready = getattr(self, "ready", {})
        for message, identifier in zip(messages, identifiers, strict=True):
            partition = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
            if partition in self.slow and is_training(message):
                self.ready[identifier] = time.monotonic() + self.seconds
        return identifiers

    def pull_messages(self, message_ids):
        now, ready = time.monotonic(), getattr(self, "ready", {})
        return super().pull_messages([one for one in message_ids if ready.get(one, 0.0) <= now])


@pytest.mark.parametrize("selector", [Random(3), Aligned(3)], ids=["random", "aligned"])
def test_a_round_goes_on_when_enough_are_back(selector, tmp_path):
    grid = SlowGrid(numpy_app(), 6)
    grid.slow = (1, 4)
    started = time.monotonic()
    run(selector, grid, 4, folder=tmp_path, over_selection=5 / 3, timeout=60.0)
    assert time.monotonic() - started < 15
    for line in lines(tmp_path):
        assert len(line["selected"]) == 5
        assert len(line["participated"]) >= 3
        assert not {1, 4} & set(line["participated"])
        late = sorted(set(line["selected"]) & {1, 4})
        assert line["missing"] == {"late": late}
        assert line["faults"] == {}
        assert "quarantined" not in line


def test_over_selection_is_checked_and_without_slow_clients_everyone_counts(tmp_path):
    for wrong in (0.5, 1000.0, "2"):
        with pytest.raises(ConfigError, match="over_selection"):
            select_with(FedAvg(), Random(2), over_selection=wrong)
    with pytest.raises(ConfigError, match="which Full has not"):
        select_with(FedAvg(), Full(), over_selection=1.5)
    run(Random(2), MemoryGrid(numpy_app(), 6), 2, folder=tmp_path, over_selection=1.5)
    assert [len(line["participated"]) for line in lines(tmp_path)] == [3, 3]


# --- settings that would be wrong -----------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["eval_acc", "auc", "num-examples", "accuracy", "f1", "val-score", "Precision"]
)
def test_a_loss_key_that_says_that_more_is_better_is_refused(key):
    with pytest.raises(ConfigError, match="is no loss by its name"):
        select_with(FedAvg(), PowerOfChoice(2), loss_key=key)


@pytest.mark.parametrize("key", ["xent", "eval_loss", "nll", "mse", "num_loss", "perplexity"])
def test_other_loss_keys_are_taken(key):
    assert select_with(FedAvg(), PowerOfChoice(2), loss_key=key).settings.loss_key == key


def test_rounds_begin_with_1_and_full_takes_everyone(caplog):
    with pytest.raises(ConfigError, match="Flower counts rounds from 1"):
        select_with(FedAvg(), "random", clients_per_round={0: 2})
    with logged(caplog):
        select_with(FedAvg(), "full", clients_per_round=2)
    assert "full takes every client that it can reach: clients_per_round = 2 is not" in caplog.text
    assert isinstance(select_with(FedAvg(), "full").selector, Full)


def test_a_name_that_is_a_function_is_refused():
    with pytest.raises(ConfigError, match="must be a string"):
        answers_probes(name=lambda context: "a")


def test_a_rule_about_a_tag_that_nobody_has_ends_the_run():
    with pytest.raises(ConfigError, match=r"eligible.site = .*: no client has this tag"):
        run(Random(2), MemoryGrid(numpy_app(), 4), 1, eligible={"site": "a"})


def test_arrays_whose_numbers_would_change_are_refused(tmp_path):
    """Whole numbers for a model of floats; numbers that are not whole for one of whole numbers."""

    def whole(message, reply):
        arrays = {k: Array(v.numpy().astype(np.int64)) for k, v in reply.content["arrays"].items()}
        return Message(
            RecordDict({**reply.content, "arrays": ArrayRecord(arrays)}), reply_to=message
        )

    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[1] = in_training(whole)
    run(Full(), grid, 1, folder=tmp_path)
    assert lines(tmp_path)[0]["refused_updates"] == {"malformed": [1]}

    def counting(dtype):
        def change(message, reply):
            steps = Array(np.array([1.5 if dtype is np.float32 else 2], dtype))
            arrays = ArrayRecord({**reply.content["arrays"], "n": steps})
            return Message(RecordDict({**reply.content, "arrays": arrays}), reply_to=message)

        return in_training(change)

    app = numpy_app()

    def without_n(message, context):
        if "arrays" in message.content:
            arrays = message.content["arrays"]
            message.content["arrays"] = ArrayRecord({k: arrays[k] for k in ("w", "b")})
        return app(message, context)

    grid = MemoryGrid(without_n, 3)
    grid.trouble = dict.fromkeys(range(3), counting(np.int64)) | {2: counting(np.float32)}
    start = ArrayRecord({**initial(), "n": Array(np.array([0]))})
    strategy = select_with(quiet(), Full(), checkpoint=tmp_path / "n", wait_for=3)
    strategy.start(grid, start, num_rounds=4, timeout=0.1)
    assert lines(tmp_path / "n")[0]["refused_updates"] == {"malformed": [2]}
    # Flower's mean of a counter is of floats; clients go on to count in whole numbers.
    assert all({0, 1} <= set(line["participated"]) for line in lines(tmp_path / "n"))


# --- trees, privacy, and what is written ----------------------------------------------------------


def test_no_loss_of_an_empty_model_is_asked_for(tmp_path, caplog):
    """XGBoost's quickstart begins without a tree; its clients die of such a message."""
    grid = MemoryGrid(trees_app(), 6)
    selecting = select_with(
        FedXgbBagging(fraction_evaluate=0.0), PowerOfChoice(2), checkpoint=tmp_path, wait_for=6
    )
    with logged(caplog, logging.INFO):
        selecting.start(grid, no_trees(), num_rounds=3, timeout=0.1, evaluate_fn=tree_score)
    asked = [m for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert asked
    assert all(m.content["arrays"]["0"].shape != (0,) for m in asked if "arrays" in m.content)
    assert [line["probed"] for line in lines(tmp_path)] == [0, 4, 4]
    assert "expected traffic" not in caplog.text  # trees grow


def test_single_losses_can_be_kept_out_of_the_record(tmp_path):
    for name, keep in (("with", True), ("without", False)):
        run(AFL(3), MemoryGrid(numpy_app(), 6), 2, folder=tmp_path / name, record_losses=keep)
        run(
            PowerOfChoice(3), MemoryGrid(numpy_app(), 6), 2,
            folder=tmp_path / f"asked-{name}", record_losses=keep,
        )  # fmt: skip
    held = {"known", "losses", "told"}
    assert held & lines(tmp_path / "with")[0]["details"].keys() == {"told"}
    assert held & lines(tmp_path / "asked-with")[0]["details"].keys() == held
    for name in ("without", "asked-without"):
        for line in lines(tmp_path / name):
            assert not held & line.get("details", {}).keys()
            assert "loss" not in line.get("why", {})
    assert "loss" in lines(tmp_path / "asked-with")[0]["why"]


def test_what_differential_privacy_does_not_cover_is_said(caplog):
    def private(selector):
        caplog.clear()
        with logged(caplog):
            select_with(DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 3), selector)
        return caplog.text

    assert "Aligned reads single updates before they are clipped" in private(Aligned(3))
    assert "PowerOfChoice reads losses of single clients" in private(PowerOfChoice(3))
    assert private(Random(3)) == ""


# --- starting again -------------------------------------------------------------------------------


def test_a_resume_waits_as_a_first_start_does(tmp_path):
    run(Random(2), MemoryGrid(numpy_app(), 8), 2, folder=tmp_path)
    grid = MemoryGrid(numpy_app(), 3)
    started = time.monotonic()
    run(Random(2), grid, 4, folder=tmp_path, wait_for=3, probe_timeout=30.0)
    assert time.monotonic() - started < 15
    assert len(lines(tmp_path)) == 4


def test_what_a_second_start_ignores_or_changes_is_said(tmp_path, caplog):
    def start(rounds, **config):
        selecting = select_with(quiet(), Random(2), checkpoint=tmp_path, wait_for=4)
        return selecting.start(
            MemoryGrid(numpy_app(), 4), initial(), num_rounds=rounds, timeout=0.1,
            train_config=ConfigRecord(config), evaluate_fn=server_score,
        )  # fmt: skip

    first = start(2, lr=0.1, epochs=1)
    with logged(caplog):
        again = start(2, lr=0.1, epochs=1)
    said = our_lines(caplog)[-1]
    assert said.endswith("the given model is ignored: choose another folder to train from it")
    assert vector(again.arrays).tolist() == vector(first.arrays).tolist()
    caplog.clear()
    with logged(caplog):
        start(3, lr=0.2, epochs=1)
    (said,) = [line for line in our_lines(caplog) if "train_config" in line]
    assert said.startswith("train_config['lr'] is 0.2 and was 0.1 when the run started")
