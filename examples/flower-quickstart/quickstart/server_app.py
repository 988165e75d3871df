"""The server's side."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    config = context.run_config
    torch.manual_seed(0)
    strategy = FedAvg(fraction_train=float(config["fraction-train"]))

    # Stock runs do without fedcor. In your app, import it at the top, and call it without `if`.
    if config["selector"] != "stock":
        from fedcor.flower import select_with

        strategy = select_with(
            strategy,
            None if config["selector"] == "default" else config["selector"],
            clients_per_round=config["clients-per-round"],
            checkpoint=config["checkpoint"] or None,
        )

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=int(config["rounds"]),
        evaluate_fn=global_evaluate,
    )


def global_evaluate(_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the model on the server's data."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(model, load_test_data())
    return MetricRecord({"accuracy": accuracy, "loss": loss})
