"""Is an update of a usual length? It is judged against the others and against the past.

An update that is far too long is scaled down, and one that is absurdly long is refused, so that no
single client carries the model away. The parameters of a model and its float buffers (a running
variance, say) are judged apart: their lengths have nothing to do with each other.

Notation
    m        updates that came                                                       scalar
    G        parts of a model that are judged apart                                  scalar
    r_kg     length of part g of update k; of the parameters, per learning rate x steps of the
             round where the engine knows them                                       (m, G)
    now_g    lower median of the lengths of this round that are above 0              (G,)
    past_g   lower median of the lengths that earlier rounds accepted                (G,)
    ref_g    past_g, or now_g where that is more, but at most GROWTH past_g;
             now_g in the first round                                                (G,)
    f_kg     clip ref_g / r_kg, at most 1: what part g of update k is scaled by      (m, G)

Update k is refused where r_kg > refuse ref_g for some g. The median of fewer than three updates is
their own word, so where there is a past they do not raise the reference. Lengths of 0 say nothing
of what is usual: clients that have nothing to learn send them. Where nothing is known, everything
is kept.

The past is the last ROUNDS rounds. It holds lengths after clipping, so a liar that is clipped in
every round counts as one longer update among others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcor.checks import check_between
from fedcor.errors import ConfigError
from fedcor.types import BoolArray, FloatArray, IntArray, State

__all__ = ["NormLimits", "Verdict", "judge", "no_norms", "remember"]

ROUNDS = 20  # of the past
GROWTH = 10.0  # the most by which a round may raise the reference above the past
FEWEST = 3  # updates whose median is not one client's word
LARGEST = 1e12  # of a factor


@dataclass(frozen=True)
class NormLimits:
    """How long an update may be, in multiples of the usual length.

    Args:
        clip: A longer update is scaled down to it; 0 for never.
        refuse: A longer update is refused; 0 for never.
    """

    clip: float
    refuse: float

    def __post_init__(self) -> None:
        for key in ("clip", "refuse"):
            given = getattr(self, key)
            if given != 0.0 or isinstance(given, bool):
                check_between(key, given, 1.0, LARGEST)
        if 0.0 < self.refuse < self.clip:
            raise ConfigError("refuse", self.refuse, f"must be at least clip = {self.clip:g}")


@dataclass(frozen=True)
class Verdict:
    """What is done with the updates of a round.

    Attributes:
        refused: (m,) Which updates are not used.
        factors: (m, G) What each part of an update is scaled by; 1 for most.
        norms: (m, G) Lengths per step size, as used: after scaling, NaN for refused ones.
        ratios: (m,) How many times the usual length each update had; 0 where that is unknown.
    """

    refused: BoolArray
    factors: FloatArray
    norms: FloatArray
    ratios: FloatArray

    @property
    def clipped(self) -> BoolArray:
        """(m,) Which updates are used, but shorter than they came."""
        clipped: BoolArray = ~self.refused & (self.factors < 1.0).any(axis=1)
        return clipped


def no_norms(parts: int) -> State:
    """What is remembered before the first round, of models with so many parts."""
    return {"norms": np.empty((0, parts)), "rounds": np.empty(0, dtype=np.int64)}


def judge(
    limits: NormLimits, past: State, norms: FloatArray, earlier: FloatArray | None = None
) -> Verdict:
    """Keep, scale down or refuse each update.

    Args:
        limits: How long an update may be.
        past: What earlier rounds accepted.
        norms: (m, G) r_kg of those that came now; finite.
        earlier: (e, G) Of those that were accepted before in this round; they have been judged.
    """
    came = norms if earlier is None else np.concatenate([earlier, norms])
    reference = _reference(past["norms"], came)
    known = reference > 0.0
    usual = np.where(known, reference, 1.0)
    ratios = np.where(known, norms / usual, 0.0)  # (m, G)
    longest = ratios.max(axis=1, initial=0.0)
    refused = longest > (limits.refuse or np.inf)
    factors = np.ones_like(norms)
    if limits.clip:
        long = ratios > limits.clip
        factors[long] = limits.clip / ratios[long]
    used = np.where(refused[:, None], np.nan, norms * factors)
    return Verdict(refused, factors, used, longest)


def remember(past: State, norms: FloatArray, round: int) -> State:
    """The past with the lengths that a round accepted; NaN for those that it refused.

    Args:
        past: What earlier rounds accepted.
        norms: (m, G) r_kg, as `Verdict.norms`.
        round: Its number.
    """
    accepted = norms[np.isfinite(norms).all(axis=1)]
    together = np.concatenate([past["norms"], accepted])
    rounds: IntArray = np.concatenate([past["rounds"], np.full(len(accepted), round)])
    newest = np.unique(rounds)[-ROUNDS:]
    kept = np.isin(rounds, newest)
    return {"norms": together[kept], "rounds": rounds[kept]}


def _reference(past: FloatArray, came: FloatArray) -> FloatArray:
    """(G,) the usual length of each part; 0 where it is unknown."""
    before, now = _lower_medians(past), _lower_medians(came)
    few = np.count_nonzero(came > 0.0, axis=0) < FEWEST
    raised = np.where(few, before, np.clip(now, before, GROWTH * before))
    return np.where(before > 0.0, raised, now)


def _lower_medians(lengths: FloatArray) -> FloatArray:
    """(G,) of the lengths above 0, in each column; 0 where there is none.

    Of two, it is the smaller: the mean of both would grow with the larger one.
    """
    medians = np.zeros(lengths.shape[1])
    for part, column in enumerate(lengths.T):
        positive = np.sort(column[column > 0.0])
        if len(positive):
            medians[part] = positive[(len(positive) - 1) // 2]
    return medians
