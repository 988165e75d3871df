"""Settings: the presets are the paper's, and every mistake is refused by name before it runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import pickle
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import fedcor
from fedcor.core.config import build_dataclass
from fedcor.core.errors import (
    ConfigError,
    FedcorError,
    MissingExtraError,
    RunExistsError,
    WorkerDiedError,
)
from fedcor.core.types import optimiser_traits
from fedcor.optimisers import OPTIMISERS, build_optimiser, optimiser_names
from fedcor.runs.runner import compare_jobs
from fedcor.selectors.afl import AFL
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice
from fedcor.simulation.build import build_simulation
from fedcor.simulation.engine.models import MODELS
from fedcor.simulation.experiment_files import load_experiment, parse_experiment, preset_names
from fedcor.simulation.faults import Faults
from fedcor.simulation.schedules import LearningRate
from fedcor.simulation.tasks import MODEL_OPTIONS

PRESETS = [
    "cifar10-1spc",
    "cifar10-2spc",
    "cifar10-dir",
    "digits",
    "fmnist-1spc",
    "fmnist-2spc",
    "fmnist-dir",
]


TOML = """
[data]
name = "digits"
[partition]
kind = "iid"
clients = 4
[model]
name = "logistic"
[training]
rounds = 2
clients_per_round = 2
batch_size = 8
local_steps = 2
learning_rate = 0.1
"""


def test_the_presets():
    assert preset_names() == PRESETS
    for name in PRESETS:
        assert load_experiment(name).name == name


@pytest.mark.parametrize(
    ("name", "target", "chosen", "kind", "shards"),
    [
        ("fmnist-2spc", 0.69, 5, "shards", 2),
        ("fmnist-1spc", 0.62, 10, "shards", 1),
        ("fmnist-dir", 0.64, 5, "dirichlet", 2),
        ("cifar10-2spc", 0.62, 5, "shards", 2),
        ("cifar10-1spc", 0.36, 10, "shards", 1),
        ("cifar10-dir", 0.54, 5, "dirichlet", 2),
    ],
)
def test_the_presets_are_the_papers(name, target, chosen, kind, shards):
    experiment = load_experiment(name)
    fmnist = name.startswith("fmnist")
    training, partition = experiment, experiment.partition
    assert experiment.target_accuracy == target
    assert (partition.kind, partition.clients) == (kind, 100)
    assert getattr(partition, "shards_per_client", 2) == shards
    assert getattr(partition, "alpha", 0.2) == 0.2
    assert training.clients_per_round == chosen
    assert training.rounds == (500 if fmnist else 2000)
    assert (training.batch_size, training.local_steps) == ((64, 20) if fmnist else (50, 40))
    assert (training.learning_rate, training.weight_decay) == (
        (0.005, 1e-4) if fmnist else (0.01, 3e-4)
    )
    assert training.milestones == ((150, 300) if fmnist else ())
    assert experiment.model["name"] == ("mlp" if fmnist else "cnn")
    assert experiment.optimiser is None
    assert experiment.describe()["optimiser"] == {"name": "fedavg", "weighted": False}
    expected = (
        FedCor(chosen)
        if fmnist
        else FedCor(chosen, warmup=20, interval=50, discount=0.99, beta=0.9)
    )
    assert experiment.with_selector("fedcor").build_selector() == expected
    assert experiment.with_selector("power_of_choice").build_selector() == PowerOfChoice(chosen)


def keys_of(table, path=()):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from keys_of(value, (*path, key))
        else:
            yield (*path, key)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_only_what_differs_from_the_defaults(name):
    file = resources.files("fedcor.simulation") / "presets" / f"{name}.toml"
    stated = tomllib.loads(file.read_text(encoding="utf-8"))
    for *tables, key in keys_of(stated):
        # The architecture, and what a preset is named after, are always stated.
        if tables == ["model"] or key in ("shards_per_client", "alpha"):
            continue
        without = copy.deepcopy(stated)
        table = functools.reduce(dict.__getitem__, tables, without)
        del table[key]
        selector = tables[1] if tables and tables[0] == "selectors" else "fedcor"
        try:
            changed = parse_experiment(without)
        except ConfigError:
            continue  # it has no default
        if key != "selector":
            changed = changed.with_selector(selector)
        whole = load_experiment(name, selector=selector)
        assert changed.describe() != whole.describe(), (tables, key)


def test_the_papers_presets_choose_with_fedcor_and_the_others_with_the_default_pair():
    for name in PRESETS:
        experiment = load_experiment(name)
        pair = experiment.selector, type(experiment.build_optimiser())
        ours = ("aligned", fedcor.FedRecall)
        assert pair == (ours if name == "digits" else ("fedcor", fedcor.FedAvg))


def test_settings_are_read_without_torch(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML + '[optimiser]\nname = "fedprox"\nmu = 0.1\n')
    program = """
