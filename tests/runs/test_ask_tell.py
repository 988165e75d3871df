"""`Rounds`: the same choices as the simulator, whatever comes back, and after any kill."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import fedcor
from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.runs.record import read_run
from fedcor.selectors import selector_names
from fedcor.simulation.build import build_simulation
from fedcor.simulation.server_step import next_model

EARLY = {"warmup": 2, "interval": 2, "warmup_steps": 30, "refit_steps": 20}
N = 12


def pull(model, client):
    """Local training: half of the way to the client's own number."""
    return model + 0.5 * (client - model)


def far(model, client):
    """The client's loss."""
    return float(np.mean((model - client) ** 2))


def make(selector="random", model=None, **more):
    model = np.zeros(3) if model is None else model
    named = isinstance(selector, str)
    given = {"clients_per_round": 3} if named and "clients_per_round" not in more else {}
    return fedcor.Rounds(selector, model, **{"sizes": [10] * N, **given, **more})


def play(rounds, until, train=pull, evaluate=far, available=None):
    """Ask and tell by hand."""
    asked = []
    while rounds.number < until:
        ask = rounds.ask(available(rounds.number) if available else None)
        asked.append((ask.kind, ask.clients, ask.trial, ask.round))
        if ask.kind == "losses":
            rounds.tell(ask, losses={k: evaluate(ask.model, k) for k in ask.clients})
        else:
            losses = {k: evaluate(ask.model, k) for k in ask.clients}
            rounds.tell(ask, models={k: train(ask.model, k) for k in ask.clients}, losses=losses)
    return asked


def chosen(rounds):
    return [record.selected for record in rounds.record]


# --- the same as the simulator --------------------------------------------------------------------


class Twin:
    """The simulator's own clients and step, for a loop of one's own."""

    def __init__(self, name: str, availability: float) -> None:
        experiment = fedcor.experiment(
            "digits",
            selector=name,
            rounds=6,
            faults={"availability": availability},
            **({"selectors": {name: EARLY}} if name in ("fedcor", "proxy") else {}),
        )
        self.simulation = build_simulation(experiment, seed=3)

    def flat(self, model):
        return torch.cat([torch.from_numpy(part).reshape(-1) for part in model])

    def parts(self, vector):
        return [part.numpy() for part in self.simulation.engine.vector.split(vector)]

    def train(self, model, client, t):
        engine, rate = self.simulation.engine, self.simulation.learning_rate.at(t)
        return self.parts(engine.train(self.flat(model), [client], t, rate)[0])

    def losses(self, model, clients, kind="losses"):
        engine = self.simulation.engine
        values = getattr(engine, kind)(self.flat(model), np.array(clients))
        return dict(zip(clients, values.tolist(), strict=True))

    def aggregate(self, ask, models, memory):
        engine = self.simulation.engine
        return next_model(
            self.simulation.optimiser,
            memory,
            self.flat(ask.model),
            torch.stack([self.flat(models[k]) for k in ask.clients]),
            engine.vector.trained,
            round=ask.round,
            clients=np.array(ask.clients),
            weights=np.array(list(ask.weights.values())),
            steps=np.full(len(ask.clients), engine.local_training.local_steps),
            learning_rate=self.simulation.learning_rate.at(ask.round),
        )

    def play(self, until):
        """Through ask and tell."""
        s, models = self.simulation, {}
        memory, steps = s.optimiser_start, s.engine.local_training.local_steps
        rounds = fedcor.Rounds(
            s.selector,
            self.parts(s.engine.initial_model),
            sizes=s.engine.population.sizes,
            optimiser="own",
            seed=3,
            learning_rate=s.learning_rate.at,
        )
        while rounds.number < until:
            state = dataclasses.replace(s.start, round=rounds.number)
            ask = rounds.ask(s.open_round(state).available)
            clients = ask.clients
            if ask.kind == "losses":
                rounds.tell(ask, losses=self.losses(ask.model, clients))
            elif ask.kind == "train":
                models |= {k: self.train(ask.model, k, ask.round) for k in clients}
                rounds.tell(
                    ask,
                    models={k: models[k] for k in clients},
                    losses=self.losses(ask.model, clients),
                    rms_losses=self.losses(ask.model, clients, "rms_losses"),
                    steps=dict.fromkeys(clients, steps),
                )
            else:
                vector, after = self.aggregate(ask, models, memory)
                memory = memory if ask.trial else after
                rounds.tell(ask, model=self.parts(vector))
        return rounds


