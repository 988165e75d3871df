"""On Flower, a run that cannot see a loss says so, and an error names who failed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    ErrorCode,
    MemoryGrid,
    error,
    initial,
    is_training,
    lines,
    numpy_app,
    record,
    run,
    vector,
)
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg, QFedAvg

from fedcor.core.errors import FedcorError
from fedcor.core.types import selector_traits
from fedcor.flower import OptimiserStrategy, answers_probes, select_with
from fedcor.reporting.explanations import explanation as explain
from fedcor.runs.record import read_checkpoint, read_run
from fedcor.selectors import build_selector
from fedcor.selectors.afl import AFL
from fedcor.selectors.baselines import Random, RoundRobin
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.oort import Oort
from fedcor.selectors.power_of_choice import PowerOfChoice

ASKING = [FedCor(5, **QUICK), PowerOfChoice(5)]


def evaluating(change):
    """What changes the replies to evaluate messages that carry a model, or refer to one."""

    def spoil(message, reply):
        evaluates = message.metadata.message_type == "evaluate" and "config" in message.content
        return change(message, reply) if evaluates else reply

    return spoil


def everywhere(change, clients=range(10)):
    grid = MemoryGrid(numpy_app(), 10)
    grid.trouble = dict.fromkeys(clients, evaluating(change))
    return grid


def with_metrics(metrics):
    return lambda m, _r: Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=m)


def raising(reason):
    return lambda m, _r: error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)


def unreachable(message, _reply):
    return error(message, ErrorCode.NODE_UNAVAILABLE, "gone")


@pytest.mark.parametrize("selector", ASKING, ids=repr)
def test_a_loss_under_another_name_ends_the_run_with_its_name(selector, tmp_path):
    grid = MemoryGrid(numpy_app(loss_name="xent"), 10)
    said = (
        r"round 1: 10 of the 10 clients that were asked for a loss sent no usable one: no loss "
        r"among its metrics \(accuracy, num-examples, xent\)\. .* needs losses: the evaluate "
        r"function of the ClientApp must return the loss as a metric \(loss, eval_loss, .*; name "
        r"another one with loss_key\)"
    )
    with pytest.raises(FedcorError, match=said):
        run(selector, grid, folder=tmp_path)
    run(selector, grid, folder=tmp_path, loss_key="xent")
    assert len(lines(tmp_path)) == 6


def test_a_misspelt_loss_key_is_named_with_the_metrics_that_came():
    said = r"\(accuracy, num-examples, xent\).*\(loss_key = 'xnet'\)"
    with pytest.raises(FedcorError, match=said):
        run(FedCor(5, **QUICK), MemoryGrid(numpy_app(loss_name="xent"), 10), loss_key="xnet")


def test_replies_with_two_metric_records_are_told_so():
    def two(message, _reply):
        records = {"a": MetricRecord({"loss": 1.0}), "b": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(records), reply_to=message)

    with pytest.raises(FedcorError, match="2 MetricRecords, not 1"):
        run(FedCor(5, **QUICK), everywhere(two))


@pytest.mark.parametrize("selector", ASKING, ids=repr)
def test_an_app_without_an_evaluate_function_ends_the_run(selector):
    app, train = ClientApp(mods=[answers_probes()]), numpy_app(mods=[])

    @app.train()
    def trains(message: Message, context: Context) -> Message:
        return train(message, context)

    said = (
        r"round 1: 10 of the 10 clients that were asked for a loss sent no usable one: "
        r".*No evaluate function registered.*the evaluate function of the ClientApp must return.*"
        r"random, round_robin, full, complement and aligned need none; "
        r"afl and oort read the losses in train replies"
    )
    with pytest.raises(FedcorError, match=said):
        run(selector, MemoryGrid(app, 10))
    fine = ("random", "round_robin", "full", "complement", "aligned", "afl", "oort")
    for name in fine:  # as the error says
        run(build_selector(name, 5), MemoryGrid(app, 10), rounds=2)


def test_the_most_common_reason_is_named_with_its_share():
    grid = everywhere(raising("no disk"))
    for client in (2, 5, 7):
        grid.trouble[client] = evaluating(raising("no\ndata"))
    grid.trouble[9] = evaluating(unreachable)
    said = r"9 of the 10 clients that were asked for a loss .*\(6 times\): no disk"
    with pytest.raises(FedcorError, match=said):
        run(FedCor(5, **QUICK), grid)


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), -1e12, [1.0, 2.0]])
def test_a_loss_that_is_no_usable_number_anywhere_is_said(answer):
    metrics = with_metrics({"loss": answer, "accuracy": 0.5, "num-examples": 3})
    said = "round 1: 10 of the 10 clients that were asked for a loss sent no usable one"
    with pytest.raises(FedcorError, match=f"{said}: its loss is .*loss_key"):
        run(FedCor(5, **QUICK), everywhere(metrics))


@pytest.mark.parametrize("change", [lambda _m, _r: None, unreachable])
def test_where_nobody_can_be_reached_it_is_an_outage(change):
    with pytest.raises(FedcorError, match="no client delivered a usable update in 2 attempts"):
        run(FedCor(5, **QUICK), everywhere(change), attempts=2)


def test_where_no_loss_change_is_known_the_choice_is_uniform_and_says_so(tmp_path, caplog):
    """Everyone evaluates the initial model, and nobody any other."""
    grid = MemoryGrid(numpy_app(), 20)
    grid.trouble = dict.fromkeys(
        range(20),
        evaluating(
            lambda m, r: raising("no disk")(m, r) if any(vector(m.content["arrays"])) else r
        ),
    )
    with caplog.at_level("WARNING", "fedcor"):
        run(FedCor(3, warmup=1, interval=4, dimension=4), grid, rounds=8, folder=tmp_path)
    assert caplog.text.count("the Gaussian process was never fitted") == 1
    entries = lines(tmp_path)
    assert all(entry["why"] == {} for entry in entries)
    assert len({tuple(entry["selected"]) for entry in entries}) == 8
    assert explain(read_run(tmp_path))["note"].startswith(
        "chosen uniformly: the Gaussian process was never fitted"
    )


def test_two_who_answer_without_a_loss_while_all_others_are_late_do_not_end_the_run(tmp_path):
    grid = everywhere(lambda _m, _r: None)
    for client in (0, 1):
        grid.trouble[client] = evaluating(raising("no disk"))
    run(FedCor(5, **QUICK), grid, rounds=1, folder=tmp_path, preflight=False)
    assert lines(tmp_path)[0]["faults"]["error"] == 2


def test_once_a_loss_was_seen_later_failures_are_faults_of_clients(tmp_path):
    """Also after a resume, at which nothing is known of the new model."""
    failing = []
    grid = everywhere(lambda m, r: raising("no disk")(m, r) if failing else r)
    run(PowerOfChoice(5), grid, rounds=1, folder=tmp_path)
    assert np.isnan(read_checkpoint(tmp_path)["known"]).all()
    failing.append(True)
    run(PowerOfChoice(5), grid, rounds=4, folder=tmp_path)
    assert [entry["faults"] for entry in lines(tmp_path)] == [{}, *[{"error": 10}] * 3]


def test_a_federated_evaluation_is_a_loss_that_was_seen(tmp_path):
    """The selector's first question comes in round 3; evaluations have brought losses by then."""

    @dataclasses.dataclass(frozen=True)
    class Late(Random):
        def select(self, state, federation):
            if federation.round == 2:
                federation.losses(federation.available)
            return super().select(state, federation)

    def at(server_round):
        return lambda m, r: (
            raising("no disk")(m, r) if m.content["config"]["server-round"] >= server_round else r
        )

    selecting = select_with(FedAvg(), Late(5), checkpoint=tmp_path / "a", wait_for=10)
    selecting.start(everywhere(at(2)), initial(), num_rounds=4, timeout=0.1)
    assert lines(tmp_path / "a")[2]["faults"] == {"error": 20}
    selecting = select_with(FedAvg(), Late(5), checkpoint=tmp_path / "b", wait_for=10)
    with pytest.raises(FedcorError, match="round 3: 10 of the 10 clients"):
        selecting.start(everywhere(at(1)), initial(), num_rounds=4, timeout=0.1)
    assert len(lines(tmp_path / "b")) == 2


