"""Training against its reference implementation, evaluation against a loop, models and faults."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from benchmarks.plain_training import train_plainly
from hypothesis import given
from hypothesis import strategies as st
from small_engines import MODELS, PARTS, Residual, dataset, engine_of, users_stack
from torch import nn
from torch.nn import functional as F

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.core.rng import stream
from fedcor.core.types import optimiser_traits
from fedcor.optimisers.averaging import FedAvg, FedProx
from fedcor.simulation.engine.engine import Engine, trainer_for
from fedcor.simulation.engine.models import ClientDropout, ModelVector, build_model
from fedcor.simulation.engine.stacked import dense_stack
from fedcor.simulation.engine.train import Assignment, LocalTraining, LoopTrainer, schedule
from fedcor.simulation.faults import Faults
from fedcor.simulation.server_step import next_model
from fedcor.simulation.tasks import build_task


def too_few_outputs(shape, classes):
    return nn.Linear(shape[0], classes - 1)


def wrong_inputs(shape, classes):
    return nn.Linear(shape[0] + 1, classes)


def failing(shape, classes):
    raise ZeroDivisionError


def train_reference(engine, clients, round, seed=3, corrections=None):
    """The reference implementation in the place of `engine.train`."""
    training, steps = engine.local_training, engine.local_training.local_steps
    x, y, rows = engine.store.training(clients)
    work = [Assignment(k, round, seed, r, steps) for k, r in zip(clients, rows, strict=True)]
    start, task = engine.initial_model, engine.task
    return train_plainly(
        engine.module, start, work, x, y, training=training, task=task, corrections=corrections
    )


@pytest.mark.parametrize("proximal", [0.0, 0.7], ids=["fedavg", "fedprox"])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_reference_implementation(model, proximal):
    engine = engine_of(model, LocalTraining(8, 11, 0.1, weight_decay=0.01, proximal=proximal))
    assert isinstance(engine._trainer, MODELS[model][3])
    # Batch normalisation does not accept batches of one, which client 0 would have.
    clients = [4, 1, 2] if "module" in model else [4, 0, 1, 2]
    fast = engine.train(engine.initial_model, clients, 6, 0.1)
    assert torch.allclose(fast, train_reference(engine, clients, 6), rtol=1e-4, atol=1e-5)
    assert (fast - engine.initial_model).abs().max() > 1e-2  # it did train


def corrections_of(engine, clients, scale=0.3):
    """A correction per client, of parameters alone."""
    rng = np.random.default_rng(8)
    drawn = scale * rng.standard_normal((len(clients), engine.vector.trained))
    return torch.from_numpy(drawn.astype(np.float32))


@pytest.mark.parametrize("proximal", [0.0, 0.7], ids=["fedavg", "fedprox"])
@pytest.mark.parametrize("model", MODELS)
def test_corrected_training_equals_the_reference_implementation(model, proximal):
    engine = engine_of(model, LocalTraining(8, 6, 0.1, weight_decay=0.01, proximal=proximal))
    clients = [4, 1, 2]
    corrections = corrections_of(engine, clients)
    fast = engine.train(engine.initial_model, clients, 6, 0.1, corrections=corrections)
    slow = train_reference(engine, clients, 6, corrections=corrections)
    assert torch.allclose(fast, slow, rtol=1e-4, atol=1e-5)
    plain = engine.train(engine.initial_model, clients, 6, 0.1)
    assert (fast - plain).abs().max() > 1e-2  # they do something
    zeros = torch.zeros_like(corrections)
    assert torch.equal(
        plain, engine.train(engine.initial_model, clients, 6, 0.1, corrections=zeros)
    )


@pytest.mark.parametrize("model", ["mlp with dropout", "cnn", "a user's module"])
def test_each_client_has_its_own_correction_whoever_trains_with_it(model, monkeypatch):
    engine, clients, steps = engine_of(model, LocalTraining(8, 6, 0.1)), [1, 4, 2, 3], [6, 2, 6, 6]
    corrections = corrections_of(engine, clients)
    monkeypatch.setattr("fedcor.simulation.engine.engine._CLIENTS_AT_ONCE", 2)
    together = engine.train(
        engine.initial_model, clients, 2, 0.1, steps=steps, corrections=corrections
    )
    for i, client in enumerate(clients):
        alone = engine.train(
            engine.initial_model,
            [client],
            2,
            0.1,
            steps=steps[i : i + 1],
            corrections=corrections[i : i + 1],
        )
        assert torch.equal(together[i], alone[0])


def test_a_correction_is_added_to_the_gradient_of_every_step():
    """With a tiny learning rate, gradients do not change, and a step moves by -eta (g + e)."""
    eta, steps = 1e-4, 7
    engine = engine_of("logistic", LocalTraining(200, steps, eta))
    e = corrections_of(engine, [3], scale=1.0)
    plain = engine.train(engine.initial_model, [3], 0, eta)
    moved = engine.train(engine.initial_model, [3], 0, eta, corrections=e) - plain
    assert torch.allclose(moved, -eta * steps * e, rtol=0.02, atol=1e-6)


def test_parameters_that_do_not_train_and_buffers_are_not_corrected():
    engine = engine_of("a user's module", LocalTraining(8, 3, 0.1))
    names = [name for name, _ in engine.module.named_parameters()]
    engine.module.first.weight.requires_grad_(False)
    corrections = torch.ones(1, engine.vector.trained)
    after = engine.train(engine.initial_model, [2], 0, 0.1, corrections=corrections)[0]
    for name, old, new in zip(
        names, engine.vector.split(engine.initial_model), engine.vector.split(after), strict=False
    ):
        # The loss does not depend on `unused`.
        assert torch.equal(old, new) == (name in ("first.weight", "unused")), name
    engine.module.first.weight.requires_grad_(True)


class OfDictionaries(nn.Module):
    """A user's module whose batch is a dictionary, with batch normalisation and dropout."""

    def __init__(self, outputs):
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(6 + 12, outputs)

    def forward(self, batch):
        h = self.drop(self.norm(self.words(batch["ids"]).mean(1)))
        return self.last(torch.cat([h, batch["numbers"]], dim=1))


