"""Active federated learning (Goetz et al., 2019): train clients whose last reported loss was large.

    valuation  v_k = sqrt(n_k) l_k, refreshed only when client k trains
    1. drop the alpha1 * N clients with the smallest valuations;
    2. draw (1 - alpha3) * C of the rest with probability softmax(alpha2 * v), without replacement;
    3. draw the remaining alpha3 * C uniformly from all other clients.

A client that has never trained is valued with the mean loss that the first participants reported.
They measured it on the initial model, which has learnt from nobody, so it is a fair estimate of
every client's loss there, and it costs no extra communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcor.core.config import check_at_least, check_fraction, check_positive, plain_keywords
from fedcor.core.types import Federation, FloatArray, IntArray, Outcome, Population, Reasons, State
from fedcor.selectors.base import asks_nothing, extend_clients, fraction_of, uniform, without


@plain_keywords
@dataclass(frozen=True)
class AFL:
    """Active federated learning (Goetz et al., 2019): prefers clients with a large last loss.

    It asks the clients nothing: it uses the losses that participants send with their updates. The
    defaults of alpha1, alpha2 and alpha3 are those of Goetz et al., which the FedCor paper keeps.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        alpha1: Fraction of the available clients that is dropped in each round, those with the
            smallest valuations. In [0, 1].
        alpha2: Factor of the valuations in the softmax, at least 0. The larger it is, the more
            likely the largest valuations are drawn; 0 draws uniformly from the clients not dropped.
        alpha3: Fraction of a round that is drawn uniformly from all clients. In [0, 1].

    Example:
        >>> from fedcor import AFL
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> selector = AFL(clients_per_round=3)
        >>> chosen, state = selector.select(selector.init(federation.population), federation)
        >>> state = selector.observe(state, federation.train(chosen))
        >>> int(np.isfinite(state["losses"]).sum())
        3
    """

    clients_per_round: int
    alpha1: float = 0.75
    alpha2: float = 0.01
    alpha3: float = 0.1

    # An engine to which clients send no losses says so.
    needs_losses: ClassVar[bool] = True
    questions = asks_nothing

    def __post_init__(self) -> None:
        check_at_least("clients_per_round", self.clients_per_round, 1)
        check_fraction("alpha1", self.alpha1, closed=True)
        check_positive("alpha2", self.alpha2, zero=True)
        check_fraction("alpha3", self.alpha3, closed=True)

    def init(self, population: Population) -> State:
        """The state in which no client has reported a loss."""
        return {
            "root_sizes": np.sqrt(population.sizes),  # (N,) sqrt(n_k)
            "losses": np.full(population.count, np.nan),  # (N,) last reported, NaN before
            "initial_loss": np.array(np.nan),  # mean loss of the first participants
        }

    def join(self, state: State, population: Population) -> State:
        """The state with new clients: each has the mean loss of those who reported one.

        The loss of the initial model would put them before everyone who has trained since.
        """
        reported = state["losses"][np.isfinite(state["losses"])]
        usual = float(reported.mean()) if len(reported) else np.nan
        losses = extend_clients(state["losses"], population.count, usual)
        return {**state, "root_sizes": np.sqrt(population.sizes), "losses": losses}

    def valuations(self, state: State) -> FloatArray:
        """(N,) v_k; before the first report, the loss of every client counts as 1."""
        unseen = float(np.nan_to_num(state["initial_loss"], nan=1.0))
        losses = np.where(np.isnan(state["losses"]), unseen, state["losses"])
        valuations: FloatArray = state["root_sizes"] * losses
        return valuations

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """(C,) clients, those drawn by valuation first, and the unchanged state."""
        rng = federation.rng
        # Shuffled here and sorted stably below, so that ties are broken at random.
        available = rng.permutation(federation.available)
        count = min(self.clients_per_round, len(available))
        v = self.valuations(state)[available]
        # 1. Drop the smallest valuations.
        kept = np.argsort(v, kind="stable")[fraction_of(self.alpha1, len(available)) :]
        # 2. The largest of logits + Gumbel noise are a draw by softmax without replacement, which
        #    cannot underflow.
        keys = self.alpha2 * v[kept] + rng.gumbel(size=len(kept))
        by_valuation = np.argsort(-keys)[: fraction_of(1 - self.alpha3, count)]
        chosen = available[kept[by_valuation]]
        # 3. Fill the round uniformly.
        rest = without(federation.available, chosen)
        return np.concatenate([chosen, uniform(rng, rest, count - len(chosen))]), state

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """How each client was drawn.

        `valuation` is v_k; `by_valuation` 1 for a seat that is drawn by valuation and 0 for one
        that is drawn uniformly; `probability` that of being drawn for this seat, given those drawn
        before; `kept` 1 where the client was among the largest valuations, and 0 where it was
        dropped. It is NaN where chance decided between equal valuations.
        """
        all_v, available = self.valuations(state), federation.available
        v, n = all_v[chosen], len(available)
        ranked = np.sort(all_v[available])
        dropped = fraction_of(self.alpha1, n)
        left = ranked[dropped:]  # whose valuations are kept and not drawn yet
        seats = min(fraction_of(1 - self.alpha3, len(chosen)), len(left))
        probability = 1.0 / (n - np.arange(len(chosen)))
        for seat, value in enumerate(v[:seats].tolist()):
            terms = np.exp(self.alpha2 * (left - left[-1]))
            place = min(int(np.searchsorted(left, value)), len(left) - 1)
            probability[seat] = terms[place] / terms.sum()
            left = np.delete(left, place)
        by_valuation = np.arange(len(chosen)) < seats
        smallest = ranked[dropped] if dropped < n else np.inf
        largest_dropped = ranked[dropped - 1] if dropped else -np.inf
        kept = np.where(v < smallest, 0.0, np.where(v > largest_dropped, 1.0, np.nan))
        kept[by_valuation] = 1.0
        return {
            "valuation": v,
            "by_valuation": by_valuation.astype(np.float64),
            "probability": probability,
            "kept": kept,
        }

    def observe(self, state: State, outcome: Outcome) -> State:
        """The state with the losses that the participants reported."""
        reported = np.isfinite(outcome.losses)
        if not reported.any():
            return state
        losses = state["losses"].copy()
        losses[outcome.participated[reported]] = outcome.losses[reported]
        first = np.isnan(state["initial_loss"])
        initial = np.array(outcome.losses[reported].mean()) if first else state["initial_loss"]
        return {**state, "losses": losses, "initial_loss": initial}
