"""Losses, metrics and the examples that need them: regression, text, tables with client names."""

from __future__ import annotations

import dataclasses
import json
import math
import types

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, make_classification
from sklearn.metrics import mean_absolute_error, r2_score
from torch import nn
from torch.nn import functional as F

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.rng import stream
from fedcor.data.datasets import Dataset
from fedcor.data.own_data import as_dataset, clients_of
from fedcor.data.partition import IID
from fedcor.optimisers.averaging import FedAvg
from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import json_line
from fedcor.selectors.baselines import Random
from fedcor.selectors.fedcor import FedCor
from fedcor.simulation.engine.engine import Engine
from fedcor.simulation.engine.models import build_model
from fedcor.simulation.engine.train import LocalTraining
from fedcor.simulation.faults import Faults
from fedcor.simulation.loop import Simulation
from fedcor.simulation.tasks import Task, build_task, describe_metrics, find_loss, find_metrics


def huber(outputs, targets):
    """A user's loss."""
    return F.huber_loss(outputs, targets, reduction="none")


def macro_recall(targets, outputs):
    """A user's metric."""
    guesses = outputs.argmax(axis=1)
    return np.mean([(guesses[targets == k] == k).mean() for k in np.unique(targets)])


# --- losses ---------------------------------------------------------------------------------------


def test_the_kind_of_targets_decides_the_loss():
    scores, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    task = build_task(classes=3)
    assert task.is_cross_entropy
    expected = F.cross_entropy(scores, labels, reduction="none")
    assert torch.equal(task.losses(scores, labels), expected)
    assert task.mean_loss(scores, labels) == F.cross_entropy(scores, labels)
    numbers = torch.randn(5)
    task = build_task(classes=None)
    assert not task.is_cross_entropy
    assert torch.allclose(task.losses(numbers[:, None] + 2, numbers), torch.full((5,), 4.0))
    assert task.predictions(numbers[:, None]) is None


@pytest.mark.parametrize("classes", [2, 7, 10, 15, 16, 40])
@pytest.mark.parametrize("samples", [1, 7, 16, 1000])
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_the_fast_cross_entropy_has_the_bits_of_torch(classes, samples, scale):
    rng = np.random.default_rng(samples + classes)
    outputs = torch.from_numpy(rng.normal(scale=scale, size=(samples, classes)).astype(np.float32))
    targets = torch.from_numpy(rng.integers(classes, size=samples))
    wanted = F.cross_entropy(outputs, targets, reduction="none")
    assert torch.equal(build_task(classes=classes).losses(outputs, targets), wanted)
    outputs.requires_grad_()
    assert build_task(classes=classes).losses(outputs, targets).requires_grad


def test_several_targets_per_sample_are_averaged():
    task, targets = build_task("mse", classes=None), torch.zeros(2, 3)
    outputs = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]])
    assert torch.allclose(task.losses(outputs, targets), torch.tensor([14 / 3, 3.0]))


@pytest.mark.parametrize("loss", [huber, f"{__name__}:huber", nn.HuberLoss(reduction="none")])
def test_a_users_loss_is_a_function_or_its_name(loss):
    task = build_task(loss, classes=None)
    outputs, targets = torch.tensor([[1.0], [5.0]]), torch.zeros(2)
    assert task.losses(outputs, targets).tolist() == [0.5, 4.5]
    assert float(task.mean_loss(outputs, targets)) == 2.5


