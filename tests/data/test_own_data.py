"""A user's own data: arrays, frames, torch Datasets, Hugging Face; and what cannot be data."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedcor.core.errors import ConfigError, DataError
from fedcor.core.rng import stream
from fedcor.data.own_data import as_dataset, clients_of
from fedcor.data.partition import IID, Dirichlet, Shards, randomise_labels

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.array([0, 1, 2, 0, 1, 2])
X_TEST, Y_TEST = X[:3], Y[:3]


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [np.asarray, torch.as_tensor, lambda a: a.tolist(), np.asfortranarray],
    ids=["array", "tensor", "list", "fortran"],
)
def test_arrays_of_any_kind(convert):
    data, parts = as_dataset(tuple(map(convert, (X, Y, X_TEST, Y_TEST))), name="mine")
    assert parts is None
    assert (data.name, data.classes, data.outputs, data.shape) == ("mine", 3, 3, (4,))
    assert (data.label_names, data.client_names) == ((), ())
    np.testing.assert_array_equal(data.train_x, X)
    np.testing.assert_array_equal(data.test_y, Y_TEST)
    assert (data.train_x.dtype, data.train_y.dtype) == (np.float32, np.int64)


def test_test_data_may_stand_apart_and_a_dataset_stays_itself():
    data, _ = as_dataset((X, Y), (X_TEST, Y_TEST))
    same, parts = as_dataset(data, partition=[0, 0, 0, 1, 1, 1])
    assert same.train_x is data.train_x
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]


def test_large_arrays_are_not_copied():
    for x, y in ((X, Y), (torch.from_numpy(X), torch.from_numpy(Y))):
        data, _ = as_dataset((x, y, x, y))
        assert np.shares_memory(data.train_x, X)
        assert np.shares_memory(data.test_y, Y)


def test_types_of_samples():
    def given_as(x):
        return as_dataset((x, Y, x, Y))[0].train_x

    assert given_as(X.astype(np.float64)).dtype == np.float32
    assert given_as(X.astype(np.int32)).dtype == np.float32
    assert given_as(torch.from_numpy(X).to(torch.int32)).dtype == np.int64  # token ids
    assert given_as(torch.from_numpy(X).to(torch.bfloat16)).dtype == np.float32
    pixels = given_as(np.full((6, 2, 2), 255, np.uint8))
    assert (pixels.dtype, pixels.max()) == (np.float32, 1)
    parts = given_as({"ids": X.astype(np.uint8), "mask": X > 3, "numbers": X.astype(np.float64)})
    assert [parts[k].dtype for k in parts] == [np.int64, np.bool_, np.float32]
    backwards = given_as(X[::-1])
    assert torch.from_numpy(backwards)[0, 0] == 20


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (np.array(["b", "c", "a", "b", "c", "a"]), ("a", "b", "c")),
        (["b", "c", "a", "b", "c", "a"], ("a", "b", "c")),
        (np.array(["b", "c", "a", "b", "c", "a"], dtype=object), ("a", "b", "c")),
        (np.array([5, 7, 1, 5, 7, 1]), ("1", "5", "7")),
        (np.array([-1, 1, -2, -1, 1, -2], dtype=object), ("-2", "-1", "1")),
        (np.array([[2], [3], [1], [2], [3], [1]]), ("1", "2", "3")),
    ],
)
def test_labels_are_numbered_in_sorted_order(labels, names):
    data, _ = as_dataset((X, labels, X, labels))
    assert (data.classes, data.label_names) == (3, names)
    assert data.train_y.tolist() == data.test_y.tolist() == [1, 2, 0, 1, 2, 0]


def test_truth_values_are_two_classes():
    data, _ = as_dataset((X, Y > 0, X_TEST, Y_TEST > 0))
    assert (data.classes, data.label_names) == (2, ("False", "True"))
    assert data.train_y.tolist() == [0, 1, 1, 0, 1, 1]


@given(st.lists(st.integers(-5, 5) | st.integers(0, 3), min_size=1, max_size=20))
def test_numbered_labels_are_those_of_scikit_learn(labels):
    from sklearn.preprocessing import LabelEncoder

    x = np.zeros((len(labels), 1))
    data, _ = as_dataset((x, labels, x, labels))
    encoder = LabelEncoder().fit(labels)
    assert data.train_y.tolist() == encoder.transform(labels).tolist()
    assert data.classes == len(encoder.classes_)


def test_floats_are_targets_even_if_they_are_whole():
    data, _ = as_dataset((X, Y.astype(float), X_TEST, Y_TEST))
    assert (data.classes, data.outputs, data.train_y.dtype) == (None, 1, np.float32)
    assert data.test_y.dtype == np.float32
    column, _ = as_dataset((X, Y[:, None].astype(float), X_TEST, Y_TEST.astype(float)))
    assert column.train_y.shape == (6,)
    several, _ = as_dataset((X, X[:, :2], X_TEST, X_TEST[:, :2]))
    assert (several.train_y.shape, several.outputs) == ((6, 2), 2)


NAN = np.where(X == 5, np.nan, X)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y, X_TEST), "data is a tuple of 3: give"),
        (X, "data is a ndarray: give"),
        ("digits", "data is a str: give"),
        ((X, Y), "there is no test data"),
        ((X[:5], Y, X_TEST, Y_TEST), "x_train has 5 samples, but y_train has 6"),
        ((X, Y, X_TEST, Y), "x_test has 3 samples, but y_test has 6"),
        ((X, Y, X_TEST[:, :3], Y_TEST), r"\(4,\) in x_train, but float32 \(3,\) in x_test"),
        ((NAN, Y, X_TEST, Y_TEST), r"x_train has values that are missing \(NaN\) or not finite"),
        ((X.astype(float) * 1e300, Y, X_TEST, Y_TEST), "x_train has values that are missing"),
        ((X.astype(str), Y, X_TEST, Y_TEST), "x_train must hold numbers.*token ids"),
        (([[1], [1, 2]], Y, X_TEST, Y_TEST), "x_train is not an array; do its rows differ"),
        ((X.astype(complex), Y, X_TEST, Y_TEST), "x_train must hold numbers"),
        ((X[:, 0], Y, X_TEST, Y_TEST), r"x_train must have the shape .*x_train.reshape\(-1, 1\)"),
        ((X[:0], Y[:0], X_TEST, Y_TEST), "x_train must have the shape"),
        ((X, Y, X_TEST, [0, 1, 7]), "y_test contains label 7, which never occurs in y_train"),
        ((X, Y, X_TEST, ["a", "b", "c"]), "labels of type int64, but y_test <U1"),
        ((X, Y, X_TEST, [0.5, 1, 2]), "labels of type int64, but y_test float64"),
        ((X, Y.astype(float), X_TEST, ["a", "b", "c"]), "y_train holds numbers, but y_test"),
        ((X, [*Y[:5], None], X_TEST, Y_TEST), "y_train: some values are missing"),
        ((X, NAN[:, 1], X_TEST, X_TEST[:, 1]), "y_train has values that are missing"),
        ((X, X[:, :2], X_TEST, X_TEST), r"a target is \(2,\) in y_train, but \(4,\)"),
        ((X, X[:, :2].astype(int), X_TEST, Y_TEST), "y_train must have one label per sample"),
        ((X, np.array(3), X_TEST, Y_TEST), "y_train must have one entry per sample"),
        ((X, np.zeros(6, "datetime64[s]"), X_TEST, Y_TEST), "y_train must hold labels or numbers"),
        (({}, Y, {}, Y_TEST), "x_train is an empty dictionary"),
        (({"a": X, "b": X[:5]}, Y, {"a": X, "b": X}, Y), "different lengths: {'a': 6, 'b': 5}"),
        (({"a": X}, Y, X_TEST, Y_TEST), r"is a: float32 \(4,\) in x_train, but float32 \(4,\) in"),
        (({"a": X, "b": X}, Y, {"a": X}, Y), r"b: .* in x_train, but a: float32 \(4,\) in x_test"),
        (({"a": X}, Y, {"a": X[:, :2]}, Y), r"a: float32 \(2,\) in x_test: .* pad all to one"),
        (({"a": X.astype(str)}, Y, {"a": X}, Y), r"x_train\['a'\] must hold numbers"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        as_dataset(data)


def test_counts_are_not_taken_for_labels():
    x, counts = np.zeros((100, 1)), np.arange(100)
    with pytest.raises(DataError, match=r"100 different integers in 100 .*y.astype\(float\)"):
        as_dataset((x, counts, x, counts))
    assert as_dataset((x, counts % 50, x, counts % 50))[0].classes == 50


def test_test_data_is_given_once():
    with pytest.raises(DataError, match="test data is given twice"):
        as_dataset((X, Y, X_TEST, Y_TEST), (X_TEST, Y_TEST))
    with pytest.raises(DataError, match="test_data must be"):
        as_dataset((X, Y), X_TEST)


def test_sparse_matrices_are_refused():
    from scipy.sparse import csr_matrix

    with pytest.raises(DataError, match=r"x_train.toarray\(\)"):
        as_dataset((csr_matrix(X), Y, X_TEST, Y_TEST))


def test_data_frames():
    import pandas

    frame = pandas.DataFrame(X, columns=list("abcd")).assign(a=[1, 2, 3, 4, 5, 6])
    kinds = pandas.Series(["x", "y", "x", "y", "x", "y"])
    cities = pandas.Series(["Rome", "Bern", "Rome", "Bern", "Bern", "Bern"])
    data, parts = as_dataset((frame, kinds, frame, kinds), partition=cities)
    assert data.train_x.dtype == np.float32
    assert data.train_x[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert data.label_names == ("x", "y")
    assert data.client_names == ("Bern", "Rome")
    assert [part.tolist() for part in parts] == [[1, 3, 4, 5], [0, 2]]
    with pytest.raises(DataError, match="columns that are not numbers: city; .*get_dummies"):
        as_dataset((frame.assign(city=cities), kinds, frame, kinds))
    gap = frame.assign(a=pandas.array([1, 2, None, 4, 5, 6], dtype="Int64"))
    with pytest.raises(DataError, match="x_train has values that are missing"):
        as_dataset((gap, kinds, frame, kinds))


# --- client ids -----------------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 6) | st.sampled_from([10, 11]), min_size=1, max_size=40))
def test_every_sample_goes_to_the_client_of_its_id(ids):
    parts = clients_of(ids)[0]
    assert [{ids[i] for i in part} for part in parts] == [{k} for k in sorted(set(ids))]
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(ids)))
    assert all((np.diff(part) > 0).all() for part in parts)
    named = clients_of([f"client {k:+03d}" for k in ids])[0]
    assert len(named) == len(parts)


def test_clients_have_names_where_their_ids_say_more_than_numbers():
    def names(ids):
        return as_dataset((X, Y, X_TEST, Y_TEST), partition=ids)[0].client_names

    assert names([0, 1, 2, 0, 1, 2]) == ()
    assert names([0.0, 1.0, 2.0, 0.0, 1.0, 2.0]) == ()
    assert names(torch.tensor([7, 7, 9, 9, 9, 9])) == ("7", "9")
    assert names(np.array(list("bbaacc"), dtype=object)) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 0, 1, 0], "there are 5 client ids for 6 training samples"),
        (np.zeros((6, 2)), "one client id per sample, but they have the shape"),
        ([], "one client id per sample"),
        ([0, 1, np.nan, 0, 1, 0], "none may be missing"),
        (["a", None, "a", "b", "b", "a"], "the client ids: some values are missing"),
        ([0, 0.5, 1, 1, 1, 1], "must be all strings or all integers"),
        (np.array(["a", 1, "a", 1, 1, 1], dtype=object), "must be all strings or all integers"),
        ("hospital", "'hospital' names a column, but only a Hugging Face Dataset"),
    ],
)
def test_client_ids_that_cannot_be_are_refused(ids, message):
    with pytest.raises(DataError, match=message):
        as_dataset((X, Y, X_TEST, Y_TEST), partition=ids)


def test_ways_to_divide_samples_are_left_to_the_caller():
    assert as_dataset((X, Y, X_TEST, Y_TEST), partition=IID(2))[1] is None


# --- regression and what needs labels -------------------------------------------------------------


def test_targets_can_be_divided_by_value_but_not_by_label():
    targets = np.random.default_rng(0).normal(size=40).astype(np.float32)
    parts = Shards(4, 1).split(targets, stream(1, "partition"))
    ranges = sorted((targets[part].min(), targets[part].max()) for part in parts)
    assert all(high < low for (_, high), (low, _) in pairwise(ranges))
    with pytest.raises(ConfigError, match="needs labels, but the targets are floats: use iid"):
        Dirichlet(4, 0.5).split(targets, stream(1, "partition"))
    with pytest.raises(ConfigError, match="noisy_clients = 0.5: draws labels"):
        randomise_labels(targets, None, parts, 0.5, stream(1, "noise"))


# --- torch ----------------------------------------------------------------------------------------


class Items(TorchDataset):
    """A Dataset of what a test says."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def pairs(x=X, y=Y):
    return Items([(torch.from_numpy(a), int(b)) for a, b in zip(x, y, strict=True)])