def asymmetric(outputs, targets):
    """A user's loss: too little is worse than too much."""
    error = outputs - targets
    return torch.where(error < 0, 3 * error**2, error**2)


def smoothed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def dictionaries(data):
    """The samples with token ids beside them."""
    rng = np.random.default_rng(5)

    def with_ids(x):
        return {"ids": rng.integers(20, size=(len(x), 4)), "numbers": x}

    return dataclasses.replace(data, train_x=with_ids(data.train_x), test_x=with_ids(data.test_x))


def numbers(data, targets=1):
    """A regression of the same samples."""
    rng = np.random.default_rng(6)
    shape = () if targets == 1 else (targets,)
    y = [
        rng.standard_normal((len(x), *shape)).astype(np.float32)
        for x in (data.train_x, data.test_x)
    ]
    return dataclasses.replace(data, train_y=y[0], test_y=y[1], classes=None)


OTHER_TASKS = {
    "regression, dense": (numbers, None, lambda: nn.Sequential(nn.Linear(12, 1))),
    "regression, two targets": (
        lambda data: numbers(data, 2),
        None,
        lambda: nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 2)),
    ),
    "a user's loss": (numbers, asymmetric, lambda: nn.Sequential(nn.Linear(12, 1))),
    "a user's loss of labels": (lambda data: data, smoothed, lambda: users_stack((12,), 3)),
    "dictionaries": (dictionaries, None, lambda: OfDictionaries(3)),
    "dictionaries, regression": (
        lambda data: dictionaries(numbers(data)),
        asymmetric,
        lambda: OfDictionaries(1),
    ),
    "batch norm, regression": (numbers, None, lambda: Residual((12,), 1)),
}


@pytest.mark.parametrize("proximal", [0.0, 0.7], ids=["fedavg", "fedprox"])
@pytest.mark.parametrize("case", OTHER_TASKS)
def test_training_for_other_tasks_equals_the_reference_implementation(case, proximal):
    change, loss, make = OTHER_TASKS[case]
    data = change(dataset())
    task = build_task(loss, classes=data.classes)
    module = build_model(make, data.shape, data.outputs, 3, data=data, task=task)
    training = LocalTraining(8, 7, 0.05, weight_decay=0.01, proximal=proximal)
    engine = Engine(data, PARTS, module, training, 3, task=task)
    assert isinstance(engine._trainer, LoopTrainer)
    clients = [4, 1, 2]
    fast = engine.train(engine.initial_model, clients, 6, 0.05)
    assert torch.allclose(fast, train_reference(engine, clients, 6), rtol=1e-4, atol=1e-5)
    assert (fast - engine.initial_model).abs().max() > 1e-2  # it did train
    alone = engine.train(engine.initial_model, [2], 6, 0.05)
    assert torch.equal(fast[2], alone[0])
    before, after = (engine.losses(m, np.array([2]))[0] for m in (engine.initial_model, fast[2]))
    assert after < before