@pytest.mark.parametrize("availability", [1.0, 0.7])
@pytest.mark.parametrize("name", selector_names())
def test_every_selector_chooses_as_in_the_simulator(name, availability):
    twin = Twin(name, availability)
    records = [record for record, _ in twin.simulation.run(6)]
    rounds = twin.play(6)
    assert chosen(rounds) == [record.selected for record in records]
    assert [r.why for r in rounds.record] == [r.why for r in records]
    assert [r.probed for r in rounds.record] == [r.probed for r in records]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(selector_names()), st.integers(0, 2**31), st.integers(0, 2**31))
def test_short_form_and_ask_and_tell_choose_the_same_under_faults(name, seed, faults):
    """Clients that are away, silent, or send nonsense: both loops meet the same ones."""

    def fate(purpose, client):
        return np.random.default_rng([faults, purpose, now.number, int(client)]).random()

    def here():
        return [k for k in range(N) if fate(0, k) > 0.2] or [0]

    def train(model, client):
        drawn = fate(1, client)
        if drawn < 0.1:
            return None
        trained = model * np.nan if drawn < 0.2 else pull(model, client)
        return trained, {"loss": far(model, client)}

    def evaluate(model, client):
        return None if fate(2, client) < 0.1 else far(model, client)

    options = {"selector": name, "seed": seed, "attempts": 50}
    short = now = make(**options, train=train, evaluate=evaluate)
    short.run(8, here)
    long = now = make(**options)
    while long.number < 8:
        ask = long.ask(here())
        answer = evaluate if ask.kind == "losses" else train
        came = {k: sent for k in ask.clients if (sent := answer(ask.model, k)) is not None}
        if ask.kind == "losses":
            long.tell(ask, losses=came)
        else:
            losses = {k: about["loss"] for k, (_, about) in came.items()}
            models = {k: model for k, (model, _) in came.items()}
            failed = {k: "train returned None" for k in ask.clients if k not in came}
            long.tell(ask, models=models, losses=losses, failures=failed)
    assert timeless(long) == timeless(short)


def timeless(rounds):
    return repr([dataclasses.replace(record, seconds=0.0) for record in rounds.record])


# --- what is asked --------------------------------------------------------------------------------


def test_a_trial_that_is_chosen_is_not_trained_again():
    rounds = make(fedcor.FedCor(3, **{**EARLY, "dimension": 2}))
    asked = play(rounds, 2)
    kinds = [(kind, trial) for kind, _, trial, _ in asked]
    # Warm-up: losses of the model, a trial, losses of what it makes; and the trial is the choice.
    assert kinds[:3] == [("losses", False), ("train", True), ("losses", True)]
    assert kinds[3:] == [("train", True), ("losses", True)]  # the losses of the model are known
    assert rounds.record[0].selected
    assert set(rounds.record[0].selected) == set(asked[1][1])


def test_clients_that_train_for_a_trial_alone_are_recorded():
    rounds = make(fedcor.FedCor(3, **{**EARLY, "dimension": 2}))
    asked = play(rounds, 6)
    trained = {}
    for kind, clients, _, t in asked:
        if kind == "train":
            trained.setdefault(t, set()).update(clients)
    refits = [record for record in rounds.record if "tried" in record.details]
    assert refits
    for record in refits:
        assert set(record.details["tried"]) == trained[record.round] - set(record.selected)


def test_the_same_question_until_it_is_told():
    rounds = make("power_of_choice")
    first = rounds.ask()
    assert rounds.ask([1, 2]) is first
    assert first.kind == "losses"
    rounds.tell(first, losses=dict.fromkeys(first.clients, 1.0))
    second = rounds.ask()
    assert second.kind == "train"
    assert second.number == first.number + 1


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"accuracy": 0.5}, "of kind 'train': tell models, updates, losses"),
        ({"models": {99: np.zeros(3)}}, r"not asked \(99\); asked were"),
        ({"models": [np.zeros(3)]}, "must be a dictionary"),
        ({"losses": {}}, "tell models or updates"),
        ({"models": {}, "updates": {}}, "models or updates, not both"),
        ({"losses": {"first": "low"}, "models": {}}, "must be a number"),
    ],
)
def test_nonsense_is_refused_and_the_question_stays_open(told, message):
    rounds = make("random")
    ask = rounds.ask()
    told = {key: _with_first(value, ask) for key, value in told.items()}
    with pytest.raises(FedcorError, match=message):
        rounds.tell(ask, **told)
    assert rounds.ask() is ask
    rounds.tell(ask, models={k: pull(ask.model, k) for k in ask.clients})
    assert rounds.number == 1


