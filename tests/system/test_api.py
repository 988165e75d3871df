"""The front door: five lines of Python, in memory or on disk, with names or with objects."""

from __future__ import annotations

import doctest
import inspect
import json
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedcor
from fedcor.cli import main
from fedcor.core.describe import NOT_REPEATABLE
from fedcor.core.errors import ConfigError, DataError, FedcorError, RecordError, RunExistsError
from fedcor.runs.progress import show_rounds
from fedcor.runs.record import read_run
from fedcor.simulation.experiment_files import load_experiment, variants

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((120, 6)), np.arange(120) % 3
IDS = np.arange(120) % 12


class Net(torch.nn.Module):
    """A user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@dataclass(frozen=True)
class Newest(fedcor.Random):
    """A user's selector."""

    power: int = 1


class Mean:
    """A user's optimiser: no dataclass, and only what it must have."""

    def aggregate(self, model, results, weights):
        return results.mean(dim=0)


def own(**changes):
    settings = {
        "data": (X, Y, X, Y),
        "partition": IDS,
        "model": lambda: Net(),
        "rounds": 3,
        "clients_per_round": 4,
        "local_steps": 2,
        "batch_size": 8,
        "learning_rate": 0.1,
        "selector": "random",
    }
    return fedcor.Experiment(**{**settings, **changes})


def numbers(result):
    """Everything that is recorded, except the seconds."""
    return [
        [{key: value for key, value in entry.items() if key != "seconds"} for entry in run.rounds]
        for run in result.runs
    ]


def named(result):
    return [(run.header["selector"], run.header["seed"]) for run in result.runs]


# --- compare --------------------------------------------------------------------------------------


def test_names_and_objects_are_compared_in_memory():
    result = fedcor.compare(
        "digits", ["random", "afl", Newest(10)], seeds=range(1, 3), rounds=3, progress=False
    )
    mine = f"{__name__}:Newest"
    assert isinstance(result, fedcor.Result)
    assert named(result) == [(name, seed) for seed in (1, 2) for name in ("random", "afl", mine)]
    assert all(run.path is None and len(run.rounds) == 3 for run in result.runs)
    # A selector that chooses alike meets the same federation.
    assert numbers(result)[0] == numbers(result)[2] != numbers(result)[3]


def test_in_memory_on_disk_and_on_the_command_line_are_the_same(tmp_path):
    memory = fedcor.compare("digits", ["random", fedcor.AFL(10)], seeds=[1], rounds=3)
    disk = fedcor.compare("digits", ["random", fedcor.AFL(10)], seeds=[1], rounds=3, out=tmp_path)
    assert numbers(memory) == numbers(disk)
    assert [run.header for run in memory.runs] == [run.header for run in disk.runs]
    typed = [
        "compare",
        "digits",
        "--selectors",
        "random,afl",
        "--seeds",
        "1",
        "--rounds",
        "3",
        "--out",
    ]
    assert main([*typed, str(tmp_path), "--resume"]) == 0
    assert sorted(named(fedcor.load(tmp_path))) == sorted(named(memory))
    with pytest.raises(RunExistsError):
        fedcor.compare("digits", ["random"], seeds=[1], rounds=3, out=tmp_path)


def test_several_processes_give_what_one_does(tmp_path):
    experiment = own(optimiser=Mean(), learning_rate=lambda round: 0.1 / (1 + round))
    given = {"selectors": ["random", Newest(4, power=2)], "seeds": [1, 2]}
    one = fedcor.compare(experiment, **given)
    two = fedcor.compare(experiment, **given, jobs=2)
    assert numbers(one) == numbers(two)
    assert [run.header for run in one.runs] == [run.header for run in two.runs]
    fedcor.compare(experiment, **given, jobs=2, out=tmp_path)
    assert numbers(fedcor.compare(experiment, **given, out=tmp_path, resume=True)) == numbers(one)


def test_runs_are_cut_to_the_rounds_that_are_asked_for(tmp_path):
    fedcor.compare("digits", "random", seeds=[1], rounds=4, out=tmp_path)
    again = fedcor.compare("digits", "random", seeds=[1], rounds=2, out=tmp_path, resume=True)
    assert len(again.runs[0].rounds) == 2
    assert len(fedcor.load(tmp_path).runs[0].rounds) == 4


