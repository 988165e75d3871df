"""Before the first round: what is checked, what is logged, and which traffic is expected."""

from __future__ import annotations

import dataclasses
import logging
import re

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    MemoryGrid,
    error,
    initial,
    is_introduction,
    lines,
    logged,
    numpy_app,
    our_lines,
    quiet,
    run,
)
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import FedAvg

from fedcor.core.errors import FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import Questions, planned_questions
from fedcor.flower import FedCorStrategy, answers_probes, select_with
from fedcor.flower.preflight import expected_models
from fedcor.flower.protocol import NOTE
from fedcor.runs.record import read_run
from fedcor.selectors.afl import AFL
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.baselines import Full, Random, RoundRobin
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor, Proxy
from fedcor.selectors.power_of_choice import PowerOfChoice
from fedcor.testing import FakeFederation, check_selector

LENGTH = 30_000  # parameters of the model whose bytes are counted


def heavy_app(mods=None) -> ClientApp:
    """Clients whose model is much larger than all names and notes."""
    app = ClientApp(mods=[answers_probes()] if mods is None else mods)

    def of(message, context, *, train):
        values = message.content["arrays"]["w"].numpy()
        metrics = MetricRecord({"loss": float((values - 1).mean() ** 2), "num-examples": 5})
        moved = values + np.float32(np.sqrt(2 + int(context.node_config["partition-id"])))
        content = {"metrics": metrics, **({"arrays": heavy(moved)} if train else {})}
        return Message(RecordDict(content), reply_to=message)

    app.train()(lambda message, context: of(message, context, train=True))
    app.evaluate()(lambda message, context: of(message, context, train=False))
    return app


def heavy(values=None) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(LENGTH, np.float32) if values is None else values)})


def said(caplog):
    """The lines of the preflight."""
    return [line for line in our_lines(caplog) if line.startswith("preflight: ")]


def probes(grid):
    """The evaluate messages that carry a model."""
    return [
        m for m in grid.sent if m.metadata.message_type == "evaluate" and m.content.array_records
    ]


# --- what selectors ask ---------------------------------------------------------------------------

ASKING = [
    Random(3), RoundRobin(3), Full(), AFL(3), Complement(3), Aligned(3), PowerOfChoice(3),
    PowerOfChoice(3, candidates=20), FedCor(3, **QUICK), FedCor(3, samples_per_refit=2, **QUICK),
    FedCor(3, warmup=0, interval=4, warmup_steps=5, refit_steps=5), Proxy(3, **QUICK),
    FedCor(3, **QUICK, probe_fraction=0.5), Proxy(3, **QUICK, probe_clients=2),
]  # fmt: skip


@pytest.mark.parametrize("selector", ASKING, ids=repr)
def test_a_selector_asks_what_it_says(selector):
    federation = FakeFederation.example(clients=12)
    state = selector.init(federation.population)
    for t in range(12):
        federation.asked.clear()
        federation.tried.clear()
        federation.probed.clear()
        chosen, state = selector.select(state, federation)
        plan = planned_questions(selector, t, 12)
        assert plan is not None
        assert sum(map(len, federation.asked)) == plan.losses
        assert len(federation.tried) == plan.candidates
        asked = 12 if plan.asked is None else plan.asked
        assert all(len(set(one)) == asked for one in federation.probed)
        if plan.adopted:
            assert [one.tolist() for one in federation.tried] == [chosen.tolist()]
        state = selector.observe(state, federation.train(chosen))


def test_the_suite_finds_a_selector_that_asks_more_than_it_says():
    @dataclasses.dataclass(frozen=True)
    class Curious(PowerOfChoice):
        def questions(self, round, clients):
            return Questions(losses=1)

    with pytest.raises(AssertionError, match="asked 6 clients for their losses, not 1"):
        check_selector(Curious(3))


def test_of_a_selector_that_does_not_say_nothing_is_known():
    @dataclasses.dataclass(frozen=True)
    class Own(Random):  # what Random says is not what this one does
        def select(self, state, federation):
            federation.losses(federation.available)
            return super().select(state, federation)

    assert planned_questions(Own(3), 0, 12) is None
    assert planned_questions(Random(3), 0, 12) == Questions()


