"""Clients on Flower that send far too much: long updates, large sizes, models that kill the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    MemoryGrid,
    is_training,
    lines,
    logged,
    numpy_app,
    our_lines,
    record,
    run,
    vector,
)
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from hypothesis import given
from hypothesis import strategies as st

from fedcor import Defence
from fedcor.core.errors import ConfigError, FedcorError
from fedcor.flower import OptimiserStrategy, answers_probes, select_with
from fedcor.flower.client_registry import Claim, Roster
from fedcor.flower.exchange import cap_sizes
from fedcor.flower.replies import Terms, Unusable, read_model
from fedcor.rounds.model_arrays import layout_of
from fedcor.rounds.update_filter import ArrayChanges, UpdateFilter
from fedcor.runs.checkpoints import CHECKPOINT, load_checkpoint, save_checkpoint
from fedcor.runs.record import read_checkpoint
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice


def sending(arrays, times=10**9, metrics=None):
    """A client that sends these weights, so many times."""
    left = [times]

    def spoil(message, reply):
        if not is_training(message) or not left[0]:
            return reply
        left[0] -= 1
        content = dict(reply.content.items())
        if arrays is not None:
            content["arrays"] = arrays
        if metrics is not None:
            content["metrics"] = MetricRecord({**reply.content["metrics"], **metrics})
        return Message(RecordDict(content), reply_to=message)

    return spoil


def everything(value):
    return record(np.full(3, value, np.float32))


# --- long updates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [lambda: FedAvg(fraction_evaluate=0.0), lambda: FedAdam(fraction_evaluate=0.0),
     lambda: OptimiserStrategy("fedrecall", fraction_evaluate=0.0)],
    ids=["FedAvg", "FedAdam", "FedRecall"],
)  # fmt: skip
@pytest.mark.parametrize(
    "selector", [Full(), Aligned(8), FedCor(8, **QUICK)], ids=lambda one: type(one).__name__
)
def test_one_reply_of_absurd_weights_does_not_end_a_federation(selector, strategy, tmp_path):
    """Eight of eight train, and client 0 sends weights of 9.9e9 once."""
    grid = MemoryGrid(numpy_app(), 8)
    grid.trouble[0] = sending(everything(9.9e9), times=1)
    _, result = run(selector, grid, 4, strategy=strategy(), folder=tmp_path)
    rounds = lines(tmp_path)
    assert len(rounds) == 4
    assert rounds[0]["refused_updates"] == {"outlier": [0]}
    assert rounds[0]["participated"] == [1, 2, 3, 4, 5, 6, 7]
    assert rounds[1]["participated"] == list(range(8))
    assert np.abs(vector(result.arrays)).max() < 10


def next_to_nothing(message, reply):
    if not is_training(message):
        return reply
    arrays = record(vector(message.content["arrays"]) + np.float32(1e-6))
    return Message(RecordDict({**reply.content, "arrays": arrays}), reply_to=message)


@pytest.mark.parametrize("seed", [6, 7, 8])
def test_a_client_that_sends_next_to_nothing_does_not_end_a_federation(seed, tmp_path, caplog):
    """It trains in the first round; two train in each."""

    def start(rounds):
        grid = MemoryGrid(numpy_app(), 6)
        grid.trouble[0] = next_to_nothing
        return run(Random(2), grid, rounds, folder=tmp_path, seed=seed)[1]

    with logged(caplog):
        start(3)  # and after a restart
        result = start(12)
    rounds = lines(tmp_path)
    assert 0 in rounds[0]["selected"]
    assert [len(line["participated"]) for line in rounds[5:]] == [2] * 7
    assert not any(line.get("clipped") or line.get("quarantined") for line in rounds[7:])
    assert np.abs(vector(result.arrays)).max() > 0.1


@pytest.mark.parametrize("count", [1, 2])
def test_two_that_always_send_absurd_weights_do_not_become_usual(count, tmp_path):
    """From round 5 on. Sometimes they are the only ones chosen, in several attempts."""

    def absurd(message, reply):
        if not is_training(message) or message.content["config"]["server-round"] < 5:
            return reply
        return Message(RecordDict({**reply.content, "arrays": everything(9.9e9)}), reply_to=message)

    for seed in (3, 5):
        grid = MemoryGrid(numpy_app(), 8)
        grid.trouble[0] = grid.trouble[1] = absurd
        folder = tmp_path / str(seed)
        _, result = run(Random(count), grid, 20, folder=folder, seed=seed)
        assert np.abs(vector(result.arrays)).max() < 10
        late = lines(folder)[4:]
        assert sum(line["refused"] for line in late) > 5
        assert not any({0, 1} & set(line["participated"]) for line in late)


def test_of_two_nodes_the_one_that_sends_next_to_nothing_does_not_shut_the_other_out(tmp_path):
    """Nobody knows which of them is right: the longer update is scaled down, and used."""
    grid = MemoryGrid(numpy_app(), 2)
    grid.trouble[0] = next_to_nothing
    run(Full(), grid, 6, folder=tmp_path)
    assert [line["participated"] for line in lines(tmp_path)] == [[0, 1]] * 6
    assert [line["clipped"] for line in lines(tmp_path)] == [[1]] * 6
    assert [line["refused"] for line in lines(tmp_path)] == [0] * 6


def test_a_long_update_is_scaled_down_counted_and_logged(tmp_path, caplog):
    grid = MemoryGrid(numpy_app(), 6)
    grid.trouble[2] = sending(everything(100.0), times=1)
    with logged(caplog):
        run(Full(), grid, 3, folder=tmp_path)
    assert [line.get("clipped") for line in lines(tmp_path)] == [[2], None, None]
    (said,) = [line for line in our_lines(caplog) if "scaled down" in line]
    assert said.startswith("round 1: updates longer than 30 times the usual length were scaled")
    assert "client 2 (partition-2), " in said


def test_without_long_updates_nothing_is_said_or_changed(tmp_path):
    off = Defence(clip_norms=0.0, refuse_norms=0.0)
    _, ours = run(Aligned(4), MemoryGrid(numpy_app(), 8), 8, folder=tmp_path / "a")
    _, plain = run(Aligned(4), MemoryGrid(numpy_app(), 8), 8, defence=off)
    assert np.array_equal(vector(ours.arrays), vector(plain.arrays))
    for line in lines(tmp_path / "a"):
        assert not {"clipped", "capped", "refused_updates", "rolled_back"} & line.keys()


def test_the_setting_is_in_the_header_and_a_wrong_one_is_refused(tmp_path):
    strategy = select_with(FedAvg(), Random(3), defence={"clip_norms": 3}, checkpoint=tmp_path)
    assert strategy.settings.defence == Defence(clip_norms=3.0)
    assert strategy.header(5)["config"]["defence"] == {"clip_norms": 3.0}
    assert "defence" not in select_with(FedAvg(), Random(3)).header(5)["config"]
    with pytest.raises(ConfigError, match=r"defence\.clip_norm "):
        select_with(FedAvg(), Random(3), defence={"clip_norm": 3})


def judged(model, replies, plain=()):
    """(client -> its arrays as they are used, the filter) of these replies."""
    changes = ArrayChanges(model, layout_of(model, plain))
    judge = UpdateFilter(Defence().norm_limits, {})
    lengths = np.array([changes.lengths(arrays) for arrays in replies])
    factors = judge.judge(range(len(replies)), lengths)
    return {k: changes.scaled(replies[k], one.tolist()) for k, one in factors.items()}, judge


def test_counters_and_masks_are_no_part_of_a_length():
    model = {"w": np.zeros(4, np.float32), "mask": np.array([0.0, -np.inf], np.float32),
             "n": np.array(3), "running_var": np.ones(2, np.float32)}  # fmt: skip
    usual = {**model, "w": np.ones(4, np.float32), "n": np.array(20)}
    odd = {**usual, "n": np.array(10**9)}
    bad = {**usual, "running_var": np.full(2, 9e9, np.float32)}
    steady = {**usual, "running_var": np.full(2, 1.1, np.float32)}
    used, judge = judged(model, [steady, steady, odd, bad], plain=("running_var",))
    assert sorted(used) == [0, 1, 2]
    assert judge.refused == {"too long": [3]}


def test_a_clipped_float16_model_keeps_its_type_and_direction():
    model = {"w": np.zeros(3, np.float16)}
    replies = [{"w": np.ones(3, np.float16)}] * 3 + [{"w": np.full(3, 100.0, np.float16)}]
    used, _ = judged(model, replies)
    made = used[3]["w"]
    assert made.dtype == np.float16
    np.testing.assert_allclose(made, 30.0)
    assert used[0]["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_number_that_does_not_fit_float16_is_refused():
    metrics = MetricRecord({"num-examples": 3})
    content = RecordDict(
        {"a": ArrayRecord({"w": Array(np.full(2, 1e9, np.float32))}), "m": metrics}
    )
    with pytest.raises(Unusable, match="do not fit float16"):
        message = SimpleNamespace(content=content)
        read_model(message, {"w": np.zeros(2, np.float16)}, Terms("num-examples"))


# --- models that go bad ---------------------------------------------------------------------------


def poison(folder, value):
    """The checkpoint's model gets these numbers, as an earlier version accepted them."""
    saved = load_checkpoint(folder / CHECKPOINT)
    arrays = dict(saved.arrays)
    for name in [name for name in arrays if name.startswith("model/")]:
        arrays[name] = np.full_like(arrays[name], value)
    save_checkpoint(folder, arrays, json.dumps(saved.header), rounds=saved.rounds, keep=False)


