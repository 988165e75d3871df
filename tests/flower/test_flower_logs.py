"""The log of a run reads as a Flower user expects it: numbers are true, nothing is said twice."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from pathlib import Path

import flwr.serverapp.strategy
import pytest
from flower_grid import (
    QUICK,
    ErrorCode,
    MemoryGrid,
    error,
    initial,
    is_training,
    logged,
    numpy_app,
    quiet,
    run,
    server_score,
)
from flwr.serverapp.strategy import FedAvg

from fedcor.flower import answers_probes, logs, select_with
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice

FLOWER = logging.getLogger("flwr")


class Killed(Exception):
    """Ends a run in the middle."""


def killed_in(round):
    def score(server_round, arrays):
        if server_round == round:
            raise Killed
        return server_score(server_round, arrays)

    return score


def raises(message, _reply, why="boom"):
    """A client's error as Flower reports one, with a traceback."""
    try:
        raise ValueError(why)
    except ValueError:
        reason = traceback.format_exc()
    return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)


def in_training(change):
    return lambda m, r: change(m, r) if is_training(m) else r


def start(selector, grid, rounds, score=server_score, strategy=None, folder=None, preflight=True):
    settings = {"wait_for": len(grid.contexts), "probe_timeout": 0.05, "preflight": preflight}
    selecting = select_with(quiet(strategy), selector, checkpoint=folder, **settings)
    return selecting.start(grid, initial(), num_rounds=rounds, timeout=0.05, evaluate_fn=score)


def test_a_resumed_run_counts_its_rounds_on(tmp_path, caplog):
    strategy = FedAvg(min_available_nodes=4)
    with logged(caplog, logging.INFO), pytest.raises(Killed):
        start(Random(2), MemoryGrid(numpy_app(), 4), 6, killed_in(4), strategy, tmp_path)
    rounds = [message for message in caplog.messages if "ROUND" in message]
    assert rounds == [f"[ROUND {n}/6]" for n in (1, 2, 3, 4)]
    assert "\t├── Number of rounds: 6" in caplog.messages
    caplog.clear()
    with logged(caplog, logging.INFO):
        start(Random(2), MemoryGrid(numpy_app(), 4), 6, strategy=FedAvg(), folder=tmp_path)
    rounds = [message for message in caplog.messages if "ROUND" in message]
    assert rounds == [f"[ROUND {n}/6]" for n in (4, 5, 6)]
    assert "\t├── Number of rounds: 6 (3 finished before)" in caplog.messages
    # The model was evaluated before; that there is no result now says nothing.
    assert not any("Initial global evaluation" in message for message in caplog.messages)
    results = caplog.messages[caplog.messages.index("Final results:") :]
    for number in (1, 2, 3):
        assert not any(f" {number}: {{" in line for line in results)
    for number in (4, 5, 6):
        assert sum(f" {number}: {{" in line for line in results) == 3


@pytest.mark.parametrize("score", [server_score, killed_in(1)], ids=["well", "with an error"])
def test_flowers_logger_is_left_as_it_was(score):
    before = list(FLOWER.filters)
    with contextlib.suppress(Killed):
        start(Random(2), MemoryGrid(numpy_app(), 3), 1, score)
    assert FLOWER.filters == before


def test_the_one_round_that_is_left_has_its_number(tmp_path, caplog):
    with pytest.raises(Killed):
        start(Random(2), MemoryGrid(numpy_app(), 3), 12, killed_in(12), folder=tmp_path)
    caplog.clear()
    with logged(caplog, logging.INFO):
        start(Random(2), MemoryGrid(numpy_app(), 3), 12, folder=tmp_path)
    assert [m for m in caplog.messages if "ROUND" in m] == ["[ROUND 12/12]"]
    assert sum(m.startswith("\t{12: {") for m in caplog.messages) == 2


