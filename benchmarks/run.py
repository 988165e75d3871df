"""Speed, as ratios to something measured in the same run: the machine's own matrix product, a plain
implementation, a dense form.

    python benchmarks/run.py            every measurement; a few minutes
    python benchmarks/run.py --quick    a test of this file: small sizes, too few repeats to trust
    python benchmarks/run.py --json     the same as JSON

Everything runs in one thread. What is compared is measured in turn, and the best of several repeats
is taken, since machines are shared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedcor.build import build_simulation
from fedcor.data import Dataset
from fedcor.engine import Engine, LocalTraining, build_model
from fedcor.engine.models import ModelVector
from fedcor.engine.plain import train_plainly
from fedcor.engine.train import Assignment
from fedcor.experiments import load_experiment
from fedcor.gp import Samples, fit, select
from fedcor.optimisers import FedRecall
from fedcor.selectors.matching import match
from fedcor.types import Delivery, Population


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    repeats: int  # of what takes milliseconds
    repeats_of_long: int  # of what takes tenths of a second
    large: int  # clients of the large problems; the small ones have a tenth
    rounds: int  # of the whole runs


FULL = Effort(repeats=16, repeats_of_long=7, large=100_000, rounds=500)
QUICK = Effort(repeats=1, repeats_of_long=1, large=2_000, rounds=2)


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    what: str
    ratio: float
    goal: str
    detail: str


def best(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Seconds of each: the best of `repeats`, in turn. The first of several does not count."""
    seconds = [float("inf")] * len(works)
    for repeat in range(repeats):
        for i, work in enumerate(works):
            started = time.perf_counter()
            work()
            if repeat or repeats == 1:
                seconds[i] = min(seconds[i], time.perf_counter() - started)
    return seconds


def fmnist_round(repeats: int) -> list[Result]:
    """One FMNIST 2SPC random round, its batched training, and the losses of all clients."""
    engine = build_simulation(load_experiment("fmnist-2spc", selector="random"), 1).engine
    clients, model = [3, 14, 15, 92, 65], engine.initial_model
    x, y, rows = engine.store.training(clients)
    work = [Assignment(k, 3, 1, own, 20) for k, own in zip(clients, rows, strict=True)]
    square = torch.randn(2048, 2048)
    everyone = np.arange(100)

    def one_round() -> None:
        results = engine.train(model, clients, 3, 0.005)
        engine.test(model + torch.full((5,), 0.2) @ (results - model))

    product, whole, stacked, plain, losses, loop = best(
        repeats,
        lambda: square @ square,
        one_round,
        lambda: engine.train(model, clients, 3, 0.005),
        lambda: train_plainly(engine.module, model, work, x, y, engine.local_training),
        lambda: engine.losses(model, everyone),
        lambda: [engine.losses(model, everyone[k : k + 1]) for k in everyone],
    )
    rate = 2 * 2048**3 / product  # operations per second of this machine, now
    first, rest = 784 * 64, 64 * 30 + 30 * 10
    # Training: forward and weight gradient, and the input gradient too but for the first layer.
    # Evaluation: forward alone.
    training = 5 * 20 * 64 * (4 * first + 6 * rest)
    evaluation = 10_000 * 2 * (first + rest)
    ideal, ideal_losses = (training + evaluation) / rate, 60_000 * 2 * (first + rest) / rate
    return [
        Result(
            "FMNIST random round / its arithmetic at matrix-product speed",
            whole / ideal,
            "at most 3",
            f"{whole * 1e3:.1f} ms against {ideal * 1e3:.1f} ms at {rate / 1e9:.0f} GFLOP/s",
        ),
        Result(
            "plain per-client loop / batched training, MLP",
            plain / stacked,
            "at least 2.5",
            f"{plain * 1e3:.1f} ms against {stacked * 1e3:.1f} ms for 5 clients x 20 batches",
        ),
        Result(
            "losses of 100 clients / their arithmetic at matrix-product speed",
            losses / ideal_losses,
            "",
            f"{losses * 1e3:.0f} ms against {ideal_losses * 1e3:.0f} ms; "
            f"asked one by one {loop * 1e3:.0f} ms",
        ),
    ]


