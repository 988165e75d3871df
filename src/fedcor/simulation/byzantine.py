"""Simulated Byzantine clients: clients that send false updates or report false losses.

Who lies is drawn from the stream (seed, "liars") alone, so every selector meets the same byzantine, and
everything else of a run is drawn as it would be without them. A lie is told where a client speaks:
a selector, and the aggregation, hear it by every path. The test of the model stays honest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fedcor.core.config import check_between, check_fraction, check_one_of, plain_keywords
from fedcor.core.errors import ConfigError
from fedcor.core.rng import stream
from fedcor.core.types import BoolArray, FloatArray

Kind = Literal["flip", "scale", "copy", "inflate", "deflate"]

_LARGEST_FACTOR = 1e6


@plain_keywords
@dataclass(frozen=True)
class Byzantine:
    """Which clients of a simulated federation lie, and how; by default, none.

    | kind | its update | the losses that it reports |
    |---|---|---|
    | `flip` | times -1 | times `inflation` |
    | `scale` | times `factor` | true |
    | `copy` | the last change of the global model; in round 0 its own | true |
    | `inflate` | true | times `inflation` |
    | `deflate` | true | divided by `inflation` |

    Args:
        fraction: Share of the clients that lie, in [0, 1], rounded to whole clients.
        kind: How they lie.
        factor: By how much `scale` multiplies an update, from 0 to 1e6.
        inflation: By how much reported losses are multiplied or divided, from 1 to 1e6.

    Example:
        >>> from fedcor import Byzantine
        >>> byzantine = Byzantine(fraction=0.1, kind="flip")
        >>> int(byzantine.who(seed=1, clients=50).sum())
        5
    """

    fraction: float = 0.0
    kind: Kind = "flip"
    factor: float = 30.0
    inflation: float = 10.0

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction, closed=True)
        check_one_of("kind", self.kind, get_args(Kind))
        check_between("factor", self.factor, 0.0, _LARGEST_FACTOR)
        check_between("inflation", self.inflation, 1.0, _LARGEST_FACTOR)

    def __bool__(self) -> bool:
        """Whether anybody may lie."""
        return self.fraction > 0.0

    @property
    def copies(self) -> bool:
        """Whether byzantine need to know the last change of the global model."""
        return bool(self) and self.kind == "copy"

    def who(self, seed: int, clients: int) -> BoolArray:
        """(N,) which clients lie: the same in every round.

        Raises:
            ConfigError: The fraction is above 0, but makes up no whole client.
        """
        byzantine = np.zeros(clients, dtype=bool)
        if not self:
            return byzantine
        count = round(self.fraction * clients)
        if not count:
            allowed = f"is less than one of {clients} clients"
            raise ConfigError("byzantine.fraction", self.fraction, allowed)
        byzantine[stream(seed, "liars").permutation(clients)[:count]] = True
        return byzantine

    def told(self, losses: FloatArray, lies: BoolArray) -> FloatArray:
        """The losses as they are reported.

        Args:
            losses: (m,) True ones.
            lies: (m,) Who of them lies.
        """
        if self.kind in ("flip", "inflate"):
            return np.where(lies, losses * self.inflation, losses)
        if self.kind == "deflate":
            return np.where(lies, losses / self.inflation, losses)
        return losses

    def sent(self, update: Any, last_change: Any) -> Any:
        """The update that a Byzantine client sends, an array of NumPy's or of torch's as the given ones.

        Args:
            update: (P,) What its training gave.
            last_change: (P,) Of the global model, w^t - w^(t-1); None in round 0.
        """
        if self.kind == "flip":
            return -update
        if self.kind == "scale":
            return self.factor * update
        if self.kind == "copy" and last_change is not None:
            return last_change
        return update
