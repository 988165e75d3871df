"""Bad input ends with one message and exit code 2: no traceback, no hang, nothing elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import string
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import fedcor
from fedcor.cli import main
from fedcor.core import config
from fedcor.core.config import check_at_least, check_memory, expand_home, machine_memory
from fedcor.core.errors import ConfigError, DataError, FedcorError, RecordError
from fedcor.data.cache import read_npz
from fedcor.data.downloads import READERS
from fedcor.reporting.gp_calibration import health
from fedcor.rounds.record_line import FORMAT
from fedcor.runs.record import RECORD, read_run
from fedcor.runs.resume import open_run
from fedcor.simulation.experiment_files import load_experiment, parse_experiment

NINES = "9" * 400
RUN = ["run", "digits", "--rounds", "2", "--out", "o"]


def call(*arguments):
    """(exit code, stdout, stderr) of the command; an error that it does not expect is raised."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # of argparse
            code = exit.code
    return code, out.getvalue(), err.getvalue()


def refused(*arguments, about=""):
    code, _, err = call(*arguments)
    assert code == 2
    assert err.startswith(("fedcor: ", "usage: "))
    assert len(err.splitlines()[-1]) < 1500
    assert about in err
    return err


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ("#x=1", "must have the form key=value"),
        ("a=1\nb=2", "unknown setting"),
        ("a = 1\nb=2", "unknown setting"),
        ("optimiser.name=[1]", "must be one of"),
        ("optimiser.name={a=1}", "must be one of"),
        ("partition.kind=[]", "must be one of"),
        ("partition.kind={}", "must be one of"),
        ("model.name=[]", "must be"),
        ("training.device=[]", "must be"),
        ("training.loss=[]", "must be"),
        ("data.name=[]", "must be"),
        (f"training.learning_rate={NINES}", "at most 300 digits"),
        (f"training.batch_size={NINES}", "at most 18 digits"),
        (f"target_accuracy={NINES}", "must be a number"),
        (f"partition.clients={NINES}", "at most 18 digits"),
        (f"faults.dropout={NINES}", "at most 300 digits"),
        (f"optimiser.server_rate={NINES}", "unknown setting"),
        (f"training.local_steps={NINES * 20}", "must be a whole number"),
        (f"training.milestones=[{NINES}]", "at most 18 digits"),
        ("training.local_steps=99999999999999999999", "at most 18 digits"),
        ("training.local_steps=999999999999", "at most 2147483648"),
        ("training.local_steps=2000000000", "of memory, and this machine has"),
        ("training.batch_size=999999999999", "at most 2147483648"),
        ("partition.clients=2000000000", "of memory, and this machine has"),
        ("selectors.fedcor.dimension=2000000000", "of memory, and this machine has"),
        ("selectors.fedcor.samples_per_refit=2000000000", "of memory, and this machine has"),
        ("selectors.fedcor.samples_per_refit=100000000000", "at most 2147483648"),
        ("model.hidden=[200000000, 20000000]", "of memory, and this machine has"),
        ("model.hidden=3", "could not be built"),
        ('name="a\\u0000b"', "must be a plain name"),
        ('name="a\\nb"', "must be a plain name"),
        ('data.name="a\\u0000b.npz"', "cannot hold a NUL"),
        ('data.name="~nobodyhere/b.npz"', "no home folder"),
        (f"model.{'.'.join('a' * 300)}=1", "must have the form"),
        (f"model.hidden={'[' * 900 + ']' * 900}", "must be"),
        ("training.factor=1e6", ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_setting_that_cannot_be(change, about):
    milestones = "training.milestones=[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"
    more = ["--set", milestones] if "factor" in change else []
    refused(*RUN, "--selector", "fedcor", *more, "--set", change, about=about)
    assert not Path("o").exists()


def test_a_factor_that_is_too_large_is_named():
    changes = ["training.factor=1e6", "training.milestones=[2,3,4,5,6,7,8]"]
    with pytest.raises(ConfigError, match="takes the learning rate above 1e\\+06 in round 9"):
        load_experiment("digits", [*changes, "training.rounds=10"])
    assert load_experiment("digits", [*changes, "training.rounds=3"]).build_schedule().at(2) > 1e4
    with pytest.raises(ConfigError, match="factor"):
        fedcor.simulation.schedules.LearningRate(1.0, (1,) * 100, 1e6).at(5)


def test_a_home_folder_that_there_is_not():
    refused("run", "digits", "--out", "~nobodyhere/x", about="no home folder")
    refused("run", "~nobodyhere/x.toml", about="no home folder")
    with pytest.raises(ConfigError, match="no home folder"):
        fedcor.load("~nobodyhere/x")
    with pytest.raises(ConfigError, match="NUL"):
        expand_home("out", "a\0b")


@pytest.mark.parametrize(
    "content",
    [
        f"x={'[' * 5000}{']' * 5000}",
        f"{'.'.join(['a'] * 5000)}=1",
        f"x={'{a=' * 600}1{'}' * 600}",
        f"name={'9' * 5000}",
        f"[training]\nrounds={'9' * 5000}",
        "name='\x01'",
    ],
    ids=["lists", "tables", "inline", "digits", "digits below", "control"],
)
def test_a_file_that_cannot_be(content):
    Path("a.toml").write_text(content)
    refused("run", "a.toml")


SELECTORS = """
import abc, dataclasses
from fedcor.selectors.baselines import Random

@dataclasses.dataclass(frozen=True)
class Abstract(abc.ABC):
    @abc.abstractmethod
    def init(self, population): ...
    def select(self, state, federation): ...
    def observe(self, state, outcome): ...

@dataclasses.dataclass(frozen=True)
class Raising(Random):
    def __post_init__(self):
        raise RuntimeError("boom")

@dataclasses.dataclass(frozen=True)
class Unknown(Random):
    field: "NoSuchType" = 3
"""


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("Abstract", "is abstract: it lacks init"),
        ("Raising", "could not be made (RuntimeError: boom)"),
        ("Unknown", "could not be made (NameError"),
    ],
)
def test_a_users_selector_that_cannot_be_made(name, about, monkeypatch):
    Path("bad_selectors.py").write_text(SELECTORS)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    refused("run", "digits", "--selector", f"bad_selectors:{name}", about=about)


