"""The command line as a person or a script meets it. (Processes, terminals: test_cli_processes.)"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_runs import fake_run, regression_run

from fedcor.cli import main
from fedcor.cli.commands import print_finished
from fedcor.data.cache import cache_dir
from fedcor.runs.progress import score_note
from fedcor.runs.record import RunRecord, json_line, read_run
from fedcor.selectors import selector_names
from fedcor.simulation.experiment_files import load_experiment, preset_names

FAST = "--rounds 4 --set selectors.fedcor.warmup=2 --set selectors.fedcor.warmup_steps=5"


def fedcor(command: str) -> int:
    """The exit code of a command line, in this process."""
    return main(shlex.split(command))


def test_run_prints_one_json_line_and_nothing_else(capfd):
    assert fedcor(f"run digits --selector fedcor --seed 3 --out r {FAST}") == 0
    out, err = capfd.readouterr()
    line = json.loads(out)
    assert (line["selector"], line["seed"], line["rounds"]) == ("fedcor", 3, 4)
    assert line["optimiser"] == "fedavg"
    assert err == ""
    run = read_run(Path("r"))
    keys = "round selected participated test_accuracy test_loss learning_rate probed seconds"
    assert {*keys.split(), "bytes_down", "bytes_up"} <= set(run.rounds[0])
    assert run.header["config"]["training"]["rounds"] == 4
    assert run.header["versions"]["fedcor"]


def test_without_a_selector_the_default_pair_runs(capsys):
    assert fedcor("run digits --rounds 2") == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["selector"], line["optimiser"]) == ("aligned", "fedrecall")
    assert line["run"] == os.path.join("runs", "digits", "aligned", "seed-1")


def test_the_default_folder_is_where_report_looks(capsys):
    assert fedcor(f"run digits --selector random {FAST}") == 0
    assert fedcor("report runs/digits") == 0
    assert "random" in capsys.readouterr().out


def test_a_run_that_ends_in_the_warmup_is_noted(capsys):
    assert fedcor("run digits --selector fedcor --rounds 2 --out o") == 0
    assert "fedcor chooses at random in its first 10 rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run digist", "EXPERIMENT = 'digist'.*did you mean \"digits\""),
        ("run nowhere.toml", "EXPERIMENT = 'nowhere.toml': the file cannot be read"),
        ("run digits --selector fedcorr", 'did you mean "fedcor"'),
        ("run digits --set training.roundz=3", 'training.roundz.*did you mean "rounds"'),
        ("run digits --set rounds", "--set = 'rounds': must have the form key=value"),
        ("run digits --set selectors.fedcor.beta=1.5", "strictly between 0 and 1"),
        ("run digits --rounds 0", "at least 1"),
        ("compare digits --selectors random,afll", 'did you mean "afl"'),
        ("report nowhere", "there is no folder"),
        ("compare digits --plot x.gif", "--plot = 'x.gif': must end in one of .png, .svg, .pdf"),
        ("demo --plot x", "--plot = 'x': must end in one of"),
        ("report .", "no run in"),
        ("data fetch fmnits", "fmnist"),
        ("data fetch fmnist --from nowhere", "nowhere"),
    ],
)
def test_bad_input_is_code_2_and_a_sentence(command, message, capsys):
    assert fedcor(command) == 2
    out, err = capsys.readouterr()
    assert err.startswith("fedcor: ")
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert out == ""
    assert not os.listdir(".")  # nothing was written


@pytest.mark.parametrize(
    "command",
    [
        "",
        "nonsense",
        "run",
        "run digits --seed -1",
        "compare digits --seeds 3-1",
        "compare digits --seeds 1,1",
        "compare digits --selectors random,,afl",
        "compare digits --seeds a",
        "compare digits --seeds 0-2000000000",
        "report x --json --csv",
    ],
)
def test_a_wrong_command_line_is_code_2(command, capsys):
    with pytest.raises(SystemExit) as caught:
        fedcor(command)
    assert caught.value.code == 2
    assert "usage: fedcor" in capsys.readouterr().err


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        fedcor(f"{command} --help")
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["", "demo", "run", "compare", "report", "explain"])
def test_help_has_examples(command, capsys):
    assert "examples:\n  fedcor " in help_of(command, capsys)


def test_help_names_what_there_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    run = help_of("run", capsys)
    assert ", ".join(preset_names()) in run
    assert ", ".join(selector_names()) in run
    assert {"aligned", "round_robin"} < set(selector_names())
    assert "(default: the experiment's, else aligned)" in run


def test_help_and_refusals_import_neither_torch_nor_scipy():
    program = """
