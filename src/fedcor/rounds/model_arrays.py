"""A model as named NumPy arrays: its form at the edge, and the vector that an optimiser works on.

`ModelForm` converts what people call a model (an array, a list or a dictionary of arrays, of torch
tensors too) to named arrays and back. `Layout` puts those that are weights into one flat vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np

from fedcor.core.errors import FedcorError
from fedcor.core.text import listed
from fedcor.core.types import Array

# A model by the names of its arrays.
Arrays: TypeAlias = Mapping[str, Array]
# Names of arrays that are not weights: the running statistics of a batch normalisation in torch.
PLAIN = ("*running_mean", "*running_var", "*num_batches_tracked")
ABSURD_WEIGHT = 1e10  # no weight of a model is this large


@dataclass(frozen=True)
class Layout:
    """Which arrays of a model an optimiser works on, and where they are in its vector.

    Attributes:
        parts: (name, shape, type) of each of them, in the order of the model.
        dtype: Type of the vector's numbers.
    """

    parts: tuple[tuple[str, tuple[int, ...], np.dtype[np.generic]], ...]
    dtype: np.dtype[np.generic]

    def flatten(self, arrays: Arrays) -> Array:
        """(P,) these arrays in one vector."""
        vectors = [arrays[name].astype(self.dtype).ravel() for name, _, _ in self.parts]
        return np.concatenate([*vectors, np.empty(0, self.dtype)])

    def unflatten(self, vector: Array) -> dict[str, Array]:
        """The arrays in `vector`, each with its own shape and type."""
        arrays, start = {}, 0
        for name, shape, dtype in self.parts:
            end, part = start + math.prod(shape), vector[start : start + math.prod(shape)]
            if dtype != self.dtype:  # what does not fit the smaller type becomes its largest number
                limits: Any = np.finfo(str(dtype))
                part = np.clip(part, limits.min, limits.max)
            arrays[name], start = part.reshape(shape).astype(dtype), end
        return arrays

    @property
    def head(self) -> slice:
        """Where the output layer is in the vector: its last matrix, and the bias after it if any.

        All of the vector, where there is no matrix.
        """
        shapes = [shape for _, shape, _ in self.parts]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        matrices = [i for i, shape in enumerate(shapes) if len(shape) >= 2]
        if not matrices:
            return slice(None)
        last = matrices[-1]
        biases = ((shapes[last][0],), (shapes[last][-1],))
        follows = last + 1 < len(shapes) and shapes[last + 1] in biases
        return slice(int(ends[last]) - math.prod(shapes[last]), int(ends[last + follows]))


def layout_of(model: Arrays, plain: Sequence[str] = PLAIN) -> Layout:
    """The layout of a model's float arrays, except those whose name matches a pattern of `plain`.

    An array with numbers that are not finite, such as a mask of -inf, is no weight either. The
    vector is of float32, or of float64 where one of these arrays is.

    Example:
        >>> model = {"w": np.ones((2, 2)), "norm.running_var": np.ones(2), "steps": np.array(3)}
        >>> [name for name, _, _ in layout_of(model).parts]
        ['w']
    """
    parts = tuple(
        (name, values.shape, values.dtype)
        for name, values in model.items()
        if values.dtype.kind == "f"
        and not any(fnmatchcase(name, pattern) for pattern in plain)
        and np.isfinite(values).all()
    )
    return Layout(parts, np.result_type(np.float32, *(dtype for _, _, dtype in parts)))


def shape_fault(values: Array, like: Array) -> str:
    """Why an array cannot take the place of `like`, by shape and type; empty if it can.

    Whole numbers do not stand for floats: somebody has rounded a model.
    """
    kinds = "f" if like.dtype.kind == "f" else "fiub"
    if values.shape == like.shape and values.dtype.kind in kinds:
        return ""
    return f"is {values.dtype}{list(values.shape)}, not {like.dtype}{list(like.shape)}"


def numbers_fault(values: Array, like: Array) -> str:
    """What is wrong with the numbers of a model's array; empty if nothing is.

    Where `like`, the server's array, is not finite (a mask of -inf), equal numbers are right. In
    the place of whole numbers, there must be whole numbers that fit their type.
    """
    if like.dtype.kind != "f":
        limits: Any = None if like.dtype.kind == "b" else np.iinfo(like.dtype)
        low, high = (0, 1) if limits is None else (limits.min, limits.max)
        fits = not values.size or (values.min() >= low and values.max() <= high)
        whole = values.dtype.kind != "f" or np.array_equal(values, np.rint(values))
        return "" if whole and fits else f"has numbers that do not fit {like.dtype}"
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(values.astype(np.float64, copy=False)) <= ABSURD_WEIGHT)
    if not bad.any() or np.array_equal(values[bad], like[bad], equal_nan=like.dtype.kind == "f"):
        return ""
    return "has numbers that are not finite or absurdly large"


@dataclass(frozen=True)
class ModelForm:
    """What a model looks like at the edge.

    Attributes:
        kind: "array", "list", "tuple" or "dict".
        keys: Name -> what a dictionary calls the array.
        tensors: Name -> device, of the arrays that are torch tensors.
    """

    kind: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def wrap(self, arrays: Arrays) -> Any:
        """A model of this form with copies of `arrays`, which the user may change."""
        values = {key: self._value(name, arrays[name]) for name, key in self.keys.items()}
        if self.kind == "array":
            return next(iter(values.values()))
        if self.kind == "dict":
            return values
        return tuple(values.values()) if self.kind == "tuple" else list(values.values())

    def read(self, given: Any) -> dict[str, Array]:
        """Copies of the named arrays of such a model. Raises FedcorError for another one."""
        values = named_arrays(given)
        if set(values) != set(self.keys):
            raise FedcorError(
                f"a model must have the arrays {_listed(self.keys)}, not {_listed(values)}"
            )
        return {name: as_array(values[name]).copy() for name in self.keys}

    def _value(self, name: str, array: Array) -> Any:
        if name not in self.tensors:
            return array.copy()
        import torch

        return torch.from_numpy(array.copy()).to(self.tensors[name])


def form_of(model: Any) -> ModelForm:
    """The form of a user's model.

    Raises:
        FedcorError: It is none that can be read.
    """
    named = named_arrays(model)
    for name, value in named.items():
        if as_array(value).dtype.kind not in "fiub":
            raise FedcorError(f"the model's array {name!r} does not hold numbers")
    tensors = {name: value.device for name, value in named.items() if hasattr(value, "detach")}
    kinds = ((Mapping, "dict"), (list, "list"), (tuple, "tuple"))
    kind = next((name for of, name in kinds if isinstance(model, of)), "array")
    if not named:
        raise FedcorError("the model has no arrays")
    keys = list(model) if kind == "dict" else list(named)
    if len(keys) != len(named):
        raise FedcorError(f"two arrays of the model have the same name: {_listed(keys)}")
    return ModelForm(kind, dict(zip(named, keys, strict=True)), tensors)


def as_array(value: Any) -> Array:
    """A NumPy array of an array or a torch tensor, which is not copied where it need not be.

    Raises:
        FedcorError: NumPy has no such type of numbers, or it is no array.
    """
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except Exception as error:  # whatever a user's array raises
        kind = getattr(value, "dtype", type(value).__name__)
        raise FedcorError(f"{kind} cannot be read as a NumPy array: use float32") from error


def named_arrays(model: Any) -> dict[str, Any]:
    """The arrays of a user's model, or what is in their place, by name."""
    if isinstance(model, Mapping):
        return {str(name): value for name, value in model.items()}
    if isinstance(model, list | tuple):
        return {str(place): value for place, value in enumerate(model)}
    if hasattr(model, "state_dict"):
        raise FedcorError("give the module's state_dict(), not the module")
    return {"model": model}


def _listed(names: Iterable[Any]) -> str:
    return listed([repr(name) for name in names])