@pytest.mark.parametrize("size", [0, 8, 12, 16, 18, 23, 24, 40])
def test_a_picture_that_is_cut_short(tmp_path, size):
    whole = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\4\0\0\0\x27\x10\x08\x02\0\0\0" + bytes(20)
    for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / f"{batch}.png").write_bytes(whole[:size])
    for name in ("train_lables.json", "test_lables.json"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(DataError, match="PNG|damaged"):
        READERS["cifar10"](tmp_path)


# --- sizes ----------------------------------------------------------------------------------------


def test_memory_is_checked_against_the_machine(monkeypatch):
    assert machine_memory() > 1e8
    monkeypatch.setattr(config, "machine_memory", lambda: 2e9)
    check_memory("a", 1, 2e9)
    with pytest.raises(
        ConfigError, match=r"a = 7: needs about 3.50 GB of memory, and this machine has 2.00 GB"
    ):
        check_memory("a", 7, 3.5e9)
    monkeypatch.setattr(config, "machine_memory", lambda: None)  # it does not tell
    check_memory("a", 7, 1e30)


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "limit").write_text("123456\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(config, "_CGROUP_LIMITS", (tmp_path / "none", tmp_path / "limit"))
    assert machine_memory.__wrapped__() == 123456


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["optimiser.name=scaffold"], "optimiser.name"),
        (["optimiser.name=mifa"], "optimiser.name"),
        (["optimiser.name=feddyn"], "optimiser.name"),
        (["selectors.complement.sketch=full"], "selectors.complement.sketch"),
        (["model.hidden=[100, 1000]"], "training.clients_per_round"),
    ],
)
def test_clients_times_parameters_must_fit(monkeypatch, changes, key):
    """With room for 40 models: the 10 of a round fit, those of 50 clients do not."""
    selector = "complement" if "complement" in changes[0] else "random"
    experiment = load_experiment("digits", [*changes, "training.rounds=20"], selector)
    small = load_experiment("digits", [], "random")
    simulation = fedcor.simulation.build.build_simulation(small, 1)
    monkeypatch.setattr(config, "machine_memory", lambda: 40 * 4 * len(simulation.start.model))
    fedcor.simulation.build.build_simulation(small, 1)
    with pytest.raises(ConfigError) as caught:
        fedcor.simulation.build.build_simulation(experiment, 1)
    assert caught.value.key in (key, "model.name")


