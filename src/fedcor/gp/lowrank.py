"""Greedy posterior selection (the paper's Algorithm 1) in d dimensions: no N x N matrix is formed.

Notation (the paper's letters; its X is our X', so that a client's embedding is a contiguous row)
    X       client embeddings, row k is x_k                                 (N, d)
    s2      noise variance s^2; the prior covariance is Sigma = X X' + s2 I
    p       client weights                                                  (N,)
    alpha   annealing, beta^tau_k                                           (N,)
    A       what is left of the prior: I before the first pick              (d, d)
    v       sum of p_i x_i over the clients not picked                      (d,)

Among the clients not yet picked, the posterior covariance stays X A X' + s2 I: conditioning on
client k subtracts u u' / (x_k'A x_k + s2) with u = A x_k from A. A picked client is conditioned on
together with its noise, so its row becomes zero. With a zero prior mean, picking k lowers the
expected global loss by

    gain_k = alpha_k (x_k'A v + s2 p_k) / sqrt(x_k'A x_k + s2)

which is the paper's alpha_k sum_i p_i sigma_i r_ik under the posterior so far. A pick costs one
pass over X (`posterior.py`): O(N d).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.gp.blocks import of_candidates
from fedcor.gp.posterior import Posterior
from fedcor.types import FloatArray, IntArray

__all__ = ["Picks", "select", "select_proxy"]


@dataclass(frozen=True)
class Picks:
    """The chosen clients in the order of choice, and what each pick was worth.

    Attributes:
        clients: (C,) ids.
        gain: (C,) expected decrease of the global loss, annealed, given the earlier picks.
        alone: (C,) the same for this client without the earlier picks.
        annealing: (C,) alpha_k, the factor in `gain` and `alone`.
    """

    clients: IntArray
    gain: FloatArray
    alone: FloatArray
    annealing: FloatArray

    @property
    def redundancy(self) -> FloatArray:
        """(C,) alone - gain, what earlier picks cover; negative where they raised the gain."""
        return self.alone - self.gain


def select(
    X: FloatArray,
    p: FloatArray,
    alpha: FloatArray,
    s2: float,
    count: int,
    candidates: IntArray,
    earlier: IntArray | None = None,
) -> Picks:
    """The clients that Algorithm 1 picks, for the prior N(0, X X' + s2 I).

    Args:
        X: (N, d) embedding.
        p: (N,) client weights.
        alpha: (N,) annealing factors.
        s2: Noise variance.
        count: C, the number of picks; all candidates where there are fewer.
        candidates: Ids that can be picked. The loss of all N clients counts.
        earlier: Ids that were picked before, in order; none of them is a candidate.
    """
    count = min(count, len(candidates))
    Xc, pc, ac = of_candidates(candidates, X, p, alpha)
    posterior = Posterior(Xc, pc, s2, p @ X)
    left = np.ones(len(candidates), dtype=bool)
    order, gain = np.empty(count, dtype=np.int64), np.empty(count)
    alone = posterior.gains(ac)
    for k in [] if earlier is None else earlier.tolist():
        posterior.pick(X[k], float(p[k]))
    for j in range(count):
        if j == 0:
            k, gain[j] = posterior.best(ac, left)  # line 7
        else:
            k, gain[j] = posterior.pick_and_find(Xc[k], float(pc[k]), ac, left)  # lines 9 and 7
        order[j], left[k] = k, False  # line 8
    return Picks(candidates[order], gain, alone[order], ac[order])


def select_proxy(
    X: FloatArray, p: FloatArray, s2: float, count: int, candidates: IntArray
) -> IntArray:
    """The paper's proxy algorithm: the `count` candidates with the largest sum_i p_i Sigma_ik.

    Args:
        X: (N, d) embedding.
        p: (N,) client weights.
        s2: Noise variance.
        count: C, the number of clients.
        candidates: Ids that can be chosen.

    Returns:
        (C,) ids, the largest sum first.
    """
    Xc, pc = of_candidates(candidates, X, p)
    score = Xc @ (p @ X) + s2 * pc  # (n,)
    return candidates[np.argsort(-score, kind="stable")[:count]]