@pytest.mark.parametrize(
    "selector", [Full(), Aligned(4), PowerOfChoice(4)], ids=lambda s: str(s)[:8]
)
@pytest.mark.parametrize("value", [9.9e9, np.nan, 1e5])
def test_a_poisoned_model_in_a_checkpoint_is_rolled_back_at_restart(
    selector, value, tmp_path, caplog
):
    run(selector, MemoryGrid(numpy_app(), 8), 4, folder=tmp_path)
    good = read_checkpoint(tmp_path)["good/0"]
    poison(tmp_path, value)
    with logged(caplog):
        _, result = run(selector, MemoryGrid(numpy_app(), 8), 8, folder=tmp_path, attempts=1)
    rounds = lines(tmp_path)
    assert [line.get("rolled_back", 0) for line in rounds] == [0] * 4 + [1] + [0] * 3
    assert any("the MODEL WENT BAD" in line for line in our_lines(caplog))
    assert np.isfinite(good).all()
    assert np.abs(vector(result.arrays)).max() < 10
    assert rounds[4]["participated"] == []  # the round ends with the good model
    assert all(len(line["participated"]) >= 4 for line in rounds[5:])
    assert all(not line.get("quarantined") for line in rounds)


def test_a_checkpoint_without_a_good_model_goes_back_to_the_initial_one(tmp_path):
    run(Full(), MemoryGrid(numpy_app(), 8), 3, folder=tmp_path)
    saved = load_checkpoint(tmp_path / CHECKPOINT)
    arrays = {name: a for name, a in saved.arrays.items() if not name.startswith("good")}
    header = json.dumps(saved.header)
    save_checkpoint(tmp_path, arrays, header, rounds=saved.rounds, keep=False)
    poison(tmp_path, np.nan)
    _, result = run(Full(), MemoryGrid(numpy_app(), 8), 5, folder=tmp_path, attempts=1)
    _, first = run(Full(), MemoryGrid(numpy_app(), 8), 1)
    assert np.array_equal(vector(result.arrays), vector(first.arrays))


