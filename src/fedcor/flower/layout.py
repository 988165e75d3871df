"""Flower's named arrays as the one flat vector that an optimiser works on, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from fedcor.types import Array

__all__ = ["PLAIN", "Layout", "layout_of"]

# Names of arrays that are not weights: the running statistics of a batch normalisation in torch.
PLAIN = ("*running_mean", "*running_var", "*num_batches_tracked")


@dataclass(frozen=True)
class Layout:
    """Which arrays of a model an optimiser works on, and where they are in its vector.

    Attributes:
        parts: (name, shape, type) of each of them, in the order of the model.
        dtype: Type of the vector's numbers.
    """

    parts: tuple[tuple[str, tuple[int, ...], np.dtype[np.generic]], ...]
    dtype: np.dtype[np.generic]

    def flatten(self, arrays: Mapping[str, Array]) -> Array:
        """(P,) these arrays in one vector."""
        vectors = [arrays[name].astype(self.dtype).ravel() for name, _, _ in self.parts]
        return np.concatenate([*vectors, np.empty(0, self.dtype)])

    def unflatten(self, vector: Array) -> dict[str, Array]:
        """The arrays in `vector`, each with its own shape and type."""
        arrays, start = {}, 0
        for name, shape, dtype in self.parts:
            end = start + math.prod(shape)
            arrays[name] = vector[start:end].reshape(shape).astype(dtype)
            start = end
        return arrays


def layout_of(model: Mapping[str, Array], plain: tuple[str, ...] = PLAIN) -> Layout:
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
