"""The base of selectors that learn a Gaussian process over the clients' loss changes.

The schedule is that of the paper's Sec. 4.5:

    rounds 0 .. warmup - 1      the choice is uniform, and the loss changes that it would make are
                                measured: one sample per round
    later, t % interval == 0    `samples_per_refit` uniform selections are tried and measured
    both                        the embedding is refitted, starting from the last one; recent
                                samples are reused: after m rounds with the weight discount^m

A subclass decides how to choose with the learnt process (`choose`). While not a single loss change
was measured, the choice stays uniform.

Notation
    X       client embeddings, row k is x_k; 0 for a client without a known loss change      (N, d)
    n       how many clients are asked for a candidate

A measurement asks all available clients, as in the paper, or a sample of n. The clients that train
for the candidate are always in the sample; uniform others fill it up. They receive the model
anyway, their own loss changes most, and the process learns about two clients from the samples in
which both answered. The price is that they are a larger part of a small sample than of all clients.

A client that was never measured has the prior: x_k = 0, a variance of s^2 and no covariance with
anyone. The process knows nothing about it and hardly ever picks it. So while there are such
clients, exploration gives them a quarter of a round, or the only seat of a round with probability
1/4. (By chance, not by the round's number: a round that is tried again because nobody delivered
need not explore again.)
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedcor.core.config import check_at_least, check_fraction, check_positive
from fedcor.core.types import (
    Array,
    BoolArray,
    Federation,
    FloatArray,
    IntArray,
    Outcome,
    Population,
    Questions,
    State,
)
from fedcor.rounds.rules.seats import Pick, fill_round
from fedcor.selectors.base import extend_clients, fraction_of, uniform
from fedcor.selectors.gp.fit import Samples, fit
from fedcor.selectors.gp.forecast import covariance_similarity, forecast

LOG = logging.getLogger("fedcor")
_UNSEEN_SHARE = 0.25  # of a round


def count_asked(available: int, fraction: float, most: int | None) -> int:
    """n, the clients to ask: a fraction of those available, at least one and at most `most`.

    >>> count_asked(1000, 0.3, None), count_asked(1000, 0.3, 100), count_asked(3, 0.1, None)
    (300, 100, 1)
    """
    wanted = max(1, fraction_of(fraction, available))
    return wanted if most is None else min(wanted, most)


def whom_to_ask(
    rng: np.random.Generator, available: IntArray, selections: Sequence[IntArray], count: int
) -> list[IntArray]:
    """For each of the selections, the sorted clients that are asked: its own and uniform others.

    The others are the same for all selections, as far as they do not train: who is asked for
    several candidates is asked only once for the loss of the current model.

    Args:
        rng: The round's stream.
        available: Clients that can be asked.
        selections: Clients that train for each candidate.
        count: n. A larger selection is asked as a whole.
    """
    order = rng.permutation(available)
    asked = []
    for selection in selections:
        others = order[~np.isin(order, selection)]
        more = max(0, count - len(np.unique(selection)))
        asked.append(np.union1d(selection, others[:more]))
    return asked


def is_seen(X: FloatArray) -> BoolArray:
    """(n,) Whether a loss change of each client is known."""
    return np.asarray(X.any(axis=1))


def explored(
    rng: np.random.Generator, X: FloatArray, clients: IntArray, count: int, taken: IntArray
) -> IntArray:
    """Clients to explore: uniform ones that were never seen.

    They have a quarter of the round, at least one seat; the only seat of a round in one of four
    rounds, by chance; and what is left where too few of the clients were seen.

    Args:
        rng: The round's stream.
        X: (N, d) The embedding.
        clients: Clients that may be chosen.
        count: How many are chosen.
        taken: Clients that have a seat in the round already.
    """
    unseen = clients[~is_seen(X[clients])]
    if not len(unseen):
        return unseen
    seats = count + len(taken)
    least = 1 if seats > 1 else int(rng.random() < _UNSEEN_SHARE)
    share = max(least, fraction_of(_UNSEEN_SHARE, seats))
    share -= int(np.count_nonzero(~is_seen(X[taken])))
    rest = count - (len(clients) - len(unseen))
    return uniform(rng, unseen, min(count, max(share, rest, 0)))


def is_fitted(state: State) -> bool:
    """Whether the process has seen a loss change of at least one client.

    The samples of the last measured round are always kept.
    """
    return len(state["samples"]) > 0


@dataclass(frozen=True)
class ProcessSelector(ABC):
    """Base of selectors that learn how the clients' losses change together; needs a `choose`.

    `FedCor` documents the parameters. The defaults are the paper's for FMNIST.
    """

    clients_per_round: int
    warmup: int = 15
    interval: int = 10
    samples_per_refit: int = 1
    warmup_history: int = 10
    history: int = 1
    discount: float = 0.9
    dimension: int = 15
    noise: float = 0.01
    warmup_steps: int = 150
    refit_steps: int = 100
    gp_learning_rate: float = 0.01
    probe_fraction: float = field(default=1.0, kw_only=True)
    probe_clients: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for key in ("clients_per_round", "interval", "samples_per_refit", "dimension"):
            check_at_least(key, getattr(self, key), 1)
        for key in ("warmup", "warmup_history", "history", "warmup_steps", "refit_steps"):
            check_at_least(key, getattr(self, key), 0)
        check_fraction("discount", self.discount, closed=True)
        check_positive("noise", self.noise)
        check_positive("gp_learning_rate", self.gp_learning_rate)
        check_fraction("probe_fraction", self.probe_fraction, closed=True)
        check_positive("probe_fraction", self.probe_fraction)
        if self.probe_clients is not None:
            check_at_least("probe_clients", self.probe_clients, 1)

    @property
    def probes_sample(self) -> bool:
        """Whether loss changes are asked of a sample of the available clients."""
        return self.probe_fraction < 1.0 or self.probe_clients is not None

    def memory_bytes(self, clients: int, parameters: int | None) -> dict[str, float]:
        """What some settings cost: setting -> bytes."""
        # While samples are measured, they are there as a list, and joined to others. A fit holds
        # the embedding before and after it, and two moments of each number.
        return {
            "samples_per_refit": 16.0 * self.samples_per_refit * clients,
            "dimension": 32.0 * self.dimension * clients,
        }

    def init(self, population: Population) -> State:
        """The state before anything was measured."""
        count = population.count
        return {
            "round": np.array(0),
            "embedding": np.empty((0, self.dimension)),  # (N, d) X; empty until the first fit
            "samples": np.empty((0, count)),  # (m, N) loss changes, oldest first
            "sample_rounds": np.empty(0, dtype=np.int64),  # (m,) when each was measured
            "picked": np.zeros(
                count, dtype=np.int64
            ),  # (N,) tau, times chosen since the last refit
            # (S, C) selections measured last; -1 fills up
            "tried": np.empty((0, 0), dtype=np.int64),
        }

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients, uniform in the warm-up and by `choose` after it; and the new state.

        While the process is not fitted, the choice stays uniform. The end of the warm-up says so.
        """
        t = int(state["round"])
        if t < self.warmup:
            chosen = self._draw(federation)
            state = self._learn(state, federation, [chosen], self.warmup_history, self.warmup_steps)
        else:
            if t % self.interval == 0 or not len(state["embedding"]):
                tries = [self._draw(federation) for _ in range(self.samples_per_refit)]
                state = self._learn(state, federation, tries, self.history, self.refit_steps)
            if is_fitted(state):
                chosen = self.choose(state, federation)
            else:
                chosen = self._draw(federation)
                if t == self.warmup:
                    LOG.warning(
                        "%s: the warm-up measured no loss change, so the Gaussian process was "
                        "never fitted: clients are chosen uniformly until it is",
                        type(self).__name__,
                    )
        # Counted when chosen, not when delivered: else a client that never delivers would be chosen
        # in every round.
        picked = state["picked"].copy()
        picked[chosen] += 1
        return chosen, {**state, "round": np.array(t + 1), "picked": picked}

    def questions(self, round: int, clients: int) -> Questions:
        """One candidate in each round of the warm-up, which is then chosen; later some at refits.

        It holds while every refit has measured something.
        """
        asked = None
        if self.probes_sample:
            wanted = count_asked(clients, self.probe_fraction, self.probe_clients)
            asked = min(max(wanted, self.clients_per_round), clients)
        if round < self.warmup:
            return Questions(candidates=1, adopted=True, asked=asked)
        candidates = 0 if round % self.interval else self.samples_per_refit
        return Questions(candidates=candidates, asked=asked) if candidates else Questions()

    @abstractmethod
    def choose(self, state: State, federation: Federation) -> IntArray:
        """(C,) available clients, chosen with the learnt process in `state`."""

    def observe(self, state: State, outcome: Outcome) -> State:
        """The same state: it is `select` that measures."""
        return state

    def phase(self, state: State) -> str:
        """The warm-up and how far it is, or a refit."""
        t = int(state["round"]) - 1
        if t < self.warmup:
            return f"warm-up {t + 1} of {self.warmup}: at random"
        measured = state["sample_rounds"]
        return "refit" if len(measured) and measured[-1] == t else ""

    def join(self, state: State, population: Population) -> State:
        """The state with new clients: each has the mean embedding until its losses are measured.

        Where a sample is asked, that may be long. Then they have the prior, as all who were not
        seen yet.
        """
        X, count = state["embedding"], population.count
        if len(X):
            new = X.mean(axis=0) if not self.probes_sample else np.zeros(X.shape[1])
            X = np.concatenate([X, np.tile(new, (count - len(X), 1))])
        return {
            **state,
            "embedding": X,
            "samples": extend_clients(state["samples"], count, np.nan),
            "picked": extend_clients(state["picked"], count, 0),
        }

    def _draw(self, federation: Federation) -> IntArray:
        """A uniform selection to train; what is only tried keeps the rules, too."""

        def draw(clients: IntArray, count: int, taken: IntArray) -> IntArray:  # noqa: ARG001
            return uniform(federation.rng, clients, count)

        return fill_round(federation, self.clients_per_round, draw)

    def _fill_seats(
        self, state: State, federation: Federation, pick: Pick, *, one_by_one: bool = False
    ) -> IntArray:
        """(C,) clients: those that the process picks, then those that are explored.

        Args:
            state: A state that has been fitted at least once.
            federation: Says who may be chosen, and keeps the rules.
            pick: `pick(clients, count, taken)` names `count` of the `clients`, the best first,
                beside those who have taken a seat.
            one_by_one: Whether each pick depends on those before.
        """
        X = state["embedding"]

        def ask(clients: IntArray, count: int, taken: IntArray) -> IntArray:
            if not self.probes_sample:
                return pick(clients, count, taken)
            new = explored(federation.rng, X, clients, count, taken)
            seen = clients[is_seen(X[clients])]
            return np.concatenate([pick(seen, min(count, len(clients)) - len(new), taken), new])

        return fill_round(federation, self.clients_per_round, ask, one_by_one=one_by_one)

    def _measure(self, federation: Federation, selections: list[IntArray]) -> list[FloatArray]:
        """The (N,) loss changes that each selection would make, of everyone or of a sample."""
        if not self.probes_sample:  # a user's own federation may have no second argument
            return [federation.loss_changes(selection) for selection in selections]
        available, rng = federation.available, federation.rng
        count = count_asked(len(available), self.probe_fraction, self.probe_clients)
        asked = whom_to_ask(rng, available, selections, count)
        return [federation.loss_changes(*one) for one in zip(selections, asked, strict=True)]

    def _learn(
        self,
        state: State,
        federation: Federation,
        selections: list[IntArray],
        history: int,
        steps: int,
    ) -> State:
        """Measure `selections`, refit the embedding and reset the annealing.

        The refit uses the new samples and those of the last `history` earlier measured rounds.
        """
        t = int(state["round"])
        measured = self._measure(federation, selections)
        X: FloatArray = state["embedding"]
        X = X if len(X) else np.zeros((len(federation.weights), self.dimension))
        new = ~is_seen(X)  # where the fit starts at random
        if self.probes_sample:
            new &= np.any([np.isfinite(one) for one in measured], axis=0)
        if new.any():
            X, shape = X.copy(), (int(new.sum()), self.dimension)
            X[new] = federation.rng.standard_normal(shape) / math.sqrt(self.dimension)
        answered = np.array([np.isfinite(one).any() for one in measured], dtype=bool)
        usable = [[one] for one, some in zip(measured, answered, strict=True) if some]
        samples = np.concatenate([state["samples"], *usable])
        rounds = np.concatenate([state["sample_rounds"], np.full(len(usable), t)])
        del measured, usable  # of many clients, a copy is large

        used = _of_last_rounds(rounds, t, history)
        recent = Samples(samples[used], self.discount ** (t - rounds[used]))
        fitted = self._refit(X, recent, steps)

        longest = max(self.warmup_history, self.history, 1)
        kept = _of_last_rounds(rounds, t + 1, longest)
        return {
            **state,
            "embedding": fitted if np.isfinite(fitted).all() else X,
            "samples": samples[kept],
            "sample_rounds": rounds[kept],
            "picked": np.zeros_like(state["picked"]),
            "tried": _as_rows(selections)[answered],
        }

    def _refit(self, X: FloatArray, samples: Samples, steps: int) -> FloatArray:
        """(N, d) the embedding after a fit to the samples.

        Clients that are in no sample have no gradient: they are left out, which changes nothing.
        """
        s2, rate = self.noise**2, self.gp_learning_rate
        who = np.isfinite(samples.Y).any(axis=0)
        # Losses that diverge may overflow the fit. The embedding then stays as it was.
        with np.errstate(all="ignore"):
            if who.all():
                return fit(X, samples, s2, steps, rate)
            fitted = X.copy()
            fitted[who] = fit(X[who], Samples(samples.Y[:, who], samples.w), s2, steps, rate)
        return fitted

    def details(
        self, before: State, state: State, federation: Federation, chosen: IntArray
    ) -> dict[str, Array]:
        """In a round that measured: how well the process predicted it, before it was refitted.

        The changes of all others are predicted from those of the clients that trained
        (`gp.forecast`).

        `forecast_clients`, `log_score`, `log_score_each`, `log_score_independent`: one number per
        measured selection; the scores are in nats per client.
        `residual_bins`: (20,) clients by standardised residual, of all these selections, in bins
        that a correct process fills equally.
        `residual_squares`, `squared_errors`, `squared_changes`, `squared_forecasts`: sums over the
        same clients of squared residuals, errors, changes, and forecasts (change minus error).
        `fitted`: 1 in the round of the first fit, before which there was no prediction.
        `similarity`: of the covariance before the refit and after it; 1 for equal ones.
        """
        new = state["sample_rounds"] == int(before["round"])
        X, Y = before["embedding"], state["embedding"]
        if not new.any():
            return {}
        if not is_fitted(before) or len(X) != len(Y):
            return {"fitted": np.array([1])}
        s2, found, seen = self.noise**2, [], is_seen(X)
        for y, who in zip(state["samples"][new], state["tried"], strict=True):
            trained = np.zeros(len(y), dtype=bool)
            trained[who[who >= 0]] = True
            # Nothing was predicted for clients that were never measured before.
            found.append(forecast(X, s2, np.where(seen, y, np.nan), trained))
        told = [one for one in found if one is not None]
        similarity = {"similarity": np.array([covariance_similarity(X, Y, s2)])}
        if not told:
            return similarity
        return similarity | {
            "forecast_clients": np.array([len(one.residuals) for one in told]),
            "log_score": np.array([one.log_score for one in told]),
            "log_score_each": np.array([one.each for one in told]),
            "log_score_independent": np.array([one.independent for one in told]),
            "residual_bins": np.sum([one.bins for one in told], axis=0),
            "residual_squares": np.array([sum(float(f.residuals @ f.residuals) for f in told)]),
            "squared_errors": np.array([sum(float(f.errors @ f.errors) for f in told)]),
            "squared_changes": np.array([sum(float(f.changes @ f.changes) for f in told)]),
            "squared_forecasts": np.array([sum(float(f.means @ f.means) for f in told)]),
        }


def _as_rows(selections: list[IntArray]) -> IntArray:
    """(S, C) one selection a row, filled up with -1."""
    rows = np.full((len(selections), max(map(len, selections), default=0)), -1)
    for row, selection in zip(rows, selections, strict=True):
        row[: len(selection)] = selection
    return rows


def _of_last_rounds(rounds: IntArray, before: int, count: int) -> slice:
    """The samples of the last `count` measured rounds before round `before`, and of later ones.

    The samples are in the order of their rounds, so these are the last ones: nothing is copied.
    """
    measured = np.unique(rounds[rounds < before])
    first = np.append(measured, before)[max(0, len(measured) - count)]
    return slice(int(np.searchsorted(rounds, first)), None)