def test_a_strategy_starts_over_where_the_model_is_rolled_back(tmp_path):
    def start(rounds):
        strategy = FedAdam(fraction_evaluate=0.0)
        run(Full(), MemoryGrid(numpy_app(), 8), rounds, strategy=strategy, folder=tmp_path)
        return strategy

    start(3)
    poison(tmp_path, np.nan)
    momenta = start(5).m_t  # one round ends with the good model, the next trains from it
    again = FedAdam(fraction_evaluate=0.0)
    good = read_checkpoint(tmp_path)  # the good one is what the last round started from
    arrays = record(np.concatenate([good["good/0"], good["good/1"]]))
    select_with(again, Full(), wait_for=8).start(MemoryGrid(numpy_app(), 8), arrays, num_rounds=1)
    for name, momentum in again.m_t.items():
        np.testing.assert_allclose(momenta[name], momentum, rtol=1e-5)


def test_one_byzantine_alone_does_not_roll_a_model_back(tmp_path):
    """In a round in which it is the only one that is asked, others are asked after it."""
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[1] = sending(everything(np.nan))
    run(Random(1), grid, 8, folder=tmp_path, wait_for=4)
    rounds = lines(tmp_path)
    assert sum(line["refused"] for line in rounds) > 0
    assert not any(line.get("rolled_back") for line in rounds)


