"""`python -m studies`: every experiment in miniature, from command to files; resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from studies.analysis.embedding import project
from studies.beyond.table import _share_text
from studies.byzantine import means as byzantine_means
from studies.byzantine import runs as byzantine_runs
from studies.byzantine import table as byzantine_table
from studies.byzantine.runs import ATTACKS
from studies.comparison import mean_std
from studies.curves import BETAS, _fedcor_variant
from studies.figures import curves, differences
from studies.measured_figures import histograms
from studies.memory import ablation as memory_ablation
from studies.memory import runs as memory_runs
from studies.paper import TABLE_1
from studies.plan import _DIGITS, Plan
from studies.timed import table as timed_table

from fedcor.cli import main
from fedcor.core.errors import ConfigError, MissingExtraError
from fedcor.reporting.estimates import Estimate, ratio_estimate
from fedcor.runs.record import differences as setting_differences
from fedcor.runs.record import read_run
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment
from studies import EXPERIMENTS, GROUPS, NAMES, load_function, reproduce

FIGURES = {
    "table1": [],
    "convergence": ["convergence-digits"],
    "toy": ["toy"],
    "normality": ["normality-digits"],
    "stationarity": ["stationarity-digits"],
    "interval": ["interval-digits"],
    "annealing": ["annealing-digits", "annealing-frequencies-digits"],
    "embedding": ["embedding-digits"],
    "beyond-table": ["beyond-digits"],
    "beyond-ablation": ["beyond-ablation-digits"],
    "beyond-limits": ["beyond-limits-digits"],
    "beyond-fairness": ["beyond-fairness-digits"],
    "beyond-confirmation": ["beyond-confirmation-digits"],
    "probing": ["probing-digits"],
    "memory": ["memory-digits"],
    "memory-ablation": [],
    "memory-stress": [],
    "memory-anatomy": [],
    "byzantine": [],
    "byzantine-means": [],
    "time": ["time-digits"],
}


# The miniature: the paper's experiments in two settings, the others in the third.
SMALL = ["--quick", "--rounds", "12", "--selections", "40"]
PAPER, BEYOND = ("1spc", "dir"), ("2spc",)


@pytest.fixture(autouse=True, scope="module")
def _fewer_steps():
    """Of FedCor's process; and one scenario for the comparison of optimisers, which has its own
    tests."""
    fewer = ["selectors.fedcor.warmup_steps=40", "selectors.fedcor.refit_steps=40"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_runs, "DIGITS", memory_runs.DIGITS[:1])
        patch.setattr(memory_runs, "TABLES", [])
        patch.setattr(memory_ablation, "DIGITS", memory_ablation.DIGITS[:1])
        patch.setattr(memory_ablation, "TABLES", memory_ablation.TABLES[:1])
        patch.setattr(memory_ablation, "PARTS", memory_ablation.PARTS[:3])
        patch.setattr(memory_ablation, "STRESSED", memory_ablation.STRESSED[:2])
        for module in (byzantine_runs, byzantine_table):
            patch.setattr(module, "SELECTORS", ("random", "fedcor"))
            patch.setattr(module, "ATTACKS", {key: ATTACKS[key] for key in ("nobody", "flip")})
        patch.setattr(byzantine_runs.table_cells, "__defaults__", (("nobody", "flip"),))
        patch.setattr(byzantine_means, "UPDATES", ("nobody", "flip"))
        patch.setattr(timed_table, "VARIANTS", timed_table.VARIANTS[:2])
        for setting, changes in _DIGITS.items():
            patch.setitem(_DIGITS, setting, [*changes, *fewer])
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every experiment once, from command to files."""
    out, errors = tmp_path_factory.mktemp("reproduce"), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        for group, settings in (("paper", PAPER), ("beyond", BEYOND)):
            arguments = ["--settings", ",".join(settings), "--out", str(out)]
            assert main(["reproduce", group, *SMALL, *arguments]) == 0, errors.getvalue()
    assert errors.getvalue() == ""
    return out