def _with_first(value, ask):
    return (
        {ask.clients[0]: value["first"]} if isinstance(value, dict) and "first" in value else value
    )


def test_telling_twice_or_the_wrong_one_says_which_is_open():
    rounds, other = make(), make()
    with pytest.raises(FedcorError, match=r"No question is open: call ask\(\)"):
        rounds.tell(other.ask(), models={})
    ask = rounds.ask()
    rounds.tell(ask, models={k: pull(ask.model, k) for k in ask.clients})
    with pytest.raises(FedcorError, match="question 0 is not open: it was told before"):
        rounds.tell(ask, models={})
    rounds.ask()
    with pytest.raises(FedcorError, match=r"question 0 is not open.*question 1 \(train, round 1\)"):
        rounds.tell(ask, models={})


# --- what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        np.full(3, np.nan),
        np.array([0.0, np.inf, 0.0]),
        np.zeros(4),
        np.array(["a", "b", "c"]),
        np.full(3, 1e30),
        None,
        {"other": np.zeros(3)},
        "text",
    ],
)
def test_unusable_updates_are_refused_counted_and_never_reach_the_model(wrong):
    rounds = make("full", clients_per_round=3)
    ask = rounds.ask()
    models = {k: pull(ask.model, k) for k in ask.clients}
    rounds.tell(ask, models={**models, 5: wrong})
    record = rounds.record[0]
    assert record.refused == 1
    assert record.missing == {"refused": [5]}
    assert list(record.refused_updates.values()) == [[5]]
    expected = np.mean([pull(np.zeros(3), k) for k in range(N) if k != 5], axis=0)
    assert np.allclose(rounds.model, expected)


def test_nan_losses_are_counted_and_missing_ones_are_not():
    rounds = make("power_of_choice")
    ask = rounds.ask()
    first, second, *rest = ask.clients
    rounds.tell(
        ask, losses={first: np.nan, **dict.fromkeys(rest, 1.0)}, failures={second: "disk full"}
    )
    play(rounds, 1)
    assert rounds.record[0].refused == 1
    assert first not in rounds.record[0].selected
    assert second not in rounds.record[0].selected


def test_a_round_is_tried_with_others_and_then_given_up():
    rounds = make("random", attempts=3)
    tried = []
    for _ in range(2):
        ask = rounds.ask()
        tried.append(set(ask.clients))
        rounds.tell(ask, models={}, failures=dict.fromkeys(ask.clients, "out of memory"))
    ask = rounds.ask()
    assert not tried[0] & tried[1]
    with pytest.raises(
        FedcorError, match=r"round 0: no client delivered.*3 attempts.*out of memory"
    ):
        rounds.tell(ask, models={})
    play(rounds, 1)  # the round begins anew
    assert rounds.number == 1


def test_a_bad_model_is_replaced_by_the_last_good_one():
    rounds = make("random", np.ones(2), attempts=2)
    play(rounds, 2)
    good = rounds.model
    play(rounds, 3)
    broken = {k: np.full(2, np.nan) for k in range(N)}
    while not rounds.record[-1].rolled_back:
        ask = rounds.ask()
        rounds.tell(ask, models={k: broken[k] for k in ask.clients})
    assert_array_equal(rounds.model, good)
    assert rounds.record[-1].participated == []
    play(rounds, 5)
    assert rounds.record[-1].participated


def test_clients_that_fail_again_and_again_are_left_alone():
    rounds = make("round_robin", clients_per_round=6)
    seen = []
    while rounds.number < 12:
        ask = rounds.ask()
        seen.append(0 in ask.clients)
        rounds.tell(
            ask,
            models={k: pull(ask.model, k) for k in ask.clients if k},
            failures={0: "broken"} if 0 in ask.clients else {},
        )
    assert sum(seen) < 6
    assert any(record.quarantined == [0] for record in rounds.record)


