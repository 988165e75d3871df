"""A round of the paper's MLP on FMNIST 2SPC: 100 clients, 5 per round, 20 batches of 64 each.

The limit is the time that the round's matrix products alone would take at the speed of a large
one. A round is all that a run does in it: selection, training, aggregation, test, record.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.measure import Result, best, check, flops_per_second, multiply
from benchmarks.replay import PlainLoop, Round, amortised, our_rounds, replay
from fedcor.simulation.build import build_simulation
from fedcor.simulation.engine.models import build_model
from fedcor.simulation.experiment_files import load_experiment
from fedcor.simulation.loop import Simulation

FIRST, REST = 784 * 64, 64 * 30 + 30 * 10  # weights of the MLP
# Forward and weight gradient, and the input gradient too but for the first layer.
TRAINING = 5 * 20 * 64 * (4 * FIRST + 6 * REST)
FORWARD = 2 * (FIRST + REST)  # of one sample
PRESET, SEED = "fmnist-2spc", 1


def results(quick: bool) -> list[Result]:
    """Rows of the table."""
    random, fedcor = (
        build_simulation(load_experiment(PRESET, selector=name), SEED)
        for name in ("random", "fedcor")
    )
    rounds = 3 if quick else 100
    product, work = math.inf, multiply()

    def also_multiply() -> None:
        nonlocal product
        started = time.process_time()
        work()
        product = min(product, time.process_time() - started)

    ours = our_rounds(random, 3 if quick else 40, also_multiply)
    asked = our_rounds(fedcor, rounds, also_multiply)
    rate = flops_per_second(product)
    return [
        *_against_the_limit(ours, asked, rate),
        *_engine_alone(random, 2 if quick else 16),
        *_against_a_plain_loop(random, ours[:2] if quick else ours[:10], asked),
        *_losses_of_everyone(random, 1 if quick else 5, rate),
    ]


def _against_the_limit(ours: Sequence[Round], asked: Sequence[Round], rate: float) -> list[Result]:
    limit = (TRAINING + 10_000 * FORWARD) / rate
    whole = min(round.seconds for round in ours)
    evaluations = statistics.fmean(round.evaluations for round in asked)
    limit_asked = limit + evaluations * 60_000 * FORWARD / rate
    mean, usual = amortised(asked), statistics.median(round.seconds for round in ours)
    speed = f"at {rate / 1e9:.0f} GFLOP/s"
    return [
        Result(
            "FMNIST, random round / its matrix products",
            whole / limit,
            "at most 1.7",
            f"{whole * 1e3:.1f} ms against {limit * 1e3:.1f} ms {speed}",
        ),
        Result(
            f"FMNIST, FedCor round (mean of {len(asked)}) / its matrix products",
            mean / limit_asked,
            "",
            f"{mean * 1e3:.1f} ms against {limit_asked * 1e3:.1f} ms {speed}; "
            f"{evaluations:.2f} questions to all clients per round",
        ),
        Result(
            f"FMNIST, FedCor round (mean of {len(asked)}) / random round",
            mean / usual,
            "",
            f"{mean * 1e3:.1f} against {usual * 1e3:.1f} ms",
        ),
    ]


def _engine_alone(simulation: Simulation, repeats: int) -> list[Result]:
    """Training, mean and test of one round, without selection, checks and record."""
    engine, model, chosen = simulation.engine, simulation.engine.initial_model, [3, 14, 15, 92, 65]

    def one_round() -> None:
        results = engine.train(model, chosen, 3, 0.005)
        engine.test(model + torch.full((5,), 0.2) @ (results - model))

    product, whole = best(repeats, multiply(), one_round)
    limit = (TRAINING + 10_000 * FORWARD) / flops_per_second(product)
    return [
        Result(
            "FMNIST, training and test of a round alone / matrix products",
            whole / limit,
            "at most 1.7",
            f"{whole * 1e3:.1f} ms against {limit * 1e3:.1f} ms",
        )
    ]


def _against_a_plain_loop(
    simulation: Simulation, ours: Sequence[Round], asked: Sequence[Round]
) -> list[Result]:
    plain = PlainLoop(simulation.engine, _module(), SEED)
    by_random, by_fedcor = replay(plain, ours), replay(plain, asked)
    # Our rounds once more, next to the plain ones in time: the speed of a machine drifts.
    again = our_rounds(simulation, len(ours))
    alone, mine = min(by_random), min(round.seconds for round in again)
    alone_asked, mine_asked = statistics.fmean(by_fedcor), amortised(asked)
    return [
        Result(
            "FMNIST, plain PyTorch loop / ours, random round",
            alone / mine,
            "above 1",
            f"{alone * 1e3:.0f} against {mine * 1e3:.1f} ms",
        ),
        Result(
            f"FMNIST, plain PyTorch loop / ours, FedCor (mean of {len(asked)})",
            alone_asked / mine_asked,
            "above 1",
            f"{alone_asked * 1e3:.0f} against {mine_asked * 1e3:.1f} ms; "
            "the plain loop is told whom to choose",
        ),
    ]


def _losses_of_everyone(simulation: Simulation, repeats: int, rate: float) -> list[Result]:
    engine, everyone = simulation.engine, np.arange(100)
    plain = PlainLoop(engine, _module(), SEED)
    model = engine.initial_model
    check("losses", engine.losses(model, everyone), plain.losses(model), 1e-4)
    ours, loop = best(repeats, lambda: engine.losses(model, everyone), lambda: plain.losses(model))
    limit = 60_000 * FORWARD / rate
    return [
        Result(
            "FMNIST, losses of 100 clients / their matrix products",
            ours / limit,
            "",
            f"{ours * 1e3:.0f} against {limit * 1e3:.0f} ms; a plain loop {loop * 1e3:.0f} ms",
        )
    ]


def _module() -> nn.Module:
    return build_model("mlp", (1, 28, 28), 10, SEED)
