"""The command line as a process: on a terminal, interrupted, with workers that die."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from fedcor.cli import main
from fedcor.runs.record import count_rounds

# A long comparison, to be ended early.
COMPARE = "compare digits --selectors random,full --seeds 1 --rounds 9000 --out o"


def show_on_a_terminal(program: str, folder) -> str:
    """What a Python program writes to a pseudo-terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=follower,
        stderr=follower,
        cwd=folder,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0
    os.close(leader)
    return shown.decode()


def test_on_a_terminal_bars_are_shown_and_a_comparison_ends_with_its_table(tmp_path, small_data):
    program = f"""
from fedcor.cli import main
assert main("run digits --selector random --rounds 150 --out o {small_data}".split()) == 0
print("=== comparison", flush=True)
options = "--selectors random --seeds 1 --rounds 6 --out c {small_data}".split()
assert main(["compare", "digits", *options]) == 0
"""
    run, comparison = show_on_a_terminal(program, tmp_path).split("=== comparison")
    assert "digits: random selects, FedAvg aggregates" in run
    assert "150/150" in run
    assert "rounds/s" in run
    assert "0:00:0" in run  # time left
    assert "accuracy 0." in run
    assert "o: 150 rounds, test accuracy 0." in run
    assert "1/1 runs" in comparison
    assert "There is no other selector to compare it with" in " ".join(
        re.sub(r"\x1b\[[\d;]*m", "", comparison).split()
    )
    assert "More: fedcor report c --plot" in comparison


@pytest.fixture
def start(tmp_path, small_data):
    """Starts a command and waits for its first rounds; afterwards nothing of it keeps running."""
    started = []

    def start_command(command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedcor", *shlex.split(f"{command} {small_data}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        started.append(process)
        before = rounds_in(tmp_path)
        while rounds_in(tmp_path) < before + 4:
            time.sleep(0.02)
            assert process.poll() is None
        return process

    yield start_command
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def rounds_in(folder) -> int:
    return sum(count_rounds(path.parent) for path in folder.rglob("rounds.jsonl"))


def workers_of(process, count) -> list[int]:
    """The ids of a process's workers, when there are `count`."""
    deadline = time.monotonic() + 60
    while True:
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)]
        listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        workers = [int(line.split()[0]) for line in listed if "resource_tracker" not in line]
        if len(workers) == count:
            return workers
        assert time.monotonic() < deadline, listed
        time.sleep(0.05)


def assert_ended(pids):
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
        assert time.monotonic() < deadline, "workers are left over"


def ending(process) -> tuple[int, str]:
    """Exit code and last words."""
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, err


def test_interrupting_a_run_says_how_to_continue(start):
    process = start("run digits --selector random --rounds 5000 --out o")
    process.send_signal(signal.SIGINT)
    words = "fedcor: interrupted; add --resume to the same command to continue\n"
    assert ending(process) == (130, words)


def test_interrupting_a_comparison_ends_its_workers_quietly(start):
    process = start(f"{COMPARE} --jobs 2")
    workers = workers_of(process, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, err = ending(process)
    assert code == 130
    assert "--resume" in err
    assert_ended(workers)


def test_a_killed_worker_is_reported_and_a_killed_parent_takes_its_workers_along(start):
    process = start(f"{COMPARE} --jobs 2")
    os.kill(workers_of(process, 2)[0], signal.SIGKILL)
    code, err = ending(process)
    assert code == 2
    assert "a worker process died" in err
    assert "--jobs" in err

    process = start(f"{COMPARE} --jobs 2 --resume")
    workers = workers_of(process, 2)
    process.kill()
    process.communicate()
    assert_ended(workers)  # so that the locks are free, and the runs can be resumed at once


@pytest.mark.parametrize("form", ["", "--full", "--json"])
def test_a_report_whose_reader_has_left_ends_quietly(tmp_path, small_data, form):
    command = f"run digits --selector random --rounds 2 --out {tmp_path}/o {small_data}"
    assert main(command.split()) == 0
    report = f"{sys.executable} -m fedcor report {tmp_path}/o {form} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", report], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m fedcor data list | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path
    )
    # Whether everything was written before the reader ended is a race.
    assert done.returncode in (0, 141), done.stderr
    assert "Traceback" not in done.stderr
