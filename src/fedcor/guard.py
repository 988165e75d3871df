"""Bad numbers from a client are refused and counted; they never reach the model of the federation."""

from __future__ import annotations

import numpy as np

from fedcor.types import FloatArray

__all__ = ["ABSURD", "screen_losses"]

# No loss of a model worth averaging is this large; one that claims to be would drag every fit and every ranking with it.
ABSURD = 1e6


def screen_losses(answers: FloatArray) -> tuple[FloatArray, int]:
    """The answers with NaN for every unusable one (not finite, or absurd), and how many were refused."""
    usable = np.isfinite(answers) & (np.abs(np.where(np.isfinite(answers), answers, 0.0)) <= ABSURD)
    return np.where(usable, answers, np.nan), int(np.count_nonzero(~usable))
