"""Are the loss changes of random selections Gaussian? The paper's test: principal components, one by one (its Appendix D.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedcor.types import FloatArray

__all__ = ["Component", "principal_components"]


@dataclass(frozen=True)
class Component:
    """One principal component of the loss changes, standardised, and how far it is from a Gaussian."""

    scores: FloatArray  # (m,) mean 0, standard deviation 1
    share: float  # of the total variance
    skewness: float  # 0 for a Gaussian
    excess_kurtosis: float  # 0 for a Gaussian
    distance: float  # Kolmogorov-Smirnov: the largest gap between the two distribution functions
    statistic: float  # D'Agostino and Pearson's K^2: skewness and kurtosis together, chi-squared with 2 degrees if Gaussian
    p_value: float  # of K^2


def principal_components(changes: FloatArray, count: int) -> list[Component]:
    """The first `count` components of (m, N) loss changes, largest variance first."""
    centred = changes - changes.mean(axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    share = singular**2 / np.sum(singular**2)
    components = []
    for j in range(min(count, len(singular))):
        scores = left[:, j] / left[:, j].std()
        scores *= (
            np.sign(stats.skew(scores)) or 1.0
        )  # a component has no sign of its own: let the longer tail point right
        test = stats.normaltest(scores)
        components.append(
            Component(
                scores,
                float(share[j]),
                float(stats.skew(scores)),
                float(stats.kurtosis(scores)),
                float(stats.kstest(scores, "norm").statistic),
                float(test.statistic),
                float(test.pvalue),
            )
        )
    return components
