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
from dataclasses import dataclass

import numpy as np

from fedcor.core.rng import stream
from fedcor.core.types import FloatArray, IntArray
from fedcor.selectors.gp.greedy import Prior, select


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
    """Plays the toy experiment.

    Args:
        seed: Of the samples and of the pairs that Cor learns from.
        clients: Number of clients, N.
        steps: Gradient steps on the two chosen samples.
        rate: Learning rate.
        tries: Random pairs whose loss changes Cor learns from.

    Example:
        >>> from studies.analysis.toy import play
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
