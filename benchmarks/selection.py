"""The maths of the selectors and of FedRecall: against its obvious form, and as clients grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import Result, best, check
from fedcor.core.types import Delivery, Population
from fedcor.optimisers.fedrecall import FedRecall
from fedcor.selectors.gp.fit import Samples, fit, log_likelihood_gradient
from fedcor.selectors.gp.greedy import Picks, Prior, select
from fedcor.selectors.matching import match


def results(quick: bool) -> list[Result]:
    """Rows of the table."""
    repeats, many = (1, 2_000) if quick else (7, 100_000)
    return [
        *gaussian_process(repeats, many),
        *mean_matching(repeats, many // 2),
        *recalled_step(repeats, max(many // 100, 50)),
    ]


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

    def choose(N: int) -> Callable[[], Picks]:
        X, p, _ = problem(N)
        return lambda: select(Prior(X, p, np.ones(N), 1e-4), 10, np.arange(N))

    def refit(N: int) -> Callable[[], object]:
        X, _, Y = problem(N)
        return lambda: fit(X, Samples(Y, np.ones(2)), 1e-4, 10, 0.01)

    X, p, Y = problem(500)
    check("Algorithm 1", choose(500)().clients, dense_choice(X, p, 10), 0)
    exact = dense_gradient(X, Y)
    ours = log_likelihood_gradient(X, Samples(Y, np.ones(2)), 1e-4)
    check("the gradient", ours / np.abs(exact).max(), exact / np.abs(exact).max(), 1e-6)
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


def dense_choice(X: np.ndarray, p: np.ndarray, count: int) -> list[int]:
    """Algorithm 1 with the whole covariance."""
    picked = []
    Sigma = X @ X.T + 1e-4 * np.eye(len(X))
    for _ in range(count):
        deviation = np.sqrt(np.maximum(np.diag(Sigma), 1e-12))
        k = int(np.argmax(Sigma @ p / deviation))
        picked.append(k)
        Sigma = Sigma - np.outer(Sigma[:, k], Sigma[k]) / Sigma[k, k]
    return picked


def dense_gradient(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Of the likelihood of two samples of weight 1, with the whole covariance."""
    inverse = np.linalg.inv(X @ X.T + 1e-4 * np.eye(len(X)))
    solved = Y @ inverse
    return solved.T @ (solved @ X) - 2 * inverse @ X


def dense_steps(X: np.ndarray, Y: np.ndarray, steps: int) -> None:
    """Steps along that gradient; what Adam adds costs next to nothing."""
    for _ in range(steps):
        X = X + 1e-6 * dense_gradient(X, Y)


def mean_matching(repeats: int, many: int) -> list[Result]:
    """Complement's choice of ten, by one product per client that comes in: against trying the mean
    of every group, and from `many`/10 to `many` clients."""
    few = many // 10

    def problem(N: int) -> tuple[np.ndarray, np.ndarray]:
        # As many numbers as the output layer of the MLP has.
        U = np.random.default_rng(N).standard_normal((N, 310))
        return U, U.mean(axis=0)

    def choose(N: int, swaps: int = 20) -> Callable[[], np.ndarray]:
        U, target = problem(N)
        return lambda: match(U, target, np.array([0]), 10, swaps=swaps)

    fixed = problem(500)
    check("matching", np.sort(choose(500, 0)()), np.sort(obvious_choice(*fixed, 10)), 0)
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


def obvious_choice(U: np.ndarray, target: np.ndarray, count: int) -> list[int]:
    """Who brings the mean closest to the target comes in."""
    group = [0]
    while len(group) < count:
        rest = [k for k in range(len(U)) if k not in group]
        gaps = [np.linalg.norm(U[[*group, k]].mean(axis=0) - target) for k in rest]
        group.append(rest[int(np.argmin(gaps))])
    return group


def recalled_step(repeats: int, many: int) -> list[Result]:
    """FedRecall's step, for the FMNIST model and five clients: against reading the updates and what
    is remembered of these clients once; and with `many` clients in the memory against a tenth."""
    size, chosen = 52_500, 5

    def step(N: int) -> tuple[Callable[[], Any], Delivery]:
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
    # All groups sent the same updates, so whatever is remembered, the step points to their mean.
    stepped, mean = with_many()[0], delivery.updates.mean(axis=0)
    check("FedRecall", stepped / np.linalg.norm(stepped), mean / np.linalg.norm(mean), 1e-5)

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
