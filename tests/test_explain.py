"""`fedcor explain`: the reasons in the record are the selector's own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedcor.build import build_simulation
from fedcor.cli import main
from fedcor.experiments import load_experiment
from fedcor.record import read_run
from fedcor.run_folder import write_client_names
from fedcor.runner import run
from fedcor.selectors import AFL, FedCor, PowerOfChoice
from fedcor.testing import FakeFederation

ROUNDS = ["selectors.fedcor.warmup=2", "selectors.fedcor.interval=3", "training.rounds=6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("explain")
    run(load_experiment("digits", ROUNDS, "fedcor"), 1, out)
    return out


def test_the_record_holds_what_fedcor_computed(folder):
    simulation = build_simulation(load_experiment("digits", ROUNDS, "fedcor"), 1)
    start = simulation.start
    for (record, progress), entry in zip(
        simulation.run(6, start), read_run(folder).rounds, strict=True
    ):
        picked = progress.selector["picked"].copy()
        picked[record.selected] -= 1
        if record.round < 2:
            assert entry["why"] == {}
            continue
        picks = simulation.selector.picks(
            {**progress.selector, "picked": picked},
            simulation.engine.population.weights,
            np.arange(50),
        )
        assert entry["selected"] == picks.clients.tolist()
        assert entry["why"]["gain"] == pytest.approx(picks.gain)
        assert entry["why"]["redundancy"] == pytest.approx(picks.alone - picks.gain)
        assert entry["why"]["annealing"] == pytest.approx(picks.annealing)


def test_the_losses_and_valuations_are_the_reasons_of_the_others():
    federation = FakeFederation.example(12)
    selector = PowerOfChoice(3)
    chosen, state = selector.select(selector.init(federation.population), federation)
    reasons = selector.reasons(state, federation, chosen)
    assert reasons["loss"] == pytest.approx(federation.loss_of(federation.model)[chosen])
    assert np.all(np.diff(reasons["loss"]) <= 0)
    afl = AFL(3)
    chosen, state = afl.select(afl.init(federation.population), federation)
    assert afl.reasons(state, federation, chosen)["valuation"] == pytest.approx(
        np.sqrt(federation.population.sizes[chosen])
    )


def test_no_reasons_in_the_warm_up():
    federation, selector = FakeFederation.example(12), FedCor(3, warmup=1, warmup_steps=2)
    chosen, state = selector.select(selector.init(federation.population), federation)
    assert selector.reasons(state, federation, chosen) == {}


def test_a_person_reads_it(folder, capsys):
    assert main(["explain", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "fedcor, round 5" in shown
    assert "redundancy: what the picks before" in shown
    assert main(["explain", str(folder), "--round", "0"]) == 0
    assert "warm-up: chosen uniformly" in " ".join(capsys.readouterr().out.split())


def test_a_program_reads_it(folder, capsys):
    write_client_names(folder, [f"site\t{k}" for k in range(50)])
    assert main(["explain", str(folder), "--round", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["round"] == 4
    assert [row["client"] for row in shown["chosen"]] == read_run(folder).rounds[4]["selected"]
    reasons = {"gain", "redundancy", "annealing", "others", "own", "change"}
    assert set(shown["reasons"]) == reasons
    columns = {"place", "client", "name", "delivered", "parts", "runner_up", "came", "sentence"}
    assert set(shown["chosen"][0]) == columns | reasons
    assert shown["chosen"][0]["name"] == f"site\\t{shown['chosen'][0]['client']}"


def test_a_round_that_is_not_there(folder, tmp_path, capsys):
    assert main(["explain", str(folder), "--round", "99"]) == 2
    assert "there is no round 99" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 2
    (tmp_path / "rounds.jsonl").write_text(json.dumps({"kind": "header"}) + "\n")
    assert main(["explain", str(tmp_path)]) == 2
    assert "no finished round" in capsys.readouterr().err


def test_complement_says_how_close_the_group_came_and_leaves_out_who_is_new(tmp_path, capsys):
    run(
        load_experiment(
            "digits", ["training.rounds=8", "selectors.complement.sweep=0.5"], "complement"
        ),
        1,
        tmp_path,
    )
    why = read_run(tmp_path).rounds[5]["why"]
    assert [value is None for value in why["distance"]] == [True] * 5 + [False] * 5
    assert why["distance"][-1] < why["distance"][5]
    assert main(["explain", str(tmp_path), "--round", "5"]) == 0
    shown = capsys.readouterr().out
    assert "distance: of the group's mean update from everyone's" in shown
    assert "age: rounds since" in shown


def test_aligned_says_how_well_the_group_is_aligned(tmp_path, capsys):
    run(load_experiment("digits", ["training.rounds=8"], "aligned"), 1, tmp_path)
    rounds = read_run(tmp_path).rounds
    assert rounds[4]["why"] == {}  # the sweep: nobody was known
    why = rounds[7]["why"]
    assert -1 <= min(why["cosine"]) < why["cosine"][-1] == max(why["cosine"]) <= 1
    assert max(why["age"]) == 7  # at least one of those chosen longest ago
    assert main(["explain", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "aligned, round 7" in shown
    assert shown.splitlines()[1].split() == ["client", "cosine", "age"]
    assert "cosine: of the group's summed update" in shown
    assert "age: rounds since" in shown


def test_a_process_that_was_never_fitted_is_said(tmp_path, capsys):
    """Nobody answers or delivers: the choices are uniform, in the warm-up and after it."""
    options = [*ROUNDS, "faults.dropout=1.0"]
    run(load_experiment("digits", options, "fedcor"), 1, tmp_path)
    rounds = read_run(tmp_path).rounds
    assert all(entry["why"] == {} for entry in rounds)
    assert len({tuple(entry["selected"]) for entry in rounds}) == len(rounds)
    said = "chosen uniformly: the process was never fitted"
    assert main(["explain", str(tmp_path)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["explain", str(tmp_path), "--round", "1"]) == 0  # in the warm-up
    assert said not in " ".join(capsys.readouterr().out.split())
    assert main(["explain", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"].startswith(said)
