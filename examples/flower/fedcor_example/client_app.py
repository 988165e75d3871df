"""The client: an ordinary Flower ClientApp, with one mod by which `evaluate` answers fedcor."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedcor.flower import answers_probes
from fedcor_example import task


def _mine(context: Context) -> tuple[Tensor, Tensor]:
    node = context.node_config
    return task.client_data(
        context.run_config, int(node["partition-id"]), int(node["num-partitions"])
    )


def _received(message: Message, context: Context) -> nn.Module:
    model = task.network(task.text(context.run_config, "dataset"))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


app = ClientApp(mods=[answers_probes(examples=lambda context: len(_mine(context)[0]))])


@app.train()
def train(message: Message, context: Context) -> Message:
    model, (x, y), config = _received(message, context), _mine(context), context.run_config
    loss, _ = task.evaluate(model, x, y)
    task.train(
        model,
        x,
        y,
        epochs=int(config["local-epochs"]),
        batch_size=int(config["batch-size"]),
        rate=float(config["learning-rate"]),
        seed=int(message.content["config"]["server-round"]),
    )
    metrics = MetricRecord({"loss": loss, "num-examples": len(x)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    x, y = _mine(context)
    loss, accuracy = task.evaluate(_received(message, context), x, y)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
