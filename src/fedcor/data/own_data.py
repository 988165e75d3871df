"""Make a `Dataset` and its clients from what a user has: arrays, torch Datasets, Hugging Face.

Neither package is imported here:

    torch           len() and [i]; an item is `(x, y)`, or a dictionary with the target in it. Every
                    item is read once, so random transforms are frozen.
    Hugging Face    a table with column names; one column has the target, perhaps one the client

Clients are numbered 0 .. N-1 in the order of their sorted ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedcor.core.errors import DataError, suggest
from fedcor.core.types import Array, IntArray
from fedcor.data.datasets import Dataset, make_dataset
from fedcor.data.own_samples import plain_values, to_array
from fedcor.data.partition import indices_per_client

TARGETS = ("label", "labels", "y")  # what the target is called, unless the user says
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
    """Your own data as a `Dataset`, and the training samples of each client.

    Integers, strings and booleans are labels; floats are targets of a regression. Samples become
    float32. See `fedcor.data.own_samples` for the details.

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
            Anything else (None, or a partition such as `IID`) is left to the caller.
        target: The column, or the key of a dictionary, that has the label; else `label`, `labels`
            or `y`.
        name: What the data set is called in records.

    Returns:
        The data set; and one ascending array of sample indices per client, or None where neither
        the data nor `partition` assigns samples to clients.

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
    column = partition if isinstance(partition, str) else None
    train, test = _read_halves(data, test_data, target, column)
    if train.sizes is not None and partition is not None:
        raise DataError("a list of data sets has one per client already: leave out partition")
    dataset = make_dataset(
        name,
        (train.x, train.y),
        (test.x, test.y),
        keep_integers=(train.keep_integers, test.keep_integers),
        label_names=train.label_names,
    )
    return _with_clients(dataset, train.sizes, partition if train.ids is None else train.ids)


class _Half(NamedTuple):
    """Training or test data as it was read.

    Attributes:
        x: The samples.
        y: The targets.
        keep_integers: As for `as_samples`.
        ids: The client id of each sample, if the data has a column of them.
        sizes: Samples of each client, where the data comes in one part per client.
        label_names: What the labels are called, where the data says so.
    """

    x: Any
    y: Any
    keep_integers: bool | None = None
    ids: Array | None = None
    sizes: list[int] | None = None
    label_names: tuple[str, ...] = ()


def _read_halves(
    data: Any, test_data: Any, target: str | None, column: str | None
) -> tuple[_Half, _Half]:
    """Training and test data; `column` has the client ids."""
    if isinstance(data, Mapping) and {"train", "test"} <= set(data):
        data, test_data = data["train"], data["test"] if test_data is None else test_data
    elif isinstance(data, tuple | list) and len(data) == 4 and not _is_list_of_datasets(data):
        if test_data is not None:
            raise DataError("test data is given twice: as the last two arrays, and as test_data")
        data, test_data = data[:2], data[2:]
    if column is not None and not is_table(data):
        raise DataError(
            f"partition = {column!r} names a column, but only a Hugging Face Dataset has columns: "
            "give the array of client ids"
        )
    train = _read(data, "data", target, column)
    if train is None:
        count = f" of {len(data)}" if isinstance(data, tuple | list) else ""
        raise DataError(f"data is a {type(data).__name__}{count}: {_FORMS}")
    if test_data is None:
        raise DataError(
            "there is no test data: give (x, y, x_test, y_test), or test_data=(x_test, y_test)"
        )
    tested_column = column if column in getattr(test_data, "column_names", ()) else None
    test = _read(test_data, "test_data", target, tested_column)
    if test is None or test.sizes is not None:
        raise DataError(
            "test_data must be (x_test, y_test), a torch Dataset or a Hugging Face Dataset"
        )
    return train, test


def _read(data: Any, key: str, target: str | None, column: str | None) -> _Half | None:
    """One half of the data; None if it has no form that is known."""
    if is_table(data):
        return _read_table(data, target, column, key)
    if is_item_dataset(data):
        return _read_datasets({key: data}, target)._replace(sizes=None)
    if _is_list_of_datasets(data):
        return _read_datasets({f"{key}[{i}]": dataset for i, dataset in enumerate(data)}, target)
    if isinstance(data, tuple | list) and len(data) == 2:
        return _Half(data[0], data[1])
    return None


def _with_clients(
    data: Dataset, sizes: list[int] | None, partition: Any
) -> tuple[Dataset, list[IntArray] | None]:
    """The data set with its clients' names, and the parts if they are known."""
    if sizes is not None:
        return data, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if not are_ids(partition):
        return data, None
    parts, names = clients_of(partition, len(data.train_y))
    return replace(data, client_names=names), parts


def are_ids(partition: Any) -> bool:
    """Whether `partition` is an array of client ids."""
    if partition is None or isinstance(partition, str | Mapping):
        return False
    return isinstance(partition, Sequence) or hasattr(partition, "__array__")


def _is_list_of_datasets(data: Any) -> bool:
    return (
        isinstance(data, Sequence)
        and not isinstance(data, str)
        and len(data) > 0
        and all(is_item_dataset(item) or is_table(item) for item in data)
    )


