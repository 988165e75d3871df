"""The pictures of the site: `python docs/pictures/draw.py` writes them beside this file.

Numbers come from the package itself (the toy experiment, the greedy choice, mean matching, the
rules of the ledger) and from the results in docs/results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedcor
from fedcor.reporting.plots import line_style, panel_row
from fedcor.rounds.ledger import ANSWER_BYTES
from fedcor.selectors.gp.greedy import Prior, select
from fedcor.selectors.matching import match

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # studies/ is beside the package, and not installed

from studies.toy import Toy, play  # noqa: E402

ORANGE, BLUE, GREEN, PINK, GREY = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#999999"
GROUPS = {"A": BLUE, "B": ORANGE, "C": GREEN}


def headline() -> Figure:
    """Accuracy over rounds, from the measured curves of docs/results/memory."""
    results = HERE.parent / "results" / "memory" / "memory-fmnist.json"
    curves = json.loads(results.read_text(encoding="utf-8"))["curves"]
    figure, axes = panel_row(2, 4.2, 3.3)
    names = {
        "random": "random",
        "FedCor": "fedcor",
        "complement": "complement",
        "aligned + FedRecall": "aligned",
    }
    panels = {"2spc": "Fashion-MNIST, two shards per client", "table-20": "20 generated classes"}
    for ax, (scenario, title) in zip(axes, panels.items(), strict=True):
        for i, (label, name) in enumerate(names.items()):
            style = line_style(name, i)
            curve = {key: np.array(v)[::2] for key, v in curves[scenario][label].items()}
            ax.plot(curve["round"], curve["mean"], label=label, linewidth=1.8, **style)
            bounds = (curve["low"], curve["high"])
            ax.fill_between(curve["round"], *bounds, color=style["color"], alpha=0.12, lw=0)
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="rounds")
    axes[0].set(ylabel="test accuracy (mean of ten rounds)")
    axes[0].legend(frameon=False, loc="lower right")
    return figure


def random_bytes(rounds: int, clients: int = 5, model: float = 210e3) -> np.ndarray:
    """(rounds,) bytes of random selection, which is also complement's: one model down, one up."""
    return np.full(rounds, 2 * clients * model)


def fedcor_bytes(rounds: int, warmup: int = 15, interval: int = 10) -> np.ndarray:
    """(rounds,) bytes of FedCor on FMNIST: 100 clients, 5 a round, a model of 210 kB."""
    everyone, chosen, model = 100, 5, 210e3
    answers, train, show = everyone * ANSWER_BYTES, chosen * model, everyone * model
    spent = np.full(rounds, 2 * train)
    spent[:warmup] = show + train + answers  # the candidate to everyone; it becomes the model
    spent[0] += show + answers  # nobody holds the first model yet
    spent[warmup] = train  # everyone holds the model
    for t in range(warmup, rounds):
        if t % interval == 0:  # the model and a candidate to everyone, two trainings
            spent[t] = 2 * (show + train + answers)
    return spent


def toy() -> Figure:
    """Two of forty clients are chosen: by loss alone, with correlations, and the best pair."""
    first = play(1)
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 0.8])
    draw_choice(axes[0], first, "Ind", "the two largest losses")
    draw_choice(axes[1], first, "Cor", "chosen with correlations")
    games = [play(seed) for seed in range(1, 21)]
    best = np.array([game.choices["Opt"].global_loss for game in games])
    values = {
        "best\npair": np.ones(len(games)),
        "with\ncorrelations": np.array([g.choices["Cor"].global_loss for g in games]) / best,
        "random\npair": np.array([g.random_loss for g in games]) / best,
        "largest\nlosses": np.array([g.choices["Ind"].global_loss for g in games]) / best,
    }
    ax = axes[2]
    colours = [GREY, ORANGE, GREY, BLUE]
    for x, (ratios, colour) in enumerate(zip(values.values(), colours, strict=True)):
        ax.bar(x, ratios.mean(), color=colour, alpha=0.75, width=0.65)
        spread = 0.22 * np.linspace(-1, 1, len(ratios))
        ax.plot(x + spread, ratios, "k.", markersize=2.5, alpha=0.6)
        ax.text(x, ratios.mean() + 0.05, f"{ratios.mean():.2f}", ha="center", fontsize=8,
                bbox={"color": "white", "alpha": 0.7, "pad": 0.5})  # fmt: skip
    ax.set_xticks(range(len(values)), values, fontsize=7)
    ax.set_title("loss of everyone, best pair = 1\n(20 repetitions)", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def draw_choice(ax: Axes, game: Toy, name: str, title: str) -> None:
    """The forty samples, the two chosen ones, and the line that training on them gives."""
    choice = game.choices[name]
    for label, colour, marker in ((1, GREEN, "o"), (-1, PINK, "s")):
        points = game.samples[game.labels == label]
        ax.plot(*points.T, marker, color=colour, markersize=4.5, alpha=0.65, linestyle="none")
    ax.plot(*game.samples[choice.clients].T, "o", markersize=13, markerfacecolor="none",
            markeredgecolor="black", markeredgewidth=1.6)  # fmt: skip
    low, high = game.samples.min(axis=0) - 0.5, game.samples.max(axis=0) + 0.5
    a, b, c = choice.model
    x = np.linspace(low[0], high[0], 100)
    ax.plot(x, -(a * x + c) / b, "-", color="black", linewidth=1.2)
    ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xticks=[], yticks=[])
    ax.set_title(f"{title}:\nloss of everyone {choice.global_loss:.2f}", fontsize=9)


