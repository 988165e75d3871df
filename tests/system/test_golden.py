"""Golden records: what fedcor writes must not change, to the last bit, when its code is moved.

`golden/NAME.jsonl` holds the rounds of each case below, without the header (which names
modules and versions) and without `seconds`. On the machine that wrote them (`machine.json`), every
number must be the same. On another, rounding errors grow: there, the first rounds are compared, a
number with a fraction may differ by a thousandth, and the selectors' reasons are left out; who was
chosen, counts, bytes and words may not differ.

After a change that is meant to change records, write them again, all of them, and look at the
difference before you commit it. Tests that write are skipped: they never pass.

    rm -r tests/system/golden
    FEDCOR_GOLDEN=write python -m pytest tests/system/test_golden.py

Only public entry points are used here, so that this file outlives a move of the modules.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from flower_grid import QUICK, MemoryGrid, numpy_app, run

import fedcor

FOLDER = Path(__file__).parent / "golden"
MACHINE = FOLDER / "machine.json"
WRITING = os.environ.get("FEDCOR_GOLDEN") == "write"
TOLERANCE = 1e-3  # relative, on another machine
COMPARED = 3  # rounds, on another machine
REASONS = {"why", "details"}  # of near-equal numbers, so not compared on another machine
SEED, ROUNDS, STOP = 1, 12, 5

# --- the cases ------------------------------------------------------------------------------------

SELECTORS = [
    *("random", "round_robin", "afl", "power_of_choice", "oort", "fedcor", "complement"),
    *("aligned", "proxy", "full"),
]
OPTIMISERS = [
    *("fedavg", "fedprox", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fednova", "scaffold"),
    *("feddyn", "mifa", "fedvarp", "fedstale", "fedexp", "fedrecall"),
    *("trimmed_mean", "geometric_median", "multi_krum"),
]
LIES = ["flip", "scale", "copy", "inflate", "deflate"]

EARLY = {"warmup": 3, "interval": 3}  # warm-up, choice and trials within twelve rounds
DIGITS = {
    "preset": "digits",
    "rounds": ROUNDS,
    "selectors": {"fedcor": EARLY, "proxy": EARLY},
}
FAULTS = {
    "availability": 0.8,
    "dropout": 0.1,
    "training_dropout": 0.05,
    "silence": 0.1,
    "stragglers": 0.2,
    "deadline": 2.0,
    "devices": {
        "seconds_per_step": 0.2,
        "speed_spread": 0.6,
        "bandwidth_spread": 0.5,
        "tied_to": "labels",
    },
}
SITES = {"site": {"a": "0-14", "b": "15-29", "c": "30-39", "d": "40-49"}}
ELIGIBLE = {"site": ["a", "b", "c"]}
# Byzantine updates are about five times as long as honest ones: some are clipped, some refused.
BYZANTINE = {
    "byzantine": {"fraction": 0.2, "kind": "scale", "factor": 5.0},
    "defence": {"clip_norms": 2.0, "refuse_norms": 6.0, "clip_reports": 3.0, "most_share": 2.0},
}
HARSH = {
    **DIGITS,
    **BYZANTINE,
    "faults": {**FAULTS, "over_selection": 1.3},
    "tags": SITES,
    "rules": {
        "eligible": ELIGIBLE,
        "at_least": {"site": 1},
        "at_most": {"site": {"a": 4}},
        "clients_per_round": {0: 8, 6: 6},
    },
}
FMNIST = {"preset": "fmnist-2spc", "rounds": 4, "local_steps": 5}
SHORT = {"warmup": 2, "interval": 1, "warmup_steps": 20, "refit_steps": 20}
# As CIFAR-10's, which not every machine has: (x, y, x_test, y_test).
_NOISE = np.random.default_rng(7).random((250, 3, 32, 32), dtype=np.float32)
_LABELS = np.arange(250) % 10
_NOISE[np.arange(250), _LABELS % 3, 3 * _LABELS] += 1.0  # a line in one place for each class
PICTURES = (_NOISE[:200], _LABELS[:200], _NOISE[200:], _LABELS[200:])

# Name -> a preset, and what is changed of it.
CASES: dict[str, dict[str, Any]] = {
    **{f"plain-{name}": {**DIGITS, "selector": name} for name in SELECTORS},
    **{f"harsh-{name}": {**HARSH, "selector": name} for name in SELECTORS},
    # It takes everyone, so no rule can ask it for fewer or more.
    "harsh-full": {**HARSH, "selector": "full", "faults": FAULTS, "rules": {"eligible": ELIGIBLE}},
    **{
        f"optimiser-{name}": {**DIGITS, "selector": "random", "optimiser": name}
        for name in OPTIMISERS
    },
    # Where everyone does all local steps, FedNova is FedAvg.
    "optimiser-fednova": {
        **DIGITS,
        "selector": "random",
        "optimiser": "fednova",
        "faults": {"stragglers": 0.4},
    },
    "optimiser-aligned-fedrecall": {**DIGITS, "selector": "aligned", "optimiser": "fedrecall"},
    "optimiser-aligned-fedavg": {**DIGITS, "selector": "aligned", "optimiser": "fedavg"},
    "optimiser-fedcor-fedrecall": {**DIGITS, "selector": "fedcor", "optimiser": "fedrecall"},
    **{
        f"byzantine-{kind}": {
            **DIGITS,
            "selector": "fedcor",
            "byzantine": {"fraction": 0.2, "kind": kind},
        }
        for kind in LIES
    },
    "rolled-back": {
        **DIGITS,
        "selector": "random",
        "byzantine": {"fraction": 0.1, "kind": "scale", "factor": 1e6},
        "defence": {"clip_norms": 0.0, "refuse_norms": 0.0},
    },
    "unmet-rules": {
        **DIGITS,
        "selector": "power_of_choice",
        "faults": {"availability": 0.2},
        "tags": SITES,
        "rules": {"at_least": {"site": {"c": 3}}, "at_most": {"site": 3}},
    },
    "loss-noise": {**DIGITS, "selector": "fedcor", "loss_noise": 0.5, "holdout": 0.2},
    "noisy-labels": {**DIGITS, "selector": "aligned", "noisy_clients": 0.3},
    "probes-of-a-sample": {
        **DIGITS,
        "selector": "fedcor",
        "selectors": {"fedcor": {**EARLY, "probe_clients": 15}},
    },
    "dirichlet": {
        **DIGITS,
        "selector": "complement",
        "partition": {"kind": "dirichlet", "clients": 30, "alpha": 0.3, "minimum_size": 3},
        "model": {"name": "logistic"},
        "milestones": (4, 8),
    },
    "paper-mlp": {**FMNIST, "selector": "fedcor", "selectors": {"fedcor": SHORT}},
    "paper-cnn": {
        "preset": "cifar10-2spc",
        "data": PICTURES,
        "partition": {"clients": 10},
        "rounds": 4,
        "clients_per_round": 2,
        "batch_size": 10,
        "local_steps": 5,
        "learning_rate": 0.1,
        "selector": "fedcor",
        "selectors": {"fedcor": SHORT},
    },
}
# On Flower, with the clients of `flower_grid.py`.
GRID_ROUNDS, GRID_STOP, NODES = 9, 4, 12
GRID_CASES: dict[str, dict[str, Any]] = {
    "grid-fedcor": {"selector": fedcor.FedCor(3, **QUICK)},
    "grid-aligned": {"selector": fedcor.Aligned(3)},
    "grid-default": {"selector": None, "clients_per_round": 3},  # aligned and FedRecall
}
# Records that must be the same: these are the optimisers that the selectors go with.
TWINS = [["optimiser-aligned-fedrecall", "plain-aligned"], ["optimiser-fedavg", "plain-random"]]
# On Flower's simulation, as the command line runs it.
RAY_CASE, RAY_ROUNDS, RAY_STOP = "ray-fedcor", 10, 5
RAY_SETTINGS = [
    "partition.clients=10",
    "training.clients_per_round=3",
    "selectors.fedcor.warmup=3",
    "selectors.fedcor.interval=3",
]

# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_run_repeats_its_golden_record(name, tmp_path):
    fedcor.run(made(name), seed=SEED, out=tmp_path / "run", progress=False)
    hold(name, written(tmp_path / "run"))


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_repeats_the_golden_record_of_a_whole_one(name, tmp_path):
    stop = min(STOP, CASES[name]["rounds"] // 2)
    for rounds in (stop, CASES[name]["rounds"]):
        whole = made(name, rounds=rounds)
        fedcor.run(whole, seed=SEED, out=tmp_path / "run", resume=rounds > stop, progress=False)
    compare(name, written(tmp_path / "run"))


@pytest.mark.parametrize("name", ["plain-fedcor", "plain-aligned", "harsh-fedcor"])
def test_a_killed_run_repeats_the_golden_record_of_a_whole_one(name, tmp_path):
    class KilledError(BaseException):
        """As a signal: nothing catches it."""

    def kill(record):
        if record.round == STOP:
            raise KilledError

    with pytest.raises(KilledError):
        fedcor.run(made(name), seed=SEED, out=tmp_path / "run", on_round=kill, progress=False)
    fedcor.run(made(name), seed=SEED, out=tmp_path / "run", resume=True, progress=False)
    compare(name, written(tmp_path / "run"))


def test_a_comparison_in_memory_repeats_the_golden_records():
    result = fedcor.compare(made("plain-random"), SELECTORS, seeds=[SEED], progress=False)
    assert [one.header["selector"] for one in result.runs] == SELECTORS
    for one in result.runs:
        compare(f"plain-{one.header['selector']}", without_seconds(one.rounds))


@pytest.mark.parametrize("name", ["plain-aligned", "harsh-fedcor"])
def test_rounds_that_are_looked_at_repeat_the_golden_record(name):
    seen = [record for record, _ in fedcor.simulate(made(name), seed=SEED)]
    lines = golden(name)
    assert [record.selected for record in seen] == [line["selected"] for line in lines]
    losses = [{"test_loss": record.test_loss} for record in seen]
    check(name, [{"test_loss": line["test_loss"]} for line in lines], losses)


@pytest.mark.parametrize("name", GRID_CASES)
def test_a_run_on_flower_repeats_its_golden_record(name, tmp_path):
    on_grid(name, tmp_path, GRID_ROUNDS)
    hold(name, written(tmp_path))


@pytest.mark.parametrize("name", GRID_CASES)
def test_a_resumed_run_on_flower_repeats_its_golden_record(name, tmp_path):
    for seed, rounds in enumerate((GRID_STOP, GRID_ROUNDS)):  # a server that starts a second time
        on_grid(name, tmp_path, rounds, seed)
    hold(f"{name}-resumed", written(tmp_path))


@pytest.mark.slow
def test_a_resumed_run_on_flowers_simulation_repeats_its_golden_record(tmp_path, only_ray):
    out = tmp_path / "run"
    changes = [word for change in RAY_SETTINGS for word in ("--set", change)]
    command = [
        *(sys.executable, "-m", "fedcor", "run", "digits", "--engine", "flower"),
        *("--selector", "fedcor", "--seed", str(SEED), "--out", str(out), *changes),
    ]
    for more in (["--rounds", str(RAY_STOP)], ["--rounds", str(RAY_ROUNDS), "--resume"]):
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    hold(RAY_CASE, written(out))


def test_every_public_selector_and_optimiser_has_a_case():
    kinds: dict[str, set[str]] = {"select": set(), "step": set()}
    for name in set(fedcor.__all__) - {"Selector", "Optimiser"}:
        for method, names in kinds.items():
            if callable(getattr(getattr(fedcor, name), method, None)):
                names.add(name.lower())
    assert kinds["select"] == {name.replace("_", "") for name in SELECTORS}
    assert kinds["step"] == {name.replace("_", "") for name in OPTIMISERS}


def test_there_is_a_record_for_every_case_and_only_twins_are_the_same():
    names = {*CASES, *GRID_CASES, *(f"{name}-resumed" for name in GRID_CASES), RAY_CASE}
    files = {path.stem: path.read_text() for path in FOLDER.glob("*.jsonl")}
    assert files.keys() == names
    twins: dict[str, list[str]] = {}
    for name, text in sorted(files.items()):
        twins.setdefault(text, []).append(name)
    assert [same for same in twins.values() if len(same) > 1] == TWINS


# --- how they are compared ------------------------------------------------------------------------


def made(name: str, **changes: Any) -> fedcor.Experiment:
    """The experiment of a case."""
    settings = {**CASES[name], **changes}
    return fedcor.experiment(settings.pop("preset"), **settings)


def on_grid(name: str, folder: Path, rounds: int, seed: int = 0) -> None:
    """Run a case on Flower, in this process."""
    grid = MemoryGrid(numpy_app(), NODES, seed)
    run(grid=grid, rounds=rounds, folder=folder, **GRID_CASES[name])


def written(folder: Path) -> list[Any]:
    """The rounds of a run's record, as the file has them, but for the time that they took."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return without_seconds([json.loads(line) for line in lines[1:]])