def test_one_torch_dataset_per_client():
    tensors = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    clients = [pairs(), tensors, Subset(tensors, [1, 3]), ConcatDataset([pairs(X[:1], Y[:1])])]
    data, parts = as_dataset(clients, tensors)
    assert [len(part) for part in parts] == [6, 6, 2, 1]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(15))
    np.testing.assert_array_equal(data.train_x, np.concatenate([X, X, X[[1, 3]], X[:1]]))
    assert data.train_y.tolist() == [*Y, *Y, *Y[[1, 3]], *Y[:1]]
    assert data.classes == 3
    assert as_dataset(clients, (X_TEST, Y_TEST))[0].test_y.tolist() == Y_TEST.tolist()
    assert as_dataset(pairs(), pairs())[1] is None
    one, parts = as_dataset(pairs(), pairs(), partition=list("aabbcc"))
    assert (one.client_names, len(parts)) == (("a", "b", "c"), 3)


def test_items_of_torch_datasets():
    tokens = [{"ids": torch.tensor([1, 2]), "mask": [1, 0], "label": "no"},
              {"ids": torch.tensor([3, 4]), "mask": [1, 1], "label": "maybe"}]  # fmt: skip
    data, parts = as_dataset([Items(tokens[:1]), Items(tokens)], Items(tokens))
    assert data.train_x["ids"].tolist() == [[1, 2], [1, 2], [3, 4]]
    assert data.train_x["ids"].dtype == np.int64
    assert data.label_names == ("maybe", "no")
    assert len(parts) == 2
    renamed = Items([({"ids": item["ids"]}, 0.5) for item in tokens])
    regression, _ = as_dataset([renamed], renamed)
    assert (regression.classes, set(regression.train_x)) == (None, {"ids"})
    ints = Items([(torch.tensor([1, 2]), 0), (torch.tensor([1, 2]), 1)])
    assert as_dataset([ints], ints)[0].train_x.dtype == np.int64


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([pairs(), Items([])], r"data\[1\] has no samples: leave this client out"),
        ([Items([3, 4])], r"data\[0\]: sample 0 is a int, but must be"),
        ([Items([{"x": X[0], "kind": 1}])], "no label or labels or y, only x, kind: .*target="),
        ([pairs(), pairs(X[:, :2])], r"data\[1\]: sample 0 has the shape \(2,\)"),
        ([Items([(X[0], 1), (X[0], 0.5)])], "sample 1 is of type float64, but the first one of"),
        ([Endless()], r"data\[0\] has no length"),
    ],
)
def test_torch_datasets_that_cannot_be_read_are_refused(clients, message):
    with pytest.raises(DataError, match=message):
        as_dataset(clients, pairs())


