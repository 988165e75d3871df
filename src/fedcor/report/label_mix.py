"""How many samples of each label every client holds, made again from a run's settings.

A record does not hold it. But data set, partition and seed fix it, so where the data set is on this
machine, it can be made again. No code that a record names is imported for that: own partitions and
own data stay unknown.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcor.data import Partition, available, load
from fedcor.errors import FedcorError
from fedcor.record import RunRecord
from fedcor.rng import stream
from fedcor.types import IntArray

__all__ = ["label_mix"]


def label_mix(run: RunRecord) -> IntArray | None:
    """(N, K) samples of each of the K labels at each of the N clients; None where it is unknown.

    Args:
        run: of the simulator, on a data set of ours that is on this machine
    """
    config = run.header.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    partition = config.get("partition") if isinstance(config, Mapping) else None
    seed = run.header.get("seed")
    if not (isinstance(data, Mapping) and isinstance(partition, Mapping) and type(seed) is int):
        return None
    if data.get("noisy_clients"):  # some hold other labels than the data set says
        return None
    return _counted(str(data.get("name")), json.dumps(partition, sort_keys=True), seed)


@functools.lru_cache(maxsize=64)
def _counted(name: str, partition: str, seed: int) -> IntArray | None:
    """(N, K) label counts; runs of several selectors share them."""
    settings: dict[str, Any] = json.loads(partition)
    try:
        loaded = _labels(name)
        if loaded is None:
            return None
        labels, classes = loaded
        parts = Partition(**settings).split(labels, stream(seed, "partition"))
        return np.array([np.bincount(labels[part], minlength=classes) for part in parts])
    except (FedcorError, ImportError, TypeError, ValueError):
        return None  # it is not fetched, or the settings are not those of a partition of ours


@functools.lru_cache(maxsize=4)
def _labels(name: str) -> tuple[IntArray, int] | None:
    """The labels of the training samples, and how many there are; None if they are not here."""
    if not any(entry.name == name and entry.present for entry in available()):
        return None
    data = load(name)
    return (data.train_y, data.classes) if data.classes else None
