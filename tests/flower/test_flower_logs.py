"""The log of a run reads as a Flower user expects it: numbers are true, nothing is said twice."""

from __future__ import annotations

import logging
import re
import traceback

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

from fedcor.flower import answers_probes, select_with
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


def test_a_round_ends_with_a_line_in_the_numbers_of_the_whole_run(tmp_path, caplog):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[1] = in_training(raises)
    with logged(caplog, logging.INFO), pytest.raises(Killed):
        start(Full(), grid, 4, killed_in(3), folder=tmp_path)
    caplog.clear()
    with logged(caplog, logging.INFO):
        start(Full(), grid, 4, folder=tmp_path)
    lines = [message for message in caplog.messages if message.startswith("fedcor round ")]
    scores = r"; test accuracy 0\.\d+, test loss \d\S*"
    # In round 3, the client that failed twice is left alone.
    third = rf"fedcor round 3 of 4 \(full\): 3 of 3 chosen clients delivered{scores}"
    fourth = rf"fedcor round 4 of 4 \(full\): 3 of 4 chosen clients delivered, 1 failed{scores}"
    for expected, line in zip((third, fourth), lines, strict=True):
        assert re.fullmatch(expected, line), line


def test_a_round_in_which_everyone_delivers_has_no_failures(caplog):
    with logged(caplog, logging.INFO):
        start(FedCor(3, **QUICK), MemoryGrid(numpy_app(), 6), 4, score=None)
    lines = [message for message in caplog.messages if message.startswith("fedcor round ")]
    # Once per round, although candidates were aggregated too.
    assert lines == [
        f"fedcor round {number} of 4 (fedcor): 3 of 3 chosen clients delivered"
        for number in range(1, 5)
    ]


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
        "trying again in 0.05 s, attempt 2 of 5",
        "round 1: NO CLIENT delivered a usable update (6 errors): "
        "trying again in 0.05 s, attempt 3 of 5",
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