def broken(message, reply):
    """A node whose every training gives no numbers."""
    return sending(everything(np.nan))(message, reply)


def far_away_then(spoil, count, clients, folder, caplog, rounds=12, **settings):
    """The default pair from a distance; the first `count` of the clients are broken."""
    grid = MemoryGrid(numpy_app(), clients)
    grid.trouble = dict.fromkeys(range(count), spoil)
    strategy = select_with(
        FedAvg(fraction_evaluate=0.0), wait_for=clients, checkpoint=folder, probe_timeout=0.01,
        **settings,
    )  # fmt: skip
    with logged(caplog):
        start = record(np.full(3, 20.0, np.float32))
        result = strategy.start(grid, start, num_rounds=rounds, timeout=0.05)
    return lines(folder), vector(result.arrays)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_broken_nodes_that_are_chosen_together_do_not_freeze_the_model(count, tmp_path, caplog):
    """Whoever never trained comes first, so they are chosen together; the others train on."""
    rounds, model = far_away_then(broken, count, 10, tmp_path, caplog, clients_per_round=2)
    assert not any(line.get("rolled_back") for line in rounds)
    assert all(set(line["participated"]) for line in rounds)
    assert not any(set(line["participated"]) & set(range(count)) for line in rounds)
    assert {k for line in rounds for k in line.get("quarantined", [])} == set(range(count))
    assert np.abs(model).max() < 5  # from 20, in twelve rounds
    faults = sum(line["faults"].get("unusable", 0) for line in rounds)
    assert faults <= 5 * count  # in rounds 1, 2, 4, 7 and 12


@pytest.mark.parametrize("count", [2, 4])
def test_nodes_that_break_together_undo_nothing_while_others_can_be_tried(count, tmp_path):
    """From round 6 on. The strategy keeps its memory."""

    def later(message, reply):
        config = message.content.config_records.get("config", {})
        return broken(message, reply) if config.get("server-round", 0) >= 6 else reply

    grid = MemoryGrid(numpy_app(), 6)
    grid.trouble = dict.fromkeys(range(count), later)
    strategy = OptimiserStrategy("fedavgm", fraction_evaluate=0.0)
    chosen = Listed([[0, 1], [2, 3], [4, 5]] if count == 4 else [[0, 1], [4, 5]])
    run(chosen, grid, 9, strategy=strategy, folder=tmp_path / "a")
    assert not any(line.get("rolled_back") for line in lines(tmp_path / "a"))
    # As if those who delivered had been chosen alone.
    alone = [line["participated"] for line in lines(tmp_path / "a")]
    plain = Listed(alone, by_round=True)
    strategy = OptimiserStrategy("fedavgm", fraction_evaluate=0.0)
    run(plain, MemoryGrid(numpy_app(), 6), 9, strategy=strategy, folder=tmp_path / "b")
    one, other = (read_checkpoint(tmp_path / name) for name in "ab")
    for name in one:
        if name.startswith(("model/", "strategy/")):
            np.testing.assert_array_equal(one[name], other[name])


@dataclass(frozen=True)
class Listed(Random):
    """The first of these groups that can be reached; with `by_round`, that of the round."""

    groups: tuple = ()
    by_round: bool = False

    def __init__(self, groups, by_round=False):
        super().__init__(2)
        object.__setattr__(self, "groups", tuple(tuple(group) for group in groups))
        object.__setattr__(self, "by_round", by_round)

    def select(self, state, federation):
        there = set(federation.available.tolist())
        groups = self.groups[federation.round :] if self.by_round else self.groups
        found = next((group for group in groups if set(group) <= there), sorted(there)[:2])
        return np.array(found), state


@pytest.mark.parametrize("selector", [Full(), Random(2), Random(1)], ids=["all", "two", "one"])
def test_a_poisoned_model_is_rolled_back_though_two_nodes_are_broken(selector, tmp_path):
    """It takes more attempts, where they are chosen together."""
    run(selector, MemoryGrid(numpy_app(), 8), 4, folder=tmp_path)
    poison(tmp_path, np.nan)
    grid = MemoryGrid(numpy_app(), 8)
    grid.trouble = dict.fromkeys((0, 1), broken)
    _, result = run(selector, grid, 12, folder=tmp_path)
    assert [line.get("rolled_back", 0) for line in lines(tmp_path)] == [0] * 4 + [1] + [0] * 7
    assert np.abs(vector(result.arrays)).max() < 10


