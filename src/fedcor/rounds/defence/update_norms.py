"""The check of a client's update: its length against those of other clients and earlier rounds.

An update that is far too long is scaled down, and one that is absurdly long is refused, so that no
single client can move the model far. The parameters of a model and its float buffers (a running
variance, say) are checked separately: their lengths are unrelated. `UpdateFilter` applies the
verdict (`rounds/update_filter.py`).

Notation
    m        updates of this round                                                   scalar
    G        parts of a model that are checked separately                            scalar
    r_kg     length of part g of update k; of the parameters, per learning rate x steps of the
             round where the engine knows them                                       (m, G)
    now_g    lower median of the lengths of this round that are above 0              (G,)
    past_g   lower median of the lengths that earlier rounds accepted                (G,)
    ref_g    past_g, or now_g where that is more, but at most GROWTH past_g          (G,)
    f_kg     clip ref_g / r_kg, at most 1: what part g of update k is scaled by      (m, G)

Update k is refused where r_kg > refuse ref_g for some g. Lengths of 0 are ignored: clients with
nothing to learn send them. Where no length is known, every update is kept.

The median of fewer than FEWEST clients is not trusted:

- A round with fewer does not raise the reference, where there is a past.
- A past of fewer does not bind a round with more: ref_g is then now_g, as in the first round.
- Where both have fewer, ref_g is past_g, or now_g in the first round, but nothing is refused: one
  of them may be far too short, as well as the other far too long. What would be refused is scaled
  down to clip ref_g (refuse ref_g without clipping), and enters the past unscaled.

The past is the last ROUNDS rounds. It holds lengths after clipping, so a Byzantine client that is
clipped in every round counts as one longer update among others. Refused lengths enter it only where
all are refused and the model is not at fault: then the past may be wrong, and is outvoted in time.
Where that happens in all attempts at a round but the last, they replace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedcor.core.config import check_between
from fedcor.core.errors import ConfigError
from fedcor.core.types import Array, BoolArray, FloatArray, IntArray, State

PARTS = 2  # of a model in this package: its parameters, and its float buffers
ROUNDS = 20  # of the past
GROWTH = 10.0  # the most by which a round may raise the reference above the past
FEWEST = 3  # clients whose median is trusted
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
    """The result of the check: which updates of a round are refused, scaled down or kept.

    Attributes:
        refused: (m,) Which updates are not used.
        factors: (m, G) What each part of an update is scaled by; 1 for most.
        norms: (m, G) Lengths per step size for the past: after scaling, NaN for refused ones.
        ratios: (m,) How many times the usual length each update had; 0 where that is unknown.
    """

    refused: BoolArray
    factors: FloatArray
    norms: FloatArray
    ratios: FloatArray

    @property
    def clipped(self) -> BoolArray:
        """(m,) Which updates are used, but scaled down."""
        clipped: BoolArray = ~self.refused & (self.factors < 1.0).any(axis=1)
        return clipped


def no_norms(parts: int) -> State:
    """The past before the first round, for models with so many parts."""
    none = np.empty(0, dtype=np.int64)
    return {"norms": np.empty((0, parts)), "rounds": none, "clients": none}


def read_norms(arrays: Mapping[str, Array], parts: int) -> State:
    """The past in a checkpoint, which has no arrays before the first accepted update.

    Raises:
        KeyError, ValueError: The arrays are something else.
    """
    if not arrays:
        return {}
    norms, rounds = arrays["norms"], arrays["rounds"]
    usable = norms.dtype.kind == "f" and norms.shape == (len(rounds), parts)
    if not usable or not (np.isfinite(norms) & (norms >= 0.0)).all():
        raise ValueError("norms are not lengths of updates")
    for numbers in (rounds, arrays["clients"]):
        if numbers.dtype.kind != "i" or numbers.shape != (len(norms),):
            raise ValueError("norms do not say whose they are")
    return dict(arrays)


def judge(
    limits: NormLimits, past: State, norms: FloatArray, earlier: FloatArray | None = None
) -> Verdict:
    """Keep, scale down or refuse each update.

    Args:
        limits: How long an update may be.
        past: What earlier rounds accepted.
        norms: (m, G) r_kg of the new updates; finite.
        earlier: (e, G) The same for updates that were accepted earlier in this round.
    """
    came = norms if earlier is None else np.concatenate([earlier, norms])
    reference, founded = _reference(past, came)
    known = reference > 0.0
    usual = np.where(known, reference, 1.0)
    ratios = np.where(known, norms / usual, 0.0)  # (m, G)
    longest = ratios.max(axis=1, initial=0.0)
    absurd = limits.refuse or np.inf
    refused = np.where(founded, ratios, 0.0).max(axis=1, initial=0.0) > absurd
    most = limits.clip or absurd
    factors = np.ones_like(norms)
    long = ratios > most
    factors[long] = most / ratios[long]
    # Absurd by the word of one or two clients: kept unscaled, as later rounds know better.
    kept = np.where(ratios > absurd, norms, norms * factors)
    return Verdict(refused, factors, np.where(refused[:, None], np.nan, kept), longest)


def remember(past: State, norms: FloatArray, round: int, clients: Sequence[int]) -> State:
    """The past with the lengths that a round accepted; NaN for those that it refused.

    Args:
        past: What earlier rounds accepted.
        norms: (m, G) r_kg, as `Verdict.norms`.
        round: The number of the round.
        clients: (m,) Client id of each row.
    """
    finite = np.isfinite(norms).all(axis=1)
    accepted, new = norms[finite], np.array(clients, dtype=np.int64)[finite]
    together = np.concatenate([past["norms"], accepted])
    senders: IntArray = np.concatenate([past["clients"], new])
    rounds: IntArray = np.concatenate([past["rounds"], np.full(len(accepted), round)])
    newest = np.unique(rounds)[-ROUNDS:]
    kept = np.isin(rounds, newest)
    return {"norms": together[kept], "rounds": rounds[kept], "clients": senders[kept]}


def _reference(past: State, came: FloatArray) -> tuple[FloatArray, BoolArray]:
    """(G,) the usual length of each part, 0 where unknown; (G,) whether enough clients back it."""
    lengths, senders = past["norms"], past["clients"]
    before, now = _lower_medians(lengths), _lower_medians(came)
    few = np.count_nonzero(came > 0.0, axis=0) < FEWEST
    backing = np.array([len(np.unique(senders[column > 0.0])) for column in lengths.T])
    thin = backing < FEWEST
    raised = np.where(few, before, np.clip(now, before, GROWTH * before))
    alone = (before == 0.0) | (thin & ~few)
    return np.where(alone, now, raised), ~(thin & few)


def _lower_medians(lengths: FloatArray) -> FloatArray:
    """(G,) lower median of the lengths above 0 in each column; 0 where there is none.

    Of two lengths it is the smaller: the mean of both would grow with the larger one.
    """
    medians = np.zeros(lengths.shape[1])
    for part, column in enumerate(lengths.T):
        positive = np.sort(column[column > 0.0])
        if len(positive):
            medians[part] = positive[(len(positive) - 1) // 2]
    return medians