def test_what_others_log_meanwhile_is_not_touched(tmp_path, caplog):
    with pytest.raises(Killed):
        start(Random(2), MemoryGrid(numpy_app(), 3), 2, killed_in(2), folder=tmp_path)
    caplog.clear()

    def score(server_round, arrays):
        def log():
            FLOWER.info("[ROUND %s/%s]", 1, 3)
            FLOWER.info("configure_train: Sampled %s nodes (out of %s)", 2, 2)

        other = threading.Thread(target=log)
        other.start()
        other.join()
        FLOWER.info("[ROUND %s/%s]", "one", ["of many"])
        FLOWER.info("[ROUND]")
        FLOWER.info({"an": "object"})
        FLOWER.info("\t├── Number of rounds: %d", 7.5)
        return server_score(server_round, arrays)

    with logged(caplog, logging.INFO):
        start(Random(2), MemoryGrid(numpy_app(), 3), 2, score, folder=tmp_path)
    rounds = [message for message in caplog.messages if "ROUND" in message]
    assert rounds == ["[ROUND 2/2]", "[ROUND 1/3]", "[ROUND one/['of many']]", "[ROUND]"]
    assert "configure_train: Sampled 2 nodes (out of 2)" in caplog.messages
    assert "\t├── Number of rounds: 7" in caplog.messages
    assert "{'an': 'object'}" in caplog.messages


def test_a_start_within_a_start_has_its_own_numbers(tmp_path, caplog):
    with pytest.raises(Killed):
        start(Random(2), MemoryGrid(numpy_app(), 3), 2, killed_in(2), folder=tmp_path)
    caplog.clear()

    def score(server_round, arrays):
        start(Random(1), MemoryGrid(numpy_app(), 2), 1)
        return server_score(server_round, arrays)

    with logged(caplog, logging.INFO):
        start(Random(2), MemoryGrid(numpy_app(), 3), 2, score, folder=tmp_path)
    rounds = [message for message in caplog.messages if "ROUND" in message]
    assert rounds == ["[ROUND 2/2]", "[ROUND 1/1]"]


def test_flower_says_what_we_look_for():
    """If an update of Flower fails here, look at its new texts, and correct `flower/logs.py`."""
    folder = Path(flwr.serverapp.strategy.__file__).parent
    modules = ("strategy.py", "strategy_utils.py", "fedavg.py")
    source = "".join((folder / name).read_text(encoding="utf-8") for name in modules)
    for template in (*logs.TEMPLATES, *logs.SAMPLED):
        escaped = template.replace("\t", "\\t")
        assert f'"{escaped}"' in source, template


def test_the_strategys_private_calls_are_not_logged(caplog):
    with logged(caplog, logging.INFO):
        start(
            FedCor(3, **QUICK), MemoryGrid(numpy_app(), 6), 4, strategy=FedAvg(fraction_evaluate=1)
        )
    assert "configure_train: Sampled" not in caplog.text
    assert caplog.messages.count("configure_evaluate: Sampled 6 nodes (out of 6)") == 4
    # Once per round, although candidates were aggregated too.
    assert caplog.messages.count("aggregate_train: Received 3 results and 0 failures") == 4


def test_failures_are_those_of_the_chosen_and_the_left_alone_are_said(caplog):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[1] = in_training(raises)
    grid.trouble[2] = in_training(lambda _m, _r: None)
    with logged(caplog, logging.INFO):
        start(Full(), grid, 1, strategy=FedAvg())
    assert "aggregate_train: Received 3 results and 2 failures" in caplog.messages
    said = "configure_evaluate: Sampled 4 nodes (out of 4; 1 left alone after a fault)"
    assert said in caplog.messages
    assert "aggregate_evaluate: Received 4 results and 0 failures" in caplog.messages


def test_a_client_that_fails_to_evaluate_is_a_failure(caplog):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[1] = lambda m, r: (
        raises(m, r) if "server-round" in m.content.get("config", {}) else r
    )
    with logged(caplog, logging.INFO):
        start(Random(1), grid, 1, strategy=FedAvg())
    assert "aggregate_evaluate: Received 3 results and 1 failures" in caplog.messages


