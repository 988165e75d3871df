"""Clients whose data is loaded when it is needed: the same as if it were held, and never all."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcor
from fedcor import Aligned, Experiment, FedCor, Random
from fedcor.core.errors import ConfigError, DataError, FedcorError, RecordError
from fedcor.data.client_data import (
    FolderPopulation,
    SyntheticPopulation,
    as_client_data,
    check_loaded,
)
from fedcor.runs.record import client_names
from fedcor.runs.runner import run_in_memory
from fedcor.simulation.engine import stores

COMMON = {"model": "logistic", "batch_size": 8, "local_steps": 3, "learning_rate": 0.05}


@dataclasses.dataclass(frozen=True)
class Listening:
    """A population that notes who was loaded."""

    population: SyntheticPopulation
    loaded: list[int] = dataclasses.field(default_factory=list, compare=False)

    @property
    def sizes(self):
        return self.population.sizes

    @property
    def test_data(self):
        return self.population.test_data

    def load(self, client):
        self.loaded.append(client)
        return self.population.load(client)

    def describe(self):
        return {"of": "a test"}


def held(population: SyntheticPopulation) -> tuple[list[object], np.ndarray]:
    """The same clients as arrays that are held, and the client of each sample."""
    loaded = [population.load(k) for k in range(population.clients)]
    x, y = (np.concatenate(parts) for parts in zip(*loaded, strict=True))
    return [x, y, *population.test_data], np.repeat(np.arange(population.clients), population.sizes)


# --- loaded data is as good as held data ----------------------------------------------------------


@pytest.mark.parametrize("holdout", [0.0, 0.3])
@pytest.mark.parametrize(
    "selector",
    [
        Random(4),
        Aligned(4),
        FedCor(4, warmup=3, interval=2, dimension=3, warmup_steps=5, refit_steps=5),
        FedCor(
            4, warmup=3, interval=2, dimension=3, warmup_steps=5, refit_steps=5, probe_clients=9
        ),
    ],
    ids=lambda one: f"{type(one).__name__}-{getattr(one, 'probe_clients', None)}",
)
def test_a_run_on_loaded_data_is_the_run_on_the_same_data_held(selector, holdout):
    population = SyntheticPopulation(30, features=6, classes=3, samples=15, tested=200)
    arrays, owners = held(population)
    options = {**COMMON, "rounds": 6, "selector": selector, "holdout": holdout}
    loaded = run_in_memory(Experiment(population, **options), 2)
    whole = run_in_memory(Experiment(tuple(arrays), owners, **options), 2)
    for one, other in zip(loaded.rounds, whole.rounds, strict=True):
        assert one["selected"] == other["selected"]
        assert one["test_loss"] == pytest.approx(other["test_loss"], rel=1e-5)
        assert one["bytes_down"] == other["bytes_down"]


@settings(max_examples=25, deadline=None)
@given(
    clients=st.lists(st.integers(0, 19), min_size=1, max_size=12, unique=True),
    holdout=st.sampled_from([0.0, 0.25]),
    at_once=st.integers(1, 60),
    kept=st.sampled_from([0.0, 2e3, 1e9]),
)
def test_the_stores_give_the_same_samples_in_the_same_order(clients, holdout, at_once, kept):
    population = SyntheticPopulation(20, features=4, classes=3, samples=9, tested=20)
    data, _ = as_client_data(population)
    arrays, owners = held(population)
    parts = [np.flatnonzero(owners == k) for k in range(20)]
    whole = dataclasses.replace(data, train_x=arrays[0], train_y=arrays[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "_ROWS_AT_ONCE", at_once)
        patch.setattr(stores, "_KEPT_BYTES", kept)
        one = stores.HeldData(whole, parts, 5, holdout, lambda batch: batch)
        other = stores.LoadedData(data, population, 5, holdout, lambda batch: batch)
        assert np.array_equal(one.sizes, other.sizes)
        assert np.array_equal(one.measured_sizes, other.measured_sizes)
        assert one.largest == other.largest
        (a, b) = (store.training(clients) for store in (one, other))
        for mine, same in zip(a.rows, b.rows, strict=True):
            assert torch.equal(a.x[mine], b.x[same])
            assert torch.equal(a.y[mine], b.y[same])
        asked = np.array(clients)
        a, b = (list(store.measured(asked)) for store in (one, other))
        for column in (0, 1):
            joined = (torch.cat([piece[column] for piece in pieces]) for pieces in (a, b))
            assert torch.equal(*joined)
        assert np.array_equal(*(np.concatenate([p.sizes for p in pieces]) for pieces in (a, b)))
        assert other._kept_bytes <= max(kept, 2000) or len(other._kept) == 1


# --- and it is not held ---------------------------------------------------------------------------


def test_nobody_is_loaded_but_those_whom_a_round_needs():
    population = Listening(SyntheticPopulation(5000, features=6, classes=3, samples=15, tested=100))
    experiment = Experiment(
        population,
        **COMMON,
        rounds=6,
        selector=FedCor(4, warmup=2, interval=3, dimension=3, refit_steps=5, probe_clients=20),
        faults=fedcor.Faults(availability=0.02),
    )
    assert population.loaded == []
    needed = set()
    for record, state in fedcor.simulate(experiment):
        needed |= set(record.selected)
        if state.selector["sample_rounds"][-1] == record.round:
            needed |= set(np.flatnonzero(np.isfinite(state.selector["samples"][-1])).tolist())
            needed |= set(state.selector["tried"].ravel().tolist())
        line = json.dumps(dataclasses.asdict(record))
        assert len(line) < 6000  # no list of all clients
    assert set(population.loaded) == needed
    assert len(needed) < 200


@pytest.mark.parametrize("selector", [Random(3), Aligned(3), FedCor(3, warmup=2, probe_clients=5)])
def test_a_run_in_a_folder_resumes_and_knows_the_clients_by_name(selector, tmp_path):
    write_folder(tmp_path / "clients", 12)
    options = {**COMMON, "selector": selector}
    population = FolderPopulation(str(tmp_path / "clients"))
    made = Experiment(population, **options, rounds=15)
    fedcor.run(dataclasses.replace(made, rounds=11), out=tmp_path / "run", progress=False)
    result = fedcor.run(made, out=tmp_path / "run", resume=True, progress=False)
    straight = fedcor.run(made, progress=False)
    for one, other in zip(result.runs[0].rounds, straight.runs[0].rounds, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert client_names(tmp_path / "run")[:2] == ["phone 00", "phone 01"]
    header = result.runs[0].header["config"]
    assert header["partition"] == {"kind": "per client", "clients": 12}
    assert "sha256" in header["data"]["sizes"]


def write_folder(folder, clients):
    folder.mkdir()
    population = SyntheticPopulation(clients, features=4, classes=3, samples=9, tested=50)
    for k in range(clients):
        x, y = population.load(k)
        np.savez(folder / f"phone {k:02}.npz", x=x, y=y)
    x, y = population.test_data
    np.savez(folder / "test.npz", x=x, y=y)
    return population


def test_a_folder_holds_what_was_written(tmp_path):
    population = write_folder(tmp_path / "clients", 5)
    found = FolderPopulation(str(tmp_path / "clients"))
    assert found.names == tuple(f"phone {k:02}" for k in range(5))
    assert np.array_equal(found.sizes, population.sizes)
    for k in range(5):
        for one, other in zip(found.load(k), population.load(k), strict=True):
            assert np.array_equal(one, other)
    (tmp_path / "clients" / "phone 07.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"phone 07.npz: cannot be read"):
        FolderPopulation(str(tmp_path / "clients"))
    with pytest.raises(DataError, match="no file <id>.npz"):
        FolderPopulation(str(tmp_path))


# --- a run is resumed with the same clients, or not at all ----------------------------------------


class Phones:
    """Clients that differ from others by an attribute alone."""

    sizes = np.full(6, 10)
    test_data = np.zeros((5, 3)), np.arange(5) % 2

    def __init__(self, key):
        self.key = key

    def load(self, client):
        rng = np.random.default_rng([client, len(str(self.key))])
        return rng.standard_normal((10, 3)), rng.integers(0, 2, size=10)


def resumed(first, second, out):
    options = {**COMMON, "selector": Random(2)}
    fedcor.run(Experiment(first, **options, rounds=2), out=out, progress=False)
    fedcor.run(Experiment(second, **options, rounds=3), out=out, resume=True, progress=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 22), (["a"] * 9999, ["a"] * 9998 + ["b"]), ({"x": np.zeros(3)}, {"x": np.ones(3)})],
    ids=["number", "long list", "array"],
)
def test_clients_with_other_attributes_do_not_resume_a_run(one, other, tmp_path):
    resumed(Phones(one), Phones(one), tmp_path / "same")
    assert len((tmp_path / "same" / "rounds.jsonl").read_text().splitlines()[0]) < 5000
    with pytest.raises(RecordError, match="data.clients"):
        resumed(Phones(one), Phones(other), tmp_path / "run")


@pytest.mark.parametrize("kind", [str, Path])
def test_another_folder_or_other_files_do_not_resume_a_run(kind, tmp_path):
    for name in ("a", "b"):
        write_folder(tmp_path / name, 6)
    one = FolderPopulation(kind(tmp_path / "a"))
    assert one.folder == str(tmp_path / "a")
    resumed(one, FolderPopulation(str(tmp_path / "a")), tmp_path / "same")
    with pytest.raises(RecordError, match="data.clients.folder"):
        resumed(one, FolderPopulation(kind(tmp_path / "b")), tmp_path / "elsewhere")
    changed = tmp_path / "a" / "phone 03.npz"
    with np.load(changed) as arrays:
        x, y = arrays["x"], arrays["y"]
    np.savez(changed, x=-x, y=y)
    with pytest.raises(RecordError, match="data.clients.checksum"):
        resumed(one, FolderPopulation(kind(tmp_path / "a")), tmp_path / "changed")


def test_clients_that_cannot_be_described_are_refused_before_anything_is_written(tmp_path):
    circle = Phones(1)
    circle.key = circle
    failing = Phones(1)
    failing.describe = lambda: 1 / 0
    for clients, cause in ((circle, "RecursionError"), (failing, "ZeroDivisionError")):
        with pytest.raises(FedcorError, match=rf"cannot be described.*describe\(\).*{cause}"):
            resumed(clients, clients, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- the generated population ---------------------------------------------------------------------


def test_a_generated_client_is_the_same_each_time_and_others_do_not_matter():
    one, other = SyntheticPopulation(1000), SyntheticPopulation(1000)
    for client in (7, 999, 0):
        for a, b in zip(one.load(client), other.load(client), strict=True):
            assert np.array_equal(a, b)
    x, y = one.load(3)
    assert x.dtype == np.float32
    assert len(x) == len(y) == one.sizes[3]
    assert not np.array_equal(x[:5], SyntheticPopulation(1000, seed=1).load(3)[0][:5])
    assert np.median(one.sizes) == pytest.approx(50, rel=0.1)


def test_alpha_and_beta_say_how_much_clients_differ():
    def agreement(alpha):
        """How often the common model gives a client's label."""
        population = SyntheticPopulation(40, alpha=alpha, samples=100)
        W = population._common
        hits = [
            np.mean(np.argmax(x @ W[:, :-1].T + W[:, -1], axis=1) == y)
            for x, y in map(population.load, range(40))
        ]
        return float(np.mean(hits))

    assert agreement(0.0) > 0.99  # but for float32
    assert agreement(0.0) > agreement(0.5) > agreement(2.0)
    spread = [
        np.std([SyntheticPopulation(60, beta=beta).load(k)[0].mean() for k in range(60)])
        for beta in (0.0, 3.0)
    ]
    assert spread[1] > 3 * spread[0]