def test_the_loop_and_the_stack_agree_where_both_can_train():
    """A user's cross entropy takes the loop, the built-in one the stack."""

    def same(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

    stacked, looped = (
        Engine(
            dataset(),
            PARTS,
            build_model("mlp", (12,), 3, 3, {"hidden": [7]}),
            LocalTraining(8, 7, 0.1),
            3,
            task=build_task(loss, classes=3),
        )
        for loss in (None, same)
    )
    assert stacked.trains_stacked
    assert not looped.trains_stacked
    w = stacked.initial_model
    one, other = (engine.train(w, [1, 2], 0, 0.1) for engine in (stacked, looped))
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert stacked.test(w) == looped.test(w)


def test_a_module_that_misses_an_input_is_reported_with_client_and_round():
    data = dictionaries(dataset())
    module = OfDictionaries(3)
    engine = Engine(data, PARTS, module, LocalTraining(8, 2, 0.1), 3)
    del engine.store._x["ids"]
    with pytest.raises(
        FedcorError, match="round 7, client 2: local training failed: KeyError: 'ids'"
    ):
        engine.train(engine.initial_model, [2], 7, 0.1)


@pytest.mark.parametrize("model", MODELS)
def test_a_clients_result_does_not_depend_on_who_trains_with_it(model, monkeypatch):
    engine = engine_of(model, LocalTraining(8, 5, 0.1, weight_decay=0.01))
    together = engine.train(engine.initial_model, [1, 2, 3, 4], 2, 0.1)
    monkeypatch.setattr(
        "fedcor.simulation.engine.engine._CLIENTS_AT_ONCE", 3
    )  # the fourth trains alone
    assert torch.equal(together, engine.train(engine.initial_model, [1, 2, 3, 4], 2, 0.1))
    for clients in ([3], [4, 3], [3, 1, 4]):
        alone = engine.train(engine.initial_model, clients, 2, 0.1)[clients.index(3)]
        assert torch.equal(together[2], alone)


def test_dropout_masks_depend_on_seed_round_and_client_alone():
    engine = engine_of("mlp with dropout", LocalTraining(8, 5, 0.1))

    def result(client, round):
        return engine.train(engine.initial_model, [client], round, 0.1)[0]

    assert torch.equal(result(2, 0), result(2, 0))
    assert not torch.equal(result(2, 0), result(2, 1))
    one, other = (train_reference(engine, [2], 0, seed) for seed in (3, 4))
    assert not torch.equal(one, other)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    result(2, 3)
    assert torch.equal(before, torch.get_rng_state())  # torch's global stream did not change


def test_training_a_users_module_does_not_change_torchs_global_stream():
    engine = engine_of("a user's module", LocalTraining(8, 5, 0.1))
    before = torch.get_rng_state()
    engine.train(engine.initial_model, [2, 3], 0, 0.1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_users_module_that_fails_is_reported_with_client_and_round():
    # Batch normalisation does not accept batches of one.
    engine = engine_of("a user's module", LocalTraining(1, 2, 0.1))
    message = "round 7, client 2: local training failed: ValueError: Expected more than 1 value"
    with pytest.raises(FedcorError, match=message):
        engine.train(engine.initial_model, [2], 7, 0.1)


def test_training_samples_of_another_type_than_the_test_data_are_reported():
    data = dataset()
    whole = dataclasses.replace(data, train_x=data.train_x.astype(np.int64))
    module = build_model("logistic", data.shape, 3, 0)
    engine = Engine(whole, [np.arange(60), np.arange(60, 120)], module, LocalTraining(8, 2, 0.1), 3)
    with pytest.raises(FedcorError, match="round 4, client 1: local training failed"):
        engine.train(engine.initial_model, [1], 4, 0.1)


def test_clients_can_train_for_different_numbers_of_steps():
    engine = engine_of("mlp", LocalTraining(8, 6, 0.1))
    mixed = engine.train(engine.initial_model, [1, 2, 3], 0, 0.1, steps=[6, 2, 6])
    short = engine_of("mlp", LocalTraining(8, 2, 0.1)).train(engine.initial_model, [2], 0, 0.1)
    assert torch.equal(mixed[1], short[0])
    assert torch.equal(mixed[[0, 2]], engine.train(engine.initial_model, [1, 3], 0, 0.1))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 30))
