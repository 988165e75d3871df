"""A round of the paper's CNN on CIFAR-10 2SPC: 100 clients, 5 per round, 40 batches of 50 each."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import Result, best, check, flops_per_second, multiply, skipped
from benchmarks.plain_training import train_plainly
from benchmarks.replay import PlainLoop, our_rounds, replay
from fedcor.core.errors import FedcorError
from fedcor.data.datasets import Dataset
from fedcor.simulation.build import build_simulation
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import build_model
from fedcor.simulation.engine.train import Assignment, LocalTraining
from fedcor.simulation.experiment_files import load_experiment

# Products and sums of one image, by layer: output pixels x output channels x inputs of each.
LAYERS = (30 * 30 * 32 * 27, 13 * 13 * 64 * 288, 4 * 4 * 64 * 576, 1024 * 64, 64 * 10)
FORWARD = 2 * sum(LAYERS)
# Forward, weight gradient, and the input gradient too but for the first layer.
TRAINING = 3 * FORWARD - 2 * LAYERS[0]
PRESET, SEED = "cifar10-2spc", 1
LIMIT, LOOP = "CIFAR-10, random round / its matrix products", "CIFAR-10, plain PyTorch loop / ours"


def results(quick: bool) -> list[Result]:
    """Rows of the table."""
    rows = _layouts(1 if quick else 5)
    return rows if quick else [*_rounds(), *rows]


def _rounds() -> list[Result]:
    try:
        simulation = build_simulation(load_experiment(PRESET, selector="random"), SEED)
    except FedcorError as error:
        why = str(error).splitlines()[0]
        return [skipped(LIMIT, "at most 1.5", why), skipped(LOOP, "above 1", why)]
    product = math.inf

    def also_multiply() -> None:
        nonlocal product
        product = min(product, *best(3, multiply()))

    ours = our_rounds(simulation, 3, also_multiply)
    plain = PlainLoop(simulation.engine, build_model("cnn", (3, 32, 32), 10, SEED), SEED)
    alone = min(replay(plain, ours[:2]))
    rate, whole = flops_per_second(product), min(round.seconds for round in ours)
    limit = 10_000 * (TRAINING + FORWARD) / rate
    return [
        Result(
            LIMIT,
            whole / limit,
            "at most 1.5",
            f"{whole:.2f} s against {limit:.2f} s at {rate / 1e9:.0f} GFLOP/s",
        ),
        Result(LOOP, alone / whole, "above 1", f"{alone:.2f} s against {whole:.2f} s"),
    ]


def _layouts(repeats: int) -> list[Result]:
    """Why convolutions are trained client by client in channels-last layout."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((250, 3, 32, 32)).astype(np.float32), rng.integers(10, size=250)
    data = Dataset(name="invented", train_x=x, train_y=y, test_x=x[:50], test_y=y[:50], classes=10)
    training = LocalTraining(50, 2, 0.01, 3e-4)
    module = build_model("cnn", (3, 32, 32), 10, 1)
    plain = copy.deepcopy(module)
    engine = Engine(data, np.split(np.arange(250), 5), module, training, 1)
    xs, ys, rows = engine.store.training(range(5))
    xs, work = xs.contiguous(), [Assignment(k, 0, 1, rows[k], 2) for k in range(5)]
    start = engine.initial_model

    def ours() -> torch.Tensor:
        return engine.train(start, range(5), 0, 0.01)

    def default() -> torch.Tensor:
        return train_plainly(plain, start, work, xs, ys, training=training)

    check("CNN", ours(), default(), 1e-4)
    fast, slow, vmapped = best(
        repeats,
        ours,
        default,
        lambda: vmap_steps(plain, xs.view(5, 50, 3, 32, 32), ys.view(5, 50), 2),
    )
    detail = f"{{:.0f}} against {fast / 500 * 1e6:.0f} us per image"
    return [
        Result(
            "CNN training, default layout / ours, channels last",
            slow / fast,
            "above 1",
            detail.format(slow / 500 * 1e6),
        ),
        Result(
            "CNN training, vmap over clients / ours, client by client",
            vmapped / fast,
            "above 1",
            detail.format(vmapped / 500 * 1e6),
        ),
    ]


def vmap_steps(module: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    """What the engine does not do: all clients' gradients by torch.func.vmap."""
    parameters = {
        k: v.detach().expand(len(x), *v.shape).clone() for k, v in module.named_parameters()
    }

    def loss(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(module, p, (x,)), y)

    gradient = torch.func.vmap(torch.func.grad(loss))
    for _ in range(steps):
        gradients = gradient(parameters, x, y)
        for name, parameter in parameters.items():
            parameter.sub_(gradients[name], alpha=0.01)