@pytest.mark.parametrize(
    ("options", "key"),
    [({"clients": 0}, "clients"), ({"alpha": -1.0}, "alpha"), ({"classes": 1}, "classes")],
)
def test_the_settings_of_a_population_are_checked(options, key):
    with pytest.raises(ConfigError, match=key):
        SyntheticPopulation(**{"clients": 5, **options})


# --- what cannot be used --------------------------------------------------------------------------


class Own:
    """A user's own clients; some attributes changed."""

    def __init__(self, **changed):
        self.sizes = np.full(6, 4)
        self.test_data = np.zeros((5, 3), np.float32), np.arange(5) % 2
        self.given = lambda client: (np.ones((4, 3)), np.arange(4) % 2)
        vars(self).update(changed)

    def load(self, client):
        return self.given(client)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sizes": np.zeros(3, np.int64)}, "sizes must be one whole number per client"),
        ({"sizes": np.ones(3)}, "sizes must be one whole number per client"),
        ({"test_data": None}, "there is no test data"),
        ({"test_data": (np.zeros((4, 3)), np.zeros(5, int))}, "x_test has 4 samples, but y_test"),
        ({"classes": 1}, "y_test must have one label per sample, from 0 to 0"),
        ({"names": ["a"] * 6}, "names must be 6 different texts"),
        ({"names": 5}, "names must be 6 different texts"),
        *(
            ({"classes": classes}, "classes must be a whole number, at least 1, but is")
            for classes in (["cat", "dog"], "x", 2.5, -3, 0, True)
        ),
    ],
)
def test_clients_that_cannot_be_used_are_refused_when_the_experiment_is_made(changed, message):
    with pytest.raises(DataError, match=message):
        Experiment(Own(**changed), **COMMON, rounds=1, selector=Random(2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda k: (np.ones((3, 3)), np.zeros(3, int)), "load gave 3 samples and 3 labels"),
        (lambda k: (np.ones((4, 2)), np.zeros(4, int)), r"a sample is float32 \(2,\)"),
        (lambda k: (np.ones((4, 3)), np.zeros(4)), "y is float32"),
        (lambda k: (np.ones((4, 3)), np.full(4, 2)), "y must have one label per sample"),
        (lambda k: np.ones((4, 3)), "load returned a ndarray"),
        (lambda k: (torch.ones((4, 3), dtype=int), np.zeros(4, int)), r"a sample is int64 \(3,\)"),
        (lambda k: (np.ones((4, 3), np.uint8), np.zeros(4, int)), "only one of x and x_test is"),
        (lambda k: 1 / 0, "could not be loaded: ZeroDivisionError"),
    ],
)
def test_a_client_whose_data_does_not_fit_is_named(given, message):
    made = Experiment(Own(given=given), **COMMON, rounds=1, selector=Random(1))
    with pytest.raises(FedcorError, match=f"client [0-5]: .*{message}"):
        run_in_memory(made, 1)