def cnn_layouts(repeats: int) -> list[Result]:
    """Why convolutions are trained client by client in channels-last layout."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((250, 3, 32, 32)).astype(np.float32), rng.integers(10, size=250)
    data = Dataset("invented", x, y, x[:50], y[:50], 10)
    training = LocalTraining(50, 2, 0.01, 3e-4)
    module = build_model("cnn", (3, 32, 32), 10, 1)
    plain = copy.deepcopy(module)
    engine = Engine(data, np.split(np.arange(250), 5), module, training, 1)
    work = [Assignment(k, 0, 1, np.arange(50 * k, 50 * k + 50), 2) for k in range(5)]
    xs, ys = torch.from_numpy(x), torch.from_numpy(y)

    fast, default, vmapped = best(
        repeats,
        lambda: engine.train(engine.initial_model, range(5), 0, 0.01),
        lambda: train_plainly(plain, engine.initial_model, work, xs, ys, training),
        lambda: vmap_steps(plain, xs.view(5, 50, 3, 32, 32), ys.view(5, 50), 2),
    )
    detail = f"{fast / 500 * 1e6:.0f} us per sample against {{:.0f}} us"
    return [
        Result(
            "CNN, default layout / channels-last loop",
            default / fast,
            "above 1",
            detail.format(default / 500 * 1e6),
        ),
        Result(
            "CNN, vmap over clients / channels-last loop",
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


def gaussian_process(repeats: int, many: int) -> list[Result]:
    """Selection and fitting in d dimensions: against the dense forms, and from `many`/10 to `many`
    clients."""
    few = many // 10

    def problem(N: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(N)
        return (
            rng.standard_normal((N, 15)) / 15**0.5,
            rng.dirichlet(np.ones(N)),
            rng.standard_normal((2, N)),
        )

    def choose(N: int) -> Callable[[], object]:
        X, p, _ = problem(N)
        return lambda: select(X, p, np.ones(N), 1e-4, 10, np.arange(N))

    def refit(N: int) -> Callable[[], object]:
        X, _, Y = problem(N)
        return lambda: fit(X, Samples(Y, np.ones(2)), 1e-4, 10, 0.01)

    X, p, Y = problem(500)
    fast, dense, large, small = best(
        repeats, choose(500), lambda: dense_choice(X, p, 10), choose(many), choose(few)
    )
    fit_fast, fit_dense, fit_large, fit_small = best(
        repeats, refit(500), lambda: dense_steps(X, Y, 10), refit(many), refit(few)
    )
    ms = 1e3
    return [
        Result(
            "dense Algorithm 1 / low rank, 500 clients",
            dense / fast,
            "above 1",
            f"{dense * ms:.1f} against {fast * ms:.2f} ms",
        ),
        Result(
            f"selection, {many:,} clients / {few:,}",
            large / small,
            "about 10: linear",
            f"{large * ms:.0f} against {small * ms:.1f} ms",
        ),
        Result(
            "dense likelihood steps / low rank, 500 clients",
            fit_dense / fit_fast,
            "above 1",
            f"{fit_dense * ms:.0f} against {fit_fast * ms:.1f} ms for ten steps",
        ),
        Result(
            f"refit, {many:,} clients / {few:,}",
            fit_large / fit_small,
            "about 10: linear",
            f"{fit_large * ms:.0f} against {fit_small * ms:.0f} ms for ten steps",
        ),
    ]


def dense_choice(X: np.ndarray, p: np.ndarray, count: int) -> None:
    Sigma = X @ X.T + 1e-4 * np.eye(len(X))
    for _ in range(count):
        deviation = np.sqrt(np.maximum(np.diag(Sigma), 1e-12))
        k = int(np.argmax(Sigma @ p / deviation))
        Sigma = Sigma - np.outer(Sigma[:, k], Sigma[k]) / Sigma[k, k]


def dense_steps(X: np.ndarray, Y: np.ndarray, steps: int) -> None:
    for _ in range(steps):
        inverse = np.linalg.inv(X @ X.T + 1e-4 * np.eye(len(X)))
        solved = Y @ inverse
        X = X + 1e-6 * (solved.T @ (solved @ X) - 2 * inverse @ X)


def mean_matching(repeats: int, many: int) -> list[Result]:
    """Complement's choice of ten, by one product per client that comes in: against trying the mean
    of every group, and from `many`/10 to `many` clients."""
    few = many // 10

    def problem(N: int) -> tuple[np.ndarray, np.ndarray]:
        # As many numbers as the output layer of the MLP has.
        U = np.random.default_rng(N).standard_normal((N, 310))
        return U, U.mean(axis=0)

    def choose(N: int, swaps: int = 20) -> Callable[[], object]:
        U, target = problem(N)
        return lambda: match(U, target, np.array([0]), 10, swaps)

    fixed = problem(500)
    greedy, obvious, large, small = best(
        repeats, choose(500, 0), lambda: obvious_choice(*fixed, 10), choose(many), choose(few)
    )
    ms = 1e3
    return [
        Result(
            "greedy matching by trying / by products, 500 clients",
            obvious / greedy,
            "above 1",
            f"{obvious * ms:.0f} against {greedy * ms:.2f} ms",
        ),
        Result(
            f"matching with swaps, {many:,} clients / {few:,}",
            large / small,
            "about 10: linear",
            f"{large * ms:.0f} against {small * ms:.0f} ms",
        ),
    ]


def obvious_choice(U: np.ndarray, target: np.ndarray, count: int) -> None:
    group = [0]
    while len(group) < count:
        rest = [k for k in range(len(U)) if k not in group]
        gaps = [np.linalg.norm(U[[*group, k]].mean(axis=0) - target) for k in rest]
        group.append(rest[int(np.argmin(gaps))])


def recalled_step(repeats: int, many: int) -> list[Result]:
    """FedRecall's step, for the FMNIST model and five clients: against reading the updates and what
    is remembered of these clients once; and with `many` clients in the memory against a tenth."""
    size, chosen = 52_500, 5

    def step(N: int) -> tuple[Callable[[], object], Delivery]:
        optimiser, model = FedRecall(), np.zeros(size, dtype=np.float32)
        updates = np.random.default_rng(N).standard_normal((chosen, size)).astype(np.float32)
        state = optimiser.init(Population(np.full(N, 60)), model)
        equal = np.full(chosen, 1 / chosen), np.full(chosen, 20)
        for start in range(0, N, chosen):
            clients = np.arange(start, start + chosen)
            delivery = Delivery(0, model, clients, *equal, 0.005, read_updates=lambda: updates)
            _, state = optimiser.step(state, delivery)
        return lambda: optimiser.step(state, delivery), delivery

    (with_many, delivery), (with_few, _) = step(many), step(many // 10)

    def read_twice() -> None:
        delivery.updates.sum(dtype=np.float64)
        delivery.updates.sum(dtype=np.float64)

    large, small, reading = best(repeats, with_many, with_few, read_twice)
    ms = 1e3
    return [
        Result(
            "FedRecall's step / reading updates and memories once",
            large / reading,
            "",
            f"{large * ms:.1f} against {reading * ms:.1f} ms, {many:,} clients remembered",
        ),
        Result(
            f"FedRecall's step, {many:,} clients remembered / {many // 10:,}",
            large / small,
            "about 1: it does not depend on them",
            f"{large * ms:.1f} against {small * ms:.1f} ms",
        ),
    ]


def whole_run(rounds: int) -> list[Result]:
    """A whole FedCor run against a random one: what its questions and refits cost in time."""
    seconds = {}
    for name in ("random", "fedcor"):
        simulation = build_simulation(load_experiment("fmnist-2spc", selector=name), 1)
        started = time.perf_counter()
        for _ in simulation.run(rounds):
            pass
        seconds[name] = time.perf_counter() - started
    fedcor, random = seconds["fedcor"], seconds["random"]
    detail = f"{fedcor:.0f} s against {random:.0f} s for {rounds} rounds on one core"
    return [Result("FedCor run / random run, FMNIST 2SPC", fedcor / random, "", detail)]


def model_sizes() -> str:
    return ", ".join(
        f"{name} {ModelVector(build_model(name, shape, 10, 1)).size}"
        for name, shape in (("mlp", (784,)), ("cnn", (3, 32, 32)))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    effort = QUICK if options.quick else FULL
    results = [
        *fmnist_round(effort.repeats),
        *cnn_layouts(effort.repeats_of_long),
        *gaussian_process(effort.repeats_of_long, effort.large),
        *mean_matching(effort.repeats_of_long, effort.large // 2),
        *recalled_step(effort.repeats, max(effort.large // 100, 50)),
        *whole_run(effort.rounds),
    ]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    print(f"parameters: {model_sizes()}; torch {torch.__version__}, one thread\n")
    print("| measured | ratio | goal | detail |\n|---|---|---|---|")
    for result in results:
        print(f"| {result.what} | {result.ratio:.2f} | {result.goal} | {result.detail} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
