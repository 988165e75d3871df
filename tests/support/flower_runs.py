"""The simulator's experiments, run on Flower in this process."""

from __future__ import annotations

from flower_grid import MemoryGrid
from flwr.app import Context, RecordDict

import fedcor
from fedcor.flower.bridge import client_app, server_app
from fedcor.flower.strategy_memory import unpack
from fedcor.runs.record import read_checkpoint, read_run

CLIENTS, ROUNDS = 6, 6


def experiment(optimiser, selector="random", **changes):
    return fedcor.experiment(
        "digits",
        selector=selector,
        optimiser=optimiser,
        partition={"clients": CLIENTS},
        clients_per_round=2,
        rounds=ROUNDS,
        selectors={"fedcor": {"warmup": 2, "interval": 2}},
        **changes,
    )


def on_flower(one, out, on_round=None, seed=0):
    grid = MemoryGrid(client_app(one, 1), CLIENTS, seed)
    server_app(one, 1, out, on_round)(grid, Context(1, 1, {}, RecordDict(), {}))
    return read_run(out).rounds


def end_of(out):
    """(the model, the optimiser's state) in the checkpoint of a run on Flower."""
    arrays = read_checkpoint(out)
    return arrays["model/0"], unpack(arrays, "strategy").get("_memory", {})