def test_few_clients_that_are_seen_need_little(monkeypatch):
    """A run of two rounds remembers at most 20 of the 50 clients."""
    experiment = load_experiment(
        "digits", ["optimiser.name=scaffold", "training.rounds=2"], "random"
    )
    model = fedcor.simulation.build.build_simulation(experiment, 1).start.model
    monkeypatch.setattr(config, "machine_memory", lambda: 40 * 4 * len(model))
    fedcor.simulation.build.build_simulation(experiment, 1)


def test_seeds_may_be_larger_than_counts():
    assert fedcor.run("digits", selector="random", rounds=1, seed=2**40).seeds == (2**40,)
    with pytest.raises(ConfigError, match="at most"):
        check_at_least("rounds", 2**31 + 1, 1)


# --- records --------------------------------------------------------------------------------------

HEADER = {
    "kind": "header",
    "format": FORMAT,
    "experiment": "e",
    "selector": "random",
    "seed": 1,
    "config": {"training": {"rounds": 2}, "target_accuracy": 0.5},
    "versions": {},
}
ROUND = {
    "selected": [0, 1],
    "participated": [1],
    "test_accuracy": 0.5,
    "test_loss": 1.0,
    "learning_rate": 0.1,
    "probed": 4,
    "refused": 0,
    "bytes_down": 3,
    "bytes_up": 4,
    "seconds": 0.1,
    "why": {"gain": [1.0, None], "runner_up": [3, None], "margin": [0.1, None], "own": [0.1, 0.2]},
    "details": {
        "known": [0, 1, 2],
        "losses": [1.0, 2.0, None],
        "told": [0.5],
        "candidates": [0, 1, 2],
        "waited": [1, 2],
        "forecast_clients": [2],
        "log_score": [-1.0],
        "residual_bins": [1] * 20,
        "squared_errors": [1.0],
        "similarity": [0.9],
    },
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -1, 2**63, 1e308, "__main__:X", "random", float("inf")]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths(tree, path=()):
    """The path of every value in tables within tables."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from paths(value, (*path, key))


@st.composite
def garbled(draw, tree, most=3):
    """`tree` with some of its values replaced by anything, or removed."""
    copy = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(0, most))):
        found = [path for path in paths(copy) if path]
        if not found:
            break
        *above, last = draw(st.sampled_from(found))
        table = copy
        for key in above:
            table = table[key]
        if draw(st.booleans()):
            table[last] = draw(JSON)
        else:
            del table[last]
    return copy


@st.composite
def records(draw):
    count = draw(st.integers(0, 3))
    rounds = [{"round": t, **draw(garbled(ROUND, 1))} for t in range(count)]
    return [{**draw(garbled(HEADER)), "kind": "header", "format": FORMAT}, *rounds]


def check_record(folder, lines):
    (folder / RECORD).write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = sorted(folder.rglob("*"))
    for command in ("explain", "report"):
        for form in ("", "--json"):
            code, _, err = call(command, folder, *form.split())
            assert code in (0, 2), err
    with contextlib.suppress(RecordError):
        json.dumps(health(read_run(folder)), allow_nan=False)
    for form in ("--full", "--csv", "--latex"):
        assert call("report", folder, form)[0] in (0, 2)
    assert sorted(folder.rglob("*")) == before


@given(records())
@settings(max_examples=40)
def test_any_garbled_record_is_read_or_refused(tmp_path_factory, lines):
    check_record(tmp_path_factory.mktemp("record"), lines)


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"selected": 3},
        {"selected": ["a"], "participated": None},
        {"selected": [0, 1], "participated": [0], "why": {"x": [1]}},
        {"selected": [1e999], "why": 3},
        {"bytes_up": "x", "test_accuracy": {}},
    ],
    ids=str,
)
@pytest.mark.parametrize("rounds", [2, 1e999, "x", None, -3])
def test_a_garbled_round_is_a_message(tmp_path, line, rounds):
    header = {**HEADER, "config": {"training": {"rounds": rounds}}}
    check_record(tmp_path, [header, {"round": 0, **line}])


def test_a_garbled_run_is_not_resumed(tmp_path):
    (tmp_path / RECORD).write_text(
        json.dumps(HEADER) + "\n" + json.dumps({"round": 0, "test_accuracy": "x"}) + "\n"
    )
    with pytest.raises(RecordError, match="line 2: test_accuracy is unusable"):
        read_run(tmp_path)
    with pytest.raises(RecordError, match="line 2"), open_run(tmp_path, HEADER, resume=True):
        pass


# --- settings -------------------------------------------------------------------------------------

KEYS = [
    *("name", "selector", "target_accuracy", "data.name", "data.holdout", "data.noisy_clients"),
    *("partition.kind", "partition.clients", "partition.shards_per_client", "partition.alpha"),
    *("partition.minimum_size", "partition", "model", "model.name", "model.hidden"),
    *("model.dropout", "training.rounds", "training.clients_per_round", "training.batch_size"),
    *("training.local_steps", "training.learning_rate", "training.milestones", "training.factor"),
    *("training.weight_decay", "training.device", "training.loss", "optimiser", "optimiser.name"),
    *("optimiser.weighted", "faults", "faults.dropout", "faults.unavailable", "faults.stragglers"),
    *("selectors", "selectors.fedcor", "selectors.fedcor.warmup", "selectors.fedcor.interval"),
    *("selectors.fedcor.dimension", "selectors.fedcor.discount", "selectors.fedcor.noise"),
    *("selectors.complement.sketch", "metrics", "metrics.a", "training", "data"),
]
VALUES = st.one_of(
    st.sampled_from(
        [
            *(
                "0",
                "-1",
                "1",
                "true",
                '""',
                "[]",
                "{}",
                "nan",
                "inf",
                "-inf",
                "1e308",
                "1e-308",
                "[1]",
            ),
            *("2147483648", "9223372036854775807", "9" * 30, NINES, "9" * 5000, "1e400", "-0.0"),
            *('"a\\u0000"', '"~x/y"', "'module:thing'", "'os:getcwd'", "'math:sin'", "1979-05-27"),
            *("[[1]]", "{a=1}", '["a"]', "'mlp'", "'random'", "'cuda:9'", "'iid'", "'dirichlet'"),
            *(
                "'fedadam'",
                "'scaffold'",
                "'fedcor'",
                "'../x'",
                "'/etc/passwd'",
                "'x.npz'",
                "0.5",
                "3",
            ),
        ]
    ),
    st.text(string.printable, max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(KEYS), VALUES).map("=".join),
        st.text(max_size=15),
        st.tuples(st.text(max_size=8), VALUES).map("=".join),
    ),
    min_size=1,
    max_size=3,
)


def check_changes(changes):
    """The settings are refused with a FedcorError, or can be described."""
    assume(not any("\0" in change for change in changes))  # no argument of a process has it
    message, experiment = "", None
    try:
        experiment = load_experiment("digits", changes, None)
        json.dumps(experiment.describe(), default=repr)
    except FedcorError as error:
        message = str(error)
    assert len(message) < 3000
    return experiment


@given(CHANGES)
@settings(max_examples=300, deadline=5000, suppress_health_check=[HealthCheck.too_slow])
@example(["#x=1"])
@example(["=1"])
def test_any_change_is_taken_or_refused(changes):
    check_changes(changes)


@given(st.dictionaries(st.sampled_from([key.partition(".")[0] for key in KEYS]) | st.text(), JSON))
@settings(max_examples=200)
def test_any_tables_are_taken_or_refused(tables):
    with contextlib.suppress(FedcorError):
        parse_experiment({**fedcor.simulation.experiment_files.read_settings("digits"), **tables})


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
@settings(max_examples=100)
@example(b"a=" + b"[" * 3000)
def test_any_file_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("files") / "a.toml"
    path.write_bytes(content)
    code, _, err = call("run", path, "--out", path.parent / "out")
    assert code == 2
    assert err.startswith("fedcor: ")
    assert list(path.parent.iterdir()) == [path]


# --- data -----------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=40)
def test_a_damaged_data_file_is_read_or_refused(tmp_path_factory, small_data, data):
    source = Path(small_data.partition("=")[2])
    folder = tmp_path_factory.mktemp("data")
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        # Most of what can go wrong is in the headers, of which the file has some at its end.
        near = st.integers(0, 300) | st.integers(len(content) - 600, len(content) - 1)
        place = data.draw(near | st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (folder / "own.npz").write_bytes(bytes(content))
    code, _, err = call(
        *("run", "digits", "--selector", "random", "--rounds", "1", "--out", folder / "out"),
        *("--set", f"data.name={folder / 'own.npz'}"),
    )
    assert code in (0, 2), err
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "arrays",
    [
        {"x_train": np.zeros((0, 3)), "y_train": np.zeros(0, int)},
        {"x_train": np.zeros((4, 3)), "y_train": np.array([0, 1, -1, 2])},
        {"x_train": np.zeros((4, 3)), "y_train": np.array([0, 1, 2**62, 2])},
        {"x_train": np.full((4, 3), np.nan), "y_train": np.arange(4)},
        {"x_train": np.zeros((4, 3), dtype="M8[s]"), "y_train": np.arange(4)},
        {"x_train": np.array(3.0), "y_train": np.array(1)},
    ],
    ids=["empty", "negative", "huge label", "nan", "dates", "scalars"],
)
def test_data_that_cannot_be(tmp_path, arrays):
    tests = {key.replace("train", "test"): value for key, value in arrays.items()}
    np.savez(tmp_path / "own.npz", **arrays, **tests)
    refused(*RUN, "--set", f"data.name={tmp_path / 'own.npz'}")


def test_labels_of_half_precision_are_taken_without_a_warning(tmp_path):
    """Warnings are errors here; the largest label was compared in the labels' own type."""
    x, y = np.zeros((4, 3)), np.arange(4, dtype=np.float16) % 2
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert fedcor.data.datasets.load(str(tmp_path / "own.npz")).train_y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("key", ["config", "versions"])
@pytest.mark.parametrize("value", [True, 3, 0.5, "x", [1]])
def test_a_header_whose_tables_are_none_is_a_message(tmp_path, key, value):
    check_record(tmp_path, [{**HEADER, key: value}, {"round": 0, **ROUND}])
    nested = {**HEADER, "config": {**HEADER["config"], "selectors": value}}
    check_record(tmp_path, [nested, {"round": 0, **ROUND}])


@pytest.mark.parametrize("path", ["~nobodyhere/tags.csv", "a\\u0000"])
def test_a_file_of_tags_that_cannot_be(path):
    refused(*RUN, "--set", f'tags="{path}"')


def test_a_message_does_not_repeat_a_whole_file(tmp_path):
    """NumPy's error names all keys of a header that has others than it should."""
    header = b"{" + b"".join(b"'%d': 0, " % key for key in range(800)) + b"}\n"
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            size = len(header).to_bytes(4, "little")
            archive.writestr(f"{key}.npy", b"\x93NUMPY\x02\x00" + size + header)
    with pytest.raises(DataError, match="cannot be read") as error:
        read_npz(tmp_path / "data.npz")
    assert len(str(error.value)) < 1000
