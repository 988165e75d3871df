"""Data sets of torch and of Hugging Face, read into arrays. Neither package is imported here.

torch           len() and [i]; an item is `(x, y)`, or a dictionary with the target in it. Every
                item is read once, so random transforms are frozen.
Hugging Face    a table with column names; one column has the target, perhaps one the client
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcor.data.own_samples import to_array
from fedcor.errors import DataError, suggest
from fedcor.types import Array

__all__ = ["is_item_dataset", "is_table", "read_items", "read_table"]

TARGETS = ("label", "labels", "y")  # what the target is called, unless the user says


def is_table(data: object) -> bool:
    """Whether it is a Hugging Face Dataset."""
    return hasattr(data, "column_names") and hasattr(data, "with_format")


def is_item_dataset(data: object) -> bool:
    """Whether it is a torch Dataset: of that class, or with items of that kind."""
    if is_table(data):
        return False
    if any(cls.__module__.startswith("torch.utils.data") for cls in type(data).__mro__):
        return True
    plain = isinstance(data, str | bytes | Sequence | Mapping) or hasattr(data, "__array__")
    return not plain and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def read_table(
    table: Any, target: str | None, client_column: str | None, key: str
) -> tuple[Array | dict[str, Array], Array, Array | None, tuple[str, ...]]:
    """The columns of a Hugging Face Dataset.

    Args:
        table: The Dataset.
        target: Its column of labels or targets; None: one of `TARGETS`.
        client_column: Its column of client ids, if it has one.
        key: What messages call it.

    Returns:
        The samples (one feature column: an array; several: a dictionary), the targets, the client
        ids, and the names of the labels where the table has them.
    """
    columns = list(table.column_names)
    target = _target_in(columns, target, key)
    if client_column is not None and client_column not in columns:
        raise DataError(
            f"{key} has no column {client_column} of client ids, only {', '.join(columns)}; "
            + suggest(client_column, columns)
        )
    arrays = table.with_format("numpy")

    def column(name: str) -> Array:
        return to_array(f"{key}[{name!r}]", arrays[name][:])

    features = [name for name in columns if name not in (target, client_column)]
    if not features:
        raise DataError(f"{key} has no column beside {', '.join(columns)}")
    x = column(features[0]) if len(features) == 1 else {name: column(name) for name in features}
    names = getattr((table.features or {}).get(target), "names", None) or ()
    ids = None if client_column is None else column(client_column)
    return x, column(target), ids, tuple(names)


def _target_in(names: Sequence[str], target: str | None, key: str) -> str:
    """The name of the target."""
    if target is None:
        found = [name for name in TARGETS if name in names]
        if not found:
            raise DataError(
                f"{key} has no {' or '.join(TARGETS)}, only {', '.join(names)}: say which is the "
                "label with target="
            )
        return found[0]
    if target not in names:
        only = f"{key} has no {target}, only {', '.join(names)}"
        raise DataError("; ".join(filter(None, [only, suggest(target, names)])))
    return target


class _Column:
    """An array that is filled row by row; its shape and type are those of the first row."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.rows: Array | None = None

    def put(self, start: int, values: Array, where: str) -> None:
        if self.rows is None:
            dtype = np.dtype(np.float32) if values.dtype.kind == "f" else values.dtype
            self.rows = np.empty((self.total, *values.shape[1:]), dtype)
        if values.shape[1:] != self.rows.shape[1:]:
            raise DataError(
                f"{where} has the shape {values.shape[1:]}, but the first one "
                f"{self.rows.shape[1:]}: make all alike, for example by padding"
            )
        if values.dtype.kind in "US" and values.dtype.itemsize > self.rows.dtype.itemsize:
            self.rows = self.rows.astype(values.dtype)  # a longer word
        elif not np.can_cast(values.dtype, self.rows.dtype, "same_kind"):
            raise DataError(
                f"{where} is of type {values.dtype}, but the first one of {self.rows.dtype}"
            )
        with np.errstate(over="ignore"):  # what overflows is infinite, and reported later
            self.rows[start : start + len(values)] = values


def read_items(
    datasets: Sequence[Any], target: str | None, key: str
) -> tuple[Any, Array, list[int]]:
    """All items of torch Datasets, one after the other.

    Args:
        datasets: The Datasets.
        target: Where an item is a dictionary, the name of its target; None: one of `TARGETS`.
        key: What messages call one of them.

    Returns:
        The samples (an array, or a dictionary of arrays), the targets, and the size of each.
    """
    try:
        sizes = [len(dataset) for dataset in datasets]
    except TypeError:
        raise DataError(f"{key} has no length: a data set must have len() and [index]") from None
    names = [key if len(sizes) == 1 else f"{key}[{i}]" for i in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        if not size:
            raise DataError(f"{name} has no samples: leave this client out")
    total, start = sum(sizes), 0
    x: dict[str | None, _Column] = {}
    y = _Column(total)
    for name, dataset, size in zip(names, datasets, sizes, strict=True):
        dataset = dataset.with_format("numpy") if is_table(dataset) else dataset
        tensors = getattr(dataset, "tensors", None)  # a TensorDataset: at once
        if isinstance(tensors, tuple) and len(tensors) == 2:
            x.setdefault(None, _Column(total)).put(start, to_array(name, tensors[0]), name)
            y.put(start, to_array(name, tensors[1]), name)
            start += size
            continue
        for i in range(size):
            where = f"{name}: sample {i}"
            sample, label = _split(dataset[i], target, where)
            for part, value in sample.items():
                x.setdefault(part, _Column(total)).put(start, _row(where, value), where)
            y.put(start, _row(where, label), where)
            start += 1
    arrays = {part: column.rows for part, column in x.items()}
    assert y.rows is not None
    if len(arrays) == 1 and all(map(is_table, datasets)):  # one column, as in `read_table`
        return next(iter(arrays.values())), y.rows, sizes
    return arrays.get(None, arrays), y.rows, sizes


def _row(where: str, value: Any) -> Array:
    return to_array(where, value)[None]


def _split(item: Any, target: str | None, where: str) -> tuple[dict[str | None, Any], Any]:
    """A sample by its parts (None: it has only one), and its target."""
    if isinstance(item, Mapping):
        name = _target_in(list(item), target, where)
        sample: dict[str | None, Any] = {k: v for k, v in item.items() if k != name}
        return sample, item[name]
    if isinstance(item, tuple | list) and len(item) == 2:
        sample = dict(item[0]) if isinstance(item[0], Mapping) else {None: item[0]}
        return sample, item[1]
    raise DataError(
        f"{where} is a {type(item).__name__}, but must be (x, y), or a dictionary with a label"
    )
