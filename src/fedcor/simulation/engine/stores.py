"""Where the data of the clients is: all of it in memory, or loaded when it is needed.

Each client's samples are shuffled, and the last of them are held out, where a share is. Losses are
measured on those, else on all samples of the client. Both stores give the same samples in the same
order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcor.core.errors import blame
from fedcor.core.rng import stream
from fedcor.core.types import IntArray
from fedcor.data.client_data import ClientData, check_loaded
from fedcor.data.datasets import Dataset
from fedcor.simulation.engine.models import Batch, as_batch, as_tensor, rows_of, tensors_of

_ROWS_AT_ONCE = 20_000  # of data that is loaded to measure losses
_KEPT_BYTES = 16e6  # of loaded data: who is asked for a loss is often asked again


class Training(NamedTuple):
    """Data of some clients, to train on."""

    x: Batch
    y: Tensor
    rows: list[IntArray]  # of each of the clients, in x and y


class Measured(NamedTuple):
    """Data of some clients that losses are measured on, one client after the other."""

    x: Batch
    y: Tensor
    sizes: IntArray  # rows of each of the clients


class Store(ABC):
    """The data of N clients.

    Args:
        totals: (N,) Samples of each client.
        holdout: Share of each client's data that is kept out of training.

    Attributes:
        held: (N,) Samples that are held out.
        sizes: (N,) Samples that each client trains on.
        measured_sizes: (N,) Samples that its loss is measured on.
        largest: Samples of the largest client, held out or not.
    """

    def __init__(self, totals: IntArray, holdout: float) -> None:
        self.held = np.floor(holdout * totals).astype(np.int64)
        self.sizes: IntArray = totals - self.held
        self.measured_sizes: IntArray = np.where(self.held > 0, self.held, totals)
        self.largest = int(totals.max())

    @abstractmethod
    def training(self, clients: Sequence[int]) -> Training:
        """What some clients train on."""

    @abstractmethod
    def measured(self, clients: IntArray) -> Iterator[Measured]:
        """What the losses of clients are measured on, in pieces of whole clients."""


class HeldData(Store):
    """All data in memory, client by client: what a client has is contiguous.

    Args:
        data: Training and test data.
        parts: For each client, its rows of the training data.
        seed: The seed of the run.
        holdout: Share of each client's data that is kept out of training.
        place: Puts a batch where it is computed with.
    """

    def __init__(
        self,
        data: Dataset,
        parts: Sequence[IntArray],
        seed: int,
        holdout: float,
        place: Callable[[Batch], Batch],
    ) -> None:
        parts = [stream(seed, "holdout", k).permutation(part) for k, part in enumerate(parts)]
        sizes = np.array([len(part) for part in parts])
        super().__init__(sizes, holdout)
        ends = np.cumsum(sizes)
        # Rows that each client trains on, and rows that its loss is measured on.
        starts, stops = ends - sizes, ends - self.held
        self._rows = [np.arange(s, e) for s, e in zip(starts, stops, strict=True)]
        starts = ends - self.measured_sizes
        self._measured = [torch.arange(s, e) for s, e in zip(starts, ends, strict=True)]
        order = torch.from_numpy(np.concatenate(parts))
        self._x = place(rows_of(as_batch(data.train_x), order))
        self._y = as_tensor(data.train_y).to(_device(self._x))[order]

    def training(self, clients: Sequence[int]) -> Training:
        """Everything, and the rows of each client."""
        return Training(self._x, self._y, [self._rows[k] for k in clients])

    def measured(self, clients: IntArray) -> Iterator[Measured]:
        """In one piece; of a single client, and of everyone, without a copy."""
        sizes = self.measured_sizes[clients]
        everyone = np.array_equal(clients, np.arange(len(self._measured)))
        if everyone and int(sizes.sum()) == len(self._y):  # nothing is held out
            yield Measured(self._x, self._y, sizes)
        elif len(clients) == 1:
            own = self._measured[int(clients[0])]
            rows = slice(int(own[0]), int(own[-1]) + 1)
            yield Measured(rows_of(self._x, rows), self._y[rows], sizes)
        else:
            gathered = torch.cat([self._measured[k] for k in clients]).to(self._y.device)
            yield Measured(rows_of(self._x, gathered), self._y[gathered], sizes)


class LoadedData(Store):
    """Data that is loaded when it is needed. A little of it is kept, for the next question.

    Args:
        data: Has the test data, which says what a sample looks like.
        clients: Loads the data of a client.
        seed: The seed of the run.
        holdout: Share of each client's data that is kept out of training.
        place: Puts a batch where it is computed with.
    """

    def __init__(
        self,
        data: Dataset,
        clients: ClientData,
        seed: int,
        holdout: float,
        place: Callable[[Batch], Batch],
    ) -> None:
        self._data, self._clients, self._seed, self._place = data, clients, seed, place
        self._all = np.asarray(clients.sizes, dtype=np.int64)
        super().__init__(self._all, holdout)
        self._kept: OrderedDict[int, tuple[Batch, Tensor]] = OrderedDict()
        self._kept_bytes = 0

    def training(self, clients: Sequence[int]) -> Training:
        """The data of these clients, one after the other."""
        x, y = _joined([self._load(k) for k in clients])
        ends = np.cumsum(self._all[np.asarray(clients)])
        starts = ends - self._all[np.asarray(clients)]
        rows = [np.arange(s, s + self.sizes[k]) for s, k in zip(starts, clients, strict=True)]
        return Training(x, y, rows)

    def measured(self, clients: IntArray) -> Iterator[Measured]:
        """In pieces, so that few clients are in memory at once."""
        sizes = self.measured_sizes[clients]
        piece = np.cumsum(sizes) // _ROWS_AT_ONCE
        for group in np.split(np.arange(len(clients)), np.flatnonzero(np.diff(piece)) + 1):
            parts = []
            for k, size in zip(clients[group].tolist(), sizes[group].tolist(), strict=True):
                x, y = self._load(k)
                last = slice(len(y) - size, len(y))
                parts.append((rows_of(x, last), y[last]))
            yield Measured(*_joined(parts), sizes[group])

    def _load(self, client: int) -> tuple[Batch, Tensor]:
        """Samples and targets of a client, shuffled."""
        if client in self._kept:
            self._kept.move_to_end(client)
            return self._kept[client]
        with blame(f"client {client}: its data could not be loaded"):
            loaded = self._clients.load(client)
        x, y = check_loaded(self._data, client, int(self._all[client]), loaded)
        order = torch.from_numpy(stream(self._seed, "holdout", client).permutation(len(y)))
        samples = self._place(rows_of(as_batch(x), order))
        found = samples, as_tensor(y)[order].to(_device(samples))
        self._kept[client] = found
        self._kept_bytes += _bytes(*found)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _bytes(*self._kept.popitem(last=False)[1])
        return found


def _joined(parts: Sequence[tuple[Batch, Tensor]]) -> tuple[Batch, Tensor]:
    """Samples and targets of several clients as one batch."""
    first, y = parts[0][0], torch.cat([y for _, y in parts])
    x = {name: torch.cat([tensors_of(x)[name] for x, _ in parts]) for name in tensors_of(first)}
    return x if isinstance(first, dict) else x[""], y


def _device(batch: Batch) -> torch.device:
    return next(iter(tensors_of(batch).values())).device


def _bytes(x: Batch, y: Tensor) -> int:
    return sum(tensor.nbytes for tensor in (*tensors_of(x).values(), y))