def test_mini_batches_use_every_sample_once_per_pass(n, size, steps):
    batches = schedule(stream(0, "shuffle"), n, size, steps)
    assert len(batches) == steps
    per_pass = -(-n // size)
    for start in range(0, steps - per_pass + 1, per_pass):
        assert sorted(np.concatenate(batches[start : start + per_pass])) == list(range(n))
    assert all(1 <= len(batch) <= size for batch in batches)


def test_the_proximal_term_is_the_gradient_of_the_squared_distance():
    """The first step is that of FedAvg; the second differs by eta * mu * (w_1 - w^t)."""
    eta, mu = 0.1, 0.5
    one = engine_of("logistic", LocalTraining(50, 1, eta)).train
    plain = engine_of("logistic", LocalTraining(50, 2, eta))
    pulled = engine_of("logistic", LocalTraining(50, 2, eta, proximal=mu))
    w = plain.initial_model
    after_one = one(w, [2], 0, eta)[0]
    expected = plain.train(w, [2], 0, eta)[0] - eta * mu * (after_one - w)
    assert torch.allclose(pulled.train(w, [2], 0, eta)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(3, 2), ClientDropout(1.0), nn.ReLU(), nn.Linear(2, 2)),
        nn.Sequential(nn.Flatten()),
    ],
    ids=str,
)
def test_other_modules_are_trained_client_by_client(module):
    assert dense_stack(module) is None
    task, x = build_task(classes=2), torch.zeros(4, 3)
    assert isinstance(trainer_for(module, ModelVector(module), 8, x, task), LoopTrainer)


class OwnForward(nn.Sequential):
    def forward(self, x):
        return 2.0 * super().forward(x)


def frozen_first_layer():
    module = users_stack((12,), 3)
    module[0].requires_grad_(False)
    return module


def hooked():
    module = users_stack((12,), 3)
    module[0].register_forward_hook(lambda layer, inputs, output: output * 0.5)
    return module


def one_layer_twice():
    shared = nn.Linear(12, 12)
    return nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(12, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnForward(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)),
        frozen_first_layer,
        hooked,
        one_layer_twice,
    ],
    ids=["own forward", "frozen", "hooked", "shared"],
)
def test_modules_that_only_resemble_dense_layers_are_trained_as_written(make):
    torch.manual_seed(0)
    engine = Engine(dataset(), PARTS, make(), LocalTraining(8, 4, 0.1, weight_decay=0.01), 3)
    assert isinstance(engine._trainer, LoopTrainer)
    fast = engine.train(engine.initial_model, [2, 4], 0, 0.1)
    assert torch.allclose(fast, train_reference(engine, [2, 4], 0), rtol=1e-4, atol=1e-5)


def test_integer_buffers_do_not_leak_from_one_training_to_the_next():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(12, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU(), nn.Linear(4, 3)
    )
    engine = Engine(dataset(), PARTS, module, LocalTraining(8, 4, 0.1), 3)
    first = engine.train(engine.initial_model, [2], 0, 0.1)
    engine.train(engine.initial_model, [3, 4], 0, 0.1)
    assert torch.equal(first, engine.train(engine.initial_model, [2], 0, 0.1))


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7, 11, 13, 25])
@pytest.mark.parametrize("hidden", [[13, 7], [5], []])
def test_results_do_not_depend_on_who_trains_together_for_odd_shapes(batch_size, hidden):
    data = dataset((13,), classes=5)
    module = build_model("mlp", (13,), 5, 3, {"hidden": hidden, "dropout": 0.3})
    engine = Engine(data, PARTS, module, LocalTraining(batch_size, 4, 0.1), 3)
    together = engine.train(engine.initial_model, [1, 2, 3, 4], 2, 0.1)
    for clients in ([3], [4, 3], [3, 1, 4], [0, 1, 3]):
        assert torch.equal(
            together[2], engine.train(engine.initial_model, clients, 2, 0.1)[clients.index(3)]
        )


def test_a_batch_size_above_every_client_is_cut_to_the_largest_client():
    small, huge = (engine_of("mlp", LocalTraining(B, 3, 0.1)) for B in (42, 100_000))
    assert huge._trainer.largest_client == 42
    assert torch.equal(
        small.train(small.initial_model, [1, 2], 0, 0.1),
        huge.train(small.initial_model, [1, 2], 0, 0.1),
    )