import sys
sys.modules["torch"] = None
from fedcor.simulation.experiment_files import load_experiment, parse_experiment, preset_names
for name in preset_names():
    load_experiment(name)
mine = load_experiment("mine.toml", ["faults.dropout=0.1"], "random")
assert mine.build_optimiser().proximal == mine.faults.dropout == 0.1
print(load_experiment("fmnist-2spc").describe()["model"])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'name': 'mlp', 'hidden': [64, 30], 'dropout': 0.5}"


def test_the_options_of_the_built_in_models_are_those_of_their_factories():
    options = {name: tuple(inspect.signature(made).parameters)[2:] for name, made in MODELS.items()}
    assert options == MODEL_OPTIONS


def test_every_optimiser_is_built_by_its_name():
    for name in optimiser_names():
        assert OPTIMISERS.name_of(build_optimiser(name)) == name
    found = {name: optimiser_traits(build_optimiser(name)).proximal for name in optimiser_names()}
    assert {name: mu for name, mu in found.items() if mu} == {"fedprox": 0.01, "feddyn": 0.1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.round=5", 'training.round = 5: unknown setting.*did you mean "rounds"'),
        ("trainin.rounds=5", 'trainin = .*did you mean "training"'),
        ("training.rounds=0", "training.rounds = 0: must be a whole number of at least 1"),
        ("training.rounds=many", "training.rounds = 'many': must be a whole number"),
        ("training.rounds=2.5", "training.rounds = 2.5: must be a whole number"),
        (
            "training.learning_rate=0",
            "training.learning_rate = 0.0: must be a finite number above 0",
        ),
        ("training.weight_decay=-1", "training.weight_decay"),
        ("training.learning_rate=1e39", "training.learning_rate"),
        ("training.device=abacus", "training.device = 'abacus': must be one of auto, cpu"),
        ("model.dropout=nan", "model.dropout = nan: must be a finite number"),
        ("model.hidden=[nan]", "model.hidden = nan: must be a finite number"),
        ("selectors.fedcor.clients_per_round=3", "is set for all by clients_per_round"),
        ("selectors.mod:Class.k=3", "quote a name that has a colon"),
        ('model={name="math:pi"}', "must be a function or class"),
        ("training.milestones=[1,'a']", "training.milestones = 'a': must be a whole number"),
        ("training.milestones=3", "training.milestones = 3: must be a list"),
        (
            "training.clients_per_round=51",
            "training.clients_per_round = 51: must be at most partition.clients = 50",
        ),
        ("partition.clients=0", "partition.clients = 0"),
        ("partition.kind=shard", "partition.kind = 'shard'.*did you mean \"shards\""),
        ("data.holdout=1.0", "data.holdout = 1.0: must be below 1"),
        ("data.noisy_clients=1.1", "data.noisy_clients = 1.1: must lie in"),
        ("partition.size_skew=-1", "partition.size_skew = -1.0: must be a number from 0 to 10"),
        ("target_accuracy=1.5", "target_accuracy = 1.5: must lie in"),
        ("target_accuracy=0", "target_accuracy = 0.0: must be a finite number above 0"),
        ("name=../elsewhere", "name = '../elsewhere': must be a plain name"),
        ("name=..", "must be a plain name"),
        ("selector=fedcorr", "selector = 'fedcorr'.*did you mean \"fedcor\""),
        (
            "selectors.fedcor.beta=1.5",
            "selectors.fedcor.beta = 1.5: must lie strictly between 0 and 1",
        ),
        ("selectors.fedcor.beat=0.5", 'selectors.fedcor.beat.*did you mean "beta"'),
        ("selectors=3", "selectors = 3: must be a table"),
        ("selectors.random=3", "selectors.random = 3: must be a table"),
        ("selectors.fedcro.beta=0.5", 'fedcro.*did you mean "fedcor"'),
        ("selectors.afl.alpha1=5", "selectors.afl.alpha1 = 5.0: must lie in"),
        ("optimiser.name=3", "optimiser.name = 3: must be one of"),
        ("model.name=3", "model.name = 3: must be given"),
        ("training=3", "training = 3: must be a table"),
        ("optimiser.name=fedporx", 'optimiser.name.*did you mean "fedprox"'),
        ("optimiser.mu=0.1", "optimiser.mu = 0.1: unknown setting"),
        ("model.name=mpl", 'model.name.*did you mean "mlp"'),
        ("model.droput=0.1", 'model.droput.*did you mean "dropout"'),
        ("faults.dropout=2", "faults.dropout = 2.0: must lie in"),
        ("name.x=2", "override = 'name.x=2': name is not a table"),
        ("rounds", "override = 'rounds': must have the form key=value"),
        ("=5", "override = '=5'"),
    ],
)
def test_mistakes_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        load_experiment("digits", [change])


