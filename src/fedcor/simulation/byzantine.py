"""Simulated Byzantine clients: clients that send false updates or report false losses.

They are drawn from the stream (seed, "liars") alone, so every selector meets the same ones, and
everything else in a run is drawn as it would be without them. Updates and losses are falsified
where they leave the client. The test of the model is honest.
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
    """Which clients of a simulated federation are Byzantine, and how; by default, none.

    | kind | update | reported losses |
    |---|---|---|
    | `flip` | times -1 | times `inflation` |
    | `scale` | times `factor` | true |
    | `copy` | the last change of the global model; in round 0 the true one | true |
    | `inflate` | true | times `inflation` |
    | `deflate` | true | divided by `inflation` |

    Args:
        fraction: Fraction of Byzantine clients, in [0, 1], rounded to whole clients.
        kind: What they send.
        factor: What `scale` multiplies an update by, from 0 to 1e6.
        inflation: What reported losses are multiplied or divided by, from 1 to 1e6.

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
        """Whether there are Byzantine clients."""
        return self.fraction > 0.0

    @property
    def copies(self) -> bool:
        """Whether the clients need the last change of the global model."""
        return bool(self) and self.kind == "copy"

    def who(self, seed: int, clients: int) -> BoolArray:
        """(N,) which clients are Byzantine, in every round.

        Raises:
            ConfigError: The fraction is above 0, but makes up no whole client.
        """
        chosen = np.zeros(clients, dtype=bool)
        if not self:
            return chosen
        count = round(self.fraction * clients)
        if not count:
            allowed = f"is less than one of {clients} clients"
            raise ConfigError("byzantine.fraction", self.fraction, allowed)
        chosen[stream(seed, "liars").permutation(clients)[:count]] = True
        return chosen

    def reported_losses(self, losses: FloatArray, byzantine: BoolArray) -> FloatArray:
        """(m,) the losses as clients report them.

        Args:
            losses: (m,) The true losses.
            byzantine: (m,) Which of these clients are Byzantine.
        """
        if self.kind in ("flip", "inflate"):
            return np.where(byzantine, losses * self.inflation, losses)
        if self.kind == "deflate":
            return np.where(byzantine, losses / self.inflation, losses)
        return losses

    def sent_update(self, update: Any, last_change: Any) -> Any:
        """(P,) the update that a Byzantine client sends: a NumPy array or a tensor, as `update` is.

        Args:
            update: (P,) The result of its training.
            last_change: (P,) Last change of the global model, w^t - w^(t-1); None in round 0.
        """
        if self.kind == "flip":
            return -update
        if self.kind == "scale":
            return self.factor * update
        if self.kind == "copy" and last_change is not None:
            return last_change
        return update