def test_training_uses_the_learning_rate_of_the_round():
    """The change of a single step on all data of a client is proportional to the rate."""
    engine = engine_of("logistic", LocalTraining(50, 1, 0.1))
    w = engine.initial_model
    one, two = (engine.train(w, [2], 0, rate)[0] - w for rate in (0.1, 0.2))
    assert torch.allclose(2 * one, two, atol=1e-6)


def test_dropout_masks_keep_the_mean():
    layer = ClientDropout(0.2).train()
    layer.stream = stream(0, "masks")
    mask = layer(torch.ones(200, 100))
    assert set(mask.unique().tolist()) == {0.0, 1.25}
    assert float((mask == 0).float().mean()) == pytest.approx(0.2, abs=0.01)


def test_data_is_shuffled_differently_for_every_pass_round_and_client():
    def order(client, round, start=0):
        assignment = Assignment(client, round, 3, np.arange(40), 4)
        return np.concatenate(assignment.batches(20)[start : start + 2]).tolist()

    orders = [order(1, 0), order(1, 0, 2), order(1, 1), order(2, 0), list(range(40))]
    assert len({tuple(o) for o in orders}) == 5


def test_the_cnn_has_the_layers_of_the_paper():
    module = build_model("cnn", (3, 32, 32), 10, 1)
    weights = list(module.parameters())
    x = torch.from_numpy(np.random.default_rng(0).random((2, 3, 32, 32), dtype=np.float32))
    h = F.relu(F.max_pool2d(F.conv2d(x, *weights[0:2]), 2))
    h = F.relu(F.max_pool2d(F.conv2d(h, *weights[2:4]), 2))
    h = F.relu(F.conv2d(h, *weights[4:6])).flatten(1)
    expected = F.linear(F.relu(F.linear(h, *weights[6:8])), *weights[8:10])
    assert torch.allclose(module(x), expected, atol=1e-6)


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp with dropout", "cnn", "a user's module"])
def test_losses_and_accuracies_equal_a_loop_over_clients(model, monkeypatch):
    monkeypatch.setattr("fedcor.simulation.engine.engine._DENSE_ROWS", 17)
    engine = engine_of(model, LocalTraining(8, 3, 0.1))
    trained = engine.train(engine.initial_model, [3], 0, 0.1)[0]
    losses, right = engine.losses(trained, np.arange(5)), engine.accuracies(trained, np.arange(5))
    some = engine.losses(trained, np.array([4, 1]))
    engine.vector.write(engine.module, trained)
    engine.module.eval()
    data = dataset(MODELS[model][1])
    with torch.no_grad():
        for k, part in enumerate(PARTS):
            x, y = torch.from_numpy(data.train_x[part]), torch.from_numpy(data.train_y[part])
            scores = engine.module(x)
            assert losses[k] == pytest.approx(float(F.cross_entropy(scores, y)), rel=1e-5)
            assert right[k] == pytest.approx(float((scores.argmax(1) == y).double().mean()))
        scores = engine.module(torch.from_numpy(data.test_x))
    assert some == pytest.approx(losses[[4, 1]], rel=1e-6)
    assert len(engine.losses(trained, np.empty(0, dtype=np.int64))) == 0
    test = engine.test(trained)
    assert test.accuracy == pytest.approx(float((scores.argmax(1).numpy() == data.test_y).mean()))
    loss = F.cross_entropy(scores, torch.from_numpy(data.test_y))
    assert test.loss == pytest.approx(float(loss), rel=1e-5)


def test_holdout_data_is_measured_and_not_trained_on():
    engine = engine_of("logistic", LocalTraining(8, 3, 0.1), holdout=0.2)
    assert engine.population.sizes.tolist() == [2, 6, 34, 25, 31]
    for k, part in enumerate(PARTS):
        trained = set(engine.store.training([k]).rows[0])
        measured = set(engine.store._measured[k].tolist())
        if len(part) >= 5:
            assert not trained & measured
            assert len(trained) + len(measured) == len(part)
        else:
            assert trained == measured  # too little data to hold anything out


# --- models ---------------------------------------------------------------------------------------


def test_the_papers_models_have_the_right_number_of_parameters():
    mlp = ModelVector(build_model("mlp", (784,), 10, 1))
    assert mlp.size == 784 * 64 + 64 + 64 * 30 + 30 + 30 * 10 + 10
    cnn = ModelVector(build_model("cnn", (3, 32, 32), 10, 1))
    convolutions = 3 * 9 * 32 + 32 + 32 * 9 * 64 + 64 + 64 * 9 * 64 + 64
    assert cnn.size == convolutions + 1024 * 64 + 64 + 64 * 10 + 10


