"""What a Flower strategy remembers between rounds (momenta, clipping norms, counters): taken back, and written to a checkpoint.

Flower has no such notion, so it is read off the strategy's attributes, and those of the strategies that it wraps.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedcor import types
from fedcor.errors import RecordError

__all__ = ["Memory", "pack", "restore", "snapshot", "unpack", "wrapped"]

Memory = dict[str, Any]  # dotted attribute -> value
_SCALARS = (bool, int, float, str, type(None))


def wrapped(strategy: Strategy, path: str = "") -> Iterator[tuple[str, Strategy]]:
    """The strategy and, below it, every strategy that it wraps (differential privacy around FedAvg, say)."""
    yield path, strategy
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from wrapped(value, f"{path}{name}.")


def snapshot(strategy: Strategy) -> Memory:
    """A copy of every attribute that is data; functions and helpers are not memory."""
    return {
        path + name: copy.deepcopy(value)
        for path, one in wrapped(strategy)
        for name, value in vars(one).items()
        if _is_data(value)
    }


def restore(strategy: Strategy, memory: Memory) -> None:
    for path, one in wrapped(strategy):
        for name in [name for name, value in vars(one).items() if _is_data(value)]:
            if path + name not in memory:
                delattr(one, name)
    for key, value in memory.items():
        path, _, name = key.rpartition(".")
        owner: Any = strategy
        for step in path.split(".") if path else []:
            owner = getattr(owner, step)
        setattr(owner, name, copy.deepcopy(value))


def _is_data(value: Any) -> bool:
    if isinstance(value, (*_SCALARS, np.ndarray, np.generic, ArrayRecord)):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_data(item) for key, item in value.items())
    return isinstance(value, list | tuple) and all(map(_is_data, value))


def pack(memory: Mapping[str, Any], prefix: str) -> dict[str, types.Array]:
    """As named arrays: the numbers, and one text that says how they belong together."""
    arrays: dict[str, types.Array] = {}

    def fold(value: Any) -> Any:
        if isinstance(value, _SCALARS):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, ArrayRecord):
            return {"record": {name: fold(array.numpy()) for name, array in value.items()}}
        if isinstance(value, np.ndarray):
            arrays[f"{prefix}/{len(arrays)}"] = value
            return {"array": len(arrays) - 1}
        if isinstance(value, Mapping):
            return {"mapping": {name: fold(item) for name, item in value.items()}}
        return {"list": [fold(item) for item in value]}

    text = json.dumps({key: fold(value) for key, value in memory.items()})
    return {prefix: np.frombuffer(text.encode(), dtype=np.uint8), **arrays}


def unpack(arrays: Mapping[str, types.Array], prefix: str) -> Memory:
    def unfold(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "array":
            return arrays[f"{prefix}/{inner}"]
        if kind == "record":
            return ArrayRecord({name: Array(np.asarray(unfold(item))) for name, item in inner.items()})
        if kind == "mapping":
            return {name: unfold(item) for name, item in inner.items()}
        return [unfold(item) for item in inner]

    try:
        text = arrays[prefix].tobytes().decode()
        return {key: unfold(value) for key, value in json.loads(text).items()}
    except (KeyError, ValueError, AttributeError) as error:
        raise RecordError(f"the checkpoint's {prefix} is damaged: {error!r}") from error