@pytest.mark.parametrize(
    ("loss", "classes", "message"),
    [
        ("mse", 3, "needs targets of type float"),
        ("cross_entropy", None, "needs labels"),
        ("cross-entropy", 3, 'did you mean "cross_entropy"'),
        ("no_such_module:loss", 3, "could not be imported"),
        (f"{__name__}:hubber", None, 'did you mean "huber"'),
        (3.0, None, "must be a function"),
    ],
)
def test_losses_that_cannot_work_are_refused(loss, classes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_task(loss, classes=classes)
    assert caught.value.key == "loss"


def test_a_loss_with_one_number_for_all_says_what_to_do():
    task = build_task(nn.MSELoss(), classes=None)
    with pytest.raises(FedcorError, match=r'shape \(4,\), but gave the shape \(\).*="none"'):
        task.losses(torch.zeros(4), torch.zeros(4))
    with pytest.raises(FedcorError, match="but gave float"):
        build_task(lambda outputs, targets: 0.5, classes=None).losses(
            torch.zeros(4), torch.zeros(4)
        )


def test_outputs_are_not_broadcast():
    with pytest.raises(FedcorError, match=r"outputs of shape \(4,\) .* but gave \(4, 2\)"):
        build_task(classes=None).losses(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(FedcorError, match=r"outputs of shape \(4, 3\) .* but gave \(4, 2\)"):
        build_task(classes=3).losses(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))


# --- metrics --------------------------------------------------------------------------------------


def carrying(greater_is_better):
    """A metric that says which direction is better."""

    def metric(targets, outputs):
        return 0.0

    metric.greater_is_better = greater_is_better
    return metric


def told_error(targets, outputs):
    return float(abs(targets - outputs).mean())


told_error.greater_is_better = False
MAE = "sklearn.metrics:mean_absolute_error"


@pytest.mark.parametrize(
    ("given", "described"),
    [
        (macro_recall, f"{__name__}:macro_recall"),
        (MAE, MAE),
        ((macro_recall, "higher"), {"function": f"{__name__}:macro_recall", "better": "higher"}),
        ([MAE, "lower"], {"function": MAE, "better": "lower"}),
        ({"function": MAE, "better": "lower"}, {"function": MAE, "better": "lower"}),
        (told_error, {"function": f"{__name__}:told_error", "better": "lower"}),
        (f"{__name__}:told_error", {"function": f"{__name__}:told_error", "better": "lower"}),
        ((told_error, "higher"), {"function": f"{__name__}:told_error", "better": "higher"}),
    ],
)
def test_a_record_has_the_direction_of_a_metric_only_if_it_was_said(given, described):
    assert describe_metrics({"m": given}) == {"m": described}
    assert callable(find_metrics({"m": given})["m"])
    assert describe_metrics({"m": described}) == {"m": described}  # as a file gives it again


def test_a_carried_direction():
    assert describe_metrics({"m": carrying(True)})["m"]["better"] == "higher"
    assert "better" not in describe_metrics({"m": carrying(None)})["m"]
    assert find_metrics({"loss": (macro_recall, "lower")}) == {"loss": macro_recall}


def test_metrics_are_functions_or_their_names():
    given = {"mae": mean_absolute_error, "r2": "sklearn.metrics:r2_score"}
    task = build_task(metrics=given, classes=None)
    targets = np.array([1.0, 2.0, 3.0], np.float32)
    assert task.measure(targets, targets + 1) == {"mae": 1.0, "r2": pytest.approx(-0.5)}
    assert find_metrics({}) == {}


@pytest.mark.parametrize(
    ("metrics", "key", "message"),
    [
        ({"f1": "f1_score"}, "metrics.f1", "must be module:function"),
        ({"f1": "sklearn.metrics:f1_scor"}, "metrics.f1", 'did you mean "f1_score"'),
        ({"f1": 3}, "metrics.f1", "must be a function"),
        ([macro_recall], "metrics", "must be a dictionary"),
        ({"e": (macro_recall, "less")}, "metrics.e", 'must be "lower" or "higher"'),
        ({"e": (macro_recall, ["lower"])}, "metrics.e", 'must be "lower" or "higher"'),
        ({"e": (macro_recall,)}, "metrics.e", "a pair of one and"),
        ({"e": ("lower", macro_recall)}, "metrics.e", 'must be "lower" or "higher"'),
        ({"e": ("recall", "lower")}, "metrics.e", "must be module:function"),
        ({"e": {"function": macro_recall}}, "metrics.e", "table of function and better"),
        ({"e": {"function": "a:b", "better": 1}}, "metrics.e.better", '"lower" or "higher"'),
        ({"e": carrying(1)}, "metrics.e.greater_is_better", "must be True or False"),
        ({"accuracy": (macro_recall, "lower")}, "metrics.accuracy", "choose another name"),
        ({"loss": carrying(True)}, "metrics.loss", "choose another name"),
    ],
)
def test_metrics_that_cannot_work_are_refused(metrics, key, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find_metrics(metrics)
    assert caught.value.key == key


def test_a_metric_that_fails_is_named():
    numbers = np.zeros(3)
    task = Task(find_loss("mse"), None, {"odd": lambda targets, outputs: 1 / 0})
    with pytest.raises(FedcorError, match=r"metric odd failed on .*\(3,\).*ZeroDivisionError"):
        task.measure(numbers, numbers)
    task = Task(find_loss("mse"), None, {"odd": lambda targets, outputs: targets})
    with pytest.raises(FedcorError, match="metric odd must give a number, but gave a ndarray"):
        task.measure(numbers, numbers)


def test_registered_losses_and_metrics_have_names(monkeypatch):
    def points(group, name=None):
        known = {
            "fedcor.losses": [types.SimpleNamespace(name="huber", value=f"{__name__}:huber")],
            "fedcor.metrics": [
                types.SimpleNamespace(name="recall", value=f"{__name__}:macro_recall")
            ],
        }[group]
        return [point for point in known if name in (None, point.name)]

    monkeypatch.setattr("fedcor.simulation.tasks.entry_points", points)
    assert find_loss("huber").__name__ == "huber"
    assert find_metrics({"r": "recall"})["r"].__name__ == "macro_recall"
    with pytest.raises(ConfigError, match="one of cross_entropy, mse, huber, or module:function"):
        find_loss("hinge")


# --- the record -----------------------------------------------------------------------------------


def test_a_line_has_metrics_only_where_there_are_any():
    plain = RoundRecord(0, [], [], math.nan, 1.0, 0.1, 0, 0, 0, 0, 0.0)
    assert "metrics" not in json.loads(json_line(dataclasses.asdict(plain)))
    more = dataclasses.replace(plain, metrics={"r2": 0.5, "f1": math.nan})
    line = json.loads(json_line(dataclasses.asdict(more)))
    assert line["metrics"] == {"r2": 0.5, "f1": None}
    assert line["test_accuracy"] is None


# --- examples, from data to rounds ----------------------------------------------------------------


def simulation(
    data, parts, module, *, selector=None, task=None, rate=0.05, steps=5, seed=1, **options
):
    local = LocalTraining(batch_size=16, local_steps=steps, learning_rate=0.0)
    engine = Engine(data, parts, module, local, seed, task=task, **options)
    return Simulation(
        engine=engine,
        selector=selector or Random(3),
        optimiser=FedAvg(),
        faults=Faults(),
        learning_rate=rate,
        seed=seed,
    )


def diabetes():
    bunch = load_diabetes()
    x, y = bunch.data * 20, (bunch.target - bunch.target.mean()) / bunch.target.std()
    return x[:350], y[:350], x[350:], y[350:]


def test_a_regression_learns():
    data, parts = as_dataset(diabetes(), partition=np.arange(350) % 10)
    assert (data.classes, data.outputs, data.train_y.dtype) == (None, 1, np.float32)
    task = build_task(metrics={"r2": r2_score}, classes=None)
    module = build_model("logistic", data.shape, data.outputs, 1, data=data, task=task)
    selector = FedCor(3, warmup=2, interval=3, dimension=2)
    records = [
        record for record, _ in simulation(data, parts, module, selector=selector, task=task).run(8)
    ]
    assert records[-1].test_loss < 0.8 * records[0].test_loss
    assert all(math.isnan(record.test_accuracy) for record in records)
    spread = float(np.var(data.test_y))
    assert records[-1].metrics["r2"] == pytest.approx(1 - records[-1].test_loss / spread, abs=1e-3)


class EmbeddingBag(nn.Module):
    """Mean of the embeddings of a text's words; its batch is a dictionary."""

    def __init__(self, words=30, classes=2):
        super().__init__()
        self.embedding = nn.Embedding(words, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, batch):
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (self.embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1)
        return types.SimpleNamespace(logits=self.head(mean))  # as Hugging Face's modules


def texts(n=400, length=9, seed=0):
    """Texts in which words above 15 are more frequent in the second class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    sizes = rng.integers(3, length + 1, size=n)
    ids = np.where(
        rng.random((n, length)) < 0.75, 15 * labels[:, None], 15 - 15 * labels[:, None]
    ) + rng.integers(15, size=(n, length))
    mask = (np.arange(length) < sizes[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}, labels


@pytest.mark.parametrize("by_ids", [True, False], ids=["client ids", "iid"])
def test_a_text_classifier_takes_dictionaries(by_ids):
    x, y = texts()
    ids = [f"author {k % 8}" for k in range(len(y))]
    data, parts = as_dataset((x, y), texts(100, seed=1), partition=ids if by_ids else None)
    if by_ids:
        assert data.client_names == tuple(f"author {k}" for k in range(8))
    else:
        parts = IID(8).split(data.train_y, stream(1, "partition"))
    assert data.shape == {"input_ids": (9,), "attention_mask": (9,)}
    task = build_task(metrics={"recall": macro_recall}, classes=data.classes)
    module = build_model(EmbeddingBag, data.shape, 2, 1, data=data, task=task)
    selector = FedCor(3, warmup=2, interval=2, dimension=2)
    run = simulation(data, parts, module, selector=selector, task=task, rate=1.0, steps=8)
    records = [record for record, _ in run.run(5)]
    assert records[-1].test_accuracy > 0.8
    assert records[-1].metrics["recall"] == pytest.approx(records[-1].test_accuracy, abs=0.05)
    assert run.engine.accuracies(run.start.model, np.arange(8)).shape == (8,)
    with pytest.raises(ConfigError, match="the data has input_ids, attention_mask: give a model"):
        build_model("mlp", data.shape, 2, 1)


def test_a_table_with_named_clients_and_classes():
    x, y = make_classification(300, 6, random_state=0)
    hospitals = np.array(["Bern", "Lyon", "Oslo", "Rome", "Wien"])[np.arange(200) % 5]
    kinds = np.array(["ill", "well"])[y]
    data, parts = as_dataset(
        (x[:200], kinds[:200], x[200:], kinds[200:]), partition=hospitals, name="hospitals"
    )
    assert (data.classes, data.label_names) == (2, ("ill", "well"))
    assert [len(part) for part in parts] == [40] * 5
    module = build_model(lambda: nn.Sequential(nn.Linear(6, 2)), data.shape, 2, 1, data=data)
    run = simulation(data, parts, module, rate=0.2)
    assert run.engine.trains_stacked
    records = [record for record, _ in run.run(6)]
    assert records[-1].test_accuracy > 0.8
    assert records[-1].metrics == {}


# --- the engine with other data -------------------------------------------------------------------


def test_what_needs_labels_says_so_in_a_regression():
    data, parts = as_dataset(diabetes(), partition=np.arange(350) % 10)
    engine = simulation(data, parts, nn.Linear(10, 1)).engine
    with pytest.raises(FedcorError, match="not labels"):
        engine.majority_labels()
    assert np.isnan(engine.accuracies(engine.initial_model, np.arange(10))).all()
    assert np.isfinite(engine.losses(engine.initial_model, np.arange(10))).all()


def test_targets_whose_losses_would_all_be_refused_are_to_be_scaled():
    x, y, x_test, y_test = diabetes()
    data, parts = as_dataset((x, y * 1e5, x_test, y_test * 1e5), partition=np.arange(350) % 10)
    with pytest.raises(FedcorError, match="first model has a test loss of .* scale the targets"):
        next(simulation(data, parts, nn.Linear(10, 1)).run(1))


def test_client_losses_of_a_regression_equal_a_loop():
    data, parts = as_dataset(diabetes(), partition=np.arange(350) % 10)
    engine = simulation(data, parts, nn.Linear(10, 1), holdout=0.0).engine
    losses = engine.losses(engine.initial_model, np.arange(10))
    some = engine.losses(engine.initial_model, np.array([7, 2]))
    for k, part in enumerate(parts):
        outputs = engine.module(torch.from_numpy(data.train_x[part]))[:, 0].detach()
        loss = F.mse_loss(outputs, torch.from_numpy(data.train_y[part]))
        assert losses[k] == pytest.approx(float(loss), rel=1e-5)
    assert some == pytest.approx(losses[[7, 2]], rel=1e-6)


class Answers(nn.Module):
    """Returns what a test says."""

    def __init__(self, answer):
        super().__init__()
        self.layer, self.answer = nn.Linear(10, 1), answer

    def forward(self, x):
        return self.answer(self, x)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda self, x: (self.layer(x),), "must return a tensor, .* but returned a tuple"),
        (
            lambda self, x: self.layer(x)[:3],
            r"outputs of shape \(92,\) for 92 samples, but gave \(3, 1\)",
        ),
        (lambda self, x: x["pixels"], "failed in evaluation: IndexError"),
    ],
)
def test_models_that_answer_something_else_are_reported(answer, message):
    data, parts = as_dataset(diabetes(), partition=np.arange(350) % 10)
    engine = simulation(data, parts, Answers(answer)).engine
    with pytest.raises(FedcorError, match=message):
        engine.test(engine.initial_model)


def test_a_model_is_tried_on_the_data_before_anything_runs():
    data, _ = as_dataset(diabetes())
    task = build_task(classes=None)
    with pytest.raises(ConfigError, match=r"does not fit the loss: .* but gave \(2, 4\)"):
        build_model(lambda: nn.Linear(10, 4), data.shape, 1, 1, data=data, task=task)
    with pytest.raises(ConfigError, match=r"cannot take samples of shape \(10,\)"):
        build_model(lambda: nn.Linear(9, 1), data.shape, 1, 1, data=data, task=task)


def test_models_as_objects():
    ready = nn.Linear(10, 1)
    one, other = (build_model(ready, (10,), 1, seed) for seed in (1, 2))
    assert torch.equal(one.weight, ready.weight)
    assert one is not ready
    assert one is not other
    by_shape = build_model(lambda shape, outputs: nn.Linear(*shape, outputs), (10,), 1, 1)
    plain = build_model(lambda: nn.Linear(10, 1), (10,), 1, 1)
    assert torch.equal(by_shape.weight, plain.weight)  # drawn from the same stream
    with pytest.raises(ConfigError, match="must make a torch.nn.Module, but made a int"):
        build_model(lambda: 3, (10,), 1, 1)


def test_data_that_may_only_be_read_is_taken_as_it_is():
    x, y, x_test, y_test = (np.asarray(a, np.float32) for a in diabetes())
    for array in (x, y, x_test, y_test):
        array.flags.writeable = False
    data, _ = as_dataset((x, y, x_test, y_test))
    assert isinstance(data, Dataset)
    assert np.shares_memory(data.train_x, x)
    assert np.shares_memory(data.test_y, y_test)
    simulation(data, clients_of(np.arange(350) % 10)[0], nn.Linear(10, 1))