def test_losses_that_no_client_can_tell_any_more_do_not_freeze_the_model(tmp_path):
    """From round 4 on, of every model; updates are as usable as before. One round is undone."""

    def spoil(message, reply):
        if "metrics" not in reply.content:  # who it is, or that it lost the model
            return reply
        metrics = dict(reply.content["metrics"].items())
        if is_training(message):
            del metrics["loss"]
        elif message.content["config"]["server-round"] >= 4:
            metrics["loss"] = float("nan")
        content = {**reply.content, "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    grid = MemoryGrid(numpy_app(), 6)
    grid.trouble = dict.fromkeys(range(6), spoil)
    run(PowerOfChoice(2), grid, 12, folder=tmp_path, preflight=False)
    rounds = lines(tmp_path)
    assert [line["round"] for line in rounds if line.get("rolled_back")] == [3]
    assert all(line["participated"] for line in rounds[4:])


# --- data that change -----------------------------------------------------------------------------


def changing_app(since):
    """All clients share an optimum, come very close to it, and then it moves."""
    app = ClientApp(mods=[answers_probes()])

    @app.train()
    def train(message, _context):
        w = vector(message.content["arrays"])
        goal = np.float32(message.content["config"]["server-round"] > since) * 5 + 1
        metrics = MetricRecord({"num-examples": 10})
        content = {"arrays": record(w + np.float32(0.7) * (goal - w)), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


@pytest.mark.parametrize("attempts", [2, 5])
@pytest.mark.parametrize(
    ("selector", "nodes"), [(Full(), 10), (Random(5), 10), (Random(3), 60)], ids=["all", "5", "3"]
)
def test_data_that_change_after_convergence_do_not_end_a_run(selector, nodes, attempts, tmp_path):
    """One round is undone at most; then the lengths that were usual are forgotten."""
    _, result = run(
        selector, MemoryGrid(changing_app(25), nodes), 40, folder=tmp_path, attempts=attempts
    )
    np.testing.assert_allclose(vector(result.arrays), 6.0, atol=1e-3)
    assert sum(line.get("rolled_back", 0) for line in lines(tmp_path)) <= 1
    assert not any(line.get("quarantined") for line in lines(tmp_path)[30:])


def test_two_byzantine_do_not_replace_the_past_while_others_cannot_be_reached(tmp_path):
    """They undo a round; then they are asked in vain, as they are not most of those asked."""
    grid = MemoryGrid(numpy_app(), 8)
    run(Full(), grid, 3, folder=tmp_path)
    before = np.sort(read_checkpoint(tmp_path)["norms/norms"], axis=0)
    grid.trouble = dict.fromkeys(range(2, 8), lambda m, r: None if is_training(m) else r)
    grid.trouble |= dict.fromkeys((0, 1), sending(everything(9.9e9)))
    with pytest.raises(FedcorError, match="no client delivered a usable update in 3 attempts"):
        run(Full(), grid, 5, folder=tmp_path, attempts=3)
    assert [line.get("rolled_back", 0) for line in lines(tmp_path)] == [0, 0, 0, 1]
    after = np.sort(read_checkpoint(tmp_path)["norms/norms"], axis=0)
    np.testing.assert_array_equal(after, before)


# --- sizes ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=20))
def test_honest_sizes_with_a_ratio_of_1000_are_believed(said):
    assert cap_sizes(np.array(said)).tolist() == said


@given(honest=st.lists(st.floats(1.0, 50.0), min_size=2, max_size=9), lie=st.floats(1.0, 1e9))
def test_a_lie_is_bounded_by_the_others(honest, lie):
    believed = cap_sizes(np.array([*honest, lie]))[-1]
    assert believed <= 1000 * max(honest)
    assert believed == lie or lie > 1000 * min(honest)


def test_a_size_that_is_not_believed_is_capped_where_the_strategy_reads_it(tmp_path, caplog):
    """It would be all of the mean; it is a thousand times the lower median of all clients."""
    weights = []

    class Spying(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            weights.append([one.content["metrics"]["num-examples"] for one in replies])
            return super().aggregate_train(server_round, replies)

    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[0] = sending(None, metrics={"num-examples": 10**8})
    with logged(caplog):
        run(Full(), grid, 3, strategy=Spying(fraction_evaluate=0.0), folder=tmp_path)
    assert weights == [[12_000, 11, 12, 13]] * 3
    assert [line["capped"] for line in lines(tmp_path)] == [[0], [0], [0]]
    (said,) = [line for line in our_lines(caplog) if "num-examples" in line]  # once
    assert "client 0 (partition-0) reports num-examples = 1e+08: 12000 is used" in said


def test_a_size_that_a_node_claims_at_once_does_not_fill_the_population():
    def claimed(context):
        number = int(context.node_config["partition-id"])
        return 10**8 if number == 0 else 10

    from fedcor.flower import answers_probes

    strategy, _ = run(Full(), MemoryGrid(numpy_app([answers_probes(examples=claimed)]), 4), 1)
    assert strategy._state.roster.population().sizes.tolist() == [10_000, 10, 10, 10]


@pytest.mark.parametrize("introduced", [False, True])
def test_sizes_follow_what_clients_train_with(introduced, tmp_path):
    """Client 0 has four times the data from the third round on, client 1 a tenth.

    A size that a client introduced itself with stays.
    """
    rounds = []

    def changed(message, reply):
        if is_training(message) and len(rounds) >= 2:
            metrics = reply.content["metrics"]
            number = int(reply.metadata.src_node_id == grid.node_of(0))
            metrics["num-examples"] = (1, 40)[number]
        return reply

    mods = None if introduced else []
    grid = MemoryGrid(numpy_app(mods), 4)
    grid.trouble = {0: changed, 1: changed}
    strategy, _ = run(Full(), grid, 6, folder=tmp_path, on_round=rounds.append)
    roster = strategy._state.roster
    sizes = roster.population().sizes.tolist()
    if introduced:
        assert sizes == [10, 11, 12, 13]
        return
    assert sorted(sizes) == [1, 12, 13, 40]  # without the mod, nodes have no order
    restored, largest = Roster.from_arrays(roster.to_arrays()), sizes.index(40)
    restored.learn_size(largest, 80.0)
    assert restored.population().sizes[largest] == 80


def test_a_size_that_was_introduced_stays():
    """All clients count alike in the mean: what they say there is no number of samples."""
    roster = Roster()
    roster.enrol({1: Claim("a", 500), 2: Claim("b")})
    for said in (1.0, 2.0, 0.0, float("nan"), 1e30):
        roster.learn_size(0, said)
        roster.learn_size(1, said)
    assert roster.population().sizes.tolist() == [500, 2]


def test_evaluations_are_capped_by_those_of_the_round(tmp_path):
    def spoil(message, reply):
        if message.metadata.message_type != "evaluate":
            return reply
        metrics = {**reply.content["metrics"], "num-examples": 10**9}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[0] = spoil
    run(Random(2), grid, 1, strategy=FedAvg(), folder=tmp_path)
    assert lines(tmp_path)[0]["capped"] == [0]


# --- ties and newcomers ---------------------------------------------------------------------------


@pytest.mark.parametrize("byzantine", [0, 1])
def test_of_two_nodes_one_with_other_names_makes_nobody_malformed(byzantine, tmp_path):
    def spoil(message, reply):
        if not is_training(message):
            return reply
        metrics = MetricRecord({**reply.content["metrics"], "a": 1.0})
        content = {"a": reply.content["arrays"], "aaa": metrics}
        return Message(RecordDict(content), reply_to=message)

    grid = MemoryGrid(numpy_app(), 2)
    grid.trouble[byzantine] = spoil
    run(Full(), grid, 4, folder=tmp_path)
    assert [line["participated"] for line in lines(tmp_path)] == [[0, 1]] * 4
    assert [line["refused"] for line in lines(tmp_path)] == [0] * 4


@pytest.mark.parametrize("selector", [Complement(4), Aligned(4)], ids=lambda s: str(s)[:7])
def test_ever_new_nodes_do_not_take_every_pick(selector, tmp_path):
    grid = MemoryGrid(numpy_app(), 8)

    def invite(_record):
        for _ in range(3):
            grid.join()

    run(selector, grid, 9, folder=tmp_path, on_round=invite)
    trained: set[int] = set()
    for number, line in enumerate(lines(tmp_path)):
        new = [k for k in line["selected"] if k not in trained]
        assert len(new) == (4 if number < 2 else 1)
        trained |= set(line["selected"])
