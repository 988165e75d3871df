"""A site: softmax regression on its part of scikit-learn's digits, with NVFlare's client API."""

import numpy as np
import nvflare.client as flare
from sklearn.datasets import load_digits

STEPS, LEARNING_RATE = 20, 0.5


def site_data(site):
    """Images (n, 65), whose last column is 1, and labels: three digits for each of site-1, ..."""
    images, labels = load_digits(return_X_y=True)
    first = int(site.removeprefix("site-"))
    mine = np.isin(labels, [first % 10, (first + 1) % 10, (first + 2) % 10])
    return np.column_stack([images[mine] / 16, np.ones(mine.sum())]), labels[mine]


def predict(weights, images):
    """Probabilities of the digits (n, 10)."""
    scores = images @ weights
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def evaluate(weights, images, labels):
    found = predict(weights, images)
    loss = -np.log(found[np.arange(len(labels)), labels] + 1e-12).mean()
    return {"loss": float(loss), "accuracy": float((found.argmax(axis=1) == labels).mean())}


def train(weights, images, labels):
    for _ in range(STEPS):
        errors = predict(weights, images) - np.eye(10)[labels]
        weights = weights - LEARNING_RATE * images.T @ errors / len(labels)
    return weights


flare.init()
images, labels = site_data(flare.get_site_name())
while flare.is_running():
    weights = flare.receive().params["numpy_key"]
    reply = flare.FLModel(metrics=evaluate(weights, images, labels))  # before training
    if flare.is_train():
        reply.params = {"numpy_key": train(weights, images, labels)}
        reply.meta["NUM_STEPS_CURRENT_ROUND"] = STEPS
    flare.send(reply)