def test_after_an_outage_others_are_asked():
    rounds = make("random", sizes=[10] * 60, clients_per_round=2, attempts=3)
    asked, tries = set(), 0
    while len(asked) < 40 and tries < 40:
        tries += 1
        with pytest.raises(FedcorError, match="3 attempts"):
            while True:
                ask = rounds.ask()
                asked |= set(ask.clients)
                rounds.tell(ask, models={})
    assert len(asked) >= 40


def test_two_broken_clients_do_not_replace_a_good_model():
    rounds = make("round_robin", sizes=[10] * 10, clients_per_round=1)
    while rounds.number < 30:
        ask = rounds.ask()
        wrong = {3, 4} & set(ask.clients)
        models = {k: np.full(3, np.nan) if k in wrong else pull(ask.model, k) for k in ask.clients}
        rounds.tell(ask, models=models)
    assert not any(record.rolled_back for record in rounds.record)


def test_a_jump_in_everyones_updates_does_not_stop_the_run():
    for attempts in (1, 3):
        rounds = make("random", sizes=[10] * 6, attempts=attempts)
        failed = 0
        while rounds.number < 6 and failed < 10:
            ask = rounds.ask()
            size = 1e-6 if rounds.number < 2 else 1.0
            try:
                rounds.tell(ask, updates={k: np.full(3, size) for k in ask.clients})
            except FedcorError:
                failed += 1
        assert rounds.number == 6


def test_bytes_count_what_was_sent_in_all_attempts():
    rounds = make("power_of_choice", sizes=[10] * 6, clients_per_round=2)
    size, answer = 24, 4
    first = rounds.ask()
    rounds.tell(first, losses=dict.fromkeys(first.clients, 1.0))
    silent = rounds.ask()
    rounds.tell(silent, models={})
    again = rounds.ask()
    asked = len(first.clients)
    if again.kind == "losses":
        rounds.tell(again, losses=dict.fromkeys(again.clients, 1.0))
        asked += len(again.clients)
        again = rounds.ask()
    rounds.tell(again, models={k: pull(again.model, k) for k in again.clients})
    record = rounds.record[0]
    holders = {*first.clients, *silent.clients, *again.clients}
    assert record.bytes_up == asked * answer + 2 * size
    assert record.bytes_down >= len(holders) * size
    assert record.bytes_down <= (asked + 2) * size


def test_enough_of_those_who_were_asked_suffice():
    rounds = make("random", clients_per_round=4, over_selection=1.5)
    ask = rounds.ask()
    assert (len(ask.clients), ask.enough) == (6, 4)
    rounds.tell(ask, models={k: pull(ask.model, k) for k in ask.clients[:4]})
    assert rounds.record[0].missing == {"late": list(ask.clients[4:])}
    assert not rounds._machine.state.backoff["faults"].any()  # nobody is blamed


def test_availability_and_names():
    sizes = {f"site-{k}": 10 + k for k in range(5)}
    rounds = make("random", sizes=sizes, clients_per_round=2)
    ask = rounds.ask(["site-3", "site-1"])
    assert sorted(ask.clients) == ["site-1", "site-3"]
    rounds.tell(ask, updates={"site-1": np.ones(3), "site-3": np.full(3, 3.0)})
    assert np.allclose(rounds.model, 2.0)
    rounds.join({"site-9": 7})
    assert rounds.ask(["site-9"]).clients == ("site-9",)
    with pytest.raises(ConfigError, match="site-x"):
        make("random", sizes=sizes).ask(["site-x"])
    with pytest.raises(ConfigError, match="at least one client"):
        make("random").ask([])


@pytest.mark.parametrize("name", selector_names())
def test_clients_may_join_under_every_selector(name):
    rounds = make(name)
    play(rounds, 3)
    rounds.join({100: 10, 101: 20})
    play(rounds, 8, train=lambda m, k: pull(m, k % 100))
    assert rounds.number == 8


# --- models ---------------------------------------------------------------------------------------


