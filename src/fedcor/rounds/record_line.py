"""The lines of a record: the header with settings and versions, then one line per round.

Every engine writes the same form.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

FORMAT = 3  # of records and checkpoints; files with another number are refused


def run_header(
    experiment: str,
    selector: str,
    seed: int,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    *,
    engine: str | None = None,
) -> dict[str, Any]:
    """The header of a run.

    Args:
        experiment: Name of the experiment.
        selector: Registered name of the selector, or `module:Class`.
        seed: Seed of everything that is drawn.
        config: Every setting, as plain values. `config["selectors"][selector]` holds those of the
            selector.
        versions: Versions of the engine's packages. Those of fedcor, Python and NumPy are added.
        engine: None for the simulator and for a user's own Flower app; "flower" for an experiment
            of the simulator that runs on Flower; "own" for a training loop of one's own.
    """
    header = {
        "format": FORMAT,
        "experiment": experiment,
        "selector": selector,
        "seed": seed,
        "config": config,
        "versions": {
            "fedcor": version("fedcor"),
            "python": platform.python_version(),
            "numpy": np.__version__,
            **versions,
        },
    }
    return header if engine is None else {**header, "engine": engine}


def with_selector_name(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The header with its selector called `name`, if both names mean the class of one script.

    The module of a Flower app is called `__main__` when the app runs as a script, and has another
    name when it is imported. Any other header is returned as it is.
    """
    (old_module, _, old_class), (module, _, new_class) = (
        str(selector).rpartition(":") for selector in (header.get("selector"), name)
    )
    versions, config = header.get("versions") or {}, header.get("config")
    if "flwr" not in versions or "__main__" not in (old_module, module) or old_class != new_class:
        return header
    renamed = {**header, "selector": name}
    if isinstance(config, Mapping) and isinstance(config.get("selectors"), Mapping):
        tables = {
            name if key == header["selector"] else key: options
            for key, options in config["selectors"].items()
        }
        renamed["config"] = {**config, "selectors": tables}
    return renamed


@dataclass(frozen=True)
class RoundRecord:
    """One line of the record: what was chosen, what came of it, what it cost.

    Attributes:
        round: Number of the round, from 0.
        selected: The chosen clients, in the order of choice.
        participated: Those whose update was aggregated, sorted.
        test_accuracy: Accuracy of the new model on the test data, in [0, 1]; NaN in regression.
        test_loss: Mean loss of the new model on the test data.
        learning_rate: The clients' learning rate in this round.
        probed: How many losses clients were asked for.
        refused: How many answers and updates were unusable numbers.
        bytes_down: Bytes sent to clients.
        bytes_up: Bytes received from clients.
        seconds: Duration of the round.
        why: The selector's reasons: a name -> one number per chosen client.
        details: What it says of the round as a whole: a name -> numbers. `known` and `losses` are
            the clients whose loss of the model before the round is known, and that loss; `told` the
            losses that came with the updates of those who participated; `tried`, outside the
            simulator, clients that trained for a trial and were not chosen. A line has them only if
            there are any.
        metrics: Further metrics of the new model on the test data; on Flower, all of the app's, as
            `train/NAME`, `evaluate/NAME` and `server/NAME`. A line has them only if there are any.
        memory_bytes: Bytes of what the federated optimiser remembers after the round. A line has
            it only if there are any.
        quarantined: Clients that were there and could not be chosen, after several faults in a
            row. A line has them only if there are any.
        server_round: Flower's number of the round, from 1. Only a line of a run on Flower has it.
        unmet: Rules that could not be met: `tag=value`, or `clients_per_round` -> how many clients
            are missing. A line has it only if there are any.
        clipped: Clients whose update was too long, and was scaled down. A line has them only if
            there are any; so it is for all that follow.
        refused_updates: Why -> the clients whose update was refused.
        capped: Clients that were not believed how many samples they have, on Flower.
        rolled_back: 1 where the model went bad, and the last good one was put back.
        missing: Why chosen clients did not take part: `dropped`, `failed`, `late` or `refused` ->
            clients, sorted. A line has it only if there are any.
        unreachable: How many of the clients that may be chosen could not be reached. A line has it
            only if there are any.
        duration: Simulated seconds that the round took; None without a simulated clock. A line has
            it, and the clock, only with one.
        clock: Simulated seconds since the start of the run, this round included.
    """

    round: int
    selected: list[int]
    participated: list[int]
    test_accuracy: float
    test_loss: float
    learning_rate: float
    probed: int
    refused: int
    bytes_down: int
    bytes_up: int
    seconds: float
    why: Mapping[str, list[float | None]] = field(default_factory=dict)
    metrics: Mapping[str, float | list[int] | list[float]] = field(default_factory=dict)
    memory_bytes: int = 0
    quarantined: list[int] = field(default_factory=list)
    server_round: int | None = None
    unmet: Mapping[str, int] = field(default_factory=dict)
    clipped: list[int] = field(default_factory=list)
    refused_updates: Mapping[str, list[int]] = field(default_factory=dict)
    capped: list[int] = field(default_factory=list)
    rolled_back: int = 0
    missing: Mapping[str, list[int]] = field(default_factory=dict)
    unreachable: int = 0
    duration: float | None = None
    clock: float | None = None
    details: Mapping[str, list[float | int | None]] = field(default_factory=dict)
