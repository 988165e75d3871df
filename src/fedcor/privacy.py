"""Gaussian noise on the losses that clients report, and what it guarantees.

Notation:
    c       clip: a report is cut to [0, c] before noise is added
    sigma   standard deviation of the noise
    Delta   sensitivity: by how much a report can differ. c, if a client's data may be any other;
            c/n for one of n samples, if the client cuts the loss of each sample to [0, c]
    (epsilon, delta)    differential privacy of one report; several reports add up
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.checks import check_between, check_positive
from fedcor.errors import ConfigError
from fedcor.types import FloatArray

__all__ = ["LossNoise", "epsilon_of"]


@dataclass(frozen=True)
class LossNoise:
    """Adds noise to reported losses.

    Args:
        sigma: Standard deviation of the noise; 0 for none, and then reports stay as they are.
        clip: c, the largest report before noise.
    """

    sigma: float = 0.0
    clip: float = 10.0

    def __post_init__(self) -> None:
        check_between("loss_noise", self.sigma, 0.0, 1e6)
        check_positive("loss_clip", self.clip)
        check_between("loss_clip", self.clip, 0.0, 1e6)

    def add(self, losses: FloatArray, rng: np.random.Generator) -> FloatArray:
        """The reports of as many losses; what is no number stays none."""
        if not self.sigma:
            return losses
        noise = rng.normal(0.0, self.sigma, np.shape(losses))
        return np.clip(losses, 0.0, self.clip) + noise


def epsilon_of(sigma: float, sensitivity: float, delta: float, reports: int = 1) -> float:
    """The smallest epsilon for which `reports` reports are (epsilon, delta) differentially private.

    The exact condition for Gaussian noise (Balle and Wang 2018, Theorem 8). Reports to the same
    server add up as if one report had sqrt(reports) times the sensitivity, whatever was asked.

    Args:
        sigma: Standard deviation of the noise.
        sensitivity: Delta, of one report.
        delta: In (0, 1).
        reports: How many reports a client makes.

    Example:
        >>> round(epsilon_of(1.0, 1.0, 1e-5), 2)
        4.38
    """
    from scipy.optimize import brentq  # here: experiments need none of it
    from scipy.special import log_ndtr, ndtr

    check_positive("sigma", sigma)
    check_positive("sensitivity", sensitivity)
    if not 0.0 < delta < 1.0:
        raise ConfigError("delta", delta, "must be between 0 and 1")
    ratio = sensitivity * float(np.sqrt(reports)) / sigma

    def excess(epsilon: float) -> float:
        # Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r) - delta, r = Delta / sigma
        second = np.exp(epsilon + log_ndtr(-ratio / 2 - epsilon / ratio))
        return float(ndtr(ratio / 2 - epsilon / ratio) - second - delta)

    if excess(0.0) <= 0.0:
        return 0.0
    most = 1.0
    while excess(most) > 0.0:
        most *= 2.0
    return float(brentq(excess, 0.0, most, xtol=1e-9))