def test_initial_weights_depend_on_the_seed_alone():
    one, two, other = (build_model("mlp", (5,), 2, seed) for seed in (1, 1, 2))
    vector = ModelVector(one)
    assert torch.equal(vector.read(one), vector.read(two))
    assert not torch.equal(vector.read(one), vector.read(other))


def test_a_model_vector_includes_buffers_and_round_trips():
    module = build_model(f"{__name__}:Residual", (12,), 3, 1)
    vector = ModelVector(module)
    assert vector.size == vector.trained + 2 * 8  # running mean and variance
    numbers = torch.arange(vector.size, dtype=torch.float32)
    vector.write(module, numbers)
    assert torch.equal(vector.read(module), numbers)
    assert [tuple(part.shape) for part in vector.split(numbers)][:3] == [(2,), (8, 12), (8,)]


def test_dropout_without_a_stream_is_an_error():
    with pytest.raises(RuntimeError, match="stream"):
        ClientDropout(0.5).train()(torch.ones(2))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mpl", {}, 'did you mean "mlp"'),
        ("cnn", {}, "needs images"),
        ("mlp", {"hidden": [0.5]}, "hidden"),
        ("mlp", {"hidden": [-3]}, "hidden = .*at least 1"),
        ("mlp", {"dropout": float("nan")}, "dropout"),
        (f"{__name__}:dataset", {}, "must make a torch.nn.Module"),
        (
            f"{__name__}:too_few_outputs",
            {},
            "outputs of shape .2, 3. for 2 samples, but gave .2, 2.",
        ),
        (f"{__name__}:wrong_inputs", {}, "cannot take samples of shape"),
        (f"{__name__}:failing", {}, "could not be built"),
    ],
)
def test_models_that_cannot_be_built_are_rejected(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_model(name, (12,), 3, 1, options, data=dataset())


# --- aggregation and faults -----------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 1000))
def test_aggregation_is_the_weighted_mean(m, seed):
    rng = np.random.default_rng(seed)
    model = torch.from_numpy(rng.standard_normal(8))
    results = torch.from_numpy(rng.standard_normal((m, 8)))
    weights = rng.dirichlet(np.ones(m))
    for optimiser in (FedAvg(), FedProx(mu=0.3)):
        delivery = {"round": 0, "clients": np.arange(m), "weights": weights, "learning_rate": 0.1}
        aggregated, state = next_model(
            optimiser, {}, model, results, 8, steps=np.ones(m, dtype=np.int64), **delivery
        )
        assert np.allclose(aggregated.numpy(), weights @ results.numpy())
        assert not state


def test_fedprox_rejects_a_negative_mu():
    assert FedProx(mu=0.25).proximal == 0.25
    assert optimiser_traits(FedAvg()).proximal == 0
    with pytest.raises(ConfigError, match="mu"):
        FedProx(mu=-1.0)


def test_faults_have_their_rates_and_depend_on_seed_and_round_alone():
    faults = Faults(availability=0.7, dropout=0.2, stragglers=0.4)
    rounds = range(300)
    reached = [len(faults.available(1, t, 50)) / 50 for t in rounds]
    assert np.mean(reached) == pytest.approx(0.7, abs=0.02)
    dropped = [faults.dropped(1, t, 50).mean() for t in rounds]
    assert np.mean(dropped) == pytest.approx(0.2, abs=0.02)
    steps = np.concatenate([faults.steps(1, t, 50, 10) for t in rounds])
    assert steps.min() == 1
    assert np.mean(steps < 10) == pytest.approx(0.4 * 0.9, abs=0.02)
    assert np.array_equal(faults.available(1, 5, 50), faults.available(1, 5, 50))
    assert not np.array_equal(faults.available(1, 5, 50), faults.available(2, 5, 50))


def test_at_least_one_client_is_always_available():
    faults = Faults(availability=1e-9)
    assert all(len(faults.available(1, t, 5)) == 1 for t in range(20))
    assert np.array_equal(Faults().available(1, 0, 5), np.arange(5))


@pytest.mark.parametrize(
    "settings", [{"availability": 0.0}, {"dropout": 1.5}, {"stragglers": -0.1}]
)
def test_invalid_faults_are_rejected(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Faults(**settings)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Faults().dropout = 0.5
