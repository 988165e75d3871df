"""Samples and outputs as tensors: a batch is a tensor, or a dictionary of tensors.

The first dimension counts the samples. A module is called as `module(batch)` with either, so one
that takes a dictionary picks what it needs from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedcor.data import Samples
from fedcor.errors import FedcorError
from fedcor.types import Array

__all__ = ["Batch", "as_batch", "as_tensor", "outputs_of", "rows_of", "size_of", "transformed"]

Batch: TypeAlias = Tensor | dict[str, Tensor]


def as_tensor(array: Array) -> Tensor:
    """`array` as a tensor that shares its memory; nobody writes to it."""
    with warnings.catch_warnings():  # data that may only be read is welcome
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def as_batch(samples: Samples) -> Batch:
    """The samples of a data set as tensors that share their memory."""
    if isinstance(samples, Mapping):
        return {name: as_tensor(array) for name, array in samples.items()}
    return as_tensor(samples)


def transformed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """`change` of every tensor."""
    if isinstance(batch, Tensor):
        return change(batch)
    return {name: change(tensor) for name, tensor in batch.items()}


def rows_of(batch: Batch, rows: Tensor | slice) -> Batch:
    """Some of the samples: those that `rows` numbers, or a slice of them."""
    if isinstance(batch, Tensor):
        return batch[rows]
    return {name: tensor[rows] for name, tensor in batch.items()}


def size_of(batch: Batch) -> int:
    """The number of samples."""
    return len(batch if isinstance(batch, Tensor) else next(iter(batch.values())))


def outputs_of(result: Any) -> Tensor:
    """What a module returned, as a tensor: itself, or its `.logits`, as in Hugging Face's."""
    found = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    if not isinstance(found, Tensor):
        raise FedcorError(
            "the model must return a tensor, or an object with a tensor `.logits`, but returned a "
            f"{type(result).__name__}"
        )
    return found
