"""Accept, clip or refuse each update of a round by its length, the same on every engine.

An engine measures the lengths and applies the verdict; the rule is in
`fedcor.rounds.defence.update_norms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedcor.core.types import Array, BoolArray, FloatArray, State
from fedcor.rounds.defence.update_norms import PARTS, NormLimits, judge, no_norms, remember
from fedcor.rounds.model_arrays import Arrays, Layout

NOT_FINITE, TOO_LONG = "not finite", "too long"  # why an update is refused


class UpdateFilter:
    """Judges the updates of one round, each once, when it arrives.

    Args:
        limits: How long an update may be.
        past: The lengths of updates that earlier rounds accepted; empty before the first.
        step_size: Learning rate x local steps of the round, or as much of it as is known. The
            length of parameters is divided by it. Other than a positive number counts as 1.
        refused: Client -> (PARTS,) the lengths of its update, of those that an earlier attempt at
            the round refused for them.

    Attributes:
        clipped: Client -> how many times the usual length its update had, of those scaled down.
        refused: Reason -> the clients whose update was refused, sorted.
        too_long: Client -> how many times the usual length its update had, of those refused for it.
        refused_lengths: Client -> (PARTS,) the lengths of its update, of those and of `refused`.
    """

    def __init__(
        self,
        limits: NormLimits,
        past: State,
        step_size: float = 1.0,
        refused: Mapping[int, FloatArray] | None = None,
    ) -> None:
        usable = step_size > 0 and np.isfinite(step_size)
        self._limits, self._past = limits, past or no_norms(PARTS)
        self._units = np.array([step_size if usable else 1.0, 1.0])  # (PARTS,)
        self._norms: dict[int, FloatArray] = {}
        self.refused_lengths: dict[int, FloatArray] = dict(refused or {})
        self.clipped: dict[int, float] = {}
        self.refused: dict[str, list[int]] = {}
        self.too_long: dict[int, float] = {}

    def __contains__(self, client: int) -> bool:
        return client in self._norms

    def judge(self, clients: Sequence[int], lengths: FloatArray) -> dict[int, FloatArray]:
        """Client -> (PARTS,) the factors that scale its update, of those that are accepted.

        Args:
            clients: (m) Who sent the updates.
            lengths: (m, PARTS) Of the parameters and of the float buffers of each update. The
                length of a vector is finite only if all of its numbers are.
        """
        finite: BoolArray = np.all(np.isfinite(lengths), axis=1)
        self.refuse(NOT_FINITE, [k for k, ok in zip(clients, finite, strict=True) if not ok])
        rows = np.flatnonzero(finite)
        if not len(rows):
            return {}
        norms = lengths[rows] / self._units
        verdict = judge(self._limits, self._past, norms, _stacked(self._norms))
        accepted: dict[int, FloatArray] = {}
        clipped = verdict.clipped
        for at, row in enumerate(rows.tolist()):
            client = clients[row]
            if verdict.refused[at]:
                self.refuse(TOO_LONG, [client])
                self.refused_lengths[client] = norms[at]
                self.too_long[client] = float(verdict.ratios[at])
                continue
            if clipped[at]:
                self.clipped[client] = float(verdict.ratios[at])
            self._norms[client] = verdict.norms[at]
            accepted[client] = verdict.factors[at]
        return accepted

    @property
    def refused_clients(self) -> list[int]:
        """All clients whose update was refused, sorted."""
        return sorted(client for clients in self.refused.values() for client in clients)

    def refuse(self, why: str, clients: Sequence[int]) -> None:
        """Count updates that cannot be used."""
        if clients:
            self.refused[why] = sorted([*self.refused.get(why, []), *clients])

    def past(self, round: int, *, wrong: bool = False, alone: bool = False) -> State:
        """The lengths for the next round to compare with.

        Args:
            round: The number of this round.
            wrong: Whether lengths that were refused count too: the past may be wrong where every
                update is refused and the model is not at fault.
            alone: Whether such lengths replace the past, instead of outvoting it in time.
        """
        known = {**self._norms, **(self.refused_lengths if wrong else {})}
        reset = wrong and alone and len(known) > 0
        before = no_norms(PARTS) if reset else self._past
        return remember(before, _stacked(known), round, list(known))


def _stacked(norms: dict[int, FloatArray]) -> FloatArray:
    """(m, PARTS) the rows of `norms`."""
    return np.array(list(norms.values())).reshape(-1, PARTS)


class ArrayChanges:
    """What training changed in a model of named arrays: in its weights, and in its float buffers.

    Args:
        model: w^t.
        layout: Which of its arrays are weights.
    """

    def __init__(self, model: Arrays, layout: Layout) -> None:
        self._model = model
        weights = {name for name, _, _ in layout.parts}
        floats = [name for name, values in model.items() if values.dtype.kind == "f"]
        self._parts = (
            [name for name in floats if name in weights],
            [name for name in floats if name not in weights],
        )

    def lengths(self, trained: Arrays) -> list[float]:
        """(PARTS) The length of each part of the update."""
        return [
            float(np.sqrt(sum(self._square(name, trained[name]) for name in names)))
            for names in self._parts
        ]

    def scaled(self, trained: Arrays, factors: Sequence[float]) -> dict[str, Array]:
        """The trained arrays, with each part of the update scaled by its factor."""
        arrays = dict(trained)
        for names, factor in zip(self._parts, factors, strict=True):
            for name in names if factor < 1.0 else ():
                start = self._model[name]
                scaled = start + factor * self._change(name, trained[name])
                arrays[name] = scaled.astype(start.dtype)
        return arrays

    def _square(self, name: str, values: Array) -> float:
        change = self._change(name, values).ravel()
        # Numbers are below 1e10 (`numbers_fault`), so float32 holds the sum of their squares.
        return float(np.dot(change, change))

    def _change(self, name: str, values: Array) -> Array:
        start = self._model[name]
        wide = np.result_type(np.float32, start.dtype)
        with np.errstate(invalid="ignore"):  # of infinite numbers that stay as they are
            change: Array = np.subtract(values, start, dtype=wide)
        return change if np.isfinite(change).all() else np.where(np.isfinite(change), change, 0.0)
