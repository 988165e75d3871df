"""What else clients send: a strategy that knows what it is finds it, nobody else is disturbed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from flower_grid import (
    QUICK,
    MemoryGrid,
    initial,
    lines,
    logged,
    numpy_app,
    record,
    run,
    vector,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcor import Defence
from fedcor.flower import select_with
from fedcor.flower.replies import (
    Terms,
    Unusable,
    common_contents,
    read_evaluation,
    read_model,
    refused_replies,
)
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor

MODEL = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
OWN = Terms("num-examples", several=True)
METRICS = MetricRecord({"num-examples": 3})


def model(value=1.0):
    return record(np.full(3, value, np.float32))


def arrays(**named):
    return ArrayRecord({name: Array(np.array(values)) for name, values in named.items()})


def clean_model(content, model, terms):
    return read_model(SimpleNamespace(content=content), model, terms).content


def clean_evaluation(content, terms):
    return read_evaluation(SimpleNamespace(content=content), terms).content


def sending(records, kind="train", first=False):
    """What adds records to the replies of a kind, before or after those that are there."""

    def change(message, reply):
        about = message.metadata.message_type
        if about != kind or not reply.content.metric_records:
            return reply
        there = dict(reply.content.items())
        content = {**records, **there} if first else {**there, **records}
        return Message(RecordDict(content), reply_to=message)

    return change


def everyone(records, clients=5, **options):
    grid = MemoryGrid(numpy_app(), clients)
    grid.trouble = dict.fromkeys(range(clients), sending(records, **options))
    return grid


class Keeping(FedAvg):
    """Keeps what it is given, takes out what FedAvg cannot use, and averages the rest."""

    def __init__(self, *taken, **settings):
        super().__init__(**{"fraction_evaluate": 0.0, **settings})
        self.taken, self.seen = taken, []

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            self.seen = [*self.seen, dict(reply.content.items())]
            for name in self.taken:
                del reply.content[name]
        return super().aggregate_train(server_round, replies)


# --- one reply ------------------------------------------------------------------------------------


def test_the_model_is_found_among_several_records_and_comes_first():
    extra = arrays(c=[1.0, 2.0])
    content = RecordDict({"variate": extra, "m": METRICS, "model": model()})
    made = clean_model(content, MODEL, OWN)
    assert list(made.array_records) == ["model", "variate"]
    # As large as the model: it is known by its name.
    for names in (("arrays", "variate"), ("variate", "arrays")):
        content = RecordDict({name: model() for name in names} | {"m": METRICS})
        assert next(iter(clean_model(content, MODEL, OWN).array_records)) == "arrays"
    named = dataclasses.replace(OWN, arrays_key="variate")
    assert next(iter(clean_model(content, MODEL, named).array_records)) == "variate"
    with pytest.raises(Unusable, match="malformed: several models, and none is called 'x'"):
        clean_model(content, MODEL, dataclasses.replace(OWN, arrays_key="x"))


def test_the_metrics_with_the_weight_come_first():
    more = MetricRecord({"f1": 1.0})
    content = RecordDict({"more": more, "metrics": METRICS, "arrays": model()})
    assert list(clean_model(content, MODEL, OWN).metric_records) == ["metrics", "more"]
    assert list(clean_evaluation(content, OWN)) == ["metrics", "more", "arrays"]
    with pytest.raises(Unusable, match="malformed: not exactly one MetricRecord"):
        clean_model(content, MODEL, Terms("num-examples"))
    with pytest.raises(Unusable, match="malformed: no number 'n' in its metrics"):
        clean_model(content, MODEL, dataclasses.replace(OWN, weight_key="n"))


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("unusable", arrays(c=[1.0, np.nan])),
        ("unusable", arrays(c=np.inf)),
        ("malformed", arrays(c=["a"])),
        ("malformed", ArrayRecord({"c": Array("float32", (1,), "numpy.ndarray", b"torn")})),
    ],
)
def test_arrays_beside_the_model_must_be_finite_numbers(kind, extra):
    content = RecordDict({"arrays": model(), "m": METRICS, "variate": extra})
    with pytest.raises(Unusable, match=f"{kind}: variate/c "):
        clean_model(content, MODEL, OWN)
    with pytest.raises(Unusable, match=f"{kind}: variate/c "):
        clean_evaluation(content, OWN)
    # Where nobody could use them, they do not matter.
    assert list(clean_evaluation(content, Terms("num-examples"))) == ["m"]


# --- together -------------------------------------------------------------------------------------


def reply(**more):
    return parsed(RecordDict({"arrays": model(), "metrics": METRICS, **more}))


def parsed(content):
    return read_model(SimpleNamespace(content=content), MODEL, OWN)


def test_records_that_most_have_are_kept_and_others_left_out():
    variate, odd, note = arrays(c=[1.0]), arrays(c=[2.0]), ConfigRecord({"a": 1})
    replies = {
        0: reply(variate=variate),
        1: reply(variate=variate, odd=odd, note=note),
        2: reply(),
        3: reply(variate=variate, variate2=MetricRecord({"a": 1})),
    }
    assert refused_replies(replies) == {2: "its reply lacks the ArrayRecord variate"}
    common = common_contents([replies[k] for k in (0, 1, 3)])
    assert [set(content) - {"arrays", "metrics"} for content in common] == [
        {"variate"},
        {"variate", "note"},  # a ConfigRecord disturbs nobody
        {"variate"},
    ]
    assert not refused_replies({0: replies[0], 2: replies[2]})  # half is not most


def test_a_record_that_is_called_as_the_model_is_does_not_take_its_place():
    odd = RecordDict({"a": model(2.0), "arrays": ConfigRecord({"x": 1}), "metrics": METRICS})
    common = common_contents([reply(), reply(), parsed(odd)])
    assert [list(content) for content in common] == [["arrays", "metrics"]] * 3
    assert vector(common[2]["arrays"]).tolist() == [2.0] * 3


# --- in a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", [Full(), FedCor(3, samples_per_refit=2, **QUICK)], ids=repr)
def test_a_strategy_reads_the_config_records_of_replies(selector):
    note = ConfigRecord({"meta": b"x", "seconds": 1.5})
    strategy = Keeping()
    run(selector, everyone({"note": note}), rounds=4, strategy=strategy)
    assert len(strategy.seen) >= 12
    assert all(content["note"] == note for content in strategy.seen)
    # Flower's own strategies do not mind it.
    _, result = run(Full(), everyone({"note": note}), rounds=2)
    _, plain = run(Full(), MemoryGrid(numpy_app(), 5), rounds=2)
    assert vector(result.arrays).tolist() == vector(plain.arrays).tolist()


@dataclasses.dataclass(frozen=True)
class Hearing(Random):
    """Keeps the updates that it is shown."""

    heard: list = dataclasses.field(default_factory=list)

    def observe(self, state, outcome):
        self.heard.append(outcome.updates)
        return state


@pytest.mark.parametrize("first", [False, True])
def test_a_strategy_of_ones_own_is_given_several_records(first, tmp_path):
    """The update that is judged, clipped and shown to the selector is the model's."""
    far = {"variate": model(1e6), "more": MetricRecord({"f1": 0.5})}
    defence = Defence(clip_norms=1.0)  # it clips some, so that replies are made anew
    kept, shown, results = [], [], []
    for grid, taken in ((everyone(far, first=first), [*far]), (MemoryGrid(numpy_app(), 5), [])):
        strategy, selector = Keeping(*taken), Hearing(5)
        folder = tmp_path / str(len(results))
        _, result = run(selector, grid, 3, strategy=strategy, folder=folder, defence=defence)
        kept.append(strategy.seen)
        shown.append(np.array(selector.heard).tolist())
        results.append(vector(result.arrays).tolist())
        assert any(entry.get("clipped") for entry in lines(folder))
        assert all(entry["faults"] == {} for entry in lines(folder))
    assert shown[0] == shown[1]
    assert results[0] == results[1]
    assert all({**content, **far} == content for content in kept[0])


