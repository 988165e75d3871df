"""The server: an ordinary Flower ServerApp, whose strategy is wrapped by `select_with`."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcor import build_selector
from fedcor.flower import select_with
from fedcor_example import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    dataset, name, folder = (
        task.text(config, key) for key in ("dataset", "selector", "checkpoint")
    )
    torch.manual_seed(int(task.number(config, "seed", 0)))
    model = task.network(dataset)
    x, y = task.test_data(dataset)

    def evaluate(_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.evaluate(model, x, y)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    own = {}
    if name == "fedcor":
        own = {key: int(task.number(config, key, 1)) for key in ("warmup", "interval")}
    strategy = select_with(
        FedAvg(fraction_evaluate=0.0),
        build_selector(name, int(task.number(config, "clients-per-round", 1)), own),
        checkpoint=folder or None,
        seed=int(task.number(config, "seed", 0)),
        probe_timeout=task.number(config, "probe-timeout", 0.1),
        identity=task.text(config, "identity"),
    )
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(task.number(config, "rounds", 1)),
        timeout=task.number(config, "timeout", 0.1),
        evaluate_fn=evaluate,
    )
