"""Oort (Lai et al., OSDI 2021): clients whose data are worth much and that are not too slow.

Notation
    U_k     n_k times the root mean square loss of client k's samples, from its last training (m,)
    R       number of the round, from 1                                                     scalar
    L_k     round in which client k last took part                                            (m,)
    d_k     seconds that client k takes; NaN where unknown                                    (m,)
    T       preferred duration of a round; infinite for no preference                       scalar
    W       rounds that the pacer looks at                                                  scalar
    epsilon the share of a round that explores                                              scalar

    util_k = (clipped and scaled U_k + sqrt(0.1 ln R / L_k)) (T / d_k)^alpha   if d_k > T
             (clipped and scaled U_k + sqrt(0.1 ln R / L_k))                   else

    1. exploit  of the clients that have reported a loss, admit all with a utility of at least
                `cut_off` times that of the (1 - epsilon) C-th best; draw (1 - epsilon) C in
                proportion to their utility
    2. explore  epsilon C of the other clients: fast ones are likelier where the speed is known
    3. pacer    every W rounds: if W rounds gained less utility than the W before them, the
                preferred duration becomes longer

A client that was chosen and did not deliver is left out for some rounds, twice as long each time:
otherwise clients that never deliver would be explored in every round. Nobody failed in a round that
brought as many updates as any round before: where more clients are chosen than needed, some are
surplus.

The rule is the paper's Algorithm 1. Where it leaves a choice, docs/results/time.md says what the
released code does, and what this does. Without a clock there are no durations: no client is slow,
and the pacer rests. All that happens in a round costs O(N).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedcor.core.config import (
    check_at_least,
    check_between,
    check_fraction,
    check_positive,
    plain_keywords,
)
from fedcor.core.types import (
    Array,
    Federation,
    FloatArray,
    IntArray,
    Outcome,
    Population,
    Reasons,
    State,
)
from fedcor.selectors.base import (
    asks_nothing,
    extend_state,
    fraction_of,
    ready,
    spread,
    uniform,
)

LONGEST_WINDOW = 10_000  # the gains of twice as many rounds are in every checkpoint
# Below the smallest utility, which is then not worth nothing: as in the released code.
_BELOW = 0.001


def scaled(utilities: FloatArray, clip: float) -> FloatArray:
    """(m,) U_k, clipped at the quantile `clip`, between 0 and 1.

    Args:
        utilities: (m,) U_k.
        clip: The quantile above which a utility counts as that quantile.

    Example:
        >>> scaled(np.array([1.0, 2.0, 3.0, 100.0]), clip=2 / 3).round(2)
        array([0. , 0.5, 1. , 1. ])
    """
    if not len(utilities):
        return utilities
    clipped = np.minimum(utilities, np.quantile(utilities, clip))
    low, high = float(clipped.min()), float(clipped.max())
    low -= _BELOW * abs(low)
    between: FloatArray = (clipped - low) / (high - low) if high > low else np.zeros_like(clipped)
    return between


def uncertainty(weight: float, round: int, last: IntArray) -> FloatArray:
    """(m,) sqrt(weight ln R / L_k): the longer ago its utility was measured, the larger.

    >>> uncertainty(0.1, 100, np.array([1, 100])).round(3)
    array([0.679, 0.068])
    """
    terms: FloatArray = np.sqrt(weight * np.log(round) / last)
    return terms


def slowdown(durations: FloatArray, preferred: float, penalty: float) -> FloatArray:
    """(m,) (T / d_k)^penalty for clients slower than T; 1 for the others, and where d_k is unknown.

    >>> slowdown(np.array([5.0, 10.0, 20.0, np.nan]), preferred=10.0, penalty=2.0)
    array([1.  , 1.  , 0.25, 1.  ])
    """
    slow = durations > preferred  # False for NaN
    factors = np.ones(len(durations))
    factors[slow] = (preferred / durations[slow]) ** penalty
    return factors


def falls(gained: FloatArray, rounds: int) -> bool:
    """Whether the pacer lets slower clients in: W rounds gained less than the W before them.

    Args:
        gained: (2W,) The summed U_k of those who took part in each of the last 2W rounds.
        rounds: How many rounds there were. The pacer looks every W rounds, once there are 2W.
    """
    window = len(gained) // 2
    if rounds < 2 * window or rounds % window:
        return False
    return bool(gained[:window].sum() > gained[window:].sum())


def draw(rng: np.random.Generator, clients: IntArray, weights: FloatArray, count: int) -> IntArray:
    """(count,) of the clients, one after another, in proportion to their weights; none twice.

    The largest of log weight + Gumbel noise are such a draw, in O(m).
    """
    smallest = np.finfo(np.float64).tiny  # who weighs nothing comes last
    keys = np.log(np.maximum(weights, smallest)) + rng.gumbel(size=len(clients))
    if count < len(clients):
        top = np.argpartition(-keys, count)[:count]
        clients, keys = clients[top], keys[top]
    return clients[np.argsort(-keys, kind="stable")]


class _Pool(NamedTuple):
    """Those who can be exploited, and what each is worth."""

    clients: IntArray  # (m,)
    statistical: FloatArray  # (m,) clipped and scaled U_k
    uncertainty: FloatArray  # (m,)
    slowdown: FloatArray  # (m,)

    @property
    def utility(self) -> FloatArray:  # (m,)
        return (self.statistical + self.uncertainty) * self.slowdown


@plain_keywords
@dataclass(frozen=True)
class Oort:
    """Oort (Lai et al., 2021): clients with large losses that do not hold a round up.

    It asks the clients nothing: it uses the losses that participants send with their updates, and
    how long they took. Where no time is measured, only the losses count. Defaults are the paper's
    unless something else is said.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        exploration: epsilon of the first round, the share of clients that never reported a loss.
            In [0, 1].
        exploration_decay: Factor of epsilon after each round. In [0, 1].
        least_exploration: epsilon falls to it and stays. In [0, 1].
        cut_off: Share of the utility of the last of the best; whoever reaches it can be drawn. In
            [0, 1].
        clip: Quantile of the utilities; larger ones count as this. In [0, 1].
        uncertainty: Weight of the logarithm in the term of those who were not seen for long.
        penalty: alpha, the power of the factor of clients slower than preferred. 0 for none.
        window: W, the rounds that the pacer compares with the W before, at most 10,000.
        percentile: Of the durations, the preferred one at the start, above 0 and at most 100.
            FedScale's 30; in the paper, a duration.
        percentile_step: What the pacer adds to it. The released code's 5; in the paper, seconds.
        most_rounds: Who has taken part in so many rounds is no longer exploited; None for no limit,
            as in the released code. The paper's runs have 10, of thousands of clients.

    Example:
        >>> from fedcor import Oort
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> selector = Oort(clients_per_round=3)
        >>> chosen, state = selector.select(selector.init(federation.population), federation)
        >>> state = selector.observe(state, federation.train(chosen))
        >>> int(np.isfinite(state["rms_losses"]).sum())
        3
    """

    clients_per_round: int
    exploration: float = 0.9
    exploration_decay: float = 0.98
    least_exploration: float = 0.2
    cut_off: float = 0.95
    clip: float = 0.95
    uncertainty: float = 0.1
    penalty: float = 2.0
    window: int = 20
    percentile: float = 30.0
    percentile_step: float = 5.0
    most_rounds: int | None = None

    needs_losses: ClassVar[bool] = True
    reads_rms_losses: ClassVar[bool] = True
    questions = asks_nothing

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        for key in ("exploration", "exploration_decay", "least_exploration", "cut_off", "clip"):
            check_fraction(key, getattr(self, key), closed=True)
        check_positive("uncertainty", self.uncertainty, zero=True)
        check_positive("penalty", self.penalty, zero=True)
        check_at_least("window", self.window, 1, LONGEST_WINDOW)
        check_positive("percentile", self.percentile)
        for key in ("percentile", "percentile_step"):
            check_between(key, getattr(self, key), 0.0, 100.0)
        if self.most_rounds is not None:
            check_at_least("most_rounds", self.most_rounds, 1)

    def init(self, population: Population) -> State:
        """The state in which nobody has reported a loss."""
        count = population.count
        return {
            "sizes": population.sizes.astype(np.float64),  # (N,) n_k
            "rms_losses": np.full(count, np.nan),  # (N,) last reported; NaN before
            "last": np.zeros(count, dtype=np.int64),  # (N,) L_k, 0 before
            "times": np.zeros(count, dtype=np.int64),  # (N,) rounds that it took part in
            "durations": np.full(count, np.nan),  # (N,) d_k, NaN while unknown
            "gained": np.zeros(2 * self.window),  # (2W,) summed U_k of the last rounds
            "percentile": np.array(self.percentile),  # where T is among the durations
            "round": np.array(0),  # rounds that are over
            "asked": np.zeros(count, dtype=np.int64),  # (N,) round in which it last failed, from 0
            "failed": np.zeros(count, dtype=np.int64),  # (N,) how often since it last delivered
            "most": np.array(0),  # the most clients that delivered in a round
        }

    def join(self, state: State, population: Population) -> State:
        """The state with new clients: they never reported a loss, so they are explored."""
        blank = self.init(population)
        names = ("rms_losses", "durations", "last", "times", "asked", "failed")
        return {**state, **extend_state(state, blank, names), "sizes": blank["sizes"]}

    def epsilon(self, state: State) -> float:
        """The share of this round that explores, if there is somebody to explore."""
        decayed = self.exploration * self.exploration_decay ** int(state["round"])
        return max(decayed, min(self.least_exploration, self.exploration))

    def preferred(self, state: State) -> float:
        """T, the preferred duration; infinite without a clock, and at the last percentile."""
        known, percentile = state["durations"], float(state["percentile"])
        known = known[np.isfinite(known)]
        if not len(known) or percentile >= 100.0:
            return np.inf
        return float(np.quantile(known, percentile / 100.0))

    def _pool(self, state: State, available: IntArray) -> _Pool:
        """Those of `available` who have reported a loss, and not taken part too often."""
        known = np.isfinite(state["rms_losses"][available])
        if self.most_rounds is not None:
            known &= state["times"][available] < self.most_rounds
        clients, round = available[known], int(state["round"]) + 1
        return _Pool(
            clients,
            scaled(state["sizes"][clients] * state["rms_losses"][clients], self.clip),
            uncertainty(self.uncertainty, round, state["last"][clients]),
            slowdown(state["durations"][clients], self.preferred(state), self.penalty),
        )

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients, those that are exploited first, and the unchanged state."""
        rng, available = federation.rng, federation.available
        count, clients = min(self.clients_per_round, len(available)), ready(state, available)
        pool = self._pool(state, clients)
        new = clients[np.isnan(state["rms_losses"][clients])]
        wanted = fraction_of(1 - self.epsilon(state), count)
        if count > 1 and state["failed"].any():  # not all seats to those who may never deliver
            wanted = max(wanted, 1)
        # Seats that one side cannot fill go to the other.
        exploit = min(max(wanted, count - len(new)), len(pool.clients))
        explore = min(count - exploit, len(new))
        # Of most of the new clients nothing is known. Who was too late is known to be slow.
        speed = slowdown(state["durations"][new], self.preferred(state), self.penalty)
        exploited = self._exploit(rng, pool, exploit)
        chosen = np.concatenate([exploited, draw(rng, new, speed, explore)])
        rest = np.setdiff1d(available, chosen) if len(chosen) < count else available[:0]
        return np.concatenate([chosen, uniform(rng, rest, count - len(chosen))]), state

    def _exploit(self, rng: np.random.Generator, pool: _Pool, count: int) -> IntArray:
        if not count:
            return pool.clients[:0]
        utility = pool.utility
        last = float(-np.partition(-utility, count - 1)[count - 1])  # of the best `count`
        admitted = utility >= self.cut_off * last
        return draw(rng, pool.clients[admitted], utility[admitted], count)

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """What each client is worth.

        `utility` is what it was drawn by, (`statistical` + `uncertainty`) x `slowdown`; they are
        NaN for one that was explored, for which `exploring` is 1.
        """
        pool = self._pool(state, ready(state, federation.available))
        exploited = np.isin(chosen, pool.clients)
        place = np.searchsorted(pool.clients, chosen[exploited])
        columns = {
            "utility": pool.utility[place],
            "statistical": pool.statistical[place],
            "uncertainty": pool.uncertainty[place],
            "slowdown": pool.slowdown[place],
        }
        exploring = np.isnan(state["rms_losses"][chosen]).astype(np.float64)
        return {**spread(columns, exploited), "exploring": exploring}

    def details(
        self, before: State, state: State, federation: Federation, chosen: IntArray
    ) -> Mapping[str, Array]:
        """`epsilon`, the share that explores; `preferred`, T, where durations are known."""
        said = {"epsilon": np.array([self.epsilon(state)])}
        preferred = self.preferred(state)
        return said | ({"preferred": np.array([preferred])} if np.isfinite(preferred) else {})

    def observe(self, state: State, outcome: Outcome) -> State:
        """The state with the losses and the durations of those who took part."""
        came, round = outcome.participated, int(state["round"]) + 1
        losses, last, times = (state[name].copy() for name in ("rms_losses", "last", "times"))
        told = np.isfinite(outcome.rms_losses)
        losses[came[told]] = outcome.rms_losses[told]
        last[came], times[came] = round, times[came] + 1
        new = float((state["sizes"][came[told]] * losses[came[told]]).sum())
        gained, percentile = np.append(state["gained"][1:], new), state["percentile"]
        durations = self._durations(state, outcome)
        if np.isfinite(durations).any() and falls(gained, round):
            percentile = np.array(min(100.0, float(percentile) + self.percentile_step))
        return {
            **state,
            "rms_losses": losses,
            "last": last,
            "times": times,
            "durations": durations,
            "gained": gained,
            "percentile": percentile,
            "round": np.array(round),
            **self._failures(state, outcome),
        }

    def _failures(self, state: State, outcome: Outcome) -> State:
        """Who failed, when, and the most updates of a round. Who is only surplus did not fail."""
        asked, failed = state["asked"].copy(), state["failed"].copy()
        came, most = len(outcome.participated), int(state["most"])
        if came < max(most, 1):
            missing = np.setdiff1d(outcome.selected, outcome.participated)
            asked[missing] = int(state["round"])
            failed[missing] += 1
        failed[outcome.participated] = 0
        return {"asked": asked, "failed": failed, "most": np.array(max(most, came))}

    def _durations(self, state: State, outcome: Outcome) -> FloatArray:
        """(N,) d_k. Who did not deliver takes at least as long as the slowest who did."""
        durations: FloatArray = state["durations"].copy()
        took = outcome.durations
        if took is None or not np.isfinite(took).any():
            return durations
        known = np.isfinite(took)
        durations[outcome.participated[known]] = took[known]
        missing = np.setdiff1d(outcome.selected, outcome.participated)
        durations[missing] = np.fmax(durations[missing], np.nanmax(took))
        return durations
