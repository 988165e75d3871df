"""Clients that grow trees, in the part of XGBoost's JSON format that Flower's FedXgbBagging reads.

A tree is one number. A model predicts the sum of its trees, and each client wants its own number:
boosting, with a closed form.
"""

from __future__ import annotations

import json

import numpy as np
from flower_grid import CENTRES, sizes
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcor.flower import answers_probes


def as_json(values: list[float], parallel: int = 1) -> bytes:
    """A model with these trees."""
    model = {
        "gbtree_model_param": {
            "num_trees": str(len(values)),
            "num_parallel_tree": str(parallel),
        },
        "iteration_indptr": list(range(len(values) + 1)),
        "tree_info": [0] * len(values),
        "trees": [{"id": i, "value": value} for i, value in enumerate(values)],
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def trees(arrays: ArrayRecord) -> list[float]:
    """The numbers of a model's trees, in order."""
    text = arrays["0"].numpy().tobytes()
    if not text:
        return []
    model = json.loads(text)["learner"]["gradient_booster"]["model"]
    assert [tree["id"] for tree in model["trees"]] == list(range(len(model["trees"])))
    return [tree["value"] for tree in model["trees"]]


def no_trees() -> ArrayRecord:
    """The initial model, as in Flower's own examples."""
    return bytes_record(b"")


def bytes_record(text: bytes) -> ArrayRecord:
    return ArrayRecord({"0": Array(np.frombuffer(text, dtype=np.uint8))})


def wanted(partition: int) -> float:
    return float(CENTRES[partition][0])


def tree_loss(partition: int, arrays: ArrayRecord) -> float:
    return 0.5 * (sum(trees(arrays)) - wanted(partition)) ** 2


def tree_score(_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": float(np.mean([tree_loss(k, arrays) for k in range(8)]))})


def trees_app() -> ClientApp:
    app = ClientApp(mods=[answers_probes()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        k, arrays = int(context.node_config["partition-id"]), message.content["arrays"]
        tree = 0.1 * (wanted(k) - sum(trees(arrays)))
        metrics = MetricRecord({"loss": tree_loss(k, arrays), "num-examples": sizes(k)})
        content = {"arrays": bytes_record(as_json([tree])), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        k = int(context.node_config["partition-id"])
        value = tree_loss(k, message.content["arrays"])
        metrics = MetricRecord({"loss": value, "num-examples": sizes(k)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app