# --- losses in train replies ----------------------------------------------------------------------


def test_afl_declares_that_it_reads_reported_losses_and_the_others_do_not():
    assert selector_traits(AFL(3)).needs_losses
    assert selector_traits(Oort(3)).needs_losses
    for selector in (Random(3), RoundRobin(3), FedCor(3), PowerOfChoice(3)):
        assert not selector_traits(selector).needs_losses


def test_afl_without_a_reported_loss_ends_with_the_metrics_that_came(tmp_path):
    grid = MemoryGrid(numpy_app(loss_name="xent"), 10)
    said = (
        r"round 1: the 3 clients that trained and should report a loss sent no usable one: no loss "
        r"among its metrics \(num-examples, xent\)\. AFL needs losses: the train function"
    )
    with pytest.raises(FedcorError, match=said):
        run(AFL(3), grid, folder=tmp_path)
    assert lines(tmp_path) == []
    run(AFL(3), grid, folder=tmp_path, loss_key="xent")
    assert len(lines(tmp_path)) == 6


def test_a_round_in_which_nobody_reports_does_not_end_a_run_that_saw_losses(tmp_path):
    grid, silent = MemoryGrid(numpy_app(), 5), []

    def without_loss(message, reply):
        if is_training(message) and silent:
            del reply.content["metrics"]["loss"]
        return reply

    grid.trouble = dict.fromkeys(range(5), without_loss)
    run(AFL(3), grid, rounds=1, folder=tmp_path)
    silent.append(True)
    run(AFL(3), grid, rounds=3, folder=tmp_path)  # also after a resume
    assert [len(entry["participated"]) for entry in lines(tmp_path)] == [3, 3, 3]


