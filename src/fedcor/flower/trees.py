"""XGBoost's models: one array of bytes that grows with every round. They cannot be subtracted.

What the other modules check of a model's arrays, shapes and numbers, does not hold for them. Here
is what does: a reply is a model in XGBoost's JSON format, as Flower's FedXgbBagging reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from flwr.app import Array, RecordDict
from flwr.serverapp.strategy import FedXgbBagging, Strategy

from fedcor import types
from fedcor.flower.memory import wrapped
from fedcor.flower.screen import Terms, Unusable, split_model

__all__ = ["clean_trees", "grows_trees", "trees_fault", "usual_bytes"]

# A reply that is so many times larger than the others', and larger by so many bytes, is no tree.
_ABSURD_RATIO, _ABSURD_BYTES = 64, 2**20


def grows_trees(strategy: Strategy) -> bool:
    """Whether the model of `strategy` is a bag of XGBoost's trees."""
    return any(isinstance(one, FedXgbBagging) for _, one in wrapped(strategy))


def usual_bytes(contents: Mapping[int, RecordDict]) -> dict[int, float]:
    """Client -> the median size of the other clients' replies; infinite for one that is alone."""
    sizes = {
        client: sum(
            len(array.data) for one in content.array_records.values() for array in one.values()
        )
        for client, content in contents.items()
    }
    others = {
        client: [size for other, size in sizes.items() if other != client] for client in sizes
    }
    return {client: float(np.median(of)) if of else np.inf for client, of in others.items()}


def clean_trees(
    content: RecordDict, model: Mapping[str, types.Array], terms: Terms, usual: float
) -> RecordDict:
    """A reply's trees with their metrics, or Unusable. Others' replies have `usual` bytes."""
    key, record, others = split_model(content, model, terms)
    for name, array in record.items():
        size = len(array.data)
        if size > _ABSURD_RATIO * usual and size - usual > _ABSURD_BYTES:
            why = f"{name} has {size} bytes, the others' {usual:.0f}"
            raise Unusable("unusable", why, doubts_model=True)
        wrong = trees_fault(array)
        if wrong:
            raise Unusable("malformed", f"{name} {wrong}")
    return RecordDict({key: record, **others})


def trees_fault(array: Array) -> str:
    """What is wrong with bytes that should be trees; empty where nothing is."""
    try:
        values = array.numpy()
    except Exception:  # bytes from outside may fail to be read in any way
        return "cannot be read"
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim != 1:
        return "is not one row of bytes (uint8)"
    if _is_bag_of_trees(values.tobytes()):
        return ""
    return 'is not a model of trees in XGBoost\'s JSON format: send booster.save_raw("json")'


def _is_bag_of_trees(text: bytes) -> bool:
    """Whether FedXgbBagging can add these trees to others, and others to these."""
    try:
        model = json.loads(text)["learner"]["gradient_booster"]["model"]
        settings, trees = model["gbtree_model_param"], model["trees"]
        count, parallel = int(settings["num_trees"]), int(settings["num_parallel_tree"])
        lists = isinstance(trees, list) and isinstance(model["tree_info"], list)
        ends = model["iteration_indptr"]
        return (
            lists
            and len(trees) == len(model["tree_info"]) == count == int(ends[-1])
            and 1 <= parallel <= count
            and all(isinstance(tree, dict) for tree in trees)
        )
    except Exception:  # as above
        return False