@pytest.mark.parametrize(
    ("selectors", "labels"),
    [
        ([Newest(4), Newest(4, power=2)], ["Newest(power=1)", "Newest(power=2)"]),
        (["fedcor", fedcor.FedCor(4, beta=0.5)], ["fedcor", "fedcor(beta=0.5)"]),
        ({"one": Newest(4), "other": "random"}, ["one", "other"]),
        (Newest(4), ["Newest"]),
        ("afl", ["afl"]),
    ],
)
def test_selectors_have_names_that_tell_them_apart(selectors, labels):
    found = [one.selector_label.removeprefix(f"{__name__}:") for one in variants(own(), selectors)]
    assert found == labels


def test_a_label_is_the_name_in_the_record_and_of_the_folder(tmp_path):
    result = fedcor.compare(own(), {"my own": Newest(4)}, seeds=[1], out=tmp_path)
    assert result.runs[0].path == tmp_path / "my-own" / "seed-1"
    header = result.runs[0].header
    assert header["selector"] == "my own"
    assert header["config"]["selectors"]["my own"]["class"] == f"{__name__}:Newest"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"selectors": []}, "at least one"),
        ({"selectors": [Newest(4), Newest(4)]}, "cannot be told from another"),
        ({"selectors": ["random", "random"]}, "twice"),
        ({"selectors": {"a b": "random", "a:b": "afl", "a-b": "afl"}, "out": "o"}, "same folder"),
        ({"selectors": [Newest]}, "an object, not a class"),
        ({"selectors": ["afll"]}, 'did you mean "afl"'),
        ({"selectors": [Newest(5)]}, "chooses 5 clients per round.*clients_per_round = 4"),
        ({"seeds": 3}, r"range\(1, 4\)"),
        ({"seeds": [1, 1]}, "without repeats"),
        ({"seeds": [-1]}, "seeds = -1"),
        ({"jobs": 0}, "jobs = 0"),
        ({"resume": True}, "needs out"),
        ({"sedes": [1]}, 'did you mean "seeds"'),
    ],
)
def test_what_a_comparison_refuses(keywords, message):
    given = {"selectors": ["random"], "seeds": [1], **keywords}
    with pytest.raises(ConfigError, match=message):
        fedcor.compare(own(), **given)


def test_the_number_of_clients_may_be_left_to_the_selector():
    experiment = own(clients_per_round=0)
    assert fedcor.run(experiment, Newest(5), rounds=1).runs[0].rounds[0]["selected"].__len__() == 5
    found = variants(experiment, ["random", fedcor.AFL(3)])
    assert [one.clients_per_round for one in found] == [3, 3]
    for call in (fedcor.run, fedcor.simulate):
        with pytest.raises(ConfigError, match="clients_per_round = None: must be given"):
            call(experiment)


@dataclass(frozen=True)
class Failing(fedcor.Random):
    """A user's selector with a mistake."""

    def select(self, state, federation):
        raise KeyError("oh")


def test_a_failing_run_of_many_is_named():
    with pytest.raises(FedcorError, match="Failing, seed 2: round 0: the selector failed in sel"):
        fedcor.compare(own(), ["random", Failing(4)], seeds=[2])


# --- run, load, simulate --------------------------------------------------------------------------


def test_a_run_in_a_folder_is_resumed_and_loaded(tmp_path):
    out, seen = tmp_path / "x", []
    fedcor.run("digits", fedcor.AFL(10), seed=1, out=out, rounds=2)
    result = fedcor.run(
        "digits", fedcor.AFL(10), seed=1, out=out, resume=True, rounds=4, on_round=seen.append
    )
    assert [record.round for record in seen] == [2, 3]
    assert len(result.runs[0].rounds) == 4
    assert numbers(fedcor.load(str(out))) == numbers(result)
    assert numbers(fedcor.run("digits", "afl", rounds=4)) == numbers(result)


def test_a_run_made_from_objects_resumes_only_if_they_are_the_same(tmp_path):
    fedcor.run(own(), out=tmp_path, rounds=2)
    fedcor.run(own(), out=tmp_path, resume=True)
    assert len(read_run(tmp_path).rounds) == 3
    other = X.copy()
    other[0, 0] += 1
    for changed, where in (
        (own(data=(other, Y, X, Y)), "data.train_x.sha256"),
        (own(model=lambda: torch.nn.Linear(6, 3)), "model.code"),
        (own(partition=IDS[::-1]), "partition.samples of clients.sha256"),
        (own(optimiser=Mean()), "optimiser.name"),
    ):
        with pytest.raises(RecordError, match=where):
            fedcor.run(changed, out=tmp_path, resume=True)


