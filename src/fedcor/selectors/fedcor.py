"""FedCor (Tang et al., CVPR 2022) and the proxy algorithm of its convergence proof.

`gp_selector.py` learns the Gaussian process over the clients' loss changes; the two selectors here
differ in how they choose with it. The maths is in `gp/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedcor.core.config import check_fraction, plain_keywords
from fedcor.core.types import Federation, FloatArray, IntArray, Reasons, State
from fedcor.rounds.rules.seats import Seats, seats_of
from fedcor.selectors.gp.greedy import Picks, Prior, select, select_proxy, take_apart
from fedcor.selectors.gp_selector import ProcessSelector, is_fitted, is_seen


@plain_keywords
@dataclass(frozen=True)
class FedCor(ProcessSelector):
    """FedCor (the paper's Algorithms 1 and 2): clients whose training lowers everyone's loss most.

    It learns a Gaussian process over the loss changes of all clients, and picks one client after
    another: the one with the largest expected decrease of the global loss, given those picked
    before it. So clients that are correlated with many others are preferred, and those that would
    repeat an earlier pick are not. In the warm-up and at every refit, all available clients, or a
    sample of them, are asked for their losses, which is billed; the other rounds cost the same as
    random selection. While not a single loss change could be measured, the choice stays uniform, as
    in the warm-up.

    The defaults are the paper's for FMNIST (Sec. 5 and Appendix C); where the paper gives no value,
    that is said. For CIFAR-10 it has warmup = 20, interval = 50, discount = 0.99 and beta = 0.9.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        warmup: W, rounds of uniform choice at the start. Each measures the loss changes of its own
            choice as one sample, and refits the process.
        interval: Δt, rounds between refits after the warm-up: in rounds t with t % Δt == 0.
        samples_per_refit: S, uniform selections that are tried and measured at such a refit.
        warmup_history: M in the warm-up, earlier measured rounds whose samples are used again.
        history: M after the warm-up.
        discount: θ, in [0, 1]. A sample that is m rounds old has the weight θ^m.
        dimension: d, the length of a client's embedding x_k. The covariance of the loss changes of
            clients i and k is x_i'x_k.
        noise: s, the standard deviation of the noise in a loss change, above 0. The covariance is
            X X' + s² I. Not in the paper; it keeps the fit well-conditioned.
        warmup_steps: Adam steps per fit in the warm-up. Not in the paper.
        refit_steps: Adam steps per refit after the warm-up. Not in the paper.
        gp_learning_rate: Learning rate of Adam in these fits, above 0.
        probe_fraction: Share of the available clients that is asked for loss changes, in (0, 1]; a
            random sample, in which those who train for it always are. 1: everyone, as in the paper.
            Below 1, clients of whom no loss change is known have no part in the process; while
            there are any, they have a quarter of a round, at least one seat; the only seat of a
            round in one of four rounds.
        probe_clients: At most so many are asked, or as many as train; None for any number. With a
            number, clients that are not known are explored in the same way.
        beta: β, the annealing coefficient, in (0, 1). The gain of a client chosen τ times
            since the last refit is multiplied by β^τ. Small values spread the choice.

    Example:
        >>> from fedcor import FedCor
        >>> from fedcor.testing import FakeFederation
        >>> federation = FakeFederation.example(clients=12)
        >>> selector = FedCor(clients_per_round=3, warmup=5, interval=5, dimension=4)
        >>> state = selector.init(federation.population)
        >>> for _ in range(8):
        ...     chosen, state = selector.select(state, federation)
        ...     state = selector.observe(state, federation.train(chosen))
        >>> len(chosen), len(federation.tried)  # 5 samples in the warm-up, one at round 5
        (3, 6)
    """

    beta: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("beta", self.beta)

    def choose(self, state: State, federation: Federation) -> IntArray:
        """(C,) clients in the order of the greedy choice (Algorithm 1)."""
        p = federation.weights

        def pick(clients: IntArray, count: int, taken: IntArray) -> IntArray:
            return self.picks(state, p, clients, count, taken).clients

        return self._fill_seats(state, federation, pick, one_by_one=True)

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """What each pick was worth, taken apart: see `PickParts`.

        `explored` is 1 where the client has its seat for never having been seen by the process;
        it is there only where a sample of the clients is asked.

        There are none for a uniform choice: in the warm-up, and while the process is not fitted.
        """
        if int(state["round"]) <= self.warmup or not is_fitted(state) or not len(chosen):
            return {}
        picked = state["picked"].copy()
        picked[chosen] -= 1  # as it was before this choice
        seen = is_seen(state["embedding"])
        explored = ~seen[chosen]
        rivals = federation.available
        if self.probes_sample:  # who was never seen is explored, and no rival of those picked
            rivals = np.union1d(rivals[seen[rivals]], chosen)
        parts = take_apart(
            self._prior(state["embedding"], federation.weights, picked),
            chosen,
            rivals,
            admits=_admits(seats_of(federation), chosen),
            placed=explored if self.probes_sample else None,
        )
        return vars(parts) | ({"explored": explored.astype(float)} if self.probes_sample else {})

    def picks(
        self,
        state: State,
        weights: FloatArray,
        available: IntArray,
        count: int | None = None,
        earlier: IntArray | None = None,
    ) -> Picks:
        """The greedy choice for a state, with what each pick was worth.

        Args:
            state: A state that has been fitted at least once.
            weights: (N,) p_k.
            available: Ids of the clients that can be picked.
            count: Number of picks; C if it is not given.
            earlier: Ids of clients that were picked before.
        """
        count = self.clients_per_round if count is None else count
        prior = self._prior(state["embedding"], weights, state["picked"])
        return select(prior, count, available, earlier)

    def _prior(self, X: FloatArray, weights: FloatArray, picked: IntArray) -> Prior:
        return Prior(X, weights, _annealing(self.beta, picked), self.noise**2)


def _annealing(beta: float, picked: IntArray) -> FloatArray:
    """(N,) beta^tau of each client; a power for each client would cost as much as some picks."""
    powers: FloatArray = beta ** np.arange(picked.max(initial=0) + 1)
    return powers[picked]


def _admits(seats: Seats | None, chosen: IntArray) -> Callable[[int, int], bool] | None:
    """Whether the rules let a client have place j of a round, those of `chosen` before it seated.

    None if there are no rules.
    """
    if seats is None:
        return None
    at = [seats]
    for client in chosen[:-1].tolist():
        at.append(at[-1].give(client))
    return lambda place, client: at[place].admits(client)


@plain_keywords
@dataclass(frozen=True)
class Proxy(ProcessSelector):
    """The proxy algorithm of the paper's convergence proof (Appendix B).

    It takes the clients k with the largest sum_i p_i Σ_ik, whose losses change most together with
    everyone's, even where they repeat each other. It learns Σ just as `FedCor` does, and has the
    same parameters and defaults, but no `beta`.

    Args:
        clients_per_round: C, the number of clients that train in a round.
        warmup, interval, samples_per_refit, warmup_history, history, discount, dimension, noise,
            warmup_steps, refit_steps, gp_learning_rate, probe_fraction, probe_clients: As in
            `FedCor`.

    Example:
        >>> from fedcor import Proxy
        >>> Proxy(clients_per_round=5, dimension=10).interval
        10
    """

    def choose(self, state: State, federation: Federation) -> IntArray:
        """(C,) clients, the largest sum of covariances first."""
        X, p, s2 = state["embedding"], federation.weights, self.noise**2

        def pick(clients: IntArray, count: int, taken: IntArray) -> IntArray:  # noqa: ARG001
            return select_proxy(X, p, s2, count, clients)

        return self._fill_seats(state, federation, pick)
