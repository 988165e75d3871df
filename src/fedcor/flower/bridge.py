"""An experiment of the simulator on Flower's simulation: the same partition, weights and streams.

Every virtual node trains with the simulator's engine, on its own part of the data (`apps.py`).
Messages, processes and aggregation are Flower's, so equal records show that the simulator's results
carry over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedcor.build import load_data, split_data
from fedcor.cluster.address import find_address
from fedcor.cluster.over_ray import RAY_ENVIRONMENT, connect_ray
from fedcor.errors import ConfigError, MissingExtraError, RunExistsError
from fedcor.experiments import Experiment
from fedcor.faults import Faults
from fedcor.flower.apps import check_optimiser, client_app, server_app
from fedcor.flower.wire import LOG
from fedcor.record import RoundRecord, has_run
from fedcor.tracking import GivenCallback

__all__ = ["run_on_flower", "simulate"]

# No process that we start calls home.
_SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    **RAY_ENVIRONMENT,
}


def run_on_flower(
    experiment: Experiment,
    seed: int,
    out: Path,
    *,
    resume: bool = False,
    on_round: Callable[[RoundRecord], None] | None = None,
    callbacks: Sequence[GivenCallback] = (),
    address: str | None = None,
) -> None:
    """Run `experiment` in the folder `out`, as `runner.run` does, with Flower as the engine.

    Args:
        experiment: What to run. Simulated faults are refused: on Flower they are real. So are
            simulated liars, simulated noise on losses, and an optimiser that corrects local steps.
        seed: Seed of everything that is drawn.
        out: Folder of the record and the checkpoint.
        resume: Whether a run that is already in `out` may be resumed.
        on_round: Called with the record of every finished round.
        callbacks: What else hears of the run; see `fedcor.tracking.Callback`.
        address: Of a Ray cluster that runs; None for `RAY_ADDRESS`, else for this machine.
    """
    if experiment.faults != Faults():
        allowed = "are simulated by fedcor's own engine only; on Flower they are real"
        raise ConfigError("faults", experiment.faults, allowed)
    if experiment.liars:
        allowed = "are simulated by fedcor's own engine only"
        raise ConfigError("liars", experiment.liars, allowed)
    if experiment.loss_noise:
        allowed = "is simulated by fedcor's own engine only; in your app on Flower, set it in "
        allowed += "answers_probes(loss_noise=...)"
        raise ConfigError("loss_noise", experiment.loss_noise, allowed)
    check_optimiser(experiment.build_optimiser())
    if find_spec("ray") is None:
        raise MissingExtraError("ray", "flower-sim")
    cluster = find_address("ray", address)
    if has_run(out) and not resume:
        raise RunExistsError(out)
    clients = experiment.clients or len(split_data(experiment, load_data(experiment), seed))
    simulate(
        server_app(experiment, seed, out, on_round, callbacks),
        client_app(experiment, seed),
        clients,
        cluster,
    )


def simulate(server: ServerApp, client: ClientApp, nodes: int, cluster: str | None = None) -> None:
    """Run both apps in Flower's simulation, with `nodes` virtual nodes. Logs only our warnings.

    Args:
        server: Runs in this process.
        client: Runs in processes of Ray, one per processor.
        nodes: How many virtual nodes.
        cluster: Address of a Ray cluster that runs; None for a Ray on this machine alone, which
            starts and ends with the simulation.
    """
    os.environ.update({key: value for key, value in _SILENT.items() if key not in os.environ})
    from flwr.simulation import run_simulation  # reads the environment when it is imported

    logging.getLogger("flwr").setLevel(logging.ERROR)
    LOG.setLevel(logging.WARNING)
    quiet = {
        "log_to_driver": False,
        "include_dashboard": False,
        "logging_level": "ERROR",
        "_node_ip_address": "127.0.0.1",  # else Ray connects to the outside to find its address
    }
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend: Any = {"init_args": quiet, "client_resources": resources}
    if cluster is not None:
        connect_ray(cluster)  # Flower uses the connection that there is
    try:
        run_simulation(server, client, num_supernodes=nodes, backend_config=backend)
    finally:
        if cluster is not None:
            import ray

            ray.shutdown()
