"""What the command line says where an extra of fedcor is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedcor.cli import main, missing_package
from fedcor.core.errors import FedcorError, MissingExtraError

# Hides modules from this process and from those that it starts, as if they were not installed.
HIDE = """
import os
from importlib.machinery import PathFinder
hidden, find = os.environ["HIDDEN"].split(), PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, path=None, target=None:
        None if name.split(".")[0] in hidden else find(name, path, target)
)
"""
# Runs commands one after the other and prints the exit code and the messages of each.
RUN = """
import contextlib, io, json, sys
from fedcor.cli import main
for command in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = main(command.split())
    print(json.dumps([code, err.getvalue()]))
"""
OPTIONAL = "torch sklearn clarabel PIL threadpoolctl matplotlib pandas flwr ray requests joblib"


def run_without(hidden: str, commands: list[str], folder: Path) -> dict[str, tuple[int, str]]:
    """Exit code and messages of each command in one process that lacks `hidden`."""
    (folder / "sitecustomize.py").write_text(HIDE)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HIDDEN": hidden}
    program = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {command: (code, err) for command, (code, err) in zip(commands, lines, strict=True)}


def needs(package: str, extra: str) -> str:
    return f"fedcor: {MissingExtraError(package, extra)}\n"


def test_without_any_extra(tmp_path, capsys):
    command = "run digits --selector random --rounds 1 --out finished"
    assert main(command.split()) == 0
    simulator = ["demo", "run digits", "compare digits"]
    other = [
        "report finished",
        "report finished --json",
        "report finished --latex",
        "explain finished",
        "data list",
    ]
    answers = run_without(OPTIONAL, [*simulator, "run digits --engine flower", *other], tmp_path)
    for command in simulator:
        code, err = answers[command]
        assert code == 2
        assert err.count("\n") == 1
        assert "pip install 'fedcor[sim]' (from a clone: pip install '.[sim]')" in err
    assert answers["run digits --engine flower"] == (2, needs("flwr", "flower-sim"))
    for command in other:
        assert answers[command] == (0, "")


def test_without_some_packages(tmp_path, small_data):
    dirichlet = "--set partition.kind=dirichlet --set partition.clients=20"
    expected = {
        "run digits --selector random --out a": needs("scikit-learn", "sim"),
        f"run digits --selector random --out b {small_data} {dirichlet}": needs("clarabel", "sim"),
        "report finished --plot": needs("matplotlib", "plot"),
    }
    finished = f"run digits --selector random --rounds 1 --out finished {small_data}"
    assert main(finished.split()) == 0
    answers = run_without("sklearn clarabel matplotlib", list(expected), tmp_path)
    assert answers == {command: (2, err) for command, err in expected.items()}


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch.nn", "sim"),
        ("sklearn.datasets", "sim"),
        ("PIL", "sim"),
        ("clarabel", "sim"),
        ("threadpoolctl", "sim"),
        ("matplotlib.figure", "plot"),
        ("flwr", "flower"),
        ("ray", "flower-sim"),
    ],
)
def test_every_optional_package_is_known_with_its_extra(module, extra):
    error = missing_package(module)
    assert isinstance(error, MissingExtraError)
    assert (error.package, error.extra) == (module.partition(".")[0], extra)


def test_packages_that_belong_to_no_extra():
    error = missing_package("rich.console")
    assert isinstance(error, FedcorError)
    assert "pip install rich" in str(error)
    assert missing_package("nonsense") is None
    assert missing_package("") is None