def test_round_by_round():
    rounds = [
        (record.round, state.round, len(record.selected))
        for record, state in fedcor.simulate(own(), fedcor.FedCor(4, warmup=2), seed=2)
    ]
    assert rounds == [(0, 1, 4), (1, 2, 4), (2, 3, 4)]
    threads = torch.get_num_threads()
    next(fedcor.simulate(own()))
    assert torch.get_num_threads() == threads
    with pytest.raises(ConfigError, match="did you mean"):  # at once, not with the first round
        fedcor.simulate("digts")


@pytest.mark.parametrize("function", [fedcor.run, fedcor.compare, fedcor.simulate])
def test_a_wrong_seed_engine_or_experiment_is_refused(function):
    more = {"selectors": ["random"]} if function is fedcor.compare else {}
    with pytest.raises(ConfigError, match='did you mean "digits"'):
        function("digit", **more)
    if function is not fedcor.compare:
        with pytest.raises(ConfigError, match="seed = -1"):
            function("digits", seed=-1)
    if function is fedcor.run:
        with pytest.raises(ConfigError, match='did you mean "flower"'):
            function("digits", engine="flowr")


# --- experiments ----------------------------------------------------------------------------------


def test_keywords_change_a_preset_a_file_or_an_experiment(tmp_path):
    changed = fedcor.experiment("digits", rounds=50, selectors={"fedcor": {"beta": 0.9}})
    typed = load_experiment("digits", ["training.rounds=50", "selectors.fedcor.beta=0.9"])
    assert changed.describe() == typed.describe()
    assert changed.with_selector("fedcor").build_selector().warmup == 10
    again = fedcor.experiment(
        changed,
        partition={"kind": "dirichlet", "minimum_size": 3},
        model={"hidden": [8]},
        optimiser={"name": "fedprox", "mu": 0.1},
        faults={"dropout": 0.1},
    )
    assert again.partition.clients == 50
    assert again.model == {"name": "mlp", "hidden": [8], "dropout": 0.0}
    assert again.build_optimiser() == fedcor.FedProx(mu=0.1)
    assert again.faults == fedcor.Faults(dropout=0.1)
    assert fedcor.experiment(again) is again
    assert fedcor.experiment(again, model={"name": "logistic"}).model == {"name": "logistic"}
    path = tmp_path / "half.toml"
    path.write_text('[data]\nname = "digits"\n[training]\nlocal_steps = 2\nbatch_size = 4\n')
    half = fedcor.experiment(
        path, partition=fedcor.IID(5), rounds=2, clients_per_round=2, learning_rate=0.1
    )
    assert (half.name, half.local_steps, half.clients) == ("half", 2, 5)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rouns": 3}, 'rouns = 3: unknown setting.*did you mean "rounds"'),
        ({"rounds": 0}, "^rounds = 0: must be a whole number of at least 1"),
        ({"rounds": 2.5}, "^rounds = 2.5: must be a whole number"),
        ({"clients_per_round": 13}, "must be at most partition.clients = 12"),
        ({"model": 3}, "^model = 3: must be a name"),
        ({"model": "mpl"}, 'did you mean "mlp"'),
        ({"model": {"name": "mlp", "hiden": 3}}, 'did you mean "hidden"'),
        ({"partition": None}, "partition = None: must be fedcor.IID, Shards or Dirichlet"),
        ({"partition": fedcor.IID}, "partition = <class.*must be fedcor.IID, Shards"),
        ({"partition": {"kind": "shard", "clients": 3}}, 'partition.kind.*did you mean "shards"'),
        ({"optimiser": 3}, "^optimiser = 3: must be a name, or an object with the methods init"),
        ({"optimiser": "fedporx"}, 'did you mean "fedprox"'),
        ({"learning_rate": "fast"}, "module:attribute"),
        ({"learning_rate": None}, "must be a number, a function"),
        ({"learning_rate": lambda round: -1}, "but gave -1 in round 0"),
        ({"learning_rate": lambda round: 1 / round}, "failed in round 0: ZeroDivisionError"),
        ({"learning_rate": lambda round: 0.1, "milestones": [1]}, "milestones"),
        ({"faults": 3}, "faults = 3"),
        ({"faults": {"dropuot": 0.1}}, 'did you mean "dropout"'),
        ({"selectors": {"fedcor": 3}}, "must be a table of settings, or a selector object"),
        ({"selector": Newest}, "an object, not a class"),
        ({"data": "digits", "test_data": (X, Y)}, "test_data"),
    ],
)
def test_mistakes_in_keywords_are_refused_by_name(keywords, message):
    with pytest.raises(ConfigError, match=message):
        own(**keywords)


