"""An experiment of the simulator on Flower's simulation: the same partition, weights and streams.

Every virtual node trains with the simulator's engine, on its own part of the data. Messages,
processes and aggregation are Flower's, so equal records show that the simulator's results carry
over.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcor.core import types
from fedcor.core.errors import ConfigError, FedcorError, MissingExtraError, RunExistsError
from fedcor.core.types import (
    Optimiser,
    Population,
    Selector,
    State,
    optimiser_traits,
    selector_traits,
)
from fedcor.flower.optimiser_strategy import Delivered, OptimiserStrategy
from fedcor.flower.protocol import (
    LOG,
    RATE,
    RMS_LOSS,
    STEPS,
    Tag,
    answers_probes,
    flower_round,
    own_round,
)
from fedcor.flower.settings import SelectionSettings
from fedcor.flower.strategy import SelectingStrategy
from fedcor.rounds.aggregation import init_optimiser
from fedcor.rounds.model_arrays import Arrays
from fedcor.rounds.record_line import RoundRecord
from fedcor.rounds.rules.declaration import Rules
from fedcor.runs.cluster.address import find_address
from fedcor.runs.cluster.retry import RAY_ENVIRONMENT, connect_ray
from fedcor.runs.record import has_run
from fedcor.runs.tracking.callback import GivenCallback
from fedcor.simulation.build import (
    build_simulation,
    experiment_header,
    load_data,
    split_data,
    use_one_thread,
)
from fedcor.simulation.coerce import OwnClients
from fedcor.simulation.experiment import Experiment
from fedcor.simulation.faults import Faults
from fedcor.simulation.loop import Simulation
from fedcor.simulation.server_step import next_model, parameters_of

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
            Byzantine clients, noise on losses, and an optimiser that corrects local steps.
        seed: Seed of everything that is drawn.
        out: Folder of the record and the checkpoint.
        resume: Whether a run that is already in `out` may be resumed.
        on_round: Called with the record of every finished round.
        callbacks: Called after every round; see `fedcor.runs.tracking.callback.Callback`.
        address: Of a Ray cluster that runs; None for `RAY_ADDRESS`, else for this machine.
    """
    if experiment.faults != Faults():
        allowed = "are simulated by fedcor's own engine only; on Flower they are real"
        raise ConfigError("faults", experiment.faults, allowed)
    if experiment.byzantine:
        allowed = "are simulated by fedcor's own engine only"
        raise ConfigError("byzantine", experiment.byzantine, allowed)
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


def server_app(
    experiment: Experiment,
    seed: int,
    out: Path,
    on_round: Callable[[RoundRecord], None] | None = None,
    callbacks: Sequence[GivenCallback] = (),
) -> ServerApp:
    """The server: selects, aggregates and tests as the experiment says."""
    # Built here, not in the thread that Flower gives to the server: while Flower's simulation
    # starts in the main thread, imports in another one may fail, as sklearn's were seen to.
    app, simulation = ServerApp(), _simulation(_Held(experiment), seed)

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        use_one_thread()
        settings = SelectionSettings(
            checkpoint=out,
            seed=seed,
            wait_for=simulation.engine.population.count,
            probe_timeout=600.0,
            on_round=on_round,
            callbacks=callbacks,
            preflight=False,  # the simulator asks no client for a check
            defence=experiment.defence,
            **_rules(experiment),
        )
        strategy = _BridgedStrategy(
            ExperimentStrategy(simulation),
            simulation.selector,
            settings,
            experiment_header(experiment, seed, "flower"),
        )

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:  # noqa: ARG001
            scores = simulation.engine.test(to_model(arrays))
            return MetricRecord({"accuracy": scores.accuracy, "loss": scores.loss})

        initial = to_record(simulation.engine.initial_model)
        strategy.start(grid, initial, experiment.rounds, evaluate_fn=evaluate)

    return app


