"""FedCor (Tang et al., CVPR 2022) and the proxy algorithm of its convergence proof."""

from __future__ import annotations

from dataclasses import dataclass

from fedcor.checks import check_fraction
from fedcor.gp import Picks, select, select_proxy
from fedcor.selectors.process import ProcessSelector
from fedcor.types import Federation, FloatArray, IntArray, Reasons, State

__all__ = ["FedCor", "Proxy"]


@dataclass(frozen=True)
class FedCor(ProcessSelector):
    """Greedy choice under the posterior of the learnt process, annealed (the paper's Algorithms 1 and 2)."""

    beta: float = 0.95  # annealing coefficient

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("beta", self.beta)

    def choose(self, state: State, federation: Federation) -> IntArray:
        return self.picks(state, federation.weights, federation.available).clients

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """Each pick's gain over the others, what the picks before it took from that, and its annealing; none in warm-up."""
        if int(state["round"]) <= self.warmup or not len(chosen):
            return {}
        picked = state["picked"].copy()
        picked[chosen] -= 1  # as it was before this choice
        picks = self.picks({**state, "picked": picked}, federation.weights, federation.available)
        return {"gain": picks.gain, "redundancy": picks.redundancy, "annealing": picks.annealing}

    def picks(self, state: State, weights: FloatArray, available: IntArray) -> Picks:
        """The choice with its reasons: each pick's gain, redundancy and annealing."""
        alpha = self.beta ** state["picked"]
        return select(
            state["embedding"], weights, alpha, self.noise**2, self.clients_per_round, available
        )


@dataclass(frozen=True)
class Proxy(ProcessSelector):
    """The proxy algorithm (Appendix B): the clients whose losses move most with everyone's, redundant or not."""

    def choose(self, state: State, federation: Federation) -> IntArray:
        return select_proxy(
            state["embedding"],
            federation.weights,
            self.noise**2,
            self.clients_per_round,
            federation.available,
        )
