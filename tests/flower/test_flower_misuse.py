"""The strategy the wrong way round: inside a wrapper, or with its verbs overridden."""

from __future__ import annotations

import pytest
from flower_grid import QUICK, MemoryGrid, initial, numpy_app, quiet, run, vector
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from fedcor.core.errors import FedcorError
from fedcor.flower import FedCorStrategy, SelectingStrategy, select_with
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor

VERBS = ["configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"]


def private(strategy, clients=3):
    """Clips hard, and adds no noise."""
    return DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 0.05, clients)


def test_a_wrapper_around_it_is_refused_before_anything_is_sent():
    """Its loop would run instead of ours, and clip nothing in the rounds of a warm-up."""
    grid = MemoryGrid(numpy_app(), 8)
    outside = private(FedCorStrategy(3, quiet(), warmup=3, warmup_steps=5, wait_for=8))
    with pytest.raises(
        FedcorError, match=r"select_with\(Wrapper\(FedAvg\(\), \.\.\.\), selector\)"
    ):
        outside.start(grid, initial(), num_rounds=3, timeout=0.1)
    assert not grid.sent
    # The right way round, each round moves the model by no more than the clipping norm.
    inside = select_with(private(quiet()), FedCor(3, warmup=3, warmup_steps=5), wait_for=8)
    result = inside.start(grid, initial(), num_rounds=3, timeout=0.1)
    assert 0 < (vector(result.arrays) ** 2).sum() ** 0.5 <= 3 * 0.05 + 1e-6


def test_its_verbs_work_within_its_own_start_alone():
    grid = MemoryGrid(numpy_app(), 4)
    selecting, result = run(Random(2), grid, rounds=1)
    for call in (
        lambda: selecting.summary(),
        lambda: selecting.configure_train(2, result.arrays, {}, grid),
        lambda: selecting.aggregate_train(2, []),
        lambda: selecting.configure_evaluate(2, result.arrays, {}, grid),
        lambda: selecting.aggregate_evaluate(2, []),
    ):
        with pytest.raises(FedcorError, match="outside its own start"):
            call()
    # It can be started again.
    selecting.start(grid, initial(), num_rounds=1, timeout=0.1)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("base", [SelectingStrategy, FedCorStrategy])
def test_a_subclass_that_overrides_a_verb_is_refused_when_it_is_defined(verb, base):
    """In the rounds of a warm-up, the clients' replies have come before Flower's loop asks."""
    said = rf"Mine overrides {verb}.*select_with\(MyFedAvg\(\), selector\)"
    with pytest.raises(FedcorError, match=said):
        type("Mine", (base,), {verb: lambda self, *_: None})
    mixin = type("Mixin", (), {verb: lambda self, *_: None})
    with pytest.raises(FedcorError, match=said):
        type("Mine", (mixin, base), {})


def test_a_subclass_may_add_to_start_and_to_the_summary(caplog):
    heard = []

    class Mine(FedCorStrategy):
        def start(self, *args, **options):
            heard.append("start")
            return super().start(*args, **options)

        def summary(self):
            heard.append("summary")
            super().summary()

    mine = Mine(2, quiet(), **QUICK, wait_for=4)
    result = mine.start(MemoryGrid(numpy_app(), 4), initial(), num_rounds=2, timeout=0.1)
    assert heard == ["start", "summary"]
    plain = FedCorStrategy(2, quiet(), **QUICK, wait_for=4)
    expected = plain.start(MemoryGrid(numpy_app(), 4), initial(), num_rounds=2, timeout=0.1)
    assert vector(result.arrays).tolist() == vector(expected.arrays).tolist()


def test_a_subclass_with_a_loop_of_its_own_is_refused():
    class Looping(FedCorStrategy):
        def start(self, grid, initial_arrays, **options):
            return self.configure_train(1, initial_arrays, {}, grid)

    grid = MemoryGrid(numpy_app(), 4)
    with pytest.raises(FedcorError, match="outside its own start"):
        Looping(2).start(grid, initial())
    assert not grid.sent


def test_what_overrides_a_verb_goes_inside():
    class Half(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            assert replies
            return super().aggregate_train(server_round, replies)

    run(FedCor(2, **QUICK), MemoryGrid(numpy_app(), 4), rounds=4, strategy=Half())
    run(Full(), MemoryGrid(numpy_app(), 4), rounds=1, strategy=Half())
