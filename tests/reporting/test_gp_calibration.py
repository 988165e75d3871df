"""The health of the process, as it is read from a record."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcor.reporting.gp_calibration import calibration, health
from fedcor.runs.record import RunRecord, read_run
from fedcor.runs.runner import run
from fedcor.simulation.experiment_files import load_experiment

ROUNDS = ["selectors.fedcor.warmup=3", "selectors.fedcor.interval=2", "training.rounds=8"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("health")
    run(load_experiment("digits", ROUNDS, "fedcor"), 1, out)
    return read_run(out)


def test_the_columns_are_those_of_the_probe_rounds(record):
    found = health(record)
    json.dumps(found, allow_nan=False)
    columns = found["rounds"]
    assert columns["round"] == [0, 1, 2, 4, 6]
    assert {len(values) for values in columns.values()} == {5}
    assert found["note"] == ""
    assert (found["refits"], found["probe_rounds"], found["forecasts"]) == (5, 5, 4)
    assert columns["clients"] == [None, 40, 40, 40, 40]
    for place, number in enumerate(columns["round"][1:], start=1):
        details = record.rounds[number]["details"]
        assert columns["log_score"][place] == pytest.approx(details["log_score"][0])
        assert columns["each"][place] == pytest.approx(details["log_score_each"][0])
        assert columns["error"][place] ** 2 * 40 == pytest.approx(details["squared_errors"][0])
        assert columns["residual"][place] ** 2 * 40 == pytest.approx(details["residual_squares"][0])
        assert sum(columns["bins"][place]) == 40
        assert 0 < columns["similarity"][place] <= 1
    assert found["each"] == pytest.approx(sum(columns["each"][1:]) / 4)
    better = [a > b for a, b in zip(columns["each"][1:], columns["independent"][1:], strict=True)]
    assert found["better_each"] == sum(better)
    assert found["calibration"]["clients"] == 160


def test_the_bytes_of_probes_are_those_above_the_other_rounds(record):
    found, spent = health(record), [e["bytes_down"] + e["bytes_up"] for e in record.rounds]
    assert found["bytes"] == sum(spent)
    # Of the rounds 3, 5 and 7, the first finds the model with everyone: it was tried there.
    assert found["usual_bytes"] == spent[5] == spent[7] > spent[3]
    extra = [spent[t] - spent[5] for t in found["rounds"]["round"]]
    assert found["rounds"]["extra_bytes"] == extra
    assert found["probe_bytes"] == sum(extra) > 0
    assert found["probed"] == sum(e["probed"] for e in record.rounds)
    always = health(RunRecord(None, record.header, record.rounds[:3]))
    assert always["usual_bytes"] is always["probe_bytes"] is None


def test_agreement_is_the_cosine_of_what_was_foretold_and_what_came(record):
    forecasts, changes = [3.0, -1.0, 0.5], [2.0, 1.0, 0.0]
    squares = {
        "squared_forecasts": [sum(f * f for f in forecasts)],
        "squared_changes": [sum(y * y for y in changes)],
        "squared_errors": [sum((y - f) ** 2 for f, y in zip(forecasts, changes, strict=True))],
    }
    entry = {"round": 0, "probed": 3, "details": {**squares, "forecast_clients": [3]}}
    found = health(RunRecord(None, record.header, [entry]))["rounds"]["agreement"]
    assert found == pytest.approx([5 / (10.25 * 5) ** 0.5])
    assert health(record)["rounds"]["agreement"][0] is None
    assert all(-1 <= value <= 1 for value in health(record)["rounds"]["agreement"][1:])


def test_what_cannot_be_shown_is_said(record):
    nothing = health(RunRecord(None, record.header, []))
    assert nothing["note"].startswith("this selector learns no Gaussian process")
    assert nothing["calibration"] is nothing["each"] is None
    first = health(RunRecord(None, record.header, record.rounds[:1]))
    assert (
        first["note"] == "the Gaussian process has been fitted, but has not predicted anything yet"
    )


@given(st.lists(st.integers(0, 50), min_size=20, max_size=20))
def test_coverage_counts_the_residuals_in_central_intervals(bins):
    found = calibration(bins)
    if not sum(bins):
        assert found is None
        return
    middles = [(place + 0.5) / 20 for place, count in enumerate(bins) for _ in range(count)]
    for level, coverage in zip(found["levels"], found["coverage"], strict=True):
        inside = [abs(u - 0.5) < level / 2 for u in middles]
        assert coverage == pytest.approx(sum(inside) / len(inside))
    assert found["levels"][-1] == found["coverage"][-1] == 1
