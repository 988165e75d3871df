"""The command line as a person or a script meets it."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedcor.cli import main
from fedcor.record import count_rounds, read_run

FAST = [
    "--rounds",
    "6",
    "--set",
    "selectors.fedcor.warmup=2",
    "--set",
    "selectors.fedcor.warmup_steps=5",
]


def fedcor(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "fedcor", *arguments], capture_output=True, text=True, **options
    )


def test_run_prints_one_json_line_and_nothing_else(capfd, tmp_path):
    assert (
        main(
            [
                "run",
                "digits",
                "--selector",
                "fedcor",
                "--seed",
                "3",
                "--out",
                str(tmp_path / "r"),
                *FAST,
            ]
        )
        == 0
    )
    out, err = capfd.readouterr()
    line = json.loads(out)
    assert (line["selector"], line["seed"], line["rounds"]) == ("fedcor", 3, 6)
    assert err == ""
    entry = read_run(tmp_path / "r").rounds[0]
    wanted = "round selected participated test_accuracy test_loss learning_rate probed bytes_down bytes_up seconds"
    assert set(wanted.split()) <= set(entry)
    header = read_run(tmp_path / "r").header
    assert header["config"]["training"]["rounds"] == 6
    assert header["versions"]["fedcor"]


def test_the_default_folder_is_where_report_looks(capsys):
    assert main(["run", "digits", "--selector", "random", *FAST]) == 0
    assert main(["report", "runs/digits"]) == 0
    assert "random" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "digist"], 'did you mean "digits"'),
        (["run", "nowhere.toml"], "cannot be read"),
        (["run", "digits", "--selector", "fedcorr"], 'did you mean "fedcor"'),
        (["run", "digits", "--set", "training.roundz=3"], 'did you mean "rounds"'),
        (["run", "digits", "--set", "selectors.fedcor.beta=1.5"], "strictly between 0 and 1"),
        (["run", "digits", "--rounds", "0"], "at least 1"),
        (["compare", "digits", "--selectors", "random,afll"], 'did you mean "afl"'),
        (["report", "nowhere"], "there is no folder"),
        (["report", "."], "no run in"),
        (["data", "fetch", "fmnits"], "fmnist"),
        (["data", "fetch", "fmnist", "--from", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_code_2_and_a_sentence(arguments, told, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert "Traceback" not in err
    assert out == ""
    assert not os.listdir(".")  # nothing was begun


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["run"], ["run", "digits", "--seed", "-1"], ["compare", "digits", "--seeds", "3-1"],
     ["compare", "digits", "--seeds", "1,1"], ["compare", "digits", "--selectors", "random,,afl"],
     ["compare", "digits", "--seeds", "a"], ["compare", "digits", "--seeds", "0-2000000000"], ["report", "x", "--json", "--csv"]],
)  # fmt: skip
def test_a_wrong_command_line_is_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: fedcor" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["run"], ["compare"]])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert "examples:\n  fedcor " in capsys.readouterr().out


def test_compare_report_and_resume(tmp_path):
    command = [
        "compare",
        "digits",
        "--selectors",
        "random,fedcor",
        "--seeds",
        "1,2",
        "--jobs",
        "2",
        "--out",
        "c",
        *FAST,
    ]
    done = fedcor(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(line["run"] for line in lines) == sorted(
        f"c/{s}/seed-{n}" for s in ("random", "fedcor") for n in (1, 2)
    )
    again = fedcor(*command, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run: add --resume" in again.stderr
    assert "Traceback" not in again.stderr
    assert fedcor(*command, "--resume", cwd=tmp_path).returncode == 0

    table = fedcor("report", "c", cwd=tmp_path)
    assert "fedcor" in table.stdout
    assert "mean accuracy" in " ".join(table.stdout.split())
    summary = json.loads(fedcor("report", "c", "--json", cwd=tmp_path).stdout)
    assert summary
    rows = list(csv.DictReader(io.StringIO(fedcor("report", "c", "--csv", cwd=tmp_path).stdout)))
    means = {
        row["selector"]: float(row["mean"]) for row in rows if row["metric"] == "mean_accuracy"
    }
    for name, mean in means.items():
        runs = [read_run(tmp_path / "c" / name / f"seed-{n}").rounds for n in (1, 2)]
        assert mean == pytest.approx(
            np.mean([[entry["test_accuracy"] for entry in rounds] for rounds in runs])
        )
    unknown = fedcor("report", "c", "--baseline", "rando", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "random" in unknown.stderr


def test_an_error_in_a_worker_is_told_as_it_is(tmp_path):
    done = fedcor(
        "compare",
        "digits",
        "--set",
        "partition.clients=5000",
        "--jobs",
        "2",
        "--out",
        "o",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "partition.clients = 5000" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_users_own_selector_and_model(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fedcor.selectors.base import Memoryless\n"
        "@dataclass(frozen=True)\n"
        "class LongestUnseen:\n"
        "    clients_per_round: int\n"
        "    def init(self, population):\n"
        "        import numpy as np\n"
        "        return {'seen': np.full(population.count, -1)}\n"
        "    def select(self, state, federation):\n"
        "        seen = state['seen'][federation.available]\n"
        "        return federation.available[seen.argsort(kind='stable')[: self.clients_per_round]], state\n"
        "    def observe(self, state, outcome):\n"
        "        seen = state['seen'].copy()\n"
        "        seen[outcome.participated] = outcome.round\n"
        "        return {'seen': seen}\n"
        "def net(shape, classes, width=5):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(shape[0], width), torch.nn.Tanh(), torch.nn.Linear(width, classes))\n"
    )
    done = fedcor(
        "compare", "digits", "--selectors", "mine:LongestUnseen", "--seeds", "1", "--rounds", "6", "--out", "o",
        "--set", 'model={name="mine:net", width=7}', cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    chosen = [
        k
        for entry in read_run(tmp_path / "o" / "mine.LongestUnseen" / "seed-1").rounds
        for k in entry["selected"]
    ]
    assert sorted(chosen[:50]) == list(range(50))  # everyone once before anyone twice


def test_own_arrays(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("own.npz", x_train=rng.standard_normal((80, 6)), y_train=np.arange(80) % 4,
             x_test=rng.standard_normal((20, 6)), y_test=np.arange(20) % 4)  # fmt: skip
    settings = [
        "data.name=own.npz",
        "partition.clients=20",
        "training.clients_per_round=4",
        "model={name='logistic'}",
    ]
    changes = [word for setting in settings for word in ("--set", setting)]
    assert (
        main(["run", "digits", "--selector", "random", "--rounds", "2", "--out", "o", *changes])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["rounds"] == 2


def test_demo(tmp_path):
    started = time.monotonic()
    done = fedcor("demo", "--out", "d", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("random", "afl", "power_of_choice", "fedcor"):
        assert name in done.stdout
        assert len(read_run(tmp_path / "d" / name / "seed-3").rounds) == 100
    assert "paired difference to random" in done.stdout
    assert (
        time.monotonic() - started < 120
    )  # the demo's promise to a person, with a wide margin; not a speed test


def test_data_list(capsys):
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("digits", "fmnist", "cifar10", "FEDCOR_DATA"))


def test_data_fetch_of_the_data_that_is_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCOR_DATA", str(tmp_path))
    assert main(["data", "fetch", "fmnist", "--from", "/usr/share/datasets/fashion-mnist"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "fmnist.npz")


def on_a_terminal(tmp_path, *arguments):
    """What a person sees in a real pseudo-terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "fedcor", *arguments]
    process = subprocess.Popen(
        command, stdout=follower, stderr=follower, cwd=tmp_path, env={**os.environ, "TERM": "xterm"}
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0
    os.close(leader)
    return shown.decode()


def test_on_a_terminal_a_run_shows_rate_and_time_left(tmp_path):
    text = on_a_terminal(
        tmp_path, "run", "digits", "--selector", "random", "--rounds", "400", "--out", "o"
    )
    assert "400/400" in text
    assert "rounds/s" in text
    assert "0:00:0" in text  # time left
    assert "accuracy 0." in text


def test_on_a_terminal_a_comparison_ends_with_its_table(tmp_path):
    text = on_a_terminal(
        tmp_path, "compare", "digits", "--selectors", "random", "--seeds", "1", *FAST
    )
    assert "1/1 runs" in text
    assert "One seed alone has no interval" in " ".join(text.split())


def test_what_the_system_refuses_is_a_sentence(tmp_path, capsys, monkeypatch):
    def full(path, arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedcor.run_folder.save_arrays", full)
    assert (
        main(
            [
                "run",
                "digits",
                "--selector",
                "random",
                "--rounds",
                "12",
                "--out",
                str(tmp_path / "o"),
            ]
        )
        == 2
    )
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    assert (
        main(
            [
                "run",
                "digits",
                "--selector",
                "random",
                "--rounds",
                "12",
                "--out",
                str(tmp_path / "o"),
                "--resume",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    "damage", [b"", b"nonsense", "array", "no round", "no model", "wrong model"]
)
def test_a_damaged_checkpoint_is_a_sentence(tmp_path, capsys, damage):
    arguments = ["run", "digits", "--selector", "random", "--out", str(tmp_path / "o"), "--rounds"]
    assert main([*arguments, "11"]) == 0
    path = tmp_path / "o" / "checkpoint" / "state.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        if damage == "wrong model":
            arrays["model"] = arrays["model"][:5]
        np.savez(path, **{name: array for name, array in arrays.items() if f"no {name}" != damage})
    assert main([*arguments, "15", "--resume"]) == 2
    err = capsys.readouterr().err
    assert "checkpoint" in err
    assert "delete it" in err


def test_rounds_in_which_nobody_delivered_are_told(tmp_path, capsys):
    arguments = [
        "run",
        "digits",
        "--selector",
        "random",
        "--rounds",
        "3",
        "--set",
        "training.learning_rate=1e6",
    ]
    assert main([*arguments, "--set", "training.local_steps=60", "--out", str(tmp_path / "o")]) == 0
    assert "rounds nobody delivered a usable update" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("fedcor 0.")


def test_folders_expand_the_home_and_are_not_empty(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["run", "digits", "--selector", "random", "--rounds", "1", "--out", "~/o"]) == 0
    assert (tmp_path / "o" / "rounds.jsonl").exists()
    with pytest.raises(SystemExit):
        main(["run", "digits", "--out", ""])
    capsys.readouterr()


def test_interrupt_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "fedcor", "run", "digits", "--rounds", "5000", "--out", "o"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    record = tmp_path / "o" / "rounds.jsonl"
    while not (record.exists() and record.read_bytes().count(b"\n") > 3):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in err
    assert "Traceback" not in err


def wait_for_rounds(folder, count, process):
    while sum(count_rounds(path.parent) for path in folder.rglob("rounds.jsonl")) < count:
        time.sleep(0.02)
        assert process.poll() is None


@pytest.fixture
def background(tmp_path):
    """Starts a long comparison; whatever a test does, nothing of it is left running."""
    started = []
    yield lambda *more: started.append(compare_in_the_background(tmp_path, *more)) or started[-1]
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def compare_in_the_background(tmp_path, *more):
    command = [
        "compare",
        "digits",
        "--selectors",
        "random,full",
        "--seeds",
        "1",
        "--jobs",
        "2",
        "--rounds",
        "4000",
        "--out",
        "o",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcor", *command, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    wait_for_rounds(tmp_path / "o", 20, process)
    return process


def workers_of(process):
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)],
        capture_output=True,
        text=True,
    ).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "LokyProcess" in line]


def assert_ended(pids):
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
        assert time.monotonic() < deadline, "workers are left over"


def test_interrupting_a_comparison_ends_its_workers_quietly(background):
    process = background()
    workers = workers_of(process)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in err
    assert "Traceback" not in err
    assert_ended(workers)


def test_a_killed_worker_is_reported_and_a_killed_parent_takes_its_workers_along(background):
    process = background()
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "a worker process died" in err
    assert "Traceback" not in err

    process = background("--resume")
    while len(workers_of(process)) < 2:
        time.sleep(0.05)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    assert_ended(workers)  # so that the locks are free and --resume can go on at once


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m fedcor data list | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode in (0, 141), (
        done.stderr
    )  # whether it had written all before the reader left is a race
    assert "Traceback" not in done.stderr
