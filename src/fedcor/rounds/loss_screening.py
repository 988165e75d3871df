"""Losses that clients report: unusable ones are dropped, outliers clipped, noise added for privacy.

Notation for the noise
    c       clip: a report is cut to [0, c] before noise is added
    sigma   standard deviation of the noise
    Delta   sensitivity: by how much a report can differ. c, if a client's data may be any other;
            c/n for one of n samples, if the client cuts the loss of each sample to [0, c]
    (epsilon, delta)    differential privacy of one report; several reports add up
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.core.config import check_between, check_fraction, check_positive
from fedcor.core.types import FloatArray

# No model worth averaging has a loss this large, and such a report would dominate every fit and
# every ranking.
LARGEST_LOSS = 1e6
FEWEST_REPORTS = 5  # answers whose median is meaningful
_TO_SIGMA = 1.4826  # the standard deviation of a normal distribution, in units of its MAD


def screen_losses(answers: FloatArray) -> tuple[FloatArray, int]:
    """Replace unusable answers (not finite, or absurdly large) by NaN.

    Returns:
        The answers, and how many were unusable.
    """
    finite = np.isfinite(answers)
    usable = finite & (np.abs(np.where(finite, answers, 0.0)) <= LARGEST_LOSS)
    return np.where(usable, answers, np.nan), int(np.count_nonzero(~usable))


def clip_reports(answers: FloatArray, limit: float) -> FloatArray:
    """Winsorise reports: an answer far from the others is moved to the nearest allowed value.

    An answer may be `limit` standard deviations above or below the median of all answers to the
    same question. The standard deviation is taken from their median absolute deviation (MAD), so
    fewer than half of the clients cannot move the bounds far. Fewer than `FEWEST_REPORTS` answers
    stay as they are, as their median means little. Where more than half of the answers
    are the same number, the MAD is 0 and all answers become it.

    Args:
        answers: All answers to one question; NaN for a missing one stays NaN.
        limit: In standard deviations, above 0; 0 for no bounds.

    Example:
        >>> clip_reports(np.array([1.0, 2.0, 3.0, 4.0, 500.0]), 2.0)
        array([1.    , 2.    , 3.    , 4.    , 5.9652])
    """
    came = answers[np.isfinite(answers)]
    if not limit or len(came) < FEWEST_REPORTS:
        return answers
    median = np.median(came)
    reach = limit * _TO_SIGMA * np.median(np.abs(came - median))
    clipped: FloatArray = np.clip(answers, median - reach, median + reach)
    return clipped


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
        """The reports of these losses; NaN stays NaN."""
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
    check_fraction("delta", delta)
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
