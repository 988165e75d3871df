"""Accept, clip or refuse each update of a round by its length, the same on every engine.

An engine measures the lengths and applies the verdict; the rule is in
`fedcor.rounds.defence.update_norms`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, State
from fedcor.rounds.defence.update_norms import PARTS, NormLimits, judge, no_norms, remember

NOT_FINITE, TOO_LONG = "not finite", "too long"  # why an update is refused


class UpdateFilter:
    """Judges the updates of one round, each once, when it arrives.

    Args:
        limits: How long an update may be.
        past: The lengths of updates that earlier rounds accepted; empty before the first.
        step_size: Learning rate x local steps of the round, or as much of it as is known. The
            length of parameters is divided by it. Other than a positive number counts as 1.

    Attributes:
        clipped: Client -> how many times the usual length its update had, of those scaled down.
        refused: Reason -> the clients whose update was refused, sorted.
        too_long: Client -> how many times the usual length its update had, of those refused for it.
    """

    def __init__(self, limits: NormLimits, past: State, step_size: float = 1.0) -> None:
        usable = step_size > 0 and np.isfinite(step_size)
        self._limits, self._past = limits, past or no_norms(PARTS)
        self._units = np.array([step_size if usable else 1.0, 1.0])  # (PARTS,)
        self._norms: dict[int, FloatArray] = {}
        self._too_long: dict[int, FloatArray] = {}
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
                self._too_long[client] = norms[at]
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
        known = {**self._norms, **(self._too_long if wrong else {})}
        reset = wrong and alone and len(known) > 0
        before = no_norms(PARTS) if reset else self._past
        return remember(before, _stacked(known), round, list(known))


def _stacked(norms: dict[int, FloatArray]) -> FloatArray:
    """(m, PARTS) the rows of `norms`."""
    return np.array(list(norms.values())).reshape(-1, PARTS)
