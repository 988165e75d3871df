"""Updates as vectors: which arrays of a model are weights, and which updates are too long.

An optimiser works on one flat vector; `Layout` converts Flower's named arrays to it and back.

Updates that are longer than usual are scaled down or refused, by the rule of
`fedcor.rounds.defence.update_norms`. The arrays that an optimiser works on are judged by one norm,
all other float arrays (a running variance, say) by another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcor.core import types
from fedcor.core.types import FloatArray, State
from fedcor.flower.reply_validation import main_arrays
from fedcor.rounds.defence.update_norms import PARTS, NormLimits, judge, no_norms, remember

# Names of arrays that are not weights: the running statistics of a batch normalisation in torch.
PLAIN = ("*running_mean", "*running_var", "*num_batches_tracked")
_RATES = ("lr", "learning-rate", "learning_rate")


@dataclass(frozen=True)
class Layout:
    """Which arrays of a model an optimiser works on, and where they are in its vector.

    Attributes:
        parts: (name, shape, type) of each of them, in the order of the model.
        dtype: Type of the vector's numbers.
    """

    parts: tuple[tuple[str, tuple[int, ...], np.dtype[np.generic]], ...]
    dtype: np.dtype[np.generic]

    def flatten(self, arrays: Mapping[str, types.Array]) -> types.Array:
        """(P,) these arrays in one vector."""
        vectors = [arrays[name].astype(self.dtype).ravel() for name, _, _ in self.parts]
        return np.concatenate([*vectors, np.empty(0, self.dtype)])

    def unflatten(self, vector: types.Array) -> dict[str, types.Array]:
        """The arrays in `vector`, each with its own shape and type."""
        arrays, start = {}, 0
        for name, shape, dtype in self.parts:
            end = start + math.prod(shape)
            arrays[name] = vector[start:end].reshape(shape).astype(dtype)
            start = end
        return arrays


def layout_of(model: Mapping[str, types.Array], plain: tuple[str, ...] = PLAIN) -> Layout:
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


def known_rate(config: ConfigRecord) -> float:
    """The learning rate in a train configuration, under its usual names; NaN without one."""
    given = [config.get(key) for key in _RATES]
    rates = [float(rate) for rate in given if isinstance(rate, int | float)]
    return rates[0] if rates else float("nan")


class JudgedReplies:
    """Judges the trained models of one attempt at a round, each once.

    Args:
        limits: How long an update may be.
        past: The lengths that earlier rounds accepted; empty before the first.
        model: w^t by the names of its arrays.
        plain: Patterns of the names of arrays that are no weights.

    Attributes:
        clipped: Client -> how many times the usual length its update had.
        refused: Client -> the same, of those that are not used.
        too_long: Client -> (PARTS,) the lengths of those.
    """

    def __init__(
        self,
        limits: NormLimits,
        past: State,
        model: Mapping[str, types.Array],
        plain: tuple[str, ...],
    ) -> None:
        self._limits, self._past, self._model = limits, past or no_norms(PARTS), model
        weights = {name for name, _, _ in layout_of(model, plain).parts}
        floats = [name for name, values in model.items() if values.dtype.kind == "f"]
        self._parts = (
            [name for name in floats if name in weights],
            [name for name in floats if name not in weights],
        )
        self._norms: dict[int, FloatArray] = {}
        self.too_long: dict[int, FloatArray] = {}
        self.clipped: dict[int, float] = {}
        self.refused: dict[int, float] = {}

    def add(self, contents: Mapping[int, RecordDict], rate: float) -> dict[int, RecordDict]:
        """Client -> its reply as it is used, of those that are; `rate` is the learning rate."""
        if not contents:
            return {}
        # A number that clients say, such as their steps, would let them say how long is usual.
        units = np.array([rate if rate > 0 and np.isfinite(rate) else 1.0, 1.0])
        norms = np.array([self._lengths(content) for content in contents.values()]) / units
        verdict = judge(self._limits, self._past, norms, self._accepted())
        used: dict[int, RecordDict] = {}
        for row, (client, content) in enumerate(contents.items()):
            ratio = float(verdict.ratios[row])
            if verdict.refused[row]:
                self.refused[client], self.too_long[client] = ratio, norms[row]
                continue
            if verdict.clipped[row]:
                self.clipped[client] = ratio
                content = self._scaled(content, verdict.factors[row].tolist())
            self._norms[client] = verdict.norms[row]
            used[client] = content
        return used

    def past(self, round: int) -> State:
        """What is known of usual lengths after the round."""
        return remember(self._past, self._accepted(), round, list(self._norms))

    def _accepted(self) -> FloatArray:
        return np.array(list(self._norms.values())).reshape(-1, PARTS)

    def _lengths(self, content: RecordDict) -> list[float]:
        """(PARTS) Lengths of the parts of an update; one array at a time is held."""
        record = main_arrays(content)
        return [
            float(np.sqrt(sum(self._square(name, record[name]) for name in names)))
            for names in self._parts
        ]

    def _square(self, name: str, array: Array) -> float:
        change = self._change(name, array).ravel()
        # Numbers are below 1e10 (screen.py), so float32 holds the sum of their squares.
        return float(np.dot(change, change))

    def _change(self, name: str, array: Array) -> types.Array:
        start = self._model[name]
        wide = np.result_type(np.float32, start.dtype)
        with np.errstate(invalid="ignore"):  # of infinite numbers that stay as they are
            change: types.Array = np.subtract(array.numpy(), start, dtype=wide)
        return change if np.isfinite(change).all() else np.where(np.isfinite(change), change, 0.0)

    def _scaled(self, content: RecordDict, factors: Sequence[float]) -> RecordDict:
        record = main_arrays(content)
        arrays = dict(record.items())
        for names, factor in zip(self._parts, factors, strict=True):
            for name in names if factor < 1.0 else ():
                start = self._model[name]
                scaled = start + factor * self._change(name, record[name])
                arrays[name] = Array(scaled.astype(start.dtype))
        key = next(iter(content.array_records))  # other records stay as they are, after it
        return RecordDict({**dict(content.items()), key: ArrayRecord(arrays)})