def test_clients_need_no_names_and_pixels_are_scaled_in_both():
    pixels = np.full((5, 3), 255, np.uint8)
    own = Own(
        names=None,
        test_data=(pixels, np.arange(5) % 2),
        given=lambda k: (pixels[:4], np.arange(4) % 2),
    )
    data, _ = as_client_data(own)
    assert data.client_names == ()
    x, _ = check_loaded(data, 0, 4, own.load(0))
    assert (data.test_x == 1).all()
    assert (x == 1).all()
    with pytest.raises(DataError, match="client 0: only one of x and x_test is of type uint8"):
        check_loaded(data, 0, 4, (np.ones((4, 3)), np.arange(4) % 2))


@pytest.mark.parametrize("name", ["sizes", "test_data", "classes", "names"])
def test_a_property_that_fails_is_named(name):
    class Gone(Own):
        pass

    setattr(Gone, name, property(lambda self: 1 / 0, lambda self, value: None))
    with pytest.raises(FedcorError, match=f"{name} of the clients .*: ZeroDivisionError"):
        Experiment(Gone(), **COMMON, rounds=1, selector=Random(2))


def test_damaged_files_of_clients_are_named(tmp_path):
    folder = tmp_path / "clients"
    write_folder(folder, 3)
    np.savez_compressed(folder / "zipped.npz", x=np.zeros((99, 4)), y=np.arange(99) % 3)
    whole = (folder / "zipped.npz").read_bytes()
    with zipfile.ZipFile(folder / "zipped.npz") as archive:
        start = archive.getinfo("y.npy").header_offset + 30 + len("y.npy")
    damaged = whole[:start] + bytes(b ^ 0x5A for b in whole[start : start + 80])
    damaged += whole[start + 80 :]
    (folder / "zipped.npz").write_bytes(damaged)
    with pytest.raises(DataError, match=r"zipped.npz: cannot be read"):
        FolderPopulation(str(folder))
    (folder / "zipped.npz").unlink()
    (folder / "test.npz").write_bytes(damaged)
    with pytest.raises(DataError, match=r"test.npz: cannot be read"):
        _ = FolderPopulation(str(folder)).test_data
    with (folder / "test.npz").open("wb") as file:
        np.save(file, np.zeros(3))  # one array, under the wrong name
    with pytest.raises(DataError, match=r"test.npz: a single array, but should be an .npz of x, y"):
        _ = FolderPopulation(str(folder)).test_data


def test_what_needs_held_data_is_refused():
    with pytest.raises(ConfigError, match="partition.*must be left out"):
        Experiment(Own(), fedcor.IID(6), **COMMON, rounds=1, selector=Random(2))
    with pytest.raises(ConfigError, match="noisy_clients.*held"):
        Experiment(Own(), **COMMON, rounds=1, selector=Random(2), noisy_clients=0.5)
    with pytest.raises(ConfigError, match="clients_per_round"):
        Experiment(Own(), **COMMON, rounds=1, selector=Random(7))


def test_targets_of_a_regression_and_test_data_apart():
    rng = np.random.default_rng(1)
    own = Own(given=lambda k: (np.full((4, 3), k), np.full(4, 0.5 * k)), test_data=None)
    made = Experiment(
        own,
        model=lambda: torch.nn.Linear(3, 1),
        test_data=(rng.standard_normal((5, 3)), rng.standard_normal(5)),
        **{key: value for key, value in COMMON.items() if key != "model"},
        rounds=3,
        selector=Random(2),
    )
    run = run_in_memory(made, 1)
    assert all(np.isfinite(entry["test_loss"]) for entry in run.rounds)
    assert run.rounds[0]["test_accuracy"] is None