def forms():
    weights = {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)}
    yield np.zeros(3)
    yield [np.zeros((2, 2)), np.zeros(2)]
    yield (np.zeros(2), np.zeros(1))
    yield weights
    yield {name: torch.from_numpy(value) for name, value in weights.items()}


def arrays_of(model):
    if isinstance(model, dict):
        return list(model.values())
    return model if isinstance(model, list | tuple) else [model]


@pytest.mark.parametrize(
    "model", list(forms()), ids=["array", "list", "tuple", "dict", "state dict"]
)
def test_models_come_back_in_their_own_form(model):
    def add(model, client):
        if isinstance(model, dict):
            return {name: value + client for name, value in model.items()}
        if isinstance(model, list | tuple):
            return type(model)(value + client for value in model)
        return model + client

    rounds = make("full", model, train=add)
    after = rounds.run(until=1)
    assert type(after) is type(model)
    values, before = map(arrays_of, (after, model))
    for one, old in zip(values, before, strict=True):
        assert type(one) is type(old)
        assert one.dtype == old.dtype
        assert float(one.mean()) == pytest.approx(np.mean(range(N)))


def test_batch_norm_statistics_and_counters_are_averaged_and_keep_their_type():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()

    def train(model, client):
        return {name: value + client for name, value in model.items()}

    after = make("full", state, train=train, optimiser="fedavgm").run(until=1)
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert int(after["1.num_batches_tracked"]) == round(np.mean(range(N)))
    assert torch.allclose(after["1.running_var"], torch.full((2,), 1 + np.mean(range(N))).float())
    module.load_state_dict(after)


def test_a_user_may_change_the_model_that_it_was_given():
    def train(model, client):
        model += client  # in place
        return model

    rounds = make("full", np.zeros(2), train=train)
    assert np.allclose(rounds.run(until=1), np.mean(range(N)))


def test_one_module_for_all_clients_and_the_users_own_arrays_are_not_shared():
    net = torch.nn.Linear(1, 1, bias=False)

    def train(model, client):
        net.load_state_dict(model)
        with torch.no_grad():
            net.weight += client
        return net.state_dict()  # the module's own tensors

    initial = {"weight": torch.zeros(1, 1)}
    rounds = make("full", initial, train=train)
    initial["weight"] += 100.0
    assert float(rounds.run(until=1)["weight"]) == pytest.approx(np.mean(range(N)))


def test_models_that_are_the_same_memory_are_refused():
    net = torch.nn.Linear(1, 1)
    rounds = make("full", net.state_dict())
    ask = rounds.ask()
    with pytest.raises(FedcorError, match="clients 0 and 1 are the same memory"):
        rounds.tell(ask, models={k: net.state_dict() for k in ask.clients})
    same = np.zeros(3)
    rounds = make("full")
    with pytest.raises(FedcorError, match="same memory"):
        rounds.tell(rounds.ask(), models=dict.fromkeys(range(N), same))


def test_weights_in_the_mean_are_equal_unless_you_say_so():
    sizes = [10, 10, 10, 70]
    for optimiser in ("fedavg", "own"):
        for weighted, expected in ((None, 1.5), (True, 2.4)):
            rounds = make("full", np.zeros(1), sizes=sizes, optimiser=optimiser, weighted=weighted)
            ask = rounds.ask()
            sent = {k: np.array([float(k)]) for k in ask.clients}
            rounds.tell(ask, models=sent)
            if optimiser == "own":
                ask = rounds.ask()
                rounds.tell(ask, model=sum(w * sent[k] for k, w in ask.weights.items()))
            assert rounds.model[0] == pytest.approx(expected)
    with pytest.raises(ConfigError, match="weighted"):
        make("random", optimiser="multi_krum", weighted=True)
    with pytest.raises(ConfigError, match="optimiser"):
        make("random", optimizer="fedavg")


def test_who_failed_and_why_is_logged_and_told_apart(caplog):
    rounds = make("full")
    ask = rounds.ask()
    models = {k: pull(ask.model, k) for k in ask.clients if k > 2}
    rounds.tell(ask, models={**models, 2: np.zeros(9)}, failures={1: "CUDA out of memory"})
    assert rounds.record[0].missing == {"dropped": [0], "failed": [1], "refused": [2]}
    assert "1: CUDA out of memory" in caplog.text


