"""The first rounds of an experiment in Flower's simulation, with a virtual node per client.

    python -m benchmarks.flower_rounds PRESET SEED SELECTOR ROUNDS FOLDER plain|engine

The clients train with a plain PyTorch loop, as most would write it, or with our own engine: then
what is slower than our simulator is Flower's simulation, not the training. The strategy is
`fedcor.flower`'s around Flower's own loop. A round's time ends where the next begins, so nothing
is left out but the start.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.flower_clients import plain_client_app
from fedcor.flower.bridge import client_app, server_app, simulate
from fedcor.rounds.record_line import RoundRecord
from fedcor.simulation.experiment_files import load_experiment


def main(preset: str, seed: int, selector: str, rounds: int, folder: Path, clients: str) -> None:
    torch.set_num_threads(1)
    experiment = load_experiment(preset, [f"training.rounds={rounds}"], selector)
    records: list[RoundRecord] = []
    ends: list[float] = []

    def on_round(record: RoundRecord) -> None:
        records.append(record)
        ends.append(time.perf_counter())

    server = server_app(experiment, seed, folder / "run", on_round)
    app = client_app(experiment, seed) if clients == "engine" else plain_client_app(preset, seed)
    simulate(server, app, 100)
    # The first round has no beginning that we see; its record says how long it took.
    later = [end - before for before, end in itertools.pairwise(ends)]
    done = {
        "seconds": [records[0].seconds, *later],
        "test_losses": [record.test_loss for record in records],
        "chosen": [record.selected for record in records],
        "participated": [record.participated for record in records],
        "probed": [record.probed for record in records],
        "version": version("flwr"),
    }
    print(json.dumps(done))


if __name__ == "__main__":
    preset, seed, selector, rounds, folder, clients = sys.argv[1:]
    main(preset, int(seed), selector, int(rounds), Path(folder), clients)
