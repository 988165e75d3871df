"""The paper's toy experiment (its Figure 1), reconstructed: why correlations matter for a choice of two clients.

Each client holds one sample (z, y) in the plane, y = +1 or -1, from two clouds that overlap. The model is a linear classifier w
in R^3 with logistic loss l_k(w) = log(1 + exp(-y_k w'(z_k, 1))). Two clients are chosen, the current model trains on their two
samples, and the global loss is the mean over everyone. Three ways to choose, none placed by hand:

    Ind   the two clients with the highest local losses at the current model
    Cor   FedCor's greedy choice, from the covariance of the loss changes of random pairs
    Opt   the best of all pairs, by trying each

The paper does not spell its setting out. The clouds' distance, the steps and the rate here were chosen on seeds 101-108.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from fedcor.gp import select
from fedcor.rng import stream
from fedcor.types import FloatArray, IntArray

__all__ = ["Choice", "Toy", "play"]


@dataclass(frozen=True)
class Choice:
    clients: IntArray  # (2,)
    model: FloatArray  # (3,) after training on them
    global_loss: float


@dataclass(frozen=True)
class Toy:
    samples: FloatArray  # (N, 2)
    labels: FloatArray  # (N,) -1 or +1
    start: FloatArray  # (3,) the current model
    start_loss: float
    choices: dict[str, Choice]  # Ind, Cor, Opt
    random_loss: float  # mean over all pairs: what a uniform choice gets


def losses(model: FloatArray, features: FloatArray, labels: FloatArray) -> FloatArray:
    values: FloatArray = np.logaddexp(0.0, -labels * (features @ model))
    return values


def train(
    model: FloatArray, features: FloatArray, labels: FloatArray, steps: int, rate: float
) -> FloatArray:
    """Gradient descent on the mean loss of the chosen samples: the mean of the two clients' updates, step by step."""
    for _ in range(steps):
        pull = labels / (1.0 + np.exp(labels * (features @ model)))
        model = model + rate * (pull @ features) / len(labels)
    return model


def play(
    seed: int = 1, clients: int = 40, steps: int = 20, rate: float = 0.2, tries: int = 400
) -> Toy:
    """Two clouds, a current model that has seen little, and the three choices of two clients."""
    rng = stream(seed, "toy")
    labels = np.where(np.arange(clients) % 2 == 0, 1.0, -1.0)
    samples = rng.standard_normal((clients, 2)) + 0.7 * labels[:, None]
    features = np.column_stack([samples, np.ones(clients)])
    start = train(
        np.zeros(3), features[:1], labels[:1], 4, rate
    )  # the current model knows one client
    before = losses(start, features, labels)

    def outcome(pair: IntArray) -> Choice:
        model = train(start, features[pair], labels[pair], steps, rate)
        return Choice(np.asarray(pair), model, float(losses(model, features, labels).mean()))

    pairs = [np.array(pair) for pair in itertools.combinations(range(clients), 2)]
    every = [outcome(pair) for pair in pairs]
    # FedCor's process, from many random pairs: its covariance, factored as X X'.
    tried = [every[i] for i in rng.choice(len(pairs), size=min(tries, len(pairs)), replace=False)]
    changes = np.array(
        [losses(choice.model, features, labels) - before for choice in tried]
    )  # (m, N)
    values, vectors = np.linalg.eigh(np.cov(changes, rowvar=False))
    X = vectors * np.sqrt(np.maximum(values, 0.0))
    weights = np.full(clients, 1 / clients)
    picks = select(X, weights, np.ones(clients), 1e-4, 2, np.arange(clients))
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