def test_a_list_of_datasets_needs_test_data_and_no_partition():
    with pytest.raises(DataError, match="there is no test data"):
        as_dataset([pairs()])
    with pytest.raises(DataError, match="has one per client already"):
        as_dataset([pairs()], pairs(), partition=[0] * 6)


# --- Hugging Face ---------------------------------------------------------------------------------


def table(**changes):
    import datasets

    columns = {
        "input_ids": [[k, k + 1, 0] for k in range(6)],
        "attention_mask": [[1, 1, 0]] * 6,
        "label": Y.tolist(),
        "author": ["eve", "ada", "eve", "ada", "bob", "bob"],
    }
    columns |= changes
    return datasets.Dataset.from_dict({k: v for k, v in columns.items() if v is not None})


def test_a_hugging_face_dataset_with_a_column_of_client_ids():
    data, parts = as_dataset(table(), table(author=None), partition="author")
    assert data.client_names == ("ada", "bob", "eve")
    assert [part.tolist() for part in parts] == [[1, 3], [4, 5], [0, 2]]
    assert data.shape == {"input_ids": (3,), "attention_mask": (3,)}
    assert data.train_x["input_ids"].dtype == np.int64
    assert data.train_x["input_ids"][2].tolist() == [2, 3, 0]
    assert data.train_y.tolist() == Y.tolist()
    again, _ = as_dataset(table(), table(), partition="author")  # dropped from the test data too
    assert set(again.test_x) == {"input_ids", "attention_mask"}