def test_flowers_own_aggregation_cannot_use_several_records(tmp_path):
    grid = MemoryGrid(numpy_app(), 4)
    grid.trouble[1] = sending({"variate": model()})
    grid.trouble[2] = sending({"more": MetricRecord({"f1": 0.5})})
    run(Full(), grid, rounds=1, folder=tmp_path)
    (entry,) = lines(tmp_path)
    assert (entry["participated"], entry["faults"]) == ([0, 3], {"malformed": 2})


def test_one_client_with_another_record_or_without_one_does_not_end_the_run(tmp_path, caplog):
    grid = everyone({"variate": model()})
    grid.trouble[1] = sending({})
    grid.trouble[3] = sending({"variate": model(), "evil": model()})
    strategy = Keeping("variate")
    with logged(caplog):
        run(Full(), grid, rounds=2, strategy=strategy, folder=tmp_path)
    for entry in lines(tmp_path):
        assert (entry["participated"], entry["faults"]) == ([0, 2, 3, 4], {"malformed": 1})
    assert caplog.text.count("the ArrayRecord evil is not in all train replies") == 1
    assert (
        "client 1 (partition-1): malformed: its reply lacks the ArrayRecord variate" in caplog.text
    )


def test_a_variate_that_is_not_finite_is_refused(tmp_path):
    grid = everyone({"variate": model()})
    grid.trouble[1] = sending({"variate": model(np.nan)})
    run(Full(), grid, rounds=1, strategy=Keeping("variate"), folder=tmp_path)
    (entry,) = lines(tmp_path)
    assert (entry["participated"], entry["faults"]) == ([0, 2, 3, 4], {"unusable": 1})


def test_an_evaluation_of_ones_own_reads_other_records():
    class Reading(FedAvg):
        def aggregate_evaluate(self, server_round, replies):
            replies = list(replies)
            self.seen = [*getattr(self, "seen", []), *(dict(r.content.items()) for r in replies)]
            return super().aggregate_evaluate(server_round, replies)

    more = {"note": ConfigRecord({"a": 1}), "matrix": arrays(c=[[1, 2], [3, 4]])}
    strategy = Reading()
    grid = everyone(more, kind="evaluate")
    grid.trouble[2] = sending({}, kind="evaluate")
    selecting = select_with(strategy, Random(2), wait_for=5)
    selecting.start(grid, initial(), num_rounds=1, timeout=0.1)
    given = [content for content in strategy.seen if set(more) <= content.keys()]
    assert (len(strategy.seen), len(given)) == (5, 4)
    assert all({**content, **more} == content for content in given)