def test_updates_of_another_shape_and_numbers_that_do_not_fit_are_refused():
    rounds = make("full", {"w": np.zeros(3), "n": np.array([250], np.uint8)})
    ask = rounds.ask()
    updates = {k: {"w": np.ones(3), "n": np.array([1], np.uint8)} for k in ask.clients}
    updates[1] = {**updates[1], "w": np.array(7.0)}  # would be broadcast
    updates[2] = {**updates[2], "n": np.array([10], np.uint8)}  # 260 would wrap to 4
    updates[3] = {**updates[3], "w": np.zeros(3, np.int64)}  # rounded by somebody
    updates[4] = {**updates[4], "n": np.array([0.5])}
    rounds.tell(ask, updates=updates)
    assert rounds.record[0].missing == {"refused": [1, 2, 3, 4]}
    assert_array_equal(rounds.model["n"], [251])


def test_large_counters_and_half_precision_survive_the_mean():
    model = {"w": np.full(1, 6e4, np.float16), "n": np.array(2**62 + 1)}
    rounds = make("full", model, defence={"clip_norms": 0.0, "refuse_norms": 0.0})
    for _ in range(3):
        ask = rounds.ask()
        sent = {k: {"w": np.full(1, 3e3, np.float16), "n": np.array(0)} for k in ask.clients}
        rounds.tell(ask, updates=sent)
    assert rounds.model["n"] == 2**62 + 1
    assert np.isfinite(rounds.model["w"]).all()