def test_a_round_says_who_was_chosen_of_whom(caplog):
    grid = MemoryGrid(numpy_app(), 12)
    with logged(caplog, logging.INFO):
        start(PowerOfChoice(2, candidates=5), grid, 2, preflight=False)
    (first, second) = [m for m in caplog.messages if m.startswith("round ")]
    assert first.startswith("round 1 of 2: selected 2 of 12 clients: partition-")
    assert first.endswith(" (12 reachable; 5 losses asked for)")
    assert second.startswith("round 2 of 2: ")


def test_many_names_and_long_ones_are_shortened(caplog):
    with logged(caplog, logging.INFO):
        start(Full(), MemoryGrid(numpy_app(), 14), 1)
    names = ", ".join(f"partition-{k}" for k in range(10))
    said = f"round 1 of 1: selected 14 of 14 clients: {names} and 4 more (14 reachable)"
    assert said in caplog.messages
    caplog.clear()
    named = numpy_app(mods=[answers_probes(name="n" * 90)])
    with logged(caplog, logging.INFO):
        start(Full(), MemoryGrid(named, 1), 1)
    assert "round 1 of 1: selected 1 of 1 clients: client 0 (1 reachable)" in caplog.messages


def test_a_round_says_its_phase(caplog):
    with logged(caplog, logging.INFO):
        start(FedCor(2, **QUICK), MemoryGrid(numpy_app(), 6), 5)
    said = [m for m in caplog.messages if m.startswith("round ")]
    assert ["(warm-up 1 of 3: at random; " in m for m in said] == [True] + [False] * 4
    assert ["(warm-up 3 of 3: at random; " in m for m in said] == [False, False, True, False, False]
    assert ["(refit; " in m for m in said] == [False, False, False, True, False]
    caplog.clear()
    with logged(caplog, logging.INFO):
        start(Aligned(2), MemoryGrid(numpy_app(), 4), 3)
    said = [m for m in caplog.messages if m.startswith("round ")]
    yet = "of 4 clients have not trained yet"
    assert [yet in m for m in said] == [True, True, False]
    assert f"(4 {yet}; " in said[0]


def test_a_traceback_is_shown_once_and_later_faults_in_a_line(caplog):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[1] = in_training(lambda m, r: raises(m, r, "no file /data/1"))
    grid.trouble[3] = in_training(lambda m, r: raises(m, r, "no file /data/3"))
    with logged(caplog, logging.INFO):
        start(Full(), grid, 2)
    assert caplog.text.count("Traceback (most recent call last)") == 1
    said = [m.splitlines()[0] for m in caplog.messages if ": error" in m]
    one, three = "client 1 (partition-1): error", "client 3 (partition-3): error"
    assert said == [
        f"round 1: {one}: ValueError: no file /data/1. In full:",
        f"round 1: {three}, as before: ValueError: no file /data/3",
        f"round 2: {one}, as before: ValueError: no file /data/1",
        f"round 2: {three}, as before: ValueError: no file /data/3",
    ]