def test_what_must_be_given():
    with pytest.raises(ConfigError, match="batch_size = None: must be given"):
        fedcor.Experiment("digits", rounds=3)
    with pytest.raises(ConfigError, match='did you mean "alpha"'):
        fedcor.Dirichlet(5, alhpa=0.1)
    with pytest.raises(ConfigError, match='did you mean "beta"'):
        fedcor.FedCor(5, beat=0.1)


def test_what_a_file_names_can_be_given_as_an_object():
    names = fedcor.experiment("digits", optimiser={"name": "fedprox", "mu": 0.3})
    objects = fedcor.experiment(
        names,
        partition=fedcor.Shards(50, shards_per_client=1),
        optimiser=fedcor.FedProx(mu=0.3),
        selector=names.build_selector(),
        learning_rate=np.float64(0.05),
        rounds=np.int64(100),
    )
    assert objects.describe() == names.describe()
    json.dumps(objects.describe())


def test_the_header_says_what_can_be_repeated():
    config = own(optimiser=Mean(), selector=Newest(4), model=Net).describe()
    assert config["model"] == {"name": f"{__name__}:Net"}
    assert config["optimiser"] == {"name": f"{__name__}:Mean"}
    assert config["selectors"] == {
        f"{__name__}:Newest": {"clients_per_round": 4, "replacement": False, "power": 1}
    }
    assert config["data"]["train_y"]["shape"] == [120]
    assert config["partition"]["clients"] == 12
    config = own(model=Net(), learning_rate=lambda round: 0.1).describe()
    assert config["model"][NOT_REPEATABLE] == "a module with weights of its own"
    assert config["training"]["learning_rate"][NOT_REPEATABLE] == "<lambda> in test_api.py"


def test_a_module_is_trained_from_its_own_weights_and_left_as_it_is():
    module = Net()
    before = module.layer.weight.detach().clone()
    fedcor.run(own(model=module), rounds=1)
    assert torch.equal(module.layer.weight, before)
    _, state = next(fedcor.simulate(own(model=module, learning_rate=1e-9)))
    assert torch.allclose(state.model[:18], before.flatten(), atol=1e-6)


def test_client_ids_that_do_not_fit_the_data():
    with pytest.raises(DataError, match="60 client ids for 120 training samples"):
        own(partition=IDS[:60])
    with pytest.raises(DataError, match="one client id per sample"):
        own(partition=np.zeros((2, 2)))
    named = fedcor.experiment("digits", partition=IDS, clients_per_round=4)
    with pytest.raises(DataError, match="120 client ids, but there are 1438 samples"):
        fedcor.run(named, rounds=1)


def macro_f1(targets, outputs):
    """A user's metric, on the whole test data."""
    from sklearn.metrics import f1_score

    return f1_score(targets, outputs.argmax(axis=1), average="macro")


