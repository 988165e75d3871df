"""Every strategy and every mod of Flower's with our selectors, as the page of strategies says it.

A release of Flower with one more of them fails here until it has a row.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flwr.client.mod
import flwr.clientapp.mod
import flwr.serverapp.strategy
import numpy as np
import pytest
from flower_grid import QUICK, MemoryGrid, initial, lines, logged, numpy_app, server_score, vector
from flower_trees import no_trees, tree_score, trees, trees_app
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedcor.core.errors import ConfigError, FedcorError
from fedcor.flower import answers_probes, select_with
from fedcor.selectors.baselines import Full, Random
from fedcor.selectors.fedcor import FedCor
from fedcor.selectors.power_of_choice import PowerOfChoice

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "flower-strategies.md"
WORKS, REMARK, REFUSED = "works", "works, with a remark", "refused"
OFF: dict[str, Any] = {"fraction_evaluate": 0.0}
PER_ROUND, CLIENTS = 3, 8


@dataclass(frozen=True)
class Row:
    """A strategy, and what holds for it.

    `make` is given the number of clients in a round and the noise of differential privacy.
    """

    verdict: str
    make: Callable[[int, float], Strategy]
    why: str = ""  # of one that is refused, whatever the selector
    app: dict[str, Any] = field(default_factory=dict)
    trees: bool = False


def plain(kind, **settings):
    return Row(WORKS, lambda _clients, _noise: kind(**OFF, **settings))


def robust(kind, **settings):
    """Against as many malicious clients as a round of so many allows."""
    return Row(REMARK, lambda m, _: kind(**OFF, num_malicious_nodes=(m - 3) // 4, **settings))


def private(kind, *, clips=None, **settings):
    def make(clients, noise):
        return kind(FedAvg(**OFF), noise, num_sampled_clients=clients, **settings)

    return Row(REMARK, make, app={"train_mods": [] if clips is None else [clips]})


ROWS = {
    "FedAvg": plain(FedAvg),
    "FedAvgM": plain(FedAvgM, server_momentum=0.5),
    "FedAdam": plain(FedAdam, eta=0.05, beta_1=0.9, beta_2=0.99),
    "FedAdagrad": plain(FedAdagrad, eta=0.05),
    "FedYogi": plain(FedYogi, eta=0.05, beta_1=0.9, beta_2=0.99),
    "FedProx": plain(FedProx, proximal_mu=0.5),
    "FedMedian": plain(FedMedian),
    "FedTrimmedAvg": plain(FedTrimmedAvg, beta=0.2),
    "QFedAvg": plain(QFedAvg, client_learning_rate=0.1, q=0.2, train_loss_key="loss"),
    "Krum": robust(Krum),
    "MultiKrum": robust(MultiKrum, num_nodes_to_select=2),
    "Bulyan": robust(Bulyan),
    "FedXgbBagging": Row(REMARK, lambda *_: FedXgbBagging(**OFF), trees=True),
    "FedXgbCyclic": Row(REFUSED, lambda *_: FedXgbCyclic(), "chooses by itself who trains"),
    "DifferentialPrivacyServerSideFixedClipping": private(
        DifferentialPrivacyServerSideFixedClipping, clipping_norm=0.5
    ),
    "DifferentialPrivacyClientSideFixedClipping": private(
        DifferentialPrivacyClientSideFixedClipping, clips=fixedclipping_mod, clipping_norm=0.5
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": private(
        DifferentialPrivacyServerSideAdaptiveClipping, initial_clipping_norm=0.5
    ),
    "DifferentialPrivacyClientSideAdaptiveClipping": private(
        DifferentialPrivacyClientSideAdaptiveClipping,
        clips=adaptiveclipping_mod,
        initial_clipping_norm=0.5,
    ),
}
RUNNING = [name for name, row in ROWS.items() if row.verdict != REFUSED]
SELECTORS = {
    "fedcor": FedCor(PER_ROUND, **QUICK),
    "power_of_choice": PowerOfChoice(PER_ROUND),
    "random": Random(PER_ROUND),
    "the default": None,
}


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap():
    """Bulyan collects garbage once per reply, which takes 0.3 s with all that is imported here."""
    gc.freeze()
    yield
    gc.unfreeze()


def start(row, strategy, grid, rounds, **options):
    model, score = (no_trees(), tree_score) if row.trees else (initial(), server_score)
    return strategy.start(grid, model, num_rounds=rounds, evaluate_fn=score, **options)


def grid_of(row, nodes=CLIENTS, *, shuffle=True):
    app = trees_app() if row.trees else numpy_app(**row.app)
    return MemoryGrid(app, nodes, shuffle=shuffle)


def as_numbers(row, arrays):
    """A model; trees without their order, which Flower draws when it runs alone."""
    return np.array(sorted(trees(arrays))) if row.trees else vector(arrays)


def test_every_strategy_of_flower_has_a_row():
    public = set(flwr.serverapp.strategy.__all__) - {"Strategy", "Result"}
    assert public == ROWS.keys()


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("name", RUNNING)
def test_a_strategy_runs_with_a_selector(name, selector, tmp_path):
    row, chosen = ROWS[name], SELECTORS[selector]
    strategy = row.make(PER_ROUND, 0.01)
    options: dict[str, Any] = {"wait_for": CLIENTS, "checkpoint": tmp_path}
    if chosen is None:
        options["clients_per_round"] = PER_ROUND
    if row.trees and chosen is None:
        with pytest.raises(ConfigError, match="reads updates of the model"):
            select_with(strategy, chosen, **options)
        return
    selecting = select_with(strategy, chosen, **options)
    start(row, selecting, grid_of(row), 6, timeout=0.1)
    record = lines(tmp_path)
    assert [len(entry["participated"]) for entry in record] == [PER_ROUND] * 6
    assert not any(entry["faults"] for entry in record)
    score = tree_score(0, no_trees()) if row.trees else server_score(0, initial())
    losses = [entry["test_loss"] for entry in record]
    if name != "Krum":  # whose model is that of one client, so it may be no good to the others
        assert min(losses) < score["loss"]
    assert len(set(losses)) == 6  # every round made another model
    if selector in ("fedcor", "power_of_choice"):
        # Nobody is asked for a loss of trees before the first one.
        assert all(entry["probed"] for entry in record[int(row.trees) : 3])


@pytest.mark.parametrize("name", RUNNING)
def test_a_strategy_aggregates_as_it_does_alone(name):
    """With everyone chosen, the model is the one that the bare strategy makes."""
    row = ROWS[name]
    alone = start(row, row.make(7, 0.0), grid_of(row, 7, shuffle=False), 4)
    # Trying candidates leaves no trace in the strategy.
    for selector in (Full(), FedCor(7, warmup=4, warmup_steps=5)):
        selecting = select_with(row.make(7, 0.0), selector, wait_for=7)
        ours = start(row, selecting, grid_of(row, 7), 4, timeout=0.1)
        expected = as_numbers(row, alone.arrays)
        assert as_numbers(row, ours.arrays) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.verdict == REFUSED])
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_strategy_that_cannot_work_is_refused(name, selector):
    options = {"clients_per_round": PER_ROUND} if SELECTORS[selector] is None else {}
    with pytest.raises(ConfigError, match=ROWS[name].why):
        select_with(ROWS[name].make(PER_ROUND, 0.0), SELECTORS[selector], **options)


# --- the clients' mods ----------------------------------------------------------------------------

MODS = {
    "message_size_mod": WORKS,
    "arrays_size_mod": WORKS,
    "fixedclipping_mod": REMARK,
    "adaptiveclipping_mod": REMARK,
    "LocalDpMod": REMARK,
    "secagg_mod": REFUSED,
    "secaggplus_mod": REFUSED,
}


def wrapped_for(name):
    """The strategy that a mod belongs to."""
    kinds = {
        "fixedclipping_mod": "DifferentialPrivacyClientSideFixedClipping",
        "adaptiveclipping_mod": "DifferentialPrivacyClientSideAdaptiveClipping",
    }
    return ROWS[kinds.get(name, "FedAvg")].make(PER_ROUND, 0.0)


def mod_of(name):
    if name == "LocalDpMod":
        return LocalDpMod(clipping_norm=10.0, sensitivity=0.01, epsilon=10.0, delta=0.1)
    return getattr(flwr.client.mod if "secagg" in name else flwr.clientapp.mod, name)


def run_with(name, app, folder, **settings):
    selector = FedCor(PER_ROUND, **QUICK)
    selecting = select_with(
        wrapped_for(name),
        selector,
        wait_for=CLIENTS,
        probe_timeout=0.05,
        checkpoint=folder,
        **settings,
    )
    selecting.start(
        MemoryGrid(app, CLIENTS), initial(), num_rounds=4, timeout=0.05, evaluate_fn=server_score
    )
    return lines(folder)


def test_every_mod_of_flower_has_a_row():
    public = {*flwr.clientapp.mod.__all__, *flwr.client.mod.__all__} - {"make_ffn"}
    assert public == MODS.keys()


@pytest.mark.parametrize("name", [name for name, verdict in MODS.items() if verdict != REFUSED])
def test_a_mod_of_the_train_function_works(name, tmp_path):
    record = run_with(name, numpy_app(train_mods=[mod_of(name)]), tmp_path)
    assert not any(entry["faults"] for entry in record)
    assert [len(entry["participated"]) for entry in record] == [PER_ROUND] * 4
    assert [entry["probed"] for entry in record] == [16, 8, 8, 8]


@pytest.mark.parametrize("mod", [message_size_mod, arrays_size_mod])
@pytest.mark.parametrize("first", [True, False])
def test_a_mod_that_only_looks_may_be_anywhere(mod, first, tmp_path):
    mods = [mod, answers_probes()] if first else [answers_probes(), mod]
    record = run_with("message_size_mod", numpy_app(mods=mods), tmp_path)
    assert not any(entry["faults"] for entry in record)


@pytest.mark.parametrize("name", ["fixedclipping_mod", "adaptiveclipping_mod"])
def test_a_mod_of_the_whole_app_that_clips_refuses_every_question(name, tmp_path, caplog):
    """And every evaluation of Flower's own: it expects the clipping norm in each message."""
    app = numpy_app(mods=[answers_probes(), mod_of(name)])
    with logged(caplog):
        try:
            run_with(name, app, tmp_path)
        except FedcorError as error:
            assert "loss" in str(error)  # noqa: PT017
    assert f"{name} requires the key 'clipping_norm'" in caplog.text


@pytest.mark.parametrize("name", [name for name, verdict in MODS.items() if verdict == REFUSED])
def test_secure_aggregation_of_the_old_api_ends_the_run(name, tmp_path):
    app = numpy_app(train_mods=[mod_of(name)])
    with pytest.raises(FedcorError, match="round 1: no client delivered"):
        run_with(name, app, tmp_path, attempts=1)


# --- the page -------------------------------------------------------------------------------------


def test_the_page_says_what_the_rows_say():
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|([^|]*)\|$", text, flags=re.MULTILINE)
    said = {name: verdict for name, verdict, _ in found}
    assert said == {name: row.verdict for name, row in ROWS.items()} | MODS
    assert len(found) == len(said)
    for name, verdict, remark in found:
        assert remark.strip() or verdict == WORKS, f"{name}: say what to know"
