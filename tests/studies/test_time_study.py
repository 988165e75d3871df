"""`python -m studies time`: both kinds of devices, two targets, and all of it in miniature."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from studies.__main__ import main
from studies.plan import Plan
from studies.runs import build_experiment
from studies.scaffold import always
from studies.time_to_accuracy import INDEPENDENT, STUDY, TIED, UNEQUAL, VARIANTS

from fedcor.reporting.metrics import mean_estimate
from fedcor.runs.record import read_run
from studies import GROUPS, time_to_accuracy

LOW = 0.2  # a target that is reached in a few rounds


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("time")
    with pytest.MonkeyPatch.context() as patch:
        assert miniature(patch, out) == 0
    return out


def miniature(patch: pytest.MonkeyPatch, out: Path) -> int:
    study = dataclasses.replace(STUDY, variants=always(*VARIANTS[:2]))
    patch.setattr(time_to_accuracy, "STUDY", study)
    patch.setattr(time_to_accuracy, "LOWER", LOW)
    return main(["time", "--quick", "--rounds", "8", "--out", str(out)])


def test_the_numbers_are_those_of_the_records(folder):
    saved = json.loads((folder / "time-digits.json").read_text())
    assert list(saved["summary"]) == ["target 0.2", "target 0.8"]
    for name in (INDEPENDENT, TIED, UNEQUAL):
        times, seconds = [], {}
        for selector in ("random", "oort"):
            seconds[selector] = []
            for seed in (1, 2):
                path = folder / "runs" / f"digits-{name}" / selector / f"seed-{seed}"
                run = read_run(path)
                devices = run.header["config"]["faults"]["devices"]
                assert devices.get("tied_to") == ("labels" if name == TIED else None)
                chosen = 5 if name == UNEQUAL else 7  # over-selection
                assert all(len(row["selected"]) == chosen for row in run.rounds)
                assert all(len(row["participated"]) == 5 for row in run.rounds)
                reached = next(row for row in run.rounds if row["test_accuracy"] >= LOW)
                seconds[selector].append(reached["clock"])
        times = [a - b for a, b in zip(seconds["oort"], seconds["random"], strict=True)]
        found = saved["summary"]["target 0.2"][name]["oort"]
        assert found["estimates"]["seconds_to_target"]["mean"] == pytest.approx(
            mean_estimate(seconds["oort"]).mean
        )
        paired = found["paired_to_random"]["seconds_to_target"]
        assert paired["mean"] == pytest.approx(mean_estimate(times).mean)
    page = (folder / "time-digits.md").read_text()
    assert page.count("### ") == 6
    assert page.count("| Oort |") == 6
    assert page.count("| Rand |") == 3  # not minus itself


def test_again_gives_the_same(folder, monkeypatch):
    written = [folder / f"time-digits.{suffix}" for suffix in ("json", "md", "png")]
    before = [path.read_bytes() for path in written]
    assert miniature(monkeypatch, folder) == 0
    assert [path.read_bytes() for path in written] == before


def test_the_plan_may_ask_for_other_rounds(tmp_path):
    for asked, rounds in ((None, 150), (7, 7), (200, 200)):
        plan = Plan(tmp_path, None, rounds=asked)
        experiments = [build_experiment(plan, scenario) for scenario in STUDY.scenarios(plan)]
        assert [experiment.rounds for experiment in experiments] == [rounds] * 3
    assert "time" in GROUPS["all"]
    assert "time" not in GROUPS["paper"]