def test_a_hugging_face_dataset_without_client_ids():
    import datasets

    plain = table(author=None, attention_mask=None)
    both = datasets.DatasetDict({"train": plain, "test": plain})
    data, parts = as_dataset(both)
    assert parts is None
    assert (data.shape, data.train_x.dtype) == ((3,), np.int64)  # one column: an array
    by_client, parts = as_dataset([plain, plain], plain)  # as flwr-datasets gives them
    assert [len(part) for part in parts] == [6, 6]
    assert by_client.shape == (3,)


def test_class_names_and_targets_of_a_hugging_face_dataset():
    import datasets

    named = table(author=None).cast_column("label", datasets.ClassLabel(names=["a", "b", "c"]))
    assert as_dataset(named, named)[0].label_names == ("a", "b", "c")
    prices = table(author=None, label=None, price=[0.5, 1.0, 2.0, 0.5, 1.0, 2.0])
    data, _ = as_dataset(prices, prices, target="price")
    assert data.classes is None
    assert data.train_y.tolist() == [0.5, 1.0, 2.0, 0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"partition": "auther"}, 'data has no auther, only .*did you mean "author"'),
        ({"label": None}, {"partition": "author"}, "data has no label or labels or y, only"),
        ({}, {"target": "lable"}, 'data has no lable, only .*did you mean "label"'),
        ({}, {}, r"x_train\['author'\] must hold numbers.*token ids"),
        ({"input_ids": [[1], [1, 2], [1], [1], [1], [1]]}, {"partition": "author"}, "Pad them"),
        ({"input_ids": None, "attention_mask": None}, {"partition": "author"}, "no column beside"),
    ],
)
def test_hugging_face_datasets_that_cannot_be_read_are_refused(changes, options, message):
    bad = table(**changes)
    with pytest.raises(DataError, match=message):
        as_dataset(bad, bad, **options)
