"""`python -m studies`: every experiment in miniature, from command to files; resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from studies.__main__ import build_parser, main
from studies.byzantine import ATTACKS
from studies.complement import ratio_estimate, share_text
from studies.curves import BETAS, fedcor_variant
from studies.figures import curves, differences
from studies.measurements import histograms, project
from studies.plan import Plan
from studies.runs import build_experiment
from studies.scaffold import DIGITS_CHANGES, always, paper_scenario
from studies.summaries import mean_std
from studies.table1 import PAPER as PAPER_TABLE

import studies
from fedcor.core.errors import ConfigError, MissingExtraError
from fedcor.reporting.metrics import Estimate
from fedcor.runs.record import differences as setting_differences
from fedcor.runs.record import read_run
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment
from studies import (
    GROUPS,
    NAMES,
    STUDIES,
    byzantine,
    load_study,
    memory_anatomy,
    memory_parts,
    memory_scenarios,
    time_to_accuracy,
)
from studies import runs as study_runs

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
ROOT = Path(__file__).parents[2]
SMALL = ["--quick", "--rounds", "12", "--selections", "40"]
PAPER, BEYOND = ("1spc", "dir"), ("2spc",)


@pytest.fixture(autouse=True, scope="module")
def _fewer_steps():
    """Of FedCor's process; and one scenario for the comparison of optimisers, which has its own
    tests."""
    fewer = ["selectors.fedcor.warmup_steps=40", "selectors.fedcor.refit_steps=40"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_scenarios, "DIGITS", memory_scenarios.DIGITS[:1])
        patch.setattr(memory_scenarios, "TABLES", [])
        patch.setattr(memory_anatomy, "_DRAWS", 2)
        patch.setattr(memory_parts, "DIGITS", memory_parts.DIGITS[:1])
        patch.setattr(memory_parts, "TABLES", memory_parts.TABLES[:1])
        patch.setattr(byzantine, "SELECTORS", ("random", "fedcor"))
        patch.setattr(byzantine, "ATTACKS", {key: ATTACKS[key] for key in ("nobody", "flip")})
        patch.setattr(byzantine, "UPDATE_ATTACKS", ("nobody", "flip"))
        for module, name, variants in (
            (memory_parts, "ABLATION", memory_parts.PARTS[:3]),
            (memory_parts, "STRESS", memory_parts.STRESSED[:2]),
            (time_to_accuracy, "STUDY", time_to_accuracy.VARIANTS[:2]),
        ):
            few = dataclasses.replace(getattr(module, name), variants=always(*variants))
            patch.setattr(module, name, few)
        for setting, changes in DIGITS_CHANGES.items():
            patch.setitem(DIGITS_CHANGES, setting, (*changes, *fewer))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every experiment once, from command to files."""
    out, errors = tmp_path_factory.mktemp("studies"), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        for group, settings in (("paper", PAPER), ("beyond", BEYOND)):
            arguments = ["--settings", ",".join(settings), "--out", str(out)]
            assert main([group, *SMALL, *arguments]) == 0, errors.getvalue()
    assert errors.getvalue() == ""
    return out


def numbers(folder: Path, what: str) -> dict:
    return json.loads((folder / f"{what}.json").read_text())