def numbers(folder: Path, what: str) -> dict:
    return json.loads((folder / f"{what}.json").read_text())


def test_every_experiment_is_offered(capsys):
    assert [*EXPERIMENTS, "paper", "beyond", "all"] == list(NAMES)
    assert list(FIGURES) == list(EXPERIMENTS)
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in NAMES)


def test_names_and_plan_need_neither_torch_nor_matplotlib():
    program = """
import sys
import studies, studies.relatives
studies.Plan(None, None)
print({"torch", "matplotlib", "sklearn"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize(
    ("package", "shown", "extra", "independent"),
    [
        ("torch", "PyTorch", "sim", {"toy"}),
        (
            "matplotlib",
            "matplotlib",
            "plot",
            {
                *("table1", "memory-ablation", "memory-stress", "memory-anatomy"),
                *("byzantine", "byzantine-means"),
            },
        ),
        (
            "sklearn",
            "scikit-learn",
            "sim",
            set(EXPERIMENTS) - {"embedding", *(n for n in EXPERIMENTS if n.startswith("memory"))},
        ),
    ],
)
def test_a_missing_package_is_named_before_anything_runs(
    package, shown, extra, independent, monkeypatch
):
    imported = []
    monkeypatch.setattr("studies.import_module", lambda name: hidden(name))

    def hidden(name):
        if name == package:
            raise ImportError(name)
        imported.append(name)
        return importlib.import_module(name)

    for name in EXPERIMENTS:
        if name in independent:
            assert callable(load_function(name))
            continue
        imported.clear()
        with pytest.raises(MissingExtraError) as caught:
            load_function(name)
        assert (caught.value.package, caught.value.extra) == (shown, extra)
        assert not any(module.startswith("fedcor") for module in imported)


def test_the_toy_needs_no_torch_and_the_rest_says_what_to_install(tmp_path):
    """In an interpreter that has no PyTorch."""
    program = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
from fedcor.cli import main
from studies import load_function
assert callable(load_function("toy"))
sys.exit(main(["reproduce", "all", "--quick"]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "needs PyTorch, which is not installed: pip install 'fedcor[sim]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_without_scikit_learn_the_map_of_clients_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(MissingExtraError, match=r"scikit-learn.*fedcor\[sim\]"):
        project(np.eye(5), seed=1)


def test_an_unknown_experiment_gets_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match='did you mean "table1"'):
        reproduce("table", Plan(tmp_path, None))


@pytest.mark.parametrize("name", [name for names in FIGURES.values() for name in names])
def test_figures_exist_and_are_not_empty(folder, name):
    png = (folder / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 400
    assert height > 300
    drawn = ET.parse(folder / f"{name}.svg").getroot()
    assert len(list(drawn.iter())) > 100


def test_table1_has_every_number(folder):
    table = numbers(folder, "table1-digits")
    assert list(table["settings"]) == list(PAPER)
    for setting in PAPER:
        for name in ("random", "afl", "power_of_choice", "fedcor"):
            entry = table["settings"][setting]["selectors"][name]
            assert entry["rounds_done"] == [12, 12]
            assert entry["estimates"]["mean_accuracy"]["n"] == 2
            if name != "random":
                assert entry["paired"]["random"]["mean_accuracy"]["low"] is not None
    page = (folder / "table1-digits.md").read_text()
    assert page.count("| FedCor |") == len(PAPER)


def test_the_numbers_behind_the_figures(folder):
    curves = numbers(folder, "convergence-digits")["curves"]["1spc"]["fedcor"]
    assert len(curves["round"]) == len(curves["mean"]) == 3  # 12 rounds, ten-round means
    similarity = numbers(folder, "stationarity-digits")
    assert all(0 <= s <= 1 for of in similarity["series"].values() for s in of["similarity"])
    assert similarity["minimum"]["dir"] == min(similarity["series"]["dir"]["similarity"])
    component = numbers(folder, "normality-digits")["components"]["1spc"][0]
    assert len(component["scores"]) == 40
    assert np.std(component["scores"]) == pytest.approx(1, abs=0.01)
    for result in numbers(folder, "embedding-digits")["results"]:
        assert result["purity"] > 2 * result["chance"]
    chosen = numbers(folder, "annealing-frequencies-digits")["times_chosen"]["1spc"]
    assert all(sum(counts) == pytest.approx(12 * 10, abs=1) for counts in chosen.values())
    assert set(chosen) == {"β = 0.5", "β = 0.75", "β = 0.95", "random"}
    intervals = numbers(folder, "interval-digits")["curves"]["1spc"]
    assert set(intervals) == {"Δt = 5", "Δt = 10", "Δt = 500", "random"}


def test_the_gap_to_everyone(folder):
    def mean_accuracy(selector, seed):
        run = read_run(folder / "runs" / "digits-2spc" / selector / f"seed-{seed}")
        return np.mean([entry["test_accuracy"] for entry in run.rounds[:12]])

    gained = [mean_accuracy("complement", seed) - mean_accuracy("random", seed) for seed in (1, 2)]
    possible = [mean_accuracy("full", seed) - mean_accuracy("random", seed) for seed in (1, 2)]
    saved = numbers(folder, "beyond-digits")["gap_closed"]["2spc"]
    assert saved["complement"] == pytest.approx(
        dataclasses.asdict(ratio_estimate(gained, possible))
    )
    assert set(saved) == {"afl", "power_of_choice", "fedcor", "complement"}
    page = (folder / "beyond-digits.md").read_text()
    assert page.count("| complement |") == len(BEYOND)
    ahead = [mean_accuracy("complement", seed) - mean_accuracy("fedcor", seed) for seed in (1, 2)]
    paired = numbers(folder, "beyond-digits")["mean_accuracy_paired_to_fedcor"]["2spc"]
    assert paired["complement"]["mean"] == pytest.approx(np.mean(ahead))
    assert page.count("| everyone trains |") == len(BEYOND)
    seeds = numbers(folder, "beyond-digits")["summary"]["2spc"]["fedcor"]["seeds"]
    assert {seed: values["mean_accuracy"] for seed, values in seeds.items()} == pytest.approx(
        {str(seed): mean_accuracy("fedcor", seed) for seed in (1, 2)}
    )


def test_an_ablation_changes_one_thing_and_a_limit_one_scenario(folder):
    def settings(scenario, variant):
        header = read_run(folder / "runs" / f"digits-{scenario}" / variant / "seed-1").header
        return header["config"]

    as_is, greedy = settings("2spc", "complement"), settings("2spc", "complement-swaps-0")
    for variant, change in {
        "": "swaps",
        "-swaps-0-start-oldest": "start",
        "-swaps-0-sketch-16": "sketch",
    }.items():
        changed = setting_differences(
            greedy["selectors"], settings("2spc", f"complement{variant}")["selectors"]
        )
        assert list(changed) == [f"complement.{change}"]
    for scenario, changes in {
        "iid": ["partition.kind"],
        "unequal": ["partition.size_skew"],
        "noise": ["data.noisy_clients"],
        "dropouts": ["faults.availability", "faults.dropout"],
    }.items():
        changed = setting_differences(as_is, settings(scenario, "complement"))
        assert [key for key in changed if key != "name"] == changes
    assert list(numbers(folder, "beyond-limits-digits")["summary"]) == [
        "iid",
        "unequal",
        "weighted",
        "noise",
        "dropouts",
        "many",
    ]


def test_picks_of_noisy_clients_are_counted(folder):
    hits = 0
    for seed in (1, 2):
        run = read_run(folder / "runs" / "digits-noise" / "random" / f"seed-{seed}")
        dirty, clean = (
            build_simulation(
                load_experiment("digits", ["partition.shards_per_client=2", change]), seed
            ).engine
            for change in ("data.noisy_clients=0.3333", "data.noisy_clients=0")
        )
        pairs = zip(dirty.measured_rows(10**6), clean.measured_rows(10**6), strict=True)
        noisy = [k for k, (one, other) in enumerate(pairs) if not torch.equal(one[2], other[2])]
        hits += sum(client in noisy for entry in run.rounds for client in entry["selected"])
    saved = numbers(folder, "beyond-limits-digits")["picks_of_noisy_clients"]["random"]
    assert saved == pytest.approx(hits / (2 * 12 * 5))


def test_fairness_is_that_of_the_last_model(folder):
    saved = numbers(folder, "beyond-fairness-digits")["settings"]["2spc"]["complement"]
    experiment = load_experiment(
        "digits", ["partition.shards_per_client=2", "training.clients_per_round=5"]
    )
    worst = []
    for seed in (1, 2):
        engine = build_simulation(experiment, seed).engine
        state = folder / f"runs/digits-2spc/complement/seed-{seed}/checkpoint/state.npz"
        with np.load(state) as arrays:
            assert arrays["round"] == 12
            model = torch.from_numpy(arrays["model"])
        worst.append(np.mean(sorted(engine.accuracies(model, np.arange(50)))[:5]))
    assert saved["worst_tenth"]["mean"] == pytest.approx(np.mean(worst))
    assert sum(saved["times_chosen"]) == pytest.approx(12 * 5, abs=0.5)
    assert numbers(folder, "beyond-confirmation-digits")["plan"]["seeds"] == [6, 7]


def test_fairness_refuses_models_of_other_ages(folder, capsys):
    """The runs there have 12 rounds: their records can be cut to 10, their last model cannot."""
    arguments = ["--quick", "--rounds", "10", "--settings", "2spc", "--out", str(folder)]
    assert main(["reproduce", "beyond-fairness", *arguments]) == 2
    assert "that of 12 rounds, but 10 are to be compared" in capsys.readouterr().err


def test_fresh_seeds_are_fresh(tmp_path, capsys):
    assert main(["reproduce", "beyond-confirmation", "--seeds", "1-8", "--out", str(tmp_path)]) == 2
    assert "seeds 6, 7, 8 are kept for the confirmation" in capsys.readouterr().err


def contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*.*") if path.is_file() and path.name != "run.lock")
    return {path: path.read_bytes() for path in files if path.suffix != ".svg"}


@pytest.mark.parametrize(
    ("what", "settings"),
    [("table1", PAPER), ("stationarity", PAPER), ("beyond-fairness", BEYOND)],
)
def test_running_it_again_changes_nothing(folder, what, settings):
    before = contents(folder)
    arguments = ["--settings", ",".join(settings), "--out", str(folder)]
    assert main(["reproduce", what, *SMALL, *arguments]) == 0
    assert contents(folder) == before


@pytest.mark.slow
def test_the_paper_in_processes_and_again(tmp_path):
    """As a newcomer runs it."""
    command = [sys.executable, "-m", "fedcor", "reproduce", "paper", *SMALL, "--jobs", "2"]
    written = []
    for _ in range(2):
        done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        written.append(contents(tmp_path))
    assert written[0] == written[1]
    for name in [name for what in GROUPS["paper"] for name in FIGURES[what]]:
        assert (tmp_path / f"{name}.png").exists()
    table = numbers(tmp_path, "table1-digits")
    assert list(table["settings"]) == ["2spc", "1spc", "dir"]


def test_a_lost_measurement_is_measured_again_the_same(folder):
    first, lost = sorted(folder.glob("measured/stationarity-*/digits-1spc-seed-1/round-*.npz"))
    with np.load(lost) as archive:
        before = archive["changes"]
    lost.unlink()
    untouched = first.stat().st_mtime_ns
    arguments = ["--settings", ",".join(PAPER), "--out", str(folder)]
    assert main(["reproduce", "stationarity", *SMALL, *arguments]) == 0
    with np.load(lost) as archive:
        assert np.array_equal(archive["changes"], before)
    assert first.stat().st_mtime_ns == untouched


def test_cells_with_and_without_an_interval():
    assert _share_text(Estimate(0.924, None, 0.88, 0.98, 5, 5)) == "92% [88%, 98%]"
    assert _share_text(Estimate(-0.001, None, None, None, 1, 1)) == "0%"
    assert _share_text(Estimate(None, None, None, None, 0, 5)) == "N/A"
    assert mean_std(Estimate(94.8, 18.44, 70.0, 120.0, 5, 5)) == "94.8 ± 18.4"
    assert mean_std(Estimate(94.8, None, None, None, 1, 1)) == "94.8"
    assert mean_std(Estimate(None, None, None, None, 3, 5)) == "N/A (3/5)"


def test_figures_of_little():
    """Components that are missing, one seed without an interval, no target."""
    component = {"scores": [0.0, 1.0], "share": 0.5, "skewness": 0.0, "excess_kurtosis": 0.0}
    grid = histograms({"2spc": [component] * 2, "dir": [component]}, "").axes
    assert [ax.get_visible() for ax in grid] == [True, True, True, False]
    row = {"mean": 0.1, "low": None, "high": None}
    (ax,) = differences({"iid": {"fedcor": row}}, "", "").axes
    assert [line.get_marker() for line in ax.lines] == ["None", "o"]  # the zero line and the mean
    curve = {"round": [1], "mean": [0.5], "low": [0.5], "high": [0.5]}
    (ax,) = curves({"mine": {"random": curve}}, "", {}).axes
    assert ax.get_title() == "mine"
    assert not ax.texts


def test_narrowing(tmp_path, capsys):
    arguments = ["--dataset", "digits", "--settings", "dir", "--seeds", "4", "--rounds", "3"]
    assert main(["reproduce", "table1", *arguments, "--out", str(tmp_path)]) == 0
    assert "digits DIR" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-dir"]
    assert [path.name for path in (tmp_path / "runs/digits-dir/fedcor").iterdir()] == ["seed-4"]


def test_the_device_reaches_every_run(tmp_path):
    assert Plan(tmp_path, None).experiment("2spc").device == "cpu"
    assert Plan(tmp_path, None, device="auto").experiment("2spc").device == "auto"
    arguments = ["--quick", "--rounds", "1", "--device", "abacus", "--out", str(tmp_path)]
    assert main(["reproduce", "table1", *arguments]) == 2


def test_a_variant_with_the_presets_own_options_shares_its_runs(tmp_path):
    """Whether the preset states them or leaves them to the defaults."""
    for dataset, shared in (("fmnist", 0.95), ("cifar10", 0.9), ("digits", 0.95)):
        plan = Plan(tmp_path, None, dataset)
        folders = {beta: _fedcor_variant(plan, "", beta=beta).folder for beta in BETAS[dataset]}
        assert folders.pop(shared) == "fedcor"
        assert folders == {beta: f"fedcor-beta-{beta}" for beta in folders}
    same = _fedcor_variant(Plan(tmp_path, None), "", interval=10, beta=0.95)
    assert (same.folder, same.options) == ("fedcor", {})
    rare = _fedcor_variant(Plan(tmp_path, None), "", interval=500, beta=0.99)
    assert rare.folder == "fedcor-interval-500-beta-0.99"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--dataset", "fmnits"], 'did you mean "fmnist"'),
        (["--settings", "2spx"], 'did you mean "2spc"'),
    ],
)
def test_mistakes_are_refused(arguments, hint, capsys):
    assert main(["reproduce", "table1", *arguments]) == 2
    assert hint in capsys.readouterr().err


def test_the_papers_experiments_have_the_papers_settings(tmp_path):
    plan = Plan(tmp_path, None)
    for dataset, rounds in (("fmnist", 500), ("cifar10", 2000)):
        plan = Plan(tmp_path, None, dataset)
        for setting in ("2spc", "1spc", "dir"):
            assert plan.experiment(setting).rounds == rounds
            assert set(TABLE_1[dataset][setting]) == {"random", "afl", "power_of_choice", "fedcor"}
    with pytest.raises(ConfigError):
        Plan(tmp_path, None, "mnist")
