"""From what a user has (arrays, torch Datasets, Hugging Face) to a `Dataset` and its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedcor.data.client_ids import clients_of
from fedcor.data.datasets import Dataset
from fedcor.data.own_datasets import is_item_dataset, is_table, read_items, read_table
from fedcor.data.own_samples import as_samples, check_same_shapes, count_of
from fedcor.data.own_targets import as_targets
from fedcor.errors import DataError
from fedcor.types import IntArray

__all__ = ["as_dataset"]

_FORMS = (
    "give (x, y, x_test, y_test), a list of torch Datasets (one per client), or a Hugging Face "
    "Dataset; the last two with test_data"
)


def as_dataset(
    data: Any,
    test_data: Any = None,
    *,
    partition: Any = None,
    target: str | None = None,
    name: str = "own data",
) -> tuple[Dataset, list[IntArray] | None]:
    """Your own data as a `Dataset`, and who holds which of its training samples.

    Integer labels, texts and truth values are classes; they are numbered in sorted order where they
    are not 0 .. K-1 already, as scikit-learn's classifiers do, and `Dataset.label_names` keeps what
    they were. Floats are targets of a regression. Samples become float32; whole numbers that come
    from torch or stand in a dictionary stay whole, since they may be token ids.

    Args:
        data: One of

            - `(x, y, x_test, y_test)`, or `(x, y)` with `test_data`: arrays of NumPy or torch,
              lists, data frames; `x` may be a dictionary of arrays, and a batch is then one too;
            - a list of torch Datasets, one per client, whose items are `(x, y)` or dictionaries; or
              a single one;
            - a Hugging Face Dataset, or a DatasetDict with "train" and "test". Several feature
              columns make a dictionary;
            - a `Dataset`, which is returned.
        test_data: `(x_test, y_test)`, a torch Dataset, or a Hugging Face Dataset.
        partition: A client id for each training sample, or the name of the column that has them.
            What is neither (None, or a way to divide the samples, such as `Partition`) is left to
            the caller.
        target: The column, or the key of a dictionary, that has the label; else `label`, `labels`
            or `y`.
        name: What the data set is called in records.

    Returns:
        The data set; and one ascending array of sample indices per client, or None where neither
        the data nor `partition` says who holds what.

    Raises:
        DataError: The data does not fit together; the message says what to change.

    Example:
        >>> x, y = [[0.0], [1.0], [2.0], [3.0]], ["no", "yes", "no", "yes"]
        >>> data, parts = as_dataset((x, y, x, y), partition=["bern", "bern", "lyon", "bern"])
        >>> data.classes, data.label_names, data.client_names
        (2, ('no', 'yes'), ('bern', 'lyon'))
        >>> [part.tolist() for part in parts]
        [[0, 1, 3], [2]]
    """
    if isinstance(data, Dataset):
        return _with_clients(data, None, partition)
    if isinstance(data, Mapping) and {"train", "test"} <= set(data):
        data, test_data = data["train"], data["test"] if test_data is None else test_data
    column = partition if isinstance(partition, str) else None
    sizes: list[int] | None = None
    label_names: tuple[str, ...] = ()
    keep_integers: bool | None = None
    if is_table(data):
        x, y, ids, label_names = read_table(data, target, column, "data")
        partition, keep_integers = partition if ids is None else ids, True
    elif is_item_dataset(data) or _is_list_of_datasets(data):
        x, y, sizes = read_items([data] if is_item_dataset(data) else data, target, "data")
        sizes, keep_integers = None if is_item_dataset(data) else sizes, True
    else:
        x, y, test_data = _arrays(data, test_data)
    if column is not None and not is_table(data):
        raise DataError(
            f"partition = {column!r} names a column, but only a Hugging Face Dataset has columns: "
            "give the array of client ids"
        )
    if sizes is not None and partition is not None:
        raise DataError("a list of data sets says already who holds what: leave out partition")
    x_test, y_test, keep_test = _test_half(test_data, target, column)
    train_x = as_samples("x_train", x, keep_integers)
    test_x = as_samples("x_test", x_test, keep_test)
    targets = as_targets(y, y_test)
    for key, samples, given in (("train", train_x, targets.train), ("test", test_x, targets.test)):
        if count_of(samples) != len(given):
            count = count_of(samples)
            raise DataError(f"x_{key} has {count} samples, but y_{key} has {len(given)}")
    check_same_shapes(train_x, test_x)
    names = label_names if len(label_names) == targets.classes else targets.names
    found = Dataset(
        name, train_x, targets.train, test_x, targets.test, targets.classes, tuple(names)
    )
    return _with_clients(found, sizes, partition)


def _with_clients(
    data: Dataset, sizes: list[int] | None, partition: Any
) -> tuple[Dataset, list[IntArray] | None]:
    """The data set with its clients' names, and the parts if they are known."""
    if sizes is not None:
        return data, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if not _are_ids(partition):
        return data, None
    parts, names = clients_of(partition, len(data.train_y))
    return replace(data, client_names=names), parts


def _are_ids(partition: Any) -> bool:
    """Whether `partition` is an array of client ids."""
    if partition is None or isinstance(partition, str | Mapping):
        return False
    return isinstance(partition, Sequence) or hasattr(partition, "__array__")


def _is_list_of_datasets(data: Any) -> bool:
    return (
        isinstance(data, Sequence)
        and not isinstance(data, str)
        and len(data) > 0
        and all(is_item_dataset(one) or is_table(one) for one in data)
    )


def _arrays(data: Any, test_data: Any) -> tuple[Any, Any, Any]:
    """Samples, targets and test data of a tuple of arrays."""
    if isinstance(data, tuple | list) and len(data) == 4 and test_data is None:
        return data[0], data[1], (data[2], data[3])
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1], test_data
    if isinstance(data, tuple | list) and len(data) == 4:
        raise DataError("test data is given twice: as the last two arrays, and as test_data")
    what = type(data).__name__
    what = f"a {what} of {len(data)}" if isinstance(data, tuple | list) else f"a {what}"
    raise DataError(f"data is {what}: {_FORMS}")


def _test_half(test_data: Any, target: str | None, column: str | None) -> tuple[Any, Any, Any]:
    """Samples and targets of the test data, and whether its whole numbers stay whole."""
    if test_data is None:
        raise DataError(
            "there is no test data: give (x, y, x_test, y_test), or test_data=(x_test, y_test)"
        )
    if is_table(test_data):
        has_ids = column is not None and column in test_data.column_names
        x, y, _, _ = read_table(test_data, target, column if has_ids else None, "test_data")
        return x, y, True
    if is_item_dataset(test_data):
        x, y, _ = read_items([test_data], target, "test_data")
        return x, y, True
    if isinstance(test_data, tuple | list) and len(test_data) == 2:
        return test_data[0], test_data[1], None
    raise DataError("test_data must be (x_test, y_test), a torch Dataset or a Hugging Face Dataset")
