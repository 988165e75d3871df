"""The nodes' side."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn


def answers_fedcor(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """`answers_probes()`, but stock runs do without fedcor. Your app needs no such function."""
    if context.run_config["selector"] == "stock":
        return call_next(message, context)
    from fedcor.flower import answers_probes

    return answers_probes()(message, context, call_next)


app = ClientApp(mods=[answers_fedcor])


def _data(context: Context):  # type: ignore[no-untyped-def]
    node, config = context.node_config, context.run_config
    return load_data(
        int(node["partition-id"]),
        int(node["num-partitions"]),
        float(config["alpha"]),
        int(config["batch-size"]),
    )


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model on this node's data."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data, _ = _data(context)
    rate = message.content["config"]["lr"]
    loss = train_fn(model, data, int(context.run_config["local-epochs"]), rate)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model on this node's validation data."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, data = _data(context)
    loss, accuracy = test_fn(model, data)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data.dataset)}
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
