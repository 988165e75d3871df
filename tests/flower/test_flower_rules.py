"""Rules on Flower: tags of nodes, who is eligible, numbers per group, clients per round."""

from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest
from flower_grid import QUICK, SAYS_KEYS, MemoryGrid, initial, lines, logged, numpy_app, quiet, run
from flower_runs import end_of, experiment, on_flower
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedcor
from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.flower import (
    FedCorStrategy,
    OptimiserStrategy,
    SelectionSettings,
    answers_probes,
    select_with,
)
from fedcor.flower import federation_state as attendance_module
from fedcor.flower.client_registry import Claim, Roster
from fedcor.flower.protocol import EVERY_TAG, NOTE, read_tags, write_tags
from fedcor.flower.settings import SelectionKeywords
from fedcor.runs.record import read_run
from fedcor.runs.runner import run as simulate
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice

SITES = "aaaabbbbcc"


def tagged_grid(sites=SITES, app=None, **more) -> MemoryGrid:
    """Partition k is on a node with `site = sites[k]`; a blank is no site."""
    grid = MemoryGrid(numpy_app() if app is None else app, len(sites))
    for context in grid.contexts.values():
        partition = int(context.node_config["partition-id"])
        if sites[partition].strip():
            context.node_config["site"] = sites[partition]
        for tag, values in more.items():
            context.node_config[tag] = values[partition]
    return grid


def sites_of(line, sites=SITES):
    return "".join(sorted(sites[k] for k in line["selected"]))


def questions(grid):
    """The notes of all questions who a node is."""
    notes = [m.content.config_records.get(NOTE) for m in grid.sent]
    return [note for note in notes if note is not None and note["ask"] == "identity"]


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selector", [Random(4), PowerOfChoice(4), FedCor(4, **QUICK), "aligned"], ids=str
)
def test_every_round_keeps_the_bounds(selector, tmp_path):
    grid = tagged_grid()
    given = {"clients_per_round": 4} if isinstance(selector, str) else {}
    bounds = {"at_least": {"site": 1}, "at_most": {"site": {"a": 1}}}
    run(selector, grid, folder=tmp_path, **bounds, **given)
    for line in lines(tmp_path):
        assert sites_of(line) in ("abbc", "abcc")
        assert "unmet" not in line
    assert read_run(tmp_path).header["config"]["rules"] == bounds


def test_only_eligible_clients_train_and_are_asked(tmp_path):
    grid = tagged_grid(charging=[k % 2 == 0 for k in range(10)])
    run(FedCor(2, **QUICK), grid, folder=tmp_path, eligible={"site": ["b", "c"], "charging": True})
    assert {k for line in lines(tmp_path) for k in line["selected"]} <= {4, 6, 8}
    asked = {
        message.metadata.dst_node_id
        for message in grid.sent
        if message.content.config_records.get(NOTE, {}).get("ask") != "identity"
    }
    assert asked == {grid.node_of(k) for k in (4, 6, 8)}
    assert lines(tmp_path)[0]["probed"] == 2 * 3


def test_a_function_of_the_name_and_the_configuration_says_who_is_eligible(tmp_path):
    def eligible(name, tags):
        return name != "partition-9" and tags["site"] == "c"

    grid = tagged_grid()
    run(Random(2), grid, rounds=3, folder=tmp_path, eligible=eligible)
    assert [line["selected"] for line in lines(tmp_path)] == [[8]] * 3
    assert questions(grid)[0]["tags"] == [EVERY_TAG]
    with pytest.raises(FedcorError, match=r"`eligible` failed for client partition-0: KeyError"):
        run(Random(2), tagged_grid(), rounds=1, eligible=lambda name, tags: tags["nothing"])