def saying(value):
    """What changes the loss in train replies; None takes it out."""

    def change(message, reply):
        if is_training(message) and "metrics" in reply.content:
            del reply.content["metrics"]["loss"]
            if value is not None:
                reply.content["metrics"]["loss"] = value
        return reply

    return change


@pytest.mark.parametrize("value", [float("nan"), 4e6, [1.0, 2.0]])
def test_an_unusable_loss_of_one_client_is_none_and_its_update_is_used(value, tmp_path):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[3] = saying(value)
    selecting, _ = run(AFL(5), grid, rounds=1, folder=tmp_path)
    (entry,) = lines(tmp_path)
    assert (entry["participated"], entry["faults"]) == ([0, 1, 2, 3, 4], {})
    assert entry["refused"] == 1
    known = np.isfinite(selecting._state.current.selector["losses"])
    assert known.tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("value", [float("nan"), 4e6, None])
def test_one_client_without_a_usable_loss_does_not_end_a_run_of_one_client_per_round(
    value, tmp_path
):
    for seed in range(6):  # in some of them it is the first that trains
        grid = MemoryGrid(numpy_app(), 3)
        grid.trouble[0] = saying(value)
        run(AFL(1), grid, rounds=4, folder=tmp_path / str(seed), seed=seed)
    first = [lines(tmp_path / str(seed))[0]["participated"] for seed in range(6)]
    assert [0] in first


def test_where_no_client_has_a_usable_loss_few_rounds_end_the_run(tmp_path):
    grid = MemoryGrid(numpy_app(), 10)
    grid.trouble = dict.fromkeys(range(10), saying(4e6))
    said = "round 1: the 5 clients that trained and should report a loss .*: its loss is 4000000"
    with pytest.raises(FedcorError, match=said):
        run(AFL(5), grid)
    grid.trouble = dict.fromkeys(range(10), saying(None))
    with pytest.raises(
        FedcorError, match=r"the 1 client that trained .*no loss among its metrics \(num-examples\)"
    ):
        run(AFL(1), grid, rounds=40, folder=tmp_path)
    trained = {k for entry in lines(tmp_path) for k in entry["participated"]}
    assert len(trained) == 2  # the third ends it


# --- who is blamed --------------------------------------------------------------------------------


def failing(verb):
    def fail(self, server_round, *_arguments):
        raise AggregationError(f"no {verb}")

    return type("Failing", (FedAvg,), {verb: fail})()


@pytest.mark.parametrize("selector", [FedCor(3, **QUICK), Random(3)], ids=repr)
@pytest.mark.parametrize(
    "verb", ["configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"]
)
def test_a_strategy_that_fails_is_blamed_itself(verb, selector):
    said = rf"^round 1: Failing failed in {verb}: AggregationError: no {verb} \(.*, line \d+\)$"
    with pytest.raises(FedcorError, match=said) as caught:
        run(selector, MemoryGrid(numpy_app(), 6), strategy=failing(verb))
    assert isinstance(caught.value.__cause__, AggregationError)


