"""Selection among a million clients: its cost as ratios to this machine's own speed.

    python -m benchmarks.scale                    every measurement; under two minutes
    python -m benchmarks.scale --quick            a test of this file: few clients
    python -m benchmarks.scale --json             the same as JSON
    python -m benchmarks.scale --growth FILE     how cost grows with N, C and d, as JSON; a minute

Everything runs in one thread, and what is compared is one thread's work. Times are this thread's
CPU seconds: on a shared machine they count what the work took, and not how long it waited for a
core. What is compared is measured in turn, and the best of several repeats is taken. "Reading" an
array is the sum of its numbers, in the order in which they are in memory. Peak memory is that of a
process of its own (VmHWM of Linux), with the interpreter, NumPy, Numba and the selector's state.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np

from benchmarks.measure import DifferentResultsError, Result, best, peak_memory
from fedcor import AFL, Aligned, Complement, FedCor, PowerOfChoice, Random, RoundRobin
from fedcor.core.types import Array, FloatArray, Outcome, Population, Selector, State
from fedcor.rounds.selection import decide, observe
from fedcor.selectors import numba_passes
from fedcor.selectors.gp.fit import Samples, fit
from fedcor.selectors.gp.greedy import Prior, select, take_apart
from fedcor.selectors.gp.posterior import blocks
from fedcor.selectors.matching import match
from fedcor.selectors.matching_blocks import Criterion
from fedcor.selectors.update_memory import ROWS, put_table

S2, D, SKETCH, PICKS, SAMPLES = 1e-4, 15, 16, 100, 11


def check(right: bool, what: str) -> None:
    """Refuse to print the time of a wrong result."""
    if not right:
        raise DifferentResultsError(f"{what} differs from its twin")


def embedding(N: int, d: int = D) -> FloatArray:
    X = np.random.default_rng(N + d).standard_normal((N, d))
    X /= math.sqrt(d)
    return X


@dataclass(frozen=True)
class Problem:
    """What `gp.select` is given."""

    X: FloatArray
    p: FloatArray
    alpha: FloatArray

    @classmethod
    def of(cls, N: int, d: int = D) -> Problem:
        p = np.random.default_rng(N).random(N)
        return cls(embedding(N, d), p / p.sum(), np.ones(N))

    def select(self, count: int = PICKS) -> Array:
        everyone = np.arange(len(self.X))
        return select(Prior(self.X, self.p, self.alpha, S2), count, everyone).clients

    def reasons(self, picks: Array) -> object:
        everyone = np.arange(len(self.X))
        return take_apart(Prior(self.X, self.p, self.alpha, S2), picks, everyone)

    def read(self, times: int = PICKS) -> None:
        flat = self.X.reshape(-1)
        for _ in range(times):
            flat.sum()


def selection(large: int, repeats: int) -> list[Result]:
    """FedCor's greedy choice: against reading the embedding, and from one client in a hundred."""
    problem, small = Problem.of(large), Problem.of(large // 100)
    picks = problem.select()
    with_numpy = plainly(lambda: problem.select(10))
    check(np.array_equal(picks[:10], with_numpy), "the compiled selection")
    many = 100  # of the small problem, which is over at once
    work, reading, why, first, few, few_reading = best(
        repeats,
        problem.select,
        problem.read,
        lambda: problem.reasons(picks),
        lambda: problem.select(1),
        lambda: [small.select() for _ in range(many // 10)],
        lambda: small.read(PICKS * many // 10),
    )
    slope = math.log(work / (few / (many // 10)), 100)
    read_slope = math.log(reading / (few_reading / (many // 10)), 100)
    rate = problem.X.nbytes * PICKS / reading / 1e9
    compiled = compiled_slope(large, repeats)
    return [
        Result(
            f"{PICKS} picks from {large:,} clients / reading the embedding {PICKS} times",
            work / reading,
            "at most 2",
            f"{work * 1e3:.0f} against {reading * 1e3:.0f} ms ({rate:.0f} GB/s); "
            f"{first * 1e3:.0f} ms of it before the second pick",
        ),
        Result(
            f"log-log slope of {PICKS} picks, {large // 100:,} to {large:,} clients",
            slope,
            "at most 1.1",
            f"{few / (many // 10) * 1e3:.1f} to {work * 1e3:.0f} ms; reading alone has the slope "
            f"{read_slope:.2f}: {large // 100:,} clients fit into the cache. The compiled pass at "
            f"both ends has {compiled:.2f}",
        ),
        Result(
            f"why these {PICKS} (reasons) / the choice itself",
            why / work,
            "about 1",
            f"{why * 1e3:.0f} against {work * 1e3:.0f} ms",
        ),
    ]


def compiled_slope(large: int, repeats: int) -> float:
    """The slope if the compiled pass is taken for few clients, too."""
    threshold, numba_passes.COMPILED_FROM = numba_passes.COMPILED_FROM, 0
    try:
        problem, small = Problem.of(large), Problem.of(large // 100)
        small.select()
        work, few = best(repeats, problem.select, lambda: [small.select() for _ in range(10)])
    finally:
        numba_passes.COMPILED_FROM = threshold
    return math.log(work / (few / 10), 100)


def plainly(work: Callable[[], Array]) -> Array:
    """The result of NumPy's passes, however many clients there are."""
    before, numba_passes.COMPILED_FROM = numba_passes.COMPILED_FROM, sys.maxsize
    try:
        return work()
    finally:
        numba_passes.COMPILED_FROM = before


def refit(large: int, repeats: int) -> list[Result]:
    """Steps of the fit: against the matrix products that they consist of, in the same blocks."""
    steps, X = 4, embedding(large)
    Y = np.random.default_rng(1).standard_normal((SAMPLES, large))
    w = 0.9 ** np.arange(SAMPLES)
    check(
        np.allclose(fit(X[:500], Samples(Y[:, :500], w), S2, 1, 0.01), dense_step(X, Y, w)), "fit"
    )
    B, inverse = np.random.default_rng(2).standard_normal((SAMPLES, D)), np.eye(D)

    def products() -> None:
        for rows in blocks(large):
            Xb, Yb = X[rows], Y[:, rows]
            _ = Xb.T @ Xb, Yb @ Xb
        for rows in blocks(large):
            Xb = X[rows]
            R = B @ Xb.T
            _ = R.T @ B, Xb @ inverse

    some, none, own = best(
        repeats,
        lambda: fit(X, Samples(Y, w), S2, steps, 0.01),
        lambda: fit(X, Samples(Y, w), S2, 0, 0.01),
        products,
    )
    step = (some - none) / steps
    return [
        Result(
            f"a step of a refit, {large:,} clients, {SAMPLES} samples / its own matrix products",
            step / own,
            "at most 3",
            f"{step * 1e3:.0f} against {own * 1e3:.0f} ms",
        )
    ]


def dense_step(X: FloatArray, Y: FloatArray, w: FloatArray) -> FloatArray:
    """Adam's first step for 500 clients, by the inverse of their covariance matrix."""
    X, Y = X[:500], Y[:, :500]
    inverse = np.linalg.inv(X @ X.T + S2 * np.eye(500))
    solved = Y @ inverse
    g = (w[:, None] * solved).T @ (solved @ X) - w.sum() * inverse @ X
    return X + 0.01 * g / (np.abs(g) + 1e-8)


def matching(large: int, repeats: int) -> list[Result]:
    """The choice of `aligned` and `complement`: against reading the memory, and its products."""
    rng = np.random.default_rng(3)
    sizes = [min(ROWS, large - start) for start in range(0, large, ROWS)]
    U = [rng.standard_normal((size, SKETCH)) + 0.1 for size in sizes]
    weights, first = rng.uniform(1, 5, size=large), np.array([0])
    target = sum(block.sum(axis=0) for block in U) / large
    members, whole = rng.standard_normal((10, SKETCH)), np.concatenate(U)

    def read() -> None:
        whole.reshape(-1).sum()

    def products() -> None:
        for block in U:
            _ = members @ block.T

    results = []
    criteria: dict[Criterion, str] = {"direction": "aligned", "distance": "complement"}
    for criterion, name in criteria.items():

        def choose(count: int, swaps: int, criterion: Criterion = criterion) -> Array:
            return match(U, target, first, count, swaps=swaps, weights=weights, criterion=criterion)

        group = choose(10, 3)
        with_numpy = plainly(lambda choose=choose: choose(10, 3))  # type: ignore[misc]
        check(np.array_equal(group, with_numpy), f"the compiled matching of {name}")
        short, long, reading = best(repeats, lambda: choose(2, 0), lambda: choose(12, 0), read)
        greedy = (long - short) / 10
        plain, swapped, product = best(
            repeats, lambda: choose(11, 0), lambda: choose(11, 1), products
        )
        exchange = swapped - plain  # all exchanges are compared once, whether or not one helps
        results += [
            Result(
                f"{name}: a further member, {large:,} clients / reading the memory",
                greedy / reading,
                "at most 2",
                f"{greedy * 1e3:.1f} against {reading * 1e3:.1f} ms, s = {SKETCH}",
            ),
            Result(
                f"{name}: an exchange in a group of 11 / its matrix product",
                exchange / product,
                "",
                f"{exchange * 1e3:.0f} against {product * 1e3:.0f} ms; "
                f"reading the memory takes {reading * 1e3:.1f} ms",
            ),
        ]
    return results


class Everyone:
    """A federation of which all clients are there; loss changes are drawn."""

    def __init__(self, N: int, round: int = 20) -> None:
        self.round, self.rng = round, np.random.default_rng(round)
        self.available, self.weights = np.arange(N), np.full(N, 1 / N)

    def losses(self, clients: Array) -> FloatArray:
        return self.rng.random(len(clients))

    def loss_changes(self, _selection: Array) -> FloatArray:
        return self.rng.standard_normal(len(self.weights))

    def train(self, chosen: Array) -> Outcome:
        ones, who = np.ones(len(chosen)), np.sort(chosen)
        updates = self.rng.standard_normal((len(chosen), 1000))
        return Outcome(self.round, chosen, who, ones, ones, lambda: ones, lambda: updates)


SELECTORS: dict[str, Selector] = {
    "fedcor": FedCor(PICKS),
    "aligned": Aligned(PICKS, sketch=SKETCH),
    "complement": Complement(PICKS, sketch=SKETCH),
    "afl": AFL(PICKS),
    "power_of_choice": PowerOfChoice(PICKS),
    "round_robin": RoundRobin(PICKS),
    "random": Random(PICKS),
}


def state_of(selector: Selector, N: int) -> State:
    """The state of a selector that has seen everyone; FedCor refits in the next round."""
    state, rng = dict(selector.init(Population(np.full(N, 10)))), np.random.default_rng(4)
    if isinstance(selector, FedCor):
        earlier = {"samples": rng.standard_normal((10, N)), "sample_rounds": np.arange(10, 20)}
        state |= {"embedding": embedding(N), "tried": np.arange(PICKS)[None], **earlier}
    if isinstance(selector, Aligned | Complement):
        seen = rng.integers(0, 20, size=N)
        state |= {"seen": seen, "asked": seen}
        whole = rng.standard_normal((N, SKETCH))
        blocks = [whole[start : start + ROWS] for start in range(0, N, ROWS)]
        state = put_table(state, "directions", blocks)
    return state | {"round": np.array(20)} if "round" in state else state


def whole_round(name: str, N: int) -> dict[str, float]:
    """Two rounds of a selector in this process: seconds of the second, and the peak of memory.

    FedCor refits in the first.
    """
    selector, federation = SELECTORS[name], Everyone(N)
    state = state_of(selector, N)
    found: dict[str, float] = {"state": float(sum(array.nbytes for array in state.values()))}
    for number in range(2):
        federation.round = 20 + number
        started = time.process_time()
        decision = decide(selector, state, federation)
        decided = time.process_time()
        outcome = federation.train(decision.chosen)
        _ = outcome.updates
        trained = time.process_time()
        state = observe(selector, decision.state, outcome)
        found |= {f"decide {number}": decided - started}
        found |= {f"observe {number}": time.process_time() - trained}
        del decision
    return found | {"peak": peak_memory()}


def rounds(large: int, names: Sequence[str] = tuple(SELECTORS)) -> list[Result]:
    """A whole round of every selector, each in a process of its own: its peak of memory, and how
    its time grows from a tenth of the clients."""
    results = []
    for name in names:
        big, small = (_in_a_process(name, N) for N in (large, large // 10))
        refit = f"; with a refit of 100 steps {big['decide 0']:.0f} s" if name == "fedcor" else ""
        detail = (
            f"{PICKS} clients: decide {big['decide 1'] * 1e3:.0f} ms (a tenth of the clients: "
            f"{small['decide 1'] * 1e3:.0f} ms), observe {big['observe 1'] * 1e3:.0f} ms; "
            f"state {big['state'] / 1e6:.0f} MB{refit}"
        )
        what = f"{name}: peak memory with {large:,} clients / 1 GB"
        results.append(Result(what, big["peak"] / 1e9, "below 1", detail))
    return results


def _in_a_process(name: str, N: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale", "--round", name, str(N)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def growth(largest: int) -> dict[str, list[dict[str, float]]]:
    """CPU seconds of a choice and of a refit step over N, C and d: one line per point."""
    lines: dict[str, list[dict[str, float]]] = {"N": [], "C": [], "d": []}
    sizes = [N for N in (1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000) if largest >= N]
    Problem.of(sizes[-1]).select(2)  # compiles

    def point(axis: str, N: int, C: int, d: int) -> None:
        problem, repeats = Problem.of(N, d), max(1, 30_000 // N)
        works = (lambda: problem.select(C), lambda: problem.read(C))
        times = best(3, *(lambda w=w: [w() for _ in range(repeats)] for w in works))  # type: ignore[misc]
        line = {"N": N, "C": C, "d": d, "select": times[0] / repeats, "read": times[1] / repeats}
        if axis != "C":
            samples = Samples(np.random.default_rng(5).standard_normal((SAMPLES, N)), np.ones(11))
            step, none = best(
                2, *(lambda k=k: fit(problem.X, samples, S2, k, 0.01) for k in (2, 0))
            )  # type: ignore[misc]
            line["step"] = (step - none) / 2
        lines[axis].append(line)

    for N in sizes:
        point("N", N, 10, D)
    for C in (1, 3, 10, 30, 100):
        point("C", sizes[-1] // 10, C, D)
    for d in (5, 10, 15, 30, 60):
        point("d", sizes[-1] // 10, 10, d)
    return lines


def results(quick: bool) -> list[Result]:
    """Every measurement."""
    large, repeats = (20_000, 1) if quick else (1_000_000, 4)
    return [
        *selection(large, repeats),
        *refit(large, min(repeats, 3)),
        *matching(large, repeats),
        *(rounds(large, ("aligned",)) if quick else rounds(large)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--growth", metavar="FILE", type=Path)
    parser.add_argument("--round", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.round:
        print(json.dumps(whole_round(options.round[0], int(options.round[1]))))
        return 0
    if options.growth:
        found = growth(10_000 if options.quick else 1_000_000)
        options.growth.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    found = results(options.quick)
    if options.json:
        print(json.dumps([asdict(result) for result in found], indent=2))
        return 0
    print("| measured | ratio | goal | detail |\n|---|---|---|---|")
    for result in found:
        print(f"| {result.what} | {result.ratio:.2f} | {result.goal} | {result.detail} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
