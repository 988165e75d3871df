"""Are the loss changes of random selections Gaussian? (Paper, Appendix D.2.)

The paper's test looks at their principal components, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedcor.core.types import FloatArray


@dataclass(frozen=True)
class Component:
    """One principal component of the loss changes, and how far it is from a Gaussian.

    Attributes:
        scores: `(m,)` with mean 0 and standard deviation 1.
        share: Its fraction of the total variance.
        skewness: 0 for a Gaussian.
        excess_kurtosis: 0 for a Gaussian.
        distance: Kolmogorov-Smirnov: the largest gap between the two distribution functions.
        statistic: D'Agostino and Pearson's K^2, of skewness and kurtosis together; for a Gaussian,
            chi-squared with 2 degrees of freedom.
        p_value: Of `statistic`.
    """

    scores: FloatArray
    share: float
    skewness: float
    excess_kurtosis: float
    distance: float
    statistic: float
    p_value: float


def principal_components(changes: FloatArray, count: int) -> list[Component]:
    """The first `count` components of the loss changes `(m, N)`, largest variance first."""
    centred = changes - changes.mean(axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    share = singular**2 / np.sum(singular**2)
    components = []
    for j in range(min(count, len(singular))):
        scores = left[:, j] / left[:, j].std()
        # The sign of a component is arbitrary: the longer tail points right.
        scores *= np.sign(stats.skew(scores)) or 1.0
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