REASONS = {
    "<class 'ZeroDivisionError'>:<'division by zero'>": "ZeroDivisionError: division by zero",
    "<class 'app.task.Broken'>:<''>": "Broken",
    # As Flower's simulation reports it.
    "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::ClientAppActor.run() (pid=7)"
    "\n  File 'app.py', line 15, in train\nValueError: no data\n\nThe above exception was the "
    "direct cause of the following exception:\n\nray::ClientAppActor.run() (pid=7)\n"
    "    raise ClientAppException(str(ex)) from ex\nflwr.clientapp.client_app.ClientAppException: "
    "\nException ClientAppException occurred. Message: no data'>": "ValueError: no data",
    "node unavailable": "node unavailable",
    "": "no reason given",
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason[:20])
def test_an_exception_is_found_in_what_flower_says_of_it(reason, caplog):
    grid = MemoryGrid(numpy_app(), 3)
    grid.trouble[1] = in_training(
        lambda m, _r: error(m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
    )
    with logged(caplog, logging.INFO):
        start(Full(), grid, 2)
    first, second = [m.splitlines()[0] for m in caplog.messages if "client 1" in m and "error" in m]
    short = REASONS[reason]
    if "\n" in reason:
        assert first == f"round 1: client 1 (partition-1): error: {short}. In full:"
        assert second == f"round 2: client 1 (partition-1): error, as before: {short}"
    else:
        assert first == f"round 1: client 1 (partition-1): error: {short}"
        assert second == f"round 2: client 1 (partition-1): error: {short}"


def test_many_clients_with_one_fault_are_one_line(caplog):
    grid, app = MemoryGrid(numpy_app(), 9), in_training(raises)
    grid.trouble = {**dict.fromkeys(range(7), app), 8: in_training(lambda _m, _r: None)}
    with logged(caplog, logging.INFO):
        start(Full(), grid, 1)
    said = [
        record.getMessage().splitlines()[0]
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name == "flwr.fedcor"
    ]
    names = ", ".join(f"partition-{k}" for k in range(5))
    assert said == [
        f"round 1: 7 clients ({names} and 2 more): error: ValueError: boom. In full:",
        "round 1: client 8 (partition-8): late: no reply within the deadline",
        "round 1: client 8 (partition-8) failed once: left alone until round 3",
    ]


def test_a_client_has_one_line_per_round_for_one_fault(caplog):
    """It cannot say its loss: neither when it is asked for it, nor when the round is retried."""
    grid, attempts = MemoryGrid(numpy_app(), 3), []

    def fail_at_first(message, reply):
        attempts.append(message)
        return raises(message, reply) if len(attempts) <= 6 else reply

    grid.trouble = dict.fromkeys(range(3), in_training(fail_at_first))
    with logged(caplog, logging.INFO):
        start(Full(), grid, 1)
    assert sum(": error" in message for message in caplog.messages) == 3
    lost = [r for r in caplog.records if r.levelno == logging.ERROR]
    said = [m for m in caplog.messages if "selected" in m]
    assert ["(attempt 2; 3 reach" in m for m in said] == [False, True, False]
    assert [record.getMessage() for record in lost] == [
        "round 1: NO CLIENT delivered a usable update (3 errors): "
        "trying again in 0.05 s (attempt 2 of 5)",
        "round 1: NO CLIENT delivered a usable update (6 errors): "
        "trying again in 0.05 s (attempt 3 of 5)",
    ]


def test_every_line_has_its_level_and_comes_once(tmp_path, caplog):
    grid = MemoryGrid(numpy_app(), 5)
    grid.trouble[1] = in_training(raises)
    with logged(caplog, logging.INFO):
        start(Full(), grid, 3, folder=tmp_path)
    ours = [r for r in caplog.records if r.name == "flwr.fedcor"]
    texts = [r.getMessage() for r in ours]
    assert len(texts) == len(set(texts))
    for record in ours:
        fault = "client 1" in record.getMessage() and "selected" not in record.getMessage()
        assert record.levelno == (logging.WARNING if fault else logging.INFO), record.getMessage()
    # Flower's own handlers write our lines: we add none.
    assert not logging.getLogger("flwr.fedcor").handlers


def test_a_selector_that_fails_does_not_hide_the_faults_before(caplog):
    class Failing(Random):
        def select(self, state, federation):
            federation.losses(federation.available)
            raise Killed

    grid = MemoryGrid(numpy_app(), 3)
    grid.trouble[1] = lambda m, r: raises(m, r) if m.content.array_records else r
    with logged(caplog), pytest.raises(Exception, match="failed in select"):
        run(Failing(1), grid, rounds=1)
    assert "client 1 (partition-1): error: ValueError: boom" in caplog.text