def test_clients_per_round_change_with_flowers_round_from_one_also_after_a_restart(tmp_path):
    schedule = {1: 2, 3: 4, 6: 3}
    settings = {"clients_per_round": schedule, "at_most": {"site": 2}}
    for name, rounds in (("whole", [6]), ("parts", [2, 4, 6])):
        for number in rounds:
            run("round_robin", tagged_grid(), number, folder=tmp_path / name, **settings)
    whole, parts = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    assert [len(line["selected"]) for line in whole] == [2, 2, 4, 4, 4, 3]
    assert [line["selected"] for line in parts] == [line["selected"] for line in whole]
    with pytest.raises(RecordError, match=r"rules.clients_per_round.6 is 3 there, 5 here"):
        other = {**settings, "clients_per_round": {1: 2, 3: 4, 6: 5}}
        run("round_robin", tagged_grid(), 6, folder=tmp_path / "whole", **other)


@pytest.mark.parametrize(
    ("clients_per_round", "expected"),
    [({1: 2, 2: 4}, [2, 4, 4]), (lambda t: 1 + t, [2, 3, 4])],
)
def test_a_schedule_goes_with_fedcor_and_with_a_selector_object(
    clients_per_round, expected, tmp_path
):
    settings = {"probe_timeout": 0.05, "wait_for": 10, "clients_per_round": clients_per_round}
    for name, strategy in (
        (
            "fedcor",
            FedCorStrategy(strategy=quiet(), checkpoint=tmp_path / "fedcor", **QUICK, **settings),
        ),
        ("object", select_with(quiet(), Random(7), checkpoint=tmp_path / "object", **settings)),
    ):
        strategy.start(tagged_grid(), initial(), num_rounds=3, timeout=0.05)
        assert [len(line["selected"]) for line in lines(tmp_path / name)] == expected


def test_the_first_round_waits_for_as_many_nodes_as_it_needs():
    assert select_with(FedAvg(), Random(7), clients_per_round={1: 5})._run.wait_for == 5
    assert FedCorStrategy({1: 5, 9: 2})._run.wait_for == 5


# --- what cannot be met ---------------------------------------------------------------------------


def test_what_nodes_that_left_make_impossible_is_logged_once_and_recorded(tmp_path, caplog):
    grid = tagged_grid()
    selecting = select_with(
        quiet(),
        Random(4),
        checkpoint=tmp_path,
        wait_for=10,
        at_least={"site": 1},
        on_round=lambda record: change(record.round),
    )

    def change(round):
        if round == 1:
            grid.leave(8), grid.leave(9)
        if round == 3:
            for partition in (8, 9):
                node = grid.join(partition)
                grid.contexts[node].node_config["site"] = "c"

    with logged(caplog, logging.INFO):
        selecting.start(grid, initial(), num_rounds=6, timeout=0.1)
    assert [line.get("unmet") for line in lines(tmp_path)] == [
        *(None, None, {"site=c": 1}, {"site=c": 1}, None, None)
    ]
    assert [sites_of(line).count("c") > 0 for line in lines(tmp_path)] == [
        *(True, True, False, False, True, True)
    ]
    said = [r.getMessage() for r in caplog.records if "rules" in r.getMessage()]
    assert said[-2:] == [
        "round 3: not all rules can be met with the clients that can be reached: site=c lacks 1",
        "round 5: all rules are met",
    ]