# --- what it will cost ----------------------------------------------------------------------------


@pytest.mark.parametrize("evaluated", [0.0, 1.0])
@pytest.mark.parametrize(
    "selector",
    [Random(3), Aligned(3), Full(), PowerOfChoice(3), FedCor(3, **QUICK), Proxy(3, **QUICK)],
    ids=repr,
)
def test_the_record_has_about_the_bytes_that_were_expected(selector, evaluated, tmp_path):
    clients, rounds = 9, 8
    selecting = select_with(
        FedAvg(fraction_evaluate=evaluated), selector, checkpoint=tmp_path, wait_for=clients, seed=1
    )
    selecting.start(MemoryGrid(heavy_app(), clients), heavy(), num_rounds=rounds, timeout=0.1)
    plan = [planned_questions(selector, t, clients) for t in range(rounds)]
    chosen = clients if isinstance(selector, Full) else 3
    evaluating = round(evaluated * clients)
    down, up = expected_models(plan, clients=clients, chosen=chosen, evaluated=evaluating)
    model = heavy().count_bytes()
    # The few that are asked before need not be among those that the selector asks.
    assert sum(one["bytes_down"] for one in lines(tmp_path)) / model == pytest.approx(
        down, rel=0.05, abs=3.5
    )
    assert sum(one["bytes_up"] for one in lines(tmp_path)) / model == pytest.approx(
        up, rel=0.1, abs=1
    )


def test_the_costs_of_the_documented_example():
    """100 clients, 5 per round: the table in docs/how-to/flower.md, in models."""
    plan = [planned_questions(FedCor(5), t, 100) for t in range(30)]
    ends = [expected_models(plan[:t], clients=100, chosen=5)[0] for t in range(31)]
    costs = np.diff(ends)
    assert [costs[t] for t in (0, 1, 14, 15, 16, 20)] == [200, 100, 100, 0, 5, 200]


# --- what is asked --------------------------------------------------------------------------------


def test_three_clients_are_asked_before_all_others_and_nobody_twice(tmp_path):
    grid = MemoryGrid(numpy_app(), 12)
    run(FedCor(3, **QUICK), grid, rounds=1, folder=tmp_path)
    (entry,) = lines(tmp_path)
    assert entry["probed"] == 24  # the initial model and one candidate
    assert len(probes(grid)) == 24
    first = {m.metadata.dst_node_id for m in probes(grid)[:3]}
    assert len(first) == 3
    assert not first & {m.metadata.dst_node_id for m in probes(grid)[3:12]}