def invented() -> tuple[np.ndarray, list[str]]:
    """(12, 3) embeddings of twelve invented clients: six of group A, four of B, two of C."""
    rng = np.random.default_rng(5)
    groups = list("AAAAAABBBBCC")
    directions = {"A": [1.0, 0.2, 0.0], "B": [0.15, 1.0, 0.0], "C": [0.0, 0.1, 1.0]}
    rows = [np.array(directions[g]) * rng.uniform(0.75, 1.15) for g in groups]
    return np.array(rows) + rng.normal(0, 0.06, (12, 3)), groups


def gains(X: np.ndarray, picked: list[int], alpha: np.ndarray, s2: float = 0.01) -> np.ndarray:
    """(N,) the gain of each client, given the clients picked so far; NaN for those."""
    p, left = np.full(len(X), 1 / len(X)), np.setdiff1d(np.arange(len(X)), picked)
    result = np.full(len(X), np.nan)
    cov = X @ X.T + s2 * np.eye(len(X))
    for k in picked:
        cov = cov - np.outer(cov[k], cov[k]) / cov[k, k]
    for k in left:
        result[k] = alpha[k] * (p @ cov[k]) / math.sqrt(cov[k, k])
    return result


def greedy() -> Figure:
    """The gain of each client before the first, second and third pick."""
    X, groups = invented()
    alpha, p = np.ones(len(X)), np.full(len(X), 1 / len(X))
    picks = select(Prior(X, p, alpha, 0.01), 3, np.arange(len(X))).clients
    figure, axes = panel_row(3, 2.9, 2.7)
    top = np.nanmax(gains(X, [], alpha)) * 1.2
    for step, ax in enumerate(axes):
        picked = [int(k) for k in picks[:step]]
        values = gains(X, picked, alpha)
        best = int(np.nanargmax(values))
        assert best == picks[step]
        for k, group in enumerate(groups):
            height = 0.0 if np.isnan(values[k]) else values[k]
            edge = {"edgecolor": "black", "linewidth": 1.8} if k == best else {}
            ax.bar(k, height, color=GROUPS[group], alpha=1.0 if k == best else 0.55, **edge)
            if k in picked:
                ax.text(k, top * 0.02, "✓", ha="center", fontsize=11)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_ylim(min(0.0, np.nanmin(values) * 1.15), top)
        ax.set_xticks(range(len(groups)), groups, fontsize=8)
        ax.set_title(f"before pick {step + 1}", fontsize=10)
    axes[0].set_ylabel("gain: expected decrease\nof everyone's loss")
    axes[1].set_xlabel("clients, by the kind of data that they hold")
    return figure


def annealing() -> Figure:
    """Who is picked in twenty rounds without a refit, for two values of beta."""
    X, groups = invented()
    figure, axes = panel_row(2, 4.3, 2.6)
    for ax, beta in zip(axes, (0.999, 0.95), strict=True):
        times = np.zeros(len(X))
        for t in range(20):
            p = np.full(len(X), 1 / len(X))
            chosen = select(Prior(X, p, beta**times, 0.01), 3, np.arange(len(X))).clients
            for k in chosen:
                ax.plot(t, k, "s", color=GROUPS[groups[k]], markersize=6.5)
            times[chosen] += 1
        ax.set_yticks(range(len(groups)), groups, fontsize=7)
        ax.set_title(f"β = {beta}: {int((times > 0).sum())} of {len(X)} clients train", fontsize=10)
        ax.set_xlabel("rounds since the last refit")
        ax.set_xticks(range(0, 20, 5))
    axes[0].set_ylabel("clients")
    return figure


