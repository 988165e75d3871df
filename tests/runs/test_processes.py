"""Calls in several processes: what comes back, and how they end. `test_cli.py` kills real runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.runs.processes import for_each
from fedcor.runs.progress import refresh


def note_process(path):
    path.write_text(str(os.getpid()))


def is_running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("count", "processes"), [(3, 1), (1, 4), (0, 2), (2, 0)])
def test_one_process_or_one_item_runs_here(tmp_path, count, processes):
    paths = [tmp_path / str(i) for i in range(count)]
    assert list(for_each(note_process, paths, processes)) == paths
    assert [path.read_text() for path in paths] == [str(os.getpid())] * count


def test_several_processes_share_the_items(tmp_path):
    def meet(path):  # a function of this test alone, which pickle would not take
        path.touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        note_process(path)

    paths = [tmp_path / "a", tmp_path / "b"]
    assert sorted(for_each(meet, paths, 2)) == paths
    assert len({os.getpid(), *(int(path.read_text()) for path in paths)}) == 3


def test_another_backend_of_joblib(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    assert sorted(for_each(note_process, paths, 2, backend="threading")) == paths


def test_an_error_crosses_as_it_is_and_ends_the_others(tmp_path):
    def work(number):
        if number == 1:
            wait_until((tmp_path / "0").exists)
            raise ConfigError("rounds", -1, "must be at least 1", "a hint")
        note_process(tmp_path / "0")
        time.sleep(600)

    with pytest.raises(ConfigError, match="rounds = -1") as raised:
        list(for_each(work, [0, 1], 2))
    error = raised.value
    assert (error.key, error.given, error.hint) == ("rounds", -1, "a hint")
    wait_until(lambda: not is_running(int((tmp_path / "0").read_text())))


def test_a_killed_worker_is_a_sentence(tmp_path):
    def work(number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(FedcorError, match="a worker process died .* can be resumed"):
        list(for_each(work, [0, 1], 2))


def test_an_error_that_cannot_cross_is_told_in_words(tmp_path):
    class Stubborn(Exception):
        def __init__(self, one, two):
            super().__init__(one)
            self.lock = threading.Lock()

    def work(number):
        raise Stubborn("what happened", 2)

    with pytest.raises(FedcorError, match="Stubborn: what happened"):
        list(for_each(work, [0, 1], 2))


def test_workers_do_not_remember_an_earlier_call(tmp_path, monkeypatch):
    def work(path):
        path.write_text(os.environ.get("FEDCOR_TEST", "not set"))

    paths = [tmp_path / "a", tmp_path / "b"]
    for value in ("one", "other"):
        monkeypatch.setenv("FEDCOR_TEST", value)
        list(for_each(work, paths, 2))
        assert [path.read_text() for path in paths] == [value, value]


def test_calls_at_the_same_time_have_workers_of_their_own(tmp_path):
    first = for_each(note_process, [tmp_path / "a", tmp_path / "b"], 2)
    next(first)
    assert len(list(for_each(note_process, [tmp_path / "c", tmp_path / "d"], 2))) == 2
    assert len(list(first)) == 1
    assert not {(tmp_path / name).read_text() for name in "ab"} & {
        (tmp_path / name).read_text() for name in "cd"
    }


def test_workers_are_in_the_callers_folder(tmp_path, monkeypatch):
    def work(name):
        Path(name).write_text("here")

    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        list(for_each(work, ["a", "b"], 2))
        assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


def test_whoever_stops_early_ends_the_workers(tmp_path):
    def work(number):
        note_process(tmp_path / str(number))
        if number:
            time.sleep(600)

    running = for_each(work, [0, 1], 2)
    assert next(running) == 0
    wait_until(lambda: (tmp_path / "1").exists() and (tmp_path / "1").read_text())
    running.close()
    wait_until(lambda: not is_running(int((tmp_path / "1").read_text())))


def test_interrupts_are_the_parents(tmp_path):
    def work(number):
        os.kill(os.getpid(), signal.SIGINT)

    assert sorted(for_each(work, [0, 1], 2)) == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_works_in_a_thread_of_its_own(tmp_path):
    paths, done = [tmp_path / "a", tmp_path / "b"], []
    thread = threading.Thread(target=lambda: done.extend(for_each(note_process, paths, 2)))
    thread.start()
    thread.join(60)
    assert sorted(done) == paths


def test_a_script_needs_no_main_guard(tmp_path):
    program = """
from fedcor.runs.processes import for_each
def work(number):
    print("worked", number, flush=True)
for number in for_each(work, [1, 2], 2):
    pass
print("done")
"""
    (tmp_path / "script.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["done", "worked 1", "worked 2"]


def test_an_interrupt_while_workers_start_is_quiet(tmp_path):
    """As a terminal sends it: to every process of the group, while they still import."""
    program = """
import contextlib, os, signal, sys, threading, time
from fedcor.runs import processes
start_workers, started = processes._ignoring_interrupts, threading.Event()
@contextlib.contextmanager
def observed():
    with start_workers():
        yield
    started.set()
processes._ignoring_interrupts = observed
def interrupt():
    started.wait()
    time.sleep(float(sys.argv[1]))
    os.killpg(0, signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    list(processes.for_each(time.sleep, [600, 600], 2))
except KeyboardInterrupt:
    print("interrupted")
"""
    for delay in ("0.01", "0.2"):
        done = subprocess.run(
            [sys.executable, "-c", program, delay],
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=60,
        )
        assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_refresh_shows_now_and_then_and_at_the_end():
    shown = []
    with refresh(lambda: shown.append(len(shown)), seconds=0.01):
        wait_until(lambda: len(shown) > 2)
    count = len(shown)
    time.sleep(0.05)
    assert len(shown) == count
    with pytest.raises(ValueError, match="stop"), refresh(lambda: shown.append(0), seconds=60):
        raise ValueError("stop")
    assert len(shown) == count
