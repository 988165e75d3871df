"""How a round's cost grows: with the clients N, the clients per round C, d, and the model.

`results` has the rows of the table: N at a fixed C. `python -m benchmarks.growth` measures all four
and draws them (docs/results/speed/growth.svg).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Result, machine
from benchmarks.replay import our_rounds
from fedcor.core.types import Selector
from fedcor.data.datasets import Dataset
from fedcor.optimisers.averaging import FedAvg
from fedcor.selectors.baselines import Random
from fedcor.selectors.fedcor import FedCor
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import build_model
from fedcor.simulation.engine.train import LocalTraining
from fedcor.simulation.faults import Faults
from fedcor.simulation.loop import Simulation

SAMPLES, FEATURES, CLASSES = 30, 64, 10  # of a client; of a sample
DOCS = Path(__file__).parents[1] / "docs" / "results" / "speed"


def simulation(
    clients: int, selector: Selector, hidden: Sequence[int] = (64, 30), test: int = 1000
) -> Simulation:
    """A federation of invented data: 20 batches of 30 samples per client and round."""
    rng = np.random.default_rng(clients)
    x = rng.standard_normal((clients * SAMPLES, FEATURES)).astype(np.float32)
    y = rng.integers(CLASSES, size=len(x))
    test = min(test, len(x))
    data = Dataset(
        name="invented", train_x=x, train_y=y, test_x=x[:test], test_y=y[:test], classes=CLASSES
    )
    module = build_model("mlp", (FEATURES,), CLASSES, 1, {"hidden": list(hidden)})
    parts = np.split(np.arange(len(x)), clients)
    engine = Engine(data, parts, module, LocalTraining(30, 20, 0.01), 1)
    return Simulation(
        engine=engine,
        selector=selector,
        optimiser=FedAvg(),
        faults=Faults(),
        learning_rate=0.01,
        seed=1,
    )


def fedcor(chosen: int, dimension: int = 15) -> FedCor:
    """FedCor with a short warm-up, and refits every fourth round."""
    return FedCor(chosen, warmup=2, interval=4, dimension=dimension)


def seconds(work: Simulation, rounds: int) -> tuple[float, float]:
    """The best ordinary round and the best round with questions to all clients; NaN if none."""
    found = our_rounds(work, rounds)[2:]
    usual, asking = ([r.seconds for r in found if bool(r.evaluations) == q] for q in (False, True))
    return min(usual), min(asking, default=float("nan"))


def results(quick: bool) -> list[Result]:
    """Rows of the table: from N/10 to N clients, twice, with 5 per round."""
    sizes = (20, 200) if quick else (100, 1_000, 10_000)
    rounds = 6 if quick else 13
    random = [seconds(simulation(n, Random(5)), rounds)[0] for n in sizes]
    asked = [seconds(simulation(n, fedcor(5)), rounds) for n in sizes]
    usual, asking = [s for s, _ in asked], [s for _, s in asked]
    clients = " to ".join(f"{n:,}" for n in (sizes[0], sizes[-1]))
    times = sizes[-1] // sizes[0]
    return [
        _row(f"random round, {clients} clients, 5 per round", random, "at most 1.5"),
        _row(f"FedCor round without questions, {clients} clients", usual, ""),
        _row(f"FedCor round with questions to all, {clients} clients", asking, f"at most {times}"),
    ]


def _row(what: str, series: Sequence[float], goal: str) -> Result:
    detail = ", ".join(f"{1e3 * s:.1f}" for s in series) + " ms"
    return Result(what, series[-1] / series[0], goal, detail)


def measure_growth() -> dict[str, Any]:
    """Milliseconds of a round along each axis; everything else is N = 1000, C = 5, d = 15."""

    def along(values: Sequence[int], make: Callable[[int], Simulation]) -> list[Any]:
        pairs = [seconds(make(value), 13) for value in values]
        return [
            [value, *(None if np.isnan(s) else 1e3 * s for s in pair)]
            for value, pair in zip(values, pairs, strict=True)
        ]

    sizes, widths = (100, 300, 1_000, 3_000, 10_000), (32, 64, 128, 256, 512, 1024)
    chosen, dimensions = (1, 2, 5, 10, 20, 50), (2, 5, 10, 15, 30, 60)
    return {
        "machine": machine(),
        "clients": {
            "random": along(sizes, lambda n: simulation(n, Random(5))),
            "fedcor": along(sizes, lambda n: simulation(n, fedcor(5))),
        },
        "clients per round": {
            "random": along(chosen, lambda c: simulation(1000, Random(c))),
            "fedcor": along(chosen, lambda c: simulation(1000, fedcor(c))),
        },
        "dimension": {"fedcor": along(dimensions, lambda d: simulation(1000, fedcor(5, d)))},
        "width of the hidden layer": {
            "random": along(widths, lambda w: simulation(1000, Random(5), (w,))),
            "fedcor": along(widths, lambda w: simulation(1000, fedcor(5), (w,))),
        },
    }


def draw(growth: dict[str, Any], path: Path) -> None:
    """One panel per axis, both scales logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    matplotlib.rcParams["svg.hashsalt"] = "growth"
    axes_of = {key: value for key, value in growth.items() if key != "machine"}
    figure, panels = pyplot.subplots(1, len(axes_of), figsize=(13, 3.4), sharey=True)
    for panel, (axis, series) in zip(panels, axes_of.items(), strict=True):
        for name, points in series.items():
            x, usual = [p[0] for p in points], [p[1] for p in points]
            colour = "C0" if name == "random" else "C1"
            panel.loglog(x, usual, "o-", color=colour, label=f"{name}, ordinary round")
            if name == "fedcor":
                panel.loglog(
                    x, [p[2] for p in points], "s--", color=colour, label="fedcor, asks all"
                )
        panel.set_xticks(x, [f"{value:,}" for value in x])
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.set_xlabel(axis)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("ms per round")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def slopes(growth: dict[str, Any]) -> dict[str, float]:
    """The exponent of each curve between its last two points."""
    found = {}
    for axis, series in growth.items():
        if axis == "machine":
            continue
        for name, points in series.items():
            for column, kind in ((1, "ordinary"), (2, "asking")):
                (x0, x1), (y0, y1) = ([p[i] for p in points[-2:]] for i in (0, column))
                if y0 and y1:
                    found[f"{axis}, {name}, {kind}"] = round(
                        float(np.log(y1 / y0) / np.log(x1 / x0)), 2
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    DOCS.mkdir(parents=True, exist_ok=True)
    file = DOCS / "growth.json"
    if not options.draw:
        file.write_text(json.dumps(measure_growth(), indent=1) + "\n", encoding="utf-8")
    growth = json.loads(file.read_text(encoding="utf-8"))
    draw(growth, DOCS / "growth.svg")
    print(json.dumps(slopes(growth), indent=2))


if __name__ == "__main__":
    main()