def test_who_is_asked_follows_from_the_seed():
    def first(seed, nodes=30):
        grid = MemoryGrid(numpy_app(), nodes, seed=4)
        run(FedCor(3, **QUICK), grid, rounds=1, seed=seed)
        return {m.metadata.dst_node_id for m in probes(grid)[:3]}

    assert first(1) == first(1)
    assert len({frozenset(first(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize("selector", [Random(3), AFL(3), Aligned(3), Full()], ids=repr)
def test_a_selector_that_needs_no_losses_asks_for_none(selector):
    grid = MemoryGrid(numpy_app(), 6)
    run(selector, grid, rounds=2)
    assert not [m for m in grid.sent if m.metadata.message_type == "evaluate"]


def test_it_can_be_switched_off(caplog, tmp_path):
    grid = MemoryGrid(numpy_app(), 6)
    with logged(caplog, logging.INFO):
        run(PowerOfChoice(2), grid, rounds=1, preflight=False, folder=tmp_path)
    assert not said(caplog)
    assert lines(tmp_path)[0]["probed"] == 4
    assert not FedCorStrategy(3, preflight=False).settings.preflight


def test_it_runs_once_per_start_and_asks_nothing_when_resumed(tmp_path, caplog):
    strategy = select_with(quiet(), FedCor(2, **QUICK), checkpoint=tmp_path, wait_for=6)
    grid = MemoryGrid(numpy_app(), 6)
    stopped = []

    def stop(record):
        if record.round == 1 and not stopped:
            stopped.append(1)
            raise KeyboardInterrupt

    strategy = select_with(
        quiet(), FedCor(2, **QUICK), checkpoint=tmp_path, wait_for=6, on_round=stop
    )
    with logged(caplog, logging.INFO), pytest.raises(KeyboardInterrupt):
        strategy.start(grid, initial(), num_rounds=6, timeout=0.1)
    assert len(said(caplog)) == 1
    caplog.clear()
    again = MemoryGrid(numpy_app(), 6)
    with logged(caplog, logging.INFO):
        strategy.start(again, initial(), num_rounds=6, timeout=0.1)
    (line,) = said(caplog)
    assert line.endswith(" in 4 rounds")  # those that are left
    asked = [sum(m.content["config"]["server-round"] == 3 for m in probes(again))]
    assert asked == [6]  # the selector's own question alone


# --- faults ---------------------------------------------------------------------------------------


def test_a_loss_under_another_name_is_an_error_at_once(tmp_path):
    grid = MemoryGrid(numpy_app(loss_name="cross_entropy"), 30)
    expected = (
        r"round 1: 23 of the 23 clients that were asked for a loss sent no usable one: no loss "
        r"among its metrics \(accuracy, cross_entropy, num-examples\).*another one with loss_key"
    )
    with pytest.raises(FedcorError, match=expected):
        run(FedCor(3, **QUICK), grid, rounds=3, folder=tmp_path)
    assert len(probes(grid)) == 3 + 20  # the few, and then some more to be sure
    run(FedCor(3, **QUICK), grid, rounds=3, folder=tmp_path, loss_key="cross_entropy")
    assert len(lines(tmp_path)) == 3


def test_an_app_without_an_evaluate_function_is_an_error_at_once():
    app = ClientApp(mods=[answers_probes()])
    app.train()(numpy_app(mods=[]))
    with pytest.raises(
        FedcorError,
        match=r"No evaluate function registered.*the evaluate function of the ClientApp must",
    ):
        run(PowerOfChoice(2), MemoryGrid(app, 5), rounds=1)


def test_a_mod_that_rejects_evaluations_is_an_error_at_once():
    """Flower's clipping mods reject every evaluate message, wherever ours stands."""
    for mods in ([answers_probes(), fixedclipping_mod], [fixedclipping_mod, answers_probes()]):
        with pytest.raises(FedcorError, match=r"fixedclipping_mod.*@app.train\(mods=\[...\]\)"):
            run(PowerOfChoice(2), MemoryGrid(numpy_app(mods=mods), 5), rounds=1)


def test_a_mod_at_the_train_function_alone_is_an_error_at_once():
    """A model that is left out would not be put back into an evaluate message."""
    whole = numpy_app(mods=[])
    app = ClientApp()
    app.train(mods=[answers_probes()])(whole)
    app.evaluate()(whole)
    with pytest.raises(FedcorError, match=r"ClientApp\(mods=\[answers_probes\(\), ...\]\)"):
        run(PowerOfChoice(2), MemoryGrid(app, 5), rounds=1)
    run(Random(2), MemoryGrid(app, 5), rounds=2)  # it sends no question


@pytest.mark.parametrize("wrong", ["nan", "error", "late"])
def test_some_that_fail_are_named_and_the_run_goes_on(wrong, tmp_path, caplog):
    def spoil(message, reply):
        if is_introduction(message) or message.metadata.message_type != "evaluate":
            return reply
        if wrong == "nan":
            metrics = MetricRecord({"loss": float("nan"), "num-examples": 1})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        return error(message, 2, "KeyError('x')") if wrong == "error" else None

    grid = MemoryGrid(numpy_app(), 3)
    grid.trouble[1] = spoil
    with logged(caplog):
        run(FedCor(2, **QUICK), grid, rounds=4, folder=tmp_path)
    assert "client 1 (partition-1): " in caplog.text
    assert len(lines(tmp_path)) == 4


def test_nodes_that_do_not_answer_are_no_reason_to_stop(tmp_path, caplog):
    """All of those asked are dead: the round finds out who is not."""
    grid = MemoryGrid(numpy_app(), 4)
    *few, alive = stream(0, "preflight").permutation(4).tolist()
    grid.trouble = dict.fromkeys(few, lambda m, r: r if is_introduction(m) else error(m, 5, "gone"))
    with logged(caplog):
        run(PowerOfChoice(2, candidates=4), grid, rounds=3, folder=tmp_path)
    assert all(f"client {k} (partition-{k}): unreachable: gone" in caplog.text for k in few)
    assert all(entry["participated"] == [alive] for entry in lines(tmp_path))


# --- what is said ---------------------------------------------------------------------------------


def test_one_line_says_who_selects_the_warm_up_and_the_traffic(caplog):
    with logged(caplog, logging.INFO):
        run(FedCor(3, **QUICK), MemoryGrid(numpy_app(), 12), rounds=15)
    (line,) = said(caplog)
    assert re.fullmatch(
        r"preflight: fedcor chooses 3 of 12 clients in each round, FedAvg aggregates; until round "
        r"3 of 15, a warm-up, the choice is random; expected traffic, if the model keeps its "
        r"size: \S+ \S+ down and \S+ \S+ up in 15 rounds",
        line,
    )
    ours = [record for record in caplog.records if record.name == "flwr.fedcor"]
    assert not [record for record in ours if record.levelno > logging.INFO]


def test_the_default_pair_is_named(caplog):
    with logged(caplog, logging.INFO):
        selecting = select_with(quiet(), clients_per_round=3, wait_for=6)
        selecting.start(MemoryGrid(numpy_app(), 6), initial(), num_rounds=2, timeout=0.1)
    assert "aligned chooses 3 of 6 clients in each round, FedRecall aggregates" in said(caplog)[0]


def test_a_warm_up_that_takes_the_whole_run_is_a_warning(caplog):
    with logged(caplog):
        run(FedCor(2, warmup_steps=1), MemoryGrid(numpy_app(), 5), rounds=12)
    (line,) = said(caplog)
    assert "all 12 rounds are a warm-up, in which the choice is random" in line


def test_of_an_unknown_selector_no_traffic_is_promised(caplog):
    @dataclasses.dataclass(frozen=True)
    class Own(Random):
        def select(self, state, federation):
            federation.losses(federation.available)
            return super().select(state, federation)

    with logged(caplog, logging.INFO):
        run(Own(2), MemoryGrid(numpy_app(), 4), rounds=1)
    assert len(said(caplog)) == 1
    assert "chooses 2 of 4" in said(caplog)[0]


def test_the_note_is_still_there_for_the_mod(tmp_path):
    """What the preflight sends is what a later question would have sent."""
    grid = MemoryGrid(numpy_app(), 5)
    run(PowerOfChoice(2), grid, rounds=1, folder=tmp_path)
    assert all(NOTE in message.content for message in probes(grid))


# --- a sample of the clients is asked -------------------------------------------------------------


@pytest.mark.parametrize("mod", [True, False], ids=["mod", "plain"])
def test_only_a_sample_of_the_clients_is_probed(mod, tmp_path):
    grid = MemoryGrid(heavy_app(None if mod else []), 12)
    selector = FedCor(3, **QUICK, probe_clients=5)
    selecting = select_with(
        FedAvg(fraction_evaluate=0.0), selector, checkpoint=tmp_path, wait_for=12, preflight=False
    )
    selecting.start(grid, heavy(), num_rounds=6, timeout=0.1)
    entries = lines(tmp_path)
    for t, entry in enumerate(entries):
        plan = planned_questions(selector, t, 12)
        if plan.candidates:
            assert plan.asked == 5
            assert 5 <= entry["probed"] <= 10  # w' of all five, w^t of those who had not told it
        else:
            assert entry["probed"] == 0
    model = heavy().count_bytes()
    # The first round: the model and a candidate to five, who train among them; then nothing more.
    if mod:
        assert entries[0]["bytes_down"] == pytest.approx(10 * model, rel=0.05)
        assert entries[0]["bytes_up"] == pytest.approx(3 * model, rel=0.05)
    header = read_run(tmp_path).header["config"]["selectors"]["fedcor"]
    assert header["probe_clients"] == 5
    assert header["probe_fraction"] == 1.0