def clients_of(ids: object, samples: int | None = None) -> tuple[list[IntArray], tuple[str, ...]]:
    """The training samples of each client, where each sample has the id of its client.

    Args:
        ids: One id per training sample: integers or strings, in an array, a list, a tensor or a
            column of a data frame. Clients are numbered in the order of their sorted ids.
        samples: How many ids there must be; None for any number.

    Returns:
        One ascending array of sample indices per client; and the clients' names, () where the ids
        are just 0 .. N-1.

    Raises:
        DataError: An id is missing, or is neither a string nor an integer.

    Example:
        >>> parts, names = clients_of(["lyon", "bern", "lyon"])
        >>> [part.tolist() for part in parts], names
        ([[1], [0, 2]], ('bern', 'lyon'))
    """
    given = plain_values("the client ids", ids)
    if given.ndim != 1 or not len(given):
        shape = given.shape
        raise DataError(f"there must be one client id per sample, but they have the shape {shape}")
    if samples is not None and len(given) != samples:
        raise DataError(f"there are {len(given)} client ids for {samples} training samples")
    if given.dtype.kind == "f" and (given == np.floor(given)).all():
        given = given.astype(np.int64)
    if given.dtype.kind not in "iuUSb":
        raise DataError(
            "client ids must be all strings or all integers, and none may be missing, but they are "
            f"of type {given.dtype}"
        )
    names, owner = np.unique(given, return_inverse=True)
    parts = indices_per_client(owner.reshape(-1), len(names))
    numbered = names.dtype.kind in "iu" and np.array_equal(names, np.arange(len(names)))
    return parts, () if numbered else tuple(map(str, names.tolist()))


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


def _read_table(table: Any, target: str | None, client_column: str | None, key: str) -> _Half:
    """The columns of a Hugging Face Dataset; several feature columns make a dictionary.

    Args:
        table: The Dataset.
        target: Its column of labels or targets; None: one of `TARGETS`.
        client_column: Its column of client ids, if it has one.
        key: What messages call it.
    """
    columns = list(table.column_names)
    target = _name_in(columns, target, key)
    arrays = table.with_format("numpy")

    def column(name: str) -> Array:
        return to_array(f"{key}[{name!r}]", arrays[name][:])

    ids = None
    if client_column is not None:
        ids = column(_name_in(columns, client_column, key))
    features = [name for name in columns if name not in (target, client_column)]
    if not features:
        raise DataError(f"{key} has no column beside {', '.join(columns)}")
    x = column(features[0]) if len(features) == 1 else {name: column(name) for name in features}
    names = getattr((table.features or {}).get(target), "names", None) or ()
    return _Half(x, column(target), keep_integers=True, ids=ids, label_names=tuple(names))


def _name_in(names: Sequence[str], wanted: str | None, key: str) -> str:
    """`wanted`, or the name of the target where it is None; it must be one of `names`."""
    candidates = TARGETS if wanted is None else (wanted,)
    for name in candidates:
        if name in names:
            return name
    advice = suggest(candidates[0], names) or "say which it is with target= or partition="
    raise DataError(f"{key} has no {' or '.join(candidates)}, only {', '.join(names)}: {advice}")


def _read_datasets(datasets: Mapping[str, Any], target: str | None) -> _Half:
    """All samples of torch and Hugging Face Datasets, one after the other.

    Args:
        datasets: The Datasets, by what messages call them.
        target: The name of the target in items that are dictionaries; None: one of `TARGETS`.
    """
    x: dict[str | None, list[Array]] = {}
    y: list[Array] = []
    sizes = []
    for name, dataset in datasets.items():
        before = len(y)
        for where, sample, label in _pieces(name, dataset, target):
            for part, values in sample.items():
                _append(x.setdefault(part, []), to_array(where, values), where)
            _append(y, to_array(where, label), where)
        if len(y) == before:
            raise DataError(f"{name} has no samples: leave this client out")
        sizes.append(sum(map(len, y[before:])))
    arrays = {part: np.concatenate(pieces) for part, pieces in x.items()}
    samples = arrays.get(None, arrays)
    return _Half(samples, np.concatenate(y), keep_integers=True, sizes=sizes)


def _pieces(
    name: str, dataset: Any, target: str | None
) -> Iterator[tuple[str, Mapping[str | None, Any], Any]]:
    """Several samples each: what messages call them, their parts (None: only one), their targets.

    A table and a TensorDataset are one piece. Any other Dataset is read item by item.
    """
    tensors = getattr(dataset, "tensors", None)
    if is_table(dataset):
        half = _read_table(dataset, target, None, name)
        yield name, half.x if isinstance(half.x, Mapping) else {None: half.x}, half.y
    elif isinstance(tensors, tuple) and len(tensors) == 2:
        yield name, {None: tensors[0]}, tensors[1]
    else:
        try:
            count = len(dataset)
        except TypeError:
            raise DataError(
                f"{name} has no length: a data set must have len() and [index]"
            ) from None
        for i in range(count):
            where = f"{name}: sample {i}"
            sample, label = _split(dataset[i], target, where)
            rows = {part: to_array(where, value)[None] for part, value in sample.items()}
            yield where, rows, to_array(where, label)[None]


def _append(pieces: list[Array], values: Array, where: str) -> None:
    """Add `values`, which must have the shape and the kind of numbers of the first piece."""
    first = pieces[0] if pieces else values
    if values.shape[1:] != first.shape[1:]:
        raise DataError(
            f"{where} has the shape {values.shape[1:]}, but the first one {first.shape[1:]}: "
            "give all the same shape, for example by padding"
        )
    if not np.can_cast(values.dtype, first.dtype, "same_kind"):
        raise DataError(f"{where} is of type {values.dtype}, but the first one of {first.dtype}")
    pieces.append(values)


def _split(item: Any, target: str | None, where: str) -> tuple[dict[str | None, Any], Any]:
    """A sample by its parts (None: it has only one), and its target."""
    if isinstance(item, Mapping):
        name = _name_in(list(item), target, where)
        return {part: value for part, value in item.items() if part != name}, item[name]
    if isinstance(item, tuple | list) and len(item) == 2:
        return dict(item[0]) if isinstance(item[0], Mapping) else {None: item[0]}, item[1]
    raise DataError(
        f"{where} is a {type(item).__name__}, but must be (x, y), or a dictionary with a label"
    )
