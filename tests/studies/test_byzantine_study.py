"""`python -m studies byzantine`: the table, the goals, and all of it in miniature."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from studies.__main__ import main
from studies.byzantine import ATTACKS, DEFENCES, SELECTORS, Cell, Measured, price_cells
from studies.plan import Plan
from studies.runs import build_experiment

from fedcor.reporting.metrics import mean_estimate
from fedcor.reporting.notes import byzantine_share
from fedcor.runs.record import RunRecord, read_run
from fedcor.simulation.byzantine import Byzantine
from studies import GROUPS, byzantine
from studies import runs as study_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two attacks and two selectors, five rounds on two seeds."""
    out = tmp_path_factory.mktemp("byzantine")
    with pytest.MonkeyPatch.context() as patch:
        assert miniature(patch, out) == 0
    return out


def miniature(patch: pytest.MonkeyPatch, out: Path, rounds: int = 5) -> int:
    patch.setattr(byzantine, "SELECTORS", ("random", "afl"))
    patch.setattr(byzantine, "ATTACKS", {name: ATTACKS[name] for name in ("nobody", "flip")})
    return main(["byzantine", "--quick", "--rounds", str(rounds), "--out", str(out)])


def test_from_command_to_files(folder):
    saved = json.loads((folder / "byzantine-digits.json").read_text())
    assert saved["plan"]["seeds"] == [1, 2]
    assert saved["defence"] == DEFENCES["on"].describe()
    assert len(saved["cells"]) == 2 * 2 * 2
    cells = {(c["attack"], c["defence"], c["selector"]): c for c in saved["cells"]}
    differences, shares = [], []
    who = {seed: Byzantine(0.1).who(seed, 50) for seed in (1, 2)}
    for seed in (1, 2):
        accuracy = {}
        for name in ("random", "afl"):
            runs = folder / "runs" / "byzantine-digits-flip-defence-on"
            run = read_run(runs / name / f"seed-{seed}")
            assert run.header["config"]["byzantine"]["kind"] == "flip"
            accuracy[name] = np.mean([row["test_accuracy"] for row in run.rounds])
        chosen = [k for row in run.rounds for k in row["selected"]]
        shares.append(who[seed][chosen].mean() / 0.1)
        differences.append(accuracy["afl"] - accuracy["random"])
    cell = cells["flip", "on", "afl"]
    assert cell["times_fair"] == pytest.approx(shares)
    paired = dataclasses.asdict(mean_estimate(differences))
    assert cell["paired_to_random"] == pytest.approx(paired)
    assert cells["nobody", "off", "afl"]["times_fair"] == []
    page = (folder / "byzantine-digits.md").read_text()
    assert re.findall("^### (.*)", page, re.MULTILINE)[-1] == "Goals"
    assert page.count("| flip | on |") == 1


def test_again_gives_the_same_and_an_unfinished_run_is_an_error(folder, monkeypatch, capsys):
    written = [folder / f"byzantine-digits.{suffix}" for suffix in ("json", "md")]
    before = [path.read_bytes() for path in written]
    assert miniature(monkeypatch, folder) == 0
    assert [path.read_bytes() for path in written] == before
    monkeypatch.setattr(study_runs, "run_shown", lambda plan, jobs: None)  # runs nothing
    assert miniature(monkeypatch, folder, rounds=6) == 2
    assert "seed-1: 5 of 6 rounds are there" in capsys.readouterr().err


def found(**accuracies):
    """Cells of all attacks and selectors; of those under flip with the defence, some as given."""
    cells = {
        Cell("digits", attack, defence, name): Measured(
            [0.5, 0.52], [] if attack == "nobody" else [1.0, 1.2]
        )
        for attack in ATTACKS
        for defence in DEFENCES
        for name in SELECTORS
    }
    for name, values in accuracies.items():
        cells[Cell("digits", "flip", "on", name)] = Measured(*values)
    return cells


def test_goals_name_what_fails():
    met = byzantine.attack_goals(found())
    assert [goal["met"] for goal in met] == [True, True]
    below, often = byzantine.attack_goals(
        found(afl=([0.4, 0.42], [1.5, 1.5]), fedcor=([0.5, 0.52], [1.4, 1.6]))
    )
    assert below["fails"] == {"afl under flip": "-0.100 [-0.100, -0.100]"}
    assert often["fails"] == {"fedcor under flip": "1.60"}
    text = byzantine.goal_lines([*met, below])
    assert text.count(": met.") == 2
    assert "missed: afl under flip: -0.100" in text


def test_the_price_is_what_the_defence_takes_where_nobody_lies():
    cells = {cell: Measured([0.5, 0.52], []) for cell in price_cells()}
    assert byzantine.price_goals(cells)[0]["met"]
    cells[Cell("fmnist-1spc", "nobody", "on", "fedcor")] = Measured([0.494, 0.514], [])
    (goal,) = byzantine.price_goals(cells)
    assert list(goal["fails"]) == ["fmnist-1spc fedcor under nobody"]
    experiment = build_experiment(Plan(Path("unused"), None), price_cells()[0].scenario)
    assert (experiment.rounds, bool(experiment.byzantine)) == (200, False)


def test_the_command_is_part_of_all():
    assert "byzantine" in GROUPS["all"]
    assert "byzantine" not in GROUPS["paper"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"byzantine": {"fraction": 0.5}},
        {"byzantine": {"fraction": 2.0}, "partition": {"clients": 4}},
        {"byzantine": {"fraction": 0.5}, "partition": {"clients": 2}},
        {"byzantine": {"fraction": 0.5}, "partition": {"clients": "many"}},
        {"byzantine": 3, "partition": {"clients": 4}},
    ],
)
def test_a_damaged_header_has_no_byzantine(config):
    rounds = [{"selected": [0, 3]}]
    assert byzantine_share(RunRecord(None, {"seed": 1, "config": config}, rounds)) is None


def test_the_robust_means_are_held_against_the_plain_one(tmp_path, monkeypatch):
    monkeypatch.setattr(byzantine, "UPDATE_ATTACKS", ("nobody", "scale"))
    monkeypatch.setattr(byzantine, "MEAN_NAMES", {"fedavg": "mean", "multi_krum": "Multi-Krum"})
    arguments = ["--quick", "--rounds", "8", "--out", str(tmp_path)]
    assert main(["byzantine-means", *arguments]) == 0
    saved = json.loads((tmp_path / "byzantine-means-digits.json").read_text())
    cells = {(c["attack"], c["defence"], c["optimiser"]): c for c in saved["cells"]}
    assert len(cells) == 2 * 2 * 2
    runs = tmp_path / "runs" / "byzantine-digits-scale-defence-off"
    accuracies = {}
    for name in ("fedavg", "multi_krum"):
        run = read_run(runs / f"random+{name}" / "seed-2")
        assert run.header["config"]["optimiser"]["name"] == name
        accuracies[name] = np.mean([row["test_accuracy"] for row in run.rounds])
        assert cells["scale", "off", name]["accuracies"][1] == pytest.approx(accuracies[name])
    assert accuracies["multi_krum"] > accuracies["fedavg"]  # thirtyfold updates are left out
    paired = cells["scale", "off", "multi_krum"]["paired_to_mean"]
    mean, krum = (cells["scale", "off", name]["accuracies"] for name in accuracies)
    assert paired["mean"] == pytest.approx(np.mean(krum) - np.mean(mean))
    page = (tmp_path / "byzantine-means-digits.md").read_text()
    assert page.count("| scale | off |") == 2