import sys
from fedcor.cli import main
assert main(["run", "digist"]) == 2
assert main(["compare", "digits", "--selectors", "random,afll"]) == 2
try:
    main(["--help"])
except SystemExit as ended:
    assert ended.code == 0
assert not {"torch", "scipy", "sklearn", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compare_report_and_resume(capsys, small_data):
    options = f"{small_data} {FAST}"
    command = f"compare digits --selectors random,fedcor --seeds 1,2 --jobs 2 --out c {options}"
    assert fedcor(command) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = [f"c/{name}/seed-{seed}" for name in ("random", "fedcor") for seed in (1, 2)]
    assert sorted(line["run"] for line in lines) == sorted(wanted)

    assert fedcor(command) == 2
    err = capsys.readouterr().err
    assert err == (
        "fedcor: c/random/seed-1 already holds a run: "
        "add --resume to continue it, or choose another --out\n"
    )
    assert fedcor(f"run digits --selector random --seed 1 --out c/random/seed-1 {options}") == 2
    assert capsys.readouterr().err == err
    assert fedcor(f"{command} --resume --plot x.png") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4
    assert err == "x.png\n"
    assert Path("x.png").exists()

    assert fedcor("report c") == 0
    table = capsys.readouterr().out
    assert re.match(r"[\w +]+ (reaches|does not)|No selector ", table)  # the verdict
    assert "vs random [95 %]" in table
    assert max(map(len, table.splitlines())) <= 80
    assert fedcor("report c --full") == 0
    assert "paired difference from random" in capsys.readouterr().out
    assert fedcor("report c --metric loss") == 0
    assert "test loss over 4 rounds" in capsys.readouterr().out
    assert fedcor("report c --metric los") == 2
    assert 'did you mean "loss"' in capsys.readouterr().err
    assert fedcor("report c --latex") == 0
    assert r"\toprule" in capsys.readouterr().out
    assert fedcor("report c --json") == 0
    assert json.loads(capsys.readouterr().out)
    assert fedcor("report c --csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    means = {r["selector"]: float(r["mean"]) for r in rows if r["metric"] == "mean_accuracy"}
    for name, mean in means.items():
        runs = [read_run(Path("c") / name / f"seed-{n}").rounds for n in (1, 2)]
        accuracies = [[entry["test_accuracy"] for entry in rounds] for rounds in runs]
        assert mean == pytest.approx(np.mean(accuracies))
    assert fedcor("report c --baseline rando") == 2
    assert "random" in capsys.readouterr().err


def write_runs(folder: str, runs: list[RunRecord]) -> None:
    for number, run in enumerate(runs):
        path = Path(folder) / str(number)
        path.mkdir(parents=True)
        lines = [json_line(entry) for entry in (run.header, *run.rounds)]
        (path / "rounds.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("option", "written"),
    [("", "o/curves.png"), ("a/b.svg", "a/b.svg"), ("b.pdf", "b.pdf"), ("B.PNG", "B.PNG")],
)
def test_report_draws(option, written, capsys):
    write_runs("o", [fake_run([0.1, 0.6], name) for name in ("random", "fedcor")])
    assert fedcor(f"report o --plot {option}") == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\n{written}\n")
    assert "rounds 1 to" not in out  # the picture stands for the small curve
    assert Path(written).stat().st_size > 1000
    assert fedcor(f"report o --json --plot {option}") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert err == f"{written}\n"


def test_report_refuses_a_picture_of_an_unknown_kind(capsys):
    write_runs("o", [fake_run([0.1, 0.6])])
    assert fedcor("report o --plot x.gif") == 2
    assert "--plot = 'x.gif': must end in one of .png, .svg, .pdf" in capsys.readouterr().err


def test_report_of_several_experiments(capsys):
    names = ("one", "two/2")
    write_runs("o", [fake_run([0.1, 0.6], experiment=name) for name in names])
    assert fedcor("report o --plot x.png") == 0
    out = capsys.readouterr().out
    assert out.startswith("one: random reaches 50 % after 2 rounds")
    assert "\ntwo/2: random reaches 50 % after 2 rounds" in out
    assert out.endswith("\nx-one.png\nx-two_2.png\n")


def test_report_of_runs_without_accuracy_and_of_a_users_metric(capsys):
    runs = [
        regression_run([2.0, 1.0 + seed], name, seed, metrics={"mae": [1.5, 1.0]})
        for name in ("random", "fedcor")
        for seed in (1, 2)
    ]
    write_runs("o", runs)
    assert fedcor("report o") == 0
    out = capsys.readouterr().out
    assert "test loss over 2 rounds" in out
    assert "accuracy" not in out
    assert fedcor("report o --metric mae") == 0
    assert "the same mean mae on both seeds" in " ".join(capsys.readouterr().out.split())
    assert fedcor("report o --full") == 0
    assert "accuracy" not in capsys.readouterr().out
    print_finished(read_run(Path("o/0")), terminal=False)
    line = json.loads(capsys.readouterr().out)
    assert (line["mean_loss"], line["test_loss"], "test_accuracy" in line) == (2.0, 2.0, False)
    print_finished(read_run(Path("o/0")), terminal=True)
    assert capsys.readouterr().out == "o/0: 2 rounds, test loss 2\n"
    assert score_note(None, None) == score_note(float("nan"), float("inf")) == "loss not finite"


@pytest.mark.parametrize("better", [None, "lower", "higher"])
def test_report_of_a_metric_and_its_direction(better, capsys):
    runs = [
        regression_run(
            [2.0, 1.0],
            name,
            seed,
            metrics={"mae": [level, level + seed / 100]},
            better={"mae": better},
        )
        for name, level in (("random", 0.5), ("fedcor", 0.1), ("afl", 0.3))
        for seed in (1, 2)
    ]
    write_runs("o", runs)
    assert fedcor("report o --metric mae") == 0
    out = capsys.readouterr().out
    head, table = re.split(r"\nselector  .*\n", out)
    order = {None: "random fedcor afl", "lower": "fedcor afl random", "higher": "random afl fedcor"}
    assert [line.split()[0] for line in table.splitlines()[:3]] == order[better].split()
    head = " ".join(head.split())
    start = {
        None: "The difference in mean mae from random: fedcor -0.4",
        "lower": "fedcor is ahead of random on both seeds (mean mae -0.4",
        "higher": "No selector is ahead of random. random is ahead of afl on both seeds",
    }[better]
    assert head.startswith(start)
    assert ('give metrics={"mae": (mae, "lower")}' in head) == (better is None)
    assert fedcor("report o --metric mae --json") == 0
    metrics = {m["key"]: m for m in json.loads(capsys.readouterr().out)["metrics"]}
    assert metrics["mean_mae"]["better"] == better


def test_what_is_shown_on_an_ascii_stream_is_ascii():
    write_runs("o", [fake_run([0.1, 0.6, 0.7], name) for name in ("random", "fedcor")])
    command = [sys.executable, "-m", "fedcor", "report", "o"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert b"from . .100 to @ .700" in done.stdout
    assert b"?" not in done.stdout
    environment["PYTHONIOENCODING"] = "utf-8"
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert "▁▇█" in done.stdout.decode()


def test_an_error_in_a_worker_is_reported_as_it_is(capsys, small_data):
    options = f"{small_data} --set partition.clients=5000"
    assert fedcor(f"compare digits --selectors random --seeds 1 --out o {options}") == 2
    err = capsys.readouterr().err
    assert "partition.clients = 5000" in err
    assert "Traceback" not in err


OWN_CODE = """
from dataclasses import dataclass
import numpy as np
import torch

@dataclass(frozen=True)
class LongestUnseen:
    clients_per_round: int

    def init(self, population):
        return {"seen": np.full(population.count, -1)}

    def select(self, state, federation):
        order = state["seen"][federation.available].argsort(kind="stable")
        return federation.available[order[: self.clients_per_round]], state

    def observe(self, state, outcome):
        seen = state["seen"].copy()
        seen[outcome.participated] = outcome.round
        return {"seen": seen}

def net(shape, classes, width=5):
    layers = torch.nn.Linear(shape[0], width), torch.nn.Tanh(), torch.nn.Linear(width, classes)
    return torch.nn.Sequential(*layers)
"""


def test_a_users_own_selector_and_model(capsys, monkeypatch, small_data):
    monkeypatch.syspath_prepend(os.getcwd())  # undone afterwards
    Path("module_of_a_user.py").write_text(OWN_CODE)
    options = f"""{small_data} --set 'model={{name="module_of_a_user:net", width=7}}'"""
    selector = "module_of_a_user:LongestUnseen"
    command = f"compare digits --selectors {selector} --seeds 1 --rounds 5 --out o {options}"
    assert fedcor(command) == 0, capsys.readouterr().err
    rounds = read_run(Path("o/module_of_a_user.LongestUnseen/seed-1")).rounds
    chosen = [client for entry in rounds for client in entry["selected"]]
    assert sorted(chosen) == list(range(50))  # everyone once before anyone twice


def test_own_arrays(capsys):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((100, 6)), np.arange(100) % 4
    np.savez("own.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    options = (
        "--set data.name=own.npz --set partition.clients=20 --set training.clients_per_round=4"
    )
    options += " --set \"model={name='logistic'}\""
    assert fedcor(f"run digits --selector random --rounds 2 --out o {options}") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2


def check_demo(out: str, rounds: int) -> None:
    assert "aligned + FedRecall" in out
    for name in ("random", "afl", "power_of_choice", "fedcor", "complement", "aligned"):
        assert name in out
        assert len(read_run(Path("d") / name / "seed-3").rounds) == rounds
    first, *rest = out.splitlines()
    assert first.startswith(f"6 selectors on 3 seeds, {rounds} rounds each")
    assert re.match(r"[\w +]+ (reaches|does not)|No selector |So far", rest[2])
    assert max(map(len, rest)) <= 80
    assert len(rest) < 30


def test_demo_with_fewer_rounds(capsys, monkeypatch):
    def shorter(*given, **more):
        experiment = load_experiment(*given, **more)
        return dataclasses.replace(experiment, rounds=3)

    monkeypatch.setattr("fedcor.simulation.experiment_files.load_experiment", shorter)
    assert fedcor("demo --out d --jobs 2") == 0
    out = capsys.readouterr().out
    check_demo(out, 3)
    assert "The page, for a browser: d/report.html\n" in out
    assert b"</html>" in Path("d/report.html").read_bytes()
    assert fedcor("demo --out d --jobs 2 --plot") == 0
    assert Path("d/curves.png").exists()


@pytest.mark.slow
def test_demo(capsys):
    started = time.monotonic()
    assert fedcor("demo --out d") == 0
    check_demo(capsys.readouterr().out, 100)
    assert time.monotonic() - started < 120  # what the help promises, with a wide margin


def test_data_list(capsys):
    assert fedcor("data list") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("digits", "fmnist", "cifar10", "FEDCOR_DATA"))


def test_data_fetch_from_local_files(capsys, tmp_path, monkeypatch):
    """The files that Fashion-MNIST is published as, written out of the cache."""
    names = {"x_train": "train-images-idx3", "y_train": "train-labels-idx1"}
    names |= {"x_test": "t10k-images-idx3", "y_test": "t10k-labels-idx1"}
    files = tmp_path / "files"
    files.mkdir()
    with np.load(cache_dir() / "fmnist.npz") as arrays:
        for key, name in names.items():
            shape = arrays[key].shape
            header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
            content = gzip.compress(header + arrays[key].tobytes(), compresslevel=1)
            (files / f"{name}-ubyte.gz").write_bytes(content)
    monkeypatch.setenv("FEDCOR_DATA", str(tmp_path / "fresh"))
    assert main(["data", "fetch", "fmnist", "--from", str(files)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "fresh" / "fmnist.npz")


def test_what_the_system_refuses_is_a_sentence(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    command = "run digits --selector random --rounds 12 --out o"
    with monkeypatch.context() as patched:
        patched.setattr("fedcor.runs.resume.save_checkpoint", full)
        assert fedcor(command) == 2
    assert "No space left on device; finished rounds are kept" in capsys.readouterr().err
    assert fedcor(f"{command} --resume") == 0


def test_too_little_memory_is_a_sentence_and_a_bug_is_a_traceback(capsys, monkeypatch):
    for error in (MemoryError(), ZeroDivisionError(), ModuleNotFoundError(name="nonsense")):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr("fedcor.data.datasets.available", fail)
        if isinstance(error, MemoryError):
            assert fedcor("data list") == 2
            assert "not enough memory" in capsys.readouterr().err
        else:
            with pytest.raises(type(error)):
                fedcor("data list")


@pytest.mark.parametrize(
    ("command", "function", "message"),
    [
        (
            "run digits",
            "runs.runner.run",
            "interrupted; add --resume to the same command to continue",
        ),
        ("demo", "runs.runner.run_jobs", "interrupted; run the same command again"),
        ("data list", "data.datasets.available", "interrupted\n"),
    ],
)
def test_an_interrupt_is_code_130_and_says_how_to_continue(
    command, function, message, capsys, monkeypatch
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fedcor.{function}", interrupt)
    assert fedcor(command) == 130
    assert f"fedcor: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", [b"", b"nonsense", "array", "no round", "no model", "wrong model"]
)
def test_a_damaged_checkpoint_is_a_sentence(capsys, damage):
    command = "run digits --selector random --out o --rounds"
    assert fedcor(f"{command} 11") == 0
    path = Path("o/checkpoint/state.npz")
    with np.load(path) as archive:
        arrays = dict(archive)
    Path("o/checkpoint/previous.npz").unlink()
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        if damage == "wrong model":
            arrays["model"] = arrays["model"][:5]
        np.savez(path, **{name: array for name, array in arrays.items() if f"no {name}" != damage})
    assert fedcor(f"{command} 15 --resume") == 2
    err = capsys.readouterr().err
    assert "checkpoint" in err
    assert "delete it" in err


def test_rounds_in_which_nobody_delivered_are_reported(capsys):
    options = "--set training.learning_rate=1e6 --set training.local_steps=60"
    assert fedcor(f"run digits --selector random --rounds 3 --out o {options}") == 0
    assert "rounds nobody delivered a usable update" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        fedcor("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("fedcor 0.")


def test_folders_expand_the_home_and_are_not_empty(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fedcor("run digits --selector random --rounds 1 --out ~/o") == 0
    assert (tmp_path / "o" / "rounds.jsonl").exists()
    with pytest.raises(SystemExit):
        fedcor("run digits --out ''")
    capsys.readouterr()
