"""The example in the style of Flower's quickstarts, with and without fedcor."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flower_grid import MemoryGrid
from flwr.app import Context, RecordDict

from fedcor.runs.record import read_run

APP = Path(__file__).parents[2] / "examples" / "flower-quickstart"
NODES = 6

# Runs one round of stock Flower, and says what it imported of fedcor.
STOCK = f"""
import sys
import tomllib
sys.path.insert(0, {str(APP)!r})
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from quickstart import client_app, server_app

with open({str(APP / "pyproject.toml")!r}, "rb") as file:
    config = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
FedAvg.start = lambda strategy, **given: print(strategy.fraction_train)
server_app.app(None, Context(1, 1, {{}}, RecordDict(), config))
context = Context(1, 2, {{"partition-id": 0, "num-partitions": 20}}, RecordDict(), config)
print(client_app.answers_fedcor("message", context, lambda message, context: message))
print([name for name in sys.modules if name.startswith("fedcor")])
"""


def config(**changes) -> dict:
    with (APP / "pyproject.toml").open("rb") as file:
        return {**tomllib.load(file)["tool"]["flwr"]["app"]["config"], **changes}


def test_stock_is_flower_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STOCK], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["0.25", "message", "[]"], done.stderr


@pytest.mark.parametrize("selector", ["default", "fedcor", "power_of_choice", "full"])
def test_one_setting_has_fedcor_choose(selector, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from quickstart import client_app, server_app

    own = {"selector": selector, "rounds": 2, "clients-per-round": 3, "checkpoint": str(tmp_path)}
    grid = MemoryGrid(client_app.app, NODES)
    for context in grid.contexts.values():
        context.node_config["num-partitions"] = NODES
        context.run_config = config(**own)
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config(**own)))
    run = read_run(tmp_path)
    trained = NODES if selector == "full" else 3
    assert [len(entry["participated"]) for entry in run.rounds] == [trained, trained]
    assert all(entry["faults"] == {} for entry in run.rounds)
    names = [line.split("\t")[1] for line in (tmp_path / "clients.tsv").read_text().splitlines()]
    assert names == [f"partition-{node}" for node in range(NODES)]


@pytest.fixture
def flwr(tmp_path, only_ray):
    """Calls `flwr` with a home of its own; the local SuperLink that it leaves is ended."""
    home = tmp_path / "flwr"
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def call(*arguments):
        done = subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def run(*options, starts):
        """`flwr run`, again where Ray did not start: then no strategy runs, and the exit is 0."""
        for _ in range(3):
            shown = call("run", str(APP), "--stream", *options)
            if starts in shown or "Exit Code: 700" not in shown:
                break
        assert starts in shown, shown[-6000:]
        return shown

    yield run
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"FLWR_HOME={home}".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.mark.slow
def test_the_commands_of_its_readme_run(flwr, tmp_path):
    """In Flower's simulation, with fewer nodes and rounds; first stock, then ours."""
    few = ("--federation-config", f"num-supernodes={NODES}", "--run-config")
    stock = flwr(*few, "rounds=1", starts="Starting FedAvg strategy")
    assert "'accuracy'" in stock
    own = f"rounds=2 selector='default' checkpoint='{tmp_path}/ours'"
    flwr(*few, own, starts="Starting SelectingStrategy strategy")
    assert len(read_run(tmp_path / "ours").rounds) == 2