class Pair(torch.nn.Module):
    """A model whose batch is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = torch.nn.EmbeddingBag(9, 4), torch.nn.Linear(4, 3)

    def forward(self, batch):
        return self.layer(self.embed(batch["input_ids"]) * batch["scale"][:, None])


def test_a_metric_with_its_direction_is_recorded_and_read_back(tmp_path):
    tried = own(metrics={"f1": (macro_f1, "higher")}, rounds=2)
    result = fedcor.compare(tried, ["random", "full"], seeds=[1], out=tmp_path)
    wanted = {"f1": {"function": f"{__name__}:macro_f1", "better": "higher"}}
    assert result.runs[0].header["config"]["metrics"] == wanted
    means = fedcor.load(tmp_path).summary("f1")["mean_f1"]["mean"].tolist()
    assert means == sorted(means, reverse=True)
    turned = fedcor.experiment(tried, metrics={"f1": (macro_f1, "lower")})
    with pytest.raises(FedcorError, match=r"other settings .*metrics\.f1\.better"):
        fedcor.run(turned, "random", seed=1, out=result.runs[0].path, resume=True)


def test_metrics_regression_and_batches_that_are_dictionaries(tmp_path):
    result = fedcor.run(own(metrics={"f1": macro_f1}, selector=fedcor.FedCor(4)), out=tmp_path)
    assert 0 <= result.runs[0].rounds[-1]["metrics"]["f1"] <= 1
    assert result.runs[0].header["config"]["metrics"] == {"f1": f"{__name__}:macro_f1"}
    target = X[:, 0] + 1.0
    numbers = own(data=(X, target, X, target), model=lambda: torch.nn.Linear(6, 1), loss="mse")
    last = fedcor.run(numbers, fedcor.FedCor(4)).runs[0].rounds[-1]
    assert last["test_accuracy"] is None
    assert last["test_loss"] > 0
    assert numbers.describe()["training"]["loss"] == "mse"
    words = {"input_ids": RNG.integers(9, size=(120, 5)), "scale": np.ones(120, np.float32)}
    texts = own(data=(words, Y, words, Y), model=lambda: Pair())
    assert set(texts.describe()["data"]["train_x"]) == {"input_ids", "scale"}
    assert len(fedcor.compare(texts, ["random", "afl"], seeds=[1]).runs[1].rounds) == 3


def test_data_that_comes_in_parts():
    tensors = [torch.tensor(X[k == IDS], dtype=torch.float32) for k in range(12)]
    parts = [
        torch.utils.data.TensorDataset(x, torch.tensor(Y[k == IDS])) for k, x in enumerate(tensors)
    ]
    given = own(data=parts, test_data=(X, Y), partition=None)
    assert given.clients == 12
    assert len(fedcor.run(given).runs[0].rounds) == 3
    with pytest.raises(DataError, match="leave out partition"):
        own(data=parts, test_data=(X, Y), partition=fedcor.IID(3))
    import datasets

    table = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y, "hospital": IDS})
    experiment = own(data=table, test_data=table, partition="hospital", model=lambda: First())
    assert experiment.clients == 12


class First(Net):
    """Takes the only column, or a dictionary with it."""

    def forward(self, x):
        return self.layer(x["x"] if isinstance(x, dict) else x)


def test_two_experiments_share_their_data():
    first = own()
    assert fedcor.experiment(first, rounds=5).data is first.data


# --- scripts, notebooks, types --------------------------------------------------------------------

SCRIPT = """
import dataclasses, fedcor, torch
import numpy as np
x, y = np.random.default_rng(0).standard_normal((60, 4)), np.arange(60) % 2
@dataclasses.dataclass(frozen=True)
class Mine(fedcor.Random):
    pass
scale = 0.1
experiment = fedcor.Experiment(
    (x, y, x, y), np.arange(60) % 6, lambda: torch.nn.Linear(4, 2), rounds=2, batch_size=4,
    clients_per_round=2, local_steps=1, learning_rate=lambda round: scale)