def test_every_study_is_offered_with_examples(capsys):
    assert [*STUDIES, "paper", "beyond", "all"] == list(NAMES)
    assert list(FIGURES) == list(STUDIES)
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
    examples = shown.split("examples:")[1]
    commands = re.findall(r"python -m studies (.*?)(?:  |$)", examples, re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        assert build_parser().parse_args(shlex.split(command)).what in NAMES


def test_names_and_plan_need_neither_torch_nor_matplotlib():
    program = """
import sys
import studies, studies.relatives
studies.Plan(None, None)
print({"torch", "matplotlib", "sklearn"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
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
            set(STUDIES) - {"embedding", *(n for n in STUDIES if n.startswith("memory"))},
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

    for name in STUDIES:
        if name in independent:
            assert load_study(name).evaluate
            continue
        imported.clear()
        with pytest.raises(MissingExtraError) as caught:
            load_study(name)
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
from studies import load_study
from studies.__main__ import main
assert load_study("toy").evaluate
sys.exit(main(["all", "--quick"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "needs PyTorch, which is not installed: pip install 'fedcor[sim]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_without_scikit_learn_the_map_of_clients_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(MissingExtraError, match=r"scikit-learn.*fedcor\[sim\]"):
        project(np.eye(5), seed=1)


def test_an_unknown_study_gets_a_suggestion(tmp_path, capsys):
    with pytest.raises(ConfigError, match='did you mean "table1"'):
        studies.run("table", Plan(tmp_path, None))
    assert main(["tabel1", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("studies: NAME = 'tabel1'")
    assert 'did you mean "table1"' in message


def test_an_interrupted_study_says_how_to_continue(tmp_path, monkeypatch, capsys):
    def interrupted(plan, jobs):
        raise KeyboardInterrupt

    monkeypatch.setattr(study_runs, "run_shown", interrupted)
    assert main(["table1", "--quick", "--out", str(tmp_path)]) == 130
    message = capsys.readouterr().err
    assert message == "studies: interrupted; run the same command again to continue\n"


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
        "iid": ["partition.kind", "partition.shards_per_client"],
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
    assert main(["beyond-fairness", *arguments]) == 2
    assert "that of 12 rounds, but 10 are to be compared" in capsys.readouterr().err


def test_fresh_seeds_are_fresh(tmp_path, capsys):
    assert main(["beyond-confirmation", "--seeds", "1-8", "--out", str(tmp_path)]) == 2
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
    assert main([what, *SMALL, *arguments]) == 0
    assert contents(folder) == before


@pytest.mark.slow
def test_the_paper_in_processes_and_again(tmp_path):
    """As a newcomer runs it."""
    command = [sys.executable, "-m", "studies", "paper", *SMALL, "--jobs", "2"]
    written = []
    for _ in range(2):
        done = subprocess.run(
            [*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True
        )
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
    assert main(["stationarity", *SMALL, *arguments]) == 0
    with np.load(lost) as archive:
        assert np.array_equal(archive["changes"], before)
    assert first.stat().st_mtime_ns == untouched


def test_cells_with_and_without_an_interval():
    assert share_text(Estimate(0.924, None, 0.88, 0.98, 5, 5)) == "92% [88%, 98%]"
    assert share_text(Estimate(-0.001, None, None, None, 1, 1)) == "0%"
    assert share_text(Estimate(None, None, None, None, 0, 5)) == "N/A"
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
    assert main(["table1", *arguments, "--out", str(tmp_path)]) == 0
    assert "digits DIR" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-dir"]
    assert [path.name for path in (tmp_path / "runs/digits-dir/fedcor").iterdir()] == ["seed-4"]


def experiment_of(plan: Plan, setting: str = "2spc"):
    return build_experiment(plan, paper_scenario(plan, setting))


def test_the_device_reaches_every_run(tmp_path):
    assert experiment_of(Plan(tmp_path, None)).device == "cpu"
    assert experiment_of(Plan(tmp_path, None, device="auto")).device == "auto"
    arguments = ["--quick", "--rounds", "1", "--device", "abacus", "--out", str(tmp_path)]
    assert main(["table1", *arguments]) == 2


def test_a_variant_with_the_presets_own_options_shares_its_runs(tmp_path):
    """Whether the preset states them or leaves them to the defaults."""
    for dataset, shared in (("fmnist", 0.95), ("cifar10", 0.9), ("digits", 0.95)):
        plan = Plan(tmp_path, None, dataset)
        folders = {beta: fedcor_variant(plan, "", beta=beta).folder for beta in BETAS[dataset]}
        assert folders.pop(shared) == ""
        assert folders == {beta: f"fedcor-beta-{beta}" for beta in folders}
    same = fedcor_variant(Plan(tmp_path, None), "", interval=10, beta=0.95)
    assert (same.folder, same.options) == ("", {})
    rare = fedcor_variant(Plan(tmp_path, None), "", interval=500, beta=0.99)
    assert rare.folder == "fedcor-interval-500-beta-0.99"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--dataset", "fmnits"], 'did you mean "fmnist"'),
        (["--settings", "2spx"], 'did you mean "2spc"'),
    ],
)
def test_mistakes_are_refused(arguments, hint, capsys):
    assert main(["table1", *arguments]) == 2
    assert hint in capsys.readouterr().err


def test_the_papers_experiments_have_the_papers_settings(tmp_path):
    plan = Plan(tmp_path, None)
    for dataset, rounds in (("fmnist", 500), ("cifar10", 2000)):
        plan = Plan(tmp_path, None, dataset)
        for setting in ("2spc", "1spc", "dir"):
            assert experiment_of(plan, setting).rounds == rounds
            assert set(PAPER_TABLE[dataset][setting]) == {
                "random",
                "afl",
                "power_of_choice",
                "fedcor",
            }
    with pytest.raises(ConfigError):
        Plan(tmp_path, None, "mnist")