def test_a_pull_that_is_not_finite():
    with pytest.raises(ConfigError, match="optimiser.mu = inf"):
        load_experiment("digits", ["optimiser.name=fedprox", "optimiser.mu=inf"])


def test_every_setting_reaches_the_simulation():
    changes = [
        *("training.batch_size=7", "training.local_steps=3", "training.learning_rate=0.3"),
        *("training.milestones=[2]", "training.factor=0.1", "training.weight_decay=0.2"),
        *("optimiser.name=fedprox", "optimiser.mu=0.4", "data.holdout=0.25"),
        *("faults.stragglers=0.5", "faults.dropout=0.1", "faults.availability=0.9"),
    ]
    simulation = build_simulation(load_experiment("digits", changes, "afl"), 5)
    local = simulation.engine.local_training
    assert (local.batch_size, local.local_steps) == (7, 3)
    assert (local.weight_decay, local.proximal) == (0.2, 0.4)
    assert simulation.learning_rate == LearningRate(0.3, (2,), 0.1)
    assert simulation.faults == Faults(0.9, 0.1, 0.5)
    assert simulation.seed == simulation.engine.seed == 5
    assert isinstance(simulation.selector, AFL)
    # A quarter of each client is held out.
    assert simulation.engine.population.sizes.sum() < 0.85 * 1438
    assert [record.learning_rate for record, _ in simulation.run(3)] == pytest.approx(
        [0.3, 0.3, 0.03]
    )


def test_more_candidates_than_clients():
    with pytest.raises(ConfigError, match="candidates = 60: must be at most 50 clients"):
        load_experiment("digits", ["selectors.power_of_choice.candidates=60"], "power_of_choice")


def test_changes_are_read_as_toml_or_as_text():
    experiment = load_experiment(
        "digits",
        [
            "optimiser.name=fedprox",
            "optimiser.mu=0.1",
            "model.hidden=[8, 4]",
            "training.milestones=[3]",
        ],
    )
    assert experiment.build_optimiser().proximal == 0.1
    assert experiment.model["hidden"] == [8, 4]
    assert experiment.milestones == (3,)