def client_app(experiment: Experiment, seed: int) -> ClientApp:
    """The clients: node `partition-id` trains and evaluates as that client of the simulator."""
    held = _Held(experiment)

    def examples(context: Context) -> int:
        return _size(_simulation(held, seed), _client(context))

    def tags(context: Context) -> dict[str, Tag]:
        return {
            tag: value
            for tag, values in experiment.tags.items()
            for value, clients in values.items()
            if _client(context) in clients
        }

    app = ClientApp(mods=[answers_probes(examples=examples, tags=tags)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        simulation, client = _simulation(held, seed), _client(context)
        model = to_model(message.content["arrays"])
        config = message.content.config_records["config"]
        # A client is given Flower's number over the whole run, so nothing was finished before it.
        round = own_round(cast(int, config["server-round"]), finished=0)
        rate = cast(float, config["lr"])
        try:
            (result,) = simulation.engine.train(model, [client], round, rate)
        except FedcorError as error:
            # The server's log says which client it was, and Flower's number of the round.
            where = f"round {round}, client {client}: "
            raise FedcorError(str(error).removeprefix(where)) from error
        weighted = optimiser_traits(simulation.optimiser).weighted
        metrics = MetricRecord(
            {
                "loss": _loss(simulation, model, client),
                "num-examples": _size(simulation, client) if weighted else 1,
                STEPS: simulation.engine.local_training.local_steps,
                RATE: rate,
            }
        )
        if selector_traits(simulation.selector).reads_rms_losses:
            metrics[RMS_LOSS] = float(simulation.engine.rms_losses(model, np.array([client]))[0])
        return Message(
            RecordDict({"arrays": to_record(result), "metrics": metrics}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        simulation, client = _simulation(held, seed), _client(context)
        loss = _loss(simulation, to_model(message.content["arrays"]), client)
        metrics = MetricRecord({"loss": loss, "num-examples": _size(simulation, client)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@functools.lru_cache(maxsize=1)
def _simulation(experiment: _Held, seed: int) -> Simulation:
    """The whole experiment, built once per process; a virtual node uses its part of the data."""
    use_one_thread()
    return build_simulation(experiment.value, seed)


class _Held:
    """An experiment as a key of a cache: two with the same settings and data are the same.

    Clients that load their data are those of the same object, whatever they say of themselves. The
    object lives as long as this one, so no other has its id. In a worker, this is a copy that was
    sent with a message; it keeps the id of the original.
    """

    def __init__(self, value: Experiment) -> None:
        clients = value.data.clients if isinstance(value.data, OwnClients) else None
        self.value, self._key = value, (repr(value.describe()), id(clients))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _rules(experiment: Experiment) -> dict[str, Any]:
    """The experiment's rules as settings on Flower, which has names and counts rounds from 1."""
    rules: Rules = experiment.rules
    rule, schedule = rules.eligible, rules.clients_per_round

    def eligible(name: str, tags: Mapping[str, Any]) -> bool:
        assert callable(rule)
        client = int(name.removeprefix("partition-"))
        return rule(client, {tag: tags[tag] for tag in experiment.tags if tag in tags})

    def clients_per_round(round: int) -> int:
        assert callable(schedule)
        return schedule(own_round(round, finished=0))

    shifted: Any = clients_per_round if callable(schedule) else None
    if isinstance(schedule, Mapping):
        shifted = {flower_round(round): count for round, count in schedule.items()}
    return {
        "eligible": eligible if callable(rule) else rule,
        "at_least": rules.at_least,
        "at_most": rules.at_most,
        "clients_per_round": shifted,
    }


class _BridgedStrategy(SelectingStrategy):
    """Its record has the header of the simulator's, so that the two can be compared."""

    def __init__(
        self,
        strategy: FedAvg,
        selector: Selector,
        settings: SelectionSettings,
        header: dict[str, Any],
    ) -> None:
        super().__init__(strategy, selector, settings)
        self._header = header

    def header(self, num_rounds: int) -> dict[str, Any]:  # noqa: ARG002
        """The experiment's."""
        return self._header


class ExperimentStrategy(OptimiserStrategy):
    """The experiment's optimiser and learning rates as a Flower strategy.

    It takes the simulator's own step: another order of the sums would differ in the last bits,
    which the fit of a Gaussian process may amplify (docs/how-to/flower.md).

    Args:
        simulation: Whose optimiser and learning rates.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._trained = simulation.engine.vector.trained  # P; float buffers follow
        self._rate = simulation.learning_rate
        super().__init__(simulation.optimiser, fraction_evaluate=0.0)

    def _accept(self, given: Optimiser | str) -> Optimiser:
        """Its clients train with the simulator's engine, which knows a proximal term."""
        assert not isinstance(given, str)
        check_optimiser(given)
        return given

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As FedAvg, with the round's learning rate in the configuration."""
        config["lr"] = self._rate.at(own_round(server_round, finished=0))
        return super().configure_train(server_round, arrays, config, grid)

    def first_state(self, population: Population, model: Arrays) -> State:
        """The optimiser's state before the first round, as in the simulator."""
        parameters = parameters_of(torch.from_numpy(model["model"]), self._trained)
        return init_optimiser(self.optimiser, population, parameters)

    def next_model(
        self, state: State, model: Arrays, delivered: Delivered
    ) -> tuple[dict[str, types.Array], State]:
        """The simulator's step."""
        after, state = next_model(
            self.optimiser,
            state,
            torch.from_numpy(model["model"]),
            torch.stack([torch.from_numpy(one["model"]) for one in delivered.models()]),
            self._trained,
            round=delivered.round,
            clients=delivered.clients,
            weights=delivered.weights,
            steps=delivered.training.steps,
            learning_rate=delivered.training.learning_rate,
            number=flower_round(delivered.round),
        )
        return {"model": after.cpu().numpy()}, state


def check_optimiser(optimiser: Optimiser) -> None:
    """Refuse one that corrects local steps: no message carries the corrections to the clients."""
    if callable(getattr(optimiser, "corrections", None)):
        allowed = "corrects the local steps of clients, which only fedcor's own engine can do"
        raise ConfigError("optimiser", optimiser, allowed, "run it with the simulator")


def _client(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _size(simulation: Simulation, client: int) -> int:
    return int(simulation.engine.population.sizes[client])


def _loss(simulation: Simulation, model: torch.Tensor, client: int) -> float:
    return float(simulation.engine.losses(model, np.array([client]))[0])


def to_model(arrays: Any) -> torch.Tensor:
    """The engine's flat vector of a record."""
    return torch.from_numpy(arrays["model"].numpy().copy())


def to_record(model: torch.Tensor) -> ArrayRecord:
    """A record of one array: the engine's flat vector."""
    return ArrayRecord({"model": Array(model.cpu().numpy())})
