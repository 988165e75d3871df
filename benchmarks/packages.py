"""FedLab and Flower, each in an environment of its own under .venv-bench/, never a dependency.

An environment is made when it is first needed, which is not part of any time. It finds the
packages of the environment that runs this, so both use the same torch. Each package then runs the
same rounds in a process of its own (`fedlab_rounds.py`, `flower_rounds.py`), and its results are
held against ours before a time is returned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import DifferentResultsError, check
from benchmarks.replay import Round

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-bench"
# FedLab names torchvision, which it needs for image data sets of its own alone. What one finds may
# be for another build of torch, so it is not installed.
FEDLAB = ("--no-deps", "fedlab==1.3.0", "munch", "nvidia-ml-py")
FLOWER = ("flwr[simulation]",)


class MissingPackageError(Exception):
    """A package cannot be installed or run here."""


def run_fedlab(
    preset: str, seed: int, selector: str, rounds: Sequence[Round]
) -> tuple[list[float], str]:
    """Seconds of each of our `rounds` in FedLab, and its version. Test losses are checked."""
    del selector  # FedLab is told whom to choose, so its time has no selection in it
    python = _environment("fedlab", FEDLAB)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "model.npy", rounds[0].model.numpy())
        plan = [
            {
                "number": r.number,
                "chosen": sorted(r.chosen),
                "evaluations": r.evaluations,
                "learning_rate": r.learning_rate,
            }
            for r in rounds
        ]
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        found = _run(python, "benchmarks.fedlab_rounds", [preset, str(seed), name])
    check("FedLab", [r.test_loss for r in rounds], found["test_losses"], 1e-3)
    return found["seconds"], f"FedLab {found['version']}"


def run_flower(
    preset: str, seed: int, selector: str, rounds: Sequence[Round], clients: str = "plain"
) -> tuple[list[float], str]:
    """Seconds of each of our `rounds` in Flower's simulation, and its version.

    Who was chosen, what was asked and the test losses are checked.
    """
    python = _environment("flower", FLOWER)
    with tempfile.TemporaryDirectory() as name:
        arguments = [preset, str(seed), selector, str(len(rounds)), name, clients]
        found = _run(python, "benchmarks.flower_rounds", arguments)
    for r, chosen, came, probed, loss in zip(
        rounds,
        *(found[key] for key in ("chosen", "participated", "probed", "test_losses")),
        strict=True,
    ):
        where = f"Flower, round {r.number}"
        check(f"{where}, clients", sorted(r.chosen), sorted(chosen), 0)
        if len(came) < len(chosen):
            raise DifferentResultsError(f"{where}: {len(came)} of {len(chosen)} clients came back")
        check(f"{where}, questions", 100 * r.evaluations, probed, 0)
        check(f"{where}, test loss", r.test_loss, loss, 1e-3)
    return found["seconds"], f"Flower {found['version']}"


def run_flower_with_engine(
    preset: str, seed: int, selector: str, rounds: Sequence[Round]
) -> tuple[list[float], str]:
    """The same, with our engine in the clients: the difference is Flower's simulation alone."""
    return run_flower(preset, seed, selector, rounds, "engine")


def _environment(name: str, requirements: Sequence[str]) -> Path:
    """The Python of the environment, which is made if it is not there."""
    folder = ENVIRONMENTS / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists() and ready.read_text(encoding="utf-8") == _stamp(requirements):
        return python
    print(f"installing {name} into {folder.relative_to(ROOT)}", file=sys.stderr)
    venv.create(folder, clear=True, with_pip=True)
    packages = sorted(folder.glob("lib/python3*/site-packages"))[0]
    here = sysconfig.get_path("purelib")
    line = f"import site; site.addsitedir({here!r})\n"  # found last
    (packages / "main.pth").write_text(line, encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint"]
    done = subprocess.run(
        [*install, str(ROOT / "constraints.txt"), *requirements],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MissingPackageError(f"it cannot be installed here ({last})")
    ready.write_text(_stamp(requirements), encoding="utf-8")
    return python


def _stamp(requirements: Sequence[str]) -> str:
    return " ".join((*requirements, sysconfig.get_path("purelib"))) + "\n"


def _run(python: Path, module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What a module prints as JSON in its last line."""
    environment = {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # The processes of a simulation import modules from here.
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(
        [str(python), "-W", "ignore", "-m", module, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MissingPackageError(f"it failed here ({last})")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