def test_a_metric_that_a_strategy_of_flowers_reads_and_nobody_sends_is_named():
    said = "^round 1: no client delivered .*for example: no number 'train_loss' in its met"
    with pytest.raises(FedcorError, match=said):
        run(
            FedCor(3, **QUICK),
            MemoryGrid(numpy_app(), 6),
            strategy=QFedAvg(client_learning_rate=0.1, fraction_evaluate=0.0),
        )


@pytest.mark.parametrize("selector", [FedCor(3, **QUICK), Random(3)], ids=repr)
def test_an_optimiser_in_its_short_form_is_blamed_with_flowers_number_of_the_round(selector):
    class Mine:
        def aggregate(self, model, results, weights):
            raise ZeroDivisionError("oh")

    strategy = OptimiserStrategy(Mine(), fraction_evaluate=0.0)
    said = "^round 1: the optimiser Mine failed in aggregate: ZeroDivisionError: oh"
    with pytest.raises(FedcorError, match=said):
        run(selector, MemoryGrid(numpy_app(), 6), strategy=strategy)


def test_a_selector_that_fails_is_still_blamed():
    @dataclasses.dataclass(frozen=True)
    class Failing(Random):
        def select(self, state, federation):
            raise KeyError("mine")

    with pytest.raises(FedcorError, match="round 1: the selector failed in select: KeyError"):
        run(Failing(3), MemoryGrid(numpy_app(), 6))


# --- what else a train reply may say --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hearing(Random):
    """Keeps what it is told."""

    heard: list = dataclasses.field(default_factory=list)

    def observe(self, state, outcome):
        self.heard.append((outcome.losses, outcome.rms_losses, outcome.durations))
        return state


def heard(say):
    """What a selector hears of one round in which client k adds the metrics `say(k)`."""

    def saying(k):
        def add(message, reply):
            if is_training(message) and "metrics" in reply.content:
                for name, value in say(k).items():
                    reply.content["metrics"][name] = value
            return reply

        return add

    grid, selector = MemoryGrid(numpy_app(), 4), Hearing(4)
    grid.trouble = {k: saying(k) for k in range(4)}
    run(selector, grid, rounds=1)
    return selector.heard[0]


def test_a_selector_hears_root_mean_square_losses_and_seconds_where_clients_say_them():
    losses, rms, seconds = heard(lambda _k: {})
    assert rms.tolist() == losses.tolist()
    assert seconds is None
    losses, rms, seconds = heard(lambda k: {"rms-loss": 5.0 + k, "train-seconds": 2.0 * k})
    assert rms.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert seconds.tolist()[1:] == [2.0, 4.0, 6.0]
    assert np.isnan(seconds[0])  # nobody trains in no time
    losses, rms, seconds = heard(lambda k: {"rms-loss": 5.0} if k == 2 else {})
    assert rms.tolist() == [*losses[:2], 5.0, losses[3]]


def test_oort_finishes_where_some_nodes_never_send_a_usable_reply(tmp_path):
    """Nobody of them ever reports a loss; still they are not all that is left to explore."""

    def diverged(message, reply):
        if is_training(message) and "metrics" in reply.content:
            reply.content["arrays"] = record(np.full(3, np.nan, np.float32))
        return reply

    grid = MemoryGrid(numpy_app(), 12)
    grid.trouble = dict.fromkeys(range(4), diverged)
    run(Oort(3), grid, rounds=15, folder=tmp_path)
    delivered = [len(entry["participated"]) for entry in lines(tmp_path)]
    assert len(delivered) == 15
    assert np.mean(delivered[10:]) >= 2


def test_oort_runs_on_seconds_that_clients_measure(tmp_path):
    grid = MemoryGrid(numpy_app(), 10)

    def slow(k):
        def add(message, reply):
            if is_training(message) and "metrics" in reply.content:
                reply.content["metrics"]["train-seconds"] = 1.0 + k
            return reply

        return add

    grid.trouble = {k: slow(k) for k in range(10)}
    run(Oort(3), grid, rounds=8, folder=tmp_path)
    preferred = [line["details"].get("preferred") for line in lines(tmp_path)]
    assert preferred[0] is None
    assert all(1.0 <= one[0] <= 10.0 for one in preferred[1:])
