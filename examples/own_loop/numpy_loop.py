"""A training loop in NumPy with FedCor, which asks for losses too. python numpy_loop.py FOLDER"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import fedcor

images, labels = load_digits(return_X_y=True)
x, targets = images / 16, np.eye(10)[labels]
shards = np.array_split(np.argsort(labels[:1500], kind="stable"), 40)
rows = {f"site-{k}": np.concatenate([shards[k], shards[k + 20]]) for k in range(20)}


def probabilities(model, x):
    exp = np.exp(x @ model["weight"] + model["bias"])
    return exp / exp.sum(axis=1, keepdims=True)


def evaluate(model, client):
    """The client's loss: cross-entropy on its own data."""
    own = rows[client]
    return -np.log(probabilities(model, x[own])[targets[own] == 1]).mean()


def train(model, client):
    """The client's model after ten steps on its own data."""
    own = rows[client]
    for _ in range(10):
        error = (probabilities(model, x[own]) - targets[own]) / len(own)
        model["weight"] -= 0.5 * x[own].T @ error
        model["bias"] -= 0.5 * error.sum(axis=0)
    return model


def test(model):
    """Accuracy and loss on test data, which no client has."""
    found = probabilities(model, x[1500:])
    loss = -np.log(found[targets[1500:] == 1]).mean()
    return {"accuracy": (found.argmax(axis=1) == labels[1500:]).mean(), "loss": loss}


def start(folder):
    """Rounds with a record in `folder`. If the folder has one, they go on after its last round."""
    return fedcor.Rounds(
        fedcor.FedCor(clients_per_round=4, warmup=5, interval=10),
        {"weight": np.zeros((64, 10)), "bias": np.zeros(10)},
        sizes={client: len(own) for client, own in rows.items()},
        learning_rate=0.5,
        tests=True,
        folder=folder,
    )


def main(folder):
    with start(folder) as rounds:
        while rounds.number < 30:
            question = rounds.ask()
            if question.kind == "losses":
                losses = {k: evaluate(question.model, k) for k in question.clients}
                rounds.tell(question, losses=losses)
            elif question.kind == "train":
                models = {k: train(question.model, k) for k in question.clients}
                rounds.tell(question, models=models)
            elif question.kind == "test":
                rounds.tell(question, **test(question.model))
        print(f"accuracy {test(rounds.model)['accuracy']:.3f} after {rounds.number} rounds")


if __name__ == "__main__":
    main(sys.argv[1])