def test_keys_of_a_dictionary_come_back_as_they_are():
    after = make("full", {0: np.zeros(1), 1: np.ones(2)}, train=lambda m, k: m).run(until=1)
    assert list(after) == [0, 1]
    with pytest.raises(FedcorError, match="same name"):
        make("full", {1: np.zeros(1), "1": np.ones(2)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": 5}, "must be a list of numbers"),
        ({"sizes": [3, -1]}, "sizes"),
        ({"learning_rat": 0.1}, "learning_rate"),
        ({"tests": "no"}, "True or False"),
        ({"model": np.array([np.nan])}, "NaN"),
        ({"model": torch.zeros(2, dtype=torch.bfloat16)}, "use float32"),
        ({"model": torch.nn.Linear(1, 1)}, "state_dict"),
        ({"selector": "randum"}, "random"),
        ({"optimiser": "fedavgg"}, "fedavg"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_the_users_words(given, message):
    with pytest.raises(FedcorError, match=message):
        make(**given)
    with pytest.raises(ConfigError, match="learning_rate"):
        make(learning_rate=lambda t: 0.0).ask()


def test_a_selector_that_draws_elsewhere_is_found_out():
    class Impure(fedcor.PowerOfChoice):
        def select(self, state, federation):
            federation.losses(np.random.default_rng().choice(N, 4, replace=False))
            return super().select(state, federation)

    rounds = make(Impure(3))
    with pytest.raises(FedcorError, match=r"federation\.rng"):
        play(rounds, 20)


def test_optimisers_and_your_own_mean_agree():
    ours, own = make("full", optimiser="fedavg"), make("full", optimiser="own")
    play(ours, 3)
    sent = {}
    while own.number < 3:
        ask = own.ask()
        if ask.kind == "train":
            sent = {k: pull(ask.model, k) for k in ask.clients}
            own.tell(ask, models=sent)
        else:
            own.tell(ask, model=sum(w * sent[k] for k, w in ask.weights.items()))
    assert np.allclose(ours.model, own.model)
    with pytest.raises(ConfigError, match="local steps"):
        make("random", optimiser="scaffold")


# --- the folder -----------------------------------------------------------------------------------


def test_the_record_can_be_reported_explained_and_followed(tmp_path, capsys):
    seen = []
    with make(
        "aligned",
        rounds=12,
        folder=tmp_path,
        train=pull,
        test=lambda m: {"accuracy": 0.5, "f1": 0.3},
        callbacks=[seen.append],
    ) as rounds:
        rounds.run()
    run = read_run(tmp_path)
    assert len(run.rounds) == len(seen) == 12
    assert run.rounds[3]["metrics"] == {"f1": 0.3}
    from fedcor.cli import main

    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path), "--html"]) == 0
    assert main(["explain", str(tmp_path), "--round", "5"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_loop_resumes_and_another_run_is_refused(tmp_path):
    whole = make("fedcor", rounds=8, train=pull, evaluate=far, folder=tmp_path / "whole")
    whole.run()
    for until in range(1, 9):
        with make("fedcor", rounds=8, train=pull, evaluate=far, folder=tmp_path / "parts") as part:
            assert part.number == until - 1
            part.run(until)
    assert_array_equal(part.model, whole.model)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    with pytest.raises(RecordError, match="seed"):
        make("fedcor", rounds=8, folder=tmp_path / "parts", seed=5)
    with pytest.raises(RecordError, match="does not fit"):
        make("fedcor", np.zeros(4), rounds=8, folder=tmp_path / "parts")


def lines(folder: Path) -> list[dict]:
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in rounds[1:]]


def test_clients_that_joined_are_known_after_a_restart(tmp_path):
    with make("random", folder=tmp_path) as rounds:
        play(rounds, 2)
        rounds.join({100: 7})
    with make("random", folder=tmp_path) as rounds:
        assert rounds.clients == [*range(N), 100]
        assert 100 not in {k for _ in range(9) for k in rounds.ask().clients}  # not there yet
        play(rounds, 5)
        rounds.join({100: 9})
        assert rounds.ask([100]).clients == (100,)
    with pytest.raises(FedcorError, match="build Rounds again"):
        rounds.ask()
    again = {"sizes": [10] * N, "clients_per_round": 3, "folder": tmp_path / "b"}
    with fedcor.Rounds("random", {"w": np.zeros(2), "b": np.zeros(2)}, **again) as rounds:
        play(rounds, 1, train=lambda m, k: m, evaluate=lambda m, k: 1.0)
    with pytest.raises(RecordError, match="order"):
        fedcor.Rounds("random", {"b": np.zeros(2), "w": np.zeros(2)}, **again)


def test_the_folder_is_released_however_a_run_ends(tmp_path):
    done = {"rounds": 2, "train": pull, "folder": tmp_path}
    make(**done).run()
    make(**done)  # it is over: nothing holds the folder
    assert make(**done).number == 2

    def fail(record):
        raise RuntimeError("no")

    failing = make(**{**done, "folder": tmp_path / "b"}, callbacks=[fail])
    with pytest.raises(RuntimeError, match="no"):
        failing.run()
    failing.close()
    make(**{**done, "folder": tmp_path / "b"}).run()


def test_single_losses_stay_out_of_the_record_if_you_say_so():
    told, kept = make("fedcor", record_losses=False), make("fedcor")
    play(told, 2)
    play(kept, 2)
    assert {"known", "losses"} <= kept.record[1].details.keys()
    assert not {"known", "losses", "told"} & told.record[1].details.keys()


KILLED = """
import os, signal, sys
import numpy as np
import fedcor

def loop(folder, stop):
    rounds = fedcor.Rounds(
        fedcor.FedCor(3, warmup=2, interval=2, dimension=2), np.zeros(3), sizes=[10] * 12,
        rounds=6, folder=folder,
    )
    for asked in range(10**9):
        if rounds.number == 6:
            rounds.close()
            return
        ask = rounds.ask([k for k in range(12) if (k + rounds.number) % 5])
        if asked == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        if ask.kind == "losses":
            rounds.tell(ask, losses={k: float(np.sum((ask.model - k) ** 2)) for k in ask.clients})
        else:
            rounds.tell(ask, models={k: ask.model + .5 * (k - ask.model) for k in ask.clients})

folder, kills = sys.argv[1], int(sys.argv[2])
loop(folder + "/whole", -1)
run = 0
while kills:
    for stop in (0, 1, 2, 3, 5, 1, 4, 2):  # questions of this start that are told before the kill
        child = os.fork()
        if not child:
            loop(f"{folder}/{run}", stop)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        kills -= ended == signal.SIGKILL
        if not ended or not kills:
            break
    if not ended:
        run += 1
loop(f"{folder}/{run}", -1)
print(run + 1)
"""


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_between_any_two_questions_the_record_is_the_same(kills, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(kills)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    whole = lines(tmp_path / "whole")
    assert len(whole) == 6
    for run in range(int(done.stdout)):
        assert lines(tmp_path / str(run)) == whole
