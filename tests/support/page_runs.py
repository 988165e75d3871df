"""Folders of runs that never ran, with all that the report page shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.rounds.record_line import FORMAT
from fedcor.runs.checkpoints import save_checkpoint
from fedcor.runs.record import CLIENT_NAMES, RECORD, json_line, rounds_digest


def header(
    selector: str, seed: int, rounds: int, clients: int, experiment: str = "toy"
) -> dict[str, Any]:
    """The first line of a record."""
    return {
        "kind": "header",
        "format": FORMAT,
        "experiment": experiment,
        "selector": selector,
        "seed": seed,
        "config": {
            "name": experiment,
            "data": {"name": "nowhere"},
            "partition": {"kind": "iid", "clients": clients},
            "training": {"rounds": rounds},
            "selectors": {selector: {"clients_per_round": 5}},
            "target_accuracy": 0.5,
        },
        "versions": {"fedcor": "0.1.0"},
    }


def line(
    t: int, selector: str, clients: int, picks: int, rng: np.random.Generator
) -> dict[str, Any]:
    """The line of round `t`."""
    chosen = rng.choice(clients, size=min(picks, clients), replace=False).tolist()
    entry: dict[str, Any] = {
        "round": t,
        "selected": chosen,
        "participated": sorted(chosen[:-1] if t % 7 == 3 else chosen),
        "test_accuracy": 0.8 - 0.7 / (1 + 0.1 * t) + 0.02 * rng.random(),
        "test_loss": 0.4 + 2 / (1 + 0.1 * t),
        "learning_rate": 0.1,
        "probed": clients if t % 5 == 0 else 0,
        "refused": 0,
        "bytes_down": 1000 * len(chosen),
        "bytes_up": 1000 * len(chosen),
        "seconds": 0.5,
    }
    if selector == "fedcor" and t >= 2:
        others, own, annealing, redundancy = rng.random((4, len(chosen)))
        entry["why"] = {
            "gain": (annealing * (others + own) - 0.2 * redundancy).tolist(),
            "redundancy": (0.2 * redundancy).tolist(),
            "annealing": annealing.tolist(),
            "others": others.tolist(),
            "own": own.tolist(),
            "change": (-own).tolist(),
            "runner_up": [float((client + 1) % clients) for client in chosen],
            "margin": rng.random(len(chosen)).tolist(),
        }
    if selector == "fedcor":
        entry["details"] = {"told": rng.random(len(entry["participated"])).tolist()}
        if t % 5 == 0:
            entry["details"] |= {
                "known": list(range(clients)),
                "losses": rng.random(clients).tolist(),
                "similarity": [0.9],
                "forecast_clients": [clients],
                "log_score": [float(rng.normal())],
                "log_score_each": [float(rng.normal())],
                "log_score_independent": [0.0],
                "squared_errors": [float(clients)],
                "squared_changes": [2.0 * clients],
                "squared_forecasts": [1.5 * clients],
                "residual_squares": [float(clients)],
                "residual_bins": rng.integers(1, 9, size=20).tolist(),
            }
    return entry


def write_run(
    folder: Path,
    selector: str = "fedcor",
    seed: int = 1,
    rounds: int = 12,
    clients: int = 20,
    picks: int = 4,
    planned: int | None = None,
    names: Mapping[int, str] | None = None,
    experiment: str = "toy",
    flower: bool = False,
) -> Path:
    """A run in `folder`, with a checkpoint from which a map can be drawn; returns its folder."""
    rng = np.random.default_rng([seed, len(selector)])
    path = folder / selector / f"seed-{seed}"
    path.mkdir(parents=True)
    first = header(selector, seed, planned or rounds, clients, experiment)
    entries = [line(t, selector, clients, picks, rng) for t in range(rounds)]
    if flower:  # as Flower counts, with faults of clients, and one that is left alone
        first["versions"]["flwr"] = "1.41.0"
        for entry in entries:
            failed = len(entry["selected"]) - len(entry["participated"])
            entry |= {"server_round": entry["round"] + 1, "faults": {"late": failed}}
            entry["quarantined"] = [1] if entry["round"] == 5 else []
    lines = [json_line(entry) for entry in entries]
    (path / RECORD).write_text(json.dumps(first) + "\n" + "".join(lines), encoding="utf-8")
    if names is not None:
        rows = [f"{number}\t{names.get(number, number)}\n" for number in range(clients)]
        (path / CLIENT_NAMES).write_text("".join(rows), encoding="utf-8")
    arrays = {"round": np.array(rounds), "known": np.full(clients, np.nan)}
    if selector == "fedcor":
        arrays["selector/embedding"] = rng.normal(size=(clients, 5))
    digest = rounds_digest(map(json.loads, lines)).hexdigest()
    save_checkpoint(path, arrays, json.dumps(first), rounds=digest)
    return path


def add_round(path: Path) -> int:
    """One more round in the record of a run; returns its number."""
    text = (path / RECORD).read_text(encoding="utf-8")
    first = json.loads(text.split("\n", 1)[0])
    t = text.count("\n") - 1
    clients = first["config"]["partition"]["clients"]
    rng = np.random.default_rng(t)
    with (path / RECORD).open("a", encoding="utf-8") as file:
        file.write(json_line(line(t, first["selector"], clients, 4, rng)))
    return t
