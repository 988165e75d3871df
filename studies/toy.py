"""The paper's toy experiment (Figure 1), reconstructed: why correlations between clients matter.

Each client holds one sample (z, y) in the plane, y = +1 or -1, from two clouds that overlap. The
model is a linear classifier w in R^3 with logistic loss l_k(w) = log(1 + exp(-y_k w'(z_k, 1))). Two
clients are chosen, the current model trains on their two samples, and the global loss is the mean
over all clients. There are three ways to choose:

    Ind   the two clients with the highest local losses at the current model
    Cor   FedCor's greedy choice, from the covariance of the loss changes of random pairs
    Opt   the best of all pairs, found by trying each

The paper does not state its setting. The clouds' distance, the number of steps and the learning
rate here were chosen on seeds 101-108.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedcor.core.rng import stream
from fedcor.core.types import FloatArray, IntArray
from fedcor.reporting.plots import PALETTE, Figure, panel_row, write_caption
from fedcor.selectors.gp.greedy import Prior, select
from studies.plan import Plan
from studies.scaffold import Result, Runs, Study


def _evaluate(plan: Plan, runs: Runs) -> Iterator[Result]:
    """The picture of one seed, and the numbers of twenty."""
    games = {seed: play(seed) for seed in range(1, 21)}
    first = games[1]
    picture = {
        "samples": first.samples.round(4).tolist(),
        "labels": first.labels.tolist(),
        "start_loss": first.start_loss,
        "random_loss": first.random_loss,
        "choices": {
            name: {
                "clients": choice.clients.tolist(),
                "model": choice.model.tolist(),
                "global_loss": choice.global_loss,
            }
            for name, choice in first.choices.items()
        },
    }
    best = [game.choices["Opt"].global_loss for game in games.values()]
    by_choice = {
        "Ind": [game.choices["Ind"].global_loss for game in games.values()],
        "Cor": [game.choices["Cor"].global_loss for game in games.values()],
        "Random": [game.random_loss for game in games.values()],
    }
    ratios = {
        name: [round(loss / opt, 4) for loss, opt in zip(values, best, strict=True)]
        for name, values in by_choice.items()
    }
    numbers = {"seed_1": picture, "loss_relative_to_opt_seeds_1_to_20": ratios}
    before_and_mean = (
        f"global loss before {first.start_loss:.3f}, mean over all pairs {first.random_loss:.3f}"
    )
    caption = f"40 clients, one sample each, two train; {before_and_mean}"
    yield Result(numbers, draw=partial(toy_picture, picture, caption))


STUDY = Study(_evaluate, needs_plan=False)


@dataclass(frozen=True)
class Choice:
    """Two clients and what training on them gives.

    Attributes:
        clients: `(2,)` their ids.
        model: `(3,)` the model after training on their samples.
        global_loss: Its mean loss over all clients.
    """

    clients: IntArray
    model: FloatArray
    global_loss: float


@dataclass(frozen=True)
class Toy:
    """One instance of the toy experiment and its three choices.

    Attributes:
        samples: `(N, 2)` one per client.
        labels: `(N,)` -1 or +1.
        start: `(3,)` the current model, w.
        start_loss: Its mean loss over all clients.
        choices: By name: Ind, Cor, Opt.
        random_loss: Mean of the global loss over all pairs: what a uniform choice gets.
    """

    samples: FloatArray
    labels: FloatArray
    start: FloatArray
    start_loss: float
    choices: dict[str, Choice]
    random_loss: float


def losses(model: FloatArray, features: FloatArray, labels: FloatArray) -> FloatArray:
    """(N,) logistic loss of every sample; `features` are the rows (z_k, 1), `(N, 3)`."""
    values: FloatArray = np.logaddexp(0.0, -labels * (features @ model))
    return values


def train(
    model: FloatArray, features: FloatArray, labels: FloatArray, steps: int, rate: float
) -> FloatArray:
    """Gradient descent on the mean loss of the given samples: `steps` steps of size `rate`."""
    for _ in range(steps):
        pull = labels / (1.0 + np.exp(labels * (features @ model)))
        model = model + rate * (pull @ features) / len(labels)
    return model


def play(
    seed: int = 1, clients: int = 40, steps: int = 20, rate: float = 0.2, tries: int = 400
) -> Toy:
    """Play the toy experiment.

    Args:
        seed: Of the samples and of the pairs that Cor learns from.
        clients: Number of clients, N.
        steps: Gradient steps on the two chosen samples.
        rate: Learning rate.
        tries: Random pairs whose loss changes Cor learns from.

    Example:
        >>> from studies.toy import play
        >>> toy = play(seed=1)
        >>> toy.choices["Opt"].global_loss <= toy.choices["Cor"].global_loss
        True
    """
    rng = stream(seed, "toy")
    labels = np.where(np.arange(clients) % 2 == 0, 1.0, -1.0)
    samples = rng.standard_normal((clients, 2)) + 0.7 * labels[:, None]
    features = np.column_stack([samples, np.ones(clients)])
    start = train(np.zeros(3), features[:1], labels[:1], 4, rate)  # it has seen one client
    before = losses(start, features, labels)

    def outcome(pair: IntArray) -> Choice:
        model = train(start, features[pair], labels[pair], steps, rate)
        return Choice(np.asarray(pair), model, float(losses(model, features, labels).mean()))

    pairs = [np.array(pair) for pair in itertools.combinations(range(clients), 2)]
    every = [outcome(pair) for pair in pairs]
    # FedCor's Gaussian process, from many random pairs: its covariance, factored as X X'.
    tried = [every[i] for i in rng.choice(len(pairs), size=min(tries, len(pairs)), replace=False)]
    # (m, N)
    changes = np.array([losses(choice.model, features, labels) - before for choice in tried])
    values, vectors = np.linalg.eigh(np.cov(changes, rowvar=False))
    X = vectors * np.sqrt(np.maximum(values, 0.0))
    weights = np.full(clients, 1 / clients)
    picks = select(Prior(X, weights, np.ones(clients), 1e-4), 2, np.arange(clients))
    return Toy(
        samples,
        labels,
        start,
        float(before.mean()),
        {
            "Ind": outcome(np.argsort(-before)[:2]),
            "Cor": outcome(picks.clients),
            "Opt": min(every, key=lambda choice: choice.global_loss),
        },
        float(np.mean([choice.global_loss for choice in every])),
    )


def toy_picture(toy: Mapping[str, Any], caption: str) -> Figure:
    """The clients, the three choices of two, and the line that each choice's model draws."""
    figure, (ax,) = panel_row(1, width=5.6, height=4.8)
    samples, labels = np.asarray(toy["samples"]), np.asarray(toy["labels"])
    for sign, marker, name in ((1, "+", "label +1"), (-1, "_", "label −1")):
        mine = samples[labels == sign]
        ax.scatter(
            mine[:, 0], mine[:, 1], marker=marker, s=55, color="#555555", linewidth=1.4, label=name
        )
    low, high = samples.min(axis=0) - 0.5, samples.max(axis=0) + 0.5
    across = np.linspace(low[0], high[0], 2)
    marks = {"Ind": ("s", PALETTE[1]), "Cor": ("o", PALETTE[0]), "Opt": ("^", PALETTE[2])}
    for (name, choice), style, size in zip(
        toy["choices"].items(), (":", "-", "--"), (190, 150, 110), strict=True
    ):
        marker, colour = marks[name]
        chosen = samples[choice["clients"]]
        slope_x, slope_y, bias = choice["model"]
        ax.scatter(
            chosen[:, 0],
            chosen[:, 1],
            marker=marker,
            s=size,
            facecolor="none",
            edgecolor=colour,
            linewidth=1.8,
        )
        ax.plot(
            across,
            -(bias + slope_x * across) / slope_y,
            style,
            color=colour,
            linewidth=1.7,
            marker=marker,
            markersize=6,
            markerfacecolor="none",
            label=f"{name}: global loss {choice['global_loss']:.3f}",
        )
    ax.set_xlim(low[0], high[0])
    ax.set_ylim(low[1], high[1])
    ax.set_xlabel("first coordinate")
    ax.set_ylabel("second coordinate")
    ax.legend(fontsize=8, loc="upper left", framealpha=0.9)
    write_caption(figure, caption)
    return figure