def test_fewer_clients_than_the_maxima_allow_are_recorded(tmp_path):
    run(Random(5), tagged_grid(), rounds=2, folder=tmp_path, at_most={"site": 1})
    assert [sites_of(line) for line in lines(tmp_path)] == ["abc", "abc"]
    assert [line["unmet"] for line in lines(tmp_path)] == [{"clients_per_round": 2}] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at_least": {"sitte": 1}}, r"at_least.sitte = 1: no client has this tag \(it is set in"),
        ({"at_least": {"site": 2}}, r"at_least.site = 2: needs 6 clients in a round, but 4 are"),
    ],
)
def test_rules_that_can_never_be_kept_end_the_first_round_with_the_reason(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(Random(4), tagged_grid(), rounds=1, **settings)


def test_a_site_that_joins_later_does_not_end_a_run_nor_keep_it_from_resuming(tmp_path, caplog):
    """Two seats, and at least one client of each of three sites."""
    sites = "aabb" + "c"
    settings = {"at_least": {"site": 1}, "folder": tmp_path}
    run(Random(2), tagged_grid(sites[:4]), rounds=2, **settings)
    for rounds in (3, 4):
        run(Random(2), tagged_grid(sites), rounds=rounds, **settings)
    assert [sum(line.get("unmet", {}).values()) for line in lines(tmp_path)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("selector", "settings", "message"),
    [
        (Random(3), {"at_least": {"site": {"a": 2, "b": 2}}}, "needs 4 clients in a round, but 3"),
        (Random(3), {"at_least": {"site": 3}, "at_most": {"site": 2}}, "must not be above at_most"),
        (Full(), {"at_most": {"site": 2}}, "which Full has not"),
        (Random(3), {"clients_per_round": 4}, "is set by the selector that you gave"),
        ("random", {"clients_per_round": {2: 4}}, "how many clients there are in round 1"),
        ("random", {"clients_per_round": 2.5}, "clients_per_round = 2.5: must be a whole number"),
        (PowerOfChoice(3, 4), {"clients_per_round": {1: 5}}, "candidates = 4: must be at least"),
        (Random(3), {"at_mots": {}}, 'did you mean "at_most"'),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(selector, settings, message):
    with pytest.raises(ConfigError, match=message):
        select_with(FedAvg(), selector, **settings)


def test_a_run_waits_while_nobody_is_eligible_and_says_so(tmp_path, caplog, monkeypatch):
    grid, looks = tagged_grid("aa"), []

    def sleep(_seconds):
        looks.append(1)
        if len(looks) == 3:
            grid.contexts[grid.join(7)].node_config["site"] = "b"

    monkeypatch.setattr(attendance_module.time, "sleep", sleep)
    with logged(caplog):
        run(Random(1), grid, rounds=1, folder=tmp_path, eligible={"site": "b"})
    waiting = "round 1: no eligible client among 2 clients that can be reached (0 s)"
    assert [r.getMessage() for r in caplog.records].count(waiting) == 1
    assert lines(tmp_path)[0]["selected"] == [2]


def test_an_eligible_client_that_failed_is_tried_again_where_no_other_is(tmp_path):
    """It would be left alone for some rounds; those who are not eligible are no reason for that."""
    grid = tagged_grid("ab")
    failures = iter([True, False, False, False])

    def fails(message, reply):
        return None if message.metadata.message_type == "train" and next(failures) else reply

    grid.trouble[1] = fails
    run(Random(1), grid, rounds=2, folder=tmp_path, eligible={"site": "b"})
    assert [line["participated"] for line in lines(tmp_path)] == [[1], [1]]


# --- tags on the wire -----------------------------------------------------------------------------


def test_without_rules_nothing_more_is_asked_and_recorded(tmp_path):
    grid = tagged_grid()
    run(Random(4), grid, rounds=1, folder=tmp_path)
    assert {tuple(note) for note in questions(grid)} == {("ask",)}
    assert "rules" not in read_run(tmp_path).header["config"]


def test_nodes_are_asked_for_the_tags_of_the_rules_alone():
    grid, answers = tagged_grid(secret=["x"] * 10), []

    def listen(_message, reply):
        answers.append(reply.content.config_records.get(NOTE))
        return reply

    grid.trouble[0] = listen
    run(Random(4), grid, rounds=1, at_least={"site": 1}, eligible={"partition-id": list(range(9))})
    assert questions(grid)[0]["tags"] == ["partition-id", "site"]
    versions = ("protocol", "fedcor", "flwr")
    assert {key: value for key, value in answers[0].items() if key not in versions} == {
        **{"partition": 0, "examples": 10, "tags": True},
        **{"tag.partition-id": 0, "tag.site": "a"},
    }


def test_an_app_may_say_further_tags(tmp_path, caplog):
    def tags(context):
        if context.node_config["partition-id"] == 3:
            raise ValueError("no battery")
        return {"battery": "low" if context.node_config["partition-id"] < 3 else "full"}

    app = numpy_app([answers_probes(tags=tags)])
    with logged(caplog):
        run(Random(1), MemoryGrid(app, 5), 4, folder=tmp_path, eligible={"battery": "full"})
    assert {k for line in lines(tmp_path) for k in line["selected"]} == {4}
    assert "answers_probes: tags() failed" in caplog.text


@pytest.mark.parametrize("mods", [[], ["old"]], ids=["no mod", "an older mod"])
def test_clients_that_cannot_say_their_tags_are_logged_once(mods, tmp_path, caplog):
    def older(message, context, call_next):
        note = message.content.config_records.get(NOTE)
        if note is not None and note["ask"] == "identity":
            partition = int(context.node_config["partition-id"])
            known = ConfigRecord({"partition": partition})
            return Message(RecordDict({NOTE: known}), reply_to=message)
        return answers_probes()(message, context, call_next)

    def some_have_it(message, context, call_next):
        other = int(context.node_config["partition-id"]) < 3
        mod = (older if mods else lambda m, c, n: n(m, c)) if other else answers_probes()
        return mod(message, context, call_next)

    grid = tagged_grid("aaab", app=numpy_app([some_have_it]))
    with logged(caplog):
        run(Random(2), grid, rounds=3, folder=tmp_path, eligible={"site": ["a", "b"]})
    assert all(len(line["selected"]) == 1 for line in lines(tmp_path))
    said = [r.getMessage() for r in caplog.records if "without tags" in r.getMessage()]
    assert len(said) == 1
    assert "rules: 3 clients without tags and therefore not eligible (" in said[0]


def test_a_function_that_needs_no_tags_works_without_the_mod(tmp_path):
    grid = tagged_grid(app=numpy_app([]))
    known = "key-" if SAYS_KEYS else "node-"  # what Flower can say of a node
    run(Random(2), grid, rounds=1, folder=tmp_path, eligible=lambda name, _: name.startswith(known))
    assert len(lines(tmp_path)[0]["selected"]) == 2


def test_tags_have_bounds_on_both_sides():
    many = {f"tag{k:02}": k for k in range(40)}
    odd = {"long": "x" * 201, "n" * 201: 1, "nan": float("nan"), "list": [1], "": 1, "big": 2**70}
    everything, answer = ConfigRecord({"tags": [EVERY_TAG]}), ConfigRecord()
    write_tags(answer, everything, {**odd, "ok": True})
    assert read_tags(answer) == {"ok": True}
    answer = ConfigRecord()
    write_tags(answer, everything, many)
    assert len(read_tags(answer)) == 32
    for name, value in many.items():
        answer[f"tag.{name}"] = value
    answer["tag.long"], answer["tag.bytes"] = "x" * 500, b"x"
    assert set(read_tags(answer).values()) <= set(range(40))
    assert len(read_tags(answer)) <= 32


def test_a_rival_does_not_change_the_tags_of_the_client_that_it_claims_to_be():
    roster = Roster()
    roster.enrol({1: Claim("one", tags={"site": "a"}), 2: Claim("two", tags={})})
    roster.enrol({3: Claim("one", tags={"site": "b"})})
    assert roster.tags(0) == {"site": "a"}
    roster.connect([2, 3])
    assert roster.tags(0) == {"site": "b"}
    again = Roster.from_arrays(roster.to_arrays())
    assert [again.tags(k) for k in range(2)] == [{"site": "b"}, {}]
    again.enrol({9: Claim("one", tags={"site": "c"})})
    assert again.tags(0) == {"site": "c"}
    plain = Roster()
    plain.enrol({1: Claim("one")})
    assert "tags" not in plain.to_arrays()
    assert Roster.from_arrays(plain.to_arrays()).tags(0) is None


def test_a_site_that_is_away_after_a_restart_is_still_missed(tmp_path):
    settings = {"at_least": {"site": 1}, "folder": tmp_path}
    run(Random(3), tagged_grid("aabbcc"), rounds=1, **settings)
    grid = tagged_grid("aabbcc")
    grid.leave(4), grid.leave(5)
    run(Random(3), grid, rounds=2, **settings)
    assert lines(tmp_path)[1]["unmet"] == {"site=c": 1}


# --- the shape ------------------------------------------------------------------------------------


def test_both_ways_to_make_a_strategy_have_every_setting():
    fields = {*inspect.signature(SelectionSettings).parameters}
    assert fields == {*inspect.get_annotations(SelectionKeywords), "clients_per_round"}
    for function in (select_with, FedCorStrategy):
        assert fields <= {*inspect.signature(function).parameters}


def test_an_experiment_with_rules_is_the_same_on_flower(tmp_path):
    """Tags from the experiment, rounds from 0, functions of client ids."""
    for number, rules in enumerate(
        [
            {"at_least": {"site": 1}, "clients_per_round": {0: 2, 2: 3}},
            {"eligible": lambda k, tags: k != 1 and tags["site"] == "a"},
            {"eligible": {"site": "a"}, "clients_per_round": lambda t: 1 + t % 2},
        ]
    ):
        for selector in ("random", "fedcor"):
            one = experiment(
                fedcor.FedAvg(), selector, rules=rules, tags={"site": {"a": "0-3", "b": [4, 5]}}
            )
            ours, theirs = tmp_path / f"{number}{selector}", tmp_path / f"{number}{selector}-flower"
            simulate(one, 1, ours)
            flower, simulated = on_flower(one, theirs), read_run(ours).rounds
            for key in ("selected", "test_loss", "why", "probed"):
                assert [line[key] for line in flower] == [line[key] for line in simulated]
            assert len(np.unique([len(line["selected"]) for line in flower])) == 1 + (number != 1)


@pytest.mark.parametrize("optimiser", [fedcor.FedRecall(), fedcor.MIFA(wait=True)], ids=repr)
def test_on_flower_an_optimiser_counts_the_clients_that_may_be_chosen_as_in_the_simulator(
    optimiser, tmp_path
):
    one = experiment(
        optimiser, "random", rules={"eligible": {"site": "a"}}, tags={"site": {"a": "0-3"}}
    )
    simulate(one, 1, tmp_path / "ours")
    flower, simulated = on_flower(one, tmp_path / "flower"), read_run(tmp_path / "ours").rounds
    for key in ("selected", "test_loss", "memory_bytes"):
        assert [line[key] for line in flower] == [line[key] for line in simulated]
    _, memory = end_of(tmp_path / "flower")
    assert np.flatnonzero(memory["scales"]).tolist() == [0, 1, 2, 3]


def test_a_node_that_is_let_in_later_counts_from_then_on(tmp_path):
    """And not before: MIFA moves as soon as it has seen everyone who may be chosen."""
    late, rounds = [], []

    def eligible(name, _tags):
        return not name.endswith("-3") or bool(late)

    def score(server_round, arrays):
        rounds.append(float(arrays["w"].numpy()[0]))
        late.extend([3] if server_round == 2 else [])

    strategy = OptimiserStrategy(fedcor.MIFA(wait=True), fraction_evaluate=0.0)
    made = select_with(strategy, Full(), eligible=eligible, checkpoint=tmp_path)
    made.start(MemoryGrid(numpy_app(), 4), initial(), 4, evaluate_fn=score)
    assert [len(line["selected"]) for line in lines(tmp_path)] == [3, 3, 4, 4]
    assert len(set(rounds)) == len(rounds)
