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

The parts of a gain (`take_apart`); a posterior is given the picks before
    sigma_k sqrt(x_k'A x_k + s2), standard deviation of client k's loss change
    mu_k    posterior mean of client k's loss change; 0 before the first pick

Without earlier picks (A = I, v = sum_i p_i x_i) and without annealing, client k is worth

    sum_i p_i Sigma_ik / sigma_k = others_k + own_k
    others_k = sum_{i != k} p_i x_i'x_k / sigma_k       what it does for the others
    own_k    = p_k sigma_k                              what it does for itself

and what is left of that is its gain:

    gain_k = alpha_k (others_k + own_k) - redundancy_k

Algorithm 1 predicts that the loss of pick k changes by mu_k - alpha_k sigma_k (line 4), and
conditions everyone on it. So the gains sum to the predicted decrease of sum_i p_i l_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.selectors.gp.posterior import Posterior, of_candidates

NOBODY = -1


@dataclass(frozen=True)
class Prior:
    """The prior N(0, X X' + s2 I) over the clients' loss changes, and the weights of a selection.

    Attributes:
        X: (N, d) embedding.
        p: (N,) client weights.
        alpha: (N,) annealing factors.
        s2: Noise variance.
    """

    X: FloatArray
    p: FloatArray
    alpha: FloatArray
    s2: float


@dataclass(frozen=True)
class Picks:
    """The chosen clients in the order of choice, and what each pick was worth.

    Attributes:
        clients: (C,) ids.
        gain: (C,) expected decrease of the global loss, annealed, given the earlier picks.
    """

    clients: IntArray
    gain: FloatArray


def select(
    prior: Prior, count: int, candidates: IntArray, earlier: IntArray | None = None
) -> Picks:
    """The clients that Algorithm 1 picks.

    Args:
        prior: The learnt process.
        count: C, the number of picks; all candidates where there are fewer.
        candidates: Ids that can be picked. The loss of all N clients counts.
        earlier: Ids that were picked before, in order; none of them is a candidate.
    """
    count = min(count, len(candidates))
    X, p = prior.X, prior.p
    Xc, pc, ac = of_candidates(candidates, X, p, prior.alpha)
    posterior = Posterior(Xc, pc, prior.s2, p @ X)
    left = np.ones(len(candidates), dtype=bool)
    order, gain = np.empty(count, dtype=np.int64), np.empty(count)
    for k in [] if earlier is None else earlier.tolist():
        posterior.pick(X[k], float(p[k]))
    for j in range(count):
        if j == 0:
            k, gain[j] = posterior.best(ac, left)  # line 7
        else:
            k, gain[j] = posterior.pick_and_find(Xc[k], float(pc[k]), ac, left)  # lines 9 and 7
        order[j], left[k] = k, False  # line 8
    return Picks(candidates[order], gain)


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


@dataclass(frozen=True)
class PickParts:
    """What each pick was worth, in the order of choice.

    Attributes:
        gain: (C,) as in `Picks`.
        redundancy: (C,) what earlier picks cover of it; negative where they raised the gain.
        annealing: (C,) alpha_k.
        others: (C,) worth of the pick for all other clients, without earlier picks or annealing.
        own: (C,) the same for itself.
        change: (C,) predicted change of its own loss, mu_k - alpha_k sigma_k.
        runner_up: (C,) the best other client that could have had this place; NaN for none.
        margin: (C,) by how much the pick's gain exceeds the runner-up's; NaN where there is none.
    """

    gain: FloatArray
    redundancy: FloatArray
    annealing: FloatArray
    others: FloatArray
    own: FloatArray
    change: FloatArray
    runner_up: FloatArray
    margin: FloatArray


def take_apart(
    prior: Prior,
    picks: IntArray,
    candidates: IntArray,
    *,
    admits: Callable[[int, int], bool] | None = None,
    placed: BoolArray | None = None,
) -> PickParts:
    """The parts of the gains of `picks`.

    Args:
        prior: The learnt process.
        picks: (C,) ids in the order of choice, each once.
        candidates: Ids that could be picked, `picks` among them.
        admits: Whether a client could have had place j, from 0; None if everyone could.
        placed: (C,) Which picks have their place for another reason than their gain: they are
            nobody's runner-up, and have none. None for no one.
    """
    Xc, pc, ac = of_candidates(candidates, prior.X, prior.p, prior.alpha)
    order = np.argsort(candidates, kind="stable")  # they are sorted as a rule, then it is quick
    rows = order[np.searchsorted(candidates, picks, sorter=order)]
    v = prior.p @ prior.X
    left = np.ones(len(candidates), dtype=bool)
    placed = np.zeros(len(rows), dtype=bool) if placed is None else placed
    left[rows[placed]] = False
    posterior = Posterior(Xc, pc, prior.s2, v)
    alone = posterior.gains(ac)
    sigma = np.sqrt(posterior.variance[rows])
    own = pc[rows] * sigma
    squares = np.einsum("cd,cd->c", Xc[rows], Xc[rows])
    others = (Xc[rows] @ v - pc[rows] * squares) / sigma
    gain, change, mean = np.empty(len(rows)), np.empty(len(rows)), np.zeros(len(rows))  # mean: mu
    runner_up, margin = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    left[rows[:1]] = False
    best, best_gain = posterior.best(ac, left) if len(rows) else (0, 0.0)
    for j, k in enumerate(rows.tolist()):
        gain[j] = posterior.gain(k, ac[k])
        if admits is not None:
            best = _best_admitted(posterior.gains(ac), left, candidates, partial(admits, j))
            best_gain = posterior.gain(best, ac[best])
        if best >= 0 and left[best] and not placed[j]:
            runner_up[j], margin[j] = candidates[best], gain[j] - best_gain
        u = posterior.A @ Xc[k]
        deviation = float(np.sqrt(posterior.variance[k]))
        change[j] = mean[j] - ac[k] * deviation
        mean -= ac[k] * (Xc[rows] @ u) / deviation
        if j + 1 < len(rows):
            left[rows[j + 1]] = False
            best, best_gain = posterior.pick_and_find(Xc[k], float(pc[k]), ac, left)
    return PickParts(
        gain=gain,
        redundancy=alone[rows] - gain,
        annealing=ac[rows],
        others=others,
        own=own,
        change=change,
        runner_up=runner_up,
        margin=margin,
    )


def _best_admitted(
    gains: FloatArray, left: BoolArray, candidates: IntArray, admits: Callable[[int], bool]
) -> int:
    """Row of the largest gain of those who are left and admitted; -1 if there is none."""
    gains = np.where(left, gains, -np.inf)
    order: list[int] = np.argsort(-gains, kind="stable")[: int(left.sum())].tolist()
    return next((row for row in order if admits(int(candidates[row]))), NOBODY)