def test_a_users_selector_takes_options_by_its_quoted_name(tmp_path, monkeypatch):
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "chooser.py").write_text(
        "from dataclasses import dataclass\nfrom fedcor import Random\n"
        "@dataclass(frozen=True)\nclass Mine(Random):\n    k: int = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    name = "package_of_mine.chooser:Mine"
    experiment = load_experiment("digits", [f'selectors."{name}".k=3'], name)
    assert experiment.build_selector().k == 3


def test_a_metric_and_its_direction_in_a_toml_file(tmp_path):
    path, mae = tmp_path / "mine.toml", "sklearn.metrics:mean_absolute_error"
    table = '[metrics]\nr2 = "sklearn.metrics:r2_score"\n'
    path.write_text(TOML + table + f'mae = {{function = "{mae}", better = "lower"}}\n')
    described = load_experiment(str(path)).describe()
    wanted = {"r2": "sklearn.metrics:r2_score", "mae": {"function": mae, "better": "lower"}}
    assert described["metrics"] == wanted
    path.write_text(TOML + f'[metrics.mae]\nfunction = "{mae}"\nbeter = "lower"\n')
    with pytest.raises(ConfigError, match="table of function and better") as caught:
        load_experiment(str(path))
    assert caught.value.key == "metrics.mae"


def test_a_toml_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    experiment = load_experiment(str(path), selector="random")
    assert experiment.name == "mine"
    assert len(list(build_simulation(experiment, 1).run(2))) == 2
    path.write_text(path.read_text().replace("rounds = 2\n", ""))
    with pytest.raises(
        ConfigError, match="training.rounds = None: must be given, as a whole number"
    ):
        load_experiment(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("a = = b", "is not TOML"),
        ("a = 1", "a = 1: unknown setting"),
        ("", "data = None: must be given"),
    ],
)
def test_a_toml_file_that_is_wrong(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_experiment(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '[data]\nname = "digits"',
            "partition = None: must be given, as a table of settings with kind and clients",
        ),
        ("", "data = None: must be given, as a table of settings with name"),
        (
            '[data]\nname = "digits"\n[partition]\nkind = "iid"\nclients = 5',
            "model = None: must be given, as a table",
        ),
    ],
)
def test_a_table_that_is_missing_is_named_with_what_it_needs(tmp_path, content, message):
    (tmp_path / "short.toml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_experiment(str(tmp_path / "short.toml"))


def test_a_model_without_a_name(tmp_path):
    path = tmp_path / "mine.toml"
    text = json.loads(json.dumps(load_experiment("digits").describe()["training"]))
    training = "\n".join(f"{k} = {json.dumps(v)}" for k, v in text.items() if v is not None)
    path.write_text(
        f'[data]\nname="digits"\n[partition]\nkind="iid"\nclients=40\n[model]\n[training]\n{training}\n'
    )
    with pytest.raises(ConfigError, match="model.name = None: must be given"):
        load_experiment(str(path))


def test_what_only_the_data_can_tell_is_refused_by_name_as_well():
    with pytest.raises(ConfigError, match="partition.clients"):
        build_simulation(load_experiment("digits", ["partition.clients=5000"], "random"), 1)
    with pytest.raises(ConfigError, match="data.name"):
        build_simulation(load_experiment("digits", ["data.name=digist"], "random"), 1)
    with pytest.raises(ConfigError, match="model.name"):
        build_simulation(load_experiment("digits", ['model={name="cnn"}'], "random"), 1)
    with pytest.raises(ConfigError, match="device = 'cuda:77': cannot be used here"):
        build_simulation(load_experiment("digits", ['training.device="cuda:77"'], "random"), 1)


def test_device_auto_takes_what_there_is():
    simulation = build_simulation(load_experiment("digits", ["training.device=auto"], "random"), 1)
    assert simulation.engine.device.type in ("cpu", "cuda", "mps")


def test_the_description_has_every_hyper_parameter_of_the_one_that_runs():
    described = load_experiment("digits", selector="afl").describe()
    assert described["selectors"] == {
        "afl": {"clients_per_round": 10, "alpha1": 0.75, "alpha2": 0.01, "alpha3": 0.1}
    }
    assert described["training"]["rounds"] == 100
    assert json.loads(json.dumps(described))["partition"]["clients"] == 50


def test_noisy_clients_train_on_noise_and_are_tested_on_the_truth():
    clean, noisy = (
        build_simulation(load_experiment("digits", [f"data.noisy_clients={share}"]), 1).engine
        for share in (0.0, 0.4)
    )
    changed = [
        not torch.equal(one[2], other[2])
        for one, other in zip(clean.measured_rows(10**6), noisy.measured_rows(10**6), strict=True)
    ]
    assert sum(changed) == 20
    assert clean.test(clean.initial_model) == noisy.test(clean.initial_model)


def test_a_comparison_is_checked_whole_before_it_runs(tmp_path):
    experiment = load_experiment("digits")
    jobs = compare_jobs(experiment, ["random", "fedcor"], [1, 2], tmp_path, resume=False)
    assert [job.out.relative_to(tmp_path).as_posix() for job in jobs] == [
        "random/seed-1", "fedcor/seed-1", "random/seed-2", "fedcor/seed-2"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean"):
        compare_jobs(experiment, ["random", "afll"], [1], tmp_path, resume=False)


def test_partitions_differ_by_seed_and_not_by_selector():
    labels = [
        build_simulation(load_experiment("digits", selector=name), seed).engine.store._y.numpy()
        for name, seed in (("random", 1), ("fedcor", 1), ("random", 2))
    ]
    assert np.array_equal(labels[0], labels[1])
    assert not np.array_equal(labels[0], labels[2])


@dataclass(frozen=True)
class Fields:
    whole: int
    number: float = 1.0
    word: Literal["one", "two"] = "one"
    maybe: int | None = None
    many: tuple[float, ...] = ()
    anything: dict[str, int] = dataclasses.field(default_factory=dict)


def test_tables_become_dataclasses():
    table = {
        "whole": 1,
        "number": 2,
        "word": "two",
        "maybe": None,
        "many": [1, 2.5],
        "anything": {"a": 1},
    }
    assert build_dataclass(Fields, table) == Fields(1, 2.0, "two", None, (1.0, 2.5), {"a": 1})
    for wrong in (
        {"whole": True},
        {"whole": 1, "number": "2"},
        {"whole": 1, "word": "three"},
        {"whole": 1, "maybe": "x"},
        {},
    ):
        with pytest.raises(ConfigError):
            build_dataclass(Fields, wrong)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", 1, "b", "c"),
        MissingExtraError("x", "y"),
        RunExistsError(Path("runs/a")),
        WorkerDiedError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_from_a_worker_to_its_parent(error):
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert vars(copied) == vars(error)
    assert type(copied) is type(error)


def test_an_error_about_a_taken_folder_names_it():
    error = RunExistsError(Path("runs/a"))
    assert error.folder == Path("runs/a")
    assert str(error).startswith("runs/a already holds a run")
    assert "--" not in str(error)


def test_config_errors_are_value_errors_of_the_one_tree():
    error = ConfigError("beta", 2, "must be less")
    assert isinstance(error, ValueError)
    assert isinstance(error, FedcorError)
    assert str(error.under("selectors.fedcor")) == "selectors.fedcor.beta = 2: must be less"


# --- who aggregates -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Momentum(fedcor.FedAvg):
    """An optimiser of the full form, with options."""

    keep: float = 0.5
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Paired(fedcor.Random):
    """A selector that goes with an optimiser of its own."""

    optimiser: str = f"{__name__}:Momentum"


PAIRED, MOMENTUM = f"{__name__}:Paired", f"{__name__}:Momentum"
WHOLE = {"name": MOMENTUM, "weighted": False, "keep": 0.5, "names": ()}


def test_a_selectors_own_optimiser_aggregates_where_nobody_says_how():
    digits = load_experiment("digits")
    for paired in (digits.with_selector(PAIRED), digits.with_selector(Paired(10), "mine")):
        assert paired.build_optimiser() == Momentum()
        assert paired.describe()["optimiser"] == WHOLE
        assert build_simulation(paired, 1).optimiser == Momentum()
        assert paired.with_selector("random").build_optimiser() == fedcor.FedAvg()
    other = digits.with_selector(Paired(10, optimiser="fedprox"))
    assert other.describe()["optimiser"] == {"name": "fedprox", "mu": 0.01, "weighted": False}


def test_what_is_said_counts_more_than_the_selectors_own():
    for said in ("fedavg", {"name": "fedavg"}, fedcor.FedAvg()):
        made = fedcor.experiment("digits", optimiser=said, selector=PAIRED)
        assert made.describe()["optimiser"] == {"name": "fedavg", "weighted": False}
        again = fedcor.experiment(made, optimiser=None)
        assert again.describe()["optimiser"] == WHOLE
    typed = load_experiment("digits", ["optimiser.name=fedprox"], PAIRED)
    assert typed.build_optimiser() == fedcor.FedProx()


def test_a_table_without_a_name_sets_options_of_the_selectors_own():
    made = fedcor.experiment("digits", optimiser={"weighted": True})
    typed = load_experiment("digits", ["optimiser.weighted=true"])
    assert made.describe() == typed.describe()
    assert made.build_optimiser() == fedcor.FedRecall(weighted=True)
    plain = made.with_selector("random")
    assert plain.describe()["optimiser"] == {"name": "fedavg", "weighted": True}
    paired = made.with_selector(PAIRED)
    assert paired.describe()["optimiser"] == {**WHOLE, "weighted": True}
    assert fedcor.experiment(paired, optimiser={"keep": 0.25}).build_optimiser() == Momentum(
        weighted=True, keep=0.25
    )
    with pytest.raises(ConfigError, match="optimiser.keep = 0.5: unknown setting"):
        fedcor.experiment("digits", optimiser={"keep": 0.5})
    with pytest.raises(ConfigError, match="optimiser.name = 'none': must be one of"):
        fedcor.experiment("digits", selector=Paired(10, optimiser="none"))


def test_in_a_comparison_each_selector_has_its_own(tmp_path):
    result = fedcor.compare("digits", ["random", Paired(10)], [1], rounds=1, out=tmp_path)
    headers = {run.header["selector"]: run.header["config"]["optimiser"] for run in result.runs}
    as_json = {**WHOLE, "names": []}
    assert headers == {"random": {"name": "fedavg", "weighted": False}, PAIRED: as_json}
    labelled = fedcor.compare(
        "digits", {"one": "random", "two": Paired(10), "three": PAIRED}, [1], rounds=1
    )
    names = [run.header["config"]["optimiser"]["name"] for run in labelled.runs]
    assert names == ["fedavg", MOMENTUM, MOMENTUM]


def test_the_number_of_clients_may_be_left_to_the_selectors():
    settings = {"batch_size": 8, "local_steps": 1, "learning_rate": 0.1, "rounds": 1}
    made = fedcor.Experiment("digits", fedcor.IID(20), **settings)
    result = fedcor.compare(made, [fedcor.Random(3), Paired(3)], [1])
    names = [run.header["config"]["optimiser"]["name"] for run in result.runs]
    assert names == ["fedavg", MOMENTUM]


def test_an_objects_optimiser_is_described_as_its_table_is():
    for table, made in (
        ({"name": "fedprox", "mu": 0.3}, fedcor.FedProx(mu=0.3)),
        ({"name": "fedavg"}, fedcor.FedAvg()),
        ({"name": MOMENTUM, "keep": 0.75}, Momentum(keep=0.75)),
    ):
        one, other = (fedcor.experiment("digits", optimiser=given) for given in (table, made))
        assert one.describe() == other.describe()
        again = fedcor.experiment("digits", optimiser=one.describe()["optimiser"])
        assert again.build_optimiser() == made
