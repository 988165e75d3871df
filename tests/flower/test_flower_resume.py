"""A run that was killed is resumed: the same choices and the same model, to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    MemoryGrid,
    initial,
    lines,
    logged,
    numpy_app,
    quiet,
    record,
    run,
    server_score,
    vector,
)
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

from fedcor.core.errors import RecordError
from fedcor.flower import select_with
from fedcor.flower.federation_state import Checkpoint
from fedcor.flower.strategy_memory import pack, restore, same, snapshot, unpack, writable
from fedcor.reporting.summary import summarise
from fedcor.runs.checkpoints import CHECKPOINT, PREVIOUS, load_checkpoint
from fedcor.runs.resume import write_client_names
from fedcor.selectors.afl import AFL
from fedcor.selectors.baselines import Random
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice


class Killed(BaseException):
    """As kill -9: nothing of ours gets to clean up in between."""


STRATEGIES = {
    "FedAvg": lambda: FedAvg(fraction_evaluate=0.0),
    "FedAdam": lambda: FedAdam(fraction_evaluate=0.0, eta=0.05, beta_1=0.9, beta_2=0.99),
    "FedAvgM": lambda: FedAvgM(fraction_evaluate=0.0, server_momentum=0.5),
}


@functools.cache
def uninterrupted(selector, name):
    """(who was selected in each round, the result) of a run that nothing happened to."""
    with tempfile.TemporaryDirectory() as folder:
        grid, strategy = MemoryGrid(numpy_app(), 12), STRATEGIES[name]()
        _, result = run(selector, grid, rounds=9, strategy=strategy, folder=Path(folder))
        selected = [entry["selected"] for entry in lines(Path(folder))]
    return selected, result


@pytest.mark.parametrize(
    "selector", [FedCor(3, **QUICK), AFL(3), PowerOfChoice(3)], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("where", ["train", "evaluate", "score"])
def test_a_run_that_was_killed_resumes_as_if_it_was_not(selector, name, where, tmp_path):
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
    selecting = select_with(STRATEGIES[name](), selector, checkpoint=tmp_path, wait_for=12)
    killed = False
    try:
        selecting.start(grid, initial(), num_rounds=9, timeout=0.1, evaluate_fn=score)
    except Killed:
        killed = True
    if where != "evaluate":  # not every selector asks in round 7
        assert killed
        assert len(lines(tmp_path)) == 6
    # The server starts a second time: other node ids, empty memories.
    grid = MemoryGrid(numpy_app(), 12, seed=2)
    _, rest = run(selector, grid, rounds=9, strategy=STRATEGIES[name](), folder=tmp_path)
    selected, whole = uninterrupted(selector, name)
    assert [entry["selected"] for entry in lines(tmp_path)] == selected
    assert vector(rest.arrays).tolist() == vector(whole.arrays).tolist()
    assert list(rest.train_metrics_clientapp) == list(range(1, 10))
    assert rest.train_metrics_clientapp == whole.train_metrics_clientapp
    assert rest.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp


def test_a_damaged_checkpoint_gives_the_same_run_from_the_one_before(tmp_path, caplog):
    selector = FedCor(3, **QUICK)
    for rounds in (6, 9):
        strategy = STRATEGIES["FedAdam"]()
        _, result = run(
            selector, MemoryGrid(numpy_app(), 12), rounds=rounds, strategy=strategy, folder=tmp_path
        )
        if rounds == 6:
            path = tmp_path / "checkpoint" / "state.npz"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(bytes(content))
    selected, whole = uninterrupted(selector, "FedAdam")
    assert [entry["selected"] for entry in lines(tmp_path)] == selected
    assert vector(result.arrays).tolist() == vector(whole.arrays).tolist()
    assert "previous.npz, after 5 rounds" in caplog.text


def test_rare_checkpoints_give_the_same_run(tmp_path):
    """A killed server repeats the rounds since the last one: here it is a copy of the folder."""
    selector = FedCor(3, **QUICK)

    def copy_after_six(record):
        if record.round == 5:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    settings = {"checkpoint_every": 4, "on_round": copy_after_six}
    for folder, strategy in (("run", STRATEGIES["FedAdam"]()), ("killed", STRATEGIES["FedAdam"]())):
        grid = MemoryGrid(numpy_app(), 12)
        run(selector, grid, 9, strategy=strategy, folder=tmp_path / folder, **settings)
        settings = {"checkpoint_every": 100}
        selected, whole = uninterrupted(selector, "FedAdam")
        assert [entry["selected"] for entry in lines(tmp_path / folder)] == selected
        saved = load_checkpoint(tmp_path / folder / CHECKPOINT)
        assert saved.round == 9  # the last round is always written
        model = Checkpoint.from_arrays(saved.arrays).state.current.model
        assert vector(model).tolist() == vector(whole.arrays).tolist()
    assert load_checkpoint(tmp_path / "run" / PREVIOUS).round == 8


def test_an_error_between_two_checkpoints_loses_no_finished_round(tmp_path):
    def fail(server_round, arrays):
        if server_round == 7:
            raise Killed
        return server_score(server_round, arrays)

    selecting = select_with(
        quiet(), Random(3), checkpoint=tmp_path, checkpoint_every=5, wait_for=12
    )
    with pytest.raises(Killed):
        selecting.start(
            MemoryGrid(numpy_app(), 12), initial(), num_rounds=9, timeout=0.1, evaluate_fn=fail
        )
    assert load_checkpoint(tmp_path / CHECKPOINT).round == 6


def test_an_error_while_a_round_is_written_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    def fail(folder, names):
        if len(lines(folder)) == 7:
            raise OSError(28, "No space left on device")
        write_client_names(folder, names)

    selector, grid = Random(3), MemoryGrid(numpy_app(), 12)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("fedcor.flower.run_record.write_client_names", fail)
        run(selector, grid, 9, folder=tmp_path, checkpoint_every=5)
    run(selector, grid, 9, folder=tmp_path, checkpoint_every=5)
    run(selector, grid, 9, folder=tmp_path / "whole")
    both = [[entry["selected"] for entry in lines(f)] for f in (tmp_path, tmp_path / "whole")]
    assert both[0] == both[1]


def test_the_same_object_starts_again_after_a_round_that_failed(tmp_path):
    """What the strategy remembered of that round is forgotten, with and without a checkpoint."""
    for folder in (tmp_path / "run", None):
        grid, strategy = MemoryGrid(numpy_app(), 12, seed=1), STRATEGIES["FedAvgM"]()
        selecting = select_with(strategy, Random(3), checkpoint=folder, wait_for=12)
        begun = vars(strategy).copy()

        def fail(server_round, arrays):
            if server_round == 1:
                raise Killed
            return server_score(server_round, arrays)

        with pytest.raises(Killed):
            selecting.start(grid, initial(), num_rounds=3, timeout=0.1, evaluate_fn=fail)
        assert vars(strategy).keys() == begun.keys()
        result = selecting.start(
            MemoryGrid(numpy_app(), 12, seed=1),
            initial(),
            num_rounds=3,
            timeout=0.1,
            evaluate_fn=server_score,
        )
        whole = run(
            Random(3),
            MemoryGrid(numpy_app(), 12, seed=1),
            rounds=3,
            strategy=STRATEGIES["FedAvgM"](),
            folder=tmp_path / f"whole-{folder is None}",
        )[1]
        assert vector(result.arrays).tolist() == vector(whole.arrays).tolist()


class Saving(FedAvg):
    """Writes to objects that the ServerApp holds, and reads an array that is a setting."""

    def __init__(self, history, scale):
        super().__init__(fraction_evaluate=0.0)
        self.history, self.scale, self.used = history, scale, []

    def aggregate_train(self, server_round, replies):
        self.history.append(server_round)
        self.used.append(float(self.scale[0]))
        return super().aggregate_train(server_round, replies)


def test_what_a_strategy_shares_with_its_app_stays_shared():
    history = []
    run(Random(2), MemoryGrid(numpy_app(), 4), 5, strategy=Saving(history, np.ones(2)))
    assert history == [1, 2, 3, 4, 5]


def test_an_array_that_is_a_setting_may_be_changed_between_two_starts(tmp_path):
    for rounds, scale in ((3, np.ones(2)), (5, np.full(2, 7.0))):
        strategy = Saving([], scale)
        run(Random(2), MemoryGrid(numpy_app(), 4), rounds, strategy=strategy, folder=tmp_path)
    assert strategy.used == [1.0] * 3 + [7.0] * 2


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([0.0]), np.array([-0.0]), False),
        (np.zeros(2, np.float32), np.zeros(2), False),
        (np.zeros((2, 1)), np.zeros(2), False),
        ([np.zeros(2), {"a": 1}], [np.zeros(2), {"a": 1}], True),
        ([np.zeros(2)], [np.ones(2)], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),  # an order may matter
        (1, True, False),
        (float("nan"), float("nan"), False),
        (object(), object(), False),
    ],
)
def test_what_counts_as_unchanged(one, other, equal):
    assert same(one, other) == equal
    assert same(one, one)


def test_a_finished_run_is_left_as_it_is(tmp_path, caplog):
    run(Random(2), MemoryGrid(numpy_app(), 4), rounds=3, folder=tmp_path)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with logged(caplog, logging.INFO):
        _, result = run(Random(2), grid := MemoryGrid(numpy_app(), 4), rounds=3, folder=tmp_path)
        run(Random(2), grid, rounds=0, folder=None)
    assert not grid.sent
    assert f"nothing to do: the run in {tmp_path} already has 3 rounds" in caplog.text
    assert "nothing to do: num_rounds is 0" in caplog.text
    assert (tmp_path / "rounds.jsonl").read_bytes() == before
    assert len(vector(result.arrays)) == 3


@dataclasses.dataclass(frozen=True)
class WithTable(Random):
    """A user's own, with a field that is not a parameter."""

    table: int = dataclasses.field(init=False, default=7)


def test_a_record_names_all_fields_of_a_selector(tmp_path):
    for rounds in (2, 3):
        run(WithTable(2), MemoryGrid(numpy_app(), 4), rounds=rounds, folder=tmp_path)
    header = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[0])
    (named,) = header["config"]["selectors"].values()
    assert named == {"clients_per_round": 2, "replacement": False, "table": 7}


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
    from fedcor.runs.record import read_runs

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
    read = unpack(pack(kept, "strategy"), "strategy")
    assert read["m_t"]["w"].tolist() == [0, 1, 2]
    assert read["history"][:4] == [1, 2.5, None, "x"]
    assert isinstance(read["history"][4], tuple)
    assert isinstance(read["history"][4][0], np.float64)
    assert read["counts"] == {1: b"x", 2: np.float32(0.5)}
    assert isinstance(read["counts"][2], np.float32)
    assert vector(read["current"]).tolist() == [0, 1, 2]
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
