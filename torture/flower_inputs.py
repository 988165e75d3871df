"""Replies of Flower clients, spoiled: the run goes on or is refused, and its model stays finite."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.runs.record import read_run
from fedcor.selectors import build_selector, selector_names
from torture.calls import guarded
from torture.flower_crashes import QUICK, flower_grid
from torture.inputs import try_all
from torture.making import Maker
from torture.tally import Line, Tally

NODES, ROUNDS = 8, 4
NUMBERS = (np.nan, np.inf, -np.inf, 1e308, -1e308, 0.0, -1.0, 1e-320, 2**62, -(2**62), 0, 3)
NAMES = ("loss", "num-examples", "arrays", "metrics", "w", "b", "", "[/b]", "a\nb", "\x1b[2J", "é")
DTYPES = ("float16", "float64", "int8", "uint64", "complex64", "bool", "float32")


def _spoiled_array(make: Maker) -> Any:
    from flwr.app import Array

    shape = make.pick([(), (0,), (2,), (1,), (3,), (2, 2), (2, 0)])
    with np.errstate(all="ignore"):
        values = np.full(shape, make.pick(NUMBERS[:8]), np.float64).astype(make.pick(DTYPES))
    array = Array(values)
    if make.rng.random() < 0.3:  # what it says is not what it holds
        given = (make.pick(DTYPES), make.pick([shape, (5,), (10**9,), (-1,)]))
        data = make.spoil(array.data or b"abc")
        array = Array(
            dtype=given[0], shape=given[1], stype=make.pick(["numpy.ndarray", "x"]), data=data
        )
    return array


def spoil_reply(make: Maker, message: Any, reply: Any) -> Any:
    """Another reply, or none."""
    from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

    kind = make.rng.random()
    if kind < 0.06:
        return None
    if kind < 0.14:
        code = int(make.pick([0, 1, 2, 3, 99, 2**31 - 1]))
        return Message(Error(code=code, reason=make.text(40)), reply_to=message)
    if reply.has_error():
        return reply
    records: dict[str, Any] = dict(reply.content.items())
    for _ in range(int(make.rng.integers(1, 3))):
        name = make.pick([*records, *NAMES[:4]])
        match int(make.rng.integers(6)):
            case 0:
                records.pop(name, None)
            case 1:
                many = {make.pick(NAMES): make.pick(NUMBERS) for _ in range(3)}
                records[name] = MetricRecord(many)
            case 2 if isinstance(records.get(name), MetricRecord):
                changed = dict(records[name])
                key = make.pick([*changed, "loss", "num-examples"])
                changed[key] = make.pick([*NUMBERS, [1.0, np.nan], [], [2**62]])
                records[name] = MetricRecord(changed)
            case 3:
                names = [make.pick(["w", "b", "c", ""]) for _ in range(2)]
                records[name] = ArrayRecord({one: _spoiled_array(make) for one in names})
            case 4:
                values = [make.text(), 3, -1, [], ["a"], b"x", True, 2**62, np.nan]
                keys = ["ask", "missing", "name", "partition", "examples", "protocol", "tags"]
                note = {make.pick(keys): make.pick(values) for _ in range(3)}
                records[make.pick(["fedcor", name])] = ConfigRecord(note)
            case _:
                records[make.text(5)] = records.get(name, ConfigRecord({}))
    return Message(RecordDict(records), reply_to=message)


def fuzz_replies(quick: bool) -> list[Line]:
    """Half of the replies of half of the nodes, in runs of every selector."""
    tally, make, grids = Tally("input", "replies of Flower clients"), Maker(14), flower_grid()
    names, wanted = selector_names(), 60 if quick else 4_000
    counts: Counter[str] = Counter()

    def one_run(number: int, folder: Path) -> None:
        grid = grids.MemoryGrid(grids.numpy_app(), NODES, seed=number)

        def trouble(message: Any, reply: Any) -> Any:
            if make.rng.random() < 0.5:
                return reply
            counts["spoiled"] += 1
            return spoil_reply(make, message, reply)

        grid.trouble = dict.fromkeys(range(0, NODES, 2), trouble)
        name = names[number % len(names)]
        chooser = build_selector(name, 3, QUICK.get(name))
        _, result = grids.run(
            chooser, grid, rounds=ROUNDS, folder=folder, timeout=0.001, probe_timeout=0.001
        )
        model = grids.vector(result.arrays)
        if not np.isfinite(model).all() or model.shape != (3,):
            raise ValueError(f"{name}: the model became {model}")
        if len(read_run(folder).rounds) != ROUNDS:
            raise ValueError(f"{name}: rounds are missing")

    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        folder = Path(scratch).resolve() / "runs"
        folder.mkdir()

        def attempt(number: int) -> str | None:
            before = counts["spoiled"]
            ended = guarded(lambda: one_run(number, folder / str(number)))
            tally.add(f"run {ended}", counts["spoiled"] - before - 1)
            return f"run {ended}"

        number = 0
        while counts["spoiled"] < wanted:
            try_all(tally, 1, folder, lambda _, at=number: attempt(at))
            number += 1
    return [tally.line()]


PARTS: dict[str, Callable[[bool], list[Line]]] = {"input-flower": fuzz_replies}
