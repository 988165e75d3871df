"""What our strategy costs beside Flower's own FedAvg: as many clients per round, no questions.

    python benchmarks/flower_overhead.py                   100 virtual nodes on FMNIST, 5 per round
    python benchmarks/flower_overhead.py --rounds 2 --blocks 1 --preset digits

Both run in turn, in blocks of rounds, in the same processes of one simulation. Flower polls every
0.1 seconds, which decides how long a round takes. So the median round is compared, and beside it
the time that the strategy's own code takes: configure_train and aggregate_train, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedcor.flower import select_with
from fedcor.flower.bridge import client_app, simulate, to_record
from fedcor.selectors.baselines import Random
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment


class Timed:
    """Seconds of each round, and of the strategy's own code in it."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.code: list[float] = []

    def watch(self, strategy: Strategy) -> Strategy:
        """`strategy`, whose verbs are timed."""

        def timed(work: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                started = time.perf_counter()
                done = work(*args, **options)
                seconds = time.perf_counter() - started
                if first:
                    self.code.append(seconds)
                else:
                    self.code[-1] += seconds
                return done

            return call

        strategy.configure_train = timed(strategy.configure_train, first=True)  # type: ignore[method-assign]
        strategy.aggregate_train = timed(strategy.aggregate_train, first=False)  # type: ignore[method-assign]
        return strategy

    def tick(self) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """An evaluate_fn that notes when each round ended."""
        last = [0.0]

        def evaluate(server_round: int, _arrays: ArrayRecord) -> None:
            now = time.perf_counter()
            # The first round of a block waits for nodes and asks for their names.
            if server_round > 1:
                self.rounds.append(now - last[0])
            last[0] = now

        return evaluate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="fmnist-2spc")
    parser.add_argument("--rounds", type=int, default=20, help="per block")
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    experiment = load_experiment(options.preset, selector="random")
    nodes, chosen = experiment.clients, experiment.clients_per_round
    times = {"Flower's FedAvg": Timed(), "ours around it": Timed()}
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001
        simulation = build_simulation(experiment, 1)
        while len(list(grid.get_node_ids())) < nodes:
            time.sleep(0.1)
        for _ in range(options.blocks):
            for name, timed in times.items():
                inner = FedAvg(
                    fraction_train=chosen / nodes, fraction_evaluate=0.0, min_train_nodes=chosen
                )
                strategy: Strategy = inner
                if name != "Flower's FedAvg":
                    strategy = select_with(inner, Random(chosen), wait_for=nodes)
                start = to_record(simulation.engine.initial_model)
                config = ConfigRecord({"lr": simulation.learning_rate.at(0)})
                timed.watch(strategy).start(
                    grid, start, options.rounds, train_config=config, evaluate_fn=timed.tick()
                )

    simulate(app, client_app(experiment, 1), nodes)
    alone, ours = (statistics.median(timed.rounds) for timed in times.values())
    own = {name: statistics.median(timed.code[1:]) for name, timed in times.items()}
    result = {
        "median round, ours / Flower's": round(ours / alone, 4),
        "seconds per round": {"Flower's FedAvg": round(alone, 4), "ours around it": round(ours, 4)},
        "milliseconds of the strategy's own code": {
            name: round(1e3 * s, 2) for name, s in own.items()
        },
        "own code, ours - Flower's, share of a round": round(
            (own["ours around it"] - own["Flower's FedAvg"]) / alone, 4
        ),
        "rounds each": len(times["ours around it"].rounds),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