result = fedcor.compare(experiment, ["random", Mine(2)], seeds=[1, 2], jobs=JOBS)
print([run.header["selector"] for run in result.runs])
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_script_needs_no_guard(jobs, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("JOBS", str(jobs)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["random", "__main__:Mine"] * 2)


def test_progress_in_a_notebook(monkeypatch):
    shown = []

    def display(content, raw, display_id):
        shown.append(content)
        return SimpleNamespace(update=lambda content, raw: shown.append(content))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("rich.console.Console.is_jupyter", True, raising=False)
    monkeypatch.setattr("fedcor.runs.progress._console", lambda: SimpleNamespace(is_jupyter=True))
    with show_rounds("rounds", 3) as update:
        update(1, "")
        update(3, "2/2 runs")
    assert shown[0]["text/plain"] == "rounds 0/3"
    assert shown[-1]["text/plain"] == "rounds 3/3 2/2 runs"
    assert '<progress value="3" max="3">' in shown[-1]["text/html"]


def test_every_lazy_name_is_seen_by_type_checkers():
    source = Path(fedcor.__file__).read_text(encoding="utf-8")
    seen = source.partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    assert all(name in seen for name in fedcor.__all__)
    assert fedcor.__version__.count(".") >= 1
    assert typing.get_type_hints(inspect.unwrap(fedcor.load))["return"] is fedcor.Result


@pytest.mark.parametrize(
    "function", [fedcor.run, fedcor.compare, fedcor.simulate, fedcor.experiment]
)
def test_the_examples_of_the_front_door_run(function):
    wrapped = inspect.unwrap(function)
    (found,) = doctest.DocTestFinder(recurse=False).find(wrapped, wrapped.__name__, globs={})
    outcome = doctest.DocTestRunner().run(found)
    assert outcome.attempted
    assert not outcome.failed


def test_a_run_that_went_further_counts_as_finished_where_fewer_rounds_are_asked_for(tmp_path):
    fedcor.run("digits", "random", rounds=4, out=tmp_path)
    result = fedcor.run("digits", "random", rounds=2, out=tmp_path, resume=True)
    assert result.finished
    assert len(result.to_frame()) == 2
    assert len(fedcor.load(tmp_path).to_frame()) == 4


def test_a_run_within_the_warm_up_says_so():
    result = fedcor.run("digits", "fedcor", rounds=2)
    assert "fedcor chose uniformly in all rounds: its warm-up has 10" in " ".join(
        repr(result).split()
    )


def test_a_selector_of_a_script_is_called_by_its_class():
    result = fedcor.compare(
        "digits", ["random", Spaced(10, rest=1), Spaced(10, rest=5)], [1, 2], rounds=2
    )
    assert result.selectors[1].endswith("Spaced(rest=1)")
    assert "\nSpaced(rest=5)" in repr(result)
    assert result.difference("Spaced(rest=5)", "random")["n"].max() == 2
    figure = result.plot()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["random", "Spaced(rest=1)", "Spaced(rest=5)"]


@dataclass(frozen=True)
class Spaced(fedcor.Random):
    rest: int = 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda model, results: results, "a float32 array of shape"),
        (lambda model, results: model.tolist(), "a list of shape"),
        (lambda model, results: model.int(), "a int32 array of shape"),
        (lambda model, results: model * float("nan"), "numbers that are not finite"),
        (lambda model, results: results @ results, "failed in aggregate: RuntimeError"),
    ],
)
def test_a_mistake_in_an_own_optimiser_is_told_with_its_name(returned, message):
    @dataclass(frozen=True)
    class Mine(fedcor.FedAvg):
        def aggregate(self, model, results, weights):
            return returned(model, results)

    experiment = fedcor.experiment("digits", rounds=2, optimiser=Mine())
    with pytest.raises(FedcorError, match=f"round 0: the optimiser Mine .*{message}"):
        fedcor.run(experiment, "random")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda state, delivery: delivery.model, "must return .model, state. from step"),
        (lambda state, delivery: (delivery.model[1:], state), "a float32 array of shape"),
        (
            lambda state, delivery: (delivery.model + np.float64(1e300), state),
            "numbers that are not finite",
        ),
        (lambda state, delivery: (delivery.model, None), "state is a mapping"),
        (lambda state, delivery: (delivery.model, {"n": 3}), "state 'n' is not a plain NumPy"),
        (lambda state, delivery: (delivery.model / {}, state), "failed in step: TypeErr.*line"),
        (lambda state, delivery: (delivery.mean.fill(0), state), "failed in step: .*read-only"),
    ],
)
def test_a_mistake_in_a_step_is_told(step, message):
    @dataclass(frozen=True)
    class Mine(fedcor.FedAvg):
        def step(self, state, delivery):
            return step(state, delivery)

    experiment = fedcor.experiment("digits", rounds=2, optimiser=Mine())
    with pytest.raises(FedcorError, match=f"round 0: the optimiser Mine.*{message}"):
        fedcor.run(experiment, "random")


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    experiment = fedcor.experiment("digits", partition=fedcor.IID(np.int64(20)), rounds=1)
    fedcor.run(experiment, "random", seed=np.int64(3), out=tmp_path / "run")
    header = fedcor.load(tmp_path).runs[0].header
    assert header["seed"] == 3
    assert header["config"]["partition"]["clients"] == 20


@pytest.mark.parametrize(
    ("selectors", "message"),
    [
        (5, "must be names or objects"),
        ({"..": "random"}, "must have a letter or a digit"),
        ({1: "random", "1": "afl"}, "is listed twice"),
    ],
)
def test_selectors_that_cannot_be_compared_are_refused(selectors, message):
    with pytest.raises(ConfigError, match=message):
        fedcor.compare("digits", selectors, seeds=[1], rounds=1)


class Parts:
    """A user's partition that returns what it was given."""

    def __init__(self, parts):
        self.parts = parts

    def split(self, labels, rng):
        return self.parts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "the partition failed"),
        ([[0, 1], [1, 2]], "gave sample 1 2 times"),
        ([[0, 1], [-1, 2]], "client 1 sample -1"),
        ([[[0], [1, 2]], [3]], "the partition failed"),
    ],
)
def test_a_partition_that_cannot_be_used_is_refused(parts, message):
    experiment = fedcor.experiment("digits", partition=Parts(parts), clients_per_round=1)
    with pytest.raises(fedcor.FedcorError, match=message):
        fedcor.run(experiment, "random", rounds=1)
