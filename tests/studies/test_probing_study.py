"""`python -m studies probing`, in miniature."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from studies.__main__ import main
from studies.scaffold import FEDCOR, RANDOM, always

from fedcor.reporting.metrics import mean_estimate
from fedcor.runs.record import read_run
from studies import GROUPS, probing


@pytest.fixture
def few(monkeypatch):
    """One sample, and FedCor's warm-up cut short."""
    short = {"warmup": 2, "interval": 2, "warmup_steps": 5, "refit_steps": 5}
    variants = [
        dataclasses.replace(variant, options={**variant.options, **short})
        for variant in (probing.EVERYONE, probing.SAMPLES[1])
    ]
    study = dataclasses.replace(probing.STUDY, variants=always(RANDOM, *variants))
    monkeypatch.setattr(probing, "STUDY", study)


@pytest.mark.usefixtures("few")
def test_from_command_to_files(tmp_path):
    command = ["probing", "--quick", "--rounds", "6", "--settings", "2spc"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "probing-digits.json").read_text())
    assert list(saved["summary"]["2spc"]) == ["random", "everyone asked", "10 % asked"]
    runs = tmp_path / "runs" / "digits-2spc"
    accuracy, asked, moved = {}, {}, {}
    for folder in ("random", "fedcor", "fedcor-asked-10"):
        both = [read_run(runs / folder / f"seed-{seed}").rounds for seed in (1, 2)]
        accuracy[folder] = [np.mean([e["test_accuracy"] for e in rounds]) for rounds in both]
        asked[folder] = both[0][0]["probed"]
        moved[folder] = np.mean(
            [sum(e["bytes_down"] + e["bytes_up"] for e in rounds) for rounds in both]
        )
    # Of 50 clients, five train: a tenth of all are asked, twice.
    assert asked == {"random": 0, "fedcor": 100, "fedcor-asked-10": 10}
    found = saved["mean_accuracy_paired_to_everyone"]["2spc"]["10 % asked"]["mean"]
    pairs = zip(accuracy["fedcor-asked-10"], accuracy["fedcor"], strict=True)
    assert found == pytest.approx(mean_estimate([a - b for a, b in pairs]).mean)
    page = (tmp_path / "probing-digits.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| 10 % asked"))
    assert row.endswith(f"| {moved['fedcor-asked-10'] / moved['random']:.2f} |")


def test_everyone_asked_is_the_paper_s_fedcor():
    assert (probing.EVERYONE.folder, probing.EVERYONE.options) == (FEDCOR.folder, FEDCOR.options)
    folders = {variant.folder for variant in probing.SAMPLES}
    assert len(folders - {""}) == len(probing.SAMPLES)
    assert "probing" in GROUPS["beyond"]
