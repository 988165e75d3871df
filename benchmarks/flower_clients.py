"""A Flower ClientApp whose clients train with a plain PyTorch loop, for `flower_rounds.py`.

It is a module of its own because the processes of the simulation import it.
"""

from __future__ import annotations

import functools

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.replay import PlainLoop, Round
from fedcor.flower.bridge import to_model, to_record
from fedcor.flower.protocol import RATE, STEPS, answers_probes
from fedcor.simulation.build import build_simulation, use_one_thread
from fedcor.simulation.engine.models import build_model
from fedcor.simulation.experiment_files import load_experiment


@functools.lru_cache(maxsize=1)
def _plain(preset: str, seed: int) -> PlainLoop:
    """The data and the loop, made once per process of the simulation."""
    use_one_thread()
    engine = build_simulation(load_experiment(preset, selector="random"), seed).engine
    return PlainLoop(engine, build_model("mlp", (1, 28, 28), 10, seed), seed)


def plain_client_app(preset: str, seed: int) -> ClientApp:
    """Clients with a plain PyTorch loop."""

    def size(context: Context) -> int:
        return len(_plain(preset, seed).rows(_client(context)))

    app = ClientApp(mods=[answers_probes(examples=size)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        plain, client = _plain(preset, seed), _client(context)
        model = to_model(message.content["arrays"])
        config = message.content.config_records["config"]
        number, rate = int(config["server-round"]) - 1, float(config["lr"])
        result = plain.train(model, Round(number, [client], 0, rate, 0.0, 0.0, 0.0, model))
        metrics = {
            "loss": plain.loss_of(client, model),
            "num-examples": size(context),
            STEPS: plain.local_steps,
            RATE: rate,
        }
        content = RecordDict({"arrays": to_record(result), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        plain, client = _plain(preset, seed), _client(context)
        loss = plain.loss_of(client, to_model(message.content["arrays"]))
        metrics = MetricRecord({"loss": loss, "num-examples": size(context)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def _client(context: Context) -> int:
    return int(context.node_config["partition-id"])