def without_seconds(value: Any) -> Any:
    """`value` without any key `seconds`, however deep."""
    if isinstance(value, dict):
        return {key: without_seconds(one) for key, one in value.items() if key != "seconds"}
    return [without_seconds(one) for one in value] if isinstance(value, list) else value


def golden(name: str) -> list[Any]:
    """The golden record of a case."""
    path = FOLDER / f"{name}.jsonl"
    if not path.exists():
        pytest.fail(f"there is no {path}: see the top of {Path(__file__).name}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def hold(name: str, lines: list[Any]) -> None:
    """Compare `lines` with the golden record of a case, or make them the golden record."""
    if not WRITING:
        compare(name, lines)
        return
    FOLDER.mkdir(exist_ok=True)
    if MACHINE.exists() and json.loads(MACHINE.read_text()) != this_machine():
        pytest.fail(f"{FOLDER} is of another machine: delete it, and write all of it again")
    MACHINE.write_text(json.dumps(this_machine(), indent=1) + "\n")
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (FOLDER / f"{name}.jsonl").write_text(text)
    pytest.skip(f"wrote the golden record {name}; nothing was compared")


def compare(name: str, lines: list[Any]) -> None:
    """Fail unless `lines` are the golden record of a case."""
    if WRITING:
        pytest.skip("golden records are written; nothing was compared")
    check(name, golden(name), lines)


def check(name: str, expected: list[Any], lines: list[Any]) -> None:
    """Fail at the first difference: its case, its round, its key and both values."""
    exact = json.loads(MACHINE.read_text()) == this_machine()
    if not exact:
        expected, lines = (
            [_without_reasons(one) for one in part[:COMPARED]] for part in (expected, lines)
        )
    for number, (old, new) in enumerate(zip(expected, lines, strict=False)):
        if found := difference(old, new, exact):
            how = "" if exact else f" (another machine: within {TOLERANCE:g})"
            pytest.fail(f"golden record {name}, round {number}, {found}{how}", pytrace=False)
    if len(lines) != len(expected):
        what = f"{len(lines)} rounds, but should have {len(expected)}"
        pytest.fail(f"golden record {name}: the run has {what}", pytrace=False)


def _without_reasons(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in REASONS}


def difference(old: Any, new: Any, exact: bool, key: str = "") -> str:
    """The first key where two values differ, and how; empty if they do not."""
    if type(old) is not type(new):
        return f"{key}: was {old!r}, is {new!r}"
    if isinstance(old, dict):
        if list(old) != list(new):
            return f"{key or 'keys'}: were {', '.join(old)}; are {', '.join(new)}"
        parts = [(old[one], new[one], f"{key}.{one}" if key else one) for one in old]
    elif isinstance(old, list):
        if len(old) != len(new):
            return f"{key}: was {old}, is {new}"
        parts = [(a, b, f"{key}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True))]
    else:
        close = isinstance(old, float) and not exact and math.isclose(old, new, rel_tol=TOLERANCE)
        return "" if old == new or close else f"{key}: was {old!r}, is {new!r}"
    return next((said for a, b, at in parts if (said := difference(a, b, exact, at))), "")


def this_machine() -> dict[str, str]:
    """What the last bits of a record depend on."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "cpu family", "model", "stepping")
    found = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    return " ".join(found.get(key, "") for key in keys)


def test_a_difference_is_named():
    old = {"round": 3, "why": {"gain": [1.0, 2.0]}}
    close = {"round": 3, "why": {"gain": [1.0, 2.0000001]}}
    assert difference(old, old, exact=True) == ""
    assert difference(old, close, exact=True) == "why.gain[1]: was 2.0, is 2.0000001"
    assert difference(old, close, exact=False) == ""
    assert difference(old, {**old, "round": 4}, exact=False) == "round: was 3, is 4"
    assert difference({"a": 1}, {"a": 1.0}, exact=False) == "a: was 1, is 1.0"
    assert difference({"a": 1}, {"b": 1}, exact=False) == "keys: were a; are b"
