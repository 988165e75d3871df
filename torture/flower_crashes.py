"""`kill -9` of a Flower server, and its restart: the record and the model stay the same.

The server runs Flower's own loop on a grid in memory, whose nodes run a ClientApp with NumPy. Each
restart meets nodes with other ids and empty memories, as a restarted federation does.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from fedcor.selectors import build_selector, selector_names
from torture.crashes import KINDS, Subject, kill_again_and_again
from torture.tally import Line, Tally

ROUNDS, NODES = 9, 12
QUICK = {"fedcor": {"warmup": 3, "interval": 3, "warmup_steps": 20, "refit_steps": 20}}
QUICK["proxy"] = {"warmup": 3}


def flower_grid():  # type: ignore[no-untyped-def]
    """The grid in memory of the tests."""
    tests = str(Path(__file__).parents[1] / "tests" / "support")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    import flower_grid

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    return flower_grid


def _subject(selector: str, strategy: str) -> Subject:
    grids, seeds = flower_grid(), itertools.count()

    def work(folder: Path) -> int:
        from flwr.serverapp import strategy as strategies

        wrapped = getattr(strategies, strategy)(fraction_evaluate=0.0)
        grid = grids.MemoryGrid(grids.numpy_app(), NODES, seed=next(seeds))
        chooser = build_selector(selector, 3, QUICK.get(selector))
        grids.run(chooser, grid, rounds=ROUNDS, strategy=wrapped, folder=folder)
        return 0

    # Restarted nodes hold no model, and are sent one more.
    ignored = ("seconds", "bytes_down", "bytes_up")
    return Subject(f"flower {selector} {strategy}", work, checkpoints=ROUNDS, ignored=ignored)


def crash_servers(quick: bool) -> list[Line]:
    """Every selector, around FedAvg and around FedAdam, whose moments must come back."""
    names = ["fedcor"] if quick else selector_names()
    subjects = [_subject(name, "FedAdam" if i % 2 else "FedAvg") for i, name in enumerate(names)]
    whose = "a Flower server, every selector,"
    tallies = [Tally("crashes", f"`kill -9` of {whose} {kind}") for kind in KINDS]
    kill_again_and_again(subjects, tallies * (1 if quick else 2), 5)
    return [tally.line() for tally in tallies]


PARTS: dict[str, Callable[[bool], list[Line]]] = {"crashes-flower": crash_servers}
