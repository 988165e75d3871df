"""`fedcor reproduce`: every experiment of the paper in its quick version, resumable, with figures that are there."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcor.build import build_simulation
from fedcor.cli import main
from fedcor.errors import ConfigError
from fedcor.experiment import load_experiment
from fedcor.record import differences, read_run
from fedcor.report.summary import ratio_of
from fedcor.reproduce import EXPERIMENTS, NAMES, Plan
from fedcor.reproduce.paper import TABLE_1

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
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All of it once, as CI and a newcomer run it."""
    out = tmp_path_factory.mktemp("reproduce")
    command = [
        sys.executable,
        "-m",
        "fedcor",
        "reproduce",
        "all",
        "--quick",
        "--jobs",
        "2",
        "--rounds",
        "15",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out


def numbers(folder: Path, what: str) -> dict:
    return json.loads((folder / f"{what}.json").read_text())


def test_every_experiment_is_offered():
    assert (*EXPERIMENTS, "paper", "beyond", "all") == NAMES
    assert set(FIGURES) == set(EXPERIMENTS)


@pytest.mark.parametrize("name", [name for names in FIGURES.values() for name in names])
def test_figures_exist_and_are_not_empty(folder, name):
    png = (folder / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 600
    assert height > 300
    drawn = ET.parse(folder / f"{name}.svg").getroot()
    assert len(list(drawn.iter())) > 100


def test_table1_has_every_number(folder):
    table = numbers(folder, "table1-digits")
    for setting in ("2spc", "1spc", "dir"):
        for name in ("random", "afl", "power_of_choice", "fedcor"):
            entry = table["settings"][setting]["selectors"][name]
            assert entry["rounds_done"] == [15, 15]
            assert entry["estimates"]["mean_accuracy"]["n"] == 2
            if name != "random":
                assert entry["paired"]["random"]["mean_accuracy"]["low"] is not None
    page = (folder / "table1-digits.md").read_text()
    assert page.count("| FedCor |") == 3


def test_the_numbers_behind_the_figures(folder):
    curves = numbers(folder, "convergence-digits")["curves"]["1spc"]["fedcor"]
    assert len(curves["round"]) == len(curves["mean"]) == 6  # 15 rounds, ten-round means
    similarity = numbers(folder, "stationarity-digits")
    assert all(0 <= s <= 1 for of in similarity["series"].values() for s in of["similarity"])
    assert similarity["minimum"]["dir"] == min(similarity["series"]["dir"]["similarity"])
    component = numbers(folder, "normality-digits")["components"]["2spc"][0]
    assert len(component["scores"]) == 60
    assert np.std(component["scores"]) == pytest.approx(1, abs=0.01)
    for result in numbers(folder, "embedding-digits")["results"]:
        assert result["purity"] > 2 * result["chance"]
    chosen = numbers(folder, "annealing-frequencies-digits")["times_chosen"]["1spc"]
    assert all(sum(counts) == pytest.approx(15 * 10, abs=1) for counts in chosen.values())
    assert set(chosen) == {"β = 0.5", "β = 0.75", "β = 0.95", "random"}
    assert set(numbers(folder, "interval-digits")["curves"]["2spc"]) == {
        "Δt = 5",
        "Δt = 10",
        "Δt = 500",
        "random",
    }


def test_the_gap_to_everyone(folder):
    def mean_accuracy(selector, seed):
        run = read_run(folder / "runs" / "digits-1spc" / selector / f"seed-{seed}")
        return np.mean([entry["test_accuracy"] for entry in run.rounds[:15]])

    gained = [mean_accuracy("complement", seed) - mean_accuracy("random", seed) for seed in (1, 2)]
    possible = [mean_accuracy("full", seed) - mean_accuracy("random", seed) for seed in (1, 2)]
    saved = numbers(folder, "beyond-digits")["gap_closed"]["1spc"]
    assert saved["complement"] == pytest.approx(dataclasses.asdict(ratio_of(gained, possible)))
    assert set(saved) == {"afl", "power_of_choice", "fedcor", "complement"}
    page = (folder / "beyond-digits.md").read_text()
    assert page.count("| complement |") == 3
    ahead = [mean_accuracy("complement", seed) - mean_accuracy("fedcor", seed) for seed in (1, 2)]
    paired = numbers(folder, "beyond-digits")["mean_accuracy_paired_to_fedcor"]["1spc"]
    assert paired["complement"]["mean"] == pytest.approx(np.mean(ahead))
    assert page.count("| everyone trains |") == 3
    seeds = numbers(folder, "beyond-digits")["summary"]["1spc"]["fedcor"]["seeds"]
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
        changed = differences(
            greedy["selectors"], settings("2spc", f"complement{variant}")["selectors"]
        )
        assert list(changed) == [f"complement.{change}"]
    for scenario, changes in {
        "iid": ["partition.kind"],
        "unequal": ["partition.size_skew"],
        "noise": ["data.noisy_clients"],
        "dropouts": ["faults.availability", "faults.dropout"],
    }.items():
        changed = differences(as_is, settings(scenario, "complement"))
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
    assert saved == pytest.approx(hits / (2 * 15 * 5))


def test_fairness_is_that_of_the_last_model(folder):
    saved = numbers(folder, "beyond-fairness-digits")["settings"]["2spc"]["complement"]
    experiment = load_experiment(
        "digits", ["partition.shards_per_client=2", "training.clients_per_round=5"]
    )
    worst = []
    for seed in (1, 2):
        engine = build_simulation(experiment, seed).engine
        with np.load(
            folder
            / "runs"
            / "digits-2spc"
            / "complement"
            / f"seed-{seed}"
            / "checkpoint"
            / "state.npz"
        ) as a:
            assert a["round"] == 15
            model = torch.from_numpy(a["model"])
        worst.append(np.mean(sorted(engine.accuracies(model, np.arange(50)))[:5]))
    assert saved["worst_tenth"]["mean"] == pytest.approx(np.mean(worst))
    assert sum(saved["times_chosen"]) == pytest.approx(15 * 5, abs=0.5)
    assert numbers(folder, "beyond-confirmation-digits")["plan"]["seeds"] == [6, 7]


def test_fairness_refuses_models_of_other_ages(folder, capsys):
    """The runs there have 15 rounds: their records can be cut to 10, their last model cannot."""
    arguments = [
        "reproduce",
        "beyond-fairness",
        "--quick",
        "--rounds",
        "10",
        "--settings",
        "dir",
        "--out",
        str(folder),
    ]
    assert main(arguments) == 2
    assert "that of 15 rounds, but 10 are to be compared" in capsys.readouterr().err


def test_fresh_seeds_are_fresh(tmp_path, capsys):
    assert main(["reproduce", "beyond-confirmation", "--seeds", "1-8", "--out", str(tmp_path)]) == 2
    assert "seeds 6, 7, 8 are kept for the confirmation" in capsys.readouterr().err


def test_running_it_again_goes_on_and_changes_nothing(folder):
    before = {
        path: path.read_bytes()
        for path in folder.rglob("*.*")
        if path.name != "run.lock" and path.is_file()
    }
    assert (
        main(["reproduce", "all", "--quick", "--jobs", "2", "--rounds", "15", "--out", str(folder)])
        == 0
    )
    after = {path: path.read_bytes() for path in before}
    changed = [
        path.name for path in before if before[path] != after[path] and path.suffix != ".svg"
    ]
    assert changed == []


def test_a_lost_measurement_is_measured_again_the_same(folder):
    (lost,) = folder.glob("measured/normality-*/digits-2spc-seed-1/round-*.npz")
    with np.load(lost) as archive:
        before = archive["changes"]
    lost.unlink()
    assert (
        main(
            [
                "reproduce",
                "normality",
                "--quick",
                "--rounds",
                "15",
                "--settings",
                "2spc",
                "--out",
                str(folder),
            ]
        )
        == 0
    )
    with np.load(lost) as archive:
        assert np.array_equal(archive["changes"], before)


def test_narrowing(tmp_path, capsys):
    arguments = [
        "reproduce",
        "table1",
        "--dataset",
        "digits",
        "--settings",
        "dir",
        "--seeds",
        "4",
        "--rounds",
        "3",
    ]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "digits DIR" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-dir"]
    assert list((tmp_path / "runs" / "digits-dir" / "fedcor").iterdir()) == [
        tmp_path / "runs" / "digits-dir" / "fedcor" / "seed-4"
    ]


def test_the_device_reaches_every_run(tmp_path):
    assert Plan(tmp_path, None).experiment("2spc").training.device == "cpu"
    assert Plan(tmp_path, None, device="auto").experiment("2spc").training.device == "auto"
    assert (
        main(
            [
                "reproduce",
                "table1",
                "--quick",
                "--rounds",
                "1",
                "--device",
                "abacus",
                "--out",
                str(tmp_path),
            ]
        )
        == 2
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dataset", "fmnits"], 'did you mean "fmnist"'),
        (["--settings", "2spx"], 'did you mean "2spc"'),
    ],
)
def test_mistakes_are_refused(arguments, told, capsys):
    assert main(["reproduce", "table1", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_the_papers_experiments_have_the_papers_settings(tmp_path):
    plan = Plan(tmp_path, None)
    for dataset, rounds in (("fmnist", 500), ("cifar10", 2000)):
        plan = Plan(tmp_path, None, dataset)
        for setting in ("2spc", "1spc", "dir"):
            assert plan.experiment(setting).training.rounds == rounds
            assert set(TABLE_1[dataset][setting]) == {"random", "afl", "power_of_choice", "fedcor"}
    with pytest.raises(ConfigError):
        Plan(tmp_path, None, "mnist")
