"""Faults in whole runs: who was chosen, who took part and why not; traces; every selector."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcor
from fedcor.cli import main
from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.data.datasets import load
from fedcor.reporting.explanations import explanation
from fedcor.reporting.notes import missing_notes
from fedcor.reporting.results import Result
from fedcor.runs.record import json_line, read_run, read_runs
from fedcor.runs.runner import run
from fedcor.selectors import SELECTORS
from fedcor.selectors.base import StatelessSelector
from fedcor.simulation.build import build_simulation
from fedcor.simulation.faults import Faults
from fedcor.simulation.state import SimulationState
from fedcor.simulation.traces import read_availability, read_devices

DIGITS = load("digits")
N = 50
ALL = {
    "availability": [0.6] * 25 + [0.9] * 25,
    "dropout": 0.1,
    "stragglers": 0.3,
    "training_dropout": 0.1,
    "silence": 0.2,
    "devices": {"seconds_per_step": 1.0, "speed_spread": 0.7, "bandwidth_spread": 0.5},
    "deadline": 7.0,
    "over_selection": 1.3,
}


def simulation(selector="random", seed=1, **faults):
    # With the optimiser of the selector: FedRecall's state is part of what is resumed.
    chosen = fedcor.experiment("digits", selector=selector, clients_per_round=6, faults=faults)
    return build_simulation(chosen, seed, DIGITS)


def lines(simulation, rounds, state=None):
    """The record without the time that it took; and the last state."""
    found = []
    for record, after in simulation.run(rounds, state):
        entry = dataclasses.asdict(record)
        del entry["seconds"]
        found.append(json_line(entry))
        last = after
    return found, last


# --- over-selection and a deadline ----------------------------------------------------------------

COUNTED = sorted({*SELECTORS.names()} - {"full"})


@pytest.mark.parametrize("selector", COUNTED)
def test_every_selector_takes_over_selection_and_a_deadline(selector):
    s = simulation(selector, **ALL)
    late = 0
    for record, state in s.run(14):
        reachable = N - record.unreachable
        assert len(record.selected) == min(8, reachable)  # ceil(1.3 x 6)
        assert len(record.participated) <= 6
        assert {*record.participated} <= {*record.selected}
        absent = {k: why for why, clients in record.missing.items() for k in clients}
        assert {*absent} == {*record.selected} - {*record.participated}
        assert {*absent.values()} <= {"dropped", "late", "refused"}
        late += sum(why == "late" for why in absent.values())
        assert record.duration > 0
        assert record.clock == state.clock
    assert late > 0
    assert state.clock == pytest.approx(sum(r.duration for r, _ in s.run(14)))


def test_over_selection_needs_a_selector_that_can_be_asked_for_more():
    @dataclasses.dataclass(frozen=True)
    class Own(StatelessSelector):
        def select(self, state, federation):
            return federation.available[:3], state

    for selector in ("full", Own()):
        with pytest.raises(ConfigError, match=r"faults\.over_selection.*clients_per_round"):
            fedcor.experiment("digits", selector=selector, faults={"over_selection": 1.5})
        fedcor.experiment("digits", selector=selector, faults={"deadline": 3.0, **DEVICES})
    with pytest.raises(ConfigError, match=r"faults\.over_selection.*candidates"):
        fedcor.experiment(
            "digits",
            clients_per_round=6,
            selector="power_of_choice",
            selectors={"power_of_choice": {"candidates": 7}},
            faults={"over_selection": 1.3},
        )


DEVICES = {"devices": {"seconds_per_step": 1.0}}


@given(st.integers(1, 40), st.floats(1.0, 3.0))
def test_the_number_that_is_chosen(needed, factor):
    chosen = Faults(over_selection=factor).choose(needed, N)
    assert needed <= chosen <= N
    assert chosen == min(N, math.ceil(factor * needed)) or factor * needed - chosen < 1e-9
    assert Faults(over_selection=1.1).choose(10, N) == 11
    assert Faults(over_selection=1.3).choose(10, N) == 13


def test_the_number_over_time_is_over_selected_too():
    experiment = fedcor.experiment(
        "digits",
        selector="fedcor",
        clients_per_round=6,
        rules={"clients_per_round": {2: 10}},
        faults={"over_selection": 1.5},
    )
    found = [record for record, _ in build_simulation(experiment, 1, DIGITS).run(4)]
    assert [len(r.selected) for r in found] == [9, 9, 15, 15]
    assert [len(r.participated) for r in found] == [6, 6, 10, 10]


def test_who_is_late_is_billed():
    plain, model = simulation(), simulation().engine.model_bytes
    hurried = simulation(over_selection=1.5)
    for (one, _), (more, _) in zip(plain.run(3), hurried.run(3), strict=True):
        assert (one.bytes_down, one.bytes_up) == (6 * model, 6 * model)
        assert (more.bytes_down, more.bytes_up) == (9 * model, 9 * model)
        assert (len(more.participated), len(more.missing["late"])) == (6, 3)


# --- faults apart ---------------------------------------------------------------------------------


def test_a_drop_out_in_training_answers_and_a_silent_client_trains():
    everyone, model = np.arange(N), simulation().engine.model_bytes
    s = simulation(training_dropout=0.5)
    fails = s.faults.training_dropped(1, 0, N)
    federation = s.open_round(s.start)
    assert np.isfinite(federation.losses(everyone)).all()
    _, outcome = federation.finish(everyone, {})
    assert np.array_equal(outcome.participated, np.flatnonzero(~fails))
    assert federation.ledger.bytes_down == N * model  # they received it
    assert federation.ledger.bytes_up == 4 * N + int((~fails).sum()) * model
    assert federation.attendance.missing(everyone, outcome.participated) == {
        "dropped": np.flatnonzero(fails).tolist()
    }

    s = simulation(silence=0.5)
    silent = s.faults.silent(1, 0, N)
    federation = s.open_round(s.start)
    assert np.array_equal(np.isnan(federation.losses(everyone)), silent)
    after, outcome = federation.finish(everyone, {})
    assert np.array_equal(outcome.participated, everyone)
    assert federation.ledger.bytes_up == 4 * int((~silent).sum()) + N * model
    assert after.clock == 0.0


def test_rates():
    faults = Faults(training_dropout=0.2, silence=0.4)
    assert np.mean([faults.training_dropped(1, t, N) for t in range(300)]) == pytest.approx(
        0.2, abs=0.02
    )
    assert np.mean([faults.silent(1, t, N) for t in range(300)]) == pytest.approx(0.4, abs=0.02)


def test_each_client_has_its_own_availability():
    rates = np.linspace(0.0, 1.0, N)
    faults = Faults(availability=rates)
    seen = np.zeros(N)
    for t in range(600):
        seen[faults.available(1, t, N)] += 1
    assert seen[0] == 0
    assert seen[-1] == 600
    assert np.abs(seen / 600 - rates).max() < 0.08


def test_the_last_resort_is_a_client_that_can_be_reached():
    faults = Faults(availability=[0.0, 1e-9, 0.0, 1e-9])
    found = {int(faults.available(1, t, 4)[0]) for t in range(40)}
    assert found == {1, 3}
    with pytest.raises(ConfigError, match="nobody who is eligible"):
        faults.check_for(4, np.array([True, False, True, False]))


def test_updates_that_are_refused_are_said(monkeypatch):
    s = simulation()
    train = s.engine.train

    def spoilt(model, ids, *rest, **options):
        results = train(model, ids, *rest, **options)
        results[0] = math.nan
        return results

    monkeypatch.setattr(s.engine, "train", spoilt)
    (record, _), *_ = s.run(1)
    assert record.missing == {"refused": [min(record.selected)]}


def test_a_run_without_faults_says_nothing_new():
    (line, *_), _ = lines(simulation(), 1)
    new = {"missing", "unreachable", "duration", "clock"}
    assert not new & {*json.loads(line)}
    (line, *_), _ = lines(simulation(**ALL), 1)
    assert new <= {*json.loads(line)}


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["fedcor", "aligned", "afl"])
def test_a_resumed_run_is_the_same_run(selector):
    s = simulation(selector, **ALL)
    whole, last = lines(s, 14)
    for cut in (1, 7, 13):
        first, state = lines(s, cut)
        arrays = {key: array.copy() for key, array in state.to_arrays().items()}
        again = SimulationState.from_arrays(arrays, s.engine.device)
        rest, end = lines(simulation(selector, **ALL), 14, again)
        assert first + rest == whole
        assert end.clock == last.clock


def test_a_run_folder_is_resumed_bit_for_bit_and_only_with_its_trace(tmp_path):
    trace = tmp_path / "hours.csv"
    rows = [f"{k},{k % 5},{k % 5 + 2},5" for k in range(N)]
    trace.write_text("client,first,last,every\n" + "\n".join(rows))
    faults = {**ALL, "availability": str(trace)}

    def experiment(rounds):
        return fedcor.experiment("digits", selector="fedcor", rounds=rounds, faults=faults)

    run(experiment(30), 1, tmp_path / "whole")
    run(experiment(13), 1, tmp_path / "half")
    run(experiment(30), 1, tmp_path / "half", resume=True)

    def rounds(folder):
        return [{**entry, "seconds": 0} for entry in read_run(folder).rounds]

    assert rounds(tmp_path / "half") == rounds(tmp_path / "whole")
    trace.write_text(trace.read_text() + "\n0,0,1,1000\n")
    with pytest.raises(RecordError, match="availability"):
        run(experiment(31), 1, tmp_path / "half", resume=True)


# --- trace files ----------------------------------------------------------------------------------

STRETCHES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 12),
        st.none() | st.integers(0, 6),
        st.none() | st.integers(7, 9),
        st.none() | st.sampled_from([0.25, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=8,
)


@given(STRETCHES, st.booleans())
def test_a_trace_says_what_its_rows_say(tmp_path_factory, stretches, as_json):
    path = tmp_path_factory.mktemp("trace") / "trace"
    names = ("client", "first", "last", "every", "probability")
    rows = []
    for client, first, length, every, probability in stretches:
        last = None if length is None else first + length
        rows.append((client, first, last, None if last is None else every, probability))
    if as_json:
        text = "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    else:
        cells = [",".join("" if v is None else str(v) for v in row) for row in rows]
        text = "\n".join([",".join(names), *cells])
    path.write_text(text)
    trace = read_availability("availability", str(path))
    ever = [False] * 6
    for t in range(40):
        expected = [0.0] * 6
        for client, first, last, every, probability in rows:
            starts = range(first, t + 1, every) if every else [first]
            inside = any(s <= t and (last is None or t <= s + last - first) for s in starts)
            p = 1.0 if probability is None else probability
            ever[client] = True
            if inside:
                expected[client] = max(expected[client], p)
        assert trace.at(t, 6).tolist() == expected
    assert trace.ever(6).tolist() == ever


@given(st.permutations(range(4)))
def test_devices_from_a_file(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("trace") / "devices.csv"
    rows = [f"{k}, {k + 1}, {10 * (k + 1)}, 2" for k in order]
    path.write_text("\n".join(["client,seconds_per_step,down,up", *rows]))
    trace = read_devices("devices", str(path))
    assert trace.seconds_per_step.tolist() == [1, 2, 3, 4]
    assert trace.down.tolist() == [10, 20, 30, 40]
    assert trace.up.tolist() == [2, 2, 2, 2]
    faults = Faults(devices=str(path), deadline=1.0)
    assert faults.describe()["devices"] == {"file": "devices.csv", "sha256": trace.sha256}
    faults.check_for(4)
    with pytest.raises(ConfigError, match="has 4 clients"):
        faults.check_for(5)


BAD_AVAILABILITY = {
    "": "has no rows",
    "client,first\n": "has no rows",
    "client,fist\n1,2": 'did you mean "first"',
    "client,last\n1,2": "no first",
    "client,first\n1": "line 2: has 1 values for 2 columns",
    "client,first,first\n1,2,3": "two columns of one name",
    "client,first\nx,2": "client = 'x'",
    "client,first\n-1,2": "client = '-1'",
    "client,first\n1.5,2": "whole number",
    "client,first\nnan,2": "client = 'nan'",
    "client,first\n1e400,2": "client = '1e400'",
    "client,first,last\n1,5,4": "last = '4'",
    "client,first,every\n1,5,4": "goes with last",
    "client,first,last,every\n1,5,9,4": "at least the length of the stretch",
    "client,first,probability\n1,5,1.5": "from 0 to 1",
    "client,first,probability\n1,5,0": "no client could ever be reached",
    '{"client": 1, "first": 0}\n[1]': "line 2: must be an object",
    '{"client": 1, "first": true}': "first = True",
    '{"client": {}, "first": 1}': "client = {}",
    '{"client": 1, "first": 0': "not JSON",
    '{"a":' * 5000: "not JSON",
    '{"client": 1, "first": ' + "9" * 5000 + "}": "line 1",
}


@pytest.mark.parametrize("text", BAD_AVAILABILITY, ids=range(len(BAD_AVAILABILITY)))
def test_a_bad_trace_ends_with_exit_code_2(text, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert main(["run", "digits", "--set", f"faults.availability={path}", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert "faults.availability" in error
    assert BAD_AVAILABILITY[text] in error
    assert "Traceback" not in error


BAD_DEVICES = {
    "client,seconds_per_step,down\n0,1,1": "no up",
    "client,seconds_per_step,down,up\n0,1,1,1\n0,1,1,1": "is listed twice",
    "client,seconds_per_step,down,up\n0,1,1,1\n2,1,1,1": "no row of client 1",
    "client,seconds_per_step,down,up\n0,0,1,1": "seconds_per_step = '0'",
    "client,seconds_per_step,down,up\n0,1,1,1": "has 1 clients",
}


@pytest.mark.parametrize("text", BAD_DEVICES, ids=range(len(BAD_DEVICES)))
def test_bad_devices_end_with_exit_code_2(text, tmp_path, capsys):
    path = tmp_path / "devices.csv"
    path.write_text(text)
    assert main(["run", "digits", "--set", f"faults.devices={path}", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert "faults.devices" in error
    assert BAD_DEVICES[text] in error


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("availability=nowhere.csv", "cannot be read"),
        ("availability='.'", "cannot be read"),
        ("availability=[0.5, 0.5]", "has 2 numbers, but there are 50 clients"),
        ("availability=[0.5, 2]", "must lie in"),
        ("availability=[]", "above 0"),
        ("availability=true", "availability"),
        ("deadline=10", "needs devices"),
        ("deadline=0", "above 0"),
        ("over_selection=0.9", "from 1 to 100"),
        ("over_selection=nan", "from 1 to 100"),
        ("silence=2", "must lie in"),
        ("training_dropout=-1", "must lie in"),
        ("devices=3", "devices"),
        ("devices={}", "seconds_per_step"),
        ("devices.seconds_per_step=-1", "faults.devices.seconds_per_step"),
        ("devices={seconds_per_stp=1}", 'did you mean "seconds_per_step"'),
    ],
)
def test_faults_that_cannot_work_end_with_exit_code_2(change, why, capsys):
    assert main(["run", "digits", "--set", f"faults.{change}", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert "faults." in error
    assert why in error


CELLS = st.sampled_from(
    ["client", "first", "last", "every", "probability", "down", "up", "seconds_per_step", ",", "\n"]
) | st.sampled_from(["0", "1", "2", "1e9", "-1", '"', "{", "}", ":", "[", "nan", "\x00", "\r", " "])


@given(st.lists(CELLS, max_size=40).map("".join) | st.text() | st.binary())
def test_whatever_a_trace_holds_there_is_no_other_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
    for read in (read_availability, read_devices):
        try:
            found = read("key", str(path))
        except FedcorError:
            continue
        assert len(found.sha256) == 64


# --- what is shown --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timed")
    for selector in ("random", "fedcor"):
        faults = {**ALL, "deadline": 9.0}
        chosen = fedcor.experiment(
            "digits", selector=selector, rounds=12, faults=faults, target_accuracy=0.3
        )
        for seed in (1, 2):
            run(chosen, seed, folder / selector / f"seed-{seed}")
    return folder


def test_explain_says_why_a_client_did_not_take_part(timed, capsys):
    run = read_run(timed / "fedcor" / "seed-1")
    entry = next(one for one in run.rounds if {"late", "dropped"} <= {*one["missing"]})
    shown = explanation(run, entry["round"])
    for row in shown["chosen"]:
        reasons = [why for why, who in entry["missing"].items() if row["client"] in who]
        assert row["why_not"] == "".join(reasons)
        assert row["delivered"] == (not reasons)
    assert shown["unreachable"] == entry["unreachable"]
    assert (shown["duration"], shown["clock"]) == (entry["duration"], entry["clock"])
    folder = str(timed / "fedcor" / "seed-1")
    assert main(["explain", folder, "--round", str(entry["round"])]) == 0
    text = capsys.readouterr().out
    assert "delivered" in text
    assert f"could not be reached: {entry['unreachable']}" in text
    assert "of simulated time" in " ".join(text.split())


def test_reports_show_time_to_target(timed, capsys):
    result = Result(read_runs(timed))
    frame, summary = result.to_frame(), result.summary()
    for selector in result.selectors:
        times = []
        for seed in (1, 2):
            one = frame[(frame["selector"] == selector) & (frame["seed"] == seed)]
            assert np.allclose(one["clock"], one["duration"].cumsum())
            times.append(one["clock"][one["accuracy"] >= 0.3].iloc[0])
        assert summary.loc[selector, ("seconds_to_target", "mean")] == pytest.approx(np.mean(times))
    assert main(["report", str(timed)]) == 0
    text = capsys.readouterr().out
    assert "in rounds and simulated time" in " ".join(text.split())
    chosen = sum(len(entry["selected"]) for run in result for entry in run.rounds)
    assert len(missing_notes(result.runs)) == 2
    assert all(note in text for note in missing_notes(result.runs))
    took = sum(len(entry["participated"]) for run in result for entry in run.rounds)
    said = [note.split(" of ")[1].split() for note in missing_notes(result.runs)]
    assert (sum(int(n[0]) for n in said), sum(int(n[2]) for n in said)) == (chosen, took)


def test_plots_against_time(timed, tmp_path):
    result = Result(read_runs(timed))
    axis = result.plot(x="time").axes[0]
    assert axis.get_xlabel() in ("s of simulated time", "min of simulated time")
    scale = 60 if axis.get_xlabel().startswith("min") else 1
    ends = {line.get_label(): line.get_xdata()[-1] * scale for line in axis.get_lines()}
    for selector in result.selectors:
        clocks = [run.rounds[-1]["clock"] for run in result if run.header["selector"] == selector]
        assert ends[selector] == pytest.approx(np.mean(clocks))
    run(fedcor.experiment("digits", selector="random", rounds=2), 1, tmp_path / "run")
    with pytest.raises(RecordError, match=r"faults\.devices"):
        Result(read_runs(tmp_path)).plot(x="time")