def cost() -> Figure:
    """The bytes of each round, and all bytes so far, of FedCor and of random selection."""
    figure, (left, right) = panel_row(2, 4.2, 2.8)
    rounds = np.arange(60)
    fedcor, random = fedcor_bytes(60) / 1e6, random_bytes(60) / 1e6
    left.bar(rounds, fedcor, color=ORANGE, width=0.8)
    left.plot(rounds, random, color="black", linestyle=":")
    left.annotate("warm-up:\na candidate\nto everyone", (3, 22), (1.5, 31),
                  fontsize=8, arrowprops={"arrowstyle": "-", "color": "#666666"})  # fmt: skip
    left.annotate("refit", (40, 44.5), (41.2, 42), fontsize=8)
    left.annotate("other rounds:\nas random", (35, 2.5), (31.2, 10), fontsize=8,
                  arrowprops={"arrowstyle": "-", "color": "#666666"})  # fmt: skip
    left.set(xlabel="round", ylabel="megabytes in this round", ylim=(0, 50))
    many = np.arange(1, 501)
    for label, spent, style in (
        ("FedCor, a refit every 10 rounds", fedcor_bytes(500), "-"),
        ("FedCor, no refit after the warm-up", fedcor_bytes(500, interval=1000), "--"),
    ):
        right.plot(many, np.cumsum(spent) / 1e9, color=ORANGE, linestyle=style, label=label)
    random_total = np.cumsum(random_bytes(500)) / 1e9
    right.plot(many, random_total, color="black", linestyle=":", label="random, complement")
    right.set(xlabel="rounds", ylabel="gigabytes so far", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    return figure


def complement() -> Figure:
    """Remembered directions in the plane, everyone's mean, and the mean of two groups of four."""
    rng = np.random.default_rng(3)
    angles = np.concatenate([rng.normal(m, 0.22, n) for m, n in ((0.2, 9), (2.2, 6), (4.1, 5))])
    lengths = rng.uniform(0.6, 1.15, len(angles))
    u = np.column_stack([np.cos(angles), np.sin(angles)]) * lengths[:, None]
    target = u.mean(axis=0)
    start = np.array([3])
    groups = {
        "four of the largest updates": np.argsort(-lengths)[:4],
        "four at random": np.sort(rng.choice(len(u), 4, replace=False)),
        "four that complete each other": match(u, target, start, 4, swaps=20),
    }
    figure, axes = panel_row(3, 2.9, 3.0)
    for ax, (title, group) in zip(axes, groups.items(), strict=True):
        mean = u[group].mean(axis=0)
        for k, (x, y) in enumerate(u):
            mine = k in group
            ax.annotate("", (x, y), (0, 0), arrowprops={
                "arrowstyle": "-|>", "color": PINK if mine else "#bbbbbb",
                "linewidth": 2.0 if mine else 0.8, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
        ax.plot(*target, "*", color="black", markersize=13, label="everyone's mean", zorder=5)
        ax.plot(*mean, "o", color=PINK, markeredgecolor="black", markersize=8,
                label="mean of the group", zorder=6)  # fmt: skip
        gap = float(np.linalg.norm(mean - target))
        ax.set_title(f"{title}\ndistance {gap:.2f}", fontsize=9)
        ax.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), xticks=[], yticks=[], aspect="equal")
        ax.grid(visible=False)
    axes[0].legend(frameon=False, fontsize=7, loc="lower right")
    return figure


@cache
def tutorial() -> fedcor.Result:
    """The comparison of the tutorial."""
    selectors = ["random", "fedcor", "aligned"]
    return fedcor.compare("digits", selectors, seeds=range(1, 4), rounds=50)


PICTURES = {
    "tutorial-rounds": lambda: tutorial().plot(),
    "tutorial-bytes": lambda: tutorial().plot(x="bytes"),
    "headline": headline,
    "toy": toy,
    "greedy": greedy,
    "annealing": annealing,
    "cost": cost,
    "complement": complement,
}


def main() -> None:
    """Writes every picture as SVG, without a date and with fixed ids: the same each time."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the pictures")
    out = parser.parse_args().out
    mpl.rcParams.update({"svg.hashsalt": "fedcor", "font.size": 9})
    for name, draw in PICTURES.items():
        draw().savefig(out / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
