"""Runs on real clusters of two workers on this machine, one of which is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedcor.cli import main
from fedcor.runs.record import count_rounds

pytestmark = pytest.mark.slow
COMPARE = "compare digits --selectors random,afl --seeds 1 --rounds 600"
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
PATIENCE = 120  # seconds, on a busy machine


def lines(folder):
    """Every line of every run but for the time that a round took."""
    return {
        str(path.relative_to(folder)): [
            {key: value for key, value in json.loads(line).items() if key != "seconds"}
            for line in path.read_text().splitlines()
        ]
        for path in sorted(Path(folder).rglob("rounds.jsonl"))
    }


def wait_until(condition, process=None):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def command(small_data):
    return [*COMPARE.split(), *small_data.split()]


@pytest.fixture(scope="module")
def expected(command, tmp_path_factory):
    """The same comparison in this process."""
    folder = tmp_path_factory.mktemp("local")
    assert main([*command, "--out", str(folder)]) == 0
    return lines(folder)


@contextmanager
def program(*command):
    """A process of its own group, which is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_ray_node_is_killed_and_nothing_is_lost(command, expected, tmp_path, only_ray):
    script = Path(__file__).parents[1] / "support" / "ray_cluster.py"
    with program(str(script)) as cluster:
        address = next(line for line in cluster.stdout if line.startswith("address")).split()[1]
        cluster_options = ["--backend", "ray", "--address", address]
        with program("-m", "fedcor", *command, *cluster_options, "--out", str(tmp_path)) as driver:
            runs = [tmp_path / name / "seed-1" for name in ("random", "afl")]
            wait_until(lambda: all(count_rounds(run) for run in runs), driver)
            cluster.stdin.write("kill\n")
            cluster.stdin.flush()
            next(line for line in cluster.stdout if line.startswith("killed"))
            out, err = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 0, err
        assert len(out.splitlines()) == 2  # Ray said nothing there
        assert lines(tmp_path) == expected
        cluster.communicate(timeout=PATIENCE)  # the end of its input ends it


def test_a_dask_worker_is_killed_and_nothing_is_lost(command, expected, tmp_path):
    quiet = ("--host", "127.0.0.1", "--no-dashboard")
    with program("-m", "dask", "scheduler", *quiet, "--port", "0", "--no-show") as scheduler:
        found = (re.search(r"Scheduler at:\s+(tcp://\S+)", line) for line in scheduler.stderr)
        address = next(match[1] for match in found if match)
        worker = ("-m", "dask", "worker", address, *quiet, "--nthreads", "1", "--no-nanny")
        worker += ("--local-directory", str(tmp_path / "dask"))
        cluster_options = ["--backend", "dask", "--address", address]
        out = tmp_path / "runs"
        with (
            program(*worker) as first,
            program(*worker),
            program("-m", "fedcor", *command, *cluster_options, "--out", str(out)) as driver,
        ):
            runs = [out / name / "seed-1" for name in ("random", "afl")]
            wait_until(lambda: all(count_rounds(run) for run in runs), driver)
            first.kill()
            _, err = driver.communicate(timeout=PATIENCE)
        assert (driver.returncode, err) == (0, "")
        assert lines(out) == expected
