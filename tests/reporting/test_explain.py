"""`fedcor explain`: the reasons in the record are the selector's own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedcor.cli import main
from fedcor.reporting.explanations import LossHistory, explanation, explanations
from fedcor.reporting.reason_texts import PARTS
from fedcor.rounds.record_line import FORMAT
from fedcor.runs.record import RunRecord, read_run
from fedcor.runs.resume import write_client_names
from fedcor.runs.runner import run
from fedcor.selectors.afl import AFL
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice
from fedcor.simulation.build import build_simulation
from fedcor.simulation.experiment_files import load_experiment
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
        annealing = simulation.selector.beta ** picked[record.selected]
        assert entry["why"]["annealing"] == pytest.approx(annealing)


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
    assert "redundancy: the part of that which earlier picks" in shown
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
    columns = {"place", "client", "name", "delivered", "why_not", "parts", "runner_up", "came"}
    assert set(shown["chosen"][0]) == columns | {"sentence"} | reasons
    assert shown["chosen"][0]["name"] == f"site\\t{shown['chosen'][0]['client']}"


def test_a_round_that_is_not_there(folder, tmp_path, capsys):
    assert main(["explain", str(folder), "--round", "99"]) == 2
    assert "there is no round 99" in capsys.readouterr().err
    assert main(["explain", str(tmp_path)]) == 2
    (tmp_path / "rounds.jsonl").write_text(json.dumps({"kind": "header", "format": FORMAT}) + "\n")
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
    assert "distance: of the group's mean update from the mean of all" in shown
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
    assert shown.splitlines()[2].split() == ["client", "cosine", "age"]
    assert "chosen because it had waited longest" in shown
    assert "cosine: of the group's summed update" in shown
    assert "age: rounds since" in shown
    assert main(["explain", str(tmp_path), "--round", "2"]) == 0
    shown = capsys.readouterr().out
    assert "none of its updates is known: it trains for the first time" in shown
    assert "waited_alike" not in shown


def test_a_process_that_was_never_fitted_is_said(tmp_path, capsys):
    """Nobody answers or delivers: the choices are uniform, in the warm-up and after it."""
    options = [*ROUNDS, "faults.dropout=1.0"]
    run(load_experiment("digits", options, "fedcor"), 1, tmp_path)
    rounds = read_run(tmp_path).rounds
    assert all(entry["why"] == {} for entry in rounds)
    assert len({tuple(entry["selected"]) for entry in rounds}) == len(rounds)
    said = "chosen uniformly: the Gaussian process was never fitted"
    assert main(["explain", str(tmp_path)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["explain", str(tmp_path), "--round", "1"]) == 0  # in the warm-up
    assert said not in " ".join(capsys.readouterr().out.split())
    assert main(["explain", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"].startswith(said)


def test_the_parts_of_every_pick_add_up_to_its_gain(folder):
    for found in explanations(read_run(folder)):
        for row in found["chosen"]:
            assert tuple(row["parts"]) == (PARTS if found["round"] >= 2 else ())
            if row["parts"]:
                assert sum(row["parts"].values()) == pytest.approx(row["gain"], rel=1e-10)
                assert row["runner_up"]["by"] >= 0
                assert row["runner_up"]["client"] != row["client"]
        if found["round"] >= 2:
            gains = [row["gain"] for row in found["chosen"]]
            assert found["predicted_change"] == pytest.approx(-sum(gains))
        else:
            assert found["predicted_change"] is None


def test_every_round_is_explained_as_each_one_is(folder):
    run = read_run(folder)
    assert explanations(run) == [explanation(run, number) for number in range(6)]
    json.dumps(explanations(run), allow_nan=False)
    assert explanations(RunRecord(None, run.header, [])) == []


def test_the_change_that_came_is_that_of_the_losses_in_the_federation(folder):
    """Rounds 0 to 3 measure, so the change of round 2 is known alone, and that of 3 to 5 is not."""
    simulation = build_simulation(load_experiment("digits", ROUNDS, "fedcor"), 1)
    losses = [simulation.engine.losses(simulation.start.model, np.arange(50))]
    for _, after in simulation.run(6, simulation.start):
        losses.append(simulation.engine.losses(after.model, np.arange(50)))
    rounds = explanations(read_run(folder))
    for number in (0, 1, 2):
        for row in rounds[number]["chosen"]:
            came = row["came"]
            assert (came["from_round"], came["to_round"]) == (number, number + 1)
            assert came["source"] == "asked"
            change = losses[number + 1][row["client"]] - losses[number][row["client"]]
            assert came["change"] == pytest.approx(change, abs=2e-5)
    sentence = rounds[2]["chosen"][0]["sentence"]
    assert "Its loss was predicted to change by" in sentence
    assert "; it changed by" in sentence
    for number in (3, 4, 5):
        assert all(row["came"] is None for row in rounds[number]["chosen"])
        assert "actual change unknown" in rounds[number]["chosen"][0]["sentence"]


def test_the_nearest_known_losses_are_taken_and_the_shortest_span():
    rounds = [
        {"participated": [1], "details": {"known": [1, 2], "losses": [3.0, None]}},
        {"participated": [2], "details": {"told": [9.0]}},
        {"participated": [1, 2], "details": {"told": [2.5, None]}},
        {"participated": None},
        {"participated": [1], "details": {"known": [1], "losses": [1.0], "told": [2.0]}},
    ]
    history = LossHistory(rounds)
    asked = {"change": -2.0, "from_round": 0, "to_round": 4, "source": "asked"}
    told = {"change": -0.5, "from_round": 2, "to_round": 4, "source": "told"}
    assert [history.change(1, t) for t in range(5)] == [asked, asked, told, told, None]
    assert history.change(2, 1) is None
    assert history.change(7, 1) is None


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("afl", "drawn by its valuation (valuation"),
        ("power_of_choice", ", number 1 of 20 candidates. It beat client"),
        ("complement", "the distance of the group's mean update from the mean of all went from"),
        ("aligned", "the cosine of the group's update with the mean of all went from"),
    ],
)
def test_baselines_are_explained(selector, said, tmp_path, capsys):
    run(load_experiment("digits", ["training.rounds=8"], selector), 1, tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    assert said in capsys.readouterr().out


def test_a_record_without_details_is_explained_by_its_reasons(folder):
    whole = read_run(folder)
    rounds = [
        {**entry, "details": {}, "why": {k: v for k, v in entry["why"].items() if k == "gain"}}
        for entry in whole.rounds
    ]
    for row in explanation(RunRecord(None, whole.header, rounds))["chosen"]:
        assert (row["parts"], row["runner_up"], row["came"]) == ({}, None, None)
        assert row["sentence"] == f"Client {row['client']}: gain {row['gain']:.3g}."


def test_power_of_choice_shows_its_candidates_and_who_lost(tmp_path):
    changes = ["training.rounds=2", "selectors.power_of_choice.candidates=12"]
    run(load_experiment("digits", changes, "power_of_choice"), 1, tmp_path)
    found = explanation(read_run(tmp_path), 0)
    losses = [one["loss"] for one in found["candidates"]]
    assert len(losses) == 12
    assert losses == sorted(losses, reverse=True)
    assert [one["chosen"] for one in found["candidates"]] == [True] * 10 + [False] * 2
    for row, one in zip(found["chosen"], found["candidates"], strict=False):
        assert row["client"] == one["client"]
        assert row["runner_up"]["client"] == found["candidates"][10]["client"]
        assert row["runner_up"]["by"] == pytest.approx(row["loss"] - losses[10], abs=1e-5)


@pytest.mark.parametrize(
    ("selector", "said"),
    [("random", "the same chance"), ("round_robin", "longest ago"), ("full", "everyone who")],
)
def test_selectors_without_reasons_have_a_plain_sentence(selector, said, tmp_path, capsys):
    run(load_experiment("digits", ["training.rounds=1"], selector), 1, tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    assert said in capsys.readouterr().out


def test_reasons_of_a_users_own_selector_are_shown_whatever_their_names(folder):
    entry = read_run(folder).rounds[5]
    chosen = entry["selected"]
    why = {"client": [0.5] * len(chosen), "sentence": [1.0] * len(chosen), "mine": [2.0] * 10}
    header = {**read_run(folder).header, "selector": "my_module:Mine"}
    found = explanation(RunRecord(None, header, [{**entry, "round": 0, "why": why}]), 0)
    assert [row["client"] for row in found["chosen"]] == chosen
    assert found["chosen"][0]["mine"] == 2.0
    assert found["chosen"][0]["sentence"].startswith(f"Client {chosen[0]}: ")
    assert "mine 2" in found["chosen"][0]["sentence"]


def test_names_in_sentences_are_safe(folder, capsys):
    write_client_names(folder, [f"\x1b[31m[red]\n{k}" for k in range(50)])
    assert main(["explain", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]" in shown
