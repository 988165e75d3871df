"""The examples of a training loop of one's own: they run, and the page shows them as they are."""

from __future__ import annotations

import difflib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedcor.cli import main
from fedcor.runs.record import read_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "own_loop"
PAGE = (ROOT / "docs" / "how-to" / "own-loop.md").read_text(encoding="utf-8")
CLIENTS = [f"site-{k}" for k in range(20)]
# Folder by folder, servers that are killed before they tell the answer to one of their questions,
# and one that is not.
SERVERS = """
import json, os, signal, sys
import fedcor
from remote_workers import serve

tell = fedcor.Rounds.tell

def run(folder, left):
    def tell_or_die(self, *args, **kwargs):
        nonlocal left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        tell(self, *args, **kwargs)

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    fedcor.Rounds.tell = tell_or_die
    serve(folder, until=3)
    os._exit(0)

for folder, kills in json.loads(sys.argv[1]).items():
    ended = [run(folder, told) for told in (*kills, -1)]
    assert ended == [-signal.SIGKILL] * len(kills) + [0], (folder, ended)
"""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(EXAMPLES), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_PROXY": "*", **more}


def run(*arguments: object, **more: str) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def block(language: str, title: str = "") -> str:
    """The page's block of code with this title."""
    start = f'```{language} title="{title}"\n' if title else f"```{language}\n"
    return PAGE.split(start)[1].split("```")[0]


def hunks() -> list[str]:
    """The difference between both PyTorch loops, without the names of the files."""
    before, after = (
        (EXAMPLES / f"torch_{when}.py").read_text(encoding="utf-8").splitlines(keepends=True)
        for when in ("before", "after")
    )
    return list(difflib.unified_diff(before, after, n=2))[2:]


@pytest.mark.parametrize("name", ["torch_before", "numpy_loop", "remote_workers"])
def test_the_page_shows_the_file(name):
    path = EXAMPLES / f"{name}.py"
    assert block("py", f"examples/own_loop/{name}.py") == path.read_text(encoding="utf-8")


def test_the_page_shows_the_difference_which_is_under_ten_lines():
    assert block("diff") == "".join(hunks())
    changed = [line for line in hunks() if line[0] in "+-"]
    assert len(changed) < 10
    assert len([line for line in changed if line[1:].strip()]) == 8
    assert "Eight lines change" in PAGE


def test_the_loop_in_pytorch_runs_with_and_without(capsys):
    def accuracies(when: str) -> list[float]:
        runpy.run_path(str(EXAMPLES / f"torch_{when}.py"))
        return [float(one) for one in re.findall(r"accuracy (.*)", capsys.readouterr().out)]

    before, after = accuracies("before"), accuracies("after")
    assert len(before) == len(after) == 30
    assert sum(after) > sum(before)
    ends = re.search(r"rounds is \.(\d\d) before and \.(\d\d) after", " ".join(PAGE.split()))
    assert [round(100 * end) for end in (before[-1], after[-1])] == pytest.approx(
        [int(end) for end in ends.groups()], abs=8
    )


def test_the_loop_in_numpy_runs_and_resumes(tmp_path, capsys):
    folder = tmp_path / "numpy"
    assert "after 30 rounds" in run(EXAMPLES / "numpy_loop.py", folder)
    rounds = read_run(folder).rounds
    assert len(rounds) == 30
    assert rounds[0]["probed"] == 40  # a trial: losses before and after
    assert rounds[-1]["test_accuracy"] > 0.7
    assert "after 30 rounds" in run(EXAMPLES / "numpy_loop.py", folder)  # there is nothing to do
    assert len(read_run(folder).rounds) == 30
    for command in (["report", folder], ["explain", folder, "--round", "20"]):
        assert main([str(word) for word in command]) == 0
    assert "site-" in capsys.readouterr().out


@pytest.fixture
def port():
    """A free port, at which two workers ask for work; they are ended after the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = str(probe.getsockname()[1])
    command = [sys.executable, str(EXAMPLES / "remote_workers.py"), "worker"]
    workers = [
        subprocess.Popen([*command, *half], env=environment(PORT=number))
        for half in (CLIENTS[:10], CLIENTS[10:])
    ]
    yield number
    for worker in workers:
        assert worker.poll() is None, "a worker ended"
        worker.kill()
        worker.wait()


def lines(folder: Path) -> list[dict]:
    """The record, without the times."""
    text = (folder / "rounds.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def test_a_server_that_is_killed_between_two_questions_gives_the_same_record(port, tmp_path):
    told_before_kills = [[], [0], [1], [2, 3], [5], [3, 0, 4]]
    plan = {str(tmp_path / str(run)): kills for run, kills in enumerate(told_before_kills)}
    run("-c", SERVERS, json.dumps(plan), PORT=port)
    whole, *others = (lines(Path(folder)) for folder in plan)
    assert len(whole) == 4
    for found in others:
        assert found == whole
